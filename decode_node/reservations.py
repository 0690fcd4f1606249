"""The decode node's side of handoffs: blocks reserved for a writer, until they belong to a request that may run.

A table without I/O or clock: events go in with the time, what to do comes out. After a handoff that fails, its blocks
may be reused only when the writer can no longer write: it said that it stopped, it is known to be dead, or the channel
drops late rows (`fenced`). Until then they are in quarantine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from scheduler.request import Request

LEASE_S = 9.0  # plus up to a second until its end is noticed: nothing is held for a dead writer beyond 10 s


class ReservationPhase(Enum):
    OPEN = "open"  # the writer may write
    CHECKING = "checking"  # committed; the rows are being compared with their checksums
    COMMITTED = "committed"  # the blocks are the request's
    QUARANTINED = "quarantined"  # given up, and the writer may still write
    CLOSED = "closed"


LEGAL: dict[ReservationPhase, frozenset[ReservationPhase]] = {
    ReservationPhase.OPEN: frozenset(
        {ReservationPhase.CHECKING, ReservationPhase.QUARANTINED, ReservationPhase.CLOSED}
    ),
    ReservationPhase.CHECKING: frozenset({ReservationPhase.OPEN, ReservationPhase.COMMITTED, ReservationPhase.CLOSED}),
    ReservationPhase.QUARANTINED: frozenset({ReservationPhase.CLOSED}),
    ReservationPhase.COMMITTED: frozenset(),
    ReservationPhase.CLOSED: frozenset(),
}


@dataclass(slots=True)
class Reservation:
    reservation_id: bytes
    request: Request
    writer: str  # incarnation id of the prefill node
    blocks: list[int]  # reserved for the writer
    lease_expires: float
    num_checked: int = 0  # leading `blocks` whose rows match their checksums
    phase: ReservationPhase = ReservationPhase.OPEN
    is_repeated: bool = False  # rows were damaged at the commit, and may be written once more

    def move_to(self, phase: ReservationPhase) -> None:
        assert phase in LEGAL[self.phase], f"reservation: {self.phase} -> {phase} is not a legal transition"
        self.phase = phase


@dataclass(frozen=True, slots=True)
class ReservationEnd:
    """A reservation that failed. `safe`: its blocks can no longer be written.

    `quarantined`: the request was given up earlier, and its blocks become safe only now.
    """

    reservation: Reservation
    safe: bool
    quarantined: bool = False


class ReservationTable:
    """The reservations of one decode node, by id and by request.

    Belongs to the `HandoffReceiver`, on the event loop. A reservation leaves the table when it is committed or when
    its blocks are safe; a method that ends one returns it as `ReservationEnd` exactly once as safe. `fenced`: the
    channels drop rows that are written under an unknown reservation.
    """

    def __init__(self, fenced: bool, lease_s: float = LEASE_S) -> None:
        self._fenced = fenced
        self._lease_s = lease_s
        self._by_id: dict[bytes, Reservation] = {}
        self._by_request: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, reservation_id: bytes, request: Request, writer: str, blocks: list[int], now: float) -> Reservation:
        """Reserve blocks for the writer until the lease ends, unless it is renewed."""
        assert reservation_id not in self._by_id
        reservation = Reservation(reservation_id, request, writer, blocks, now + self._lease_s)
        self._by_id[reservation_id] = self._by_request[request.id] = reservation
        return reservation

    def renew(self, writer: str, reservation_ids: list[bytes], now: float) -> None:
        """Renew leases. Ignore reservations that are another writer's, or over."""
        for reservation_id in reservation_ids:
            reservation = self._by_id.get(reservation_id)
            if reservation is not None and reservation.writer == writer:
                reservation.lease_expires = max(reservation.lease_expires, now + self._lease_s)

    def open(self, reservation_id: bytes) -> Reservation | None:
        """Return the reservation if its writer may write."""
        reservation = self._by_id.get(reservation_id)
        return reservation if reservation is not None and reservation.phase is ReservationPhase.OPEN else None

    def id_of(self, request_id: str) -> bytes:
        """Return the id of the request's reservation, or an empty one."""
        reservation = self._by_request.get(request_id)
        return reservation.reservation_id if reservation is not None else b""

    def commit(self, reservation_id: bytes) -> Reservation | None:
        """The writer has written everything and writes no more. Return None if the reservation is not open."""
        reservation = self.open(reservation_id)
        if reservation is not None:
            reservation.move_to(ReservationPhase.CHECKING)
        return reservation

    @staticmethod
    def reopen(reservation: Reservation) -> bool:
        """Let the writer write the unchecked rows once more, and commit again. Return False the second time."""
        if reservation.is_repeated:
            return False
        reservation.is_repeated = True
        reservation.move_to(ReservationPhase.OPEN)
        return True

    @staticmethod
    def is_closed(reservation: Reservation) -> bool:
        return reservation.phase is ReservationPhase.CLOSED

    def accept(self, reservation: Reservation) -> None:
        """The rows are what the writer sent: the blocks are the request's."""
        reservation.move_to(ReservationPhase.COMMITTED)
        self._drop(reservation)

    def reject(self, reservation: Reservation) -> ReservationEnd:
        """The rows are not what the writer sent; it has stopped writing."""
        return self._close(reservation)

    def stop(self, reservation_id: bytes) -> ReservationEnd | None:
        """The writer gave up and writes no more. Return None if nothing is left to end, or it is being checked."""
        reservation = self._by_id.get(reservation_id)
        if reservation is None or reservation.phase is ReservationPhase.CHECKING:
            return None
        return self._close(reservation)

    def abort(self, request_id: str) -> ReservationEnd | None:
        """The request ended while its KV was being sent. Return None if it has no open reservation."""
        reservation = self._by_request.get(request_id)
        if reservation is None or reservation.phase is ReservationPhase.QUARANTINED:
            return None
        if self._fenced or reservation.phase is ReservationPhase.CHECKING:
            return self._close(reservation)
        reservation.move_to(ReservationPhase.QUARANTINED)
        return ReservationEnd(reservation, safe=False)

    def expired(self, now: float, can_write: Callable[[str], bool]) -> list[ReservationEnd]:
        """End the reservations whose lease is over. `can_write(writer)`: it is connected to this node's pool."""
        ends: list[ReservationEnd] = []
        for reservation in [entry for entry in self._by_id.values() if entry.lease_expires < now]:
            if reservation.phase is ReservationPhase.CHECKING:
                continue
            end = self.abort(reservation.request.id) if can_write(reservation.writer) else self._close(reservation)
            if end is not None:
                ends.append(end)
        return ends

    def has(self, writer: str) -> bool:
        """Return whether blocks are reserved for this writer. Walks all reservations."""
        return any(reservation.writer == writer for reservation in self._by_id.values())

    def quarantined(self, writer: str) -> list[bytes]:
        """Ids of this writer's reservations that were given up, and that it has not stopped. Walks all reservations."""
        return [
            reservation_id
            for reservation_id, entry in self._by_id.items()
            if entry.writer == writer and entry.phase is ReservationPhase.QUARANTINED
        ]

    def writer_lost(self, writer: str) -> list[ReservationEnd]:
        """The writer's process has ended, or can no longer reach this node's pool."""
        lost = [
            entry
            for entry in self._by_id.values()
            if entry.writer == writer and entry.phase is not ReservationPhase.CHECKING
        ]
        return [self._close(entry) for entry in lost]

    def _close(self, reservation: Reservation) -> ReservationEnd:
        quarantined = reservation.phase is ReservationPhase.QUARANTINED
        reservation.move_to(ReservationPhase.CLOSED)
        self._drop(reservation)
        return ReservationEnd(reservation, safe=True, quarantined=quarantined)

    def _drop(self, reservation: Reservation) -> None:
        del self._by_id[reservation.reservation_id]
        self._by_request.pop(reservation.request.id, None)
