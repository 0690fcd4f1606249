"""Test the block pool against a simple model: lists of bundles of rows, and a name for each bundle whose content is
known."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.blocks import BlockPool

TOTAL = 12


Bundle = tuple[int, ...]


def flat(bundles: Iterable[Bundle]) -> list[int]:
    return [row for bundle in bundles for row in bundle]


class Pool(RuleBasedStateMachine):
    """Requests own bundles of rows, and peers write to reserved rows. A peer may still write to a quarantined row."""

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(TOTAL + 1)
        self.owned: list[list[Bundle]] = []
        self.reserved: list[list[Bundle]] = []
        self.quarantined: list[list[Bundle]] = []
        self.names: dict[Bundle, bytes] = {}  # names of the bundles whose content is known
        self.number = 0

    def _fresh(self, bundles: list[Bundle]) -> None:
        """Check that the newly allocated rows have no other owner, and forget the names of evicted bundles."""
        rows = flat(bundles)
        held = {row for lists in (self.owned, self.reserved, self.quarantined) for one in lists for row in flat(one)}
        assert not held & set(rows)
        assert len(set(rows)) == len(rows)
        assert all(1 <= row <= TOTAL for row in rows)
        for bundle in [bundle for bundle, name in self.names.items() if self.pool.find(name) is None]:
            assert not set(bundle) & held, "a bundle with an owner was evicted"
            del self.names[bundle]
        assert not set(rows) & set(flat(self.names))

    @rule(count=st.integers(0, 3), size=st.integers(1, 3))
    def take(self, count: int, size: int) -> None:
        count = min(count, self.pool.available // size)
        unnamed, named_before = self.pool.ledger().free, dict(self.names)
        rows = self.pool.take(count * size)
        bundles = [tuple(rows[at : at + size]) for at in range(0, len(rows), size)]
        self._fresh(bundles)
        evicted = named_before.keys() - self.names.keys()
        assert bool(evicted) == (count * size > unnamed), "empty rows are allocated first"
        self.owned.append(bundles)

    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        bundles = [(row,) for row in self.pool.reserve(min(count, self.pool.available))]
        self._fresh(bundles)
        self.reserved.append(bundles)

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        bundle = data.draw(st.sampled_from([bundle for one in self.owned for bundle in one]))
        self.number += 1
        name = self.number.to_bytes(16)
        self.pool.remember(bundle, name)
        self.names.setdefault(bundle, name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.pool.forget(self.names.pop(data.draw(st.sampled_from(sorted(self.names)))))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Share bundles that are cached or that another request owns, as after a prefix hit."""
        bundles = data.draw(st.lists(st.sampled_from(sorted(self.names)), min_size=1, unique=True))
        rows = flat(bundles)
        assert self.pool.match([self.names[bundle] for bundle in bundles]) == rows
        held = {row for one in self.owned for row in flat(one)}
        assert self.pool.count_unowned(rows) == len(set(rows) - held)
        self.pool.share(rows)
        self.owned.append(bundles)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(flat(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), how=st.sampled_from(["settle", "stopped", "unknown"]))
    def end_of_a_reservation(self, data: st.DataObject, how: str) -> None:
        bundles = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if how == "settle":
            self.pool.settle(flat(bundles))
            self.owned.append(bundles)
            return
        self.pool.give_up(flat(bundles), writer_stopped=how == "stopped")
        if how == "unknown":
            self.quarantined.append(bundles)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def writer_is_known_to_have_stopped(self, data: st.DataObject) -> None:
        self.pool.clear(flat(self.quarantined.pop(data.draw(st.integers(0, len(self.quarantined) - 1)))))

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        ledger = self.pool.ledger()
        owned = {row for one in self.owned for row in flat(one)}
        assert ledger.balances
        assert (ledger.owned, ledger.reserved) == (len(owned), sum(len(flat(one)) for one in self.reserved))
        assert ledger.quarantined == sum(len(flat(one)) for one in self.quarantined)
        assert ledger.cached == len(set(flat(self.names)) - owned)
        assert self.pool.audit([flat(one) for one in [*self.owned, *self.reserved]]) == ""

    @invariant()
    def only_remembered_bundles_are_found(self) -> None:
        for bundle, name in self.names.items():
            assert self.pool.match([name]) == list(bundle)
            assert self.pool.find(name) == bundle
        assert self.pool.match([b"never given"]) == []


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=30)
