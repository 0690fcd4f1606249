"""Test the block pool against a simple model: lists of blocks, and the names of the blocks whose content is known."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.blocks import BlockPool

TOTAL = 12


class Pool(RuleBasedStateMachine):
    """Requests own blocks, and peers write to reserved blocks. A peer may still write to a quarantined block."""

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(TOTAL + 1)
        self.owned: list[list[int]] = []
        self.reserved: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.names: dict[int, bytes] = {}  # names of the blocks whose content is known
        self.number = 0

    def _fresh(self, blocks: list[int]) -> None:
        """Check that the newly allocated blocks have no other owner, and forget their names."""
        held = {block for rows in (self.owned, self.reserved, self.quarantined) for row in rows for block in row}
        assert not held & set(blocks)
        assert len(set(blocks)) == len(blocks)
        assert all(1 <= block <= TOTAL for block in blocks)
        for block in blocks:
            self.names.pop(block, None)

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        count = min(count, self.pool.available)
        unnamed = TOTAL - len(self.names) - self._num_busy_and_unnamed()
        named_before = dict(self.names)
        blocks = self.pool.take(count)
        self._fresh(blocks)
        assert len(named_before) - len(self.names) == max(0, count - unnamed), "empty blocks are allocated first"
        self.owned.append(blocks)

    def _num_busy_and_unnamed(self) -> int:
        rows = [*self.owned, *self.reserved, *self.quarantined]
        return len({block for row in rows for block in row if block not in self.names})

    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        blocks = self.pool.reserve(min(count, self.pool.available))
        self._fresh(blocks)
        self.reserved.append(blocks)

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for row in self.owned for block in row]))
        self.number += 1
        name = self.number.to_bytes(16)
        self.pool.remember(block, name)
        self.names.setdefault(block, name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Share blocks that are cached or that another request owns, as after a prefix hit."""
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.names)), min_size=1, unique=True))
        assert self.pool.match([self.names[block] for block in blocks]) == blocks
        held = {block for row in self.owned for block in row}
        assert self.pool.count_unowned(blocks) == len(set(blocks) - held)
        self.pool.share(blocks)
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.release(row)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), how=st.sampled_from(["settle", "stopped", "unknown"]))
    def end_of_a_reservation(self, data: st.DataObject, how: str) -> None:
        row = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        if how == "settle":
            self.pool.settle(row)
            self.owned.append(row)
            return
        self.pool.give_up(row, writer_stopped=how == "stopped")
        if how == "unknown":
            self.quarantined.append(row)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def writer_is_known_to_have_stopped(self, data: st.DataObject) -> None:
        row = self.quarantined.pop(data.draw(st.integers(0, len(self.quarantined) - 1)))
        self.pool.clear(row)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        ledger = self.pool.ledger()
        owned = {block for row in self.owned for block in row}
        assert ledger.balances
        assert (ledger.owned, ledger.reserved) == (len(owned), sum(map(len, self.reserved)))
        assert ledger.quarantined == sum(map(len, self.quarantined))
        assert ledger.cached == len(set(self.names) - owned)
        assert self.pool.audit([*self.owned, *self.reserved]) == ""

    @invariant()
    def only_remembered_blocks_are_found(self) -> None:
        for block, name in self.names.items():
            assert self.pool.match([name]) == [block]
        assert self.pool.match([b"never given"]) == []


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=30)
