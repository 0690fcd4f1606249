"""Test nodes that receive bad or too many requests, and nodes with stuck loops or broken block ledgers."""

import asyncio
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.media import ImageEncoder, ImageFeatures, ImageSupport
from engine.token_masks import TokenMatcher
from node import active_requests
from node.active_requests import RequestRules
from node.watchdog import Watched
from scheduler.role import DECODE
from scheduler.scheduler import StepLimits
from shared.grammar import GrammarTokenizer, lark_grammar
from shared.lifecycle import wait_until
from shared.rpc.messages import Media, RouterCommand, SamplingParams, pack_ids
from tests.cluster.harness import cluster, completion, wait_for
from tests.engine.grammars import ENDLESS, tokenizer_of
from tests.node.harness import (
    VOCABULARY,
    HashNode,
    RouterLine,
    UnreadLine,
    attached,
    hash_node,
    quiet,  # noqa: F401
    submission,
)

IMAGE = Media(0, 1, 2, bytes(16), 2, 1, bytes(6))


def large_node(**more: Any) -> HashNode:
    return hash_node(DECODE, num_blocks=2000, limits=StepLimits(8, 8), max_model_len=1 << 16, **more)


# ---- the watchdog ----------------------------------------------------------------------------------------------------


def test_only_running_time_without_progress_counts() -> None:
    turns = 0
    watched = Watched("the engine", lambda: turns, lambda: 5.0)
    assert not any(watched.is_stuck(0.5) for _ in range(10))
    turns += 1
    assert not any(watched.is_stuck(0.5) for _ in range(11)), "progress restarts the clock"
    assert watched.is_stuck(0.5)


# ---- what routers send -----------------------------------------------------------------------------------------------


async def test_the_rejection_of_a_malformed_submit_names_the_field() -> None:
    """tests/bad_input/test_messages.py covers all fields."""
    here = hash_node(DECODE)
    async with attached(here) as line:
        line.submit(submission("bad", sampling=SamplingParams(temperature=float("nan"))), submission("good"))
        assert await wait_until(lambda: line.finishes("good") in (["stop"], ["length"]), 5.0)
        (refusal,) = [delta for delta in line.deltas if delta.id == "bad"]
        assert "temperature" in refusal.error
        assert (refusal.retry, here.node.requests.num_tokens) == (False, 0)


@pytest.mark.parametrize("rules", [RequestRules(VOCABULARY, max_requests=10), RequestRules(VOCABULARY, max_tokens=30)])
async def test_a_flood_is_bounded_and_may_be_retried_on_another_node(rules: RequestRules) -> None:
    here = hash_node(DECODE, rules=rules)
    async with attached(here) as line:
        line.submit(*(submission(f"r{index}") for index in range(200)))
        assert await wait_until(lambda: len(line.errors()) == 190, 5.0)
        assert all(retry and "no more fit" in error for error, retry in line.errors())
        await here.empty()
        assert here.scheduler.counters.generated_tokens == 40, "requests within the limit are served"


class GatedEncoder(ImageEncoder):
    """An encoder that waits until the test lets it continue."""

    shape = 1, 4

    def __init__(self) -> None:
        self.num_encoded = self.num_cached = 0
        self.gate = threading.Event()

    def features(self, image: Media) -> ImageFeatures:
        assert self.gate.wait(60)
        self.num_encoded += 1
        return ImageFeatures(torch.zeros(image.rows * image.columns, 4))

    def kept(self, image: Media) -> None:
        return None


async def test_steps_go_on_while_images_are_encoded_and_an_abort_leaves_nothing() -> None:
    encoder = GatedEncoder()
    here = hash_node(DECODE, rules=RequestRules(VOCABULARY, images=ImageSupport(encoder=encoder)))
    async with attached(here) as line:
        line.submit(*(submission(name, media=[IMAGE]) for name in ("aborted", "kept")), submission("text"))
        assert await wait_until(lambda: bool(line.finishes("text")), 30.0)
        assert not line.finishes("kept")
        line.abort("aborted")
        assert await wait_until(lambda: len(here.node.requests) == 1, 30.0)
        encoder.gate.set()
        assert await wait_until(lambda: bool(line.finishes("kept")), 30.0)
        await here.empty()
        assert not line.tokens("aborted")
        assert here.node.stats().images_encoded == encoder.num_encoded > 0


async def test_a_node_without_an_encoder_refuses_pixels_and_takes_kv_of_images() -> None:
    here = hash_node(DECODE)
    async with attached(here) as line:
        line.submit(submission("pixels", media=[IMAGE]), submission("kv", media=[replace(IMAGE, pixels=b"")]))
        assert await wait_until(lambda: bool(line.finishes("kv")), 30.0)
        ((error, retry),) = line.errors()
        assert "cannot encode images" in error
        assert not retry


async def test_a_router_aborts_only_its_own_requests_and_ids_are_unique() -> None:
    here = large_node(max_routers=2)
    async with attached(here) as line:
        other, third = RouterLine("other"), RouterLine("third")
        sessions = [asyncio.ensure_future(here.node.attach(one)) for one in (other, third)]
        other.say_hello()
        await asyncio.sleep(0)
        third.say_hello()
        await asyncio.wait_for(sessions[1], 5.0)
        line.submit(submission("r", max_tokens=3000))
        assert await wait_until(lambda: "r" in here.node.requests, 5.0)
        other.commands.put_nowait(RouterCommand("other", [submission("r", router="other")], aborts=["r", "unknown"]))
        assert await wait_until(lambda: bool(other.errors()), 5.0)
        assert "already on this node" in other.errors()[0][0]
        assert "r" in here.node.requests
        line.abort("r", "r")
        await here.empty()
        other.hang_up()
        await sessions[0]


async def test_grammars_are_compiled_before_the_engine_gets_their_requests(tmp_path: Path) -> None:
    """The hash model ignores grammars, but an answer with a grammar may stop before it has `min_tokens` tokens."""
    tokenizer_of().save(str(tmp_path / "tokenizer.json"))
    here = large_node(rules=RequestRules(VOCABULARY, grammars=GrammarTokenizer(tmp_path, VOCABULARY)))
    async with attached(here) as line:
        every = pack_ids(range(VOCABULARY))
        line.submit(
            submission("bad", grammar=lark_grammar("start: foo")),
            submission("gone", grammar=ENDLESS, max_tokens=3000),
            submission("bound", grammar=ENDLESS, min_tokens=3, stop_tokens=every),
            submission("plain", min_tokens=3, stop_tokens=every),
        )
        line.abort("gone")
        assert await wait_until(lambda: line.finishes("bound") == line.finishes("plain") == ["stop"], 20.0)
        assert [len(line.tokens(name)) for name in ("bound", "plain")] == [1, 3]
        assert line.errors() == [('the grammar does not compile: at 1(8): unknown name: "foo"', False)]
        assert not any(delta.id == "gone" for delta in line.deltas)
        await here.empty()


async def test_grammars_are_compiled_for_tenants_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars of aborted requests are not compiled."""
    tokenizer_of().save(str(tmp_path / "tokenizer.json"))
    compiled, gate = list[str](), threading.Event()

    def compile_slowly(_: GrammarTokenizer, grammar: str) -> TokenMatcher:
        compiled.append(grammar)
        gate.wait(60)
        raise ValueError("no grammar")

    monkeypatch.setattr(active_requests, "TokenMatcher", compile_slowly)
    here = large_node(rules=RequestRules(VOCABULARY, grammars=GrammarTokenizer(tmp_path, VOCABULARY)))
    async with attached(here) as line:
        for number in range(20):
            line.submit(submission(str(number), grammar=str(number), tenant="a"))
        line.submit(submission("other", grammar="other", tenant="b"))
        assert await wait_until(lambda: bool(compiled) and len(here.node.requests) == 21, 60.0)
        line.abort(*(str(number) for number in range(18)))
        assert await wait_until(lambda: len(here.node.requests) == 3, 60.0)
        gate.set()
        assert await wait_until(lambda: line.errors() == [("no grammar", False)] * 3, 60.0)
        assert compiled == ["0", "18", "other", "19"]
        await here.empty()


async def test_a_released_request_is_not_computed_when_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared pool, the blocks of a released request may already belong to another request."""
    compiled = threading.Event()
    monkeypatch.setattr(active_requests, "TokenMatcher", lambda *_: compiled.wait(60))
    here = large_node(rules=RequestRules(VOCABULARY, grammars=GrammarTokenizer(Path(), VOCABULARY)))
    async with attached(here) as line:
        request = here.node.requests.register(line.name, submission(grammar="slow"))
        await here.node.requests.release(request)
        compiled.set()
        assert not await wait_until(lambda: here.node.stats().steps > 0, 0.3)
        here.node.requests.abort("r")
        await here.empty()


async def test_a_node_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    here = hash_node(DECODE, rules=RequestRules(VOCABULARY, grammars=GrammarTokenizer(tmp_path, VOCABULARY)))
    async with attached(here) as line:
        line.submit(submission(grammar=ENDLESS), submission("plain"))
        assert await wait_until(lambda: bool(line.errors()), 5.0)
        assert "tokenizer.json" in line.errors()[0][0]
        assert await wait_until(lambda: bool(line.finishes("plain")), 5.0)


@pytest.mark.usefixtures("quiet")
async def test_a_router_that_does_not_read_loses_its_requests_and_its_stream() -> None:
    here = large_node(max_unread=20)
    async with attached(here):
        unread, again, last = UnreadLine("other"), RouterLine("other"), RouterLine("other")
        session = asyncio.ensure_future(here.node.attach(unread))
        unread.say_hello()
        unread.submit(submission("r", max_tokens=3000))
        await asyncio.wait_for(session, 10.0)
        assert not here.node.sessions.is_attached("other")
        await here.empty()
        second = asyncio.ensure_future(here.node.attach(again))  # still open when the router reconnects once more
        again.say_hello()
        await asyncio.sleep(0)
        third = asyncio.ensure_future(here.node.attach(last))
        last.say_hello()
        await asyncio.wait_for(second, 5.0)
        last.submit(submission("r2"))
        assert await wait_until(lambda: last.finishes("r2") == ["length"], 5.0), "the last stream is the valid one"
        last.hang_up()
        await third


@pytest.mark.usefixtures("quiet")
async def test_a_node_with_a_broken_ledger_rejects_new_requests_and_finishes_others() -> None:
    here = large_node()
    async with attached(here) as line:
        line.submit(submission("runs", max_tokens=2000))
        assert await wait_until(lambda: here.scheduler.counters.steps > 1, 5.0)
        here.node.engine.post(lambda scheduler: scheduler.pool.take(1))  # no request owns this block
        assert await wait_until(lambda: here.node.stats().state == "breached", 10.0)
        line.submit(submission("late"))
        assert await wait_until(lambda: bool(line.errors()), 5.0)
        assert ("block ledger is broken" in line.errors()[0][0], line.errors()[0][1]) == (True, True)
        assert await wait_until(lambda: line.finishes("runs") == ["length"], 120.0), "running requests continue"
        assert not here.node.fatal_error.done()


# ---- real processes --------------------------------------------------------------------------------------------------

SLOW = {"failpoint": "engine.step:*=sleep-0.05"}
NODES: dict[str, tuple[dict[str, object], int]] = {  # by name: settings, and expected exit status
    "decode-0": ({"failpoint": "engine.step:40=hang", "stuck_s": 1}, 70),
    "decode-1": ({"failpoint": "engine.step:40=raise"}, 70),
    "decode-2": ({"failpoint": "node.accepted:2=hang", "stuck_s": 1}, 70),
    "decode-3": (SLOW | {"drain_timeout_s": 0.5}, 0),  # gets SIGTERM
    "decode-4": (SLOW, 128 + signal.SIGTERM),  # gets SIGTERM twice
}


def test_processes_that_are_stuck_failed_or_terminated_exit_with_the_right_status() -> None:
    own = {name: settings for name, (settings, _) in NODES.items()}
    with cluster(0, len(NODES), own=own, mode="colocated", allow_failpoints=True) as running, ExitStack() as cleanup:
        for number in range(2 * len(NODES)):
            body = completion(running.model, [5, 6, 7 + number], 3000, stream=True)
            cleanup.enter_context(running.send(body))
        wait_for(lambda: all(running.nodes()[name]["running"] for name in ("decode-3", "decode-4")), "slow requests")
        for name in ("decode-3", "decode-4"):
            running.send_signal(name, signal.SIGTERM)
        wait_for(lambda: running.nodes()["decode-4"]["state"] == "draining", "the node drains")
        running.send_signal("decode-4", signal.SIGTERM)
        statuses = {name: running.processes[name].wait(60) for name in NODES}
        assert statuses == {name: status for name, (_, status) in NODES.items()}
        assert "made no progress for 1.0 s" in running.log("decode-0")
        assert "the event loop made no progress" in running.log("decode-2")
        assert running.status()["requests"]["moved"] > 0
