"""The ledger of KV blocks. Every block is free, cached, owned, reserved or quarantined; the total is constant.

The ledger knows only the numbers of blocks; the KV pool holds their bytes. Block 0 is a dummy that pads batches and is
never allocated.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple


class Ledger(NamedTuple):
    """The number of blocks in each state.

    Free blocks are empty. Cached blocks have no owner, and keep their content for prefix hits. Owned blocks are held by
    requests. A peer writes reserved blocks. A peer may still write quarantined blocks, so they are not read or
    allocated.
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
    """Reference counts of KV blocks. Cached blocks are reused in least-recently-used order.

    The scheduler owns the pool and is its only caller, on the engine's thread. Every block is in one state of `Ledger`;
    `ledger_error` and `audit` check this. Methods assert their preconditions; a failed assertion is a scheduler bug.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool holds the dummy block and at least one other"
        self.total = num_blocks - 1
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._cached: dict[int, None] = {}  # insertion order is the order of last use
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._owned = 0
        self._reserved: dict[int, None] = {}
        self._quarantined: dict[int, None] = {}

    @property
    def available(self) -> int:
        return len(self._empty) + len(self._cached)

    def ledger(self) -> Ledger:
        reserved, quarantined = len(self._reserved), len(self._quarantined)
        return Ledger(len(self._empty), len(self._cached), self._owned, reserved, quarantined, self.total)

    # ---- consistency checks --------------------------------------------------------------------------------------

    def ledger_error(self, num_held: int | None = None) -> str:
        """Return a description of an error in the ledger's totals, or "" if they agree.

        `num_held` is the number of blocks that all owners together hold; if it is None, it is not compared.
        """
        ledger = self.ledger()
        if not ledger.balances:
            return f"blocks do not balance: {ledger}"
        if num_held is None or (given := sum(self._references) - ledger.quarantined) == num_held:
            return ""
        return f"{given} blocks were allocated, and {num_held} are held: {ledger}"

    def audit(self, rows: Iterable[Sequence[int]]) -> str:
        """Check every block and return the first error, or "". `rows` has a list of blocks for each owner.

        The check takes about 0.5 µs per block.
        """
        holders = Counter(chain.from_iterable(rows))
        places = Counter(chain(self._empty, self._cached, self._reserved, self._quarantined))
        num_owned = 0
        for block in range(1, self.total + 1):
            references, is_quarantined = self._references[block], block in self._quarantined
            is_owned = references > 0 and not is_quarantined and block not in self._reserved
            num_owned += is_owned
            if places[block] + is_owned != 1:
                return f"block {block} is in {places[block] + is_owned} places: {self.ledger()}"
            if references != holders[block] + is_quarantined:
                return f"block {block} has {holders[block]} holders and {references} references: {self.ledger()}"
            if block in self._cached and self._by_hash.get(self._hash_of[block] or b"") != block:
                return f"block {block} is cached, but no hash refers to it"
        if 0 in holders or num_owned != self._owned:
            return f"{num_owned} blocks are owned, but {self._owned} were counted; block 0 has {holders[0]} holders"
        return ""

    # ---- allocation ------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks with undefined content: empty blocks, then the least recently used cached blocks."""
        assert count <= self.available, f"{count} blocks requested, {self.available} available"
        self._owned += count
        return [self._pop() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
                self._owned += 1
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner from each block. The last blocks are freed first, because hits in them are the least
        likely."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} has no owner to release it"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._owned -= 1
                self._retire(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of `hashes`, without changing their owners."""
        found: list[int] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def count_unowned(self, blocks: Iterable[int]) -> int:
        """Return by how much `share(blocks)` would reduce `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def remember(self, block: int, name: bytes) -> None:
        """Register the hash of a complete block. If two blocks have equal content, the first keeps the hash."""
        assert self._references[block] > 0
        if self._hash_of[block] is None and name not in self._by_hash:
            self._hash_of[block] = name
            self._by_hash[name] = block

    def reserve(self, count: int) -> list[int]:
        """Allocate `count` blocks for a peer to write."""
        blocks = self.take(count)
        self._owned -= count
        self._reserved.update(dict.fromkeys(blocks))
        return blocks

    def settle(self, blocks: Sequence[int]) -> None:
        """Make reserved blocks owned, after the peer has written them."""
        self._unreserve(blocks)
        self._owned += len(blocks)

    def give_up(self, blocks: Sequence[int], writer_stopped: bool) -> None:
        """Cancel a reservation. Unless the writer has stopped, its blocks stay in quarantine until `clear`."""
        self._unreserve(blocks)
        self._quarantined.update(dict.fromkeys(blocks))
        if writer_stopped:
            self.clear(blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """Free quarantined blocks once their writer is known to have stopped or died."""
        for block in blocks:
            del self._quarantined[block]
            self._references[block] -= 1
            self._retire(block)

    def _unreserve(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._reserved[block]

    def _pop(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            name = self._hash_of[block]
            assert name is not None
            del self._by_hash[name]
            self._hash_of[block] = None
        self._references[block] = 1
        return block

    def _retire(self, block: int) -> None:
        if self._hash_of[block] is None:
            self._empty.append(block)
        else:
            self._cached[block] = None
