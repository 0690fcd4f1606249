"""Copies a step to the device. All integers of a batch are in one pinned block, so a single copy is enough.

A captured graph reads fixed addresses, so the layout of the block on the device depends only on the step's shape. A
step is padded with tokens whose KV is not stored, and with slices whose context is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import Batch, KVTable, StateBatch, build
from engine.counter_rng import WORDS
from engine.sampling import SamplingRow, parameters_of

NOWHERE = -1  # slot of a padding token
ALIGNED_WORDS = 2  # alignment of regions, in words of 8 bytes
NUM_REGIONS = 9  # seven tensors of a batch, the carried tokens, and the parameters; each table adds two regions


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step, or the size to which the step is padded."""

    tokens: int
    slices: int
    rows: int  # number of hidden states for which logits are computed

    @classmethod
    def of(cls, batch: Batch) -> "StepShape":
        return cls(len(batch.tokens), len(batch.starts), len(batch.logit_rows))


@dataclass(frozen=True, slots=True)
class StepCapacity:
    """The largest step that the buffers hold. A larger step (a prompt that may not be chunked) gets its own buffers."""

    slices: int
    tokens: int
    blocks: int  # maximum number of blocks of one request
    block_tokens: int
    tables: int = 1
    state_rows: int = 0  # number of rows of a request's recurrent state

    def holds(self, step: Batch) -> bool:
        slices, blocks = step.block_table.shape
        return slices <= self.slices and blocks <= self.blocks and len(step.tokens) <= self.tokens

    @property
    def words(self) -> int:
        rows = self.tokens + self.slices
        fixed = 2 * self.tokens + rows + (3 + 3 * self.state_rows) * self.slices + 2
        regions = (2 + WORDS) * self.slices
        table = self.tokens + self.slices * (self.blocks + 1) // 2 + 1 + 2 * ALIGNED_WORDS
        return fixed + regions + self.tables * table + NUM_REGIONS * (ALIGNED_WORDS - 1)


class BufferCarver:
    """Allocates consecutive regions of a flat int64 block. The same sequence of calls gives the same layout.

    Regions are aligned to 16 bytes, because Triton compiles a separate kernel for pointers without this alignment.
    """

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self.used = 0

    def take(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        start = self.used
        words = -(-count * dtype.itemsize // self._words.itemsize)
        self.used += -(-words // ALIGNED_WORDS) * ALIGNED_WORDS
        return self._words[start : start + words].view(dtype)[:count]

    def batch(self, shape: StepShape, tables: Sequence[Tensor], state_rows: int) -> Batch:
        """Return a batch for a shape, made of views of the block and of `tables`. Call this before other regions are
        allocated, because graphs need the batch at fixed addresses."""
        cut = [table[: shape.slices] for table in tables]
        tokens, positions = self.take(shape.tokens), self.take(shape.tokens)
        slots = [self.take(shape.tokens) for _ in tables]
        states = None
        if state_rows:
            rows = self.take(3 * shape.slices * state_rows).view(3, shape.slices, state_rows)
            states = StateBatch(rows, self.take(shape.slices))
        return Batch(
            tokens=tokens, positions=positions, slots=slots[0],
            logit_rows=self.take(shape.rows), cu_q=self.take(shape.slices + 1, torch.int32),
            kv_len=self.take(shape.slices, torch.int32), block_table=cut[0],
            starts=[], kv_lens=[], sampled=[], scored=[],
            others=[KVTable(table, each) for table, each in zip(cut[1:], slots[1:], strict=True)], states=states,
        )  # fmt: skip


class StepBuffers:
    """Holds one block on the device and two on the host. The host blocks alternate between steps, because the copy of
    the previous step may not have ended."""

    def __init__(self, capacity: StepCapacity, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.capacity = capacity
        self._host = [torch.zeros(capacity.words, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._words = torch.zeros(capacity.words, dtype=torch.int64, device=device)
        shape = (capacity.tables, capacity.slices, capacity.blocks)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device).unbind()

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of one request."""
        return self.capacity.blocks * self.capacity.block_tokens

    def clear(self, shape: StepShape) -> Batch:
        """Return the device's tensors for `shape`, filled with padding. The addresses of these tensors never change."""
        batch = self.view(shape)
        _fill(batch, _NOTHING)
        return batch

    def view(self, shape: StepShape) -> Batch:
        """Return the device's tensors for a shape."""
        return BufferCarver(self._words).batch(shape, self._tables, self.capacity.state_rows)

    def load(self, step: Batch, rows: list[SamplingRow], shape: StepShape, draws: Tensor) -> tuple[Batch, Tensor]:
        """Copy a step, padded to `shape`, from the host to the device.

        Take the step's carried tokens (see `Batch`) from `draws`. Return the unpadded step on the device, and the
        parameters of `rows`, int64 [rows, WORDS].
        """
        self._host.reverse()
        host, device = BufferCarver(self._host[0]), BufferCarver(self._words)
        _fill(host.batch(shape, self._tables, self.capacity.state_rows), step)
        padded = device.batch(shape, self._tables, self.capacity.state_rows)
        slices, width = step.block_table.shape
        drawn_by = torch.from_numpy(parameters_of(rows)) if rows else _NO_WORDS
        tables = [step.block_table, *(other.block_table for other in step.others)]
        for values in (_carried(step), drawn_by, *tables):
            host.take(values.numel(), values.dtype).copy_(values.flatten())
        self._words[: host.used].copy_(self._host[0][: host.used], non_blocking=True)
        carried = device.take(2 * len(step.carried)).view(2, -1)
        parameters = device.take(WORDS * len(rows)).view(-1, WORDS)
        for table in self._tables:
            table[:slices, :width].copy_(device.take(slices * width, torch.int32).view(slices, width))
        if step.carried:  # a failed draw is negative; its request has ended, so the token does not matter
            padded.tokens.index_copy_(0, carried[0], draws[carried[1]].clamp(min=0))
        return _own(padded, step), parameters


_NO_WORDS = torch.empty(0, dtype=torch.int64)
_NOTHING = build([], 1, torch.device("cpu"))


def _fill(views: Batch, step: Batch) -> None:
    for name, padding in (("tokens", 0), ("positions", 0), ("slots", NOWHERE), ("logit_rows", 0), ("kv_len", 0)):
        view, values = getattr(views, name), getattr(step, name)
        view[: len(values)] = values
        view[len(values) :] = padding
    for view in views.others:
        view.slots.fill_(NOWHERE)
    for view, table in zip(views.others, step.others, strict=False):  # `_NOTHING` has no further tables
        view.slots[: len(table.slots)] = table.slots
    view, last, end = views.cu_q, len(step.cu_q), len(step.tokens)
    view[:last] = step.cu_q
    # Each padding slice gets one padding token while there are padding tokens left.
    view[last:] = torch.arange(end + 1, end + 1 + len(view) - last, dtype=torch.int32).clamp(max=len(views.tokens))
    if views.states is not None:
        views.states.rows.fill_(NOWHERE)
        views.states.save_at.fill_(0)
        if step.states is not None:
            views.states.rows[:, : last - 1] = step.states.rows
            views.states.save_at[: last - 1] = step.states.save_at


def _carried(step: Batch) -> Tensor:
    """Return the index of each carried token in the step and in the previous draws, int64 [2, carried]."""
    return torch.tensor(step.carried, dtype=torch.int64).view(-1, 2).T


def _own(padded: Batch, step: Batch) -> Batch:
    """Return the step with its tensors on the device: the tensors of `padded`, cut to the step's size."""
    width = step.block_table.shape[1]
    tensors = ("tokens", "positions", "slots", "logit_rows", "cu_q", "kv_len")
    own = {name: getattr(padded, name)[: len(getattr(step, name))] for name in tensors}
    slices, tokens = len(step.starts), len(step.tokens)
    others = [KVTable(other.block_table[:slices, :width], other.slots[:tokens]) for other in padded.others]
    states = padded.states
    if states is not None:
        states = StateBatch(states.rows[:, :slices], states.save_at[:slices])
    return replace(step, block_table=padded.block_table[:slices, :width], others=others, states=states, **own)
