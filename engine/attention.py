"""Attention over the KV pool: the interface, and the reference in plain torch.

The keys and values of the current step are stored before attention runs. The reference gathers the blocks of each slice
and cuts them to its context, so a NaN in the unused tail of a block or in another request's blocks cannot spread.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Batch
from engine.kv_pool import KVPool


class AttentionPlan(Protocol):
    """Computes the attention of one step, one layer at a time."""

    def attend(self, layer: int, q: Tensor, window: int) -> Tensor:
        """Return the result of attention for the rotated queries `q`, [T, heads, head_dim], in q's shape and dtype.

        The step's K and V of this layer must be in the pool. A query attends to its own position and all earlier ones,
        or to the last `window` of these if `window` is not 0. Scores are scaled by head_dim ** -0.5.
        """


class AttentionBackend(Protocol):
    """Attention over one KV pool. The constructor raises ValueError for a layout or dtype that it does not support."""

    name: str

    def plan(self, batch: Batch) -> AttentionPlan:
        """Compute the data that all layers of a step share (splits, tables, masks) from the batch's host copies."""


@dataclass(slots=True)
class _Reach:
    """The part of the pool that one slice reads, for one window size."""

    queries: slice  # rows of the packed batch
    pieces: Tensor  # int64 [kv_heads * blocks]: indices of a layer's (block, head) pieces, head by head
    length: int  # tokens of context; the tail of the last block is cut off
    mask: Tensor | None  # bool [queries, context]; None if all positions are visible or `causal` is set
    causal: bool


class TorchAttention:
    name = "torch"

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def plan(self, batch: Batch) -> "TorchPlan":
        return TorchPlan(self.pool, batch)


class TorchPlan:
    def __init__(self, pool: KVPool, batch: Batch) -> None:
        layout = pool.layout
        # A (block, head) piece of a layer is contiguous, so gathering head by head needs no second copy.
        self._pieces = pool.tensor.view(-1, *layout.shape[2:])
        self._layout = layout
        self._batch = batch
        self._reaches: dict[int, list[_Reach]] = {}

    def attend(self, layer: int, q: Tensor, window: int) -> Tensor:
        if window not in self._reaches:
            self._reaches[window] = self._plan_window(window)
        out = torch.empty_like(q)
        for reach in self._reaches[window]:
            out[reach.queries] = self._attend(self._pieces[:, layer], q[reach.queries], reach)
        return out

    def _attend(self, pieces: Tensor, q: Tensor, reach: _Reach) -> Tensor:
        both = pieces.index_select(0, reach.pieces).view(self._layout.kv_heads, -1, 2, self._layout.head_dim)
        both = both[:, : reach.length].to(q.dtype)
        return scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            both[None, :, :, 0],
            both[None, :, :, 1],
            attn_mask=reach.mask,
            is_causal=reach.causal,
            enable_gqa=q.shape[1] != self._layout.kv_heads,
        )[0].transpose(0, 1)

    def _plan_window(self, window: int) -> list[_Reach]:
        batch, row = self._batch, 0
        reaches = []
        for index, (start, end) in enumerate(zip(batch.starts, batch.kv_lens, strict=True)):
            reaches.append(self._reach(index, row, start, end, window))
            row += end - start
        return reaches

    def _reach(self, index: int, row: int, start: int, end: int, window: int) -> _Reach:
        size, heads = self._layout.block_tokens, self._layout.kv_heads
        device = self._pieces.device
        first = max(0, start + 1 - window) // size if window else 0  # blocks before this are outside the window
        low = first * size
        blocks = self._batch.block_table[index, first : -(-end // size)].long()
        pieces = (blocks * heads + torch.arange(heads, device=device)[:, None]).flatten()
        windowed = 0 < window < end - low
        causal = start == low and not windowed and end - start > 1
        mask = None
        if not causal and (windowed or end - start > 1):
            at = torch.arange(low, end, device=device)
            query = at[start - low :, None]
            mask = at <= query
            if windowed:
                mask &= at > query - window
        return _Reach(slice(row, row + end - start), pieces, end - low, mask, causal)
