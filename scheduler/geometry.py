"""The layout of a request's data in the KV pool: groups of layers, the rows of their blocks, and recurrent states.

A row is the pool's unit of allocation, transfer and checksums. A group is a set of layers whose KV is kept and released
together. A block holds the KV of `block_tokens` tokens for one group, in one or more rows.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep their KV for the same length of time, or all layers with a recurrent state.

    `rows` is the number of rows that one block, or one state, has in the pool. In a "window" group, a query sees the
    last `size` tokens, including its own."""

    kind: Literal["full", "window", "state"]
    rows: int = 1
    size: int = 0

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at `position` sees. No later query sees an earlier position."""
        return max(0, position + 1 - self.size) if self.kind == "window" else 0


UNIFORM = (Group("full"),)


class RowPlace(NamedTuple):
    """The place of a pool row in a request's data. `block` is the index of the block in the request, or 0 for a state.
    `row` is the index of the row in this block, which has several rows in some groups."""

    group: int
    block: int
    row: int


@dataclass(frozen=True)
class Geometry:
    """The groups of a model. The block table of the attention group `groups[i]` is `Request.tables[i]`.

    At most one group holds states, and it is the last group. All tables of a request cover the same blocks.
    """

    block_tokens: int
    groups: tuple[Group, ...] = UNIFORM

    @cached_property
    def attention(self) -> tuple[Group, ...]:
        """The groups that keep KV: all groups except a group of states."""
        return tuple(group for group in self.groups if group.kind != "state")

    @cached_property
    def block_rows(self) -> int:
        """The number of rows of one block, in all groups together."""
        return sum(group.rows for group in self.attention)

    @cached_property
    def state_rows(self) -> int:
        """The number of rows of one state, or 0 if the model has no states."""
        return sum(group.rows for group in self.groups if group.kind == "state")

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every block is one row and is kept until its request ends."""
        return self.groups == UNIFORM

    def first_block(self, group: Group, position: int) -> int:
        """Return the first block of `group` that a query at `position` or later sees."""
        return group.first_seen(position) // self.block_tokens

    def rows_of(self, blocks: int, chunk: int) -> int:
        """Return the maximum number of rows that `blocks` consecutive blocks occupy while chunks of `chunk` tokens are
        computed."""
        rows = 0
        for group in self.attention:
            seen = blocks if group.kind == "full" else (group.size + chunk - 2) // self.block_tokens + 2
            rows += group.rows * min(blocks, seen)
        return rows

    def rows_for(self, tokens: int, chunk: int) -> int:
        """Return the maximum number of rows that a running request of `tokens` tokens occupies, including its two
        states."""
        return self.rows_of(-(-tokens // self.block_tokens), chunk) + 2 * self.state_rows

    def capacity(self, num_rows: int, chunk: int, max_tokens: int = 0) -> int:
        """Return the number of blocks of the longest request that fits into a pool of `num_rows` rows.

        Row 0 is one of the `num_rows` rows, but holds no KV. If every layer has a window, a request of any length may
        fit. The result is then the number of blocks of `max_tokens` tokens, or `num_rows` - 1 if that is larger.
        """
        fits = range(max(num_rows, -(-max_tokens // self.block_tokens) + 1))
        return bisect_right(fits, num_rows - 1, key=lambda blocks: self.rows_for(blocks * self.block_tokens, chunk)) - 1

    def fork_point(self, num_prompt: int) -> int:
        """Return the position at which another request with the same prompt starts to compute. This is the end of the
        last full block without the prompt's last token, because the last token is always computed."""
        return (num_prompt - 1) // self.block_tokens * self.block_tokens

    def landing_order(self, num_prompt: int, held: int) -> list[RowPlace]:
        """Return the rows of a prompt that a peer needs, in the order of transfer.

        The peer already has the first `held` blocks of "full" groups. Blocks that no query from `fork_point` on sees
        are omitted. Rows are ordered by block, then by group and row. The rows of the state come last.
        """
        size, places, fork = self.block_tokens, [], self.fork_point(num_prompt)
        firsts = [held if group.kind == "full" else self.first_block(group, fork) for group in self.attention]
        for block in range(min(firsts), -(-num_prompt // size)):
            for index, group in enumerate(self.attention):
                if block >= firsts[index]:
                    places += [RowPlace(index, block, row) for row in range(group.rows)]
        return places + [RowPlace(len(self.attention), 0, row) for row in range(self.state_rows)]

    def lent_rows(self, num_prompt: int, held: int) -> tuple[int, int]:
        """Return two numbers of rows that a node lends to a peer, so that the peer can compute a prompt in these rows.

        The first number counts the rows that already have the KV and the state of the first `held` blocks. The second
        number counts the rows for the other blocks and for two states. Even a group with a window gets rows for all the
        other blocks, because the peer releases no rows while it computes.
        """
        held_rows, rest = self.state_rows if held else 0, -(-num_prompt // self.block_tokens) - held
        for group in self.attention:
            held_rows += (held - self.first_block(group, held * self.block_tokens)) * group.rows
        return held_rows, rest * self.block_rows + 2 * self.state_rows

    def borrow(
        self, held: int, held_rows: list[int], rows: list[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Return the block tables, the two states and the snapshot of a request that is computed in lent rows.

        `held_rows` and `rows` are the two kinds of rows that `lent_rows` counts. Each list is ordered by group, block
        and row, and ends with the rows of states.
        """
        before, after, tables = iter(held_rows), iter(rows), []
        blocks = (len(rows) - 2 * self.state_rows) // self.block_rows if self.block_rows else 0
        for group in self.attention:
            hidden = self.first_block(group, held * self.block_tokens)
            table = [0] * (hidden * group.rows)
            tables.append([*table, *islice(before, (held - hidden) * group.rows), *islice(after, blocks * group.rows)])
        states = [list(islice(after, self.state_rows)) for _ in range(2 if self.state_rows else 0)]
        return tables, states, list(before)

    def num_final(self, num_prompt: int, held: int, computed: int) -> int:
        """Return how many rows of `landing_order` are complete when `computed` tokens of the prompt have KV."""
        order = self.landing_order(num_prompt, held)
        if computed >= num_prompt:
            return len(order)
        full, states = computed // self.block_tokens, len(self.attention)
        return sum(place.group != states and place.block < full for place in order)
