"""The decode node's side of handoffs: blocks that are promised to a writer and not yet a request's.

A table of tickets without I/O or clock: what happens goes in with the time, what is to be done comes out. Blocks of
a landing that ends badly may be used again only when its writer cannot write any more: it said so, it is known dead,
or the channel drops what comes too late (`fenced`). Until then they are in quarantine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from scheduler.request import Request

LEASE_S = 9.0  # with the second that may pass until its end is seen, nothing is held for a dead writer beyond 10 s


class ReservationPhase(Enum):
    OPEN = "open"  # the writer may write
    CHECKING = "checking"  # committed; the rows are being compared with their checksums
    LANDED = "landed"
    QUARANTINED = "quarantined"  # given up, and the writer may still write
    CLOSED = "closed"


LEGAL: dict[ReservationPhase, frozenset[ReservationPhase]] = {
    ReservationPhase.OPEN: frozenset(
        {ReservationPhase.CHECKING, ReservationPhase.QUARANTINED, ReservationPhase.CLOSED}
    ),
    ReservationPhase.CHECKING: frozenset({ReservationPhase.OPEN, ReservationPhase.LANDED, ReservationPhase.CLOSED}),
    ReservationPhase.QUARANTINED: frozenset({ReservationPhase.CLOSED}),
    ReservationPhase.LANDED: frozenset(),
    ReservationPhase.CLOSED: frozenset(),
}


@dataclass(slots=True)
class Reservation:
    reservation_id: bytes
    request: Request
    writer: str
    blocks: list[int]  # promised to the writer
    lease_expires: float
    num_checked: int = 0  # of `blocks`, whose rows are what the writer sent
    phase: ReservationPhase = ReservationPhase.OPEN
    is_repeated: bool = False  # rows came damaged at the commit, and may be written once more

    def move_to(self, phase: ReservationPhase) -> None:
        assert phase in LEGAL[self.phase], f"landing: {self.phase} -> {phase} is not a legal transition"
        self.phase = phase


@dataclass(frozen=True, slots=True)
class ReservationEnd:
    """A landing that ended badly. `safe`: nobody can write its blocks any more. `quarantined`: they were given up
    before, and only now become safe."""

    reservation: Reservation
    safe: bool
    quarantined: bool = False


class ReservationTable:
    def __init__(self, fenced: bool) -> None:
        self._fenced = fenced
        self._by_ticket: dict[bytes, Reservation] = {}
        self._by_request: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def add(self, ticket: bytes, request: Request, writer: str, blocks: list[int], now: float) -> Reservation:
        """The blocks are the writer's until the lease ends, unless it is renewed."""
        assert ticket not in self._by_ticket
        landing = Reservation(ticket, request, writer, blocks, now + LEASE_S)
        self._by_ticket[ticket] = self._by_request[request.id] = landing
        return landing

    def renew(self, writer: str, tickets: list[bytes], now: float) -> None:
        """The writer lives. Tickets that are not its own, or over, are ignored."""
        for ticket in tickets:
            landing = self._by_ticket.get(ticket)
            if landing is not None and landing.writer == writer:
                landing.lease_expires = max(landing.lease_expires, now + LEASE_S)

    def open(self, ticket: bytes) -> Reservation | None:
        """The landing whose writer may write; None: the ticket is void."""
        landing = self._by_ticket.get(ticket)
        return landing if landing is not None and landing.phase is ReservationPhase.OPEN else None

    def id_of(self, request_id: str) -> bytes:
        """Empty when no landing of it is here."""
        landing = self._by_request.get(request_id)
        return landing.reservation_id if landing is not None else b""

    def commit(self, ticket: bytes) -> Reservation | None:
        """The writer has written all and will write no more; None: the ticket is void."""
        landing = self.open(ticket)
        if landing is not None:
            landing.move_to(ReservationPhase.CHECKING)
        return landing

    @staticmethod
    def reopen(landing: Reservation) -> bool:
        """Whether the writer may write the unchecked rows once more, and commit again."""
        if landing.is_repeated:
            return False
        landing.is_repeated = True
        landing.move_to(ReservationPhase.OPEN)
        return True

    @staticmethod
    def is_closed(landing: Reservation) -> bool:
        return landing.phase is ReservationPhase.CLOSED

    def accept(self, landing: Reservation) -> None:
        landing.move_to(ReservationPhase.LANDED)
        self._drop(landing)

    def reject(self, landing: Reservation) -> ReservationEnd:
        """Its rows are not what the writer sent; it has stopped writing."""
        return self._close(landing)

    def stop(self, ticket: bytes) -> ReservationEnd | None:
        """The writer gives up and writes no more. None: nothing was left to end, or it is being checked."""
        landing = self._by_ticket.get(ticket)
        if landing is None or landing.phase is ReservationPhase.CHECKING:
            return None
        return self._close(landing)

    def abort(self, request_id: str) -> ReservationEnd | None:
        """The request is over while its KV is on its way. None: no landing of it is open."""
        landing = self._by_request.get(request_id)
        if landing is None or landing.phase is ReservationPhase.QUARANTINED:
            return None
        if self._fenced or landing.phase is ReservationPhase.CHECKING:
            return self._close(landing)
        landing.move_to(ReservationPhase.QUARANTINED)
        return ReservationEnd(landing, safe=False)

    def expired(self, now: float, can_write: Callable[[str], bool]) -> list[ReservationEnd]:
        """Landings whose writer renewed nothing for a lease. `can_write(writer)`: it is connected to this pool."""
        endings: list[ReservationEnd] = []
        for landing in [entry for entry in self._by_ticket.values() if entry.lease_expires < now]:
            if landing.phase is ReservationPhase.CHECKING:
                continue
            ending = self.abort(landing.request.id) if can_write(landing.writer) else self._close(landing)
            if ending is not None:
                endings.append(ending)
        return endings

    def has(self, writer: str) -> bool:
        """Whether rows are promised to this writer. Walks all landings: rare."""
        return any(landing.writer == writer for landing in self._by_ticket.values())

    def quarantined(self, writer: str) -> list[bytes]:
        """Ids of this writer's reservations that were given up, and that it has not stopped. Walks all reservations."""
        return [
            reservation_id
            for reservation_id, entry in self._by_ticket.items()
            if entry.writer == writer and entry.phase is ReservationPhase.QUARANTINED
        ]

    def writer_lost(self, writer: str) -> list[ReservationEnd]:
        """The writer's process is gone, or can reach this pool no more."""
        gone = [
            entry
            for entry in self._by_ticket.values()
            if entry.writer == writer and entry.phase is not ReservationPhase.CHECKING
        ]
        return [self._close(entry) for entry in gone]

    def _close(self, landing: Reservation) -> ReservationEnd:
        quarantined = landing.phase is ReservationPhase.QUARANTINED
        landing.move_to(ReservationPhase.CLOSED)
        self._drop(landing)
        return ReservationEnd(landing, safe=True, quarantined=quarantined)

    def _drop(self, landing: Reservation) -> None:
        del self._by_ticket[landing.reservation_id]
        self._by_request.pop(landing.request.id, None)
