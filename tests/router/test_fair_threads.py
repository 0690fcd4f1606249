"""Test the threads that serve tenants in turn, and that they isolate tenants while requests are parsed."""

import asyncio
import json
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.requests import ModelCard
from router.http import parsing
from router.http.asgi import Identity
from router.http.bodies import ChatBody, CompletionBody, parse_body
from router.http.generation import GenerationService
from router.http.parsing import build_requests, run_in_thread
from router.metrics.request_metrics import RequestMetrics
from router.observer import RouterObserver
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError, UnavailableError
from shared.fair_threads import FairThreads
from tests.router.scripted import ScriptedDispatcher

MODEL = ModelCard("m", max_model_len=4000, vocab_size=330, eos_ids=frozenset({2}))


class HeldThreads(FairThreads):
    """One thread, which begins to work when `release` is set."""

    def __init__(self) -> None:
        super().__init__(1, "held")
        self.release = threading.Event()
        self.submit("first", self.release.wait, 60)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldThreads]:
    threads = HeldThreads()
    monkeypatch.setattr(parsing, "THREADS", threads)
    yield threads
    threads.release.set()


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_each_tenant_gets_every_turn_while_it_has_work(tenants: list[str]) -> None:
    threads, done = HeldThreads(), list[tuple[str, int]]()
    futures = [threads.submit(tenant, done.append, (tenant, number)) for number, tenant in enumerate(tenants)]
    threads.release.set()
    for future in futures:
        future.result(60)
    rounds = {name: [number for tenant, number in done if tenant == name] for name in "abc"}
    assert all(numbers == sorted(numbers) for numbers in rounds.values()), "the order of one tenant is kept"
    expected, turns = [], dict.fromkeys(tenants)
    for turn in range(len(tenants)):
        expected += [(name, rounds[name][turn]) for name in turns if turn < len(rounds[name])]
    assert done == expected


def test_cancelled_work_is_skipped_and_errors_reach_the_caller() -> None:
    threads = HeldThreads()
    skipped, failed, last = (threads.submit("a", work) for work in (list, lambda: 1 / 0, lambda: 7))
    assert skipped.cancel()
    threads.release.set()
    assert last.result(60) == 7
    with pytest.raises(CancelledError):
        skipped.result(60)
    with pytest.raises(ZeroDivisionError):
        failed.result(60)


def test_cancelled_work_takes_no_turn_and_no_memory() -> None:
    threads, done = HeldThreads(), list[str]()

    class Body:
        pass

    body = Body()
    freed = weakref.ref(body)
    for _ in range(20):
        assert threads.submit("a", id, body).cancel()
    del body
    assert freed() is None
    futures = [threads.submit(tenant, done.append, tenant) for tenant in "bbba"]
    threads.release.set()
    for future in futures:
        future.result(60)
    assert done == ["a", "b", "b", "b"], "the turn of `a` came before `b` had work"


async def test_the_deadline_applies_while_a_request_waits_for_a_thread(byte_level: Tokenizer) -> None:
    service = GenerationService(
        ScriptedDispatcher(lambda *_: []), byte_level, MODEL, RouterObserver(), RequestMetrics("m")
    )
    threads = HeldThreads()
    service.grammars.threads = threads
    raw = json.dumps({"prompt": "x", "response_format": {"type": "json_object"}}).encode()
    body = parse_body(CompletionBody, raw, "m")
    with pytest.raises(UnavailableError) as late:
        await service.build(body, "id", Identity("a"), deadline=time.monotonic() + 0.05)
    threads.release.set()
    assert late.value.status == 504


async def test_many_chats_of_one_tenant_do_not_delay_another_tenant(held: HeldThreads, byte_level: Tokenizer) -> None:
    order = list[str]()

    async def build(tenant: str) -> None:
        body = parse_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode(), "m")
        await build_requests(body, MODEL, byte_level, "id", identity=Identity(tenant))
        order.append(tenant)

    tasks = [asyncio.create_task(build("many")) for _ in range(50)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(build("one")))
    await asyncio.sleep(0)
    held.release.set()
    await asyncio.gather(*tasks)
    assert "one" in order[:3], order


async def test_other_requests_run_between_the_prompts_of_a_request(byte_level: Tokenizer) -> None:
    raw = json.dumps({"prompt": ["x"] * 50, "max_tokens": 1}).encode()
    task = asyncio.create_task(build_requests(parse_body(CompletionBody, raw, "m"), MODEL, byte_level, "id"))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(task.result()) == 50
    assert turns >= 50


async def test_a_timeout_reports_whether_the_work_began(held: HeldThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "ENCODE_S", 0.05)
    with pytest.raises(UnavailableError, match="Too many of your requests") as waiting:
        await run_in_thread("a", list)
    assert waiting.value.status == 429
    working = threading.Event()
    monkeypatch.setattr(parsing, "THREADS", FairThreads(1, "free"))
    with pytest.raises(RequestError, match="send a shorter one"):
        await run_in_thread("a", working.wait, 60)
    working.set()
