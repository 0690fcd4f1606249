"""Receives handoffs: answers when there is room, checks what was written, lets the request run or gives it up."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from decode_node.reservations import Reservation, ReservationEnd, ReservationTable
from node.node import Node
from node.validation import MAX_ID
from scheduler.request import Request
from shared import failpoints
from shared.kv.channel import RESERVATION_ID_BYTES, KVChannel, is_incarnation_id
from shared.kv.checksum import CHECKSUM_BYTES
from shared.kv.staging import KVMemory
from shared.logs import about, fields
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    PushedNotice,
    RenewReply,
    RenewRequest,
    ReserveReply,
    ReserveRequest,
    StopRequest,
    TokenDelta,
    pack_ids,
)
from shared.rpc.methods import COMMIT, PUSHED, RENEW, RESERVE, STOP, Rpc, unary

log = logging.getLogger("baton.landing")
TICK_S = 0.5
MAX_TICKETS = 1 << 14  # that one writer may renew at once: far more than a pool has room for
MAX_CANCELLED = 1 << 12  # requests whose cancellation is remembered
CORRUPT = "checksums differ"


class HandoffReceiver:
    def __init__(self, node: Node, memory: KVMemory, channels: Sequence[KVChannel], timeout_s: float) -> None:
        self._node = node
        self._memory = memory
        self._channels = channels
        self._timeout_s = timeout_s  # how long a writer may wait for room
        self._table = ReservationTable(fenced=all(channel.fenced for channel in channels))
        self._waiting: dict[str, asyncio.Future[Request]] = {}
        self._cancelled: dict[str, None] = {}  # requests that were stopped before they reserved anything
        node.on_room_found = self.on_room_found
        node.on_abort = self.on_abort

    def handlers(self) -> dict[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]:
        return {
            RESERVE: unary(self.reserve),
            PUSHED: unary(self.pushed),
            COMMIT: unary(self.commit),
            STOP: unary(self.stop),
            RENEW: unary(self.renew),
        }

    def start(self) -> None:
        self._node.tasks.start(self._watch_leases())

    async def close(self) -> None:
        """Its tasks are the node's."""

    # ---- what writers ask ---------------------------------------------------------------------------------------

    async def reserve(self, message: ReserveRequest) -> ReserveReply:
        node, submit = self._node, message.request
        about(submit.id, submit.traceparent)
        if message.fingerprint != node.info.fingerprint:
            return ReserveReply(error=f"this node has {node.info.fingerprint}, the prefill node {message.fingerprint}")
        if not is_incarnation_id(message.writer):
            return ReserveReply(
                error=f"writer is {message.writer!r:.40}: it must be a boot id of 32 hexadecimal digits"
            )
        if submit.id in self._cancelled:
            return ReserveReply(error="the prefill node has cancelled this request")
        waiting = asyncio.get_running_loop().create_future()
        try:
            request = node.register(submit.router, submit, lands=True)
        except ValueError as error:
            return ReserveReply(error=str(error))
        self._waiting[request.id] = waiting
        try:
            async with asyncio.timeout(self._timeout_s):
                await waiting
        except (TimeoutError, asyncio.CancelledError):
            node.abort(request.id)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the writer is gone; else the request was aborted, or it is too late
            return ReserveReply(error=f"no room within {self._timeout_s:g} s")
        finally:
            del self._waiting[request.id]
        if not node.owns(request.id):  # aborted after room was found, before this line ran: the blocks are gone
            return ReserveReply(error="the request was aborted")
        try:
            failpoints.reach("decode.reserved", request.id)
            return self._grant(message, request)
        except BaseException:
            node.abort(request.id)
            raise

    def _grant(self, message: ReserveRequest, request: Request) -> ReserveReply:
        num_held = request.num_computed // self._node.info.block_tokens
        blocks = request.blocks[num_held:]
        ticket = secrets.token_bytes(RESERVATION_ID_BYTES)
        landing = self._table.add(ticket, request, message.writer, blocks, time.monotonic())
        if request.shared_pool:
            landing.num_checked = len(blocks)  # nothing is sent that could differ
        for channel in self._channels:
            channel.grant(ticket, blocks)
        cards = {channel.name: channel.descriptor() for channel in self._channels}
        return ReserveReply(ticket, num_held, pack_ids(blocks), cards, held=pack_ids(request.blocks[:num_held]))

    async def pushed(self, message: PushedNotice) -> Ack:
        landing = self._table.open(message.reservation_id)
        if landing is None:
            return Ack("the ticket is void")
        error = await self._check(landing, message.checksums)
        return Ack(error, again=error == CORRUPT)

    async def _check(self, landing: Reservation, sums: bytes) -> str:
        """Compares the next rows with their checksums, on a thread. Returns what is wrong; the rows stay unchecked."""
        first = landing.num_checked
        last = first + len(sums) // CHECKSUM_BYTES
        if len(sums) % CHECKSUM_BYTES or last > len(landing.blocks):
            return f"{len(sums)} bytes are no checksums of the {len(landing.blocks) - first} rows to come"
        found = await asyncio.to_thread(self._memory.checksums, landing.blocks[first:last])
        if landing.num_checked != first:
            return "rows were told twice"
        if found != sums:
            starts = range(0, len(sums), CHECKSUM_BYTES)
            self._node.handoff_counters.rows_corrupt += sum(
                found[at : at + CHECKSUM_BYTES] != sums[at : at + CHECKSUM_BYTES] for at in starts
            )
            return CORRUPT
        landing.num_checked = last
        return ""

    async def commit(self, message: CommitRequest) -> Ack:
        landing = self._table.commit(message.reservation_id)
        if landing is None:
            return Ack("the ticket is void")
        request = landing.request
        for channel in self._channels:
            channel.revoke(message.reservation_id)
        try:
            failpoints.reach("decode.before_check", request.id)
            error = await self._check(landing, message.checksums)
        except BaseException:
            if not self._table.is_closed(landing):
                self._end(self._table.reject(landing), "the commit was cut off")
            raise
        if self._table.is_closed(landing):
            return Ack("the request was aborted")
        if error == CORRUPT and self._table.reopen(landing):
            for channel in self._channels:
                channel.grant(landing.reservation_id, landing.blocks[landing.num_checked :])
            return Ack(error, again=True)
        if error := error or self._flaw(landing, message):
            self._end(self._table.reject(landing), f"the rows are not what the prefill node sent: {error}")
            return Ack(error)
        self._table.accept(landing)
        self._node.recorder.event(request.id, "landed")
        self._node.send_for(request.id, TokenDelta(request.id, handed_off=True))
        self._node.post_for(request, lambda scheduler: scheduler.kv_received(request, message.first_token))
        failpoints.reach("decode.landed", request.id)
        return Ack()

    def _flaw(self, landing: Reservation, message: CommitRequest) -> str:
        if landing.num_checked < len(landing.blocks):
            return f"{len(landing.blocks) - landing.num_checked} rows were never told"
        if not 0 <= message.first_token < self._node.vocab_size:
            return f"token id {message.first_token} is not in the vocabulary of {self._node.vocab_size}"
        return ""

    async def stop(self, message: StopRequest) -> Ack:
        if message.request in self._waiting:
            self._node.abort(message.request)
        ticket = message.reservation_id or self._table.id_of(message.request)
        if not ticket and 0 < len(message.request) <= MAX_ID:
            self._remember_cancelled(message.request)
        self._end(self._table.stop(ticket), f"the prefill node stopped: {message.reason[:200]}")
        return Ack()

    def _remember_cancelled(self, identity: str) -> None:
        """Refuse a reservation for this request if it arrives after its cancellation: over an older connection, a
        request may be delivered late. The prefill node would never learn of that reservation, nor stop it."""
        self._cancelled[identity] = None
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    async def renew(self, message: RenewRequest) -> RenewReply:
        data = message.reservation_ids
        if len(data) > MAX_TICKETS * RESERVATION_ID_BYTES or len(data) % RESERVATION_ID_BYTES:
            return RenewReply(f"{len(data)} bytes are not up to {MAX_TICKETS} tickets")
        tickets = [data[at : at + RESERVATION_ID_BYTES] for at in range(0, len(data), RESERVATION_ID_BYTES)]
        self._table.renew(message.writer, tickets, time.monotonic())
        quarantined = b"".join(self._table.quarantined(message.writer))
        return RenewReply("", self._table.has(message.writer), quarantined)

    # ---- what the node tells ------------------------------------------------------------------------------------

    def on_room_found(self, request: Request) -> None:
        waiting = self._waiting.get(request.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(request)

    def on_abort(self, identity: str) -> bool:
        if (waiting := self._waiting.get(identity)) is not None:
            waiting.cancel()
        ending = self._table.abort(identity)
        if ending is None:
            return False
        self._release(ending)
        return True

    def on_writer_lost(self, writer: str) -> None:
        """The channel's news that a writer's process ended, or closed its mapping of this pool."""
        if not self._table.has(writer) or self._can_write(writer):
            return
        for ending in self._table.writer_lost(writer):
            self._end(ending, "the prefill node is gone")

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for ending in self._table.expired(time.monotonic(), self._can_write):
                self._end(ending, "its lease ended")

    def _can_write(self, writer: str) -> bool:
        """Whether a writer that is taken for dead could still write. If not, it never can again: it may only have
        been frozen, and would go on with rows that are somebody else's by then."""
        return not all(channel.fenced or channel.fence_writer(writer) for channel in self._channels)

    # ---- endings ------------------------------------------------------------------------------------------------

    def _end(self, ending: ReservationEnd | None, reason: str) -> None:
        if ending is None:
            return
        identity = ending.reservation.request.id
        if not ending.quarantined:
            log.warning("landing of %s ended: %s", identity, reason, extra=fields(request=identity))
            self._node.send_for(identity, TokenDelta(identity, error=f"landing: {reason}", retry=True))
            self._node.finish(identity, f"landing: {reason}")
        self._release(ending)

    def _release(self, ending: ReservationEnd) -> None:
        landing = ending.reservation
        for channel in self._channels:
            channel.revoke(landing.reservation_id)
        post = self._node.engine.post
        if ending.quarantined:
            post(lambda scheduler: scheduler.pool.clear(landing.blocks))
        else:
            post(lambda scheduler: scheduler.abort(landing.request, writer_stopped=ending.safe))
