"""Packs the slices of a step into the flat integer tensors that a forward pass reads. Knows no model.

Nothing here grows with a request's context but one copy of its row of the block table, so a decode costs the same in
Python however long it has run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv_pool import DUMMY_BLOCK
from scheduler.request import Request, RequestState, Slice, tokens_of

IntArray = NDArray[np.int32]
KEPT_ROWS = 1024  # block rows of ended requests are let go of beyond this


@dataclass(slots=True)
class Batch:
    """T tokens of S slices, one after the other.

    `starts` and `kv_lens` are host copies, so that planning never waits for a device. A slice's queries are the
    last tokens of its context: token j of slice s stands at position kv_lens[s] - (its count) + j.

    `carried` is not empty only where the step before is still pending: (t, d) says that token t of this batch is draw
    d of that step, counted in the order of its own `sampled`. `tokens[t]` is 0 until the runner has put the draw in.
    """

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block * block_tokens + offset, where the token's KV goes
    cu_q: Tensor  # int32 [S + 1]: slice s holds tokens cu_q[s] to cu_q[s + 1]
    kv_len: Tensor  # int32 [S], this step's tokens included
    block_table: Tensor  # int32 [S, most blocks of a slice], padded with the dummy block
    logit_rows: Tensor  # int64: the last token of every sampling slice, then the rows of `scored`
    starts: list[int]  # first token's position, by slice
    kv_lens: list[int]
    sampled: list[int]  # slices that sample, ascending
    scored: list[tuple[int, int]]  # (slice, how many of its first rows) whose prompt logits are wanted
    carried: list[tuple[int, int]] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.kv_lens, strict=True)]

    def drawing(self) -> "Batch | None":
        """Of each slice that draws its last token alone: the rows of `logit_rows`, in their order. None where these
        are all tokens, or more of them are asked for."""
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
        )


def num_scored(piece: Slice) -> int:
    """How many rows of a slice are followed by a prompt token whose logprob is wanted."""
    request = piece.request
    return max(0, min(piece.end, request.num_prompt - 1) - piece.start) if request.needs_prompt_logprobs else 0


class BlockRows:
    """The blocks of requests as int32 arrays, kept between steps and extended, not copied, as a request grows."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Request, list[int], IntArray]] = {}  # by id, with the list that they were read from

    def table(self, slices: Sequence[Slice], block_tokens: int) -> IntArray:
        """[slices, most blocks of one]: only what a slice reads; a request may own blocks that it has not reached."""
        counts = [-(-piece.end // block_tokens) for piece in slices]
        table = np.full((len(slices), max(counts, default=0)), DUMMY_BLOCK, np.int32)
        for index, (piece, count) in enumerate(zip(slices, counts, strict=True)):
            table[index, :count] = self._row(piece.request, count)[:count]
        if len(self._rows) > KEPT_ROWS + 2 * len(slices):
            self._rows = {name: row for name, row in self._rows.items() if row[0].state is not RequestState.DONE}
        return table

    def _row(self, request: Request, count: int) -> IntArray:
        """A list of blocks only ever grows; a request that was preempted gets another list."""
        kept = self._rows.get(request.id)
        row = kept[2] if kept is not None and kept[1] is request.blocks else _NONE
        if len(row) < count:
            row = np.concatenate((row, np.array(request.blocks[len(row) :], np.int32)))
            self._rows[request.id] = (request, request.blocks, row)
        return row


_NONE: IntArray = np.zeros(0, np.int32)


def build(
    slices: Sequence[Slice],
    block_tokens: int,
    device: torch.device,
    before: Sequence[Slice] = (),
    rows: BlockRows | None = None,
) -> Batch:
    """The batch of one step. `before`: the slices of the step that is still pending, whose draws may be `carried`.

    Raises ValueError when a slice reaches beyond its request's tokens or blocks: the scheduler's fault.
    """
    tokens: list[int] = []
    cu_q = [0]
    carried: list[tuple[int, int]] = []
    draws: dict[int, int] = {}
    for piece in slices:
        request, end = piece.request, piece.start + piece.count
        missing = end - len(request.tokens)
        tokens += tokens_of(request, piece)
        if missing > 0:
            draws = draws or _draws_of(before)
            carried.append((len(tokens), draws.get(id(request), -1)))
            tokens.append(0)
        if missing > (id(request) in draws) or end > len(request.blocks) * block_tokens:
            raise ValueError(f"request {request.id}: slice to {end} has no tokens or no blocks there")
        cu_q.append(len(tokens))
    sampled = [index for index, piece in enumerate(slices) if piece.samples]
    scored = [(index, count) for index, piece in enumerate(slices) if (count := num_scored(piece))]
    logit_rows = [cu_q[index + 1] - 1 for index in sampled]
    for index, count in scored:
        logit_rows += range(cu_q[index], cu_q[index] + count)
    starts, kv_lens = [piece.start for piece in slices], [piece.end for piece in slices]
    table = (rows or BlockRows()).table(slices, block_tokens)
    positions, slots = _places(np.array(starts, np.int64), np.array(cu_q, np.int64), table, block_tokens)

    def on_device(values: NDArray[np.int64] | IntArray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if device.type == "cpu" else tensor.to(device)

    return Batch(
        tokens=on_device(np.array(tokens, np.int64)),
        positions=on_device(positions),
        slots=on_device(slots),
        cu_q=on_device(np.array(cu_q, np.int32)),
        kv_len=on_device(np.array(kv_lens, np.int32)),
        block_table=on_device(table),
        logit_rows=on_device(np.array(logit_rows, np.int64)),
        starts=starts,
        kv_lens=kv_lens,
        sampled=sampled,
        scored=scored,
        carried=carried,
    )


def _draws_of(before: Sequence[Slice]) -> dict[int, int]:
    """By request: which draw of the pending step is its next token."""
    return {id(piece.request): draw for draw, piece in enumerate(piece for piece in before if piece.samples)}


def _places(
    starts: NDArray[np.int64], cu_q: NDArray[np.int64], table: IntArray, block_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Position and slot of every token."""
    counts = np.diff(cu_q)
    slices = np.repeat(np.arange(len(starts)), counts)
    positions = np.arange(cu_q[-1]) + np.repeat(starts - cu_q[:-1], counts)
    blocks, offsets = np.divmod(positions, block_tokens)
    return positions, table[slices, blocks].astype(np.int64) * block_tokens + offsets
