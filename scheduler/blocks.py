"""The block pool's ledger: every block is free, cached, owned, reserved or quarantined, and the sum is constant.

It counts and names blocks; the bytes are the KV pool's. Block 0 is a dummy that pads batches and is never given out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple


class Ledger(NamedTuple):
    """free: empty. cached: nobody's, content kept. owned: of requests. reserved: a peer writes them.
    quarantined: a peer may still write them, nobody reads them."""

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
    """Counted references to blocks, with least-recently-used reuse of those that only the prefix cache knows."""

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
        return Ledger(
            len(self._empty),
            len(self._cached),
            self._owned,
            len(self._reserved),
            len(self._quarantined),
            self.total,
        )

    # ---- what does not depend on the counts being right ----------------------------------------------------------

    def ledger_error(self, num_held: int | None = None) -> str:
        """What is wrong with the ledger as far as its sums show it, "" when nothing is. `num_held`: blocks of all
        owners together, as the owners count them; None: they were not asked."""
        ledger = self.ledger()
        if not ledger.balances:
            return f"blocks do not balance: {ledger}"
        if num_held is None or (given := sum(self._references) - ledger.quarantined) == num_held:
            return ""
        return f"{given} blocks were given out, and {num_held} are held: {ledger}"

    def audit(self, rows: Iterable[Sequence[int]]) -> str:
        """As `breach`, by a walk over all blocks: about 0.5 µs each. `rows`: the blocks of every owner."""
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
                return f"block {block} is cached, and nobody can find it"
        if 0 in holders or num_owned != self._owned:
            return f"{num_owned} blocks are owned, of {self._owned} counted; block 0 is held {holders[0]} times"
        return ""

    # ---- blocks come and go ----------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """`count` blocks, owned by the caller, content undefined; empty ones first, then the longest unused."""
        assert count <= self.available, f"{count} blocks asked for, {self.available} available"
        self._owned += count
        return [self._pop() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
                self._owned += 1
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block. The end of a row is given up first, as it is the least likely to be hit."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} has no owner to release it"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._owned -= 1
                self._retire(block)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of `hashes`; nobody's ownership changes."""
        found: list[int] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def count_unowned(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` `share` would take away from `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def remember(self, block: int, name: bytes) -> None:
        """The block's content is whole and has this hash. The first block of a content keeps the name."""
        assert self._references[block] > 0
        if self._hash_of[block] is None and name not in self._by_hash:
            self._hash_of[block] = name
            self._by_hash[name] = block

    def reserve(self, count: int) -> list[int]:
        """`count` blocks for a peer to write."""
        blocks = self.take(count)
        self._owned -= count
        self._reserved.update(dict.fromkeys(blocks))
        return blocks

    def settle(self, blocks: Sequence[int]) -> None:
        """The peer has written them: reserved blocks become their request's."""
        self._unreserve(blocks)
        self._owned += len(blocks)

    def give_up(self, blocks: Sequence[int], writer_stopped: bool) -> None:
        """The peer will not finish. Blocks that it may still write to wait in quarantine for `clear`."""
        self._unreserve(blocks)
        self._quarantined.update(dict.fromkeys(blocks))
        if writer_stopped:
            self.clear(blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """The writer of these quarantined blocks is known to have stopped, or to be dead."""
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
