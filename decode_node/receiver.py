"""Receives handoffs: reserves blocks, checks the rows that a prefill node wrote, and starts or fails the request."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

import numpy as np

from decode_node.reservations import LEASE_S, Reservation, ReservationPhase, ReservationTable
from node.node import Node, RoleAdapter
from node.validation import MAX_ID
from scheduler.request import Request
from scheduler.role import DECODE
from shared import failpoints
from shared.kv.channel import RESERVATION_ID_BYTES, KVChannel, is_incarnation_id
from shared.kv.memory import CHECKSUM_BYTES, KVMemory
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
from shared.rpc.methods import COMMIT, PUSHED, RENEW, RESERVE, STOP, unary

log = logging.getLogger("baton.handoff")
CHECK_LEASES_S = 0.5
STALL_S = 1.0  # if the event loop stood still for this long, it may not have read renewals that have arrived
MAX_RENEWED = 1 << 14  # maximum number of reservations in one renewal: far more than fit into any pool
MAX_CANCELLED = 1 << 12  # maximum number of requests whose cancellation is remembered
CORRUPT = "checksums differ"
NOT_OPEN = Ack("the reservation is not open")


class HandoffReceiver(RoleAdapter):
    """The role adapter of a decode node.

    Runs on the event loop, but computes checksums on another thread. For each handoff, the prefill node (the writer)
    calls `reserve`, `pushed` any number of times, and `commit`. In the meantime, it calls `renew`, and it may call
    `stop` at any time. A request runs only after all its rows were compared with the writer's checksums. After a failed
    handoff, its blocks are reused only when the writer can no longer write (see `ReservationTable`).
    """

    role = DECODE

    def __init__(
        self,
        node: Node,
        memory: KVMemory,
        channels: Sequence[KVChannel],
        reserve_timeout_s: float,
        lease_s: float = LEASE_S,
        check_leases_s: float = CHECK_LEASES_S,
    ) -> None:
        super().__init__(node, memory, channels, reserve_timeout_s)
        self._vocab_size = node.rules.vocab_size
        self._check_leases_s = check_leases_s
        self._table = ReservationTable(all(channel.fenced for channel in channels), lease_s)
        self._waiting: dict[str, asyncio.Future[Request]] = {}  # by request id; done when the request has blocks
        self._cancelled: dict[str, None] = {}  # ids of requests that were stopped before they reserved blocks
        self.handlers = {
            RESERVE: unary(self.reserve),
            PUSHED: unary(self.pushed),
            COMMIT: unary(self.commit),
            STOP: unary(self.stop),
            RENEW: unary(self.renew),
        }

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not len(self._table)

    def start(self) -> None:
        self._tasks.start(self._watch_leases())

    # ---- from prefill nodes -------------------------------------------------------------------------------------

    async def reserve(self, message: ReserveRequest) -> ReserveReply:
        """Register the request, wait until the scheduler has blocks for it, and reserve them for the writer."""
        submit = message.request
        about(submit.id, submit.traceparent)
        if message.fingerprint != self._info.fingerprint:
            fingerprints = f"{self._info.fingerprint} here, {message.fingerprint} at the writer"
            return ReserveReply(error=f"fingerprints differ: {fingerprints}")
        if not is_incarnation_id(message.writer):
            return ReserveReply(error=f"writer is {message.writer!r:.40}: it must be 32 hexadecimal digits")
        if submit.id in self._cancelled:
            return ReserveReply(error="the prefill node has cancelled this request")
        blocks_found = asyncio.get_running_loop().create_future()
        try:
            request = self._requests.register(submit.router, submit, self.on_abort, receive_kv=True)
        except ValueError as error:
            return ReserveReply(error=str(error))
        self._waiting[request.id] = blocks_found
        try:
            async with asyncio.timeout(self._reserve_timeout_s):
                await blocks_found
        except (TimeoutError, asyncio.CancelledError) as error:
            self._requests.abort(request.id)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the prefill node disconnected, which cancelled this task
            late = f"no free blocks within {self._reserve_timeout_s:g} s"
            return ReserveReply(error=late if isinstance(error, TimeoutError) else "the request was aborted")
        finally:
            del self._waiting[request.id]
        if request.id not in self._requests:  # an abort in the meantime released its blocks
            return ReserveReply(error="the request was aborted")
        try:
            failpoints.reach("decode.reserved", request.id)
            return self._grant(message, request)
        except BaseException:
            self._requests.abort(request.id)
            raise

    def _grant(self, message: ReserveRequest, request: Request) -> ReserveReply:
        num_held = request.num_computed // self._info.block_tokens
        rows = list(request.reserved)
        reservation_id = secrets.token_bytes(RESERVATION_ID_BYTES)
        reservation = self._table.add(reservation_id, request, message.writer, rows, time.monotonic())
        if request.shared_pool:
            reservation.num_checked = len(rows)  # no rows are sent, so there is nothing to check
        for channel in self._channels:
            channel.grant(reservation_id, rows)
        descriptors = {channel.name: channel.descriptor() for channel in self._channels}
        held: list[int] = []
        if request.shared_pool:
            for table, group in zip(request.tables, self._geometry.attention, strict=True):
                held += [row for row in table[: num_held * group.rows] if row]
            held += request.snapshot
        return ReserveReply(reservation_id, num_held, pack_ids(rows), descriptors, held=pack_ids(held))

    async def pushed(self, message: PushedNotice) -> Ack:
        """Check rows while the prefill node computes the next chunk, so that `commit` has few rows to check."""
        reservation = self._table.open(message.reservation_id)
        if reservation is None:
            return NOT_OPEN
        error = await self._check(reservation, message.checksums)
        return Ack(error, again=error == CORRUPT)

    async def commit(self, message: CommitRequest) -> Ack:
        """Check the last rows and start the request. If rows are damaged, let the writer send them once more."""
        reservation = self._table.commit(message.reservation_id)
        if reservation is None:
            return NOT_OPEN
        request = reservation.request
        for channel in self._channels:
            channel.revoke(message.reservation_id)
        try:
            failpoints.reach("decode.before_check", request.id)
            error = await self._check(reservation, message.checksums)
        except BaseException:
            if reservation.phase is ReservationPhase.CHECKING:
                self._end(self._table.close(reservation), "the commit was interrupted")
            raise
        if reservation.phase is ReservationPhase.CLOSED:
            return Ack("the request was aborted")
        if error == CORRUPT and self._table.reopen(reservation):
            for channel in self._channels:
                channel.grant(reservation.reservation_id, reservation.rows[reservation.num_checked :])
            return Ack(error, again=True)
        if error := error or self._commit_error(reservation, message):
            self._end(self._table.close(reservation), f"the rows differ from those that the prefill node sent: {error}")
            return Ack(error)
        self._table.accept(reservation)
        self._recorder.event(request.id, "received")
        self._requests.send(TokenDelta(request.id, handed_off=True))
        token, current_state = message.first_token, message.current_state
        self._requests.post_for(request, lambda scheduler: scheduler.kv_received(request, token, current_state))
        failpoints.reach("decode.received", request.id)
        return Ack()

    async def _check(self, reservation: Reservation, checksums: bytes) -> str:
        """Compare the next rows with their checksums, on another thread.

        Return a description of the error, or "". If a row differs, all of these rows still count as unchecked.
        """
        first = reservation.num_checked
        last = first + len(checksums) // CHECKSUM_BYTES
        if len(checksums) % CHECKSUM_BYTES or last > len(reservation.rows):
            num_left = len(reservation.rows) - first
            return f"got {len(checksums)} bytes of checksums for {num_left} rows: must be {CHECKSUM_BYTES} per row"
        found = await asyncio.to_thread(self._memory.checksums, reservation.rows[first:last])
        if reservation.num_checked != first:
            return "checksums of the same rows were sent twice"
        if found != checksums:
            ours, theirs = (np.frombuffer(sums, np.uint64) for sums in (found, checksums))
            self._counters.rows_corrupt += int((ours != theirs).sum())
            return CORRUPT
        reservation.num_checked = last
        return ""

    def _commit_error(self, reservation: Reservation, message: CommitRequest) -> str:
        if reservation.num_checked < len(reservation.rows):
            return f"{len(reservation.rows) - reservation.num_checked} rows have no checksums"
        if not 0 <= message.first_token < self._vocab_size:
            return f"token id {message.first_token} is not in the vocabulary of {self._vocab_size}"
        if not 0 <= message.current_state < (2 if reservation.request.shared_pool else 1):
            return f"the current state is {message.current_state}, but must be the index of a reserved state"
        return ""

    async def stop(self, message: StopRequest) -> Ack:
        """End a reservation whose writer reports that it has stopped writing."""
        if message.request in self._waiting:
            self._requests.abort(message.request)
        reservation_id, known = message.reservation_id, self._table.of(message.request)
        if not reservation_id and known is not None:
            reservation_id = known.reservation_id
        elif not reservation_id and 0 < len(message.request) <= MAX_ID:
            self._remember_cancelled(message.request)
        is_finished = message.reason.startswith("finished: ")
        level = logging.DEBUG if is_finished or message.reason == "aborted" else logging.WARNING
        reason = f"the prefill node stopped: {message.reason[:200]}"
        reservation = self._table.stop(reservation_id)
        if reservation is not None and is_finished:  # a report of the failure could overtake the last token
            self._requests.finish(reservation.request.id, reason)
        self._end(reservation, reason, level)
        return Ack()

    def _remember_cancelled(self, request_id: str) -> None:
        """Refuse later reservations for this request.

        A delayed call of `reserve` may still arrive on an older connection. The prefill node would not know the
        reservation that the call makes, and would never stop it.
        """
        self._cancelled[request_id] = None
        if len(self._cancelled) > MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    async def renew(self, message: RenewRequest) -> RenewReply:
        """Renew leases. Reply with the reservations in quarantine, which the writer must stop."""
        data, size = message.reservation_ids, RESERVATION_ID_BYTES
        if len(data) > MAX_RENEWED * size or len(data) % size:
            return RenewReply(f"{len(data)} bytes: must be {size} for each of at most {MAX_RENEWED} reservation ids")
        reservation_ids = [data[at : at + size] for at in range(0, len(data), size)]
        self._table.renew(message.writer, reservation_ids, time.monotonic())
        quarantined = b"".join(self._table.quarantined(message.writer))
        return RenewReply("", bool(self._table.of_writer(message.writer)), quarantined)

    # ---- from the node ------------------------------------------------------------------------------------------

    def on_admitted(self, request: Request) -> None:
        waiting = self._waiting.get(request.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(request)

    def on_abort(self, request_id: str) -> bool:
        if (waiting := self._waiting.get(request_id)) is not None:
            waiting.cancel()
        reservation = self._table.abort(request_id)
        if reservation is not None:
            self._release(reservation)
        return reservation is not None

    def on_writer_lost(self, writer: str) -> None:
        for end in self._table.writer_lost(writer, time.monotonic()):
            self._requests.guard(end.request.id, self._end, end, "the connection to the prefill node ended")

    async def _watch_leases(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(self._check_leases_s)
            if (late_s := time.monotonic() - began - self._check_leases_s) > STALL_S:
                self._table.extend(late_s)
            for end in self._table.expired(time.monotonic(), self._can_write):
                self._requests.guard(end.request.id, self._end, end, "its lease expired")

    def _can_write(self, writer: str) -> bool:
        """Fence a writer whose lease has expired. Return True if this fails, because the writer is still connected.

        The writer may be frozen rather than dead. Without the fence, it could resume and overwrite blocks that were
        reassigned in the meantime.
        """
        return not all(channel.fenced or channel.fence_writer(writer) for channel in self._channels)

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _end(self, reservation: Reservation | None, reason: str, level: int = logging.WARNING) -> None:
        """Report a failed handoff, unless it was reported when its quarantine began, and release the blocks."""
        if reservation is None:
            return
        request_id = reservation.request.id
        if not reservation.was_quarantined:
            log.log(level, "handoff of %s ended: %s", request_id, reason, extra=fields(request=request_id))
            self._requests.send(TokenDelta(request_id, error=f"handoff: {reason}", retry=True))
            self._requests.finish(request_id, f"handoff: {reason}")
        self._release(reservation)

    def _release(self, reservation: Reservation) -> None:
        for channel in self._channels:
            channel.revoke(reservation.reservation_id)
        is_safe = reservation.phase is ReservationPhase.CLOSED
        if reservation.was_quarantined:
            self._engine.post(lambda scheduler: scheduler.pool.clear(reservation.rows))
        else:
            self._engine.post(lambda scheduler: scheduler.abort(reservation.request, writer_stopped=is_safe))
