"""Test the handoff sender of a real prefill node, over a real channel to a decode node whose replies the test sets."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.hash_model import HashRunner
from engine.runner import SliceOutput
from node.node import Node
from node.output_publisher import PrefillProgress
from prefill_node.decode_peers import DecodePeer, HandoffTiming
from prefill_node.sender import HandoffSender, OutgoingHandoff
from scheduler.geometry import Geometry
from scheduler.request import Request, Step
from scheduler.role import PREFILL
from shared.kv.channel import ChannelError, KVChannel
from shared.kv.memory import HostMemory, checksums
from shared.kv.tcp import TcpChannel
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    NodeStats,
    PushedNotice,
    RenewReply,
    RenewRequest,
    ReserveReply,
    ReserveRequest,
    StopRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from shared.rpc.methods import COMMIT, PUSHED, RENEW, RESERVE, STOP, RpcServer, unary
from tests.node.harness import (
    BLOCK_TOKENS,
    ROW_BYTES,
    VOCABULARY,
    HashNode,
    RouterLine,
    attached,
    compute_prompt,
    expected,
    hash_node,
    submission,
)

PROMPT = list(range(3, 21))  # 18 tokens: 5 blocks, 3 chunks of 8, 8 and 2 tokens
FIRST = expected(PROMPT, 1)[0]
TARGETS = [9, 2, 7, 4, 5]


class Decoder:
    """A simulated decode node. It records all messages. By default, it grants the blocks TARGETS to each
    reservation."""

    def __init__(self, memory: HostMemory, channel: KVChannel) -> None:
        self.rows, self.channel = memory.rows, channel
        self.descriptors = {channel.name: channel.descriptor()}
        self.received: list[Any] = []
        self.held, self.targets = 0, TARGETS  # number of blocks that it has in its cache, and all blocks of the prompt
        self.errors: dict[type, str] = {}  # errors in its replies, by type of message
        self.quarantined: dict[bytes, None] = {}  # reservations that it gave up and whose writer has not stopped
        self.next_id = b""  # id of the next reservation; b"": a random id
        self.waits: dict[type, asyncio.Event] = {}  # events to await before a reply, by type of message
        self.server: RpcServer
        self.address = ""

    async def answer(self, message: Any) -> Any:
        self.received.append(message)
        if type(message) in self.waits:
            await self.waits[type(message)].wait()
        error = self.errors.get(type(message), "")
        if isinstance(message, StopRequest):
            self.quarantined.pop(message.reservation_id, None)
        if isinstance(message, RenewRequest):
            return RenewReply(error, bool(self.quarantined), b"".join(self.quarantined))
        if not isinstance(message, ReserveRequest) or error:
            return (ReserveReply if isinstance(message, ReserveRequest) else Ack)(error=error)
        reservation_id, targets = self.next_id or secrets.token_bytes(16), self.targets[self.held :]
        self.channel.grant(reservation_id, targets)
        return ReserveReply(reservation_id, self.held, pack_ids(targets), self.descriptors)

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    async def receives(self, kind: type, count: int = 1) -> Any:
        assert await wait_until(lambda: len(self.all(kind)) >= count, 5.0), self.received
        return self.all(kind)[count - 1]

    def checksums(self) -> bytes:
        """Return all received checksums in order."""
        return b"".join(
            message.checksums for message in self.received if isinstance(message, PushedNotice | CommitRequest)
        )


class StepwiseRunner(HashRunner):
    """A runner that computes each step only when the test releases it."""

    steps: threading.Semaphore

    def run(self, step: Step) -> list[SliceOutput]:
        self.steps.acquire()
        return super().run(step)


class BrokenChannel:
    """A channel that claims to reach every peer and fails every push."""

    name = "shm"
    fenced = False

    def reachable(self, _: bytes) -> bool:
        return True

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        raise ChannelError("the wire is cut")


@dataclass
class Bench(HashNode):
    decoder: Decoder
    steps: threading.Semaphore
    line: RouterLine

    @property
    def deltas(self) -> list[TokenDelta]:
        return self.line.deltas

    def stats(self) -> NodeStats:
        return self.node.stats()

    def submit(self, name: str = "r", max_tokens: int = 6) -> None:
        self.line.submit(submission(name, PROMPT, max_tokens, decode_node=self.decoder.address))

    async def abort(self, name: str = "r") -> None:
        self.line.abort(name)
        assert await wait_until(lambda: name not in self.node.requests, 5.0)

    async def failure(self) -> TokenDelta:
        """Wait until the node sends an error to the router. Check that the node sent no other error, and return it."""
        assert await wait_until(lambda: bool(self.line.errors()), 5.0)
        (failure,) = [delta for delta in self.deltas if delta.error]
        return failure


@asynccontextmanager
async def bench(
    steps: int = 1000, first: BrokenChannel | None = None, reserve_s: float = 5.0, **timing: float
) -> AsyncIterator[Bench]:
    """Start a prefill node, and release its first `steps` steps. The node prefers the channel `first` to tcp."""
    ours, theirs, name = HostMemory(20, ROW_BYTES), HostMemory(20, ROW_BYTES), secrets.token_hex(16)
    async with AsyncExitStack() as cleanup:
        writer = TcpChannel(ours, name, lambda _: None, "127.0.0.1")
        receiver = TcpChannel(theirs, secrets.token_hex(16), lambda _: None, "127.0.0.1")
        decoder = Decoder(theirs, receiver)
        decoder.server = RpcServer({rpc: unary(decoder.answer) for rpc in (RESERVE, PUSHED, COMMIT, STOP, RENEW)})
        decoder.address = f"127.0.0.1:{await decoder.server.start('127.0.0.1', 0)}"
        for end in (writer, receiver, decoder.server):
            cleanup.push_async_callback(end.close)
        channels: list[Any] = [first, writer] if first else [writer]
        decoder.descriptors |= {"shm": b"a descriptor"} if first else {}
        runner = StepwiseRunner(ours.rows, BLOCK_TOKENS, VOCABULARY)
        runner.steps = threading.Semaphore(steps)

        def make_sender(node: Node, memory: HostMemory) -> HandoffSender:
            return HandoffSender(node, memory, channels, reserve_s, HandoffTiming(**timing))

        here = hash_node(
            PREFILL, {"prefill": make_sender}, memory=ours, incarnation_id=name, runner=runner, heartbeat_s=30.0
        )
        line = await cleanup.enter_async_context(attached(here))
        cleanup.callback(runner.steps.release, 1000)
        yield Bench(**vars(here), decoder=decoder, steps=runner.steps, line=line)


def prompt_rows() -> NDArray[np.uint8]:
    """Return the rows that the prompt's five blocks must hold."""
    rows = np.zeros((6, ROW_BYTES), np.uint8)
    compute_prompt(rows, PROMPT, [1, 2, 3, 4, 5])
    return rows[1:]


@pytest.mark.parametrize("held", [0, 2])
async def test_a_prompt_is_moved_chunk_by_chunk_and_committed_with_its_first_token(held: int) -> None:
    async with bench(steps=1) as here:
        here.decoder.held = held
        here.submit()
        reserve = await here.decoder.receives(ReserveRequest)
        assert (reserve.writer, reserve.fingerprint) == (here.node.state.info.incarnation_id, "print")
        if held == 0:
            first = await here.decoder.receives(PushedNotice)
            assert first.checksums == checksums(prompt_rows(), [0, 1]), "before the next chunk is computed"
        here.steps.release(1)
        await here.decoder.receives(PushedNotice, 1 if held else 2)
        here.steps.release(1)
        commit = await here.decoder.receives(CommitRequest)
        assert commit.first_token == FIRST
        assert [(delta.position, unpack_ids(delta.tokens), delta.finish) for delta in here.deltas] == [(0, [FIRST], "")]
        assert (here.decoder.rows[TARGETS[held:]] == prompt_rows()[held:]).all()
        assert here.decoder.checksums() == checksums(here.decoder.rows, TARGETS[held:])
        await here.empty()
        assert here.decoder.all(StopRequest) == []
        load = here.stats()
        assert (load.handoffs, load.handoffs_failed, load.channel_fallbacks) == (1, 0, 0)
        assert (load.blocks_moved, load.bytes_moved) == (5 - held, (5 - held) * ROW_BYTES)
        assert load.channels == {here.decoder.address: "tcp"}
        assert load.blocks_cached > 0, "the prompt stays as prefix cache"


@pytest.mark.parametrize("phase", [ReserveRequest, PushedNotice, CommitRequest])
async def test_a_refusal_in_any_phase_is_reported_to_the_router_and_the_peer(phase: type) -> None:
    async with bench(steps=1) as here:
        here.decoder.errors[phase] = "not today"
        here.submit()
        await here.decoder.receives(ReserveRequest if phase is ReserveRequest else PushedNotice)
        here.steps.release(1000)
        failure = await here.failure()
        assert (failure.id, failure.retry) == ("r", True)
        assert "not today" in failure.error
        assert failure.error.startswith("handoff: ")
        stops = here.decoder.all(StopRequest)
        assert len(stops) == (phase is not ReserveRequest), "without a reservation there is nothing to stop"
        assert all("not today" in stop.reason for stop in stops)
        assert len(here.decoder.all(CommitRequest)) == (phase is CommitRequest)
        await here.empty()
        assert (here.stats().handoffs, here.stats().handoffs_failed) == (0, 1)
        await here.line.ends("r")
        assert ("reserving" in here.line.kinds("r")) == (phase is not ReserveRequest)


@pytest.mark.parametrize("phase", ["reserving", "between chunks", "pushing", "committing"])
async def test_an_abort_in_any_phase_stops_the_decode_node_and_sends_the_router_no_error(phase: str) -> None:
    waits = {"reserving": ReserveRequest, "pushing": PushedNotice, "committing": CommitRequest}.get(phase)
    async with bench(steps=1) as here:
        proceed = asyncio.Event()
        if waits is not None:
            here.decoder.waits[waits] = proceed
        here.submit()
        await here.decoder.receives(ReserveRequest if phase == "reserving" else PushedNotice)
        if phase == "committing":
            here.steps.release(2)
            await here.decoder.receives(CommitRequest)
        await here.abort()
        assert here.decoder.all(StopRequest) == [] or waits is None, "the call under way ends first"
        proceed.set()
        here.steps.release(1000)
        assert (await here.decoder.receives(StopRequest)).reason == "aborted"
        await here.empty()
        assert len(here.decoder.all(StopRequest)) == 1
        assert len(here.decoder.all(CommitRequest)) == (phase == "committing")
        assert not any(delta.error for delta in here.deltas)
        assert (here.stats().handoffs, here.stats().handoffs_failed) == (0, 0)


async def test_a_request_that_ends_at_its_first_token_is_not_committed() -> None:
    async with bench(steps=0) as here:
        here.submit(max_tokens=1)
        await here.decoder.receives(ReserveRequest)
        here.steps.release(1000)
        stop = await here.decoder.receives(StopRequest)
        assert stop.reason == "finished: length"
        assert [(unpack_ids(delta.tokens), delta.finish, delta.error) for delta in here.deltas] == [
            ([FIRST], "length", "")
        ]
        await here.empty()
        assert here.decoder.all(CommitRequest) == []
        assert (here.stats().handoffs, here.stats().handoffs_failed) == (0, 0)


async def test_a_push_that_begins_after_the_request_has_ended_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(steps=0) as here:
        sender = here.node.role
        assert isinstance(sender, HandoffSender)
        report, failures = sender.on_progress, list[str]()

        def report_late(progress: PrefillProgress) -> None:
            """Report the computed tokens at once. Report the end of the request 0.1 s after its blocks were freed."""
            report(replace(progress, finish=None, first_token=None))
            if progress.finish is not None:
                asyncio.get_running_loop().call_later(0.1, report, progress)

        monkeypatch.setattr(sender, "on_progress", report_late)
        monkeypatch.setattr(DecodePeer, "call_failed", lambda peer: failures.append(peer.address))
        here.submit(max_tokens=1)
        await here.decoder.receives(ReserveRequest)
        here.steps.release(1000)
        assert (await here.decoder.receives(StopRequest)).reason == "finished: length"
        await here.empty()
        assert failures == [], "the decode node did nothing wrong"
        assert (here.stats().handoffs, here.stats().handoffs_failed) == (0, 0)
        assert [delta.error for delta in here.deltas] == [""]


async def test_a_reservation_whose_grant_may_be_lost_is_stopped() -> None:
    async with bench(reserve_s=0.05, call_s=0.05) as here:
        here.decoder.waits[ReserveRequest] = asyncio.Event()
        here.submit()
        stop = await here.decoder.receives(StopRequest)
        assert (stop.reservation_id, stop.request) == (b"", "r")
        await here.empty()
        assert here.decoder.all(CommitRequest) == []


async def test_leases_of_all_reservations_are_renewed_together_until_they_end() -> None:
    async with bench(renew_s=0.03) as here:
        here.decoder.waits[CommitRequest] = asyncio.Event()
        for identity in ("one", "two"):
            here.submit(identity)
        await here.decoder.receives(CommitRequest, 2)
        reservation_ids = {commit.reservation_id for commit in here.decoder.all(CommitRequest)}
        await here.decoder.receives(RenewRequest, len(here.decoder.all(RenewRequest)) + 2)
        renew = here.decoder.all(RenewRequest)[-1]
        assert renew.writer == here.node.state.info.incarnation_id
        assert {renew.reservation_ids[:16], renew.reservation_ids[16:]} == reservation_ids
        here.decoder.waits[CommitRequest].set()
        await here.empty()
        assert await wait_until(lambda: here.stats().handoffs == 2, 5.0)
        assert await wait_until(lambda: here.decoder.all(RenewRequest)[-1].reservation_ids == b"", 5.0)
        received = len(here.decoder.all(RenewRequest))
        await asyncio.sleep(0.1)
        assert len(here.decoder.all(RenewRequest)) == received, "nothing is left to renew"


async def test_a_reservation_stopped_before_its_reply_is_received_is_never_written() -> None:
    async with bench(renew_s=0.03) as here:
        here.decoder.next_id = b"\x07" * 16
        here.decoder.quarantined[here.decoder.next_id] = None
        reply = here.decoder.waits[ReserveRequest] = asyncio.Event()
        here.submit()
        await here.decoder.receives(StopRequest)
        reply.set()
        stops = [await here.decoder.receives(StopRequest, count) for count in (1, 2)]
        assert {stop.reservation_id for stop in stops} == {here.decoder.next_id}
        assert "gave up the reservation before its reply arrived" in (await here.failure()).error
        await here.empty()
        assert not here.decoder.all(PushedNotice) + here.decoder.all(CommitRequest)


async def test_a_channel_that_fails_costs_one_handoff_and_the_next_uses_another_channel() -> None:
    async with bench(first=BrokenChannel()) as here:
        here.submit("one")
        await here.decoder.receives(StopRequest)
        failure = await here.failure()
        assert (failure.error, failure.retry) == ("handoff: the wire is cut", True)
        for count, identity in enumerate(("two", "three"), 1):
            here.submit(identity)
            await here.decoder.receives(CommitRequest, count)
        await here.empty()
        load = here.stats()
        assert (load.handoffs, load.handoffs_failed, load.channel_fallbacks) == (2, 1, 1)
        assert load.channels == {here.decoder.address: "tcp"}
        here.decoder.descriptors["shm"] = b"the descriptor of a new incarnation"
        here.submit("four")
        await here.decoder.receives(StopRequest, 2)
        assert await wait_until(lambda: here.stats().handoffs_failed == 2, 5.0), "a new descriptor is tried"


async def test_a_grant_of_the_wrong_size_is_stopped() -> None:
    async with bench() as here:
        here.decoder.targets = TARGETS[:4]
        here.submit()
        stop = await here.decoder.receives(StopRequest)
        assert "the grant has 4 rows, but the prompt needs 5" in stop.reason
        await here.empty()


async def test_a_decode_node_that_is_gone_fails_its_handoffs_and_is_forgotten() -> None:
    """A restarted decode node has a new address, so the sender must forget addresses that no longer answer."""
    async with bench(renew_s=0.05, forget_s=0.3) as here:
        here.submit()
        await here.decoder.receives(CommitRequest)
        await here.empty()
        assert set(here.stats().channels) == {here.decoder.address}
        await here.decoder.server.close()
        assert await wait_until(lambda: not here.stats().channels, 10.0)
        here.submit("late")
        assert (await here.failure()).retry
        await here.empty()


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12), st.integers(0, 6))
def test_each_complete_block_is_pushed_once_and_in_order(num_prompt: int, block: int, chunk: int, held: int) -> None:
    request = Request("r", [1] * num_prompt, num_prompt, 1)
    outgoing = OutgoingHandoff(submission(), request, num_prompt, Geometry(block))
    held = min(held, num_prompt // block)
    outgoing.grant(held, list(range(100, 100 - (-num_prompt // block) - held)))
    pushed = []
    while outgoing.num_computed < num_prompt:
        outgoing.num_computed = min(num_prompt, outgoing.num_computed + chunk)
        pushed += outgoing.next_targets()
        outgoing.num_pushed = len(pushed)
        is_whole = outgoing.num_computed == num_prompt
        assert is_whole or held + len(pushed) <= max(held, outgoing.num_computed // block), "an incomplete block"
        assert outgoing.next_targets() == []
    assert pushed == outgoing.targets
