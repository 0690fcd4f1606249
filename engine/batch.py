"""Packs the slices of a step into the flat integer tensors that a forward pass reads, for any model.

The time to pack a slice does not depend on the length of its context, except for the time to copy the slice's row of
the block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_pool import DUMMY_BLOCK
from engine.media import BatchImages, atomic_spans, batch_positions
from engine.models.kv_places import KVPlaces, all_in_one_row
from scheduler.request import Request, Slice, StateUse, cdiv

IntArray = NDArray[np.int32]
FEW_TOKENS = 8  # for up to this many tokens, plain Python is faster than NumPy
KEPT_ROWS = 1024  # if the cache has over KEPT_ROWS more tables than a step has slices, only the step's tables are kept


@dataclass(slots=True)
class StateBatch:
    """The rows of the KV pool that contain the recurrent states of S slices. Each state has R rows.

    A slice that continues the previous slice (see `Slice.continues`) is merged with the previous slice here. If slices
    are merged, `cu_q`, int32 [S + 1], has the index of the first token of each merged slice. If no slices are merged,
    `cu_q` is None, and `Batch.cu_q` is used.

    `rows`, int64 [3, S, R], has for each slice the rows of three states, in order: the state that the slice reads, the
    state that it writes, and the state that it saves. The rows of a missing state are -1. A slice that reads no state
    begins with a state of zeros. A step never writes a state that it reads.
    """

    rows: Tensor
    save_at: Tensor  # int64 [S]: the state is saved after this many tokens of the slice; 0 if it is not saved
    cu_q: Tensor | None = None
    places: Tensor | None = None  # result of `KVPool.state_places` for `rows`; None until a layer needs it


@dataclass(slots=True)
class KVTable:
    """A further block table and the tokens' slots in it, for a model whose layers use several tables (see `Batch`)."""

    block_table: Tensor
    slots: Tensor


@dataclass(slots=True)
class Batch:
    """A step's input: T tokens of S slices, one slice after another.

    `starts` and `kv_lens` are on the host, so that planning never waits for a device. A slice's queries are the last
    tokens of its context: token j of slice s is at position kv_lens[s] - count + j, where count is the number of tokens
    of the slice.

    `carried` is used while the previous step is pending. An entry (t, d) means that token t of this batch is the token
    that slice sampled[d] of the previous step draws. `tokens[t]` is 0 until the runner inserts the drawn token.

    `slots` and `block_table` are for the layers that use the first table (see `KVPlaces`). `others` has the slots and
    block tables for the other layers. If all tokens of a block are outside of the layers' window, the table's entry
    for this block may be any row.
    """

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_tokens + offset of the token's KV, or -1 if its KV is not stored
    cu_q: Tensor  # int32 [S + 1]: slice s holds tokens cu_q[s] to cu_q[s + 1]
    kv_len: Tensor  # int32 [S]: context length, including this step's tokens
    block_table: Tensor  # int32 [S, largest number of blocks], padded with the dummy block
    logit_rows: Tensor  # int64: rows that need logits: the last row of every sampling slice, then the rows of `scored`
    starts: list[int]  # position of each slice's first token
    kv_lens: list[int]
    sampled: list[int]  # indices of the slices that sample, ascending
    scored: list[tuple[int, int]]  # (slice, n): prompt logprobs or mean pooling need the first n rows of the slice
    carried: list[tuple[int, int]] = field(default_factory=list)
    others: list[KVTable] = field(default_factory=list)
    states: StateBatch | None = None  # only for models with recurrent layers
    adapters: list[str] = field(default_factory=list)  # digest of each slice's adapter, or ""; [] if no slice has any
    on_axes: Tensor | None = None  # int64 [3, T]: positions on three axes, if a slice has images (see `Rope.sections`)
    images: BatchImages | None = None  # the runner sets this
    # Maps the index of a slice to the positions [start, end) of its images whose tokens attend to each other.
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    # Hidden states for a draft head: maps the index of a layer to the hidden states before it, [T, hidden_size]. The
    # caller sets the keys, and the pass sets the values.
    captured: dict[int, Tensor] = field(default_factory=dict)
    first_key: int = 0  # queries see no earlier position than this; 1 for a draft head

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.kv_lens, strict=True)]

    def with_table(self, number: int) -> "Batch":
        """Return the batch with the slots and blocks of table `number`, for the layers that use this table."""
        if number == 0:
            return self
        table = self.others[number - 1]
        return replace(self, block_table=table.block_table, slots=table.slots, others=[])

    @property
    def all_slots(self) -> list[Tensor]:
        """The slots of each table."""
        return [self.slots, *(table.slots for table in self.others)]

    def drawing(self) -> "Batch | None":
        """Return a batch that contains only the last token of each sampling slice, in the order of `logit_rows`.

        Returns None if the batch contains no other tokens, or if the rows of other tokens are needed (see `scored`).
        """
        if self.scored or len(self.sampled) == len(self.tokens):
            return None
        rows, kv_lens = self.logit_rows, [self.kv_lens[index] for index in self.sampled]
        slices = torch.tensor(self.sampled, dtype=torch.int64, device=rows.device)
        return Batch(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            cu_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            kv_len=self.kv_len[slices],
            block_table=self.block_table[slices],
            logit_rows=torch.arange(len(rows), device=rows.device),
            starts=[end - 1 for end in kv_lens],
            kv_lens=kv_lens,
            sampled=list(range(len(rows))),
            scored=[],
            others=[KVTable(table.block_table[slices], table.slots[rows]) for table in self.others],
        )


def num_scored(slice_: Slice) -> int:
    """Return how many of the slice's first rows are needed for prompt logprobs or for the mean of hidden states."""
    request = slice_.request
    return max(0, min(slice_.end, request.num_prompt - 1) - slice_.start) if request.needs_prompt_logprobs else 0


class BlockRows:
    """Builds the block tables of a step's slices, and finds the rows of the slices' states.

    Each request's list of rows is cached as an int32 array, which is extended when the list grows."""

    def __init__(self, places: KVPlaces | None = None) -> None:
        places = places or all_in_one_row(1)
        self._groups = [group for group in places.groups if group.kind != "state"]
        self._state_rows = places.state_rows
        self._rows: list[dict[str, tuple[list[int], IntArray]]] = [{} for _ in self._groups]  # by request id

    def covered(self, request: Request) -> int:
        """Return the number of blocks for which the request has rows."""
        return len(request.tables[0]) // self._groups[0].rows

    def tables(self, slices: Sequence[Slice], block_tokens: int) -> list[IntArray]:
        """Return the block tables, each int32 [slices, largest number of blocks]. Entries are numbers of pool rows."""
        counts = [cdiv(slice_.end, block_tokens) for slice_ in slices]
        tables: list[IntArray] = []
        for number, group in enumerate(self._groups):
            table = np.zeros((len(slices), max(counts, default=0) * group.rows), np.int32)  # 0 is the dummy block
            for index, (slice_, count) in enumerate(zip(slices, counts, strict=True)):
                table[index, : count * group.rows] = self._row(slice_.request, number, count * group.rows)
            tables += [table] if group.rows == 1 else [table[:, row :: group.rows].copy() for row in range(group.rows)]
        for number, rows in enumerate(self._rows):
            if len(rows) > KEPT_ROWS + len(slices):
                self._rows[number] = {slice_.request.id: rows[slice_.request.id] for slice_ in slices}
        return tables

    def _row(self, request: Request, number: int, count: int) -> IntArray:
        """Return the first `count` rows in a request's table.

        A request's table only grows, until a preemption replaces it with a new table. The cached array may contain rows
        that the request has released, but no slice reads these rows.
        """
        table, kept = request.tables[number], self._rows[number].get(request.id)
        row = kept[1] if kept is not None and kept[0] is table else _NONE
        if len(row) < count:
            row = np.concatenate((row, np.array(table[len(row) :], np.int32)))
            self._rows[number][request.id] = (table, row)
        return row[:count]

    def states(self, slices: Sequence[Slice]) -> StateBatch | None:
        """Return the rows of the slices' states, or None if the model has no states."""
        if not self._state_rows:
            return None
        firsts = [index for index, slice_ in enumerate(slices) if not slice_.continues]
        cu_q = None
        if len(firsts) < len(slices):
            starts = np.cumsum([0, *(slice_.count for slice_ in slices)])
            cu_q = torch.from_numpy(starts[[*firsts, -1]].astype(np.int32))
            slices = [slices[index] for index in firsts]
        rows, ends = np.full((3, len(slices), self._state_rows), -1, np.int64), np.zeros(len(slices), np.int64)
        for index, slice_ in enumerate(slices):
            use = slice_.state or StateUse(None, ())
            for which, given in enumerate((use.read, use.write, use.save)):
                if given:
                    rows[which, index] = given
            ends[index] = use.save_at - slice_.start if use.save else 0
        return StateBatch(torch.from_numpy(rows), torch.from_numpy(ends), cu_q)

    def use_dummy(self, slice_: Slice, block_tokens: int) -> Slice:
        """Let a warm-up slice use the dummy block for its KV and its state. Return the slice."""
        count = cdiv(len(slice_.request.tokens), block_tokens)
        slice_.request.tables = [[DUMMY_BLOCK] * (count * group.rows) for group in self._groups]
        slice_.state = StateUse(None, (DUMMY_BLOCK,) * self._state_rows) if self._state_rows else None
        return slice_


_NONE: IntArray = np.zeros(0, np.int32)


def build(
    slices: Sequence[Slice],
    block_tokens: int,
    device: torch.device,
    before: Sequence[Slice] = (),
    rows: BlockRows | None = None,
) -> Batch:
    """Build the batch of one step on `device`.

    `before` contains the slices of the pending step. Tokens that the pending step will sample become entries of
    `Batch.carried`. Raises ValueError if a slice ends after its request's last token or block, which would be a bug of
    the scheduler.
    """
    rows, cu_q, tokens = rows or BlockRows(), [0], list[int]()
    carried: list[tuple[int, int]] = []
    draws: dict[int, int] = {}
    for slice_ in slices:
        request, end = slice_.request, slice_.start + slice_.count
        missing = end - len(slice_.tokens)
        tokens += slice_.tokens[slice_.start : end]
        if missing > 0:
            draws = draws or _draws_of(before)
            carried.append((len(tokens), draws.get(id(request), -1)))
            tokens.append(0)
        if missing > (id(request) in draws) or end > rows.covered(request) * block_tokens:
            raise ValueError(f"request {request.id}: a slice ends at {end}, beyond the request's tokens or blocks")
        cu_q.append(len(tokens))
    sampled = [index for index, slice_ in enumerate(slices) if slice_.samples]
    scored = [(index, count) for index, slice_ in enumerate(slices) if (count := num_scored(slice_))]
    logit_rows = [cu_q[index + 1] - 1 for index in sampled]
    logit_rows += [row for index, count in scored for row in range(cu_q[index], cu_q[index] + count)]
    starts, kv_lens = [slice_.start for slice_ in slices], [slice_.end for slice_ in slices]
    adapters = [slice_.request.adapter for slice_ in slices]
    tables = rows.tables(slices, block_tokens)
    positions, slots = _places(starts, cu_q, tables, block_tokens)
    _leave_stored(slices, cu_q, slots)

    def on_device(values: NDArray[np.int64] | IntArray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device)

    return Batch(
        tokens=on_device(np.array(tokens, np.int64)),
        positions=on_device(positions),
        slots=on_device(slots[0]),
        cu_q=on_device(np.array(cu_q, np.int32)),
        kv_len=on_device(np.array(kv_lens, np.int32)),
        block_table=on_device(tables[0]),
        logit_rows=on_device(np.array(logit_rows, np.int64)),
        starts=starts,
        kv_lens=kv_lens,
        sampled=sampled,
        scored=scored,
        carried=carried,
        others=[KVTable(on_device(one), on_device(other)) for one, other in zip(tables[1:], slots[1:], strict=True)],
        states=rows.states(slices),
        adapters=adapters if any(adapters) else [],
        on_axes=None if (axes := batch_positions(slices, positions)) is None else on_device(axes),
        spans=atomic_spans(slices),
    )


def _leave_stored(slices: Sequence[Slice], cu_q: Sequence[int], slots: Sequence[NDArray[np.int64]]) -> None:
    """Set the slot of each token to -1 if the token's KV is already stored."""
    for slice_, first in zip(slices, cu_q, strict=False):
        for of_table in slots if slice_.num_stored else ():
            of_table[first : first + slice_.num_stored] = -1


def _draws_of(before: Sequence[Slice]) -> dict[int, int]:
    """Map the id() of each request to the index of the draw that will be the request's next token."""
    return {id(slice_.request): draw for draw, slice_ in enumerate(slice_ for slice_ in before if slice_.samples)}


def _places(
    starts: list[int], cu_q: list[int], tables: list[IntArray], block_tokens: int
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return the position of every token, and its KV slot in each table."""
    if len(starts) == cu_q[-1] <= FEW_TOKENS:  # each slice has one token
        places = [divmod(start, block_tokens) for start in starts]
        slots = [[table.item(n, block) * block_tokens + at for n, (block, at) in enumerate(places)] for table in tables]
        return np.array(starts, np.int64), [np.array(of_table, np.int64) for of_table in slots]
    slices, positions = np.arange(len(starts)), np.array(starts, np.int64)
    if len(starts) != cu_q[-1]:  # otherwise each slice has one token
        firsts = np.array(cu_q)
        counts = np.diff(firsts)
        slices = np.repeat(slices, counts)
        positions = np.arange(cu_q[-1]) + np.repeat(positions - firsts[:-1], counts)
    blocks = positions // block_tokens
    # A token's slot is row * block_tokens + position % block_tokens.
    return positions, [(table[slices, blocks] - blocks) * block_tokens + positions for table in tables]
