"""The reservations of a decode node: blocks that are reserved for a writer until the request may run.

The table does no I/O and reads no clock. Each method handles one event, and may return failed reservations, which the
caller has to report. After a failed handoff, the blocks may be reused only when the writer can no longer write. This is
the case if the writer has reported that it stopped, if the writer is known to be dead, or if all channels drop late
rows (`fenced`). Until then, the blocks are in quarantine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from scheduler.request import Request

LEASE_S = 9.0  # leases are checked twice a second, so a dead writer holds blocks for less than 10 s
LOST_S = 3.0  # a writer's leases end within this time after its connection ended, unless the writer renews them


class ReservationPhase(Enum):
    OPEN = "open"  # the writer may write
    CHECKING = "checking"  # committed; the rows are being compared with their checksums
    COMMITTED = "committed"  # the blocks belong to the request
    QUARANTINED = "quarantined"  # the handoff failed, and the writer may still write
    CLOSED = "closed"  # the handoff failed, and the writer can no longer write


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
    rows: list[int]  # reserved for the writer
    lease_expires: float
    num_checked: int = 0  # number of leading `rows` that match their checksums
    phase: ReservationPhase = ReservationPhase.OPEN
    is_repeated: bool = False  # rows were damaged at the commit, and may be written once more
    was_quarantined: bool = False  # quarantine has ended; the failure was reported when the quarantine began

    def move_to(self, phase: ReservationPhase) -> None:
        assert phase in LEGAL[self.phase], f"reservation: {self.phase} -> {phase} is not a legal transition"
        self.was_quarantined |= self.phase is ReservationPhase.QUARANTINED
        self.phase = phase


class ReservationTable:
    """The reservations of one decode node, keyed by id.

    The `HandoffReceiver` owns the table, and uses it only on the event loop. A reservation leaves the table when it is
    committed, or when its writer can no longer write. The methods return each failed reservation once when it enters
    quarantine, and once when it is closed. If `fenced` is true, the channels drop rows that are written under an
    unknown reservation.
    """

    def __init__(self, fenced: bool, lease_s: float = LEASE_S) -> None:
        self._fenced = fenced
        self._lease_s = lease_s
        self._by_id: dict[bytes, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, reservation_id: bytes, request: Request, writer: str, rows: list[int], now: float) -> Reservation:
        """Reserve rows for the writer, with a lease that the writer has to renew."""
        assert reservation_id not in self._by_id
        reservation = Reservation(reservation_id, request, writer, rows, now + self._lease_s)
        self._by_id[reservation_id] = reservation
        return reservation

    def renew(self, writer: str, reservation_ids: list[bytes], now: float) -> None:
        """Renew leases. Ignore reservations that have ended or belong to another writer."""
        for reservation in filter(None, map(self._by_id.get, reservation_ids)):
            if reservation.writer == writer:
                reservation.lease_expires = max(reservation.lease_expires, now + self._lease_s)

    def open(self, reservation_id: bytes) -> Reservation | None:
        """Return the reservation if its writer may write, else None."""
        reservation = self._by_id.get(reservation_id)
        return reservation if reservation is not None and reservation.phase is ReservationPhase.OPEN else None

    def of(self, request_id: str) -> Reservation | None:
        """Return the reservation of a request, if any. Walks all reservations."""
        return next((entry for entry in self._by_id.values() if entry.request.id == request_id), None)

    def of_writer(self, writer: str) -> list[Reservation]:
        """Return the reservations of a writer. Walks all reservations."""
        return [entry for entry in self._by_id.values() if entry.writer == writer]

    def quarantined(self, writer: str) -> list[bytes]:
        """Return the ids of this writer's reservations in quarantine."""
        entries = self.of_writer(writer)
        return [entry.reservation_id for entry in entries if entry.phase is ReservationPhase.QUARANTINED]

    def commit(self, reservation_id: bytes) -> Reservation | None:
        """Begin the check of a reservation whose writer wrote all rows. Return None if the reservation is not open."""
        reservation = self.open(reservation_id)
        if reservation is not None:
            reservation.move_to(ReservationPhase.CHECKING)
        return reservation

    @staticmethod
    def reopen(reservation: Reservation) -> bool:
        """Let the writer write the unchecked rows and commit again, but only once. Return False at later calls."""
        if reservation.is_repeated:
            return False
        reservation.is_repeated = True
        reservation.move_to(ReservationPhase.OPEN)
        return True

    def accept(self, reservation: Reservation) -> None:
        """Complete a reservation whose rows are correct: the blocks now belong to the request."""
        reservation.move_to(ReservationPhase.COMMITTED)
        del self._by_id[reservation.reservation_id]

    def close(self, reservation: Reservation) -> Reservation:
        """End a reservation whose writer can no longer write."""
        reservation.move_to(ReservationPhase.CLOSED)
        del self._by_id[reservation.reservation_id]
        return reservation

    def stop(self, reservation_id: bytes) -> Reservation | None:
        """End and return a reservation whose writer has stopped. Return None if it has ended or is being checked."""
        reservation = self._by_id.get(reservation_id)
        if reservation is None or reservation.phase is ReservationPhase.CHECKING:
            return None
        return self.close(reservation)

    def abort(self, request_id: str) -> Reservation | None:
        """End or quarantine the reservation of a request that ended during its handoff, and return the reservation.

        Return None if the request has no reservation, or if the reservation is already in quarantine.
        """
        reservation = self.of(request_id)
        if reservation is None or reservation.phase is ReservationPhase.QUARANTINED:
            return None
        if self._fenced or reservation.phase is ReservationPhase.CHECKING:
            return self.close(reservation)
        reservation.move_to(ReservationPhase.QUARANTINED)
        return reservation

    def expired(self, now: float, can_write: Callable[[str], bool]) -> list[Reservation]:
        """End or quarantine the reservations whose lease has expired, and return them.

        `can_write(writer)` returns whether the writer can still write. If it can, its reservations are quarantined.
        """
        entries = [entry for entry in self._by_id.values() if entry.lease_expires < now]
        ends = [
            self.abort(entry.request.id) if can_write(entry.writer) else self.close(entry)
            for entry in entries
            if entry.phase is not ReservationPhase.CHECKING
        ]
        return [end for end in ends if end is not None]

    def writer_lost(self, writer: str, now: float) -> list[Reservation]:
        """End or quarantine the open reservations of a writer whose connection has ended, and shorten their leases.

        If the writer's process still runs, it renews the leases, and learns from the reply that it must stop.
        """
        entries = [entry for entry in self.of_writer(writer) if entry.phase is not ReservationPhase.CHECKING]
        for entry in entries:
            entry.lease_expires = min(entry.lease_expires, now + LOST_S)
        return [end for end in (self.abort(entry.request.id) for entry in entries) if end is not None]

    def extend(self, seconds: float) -> None:
        """Extend all leases. Called if this process stood still, and may have renewals that it has not read yet."""
        for entry in self._by_id.values():
            entry.lease_expires += seconds
