"""Handoffs between two real nodes, while one request's own code raises, rows are damaged and pools are too small."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import node.node
import node.output_publisher
from decode_node.receiver import HandoffReceiver
from node.node import Node
from prefill_node import decode_peers as peers_module
from prefill_node.sender import HandoffSender
from scheduler.scheduler import Scheduler
from shared import failpoints
from shared.failpoints import FailpointError
from shared.kv.channel import KVChannel, PeerLostError
from shared.lifecycle import wait_until
from shared.rpc.messages import ReserveRequest
from shared.rpc.methods import RESERVE, RpcServer
from tests.prefill_node.pair import Pair, expected, pair

VICTIM = "victim"
SITES = [site for site in failpoints.SITES if not site.startswith("router.") and site != "engine.step"]
# Functions of one request: where they are, and which of their arguments says whose they are.
HOOKS: list[tuple[Any, str, Callable[..., str]]] = [
    (HandoffSender, "on_submit", lambda _self, _submit, request: request.id),
    (HandoffSender, "on_admitted", lambda _self, identity: identity),
    (HandoffSender, "on_progress", lambda _self, row: row.request.id),
    (HandoffReceiver, "on_room_found", lambda _self, request: request.id),
    (HandoffReceiver, "_grant", lambda _self, _message, request: request.id),
    (HandoffReceiver, "_check", lambda _self, landing, _sums: landing.request.id),
    (HandoffReceiver, "_flaw", lambda _self, landing, _message: landing.request.id),
    (Scheduler, "add", lambda _self, request: request.id),
    (Scheduler, "kv_received", lambda _self, request, _token: request.id),
    (Scheduler, "_advance", lambda _self, request, _end: request.id),
    (Scheduler, "_append", lambda _self, request, _token: request.id),
    (Node, "_publish", lambda _self, delta, _at: delta.id),
    (node.output_publisher, "delta_of", lambda event, _output: event.request.id),
    (node.node, "check_submit", lambda submit, _most, _size: submit.id),
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is planted here is logged with its traceback, as it should be."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    failpoints.watcher = None


def broken(function: Callable[..., Any], whose: Callable[..., str]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        if whose(*given).startswith(VICTIM):
            raise RuntimeError("planted")
        return function(*given)

    return call


async def only_the_victim_fails(here: Pair, what: str) -> None:
    """Mates before and behind it in every queue; the nodes are as before afterwards."""
    victim_name = f"{VICTIM}-{what}"
    names = [f"mate-0-{what}", victim_name, f"mate-1-{what}", f"mate-2-{what}"]
    rows = [[3 + (7 * index + at) % 90 for at in range(10 + index)] for index in range(4)]
    for name, row in zip(names, rows, strict=True):
        here.submit(name, row, 5)
    told = await wait_until(lambda: all(here.sent[name].is_over for name in names if name != victim_name), 20.0, 0.005)
    assert told, f"{what}: a mate waits for ever"
    for name in names:
        row = here.sent[name].row()
        assert name == victim_name or row == expected(here.sent[name].prompt, 5), f"{what}: {name}"
        assert name == victim_name or not here.sent[name].errors, what
    victim = here.sent[victim_name]
    if "landed" not in what and "land" not in what:  # there only the answer to the writer is lost
        assert await wait_until(lambda: victim.is_over, 20.0), f"{what}: nobody heard how it ended"
        assert all(delta.retry or delta.error == "internal" for delta in victim.errors), what
    here.abort(victim_name)
    await here.empty()


async def test_an_exception_at_any_site_of_one_request_fails_that_request_alone(tmp_path: Path) -> None:
    reached: set[str] = set()
    async with pair("tcp", tmp_path) as here:
        for site in SITES:

            def watch(passed: str, detail: str, site: str = site) -> None:
                if passed == site and detail.startswith(VICTIM):
                    reached.add(site)
                    raise FailpointError("planted")

            failpoints.watcher = watch
            await only_the_victim_fails(here, site)
        assert reached == set(SITES)
        assert not here.prefill.fatal_error.done()
        assert not here.decode.fatal_error.done()


async def test_an_exception_in_any_function_of_one_request_fails_that_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair("shm", tmp_path) as here:
        for owner, name, whose in HOOKS:
            function = getattr(owner, name)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken(function, whose))
                # The sides gave their methods away when they were made.
                patch.setattr(here.prefill, "on_send_submitted", here.courier.on_submit)
                patch.setattr(here.prefill, "on_send_admitted", here.courier.on_admitted)
                patch.setattr(here.prefill, "on_progress", here.courier.on_progress)
                patch.setattr(here.decode, "on_room_found", here.receiver.on_room_found)
                await only_the_victim_fails(here, name)
        assert not here.prefill.fatal_error.done()
        assert not here.decode.fatal_error.done()


# ---- rows and links --------------------------------------------------------------------------------------------------


class Damaging:
    """A channel that flips a bit of the row `at` of a prompt on its way, as many times as it is told to."""

    def __init__(self, inner: KVChannel, here: Pair, times: int, at: int) -> None:
        self._inner, self._here, self._left, self._at = inner, here, times, at
        self._seen: dict[int, None] = {}  # target rows, in order
        self.name, self.fenced = inner.name, inner.fenced

    def reachable(self, card: bytes) -> bool:
        return self._inner.reachable(card)

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        await self._inner.push(card, ticket, source, target)
        self._seen |= dict.fromkeys(target)
        damaged = [row for place, row in enumerate(self._seen) if place == self._at and row in target]
        if damaged and self._left:
            self._left -= 1
            self._here.memories[1].rows[damaged[0], 5] ^= 1


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("at", [0, 3, 4])
@pytest.mark.parametrize("times", [1, 2])
async def test_damaged_rows_are_pushed_once_more_and_never_read(kind: str, at: int, times: int, tmp_path: Path) -> None:
    """The last row is told with the commit."""
    prompt = list(range(3, 21))
    async with pair(kind, tmp_path) as here:
        here.courier._peers._channels = [Damaging(here.channels[0], here, times, at)]
        sent = here.submit("r", prompt, 6)
        assert await wait_until(lambda: sent.is_over, 10.0)
        ticker = here.prefill.handoff_counters
        if times == 1:
            assert (sent.row(), sent.errors, ticker.handoffs) == (expected(prompt, 6), [], 1)
        else:
            assert ("checksums differ" in sent.errors[0].error, sent.errors[0].retry) == (True, True)
            assert (len(sent.row()), ticker.handoffs) == (1, 0), "only the first token, which the prefill node sampled"
        assert here.decode.stats().rows_corrupt == times
        await here.empty()


class Refusing(Damaging):
    """Nobody listens at the other end, as long as it is told so."""

    refuses, tries = True, 0

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        self.tries += 1
        if self.refuses:
            raise PeerLostError("connection refused")
        await super().push(card, ticket, source, target)


async def test_a_link_that_fails_again_and_again_is_left_alone_and_tried_again_later(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as here:
        link = Refusing(here.channels[0], here, 0, 0)
        here.courier._peers._channels = [link]
        for index in range(8):
            sent = here.submit(f"r{index}", [5, 6, 7 + index], 4)
            assert await wait_until(lambda sent=sent: sent.is_over, 10.0)
            assert sent.errors[0].retry
        assert link.tries == 5, "after 5 failures no bytes are risked"
        assert "left alone" in sent.errors[0].error
        await here.empty()
        link.refuses = False
        worked = False
        for index in range(8, 200):
            sent = here.submit(f"r{index}", [5, 6, 7 + index % 80], 4)
            assert await wait_until(lambda sent=sent: sent.is_over, 10.0)
            if worked := not sent.errors:
                break
            await asyncio.sleep(0.05)
        assert worked, "after a second one is let through, and it works"
        assert here.submit("last", [8, 9, 10], 4).errors == []
        assert await wait_until(lambda: here.sent["last"].is_over, 10.0)
        assert here.sent["last"].row() == expected([8, 9, 10], 4)
        await here.empty()


async def test_a_decode_node_that_says_nothing_is_given_up_with_all_that_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port takes every call and answers none, as behind a partition: nobody waits the whole time for room."""
    monkeypatch.setattr(peers_module, "RENEW_S", 0.05)
    monkeypatch.setattr(peers_module, "CALL_S", 0.2)
    asked: list[ReserveRequest] = []

    async def mute(stream: Any) -> None:
        asked.append(await stream.recv_message())
        await asyncio.Event().wait()

    server = RpcServer({RESERVE: mute})
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with pair("tcp", tmp_path, reserve_s=600.0) as here:
        monkeypatch.setattr(here, "address", address)
        for index in range(3):
            here.submit(f"r{index}", [5, 6, 7 + index], 4)
        assert await wait_until(lambda: all(sent.errors for sent in here.sent.values()), 20.0)
        assert all(sent.errors[0].retry for sent in here.sent.values())
        assert asked
        await here.empty()
    await server.close()


# ---- pools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_pools_of_two_prompts_serve_a_burst_without_anybody_waiting_for_each_other(
    kind: str, tmp_path: Path
) -> None:
    """The prefill node's blocks are full of prompts that wait for room, the decode node's of half-filled ones. A
    prompt is admitted only where all of it fits beside what the others still need, and the decode node reserves the
    whole of it before a row moves: so whoever was granted room can always finish."""
    rng = random.Random(4)
    async with pair(kind, tmp_path, prefill_blocks=12, decode_blocks=12) as here:
        for index in range(30):
            prompt = [rng.randrange(3, 97) for _ in range(rng.randrange(12, 22))]
            here.submit(f"r{index}", prompt, rng.randrange(2, 12), local=index % 5 == 0)
        assert await wait_until(lambda: all(sent.is_over for sent in here.sent.values()), 20.0), "nobody moves"
        for sent in here.sent.values():
            assert (sent.errors, sent.row()) == ([], expected(sent.prompt, sent.max_tokens))
        await here.empty()


async def test_a_decode_node_that_is_gone_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its lives has another address: what is known of the one before would stay for ever."""
    monkeypatch.setattr(peers_module, "GONE_S", 0.3)
    async with pair("tcp", tmp_path) as here:
        known = here.courier._peers._peers

        async def hand_off(name: str) -> None:
            sent = here.submit(name, [3, 4, 5, 6, 7], 2)
            assert await wait_until(lambda: sent.is_over, 5.0)
            await here.empty()
            assert sent.row() == expected(sent.prompt, 2)

        await hand_off("first")
        await asyncio.sleep(2 * peers_module.RENEW_S)
        assert list(known) == [here.address], "it lives, though nothing goes there"
        connection: Any = known[here.address].rpc._protocol
        connection.connection.close()  # as its process's end does
        assert await wait_until(lambda: not known, 5.0)
        await hand_off("second")
        assert list(known) == [here.address]
