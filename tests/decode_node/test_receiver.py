"""Test that a decode node loses no block and generates no wrong token if writers send false data, stop or disappear."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_node.receiver import HandoffReceiver
from decode_node.reservations import LEASE_S
from node.node import Node
from node.router_sessions import DRAIN_SEEN_S
from scheduler.role import DECODE
from shared.kv.channel import ChannelError, KVChannel
from shared.kv.memory import HostMemory, checksums
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    PushedNotice,
    RenewReply,
    RenewRequest,
    ReserveReply,
    ReserveRequest,
    RouterCommand,
    StopRequest,
    pack_ids,
    unpack_ids,
)
from tests.node.harness import (
    ROUTER,
    ROW_BYTES,
    VOCABULARY,
    HashNode,
    RouterLine,
    attached,
    compute_prompt,
    expected,
    hash_node,
    quiet,  # noqa: F401 - a fixture
    submission,
)
from tests.prefill_node.pair import open_channel

PROMPT = list(range(3, 21))  # 18 tokens: 5 blocks
WRITER, INCARNATION = "a" * 32, "d" * 32
NOT_OPEN = "the reservation is not open"


@dataclass
class Bench(HashNode):
    """A decode node with an attached router, and a writer whose pool holds the prompt's KV in blocks 1 to 5."""

    receiver: HandoffReceiver
    writer: KVChannel
    writer_rows: NDArray[np.uint8]
    line: RouterLine

    async def reserve(self, name: str = "r", max_tokens: int = 6) -> ReserveReply:
        return await self.receiver.reserve(ReserveRequest(submission(name, PROMPT, max_tokens), WRITER, "print"))

    async def push(self, reserved: ReserveReply) -> None:
        targets = unpack_ids(reserved.targets)
        source = list(range(1 + reserved.num_held, 1 + reserved.num_held + len(targets)))
        await self.writer.push(reserved.descriptors[self.writer.name], reserved.reservation_id, source, targets)

    async def reserve_and_push(self) -> ReserveReply:
        reserved = await self.reserve()
        await self.push(reserved)
        return reserved

    def commit(self, reserved: ReserveReply) -> CommitRequest:
        source = list(range(1 + reserved.num_held, 6))
        return CommitRequest(reserved.reservation_id, expected(PROMPT, 1)[0], checksums(self.writer_rows, source))

    def errors(self) -> list[str]:
        return [error for error, _ in self.line.errors()]

    def is_quarantined(self) -> bool:
        return self.scheduler.ledger().quarantined == 5


@asynccontextmanager
async def bench(
    kind: str, directory: Path, num_blocks: int = 20, timeout_s: float = 5.0, lease_s: float = LEASE_S
) -> AsyncIterator[Bench]:
    memory, writers_memory = HostMemory(num_blocks, ROW_BYTES), HostMemory(8, ROW_BYTES)
    compute_prompt(writers_memory.rows, PROMPT, [1, 2, 3, 4, 5])
    receivers: list[HandoffReceiver] = []
    async with AsyncExitStack() as cleanup:
        channel = await open_channel(
            kind, memory, INCARNATION, lambda writer: receivers[0].on_writer_lost(writer), directory
        )
        writer = await open_channel(kind, writers_memory, WRITER, lambda _: None, directory)
        for end in (channel, writer):
            cleanup.push_async_callback(end.close)

        def make_receiver(node: Node, memory: HostMemory) -> HandoffReceiver:
            receivers.append(HandoffReceiver(node, memory, [channel], timeout_s, lease_s, lease_s / 10))
            return receivers[0]

        here = hash_node(DECODE, {"decode": make_receiver}, memory=memory, incarnation_id=INCARNATION, heartbeat_s=0.1)
        line = await cleanup.enter_async_context(attached(here))
        yield Bench(**vars(here), receiver=receivers[0], writer=writer, writer_rows=writers_memory.rows, line=line)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_committed_prompt_is_continued_with_the_tokens_that_belong_to_it(kind: str, tmp_path: Path) -> None:
    async with bench(kind, tmp_path) as here:
        reserved = await here.reserve()
        assert (len(unpack_ids(reserved.targets)), reserved.num_held) == (5, 0)
        await here.push(reserved)
        assert (await here.receiver.commit(here.commit(reserved))).error == ""
        assert await wait_until(lambda: bool(here.line.finishes("r")), 5.0)
        assert here.line.tokens("r") == expected(PROMPT, 6)[1:]
        await here.empty()
        again = await here.reserve("again")
        assert (len(unpack_ids(again.targets)), again.num_held) == (1, 4), "cached blocks are not sent again"
        await here.receiver.stop(StopRequest(again.reservation_id))
        await here.empty()


async def test_rows_are_checked_as_they_come_and_none_may_be_left_unchecked(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve_and_push()
        whole = here.commit(reserved)
        first, rest = whole.checksums[:16], whole.checksums[16:]
        assert await here.receiver.pushed(PushedNotice(reserved.reservation_id, rest[:8])) == Ack(
            "checksums differ", again=True
        )
        assert (await here.receiver.pushed(PushedNotice(reserved.reservation_id, first))).error == ""
        assert (await here.receiver.pushed(PushedNotice(b"0" * 16, first))).error == NOT_OPEN
        for sums in (bytes(64), rest[:7]):
            assert (
                "bytes of checksums for 3 rows: must be"
                in (await here.receiver.pushed(PushedNotice(reserved.reservation_id, sums))).error
            )
        short = CommitRequest(reserved.reservation_id, whole.first_token, rest[:16])
        assert (await here.receiver.commit(short)).error == "1 rows have no checksums"
        again = await here.reserve("again")
        await here.push(again)
        assert (await here.receiver.pushed(PushedNotice(again.reservation_id, first))).error == ""
        assert (await here.receiver.commit(CommitRequest(again.reservation_id, whole.first_token, rest))).error == ""
        assert await wait_until(lambda: len(here.line.tokens("again")) == 5, 5.0)


async def test_another_model_or_an_unknown_router_is_refused(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        submit = submission("r", PROMPT, 6)
        answer = await here.receiver.reserve(ReserveRequest(submit, WRITER, "other"))
        assert answer.error == "fingerprints differ: print here, other at the writer"
        submit.router = "stranger"
        assert "not connected" in (await here.receiver.reserve(ReserveRequest(submit, WRITER, "print"))).error
        submit.router, submit.tokens = "router", pack_ids([500] * 18)
        assert "beyond the vocabulary" in (await here.receiver.reserve(ReserveRequest(submit, WRITER, "print"))).error
        await here.empty()


async def test_a_reservation_waits_for_blocks_up_to_its_timeout(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path, num_blocks=8, timeout_s=0.3) as here:
        first = await here.reserve("first")
        assert (await here.reserve("late")).error == "no free blocks within 0.3 s"
        await here.receiver.stop(StopRequest(first.reservation_id))
        await here.empty()
    async with bench("tcp", tmp_path, num_blocks=8, timeout_s=60.0) as here:
        first = await here.reserve("first")
        waiting = asyncio.ensure_future(here.reserve("waits"))
        await asyncio.sleep(0.1)
        await here.receiver.stop(StopRequest(first.reservation_id))
        assert (await waiting).error == ""
        here.line.abort("waits")
        await here.empty()


async def test_a_draining_node_completes_the_handoffs_that_its_routers_wait_for(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        draining = asyncio.ensure_future(here.node.drain(60.0, "shutting down"))
        await asyncio.sleep(0)
        here.line.submit(submission("new", PROMPT))
        assert await wait_until(lambda: here.errors() == ["this node is draining"], 5.0)
        here.line.commands.put_nowait(RouterCommand(ROUTER, has_requests=True, has_seen_drain=True))
        await asyncio.sleep(1.5 * DRAIN_SEEN_S)
        assert not draining.done(), "a prefill node has not yet begun the handoff"
        reserved = await here.reserve_and_push()
        assert await here.receiver.commit(here.commit(reserved)) == Ack()
        assert await wait_until(lambda: bool(here.line.finishes("r")), 5.0)
        assert here.line.tokens("r") == expected(PROMPT, 6)[1:]
        here.line.commands.put_nowait(RouterCommand(ROUTER, has_requests=False, has_seen_drain=True))
        assert await draining == 0


async def test_a_draining_node_does_not_wait_for_routers_that_do_not_know_it(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        assert await asyncio.wait_for(here.node.drain(60.0, "shutting down"), 30.0) == 0


async def test_a_renewal_lists_quarantined_reservations_until_their_writer_has_stopped(tmp_path: Path) -> None:
    async with bench("shm", tmp_path) as here:
        renewal = RenewRequest(WRITER, b"")
        assert await here.receiver.renew(renewal) == RenewReply()
        reserved = await here.reserve_and_push()
        assert await here.receiver.renew(renewal) == RenewReply("", has_reservations=True)
        here.line.abort("r")
        assert await wait_until(here.is_quarantined, 5.0)
        assert await here.receiver.renew(renewal) == RenewReply("", True, reserved.reservation_id)
        assert (await here.receiver.commit(here.commit(reserved))).error == NOT_OPEN
        assert await here.receiver.renew(RenewRequest("b" * 32, b"")) == RenewReply(), "it is another writer's"
        await here.receiver.stop(StopRequest(reserved.reservation_id))
        await here.empty()
        assert await here.receiver.renew(renewal) == RenewReply()


@pytest.mark.parametrize("lease_s", [0.2, LEASE_S])
async def test_blocks_of_a_writer_are_kept_until_it_hangs_up(lease_s: float, tmp_path: Path) -> None:
    async with bench("shm", tmp_path, lease_s=lease_s) as here:
        await here.reserve_and_push()
        if lease_s < LEASE_S:
            assert await wait_until(here.is_quarantined, 5.0)
        await here.writer.close()
        await here.empty()
        reason = "its lease expired" if lease_s < LEASE_S else "the connection to the prefill node ended"
        assert await wait_until(lambda: here.errors() == [f"handoff: {reason}"], 5.0)


async def test_a_frozen_writer_that_wakes_up_after_its_lease_cannot_write_any_more(tmp_path: Path) -> None:
    async with bench("shm", tmp_path, lease_s=0.2) as here:
        reserved = await here.reserve()
        await here.empty()
        assert await wait_until(lambda: here.errors() == ["handoff: its lease expired"], 5.0)
        with pytest.raises(ChannelError, match="has declared this node dead"):
            await here.push(reserved)


@pytest.mark.usefixtures("quiet")
async def test_an_error_at_the_end_of_one_lease_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench("tcp", tmp_path, lease_s=0.2) as here:
        failures = iter([OSError("revoked twice")])

        def revoke(*_: object) -> None:
            for failure in failures:
                raise failure

        monkeypatch.setattr(type(here.writer), "revoke", revoke)
        await here.reserve("first")
        await here.reserve("second")
        assert await wait_until(lambda: here.errors() == ["handoff: its lease expired"] * 2, 5.0)


async def test_a_writer_that_missed_the_grant_stops_the_reservation_by_request_id(tmp_path: Path) -> None:
    async with bench("shm", tmp_path, num_blocks=8) as here:
        reserved = await here.reserve()
        await here.push(reserved)  # while the writer is connected, the end of the lease does not free the blocks
        waits = asyncio.ensure_future(here.reserve("waits"))
        assert await wait_until(lambda: "waits" in here.node.requests, 5.0)
        await here.receiver.stop(StopRequest(b"", "no answer", "waits"))
        assert (await waits).error == "the request was aborted"
        await here.receiver.stop(StopRequest(b"", "no answer", "unknown"))
        assert here.scheduler.ledger().reserved == 5
        await here.receiver.stop(StopRequest(b"", "no answer", "r"))
        await here.empty()
        assert here.errors() == ["handoff: the prefill node stopped: no answer"]
        assert (await here.receiver.commit(here.commit(reserved))).error == NOT_OPEN


async def test_a_request_that_ends_at_its_first_token_is_not_reported_as_failed(tmp_path: Path) -> None:
    """The prefill node reports the end. A failure report of the decode node might arrive first and cause a retry."""
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve_and_push()
        await here.receiver.stop(StopRequest(reserved.reservation_id, "finished: length", "r"))
        await here.receiver.stop(StopRequest((await here.reserve("s")).reservation_id, "no answer", "s"))
        await here.empty()
        assert here.errors() == ["handoff: the prefill node stopped: no answer"]


async def test_a_commit_that_is_cancelled_frees_its_blocks(tmp_path: Path) -> None:
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve_and_push()
        committing = asyncio.ensure_future(here.receiver.commit(here.commit(reserved)))
        await asyncio.sleep(0)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await here.empty()


async def test_malformed_messages_of_a_peer_change_nothing(tmp_path: Path) -> None:
    """The ids in the messages are unknown, belong to another writer, are sent twice, or are far too long."""
    async with bench("tcp", tmp_path) as here:
        reserved = await here.reserve()
        before = here.scheduler.ledger()
        assert (
            "bytes: must be 16 for each"
            in (await here.receiver.renew(RenewRequest(WRITER, bytes(16 * 1_000_000)))).error
        )
        assert (
            "bytes: must be 16 for each"
            in (await here.receiver.renew(RenewRequest(WRITER, reserved.reservation_id + b"odd"))).error
        )
        assert (await here.receiver.renew(RenewRequest("b" * 32, reserved.reservation_id))).error == ""
        assert (await here.receiver.renew(RenewRequest(WRITER, bytes(16) + reserved.reservation_id))).error == ""
        for unknown in (b"", b"x", bytes(16), bytes(10_000)):
            assert (await here.receiver.pushed(PushedNotice(unknown, b""))).error == NOT_OPEN
            assert (await here.receiver.commit(CommitRequest(unknown, 1, b""))).error == NOT_OPEN
            assert (await here.receiver.stop(StopRequest(unknown, "r" * 10_000, "unknown"))).error == ""
        assert "already on this node" in (await here.reserve()).error
        forged = ReserveRequest(submission("s", PROMPT, 6), "../../etc", "print")
        assert "32 hexadecimal digits" in (await here.receiver.reserve(forged)).error
        assert here.scheduler.ledger() == before
        await here.push(reserved)
        sums = here.commit(reserved).checksums
        assert (await here.receiver.pushed(PushedNotice(reserved.reservation_id, sums))).error == ""
        beyond = await here.receiver.commit(CommitRequest(reserved.reservation_id, 2**40, b""))
        assert beyond.error == f"token id {2**40} is not in the vocabulary of {VOCABULARY}"
        await here.empty()
