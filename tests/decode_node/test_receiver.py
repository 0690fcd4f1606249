"""A decode node under writers that ask, lie, stop and vanish: no block is lost, nothing wrong is ever generated."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpclib.exceptions import StreamTerminatedError

from decode_node import receiver as receiver_module
from decode_node.receiver import HandoffReceiver
from engine.hash_model import HashRunner, expected_tokens
from node.node import Node
from scheduler.request import Request, Slice, Step
from scheduler.role import DECODE
from scheduler.scheduler import Scheduler, StepLimits
from shared.kv.channel import ChannelError, KVChannel
from shared.kv.checksum import checksums
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    NodeInfo,
    PushedNotice,
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
from shared.rpc.methods import ATTACH, RpcServer, connect

BLOCK_TOKENS, LAYERS, VOCABULARY = 4, 2, 97
ROW_BYTES = BLOCK_TOKENS * LAYERS * 8
PROMPT = list(range(3, 21))  # 18 tokens: 5 blocks
WRITER = "a" * 32


@dataclass
class Bench:
    """A decode node with a router attached, and a writer's pool that holds the prompt's KV in blocks 1 to 5."""

    node: Node
    receiver: HandoffReceiver
    rows: np.ndarray[Any, np.dtype[np.uint8]]
    writer: KVChannel
    writer_rows: np.ndarray[Any, np.dtype[np.uint8]]
    scheduler: Scheduler
    deltas: list[TokenDelta] = field(default_factory=list)
    send: Callable[[RouterCommand], Any] = lambda _: None
    hang_up: Callable[[], Any] = lambda: None  # the router's stream ends

    async def reserve(self, identity: str = "r", max_tokens: int = 6) -> ReserveReply:
        submit = SubmitRequest(
            identity, "router", pack_ids(PROMPT), len(PROMPT), max_tokens, SamplingParams(temperature=0.0)
        )
        return await self.receiver.reserve(ReserveRequest(submit, WRITER, "print"))

    async def push(self, reserved: ReserveReply) -> None:
        targets = unpack_ids(reserved.targets)
        source = list(range(1 + reserved.num_held, 1 + reserved.num_held + len(targets)))
        await self.writer.push(reserved.descriptors[self.writer.name], reserved.reservation_id, source, targets)

    def commit(self, reserved: ReserveReply, first_token: int | None = None) -> CommitRequest:
        source = list(range(1 + reserved.num_held, 6))
        token = expected_tokens(PROMPT, 1, vocab_size=VOCABULARY)[0] if first_token is None else first_token
        return CommitRequest(reserved.reservation_id, token, checksums(self.writer_rows, source))

    def tokens(self, identity: str = "r") -> list[int]:
        return [token for delta in self.deltas if delta.id == identity for token in unpack_ids(delta.tokens)]

    def errors(self) -> list[str]:
        return [delta.error for delta in self.deltas if delta.error]

    async def empty(self) -> None:
        """Waits until no block is anybody's."""

        def is_empty() -> bool:
            ledger = self.scheduler.ledger()
            return ledger.free + ledger.cached == ledger.total

        assert await wait_until(is_empty, 5.0), self.scheduler.ledger()


def compute_prompt(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    request = Request("writer's", list(PROMPT), len(PROMPT), 1)
    request.blocks = [1, 2, 3, 4, 5]
    HashRunner(rows, BLOCK_TOKENS, LAYERS, VOCABULARY).run(Step(0, [Slice(request, 0, len(PROMPT), True, 0)], []))


@asynccontextmanager
async def bench(kind: str, directory: Path, num_blocks: int = 20, timeout_s: float = 5.0) -> AsyncIterator[Bench]:
    memory, writers_memory = HostMemory(num_blocks, ROW_BYTES), HostMemory(8, ROW_BYTES)
    compute_prompt(writers_memory.rows)
    boot = secrets.token_hex(16)
    made: list[HandoffReceiver] = []
    channel, writer = [
        await (
            ShmChannel.start(where, name, lost, directory)
            if kind == "shm"
            else TcpChannel.start(where, name, lambda _: None, "127.0.0.1")
        )
        for where, name, lost in (
            (memory, boot, lambda name: made[0].on_writer_lost(name)),
            (writers_memory, WRITER, lambda _: None),
        )
    ]
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=8), num_blocks, BLOCK_TOKENS)
    info = NodeInfo("d", boot, "decode", "", "m", "print", BLOCK_TOKENS, ROW_BYTES, num_blocks, 512, 8)
    runner = HashRunner(memory.rows, BLOCK_TOKENS, LAYERS, VOCABULARY)
    node = Node(info, DECODE, scheduler, runner, 0.1, VOCABULARY)
    receiver = HandoffReceiver(node, memory, [channel], timeout_s)
    made.append(receiver)
    server = RpcServer({ATTACH: node.attach, **receiver.handlers()})
    port = await server.start("127.0.0.1", 0)
    node.start()
    receiver.start()
    rpc = connect(f"127.0.0.1:{port}")
    here = Bench(node, receiver, memory.rows, writer, writers_memory.rows, scheduler)
    try:
        async with ATTACH.open(rpc) as stream:
            await stream.send_message(RouterCommand("router"))
            here.send = stream.send_message
            here.hang_up = stream.cancel

            async def listen() -> None:
                with contextlib.suppress(StreamTerminatedError):  # it hung up
                    while (report := await stream.recv_message()) is not None:
                        here.deltas += report.deltas

            listener = asyncio.ensure_future(listen())
            assert await wait_until(lambda: "router" in node.sessions.streams, 5.0)
            yield here
            listener.cancel()
    finally:
        rpc.close()
        await writer.close()
        await channel.close()
        await server.close()
        await node.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_committed_prompt_is_continued_with_the_tokens_that_belong_to_it(kind: str, tmp_path: Path) -> None:
    async with bench(kind, tmp_path) as here:
        reserved = await here.reserve()
        assert (len(unpack_ids(reserved.targets)), reserved.num_held) == (5, 0)
        await here.push(reserved)
        assert (await here.receiver.commit(here.commit(reserved))).error == ""
        assert await wait_until(lambda: any(delta.finish for delta in here.deltas), 5.0)
        assert here.tokens() == expected_tokens(PROMPT, 6, vocab_size=VOCABULARY)[1:]
        await here.empty()
        again = await here.reserve("again")
        assert (len(unpack_ids(again.targets)), again.num_held) == (1, 4), "held blocks are not sent again"
        await here.receiver.stop(StopRequest(again.reservation_id))
        await here.empty()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_rows_that_are_not_what_was_sent_are_never_read(kind: str, tmp_path: Path) -> None:
    async with bench(kind, tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        here.rows[unpack_ids(reserved.targets)[2], 5] ^= 1
        again = Ack("checksums differ", again=True)
        assert await here.receiver.commit(here.commit(reserved)) == again, "they may be written once more"
        await here.push(reserved)
        here.rows[unpack_ids(reserved.targets)[3], 5] ^= 1
        here.rows[unpack_ids(reserved.targets)[4], 5] ^= 1
        assert await here.receiver.commit(here.commit(reserved)) == Ack("checksums differ")
        assert here.node.stats().rows_corrupt == 3
        await here.empty()
        assert await wait_until(lambda: bool(here.errors()), 5.0)
        assert here.tokens() == []
        assert here.scheduler.pool.match([]) == []


async def test_rows_are_checked_as_they_come_and_none_may_be_left_unchecked(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        whole = here.commit(reserved)
        first, rest = whole.checksums[:16], whole.checksums[16:]
        assert await here.receiver.pushed(PushedNotice(reserved.reservation_id, rest[:8])) == Ack(
            "checksums differ", again=True
        )
        assert (await here.receiver.pushed(PushedNotice(reserved.reservation_id, first))).error == ""
        assert (await here.receiver.pushed(PushedNotice(b"0" * 16, first))).error == "the ticket is void"
        for sums in (bytes(64), rest[:7]):
            assert (
                "are no checksums of the 3 rows to come"
                in (await here.receiver.pushed(PushedNotice(reserved.reservation_id, sums))).error
            )
        short = CommitRequest(reserved.reservation_id, whole.first_token, rest[:16])
        assert (await here.receiver.commit(short)).error == "1 rows were never told"
        again = await here.reserve("again")
        await here.push(again)
        assert (await here.receiver.pushed(PushedNotice(again.reservation_id, first))).error == ""
        assert (await here.receiver.commit(CommitRequest(again.reservation_id, whole.first_token, rest))).error == ""
        assert await wait_until(lambda: len(here.tokens("again")) == 5, 5.0)


async def test_a_ticket_is_good_once_and_only_for_a_commit_or_a_stop(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        commit = here.commit(reserved)
        assert (await here.receiver.commit(CommitRequest(b"\0" * 16, 1, b""))).error == "the ticket is void"
        assert (await here.receiver.commit(commit)).error == ""
        assert (await here.receiver.commit(commit)).error == "the ticket is void"
        assert (await here.receiver.stop(StopRequest(reserved.reservation_id))).error == ""
        await here.receiver.renew(RenewRequest(WRITER, reserved.reservation_id + b"odd"))
        assert await wait_until(lambda: any(delta.finish for delta in here.deltas), 5.0), "a late stop stops nothing"
        await here.empty()


async def test_another_model_or_an_unknown_router_is_refused_with_both_names(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        submit = SubmitRequest("r", "router", pack_ids(PROMPT), len(PROMPT), 6, SamplingParams())
        answer = await here.receiver.reserve(ReserveRequest(submit, WRITER, "other"))
        assert answer.error == "this node has print, the prefill node other"
        submit.router = "stranger"
        assert "not attached" in (await here.receiver.reserve(ReserveRequest(submit, WRITER, "print"))).error
        submit.router, submit.tokens = "router", pack_ids([500] * 18)
        assert "beyond the vocabulary" in (await here.receiver.reserve(ReserveRequest(submit, WRITER, "print"))).error
        await here.empty()


async def test_who_finds_no_room_waits_and_is_told_when_it_takes_too_long(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path, num_blocks=8, timeout_s=0.3) as here:
        first = await here.reserve("first")
        assert (await here.reserve("late")).error == "no room within 0.3 s"
        waiting = asyncio.ensure_future(here.reserve("waits"))
        await asyncio.sleep(0.1)
        await here.receiver.stop(StopRequest(first.reservation_id))
        assert (await waiting).error == ""
        await here.send(RouterCommand("router", aborts=["waits"]))
        await here.empty()


async def test_an_abort_under_shm_keeps_the_blocks_until_the_writer_has_stopped(tmp_path: Path) -> None:
    async with bench("shm", tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        await here.send(RouterCommand("router", aborts=["r"]))
        assert await wait_until(lambda: here.scheduler.ledger().quarantined == 5, 5.0)
        assert (await here.receiver.commit(here.commit(reserved))).error == "the ticket is void"
        await here.receiver.stop(StopRequest(reserved.reservation_id))
        await here.empty()
        assert here.errors() == []


async def test_a_writer_that_hangs_up_gives_its_blocks_back_and_is_barred(tmp_path: Path) -> None:
    async with bench("shm", tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        await here.writer.close()
        await here.empty()
        assert await wait_until(lambda: here.errors() == ["landing: the prefill node is gone"], 5.0)


@pytest.fixture
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.reservations.LEASE_S", 0.2)
    monkeypatch.setattr(receiver_module, "TICK_S", 0.05)


@pytest.mark.usefixtures("quick_leases")
async def test_a_frozen_writer_that_wakes_up_after_its_lease_cannot_write_any_more(tmp_path: Path) -> None:
    async with bench("shm", tmp_path) as here:
        reserved = await here.reserve()
        await here.empty()
        assert await wait_until(lambda: here.errors() == ["landing: its lease ended"], 5.0)
        with pytest.raises(ChannelError, match="treats us as dead"):
            await here.push(reserved)


@pytest.mark.usefixtures("quick_leases")
async def test_blocks_of_a_silent_writer_that_is_connected_wait_for_its_end(tmp_path: Path) -> None:
    async with bench("shm", tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        assert await wait_until(lambda: here.scheduler.ledger().quarantined == 5, 5.0)
        await here.writer.close()
        await here.empty()


async def test_a_router_that_leaves_takes_its_requests_with_it(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        await here.reserve()
        submit = SubmitRequest("long", "router", pack_ids(PROMPT), len(PROMPT), 40, SamplingParams(temperature=0.0))
        await here.send(RouterCommand("router", submits=[submit]))
        assert await wait_until(lambda: here.node.owns("long"), 5.0)
        await here.hang_up()
        await here.empty()
        assert not here.node.owns("r")
        assert not here.node.owns("long")


async def test_an_abort_between_room_found_and_the_grant_grants_nothing(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        found = here.node.on_room_found

        def find_and_abort(request: Request) -> None:
            found(request)
            here.node.abort("r")

        here.node.on_room_found = find_and_abort
        assert (await here.reserve()).error == "the request was aborted"
        await here.empty()


async def test_a_writer_that_never_heard_its_grant_gives_the_blocks_back_by_the_requests_name(tmp_path: Path) -> None:
    async with bench("shm", tmp_path, num_blocks=8) as here:
        reserved = await here.reserve()
        await here.push(reserved)  # so that it is connected: its lease's end alone would not free the blocks
        waits = asyncio.ensure_future(here.reserve("waits"))
        assert await wait_until(lambda: here.node.owns("waits"), 5.0)
        await here.receiver.stop(StopRequest(b"", "no answer", "waits"))
        assert (await waits).error
        await here.receiver.stop(StopRequest(b"", "no answer", "nobody's"))
        assert here.scheduler.ledger().reserved == 5
        await here.receiver.stop(StopRequest(b"", "no answer", "r"))
        await here.empty()
        assert here.errors() == ["landing: the prefill node stopped: no answer"]
        assert (await here.receiver.commit(here.commit(reserved))).error == "the ticket is void"


async def test_a_commit_that_is_cut_off_gives_its_blocks_back(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve()
        await here.push(reserved)
        committing = asyncio.ensure_future(here.receiver.commit(here.commit(reserved)))
        await asyncio.sleep(0)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await here.empty()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_grant_that_breaks_leaves_no_room_taken_though_nobody_asks_for_it_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(ticket: bytes, rows: list[int]) -> None:
        raise ValueError("planted")

    async with bench(kind, tmp_path) as here:
        with monkeypatch.context() as patch:
            patch.setattr(here.receiver._channels[0], "grant", broken)
            with pytest.raises(ValueError, match="planted"):
                await here.reserve()
        if kind == "shm":  # a ticket that nobody heard of: only the writer's word says that it is unused
            assert await wait_until(lambda: here.scheduler.ledger().quarantined == 5, 5.0)
            await here.receiver.stop(StopRequest(b"", "no answer", "r"))
        await here.empty()
        assert (len(here.receiver._table), here.node.owns("r")) == (0, False)


async def test_a_check_that_breaks_ends_its_landing_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench("tcp", tmp_path) as here:
        broken, well = await here.reserve("broken"), await here.reserve("well")
        for reserved in (broken, well):
            await here.push(reserved)
        with monkeypatch.context() as patch:
            patch.setattr(here.receiver._memory, "checksums", lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await here.receiver.commit(here.commit(broken))
        assert (await here.receiver.commit(here.commit(well))).error == ""
        assert await wait_until(
            lambda: here.tokens("well") == expected_tokens(PROMPT, 6, vocab_size=VOCABULARY)[1:], 5.0
        )
        await here.empty()
        assert here.errors() == ["landing: the commit was cut off"]


async def test_what_a_peer_sends_is_within_bounds_or_touches_nothing(tmp_path: Path) -> None:
    """K4, K5, K14, G8: unknown, foreign, doubled and endless ones."""
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve()
        before = here.scheduler.ledger()
        landing = here.receiver._table.open(reserved.reservation_id)
        assert landing is not None
        lease = landing.lease_expires
        assert "are not up to" in (await here.receiver.renew(RenewRequest(WRITER, bytes(16 * 1_000_000)))).error
        assert (
            "are not up to" in (await here.receiver.renew(RenewRequest(WRITER, reserved.reservation_id + b"odd"))).error
        )
        assert (await here.receiver.renew(RenewRequest("b" * 32, reserved.reservation_id))).error == ""
        assert landing.lease_expires == lease, "only its own writer keeps it"
        await here.receiver.renew(RenewRequest(WRITER, bytes(16) + reserved.reservation_id))
        assert lease < landing.lease_expires <= lease + 60
        for ticket in (b"", b"x", bytes(16), bytes(10_000)):
            assert (await here.receiver.pushed(PushedNotice(ticket, b""))).error == "the ticket is void"
            assert (await here.receiver.commit(CommitRequest(ticket, 1, b""))).error == "the ticket is void"
            assert (await here.receiver.stop(StopRequest(ticket, "r" * 10_000, "nobody"))).error == ""
        assert "already here" in (await here.reserve()).error
        submit = SubmitRequest("s", "router", pack_ids(PROMPT), len(PROMPT), 6, SamplingParams(temperature=0.0))
        assert "boot id" in (await here.receiver.reserve(ReserveRequest(submit, "../../etc", "print"))).error
        assert here.scheduler.ledger() == before
        await here.push(reserved)
        sums = here.commit(reserved).checksums
        assert (await here.receiver.pushed(PushedNotice(reserved.reservation_id, sums))).error == ""
        beyond = await here.receiver.commit(CommitRequest(reserved.reservation_id, 2**40, b""))
        assert beyond.error == f"token id {2**40} is not in the vocabulary of {VOCABULARY}"
        await here.empty()
