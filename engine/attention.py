"""Attention over the KV pool: the interface, and the reference in plain torch.

The keys and values of the current step are stored before attention runs. The reference gathers the blocks of each slice
and drops the positions after the slice's context. A NaN in the unused tail of a block, or in the blocks of another
request, therefore cannot affect the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Batch
from engine.kv_pool import KVPool

# Maximum number of scores (queries x heads x positions) that the reference computes at once with a mask. On a GPU,
# torch may store all of these scores. For a chunk after a long context, they would take many GiB.
MAX_SCORES = 2**26


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The parameters of a layer's attention, except its weight matrices (see `AttentionSpec`).

    `sinks` is float32 [heads] or None.

    If `latent` is not 0, the layer has latent attention (see `LatentSpec`). For each token, the pool then has one
    vector of 2 * head_dim numbers instead of a key and a value. This vector is the key of all heads, and its first
    `latent` numbers are the value of all heads.

    If `wide` is not 0, the layer has `wide` KV heads, each with twice the layout's head_dim. In the pool, the keys
    take the space of the layout's first `wide` heads, and the values take the space of the next `wide` heads.
    """

    index: int  # index of this layer among the layers that store KV
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    latent: int = 0
    wide: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the layer has no soft cap, sinks or latents, and its heads have the layout's head_dim."""
        return self.softcap == self.latent == self.wide == 0 and self.sinks is None


class AttentionPlan(Protocol):
    """Computes the attention of one step, one layer at a time."""

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        """Return the result of attention for the rotated queries `q`, [T, heads, head_dim], in q's shape and dtype.

        If the layer has latents, a query has twice the layout's head_dim, and results are [T, heads, layer.latent].

        The step's K and V of this layer must be in the pool. A query attends to its own position and all earlier ones,
        or, with a window, only to the last `layer.window` of them. Scores are scaled by q.shape[-1] ** -0.5.
        """


class AttentionBackend(Protocol):
    """Attention over one KV pool. The constructor raises ValueError for a layout or dtype that it does not support."""

    name: str
    captures: bool  # whether a CUDA graph may contain the attention of decodes

    def plan(self, batch: Batch) -> AttentionPlan:
        """Return a plan with the data that all layers of a step share: splits, tables and masks.

        The lengths of the slices come from `batch.starts` and `batch.kv_lens`, which are in host memory.
        """


class TablesPlan:
    """The attention of a step whose layers use several block tables. Each table has its own plan."""

    def __init__(self, plans: list[AttentionPlan], tables: Sequence[int]) -> None:
        """`tables[i]` is the number of the table that layer i uses."""
        self.plans = plans
        self._tables = tables

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        return self.plans[self._tables[layer.index]].attend(layer, q)


def plan_tables(backend: AttentionBackend, pool: KVPool, batch: Batch) -> AttentionPlan:
    """Return the plan of a step whose layers may use several block tables."""
    plans = []
    for number in range(len(batch.others) + 1):
        table = batch.with_table(number)
        plan = backend.plan(table)
        plans.append(ImagesPlan(plan, TorchPlan(pool, table)) if batch.spans else plan)
    return TablesPlan(plans, pool.places.tables) if batch.others else plans[0]


class ImagesPlan:
    """The attention of one step in which tokens of an image attend to each other (see `Batch.spans`).

    The backend's plan computes all slices. The reference then recomputes each slice that contains such tokens. The
    results of the reference replace those of the backend.
    """

    def __init__(self, plan: AttentionPlan, reference: "TorchPlan") -> None:
        self._plan, self._reference = plan, reference

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        return self._reference.attend_images(layer, q, self._plan.attend(layer, q))


@dataclass(slots=True)
class _Reach:
    """The part of the pool that a slice reads. It is the same for all layers with the same window."""

    queries: slice  # rows of the packed batch
    pieces: Tensor  # int64 [kv_heads * blocks]: indices of a layer's (block, head) pieces, sorted by head
    length: int  # number of context tokens; the unused tail of the last block is dropped
    mask: Tensor | None  # bool [queries, context]; None if all positions are visible or `causal` is set
    causal: bool


class TorchAttention:
    name = "torch"
    captures = False  # plans read the lengths on the host, and a graph cannot contain such a read

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def plan(self, batch: Batch) -> "TorchPlan":
        return TorchPlan(self.pool, batch)


class TorchPlan:
    """The reference attention of one step.

    The reference backend creates such a plan for each batch. Other backends use such plans for layers that their own
    kernels do not support. Plans are used on the engine's thread. The list of the blocks that a slice reads depends on
    the window of a layer, and is computed once for each window."""

    def __init__(self, pool: KVPool, batch: Batch) -> None:
        layout = pool.layout
        # Each (block, head) piece of a layer is contiguous. Pieces gathered in the order of heads are therefore already
        # in the form that attention reads, and need no second copy.
        self._pieces = pool.tensor.view(-1, *layout.shape[2:])
        self._layout = layout
        self._places = pool.places.places
        self._scales = pool.scales
        self._batch = batch
        self._reaches: dict[int, list[_Reach]] = {}

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:2], layer.latent or q.shape[2])
        for reach in self._reaches_of(layer.window):
            out[reach.queries] = self._attend(layer, q[reach.queries], reach)
        return out

    def attend_images(self, layer: AttentionLayer, q: Tensor, out: Tensor) -> Tensor:
        """Recompute the attention of the slices in `Batch.spans`. Overwrite and return `out`."""
        reaches = self._reaches_of(layer.window)
        for index in self._batch.spans:
            out[reaches[index].queries] = self._attend(layer, q[reaches[index].queries], reaches[index])
        return out

    def _reaches_of(self, window: int) -> list[_Reach]:
        if window not in self._reaches:
            self._reaches[window] = self._plan_window(window)
        return self._reaches[window]

    def _attend(self, layer: AttentionLayer, q: Tensor, reach: _Reach) -> Tensor:
        pieces = self._pieces[:, self._places[layer.index]]
        both = pieces.index_select(0, reach.pieces).view(self._layout.kv_heads, -1, 2 * self._layout.head_dim)
        both = both[:, : reach.length].to(q.dtype)
        if layer.latent:
            keys, values = both, both[..., : layer.latent]
        elif layer.wide:
            keys, values = both[: layer.wide], both[layer.wide : 2 * layer.wide]
        else:
            keys, values = both.chunk(2, dim=-1)
            if self._scales[layer.index] != (1.0, 1.0):
                keys, values = keys * self._scales[layer.index][0], values * self._scales[layer.index][1]
        if reach.mask is None or len(q) <= (at_once := max(1, MAX_SCORES // (q.shape[1] * reach.length))):
            return _attend_at_once(layer, q, keys, values, reach)
        parts = zip(torch.split(q, at_once), torch.split(reach.mask, at_once), strict=True)
        return torch.cat(
            [_attend_at_once(layer, some, keys, values, replace(reach, mask=seen)) for some, seen in parts]
        )

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
        first = max(0, start + 1 - window) // size if window else 0  # earlier blocks are outside the window
        spans = self._batch.spans.get(index, [])
        first = min([first, *(low // size for low, _ in spans)])
        low = first * size
        blocks = self._batch.block_table[index, first : -(-end // size)].long()
        pieces = (blocks * heads + torch.arange(heads, device=device)[:, None]).flatten()
        windowed = 0 < window < end - low
        skips = low < self._batch.first_key
        causal = start == low and not windowed and end - start > 1 and not spans and not skips
        mask = None
        if not causal and (windowed or skips or end - start > 1):
            at = torch.arange(low, end, device=device)
            query = at[start - low :, None]
            mask = at <= query
            if windowed:
                mask &= at > query - window
            if skips:
                mask &= at >= self._batch.first_key
            for begin, after in spans:
                mask |= (at >= begin) & (at < after) & (query >= begin) & (query < after)
        return _Reach(slice(row, row + end - start), pieces, end - low, mask, causal)


def _attend_at_once(layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, reach: _Reach) -> Tensor:
    """Attend. `q` is [T, heads, head_dim]; `keys` and `values` are [kv_heads, length, n]."""
    if layer.softcap or layer.sinks is not None:
        return _attend_slowly(layer, q, keys, values, reach)
    return scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=reach.mask,
        is_causal=reach.causal,
        enable_gqa=q.shape[1] != len(keys),
    )[0].transpose(0, 1)


def _attend_slowly(layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, reach: _Reach) -> Tensor:
    """Attend with a soft cap or sinks."""
    count, heads, head_dim = q.shape
    grouped = q.view(count, len(keys), -1, head_dim).permute(1, 2, 0, 3).float()
    scores = grouped @ keys[:, None].float().transpose(-1, -2) * head_dim**-0.5  # [kv_heads, group, T, length]
    if layer.softcap:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    mask = reach.mask
    if reach.causal:
        mask = torch.ones(count, reach.length, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.view(len(keys), -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : reach.length]
    attended: Tensor = weights @ values[:, None].float()
    return attended.permute(2, 0, 1, 3).reshape(count, heads, -1).to(q.dtype)
