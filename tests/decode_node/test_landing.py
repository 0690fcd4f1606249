"""The decode node's landing table: whose blocks may be used again, and when."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from decode_node.reservations import LEASE_S, Reservation, ReservationEnd, ReservationPhase, ReservationTable
from tests.scheduler.drive import request

WRITERS = ["writer-a", "writer-b"]


class Landings(RuleBasedStateMachine):
    """Writers that write until they commit, stop or die, against the table's word that their blocks are free."""

    tickets = Bundle("tickets")

    @initialize(fenced=st.booleans())
    def begin(self, fenced: bool) -> None:
        self.fenced = fenced
        self.table = ReservationTable(fenced)
        self.now = 0.0
        self.count = 0
        self.writing: dict[bytes, str] = {}  # ticket -> a writer that may still write
        self.reusable: set[bytes] = set()
        self.again: set[bytes] = set()  # of which damaged rows were written twice
        self.landings: dict[bytes, Reservation] = {}

    def _ended(self, ending: ReservationEnd | None) -> None:
        if ending is None or not ending.safe:
            return
        ticket = ending.reservation.reservation_id
        assert ticket not in self.reusable, "blocks are given back once"
        assert self.fenced or ticket not in self.writing, "blocks of a live writer were given back"
        self.reusable.add(ticket)

    @rule(target=tickets, writer=st.sampled_from(WRITERS))
    def expect(self, writer: str) -> bytes:
        self.count += 1
        ticket = self.count.to_bytes(16)
        self.landings[ticket] = self.table.add(ticket, request(f"r{self.count}", [1], 2), writer, [], self.now)
        self.writing[ticket] = writer
        return ticket

    @rule(ticket=tickets, rows=st.sampled_from(["right", "wrong", "damaged"]))
    def commit(self, ticket: bytes, rows: str) -> None:
        if ticket not in self.writing:
            assert self.table.commit(ticket) is None or ticket not in self.reusable
            return
        landing = self.table.commit(ticket)
        del self.writing[ticket]
        if landing is None:
            self._ended(self.table.stop(ticket))  # it is told that the ticket is void, and stops
        elif rows == "right":
            self.table.accept(landing)
        elif rows == "damaged" and self.table.reopen(landing):
            assert ticket not in self.again, "once"
            self.again.add(ticket)
            self.writing[ticket] = landing.writer
        else:
            self._ended(self.table.reject(landing))

    @rule(ticket=tickets)
    def stop(self, ticket: bytes) -> None:
        self.writing.pop(ticket, None)
        self._ended(self.table.stop(ticket))

    @rule(ticket=tickets)
    def abort(self, ticket: bytes) -> None:
        self._ended(self.table.abort(self.landings[ticket].request.id))

    @rule(writer=st.sampled_from(WRITERS))
    def die(self, writer: str) -> None:
        self.writing = {ticket: name for ticket, name in self.writing.items() if name != writer}
        for ending in self.table.writer_lost(writer):
            self._ended(ending)

    @rule(writer=st.sampled_from(WRITERS))
    def renew(self, writer: str) -> None:
        self.table.renew(writer, [ticket for ticket, name in self.writing.items() if name == writer], self.now)

    @rule(seconds=st.floats(0.1, 2 * LEASE_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        can_write = set(self.writing.values())
        for ending in self.table.expired(self.now, lambda writer: writer in can_write):
            self._ended(ending)

    @invariant()
    def only_open_landings_are_kept(self) -> None:
        kept = [
            entry
            for entry in self.landings.values()
            if entry.phase in {ReservationPhase.OPEN, ReservationPhase.QUARANTINED}
        ]
        assert len(self.table) == len(kept)

    @invariant()
    def each_writer_is_told_what_it_has_to_stop(self) -> None:
        kept = [entry for entry in self.landings.values() if entry.phase is ReservationPhase.QUARANTINED]
        for writer in WRITERS:
            mine = {entry.reservation_id for entry in kept if entry.writer == writer}
            assert set(self.table.quarantined(writer)) == mine


TestLandings = Landings.TestCase
TestLandings.settings = settings(max_examples=150)


def test_a_lease_ends_unless_the_writer_itself_renews_it() -> None:
    table = ReservationTable(fenced=True)
    landing = table.add(b"t" * 16, request("r", [1], 2), "writer-a", [3], 0.0)
    table.renew("writer-b", [landing.reservation_id], 9.0)
    table.renew("writer-a", [landing.reservation_id, b"unknown"], 5.0)
    assert not table.expired(14.0, lambda _: False)
    assert [ending.safe for ending in table.expired(15.1, lambda _: False)] == [True]
    assert table.commit(landing.reservation_id) is None
