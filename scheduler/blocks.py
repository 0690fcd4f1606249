"""The ledger of the KV pool's rows. Every row is in one of the states that `Ledger` lists.

The ledger stores row numbers; the bytes of the rows are in the KV pool. Row 0 is a dummy that pads batches and is
never allocated. An entry of the prefix cache is a bundle: the rows of one block or of one state (see
`scheduler.geometry`), which are found and evicted together.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple


class Ledger(NamedTuple):
    """The number of rows in each state, and the total, which is constant.

    Free rows are empty. Cached rows have no owner, and keep their content for prefix hits. Owned rows are held by
    requests. Reserved rows are being written by a peer. Quarantined rows belong to a cancelled reservation whose peer
    may still write to them, so they are neither read nor allocated.
    """

    free: int
    cached: int
    owned: int
    reserved: int
    quarantined: int
    total: int

    @property
    def balances(self) -> bool:
        return self.free + self.cached + self.owned + self.reserved + self.quarantined == self.total


class BlockPool:
    """Counts the owners of each row of the pool. The least recently used cached bundle is evicted first.

    The scheduler owns the pool and is its only caller, on the engine's thread. Every row is in one state of `Ledger`;
    `ledger_error` and `audit` check this. Methods assert their preconditions; a failed assertion is a scheduler bug.
    The rows of a bundle have the same owners, so a bundle is cached or evicted whole.
    """

    def __init__(self, num_rows: int) -> None:
        assert num_rows >= 2, "a pool holds the dummy row and at least one other"
        self.total = num_rows - 1
        self._empty: list[int] = []  # freed rows; they are taken before rows that were never allocated
        # The first row of each bundle without an owner, least recently used first. In a plain dict, each removal of the
        # first key would make the next first key slower to find.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_cached = 0  # number of cached rows
        # These two lists have entries only for the dummy row and for rows that were allocated at least once, so a new
        # pool takes little memory.
        self._references = [0]
        self._name_of: list[Hashable | None] = [None]  # the name of the bundle that a row belongs to
        self._bundles: dict[Hashable, tuple[int, ...]] = {}
        self._owned = 0
        self._reserved: dict[int, None] = {}
        self._quarantined: dict[int, None] = {}

    @property
    def available(self) -> int:
        return self._num_empty + self._num_cached

    @property
    def _num_empty(self) -> int:
        return len(self._empty) + self.total + 1 - len(self._references)

    def ledger(self) -> Ledger:
        reserved, quarantined = len(self._reserved), len(self._quarantined)
        return Ledger(self._num_empty, self._num_cached, self._owned, reserved, quarantined, self.total)

    # ---- consistency checks --------------------------------------------------------------------------------------

    def ledger_error(self, num_held: int | None = None) -> str:
        """Return a description of an error in the ledger's totals, or "" if they agree.

        `num_held` is the number of rows that the owners hold, where a shared row counts once for each of its owners. If
        `num_held` is None, only the ledger's own totals are checked.
        """
        ledger = self.ledger()
        if not ledger.balances:
            return f"rows do not balance: {ledger}"
        if num_held is None or (given := sum(self._references) - ledger.quarantined) == num_held:
            return ""
        return f"{given} rows were allocated, and {num_held} are held: {ledger}"

    def audit(self, held: Iterable[Sequence[int]]) -> str:
        """Check every row. Return a description of the first error, or "". `held` has one list of rows per owner.

        The check takes about 0.5 µs per row.
        """
        holders = Counter(chain.from_iterable(held))
        cached = list(chain.from_iterable(self._bundles.get(self._name_of[row], (row,)) for row in self._cached))
        places = Counter(chain(self._empty, cached, self._reserved, self._quarantined))
        num_owned, first_new = 0, len(self._references)
        if first_new > self.total + 1 or any(row >= first_new for row in chain(places, holders)):
            return f"rows from {first_new} on were never allocated, but are in use: {self.ledger()}"
        for row in range(1, first_new):
            references, is_quarantined = self._references[row], row in self._quarantined
            is_owned = references > 0 and not is_quarantined and row not in self._reserved
            num_owned += is_owned
            if places[row] + is_owned != 1:
                return f"row {row} is in {places[row] + is_owned} places: {self.ledger()}"
            if references != holders[row] + is_quarantined:
                return f"row {row} has {holders[row]} holders and {references} references: {self.ledger()}"
        for row in cached:
            if row not in self._bundles.get(self._name_of[row], ()):
                return f"row {row} is cached, but no name refers to it"
        if 0 in holders or num_owned != self._owned or len(cached) != self._num_cached:
            return f"{num_owned} rows are owned, but {self._owned} were counted; row 0 has {holders[0]} holders"
        return ""

    # ---- allocation ------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Allocate `count` rows with undefined content: free rows first, then the least recently used cached rows."""
        assert count <= self.available, f"{count} rows requested, {self.available} available"
        self._owned += count
        return [self._pop() for _ in range(count)]

    def share(self, rows: Iterable[int]) -> None:
        """Add an owner to each row. The cached rows among them must form whole bundles."""
        for row in rows:
            if self._references[row] == 0:
                self._cached.pop(row, None)
                self._num_cached -= 1
                self._owned += 1
            self._references[row] += 1

    def release(self, rows: Sequence[int]) -> None:
        """Remove an owner from each row. The last rows are released first, so that they are evicted first, because
        other requests are least likely to share them."""
        for row in reversed(rows):
            assert self._references[row] > 0, f"row {row} has no owner to release it"
            self._references[row] -= 1
            if self._references[row] == 0:
                self._owned -= 1
                self._retire(row)

    def find(self, name: Hashable) -> tuple[int, ...] | None:
        """Return the rows of the bundle with this name, or None if the name is unknown. Owners do not change."""
        return self._bundles.get(name)

    def match(self, names: Iterable[Hashable]) -> list[int]:
        """Return the rows of the bundles named in `names`, up to the first unknown name. Owners do not change."""
        found: list[int] = []
        for name in names:
            rows = self._bundles.get(name)
            if rows is None:
                break
            found += rows
        return found

    def count_unowned(self, rows: Iterable[int]) -> int:
        """Return by how much `share(rows)` would reduce `available`."""
        return sum(self._references[row] == 0 for row in rows)

    def remember(self, rows: Sequence[int], name: Hashable) -> None:
        """Name a complete bundle. Do nothing if it already has a name, or if another bundle has this name."""
        assert self._references[rows[0]] > 0
        if self._name_of[rows[0]] is None and name not in self._bundles:
            self._bundles[name] = tuple(rows)
            for row in rows:
                self._name_of[row] = name

    def forget(self, name: Hashable) -> None:
        """Remove the name of a bundle. Rows of the bundle that have no owner become free."""
        for row in self._bundles.pop(name, ()):
            self._name_of[row] = None
            self._cached.pop(row, None)
            if self._references[row] == 0:
                self._num_cached -= 1
                self._empty.append(row)

    def reserve(self, count: int) -> list[int]:
        """Allocate `count` rows for a peer to write."""
        rows = self.take(count)
        self.lend(rows)
        return rows

    def lend(self, rows: Sequence[int]) -> None:
        """Reserve owned rows, each of which has one owner, for a peer to write."""
        self._owned -= len(rows)
        self._reserved.update(dict.fromkeys(rows))

    def settle(self, rows: Sequence[int]) -> None:
        """Make reserved rows owned, after the peer has written them."""
        self._unreserve(rows)
        self._owned += len(rows)

    def give_up(self, rows: Sequence[int], writer_stopped: bool) -> None:
        """Cancel a reservation. Free the rows if the writer has stopped; otherwise quarantine them until `clear`."""
        self._unreserve(rows)
        self._quarantined.update(dict.fromkeys(rows))
        if writer_stopped:
            self.clear(rows)

    def clear(self, rows: Sequence[int]) -> None:
        """Free quarantined rows once their writer is known to have stopped or died."""
        for row in rows:
            del self._quarantined[row]
            self._references[row] -= 1
            self._retire(row)

    def _unreserve(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self._reserved[row]

    def _pop(self) -> int:
        if not self._empty:
            if (row := len(self._references)) <= self.total:
                self._references.append(1)
                self._name_of.append(None)
                return row
            self.forget(self._name_of[next(iter(self._cached))])
        row = self._empty.pop()
        self._references[row] = 1
        return row

    def _retire(self, row: int) -> None:
        if (name := self._name_of[row]) is None:
            self._empty.append(row)
            return
        self._num_cached += 1
        if row == self._bundles[name][0]:
            self._cached[row] = None
