"""Test that the reservation table frees blocks only when no writer can write to them."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from decode_node.reservations import LEASE_S, Reservation, ReservationPhase, ReservationTable
from tests.scheduler.drive import request

WRITERS = ["writer-a", "writer-b"]


class Reservations(RuleBasedStateMachine):
    """Writers write until they commit, stop or die. The table keeps their blocks until then, unless it can fence the
    writers."""

    ids = Bundle("ids")

    @initialize(fenced=st.booleans())
    def begin(self, fenced: bool) -> None:
        self.fenced = fenced
        self.table = ReservationTable(fenced)
        self.now = 0.0
        self.count = 0
        self.writing: dict[bytes, str] = {}  # the writers that may still write, by reservation id
        self.reusable: set[bytes] = set()
        self.again: set[bytes] = set()  # ids of reservations that were reopened after damaged rows
        self.reservations: dict[bytes, Reservation] = {}

    def _ended(self, ending: Reservation | None) -> None:
        if ending is None or ending.phase is not ReservationPhase.CLOSED:
            return
        reservation_id = ending.reservation_id
        assert reservation_id not in self.reusable, "blocks are freed once"
        assert self.fenced or reservation_id not in self.writing, "blocks of a live writer were freed"
        self.reusable.add(reservation_id)

    @rule(target=ids, writer=st.sampled_from(WRITERS))
    def reserve(self, writer: str) -> bytes:
        self.count += 1
        reservation_id = self.count.to_bytes(16)
        self.reservations[reservation_id] = self.table.add(
            reservation_id, request(f"r{self.count}", [1], 2), writer, [], self.now
        )
        self.writing[reservation_id] = writer
        return reservation_id

    @rule(reservation_id=ids, rows=st.sampled_from(["right", "wrong", "damaged"]))
    def commit(self, reservation_id: bytes, rows: str) -> None:
        if reservation_id not in self.writing:
            assert self.table.commit(reservation_id) is None or reservation_id not in self.reusable
            return
        reservation = self.table.commit(reservation_id)
        del self.writing[reservation_id]
        if reservation is None:
            self._ended(self.table.stop(reservation_id))  # the table refuses the commit, and the writer stops
        elif rows == "right":
            self.table.accept(reservation)
        elif rows == "damaged" and self.table.reopen(reservation):
            assert reservation_id not in self.again, "once"
            self.again.add(reservation_id)
            self.writing[reservation_id] = reservation.writer
        else:
            self._ended(self.table.close(reservation))

    @rule(reservation_id=ids)
    def stop(self, reservation_id: bytes) -> None:
        self.writing.pop(reservation_id, None)
        self._ended(self.table.stop(reservation_id))

    @rule(reservation_id=ids)
    def abort(self, reservation_id: bytes) -> None:
        self._ended(self.table.abort(self.reservations[reservation_id].request.id))

    @rule(writer=st.sampled_from(WRITERS))
    def die(self, writer: str) -> None:
        self.writing = {reservation_id: name for reservation_id, name in self.writing.items() if name != writer}
        for ending in self.table.writer_lost(writer, self.now):
            self._ended(ending)

    @rule(writer=st.sampled_from(WRITERS))
    def renew(self, writer: str) -> None:
        self.table.renew(
            writer, [reservation_id for reservation_id, name in self.writing.items() if name == writer], self.now
        )

    @rule(seconds=st.floats(0.1, 2 * LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        can_write = set(self.writing.values())
        for ending in self.table.expired(self.now, lambda writer: writer in can_write):
            self._ended(ending)

    @invariant()
    def only_reservations_that_hold_blocks_are_kept(self) -> None:
        kept = [
            entry
            for entry in self.reservations.values()
            if entry.phase in {ReservationPhase.OPEN, ReservationPhase.QUARANTINED}
        ]
        assert len(self.table) == len(kept)

    @invariant()
    def each_writer_gets_the_reservations_to_stop(self) -> None:
        kept = [entry for entry in self.reservations.values() if entry.phase is ReservationPhase.QUARANTINED]
        for writer in WRITERS:
            mine = {entry.reservation_id for entry in kept if entry.writer == writer}
            assert set(self.table.quarantined(writer)) == mine


TestReservations = Reservations.TestCase
TestReservations.settings = settings()


def test_a_lease_expires_unless_its_own_writer_renews_it() -> None:
    table = ReservationTable(fenced=True)
    reservation = table.add(b"t" * 16, request("r", [1], 2), "writer-a", [3], 0.0)
    table.renew("writer-b", [reservation.reservation_id], 9.0)
    table.renew("writer-a", [reservation.reservation_id, b"unknown"], 5.0)
    assert not table.expired(14.0, lambda _: False)
    assert table.expired(15.1, lambda _: False) == [reservation]
    assert table.commit(reservation.reservation_id) is None
