"""The courier of a real prefill node against a decode node that answers as the test says, over a real channel."""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.hash_model import HashRunner, expected_tokens
from engine.runner import SliceOutput
from node.node import Node
from prefill_node import decode_peers as peers_module
from prefill_node import sender as courier_module
from prefill_node.sender import HandoffSender
from scheduler.request import Request, Slice, Step
from scheduler.role import PREFILL
from scheduler.scheduler import Scheduler, StepLimits
from shared.kv.channel import ChannelError, KVChannel
from shared.kv.checksum import checksums
from shared.kv.memory import HostMemory
from shared.kv.tcp import TcpChannel
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    NodeInfo,
    PushedNotice,
    RenewReply,
    RenewRequest,
    ReserveReply,
    ReserveRequest,
    RouterCommand,
    SamplingParams,
    StopRequest,
    SubmitRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from shared.rpc.methods import ATTACH, COMMIT, PUSHED, RENEW, RESERVE, STOP, RpcServer, connect, unary

BLOCK_TOKENS, LAYERS, VOCABULARY = 4, 2, 97
ROW_BYTES = BLOCK_TOKENS * LAYERS * 8
PROMPT = list(range(3, 21))  # 18 tokens: 5 blocks, 3 chunks of 8, 8 and 2 tokens
FIRST = expected_tokens(PROMPT, 1, vocab_size=VOCABULARY)[0]
TARGETS = [9, 2, 7, 4, 5]
Rows = np.ndarray[Any, np.dtype[np.uint8]]


class Decoder:
    """A decode node: grants TARGETS to whoever asks, unless told otherwise, and keeps what it hears in order."""

    def __init__(self, memory: HostMemory, channel: KVChannel) -> None:
        self.rows, self.channel = memory.rows, channel
        self.cards = {channel.name: channel.descriptor()}
        self.heard: list[Any] = []
        self.held, self.targets = 0, TARGETS
        self.errors: dict[type, str] = {}  # what it answers to messages of a type
        self.quarantined: dict[bytes, None] = {}  # reservations that it gave up, and that were not stopped
        self.next_id = b""  # of the reservation that it grants next; by default a random one
        self.waits: dict[type, asyncio.Event] = {}  # what it waits for before it answers
        self.address = ""

    async def take(self, message: Any) -> Any:
        self.heard.append(message)
        if type(message) in self.waits:
            await self.waits[type(message)].wait()
        error = self.errors.get(type(message), "")
        if isinstance(message, StopRequest):
            self.quarantined.pop(message.reservation_id, None)
        if isinstance(message, RenewRequest):
            return RenewReply(error, bool(self.quarantined), b"".join(self.quarantined))
        if not isinstance(message, ReserveRequest) or error:
            return (ReserveReply if isinstance(message, ReserveRequest) else Ack)(error=error)
        ticket, targets = self.next_id or secrets.token_bytes(16), self.targets[self.held :]
        self.channel.grant(ticket, targets)
        return ReserveReply(ticket, self.held, pack_ids(targets), self.cards)

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def hears(self, kind: type, count: int = 1) -> Any:
        assert await wait_until(lambda: len(self.all(kind)) >= count, 5.0), self.heard
        return self.all(kind)[count - 1]

    def checksums(self) -> bytes:
        """All that it was told of, in order."""
        return b"".join(
            message.checksums for message in self.heard if isinstance(message, PushedNotice | CommitRequest)
        )


class StepwiseRunner(HashRunner):
    """Computes a step when the test says so."""

    steps: threading.Semaphore

    def run(self, step: Step) -> list[SliceOutput]:
        self.steps.acquire()
        return super().run(step)


class BrokenChannel:
    """Reaches everybody, and moves nothing."""

    name = "shm"
    fenced = False

    def reachable(self, _: bytes) -> bool:
        return True

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        raise ChannelError("the wire is cut")


class FickleChannel(BrokenChannel):
    """Works, without moving anything, until it is told not to."""

    works = True

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        if not self.works:
            await super().push(card, ticket, source, target)


@dataclass
class Bench:
    node: Node
    courier: HandoffSender
    scheduler: Scheduler
    decoder: Decoder
    steps: threading.Semaphore
    stream: Any
    deltas: list[TokenDelta] = field(default_factory=list)

    async def submit(self, identity: str = "r", max_tokens: int = 6) -> None:
        sampling = SamplingParams(temperature=0.0)
        to = self.decoder.address
        submit = SubmitRequest(identity, "router", pack_ids(PROMPT), len(PROMPT), max_tokens, sampling, decode_node=to)
        await self.stream.send_message(RouterCommand("router", [submit]))

    async def abort(self, identity: str = "r") -> None:
        await self.stream.send_message(RouterCommand("router", aborts=[identity]))
        assert await wait_until(lambda: identity not in self.node.active.router_of, 5.0)

    async def told(self, count: int = 1) -> list[TokenDelta]:
        assert await wait_until(lambda: len(self.deltas) >= count, 5.0), self.deltas
        return self.deltas

    async def empty(self) -> None:
        """Waits until no block is anybody's and no handoff is on its way."""

        def is_empty() -> bool:
            ledger = self.scheduler.ledger()
            return (
                ledger.free + ledger.cached == ledger.total
                and not self.node.active.router_of
                and not self.courier._outgoing
            )

        assert await wait_until(is_empty, 5.0), self.scheduler.ledger()


@asynccontextmanager
async def bench(steps: int = 1000, first: BrokenChannel | None = None) -> AsyncIterator[Bench]:
    """`steps` are computed without being asked for. `first` is a channel that is better than tcp."""
    ours, theirs, boot = HostMemory(20, ROW_BYTES), HostMemory(20, ROW_BYTES), secrets.token_hex(16)
    writer = await TcpChannel.start(ours, boot, lambda _: None, "127.0.0.1")
    receiver = await TcpChannel.start(theirs, secrets.token_hex(16), lambda _: None, "127.0.0.1")
    decoder = Decoder(theirs, receiver)
    server = RpcServer({rpc: unary(decoder.take) for rpc in (RESERVE, PUSHED, COMMIT, STOP, RENEW)})
    decoder.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    channels: list[Any] = [first, writer] if first else [writer]
    decoder.cards |= {"shm": b"a card"} if first else {}
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=8), 20, BLOCK_TOKENS)
    runner = StepwiseRunner(ours.rows, BLOCK_TOKENS, LAYERS, VOCABULARY)
    runner.steps = threading.Semaphore(steps)
    info = NodeInfo("p", boot, "prefill", "", "m", "print", BLOCK_TOKENS, ROW_BYTES, 20, 512, 8)
    node = Node(info, PREFILL, scheduler, runner, 30.0, VOCABULARY)
    courier = HandoffSender(node, ours, channels, 5.0)
    node_server = RpcServer({ATTACH: node.attach})
    rpc = connect(f"127.0.0.1:{await node_server.start('127.0.0.1', 0)}")
    node.start()
    courier.start()
    try:
        async with ATTACH.open(rpc) as stream:
            await stream.send_message(RouterCommand("router"))
            here = Bench(node, courier, scheduler, decoder, runner.steps, stream)

            async def listen() -> None:
                while (report := await stream.recv_message()) is not None:
                    here.deltas += report.deltas

            listener = asyncio.ensure_future(listen())
            yield here
            listener.cancel()
    finally:
        runner.steps.release(1000)
        rpc.close()
        await courier.close()
        for end in (node_server, server, writer, receiver, node):
            await end.close()


def prompt_rows() -> Rows:
    """What the prompt's five blocks must hold."""
    rows = np.zeros((6, ROW_BYTES), np.uint8)
    request = Request("reference", list(PROMPT), len(PROMPT), 1, blocks=[1, 2, 3, 4, 5])
    HashRunner(rows, BLOCK_TOKENS, LAYERS, VOCABULARY).run(Step(0, [Slice(request, 0, len(PROMPT), True, 0)], []))
    return rows[1:]


@pytest.mark.parametrize("held", [0, 2])
async def test_a_prompt_is_moved_chunk_by_chunk_and_committed_with_its_first_token(held: int) -> None:
    async with bench(steps=1) as here:
        here.decoder.held = held
        await here.submit()
        reserve = await here.decoder.hears(ReserveRequest)
        assert (reserve.writer, reserve.fingerprint) == (here.node.info.incarnation_id, "print")
        if held == 0:
            first = await here.decoder.hears(PushedNotice)
            assert first.checksums == checksums(prompt_rows(), [0, 1]), "before the next chunk is computed"
        here.steps.release(1)
        await here.decoder.hears(PushedNotice, 1 if held else 2)
        here.steps.release(1)
        commit = await here.decoder.hears(CommitRequest)
        assert commit.first_token == FIRST
        assert [(delta.position, unpack_ids(delta.tokens), delta.finish) for delta in here.deltas] == [(0, [FIRST], "")]
        assert (here.decoder.rows[TARGETS[held:]] == prompt_rows()[held:]).all()
        assert here.decoder.checksums() == checksums(here.decoder.rows, TARGETS[held:])
        await here.empty()
        assert here.decoder.all(StopRequest) == []
        load = here.node.stats()
        assert (load.handoffs, load.handoffs_failed, load.channel_fallbacks) == (1, 0, 0)
        assert (load.blocks_moved, load.bytes_moved) == (5 - held, (5 - held) * ROW_BYTES)
        assert load.channels == {here.decoder.address: "tcp"}
        assert load.blocks_cached > 0, "the prompt stays as prefix cache"


@pytest.mark.parametrize("phase", [ReserveRequest, PushedNotice, CommitRequest])
async def test_a_refusal_in_any_phase_is_told_to_both_sides(phase: type) -> None:
    async with bench(steps=1) as here:
        here.decoder.errors[phase] = "not today"
        await here.submit()
        await here.decoder.hears(ReserveRequest if phase is ReserveRequest else PushedNotice)
        here.steps.release(1000)
        assert await wait_until(lambda: any(delta.error for delta in here.deltas), 5.0)
        (failure,) = [delta for delta in here.deltas if delta.error]
        assert (failure.id, failure.retry) == ("r", True)
        assert "not today" in failure.error
        assert failure.error.startswith("handoff: ")
        stops = here.decoder.all(StopRequest)
        assert len(stops) == (phase is not ReserveRequest), "where nothing was reserved there is nothing to stop"
        assert all("not today" in stop.reason for stop in stops)
        assert len(here.decoder.all(CommitRequest)) == (phase is CommitRequest)
        await here.empty()
        assert (here.node.stats().handoffs, here.node.stats().handoffs_failed) == (0, 1)


async def test_a_decode_node_that_is_gone_is_told_to_the_router() -> None:
    async with bench() as here:
        here.decoder.address = "127.0.0.1:1"
        await here.submit()
        assert await wait_until(lambda: any(delta.retry and delta.error for delta in here.deltas), 5.0)
        await here.empty()


async def test_a_request_that_is_aborted_in_the_queue_never_asks_for_room() -> None:
    async with bench(steps=0) as here:
        await here.submit("first")
        await here.decoder.hears(ReserveRequest)
        await here.submit("second")
        assert await wait_until(lambda: "second" in here.node.active.router_of, 5.0)
        await here.abort("second")
        here.steps.release(1000)
        await here.decoder.hears(CommitRequest)
        await here.empty()
        assert [reserve.request.id for reserve in here.decoder.all(ReserveRequest)] == ["first"]


@pytest.mark.parametrize("phase", ["asking", "between chunks", "pushing", "committing"])
async def test_an_abort_in_any_phase_stops_the_decode_node_and_tells_the_router_nothing(phase: str) -> None:
    waits = {"asking": ReserveRequest, "pushing": PushedNotice, "committing": CommitRequest}.get(phase)
    async with bench(steps=1) as here:
        go_on = asyncio.Event()
        if waits is not None:
            here.decoder.waits[waits] = go_on
        await here.submit()
        await here.decoder.hears(ReserveRequest if phase == "asking" else PushedNotice)
        if phase == "committing":
            here.steps.release(2)
            await here.decoder.hears(CommitRequest)
        await here.abort()
        assert here.decoder.all(StopRequest) == [] or waits is None, "what is under way is waited for"
        go_on.set()
        here.steps.release(1000)
        assert (await here.decoder.hears(StopRequest)).reason == "aborted"
        await here.empty()
        assert len(here.decoder.all(StopRequest)) == 1
        assert len(here.decoder.all(CommitRequest)) == (phase == "committing")
        assert not any(delta.error for delta in here.deltas)
        assert (here.node.stats().handoffs, here.node.stats().handoffs_failed) == (0, 0)


async def test_a_request_over_at_its_first_token_is_never_committed() -> None:
    async with bench(steps=0) as here:
        await here.submit(max_tokens=1)
        await here.decoder.hears(ReserveRequest)
        here.steps.release(1000)
        stop = await here.decoder.hears(StopRequest)
        assert stop.reason == "finished: length"
        assert [(unpack_ids(delta.tokens), delta.finish, delta.error) for delta in here.deltas] == [
            ([FIRST], "length", "")
        ]
        await here.empty()
        assert here.decoder.all(CommitRequest) == []
        assert (here.node.stats().handoffs, here.node.stats().handoffs_failed) == (0, 0)


async def test_a_stop_that_was_not_heard_is_said_again_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "RENEW_S", 0.03)
    monkeypatch.setattr(peers_module, "CALL_S", 0.1)
    async with bench(steps=1) as here:
        here.decoder.waits[StopRequest] = asyncio.Event()
        await here.submit()
        await here.decoder.hears(PushedNotice)
        await here.abort()
        again = await here.decoder.hears(StopRequest, 2)
        assert again == here.decoder.all(StopRequest)[0], "else its blocks would stay out of use for as long as we live"
        here.steps.release(1000)
        await here.empty()
        here.decoder.waits[StopRequest].set()
        await asyncio.sleep(0.3)
        heard = len(here.decoder.all(StopRequest))
        await asyncio.sleep(0.3)
        assert len(here.decoder.all(StopRequest)) == heard


async def test_what_a_lost_answer_granted_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier_module, "CALL_S", -4.9)  # with the 5 s of the bench, 0.1 s for the answer
    async with bench() as here:
        here.decoder.waits[ReserveRequest] = asyncio.Event()
        await here.submit()
        stop = await here.decoder.hears(StopRequest)
        assert (stop.reservation_id, stop.request) == (b"", "r")
        await here.empty()
        assert here.decoder.all(CommitRequest) == []


async def test_leases_of_all_tickets_are_renewed_together_until_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "RENEW_S", 0.03)
    async with bench() as here:
        here.decoder.waits[CommitRequest] = asyncio.Event()
        for identity in ("one", "two"):
            await here.submit(identity)
        await here.decoder.hears(CommitRequest, 2)
        tickets = {commit.reservation_id for commit in here.decoder.all(CommitRequest)}
        await here.decoder.hears(RenewRequest, len(here.decoder.all(RenewRequest)) + 2)
        renew = here.decoder.all(RenewRequest)[-1]
        assert renew.writer == here.node.info.incarnation_id
        assert {renew.reservation_ids[:16], renew.reservation_ids[16:]} == tickets
        here.decoder.waits[CommitRequest].set()
        await here.empty()
        assert await wait_until(lambda: here.node.stats().handoffs == 2, 5.0)
        assert await wait_until(lambda: here.decoder.all(RenewRequest)[-1].reservation_ids == b"", 5.0)
        told = len(here.decoder.all(RenewRequest))
        await asyncio.sleep(0.1)
        assert len(here.decoder.all(RenewRequest)) == told, "there is nothing left to renew"


async def test_what_a_decode_node_keeps_for_nobody_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever became of the first stop: the prefill node asks once more when it has nothing to hand off."""
    monkeypatch.setattr(peers_module, "RENEW_S", 0.03)
    async with bench() as here:
        lost = [bytes([number]) * 16 for number in (1, 2)]
        here.decoder.quarantined = dict.fromkeys(lost)
        await here.submit()
        await here.decoder.hears(CommitRequest)
        await here.empty()
        await here.decoder.hears(StopRequest, 2)
        assert {stop.reservation_id for stop in here.decoder.all(StopRequest)} == set(lost)
        assert await wait_until(lambda: not here.decoder.quarantined, 5.0)


async def test_a_handoff_whose_reservation_is_given_up_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its next chunk, at which it would learn of it, and no sooner stopped than its push has ended."""
    monkeypatch.setattr(peers_module, "RENEW_S", 0.03)
    async with bench(steps=1) as here:
        await here.submit()
        reservation_id = (await here.decoder.hears(PushedNotice)).reservation_id
        here.decoder.quarantined[reservation_id] = None
        assert (await here.decoder.hears(StopRequest)).reservation_id == reservation_id
        failure = TokenDelta("r", error="handoff: the decode node gave its reservation up", retry=True)
        assert await wait_until(lambda: failure in here.deltas, 5.0), here.deltas
        here.steps.release(1000)
        await here.empty()
        assert here.decoder.all(CommitRequest) == []


async def test_a_reservation_stopped_before_its_answer_is_received_is_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "RENEW_S", 0.03)
    async with bench() as here:
        here.decoder.next_id = b"\x07" * 16
        here.decoder.quarantined[here.decoder.next_id] = None
        answer = here.decoder.waits[ReserveRequest] = asyncio.Event()
        await here.submit()
        await here.decoder.hears(StopRequest)
        answer.set()
        stops = [await here.decoder.hears(StopRequest, count) for count in (1, 2)]
        assert {stop.reservation_id for stop in stops} == {here.decoder.next_id}
        await here.empty()
        assert not here.decoder.all(PushedNotice) + here.decoder.all(CommitRequest)
        why = "gave the reservation up before its answer came"
        assert await wait_until(lambda: any(why in delta.error for delta in here.deltas), 5.0), here.deltas


async def test_a_channel_that_fails_costs_one_handoff_and_the_next_takes_another_channel() -> None:
    async with bench(first=BrokenChannel()) as here:
        await here.submit("one")
        await here.decoder.hears(StopRequest)
        assert await wait_until(lambda: any(delta.error for delta in here.deltas), 5.0)
        (failure,) = [delta for delta in here.deltas if delta.error]
        assert (failure.error, failure.retry) == ("handoff: the wire is cut", True)
        for count, identity in enumerate(("two", "three"), 1):
            await here.submit(identity)
            await here.decoder.hears(CommitRequest, count)
        await here.empty()
        load = here.node.stats()
        assert (load.handoffs, load.handoffs_failed, load.channel_fallbacks) == (2, 1, 1)
        assert load.channels == {here.decoder.address: "tcp"}
        here.decoder.cards["shm"] = b"the card of a new life"
        await here.submit("four")
        await here.decoder.hears(StopRequest, 2)
        assert await wait_until(lambda: here.node.stats().handoffs_failed == 2, 5.0), "a new card is worth a try"


async def test_a_push_that_fails_leaves_its_neighbours_on_the_channel_a_reason_of_their_own() -> None:
    channel = FickleChannel()
    async with bench(steps=1, first=channel) as here:
        go_on = here.decoder.waits[PushedNotice] = asyncio.Event()
        await here.submit("one")
        await here.decoder.hears(PushedNotice)
        channel.works = False
        await here.submit("two")
        here.steps.release(1000)
        for identity in ("two", "one"):
            failure = TokenDelta(identity, error="handoff: the wire is cut", retry=True)
            assert await wait_until(lambda failure=failure: failure in here.deltas, 5.0), here.deltas
            go_on.set()
        await here.empty()
        assert len(here.decoder.all(StopRequest)) == 2


async def test_a_grant_of_the_wrong_size_is_given_back_and_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "RENEW_S", 0.03)
    async with bench() as here:
        here.decoder.targets = TARGETS[:4]
        await here.submit()
        stop = await here.decoder.hears(StopRequest)
        assert "0 held and 4 reserved blocks are not the prompt's 5" in stop.reason
        await here.empty()
        here.decoder.heard.clear()
        await asyncio.sleep(0.1)
        assert not any(renewal.reservation_ids for renewal in here.decoder.heard)


async def test_two_nodes_without_a_common_channel_say_which_there_are() -> None:
    async with bench() as here:
        here.decoder.cards = {"nixl": b""}
        await here.submit()
        assert "no common KV channel" in (await here.decoder.hears(StopRequest)).reason
        assert await wait_until(lambda: any("['nixl']" in delta.error for delta in here.deltas), 5.0)
        await here.empty()
