"""Packs the slices of a step into the flat integer tensors that a forward pass reads. Knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv_pool import DUMMY_BLOCK
from scheduler.request import Slice, tokens_of


@dataclass(slots=True)
class Batch:
    """T tokens of S slices, one after the other.

    `starts` and `kv_lens` are host copies, so that planning never waits for a device. A slice's queries are the
    last tokens of its context: token j of slice s stands at position kv_lens[s] - (its count) + j.
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

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.kv_lens, strict=True)]


def num_scored(piece: Slice) -> int:
    """How many rows of a slice are followed by a prompt token whose logprob is wanted."""
    request = piece.request
    return max(0, min(piece.end, request.num_prompt - 1) - piece.start) if request.every_logit else 0


def build(slices: Sequence[Slice], block_tokens: int, device: torch.device) -> Batch:
    """Raises ValueError when a slice reaches beyond its request's tokens or blocks: the scheduler's fault."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_q = [0]
    for piece in slices:
        blocks = piece.request.blocks
        if piece.end > len(piece.request.tokens) or piece.end > len(blocks) * block_tokens:
            raise ValueError(f"request {piece.request.id}: slice to {piece.end} has no tokens or no blocks there")
        span = range(piece.start, piece.end)
        tokens += tokens_of(piece.request, piece)
        positions += span
        slots += [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in span]
        cu_q.append(len(tokens))
    sampled = [index for index, piece in enumerate(slices) if piece.samples]
    scored = [(index, count) for index, piece in enumerate(slices) if (count := num_scored(piece))]
    logit_rows = [cu_q[index + 1] - 1 for index in sampled]
    for index, count in scored:
        logit_rows += range(cu_q[index], cu_q[index] + count)
    kv_lens = [piece.end for piece in slices]

    def on_device(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return Batch(
        tokens=on_device(tokens, torch.int64),
        positions=on_device(positions, torch.int64),
        slots=on_device(slots, torch.int64),
        cu_q=on_device(cu_q, torch.int32),
        kv_len=on_device(kv_lens, torch.int32),
        block_table=on_device(_table(slices, block_tokens), torch.int32),
        logit_rows=on_device(logit_rows, torch.int64),
        starts=[piece.start for piece in slices],
        kv_lens=kv_lens,
        sampled=sampled,
        scored=scored,
    )


def _table(slices: Sequence[Slice], block_tokens: int) -> list[list[int]]:
    """Only the blocks that a slice reads: a request may own some that it has not reached."""
    rows = [piece.request.blocks[: -(-piece.end // block_tokens)] for piece in slices]
    width = max(map(len, rows), default=0)
    return [row + [DUMMY_BLOCK] * (width - len(row)) for row in rows]
