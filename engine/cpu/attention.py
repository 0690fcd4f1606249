"""Attention on a CPU by numba kernels that read the KV pool in place, for any block size, GQA group and window."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention import AttentionLayer
from engine.batch import Batch
from engine.cpu.attention_items import MAX_ROWS, AttentionWork
from engine.cpu.attention_kernels import AREAS, attend, merge
from engine.cpu.attention_tiles import FEW_ROWS, TILE
from engine.cpu.malloc import empty
from engine.cpu.simd import CODES, LANES
from engine.kv_pool import KVPool
from shared.kv.layout import BYTES_OF


class WorkingMemory:
    """The working memory of all threads. Each thread has these areas:

    0. the queries of a decode, as rows
    1. the scores of a tile
    2. each row's sum of weighted values; before that, a chunk's queries as rows, from which area 6 is written
    3. each row's largest score
    4. the sum of each row's weights
    5. three lists of the addresses of a tile's tokens, and room for LANES addresses or scales of rows
    6. the queries of a chunk, as columns
    7. the number of tokens that each row sees
    8. a tile converted to float32
    """

    def __init__(self, threads: int, rows: int, head_dim: int) -> None:
        padded = -(-head_dim // LANES) * LANES
        stride = rows + 2 * LANES  # upper bound: the kernel rounds a stride up to an odd number of vectors
        # Sizes of the areas in floats. In area 6, a row of zeros precedes the queries. This row pads a decode's keys.
        sizes = [
            FEW_ROWS * padded, TILE * stride, stride * padded, stride, stride, 6 * TILE + 2 * LANES, padded * stride,
            stride, 2 * TILE * padded,
        ]  # fmt: skip
        assert len(sizes) == AREAS
        sizes[6] += padded
        self._floats = torch.zeros(threads, sum(-(-size // 16) * 16 for size in sizes) + 16)
        self.areas = np.zeros((threads, AREAS), np.int64)
        self.address = self.areas.ctypes.data
        for thread, floats in enumerate(self._floats):
            address = floats.data_ptr() + -floats.data_ptr() % 64
            for index, size in enumerate(sizes):
                self.areas[thread, index] = address
                address += -(-size // 16) * 64
            self.areas[thread, 6] += 4 * padded


class NumbaAttention:
    """Attention over `pool` by numba kernels. Queries must be float32.

    Importing this module compiles the kernels or loads them from disk.
    """

    name = "numba"
    captures = False

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._memory: dict[tuple[int, int, int], WorkingMemory] = {}
        self._numbers: dict[float, Tensor] = {}

    def plan(self, batch: Batch) -> "NumbaPlan":
        return NumbaPlan(self, batch)

    def layer_address(self, layer: int) -> int:
        """Return the address of the layer's keys and values in the first block."""
        return self.pool.tensor.data_ptr() + self.pool.places.places[layer] * self.pool.layout.layer_bytes

    def address_of(self, value: float) -> int:
        """Return the address of `value` in float32."""
        return self._numbers.setdefault(value, torch.tensor([value])).data_ptr()

    def memory(self, threads: int, group: int, head_dim: int = 0) -> WorkingMemory:
        """Return the working memory of `threads` threads, for `group` query heads per key head and keys of `head_dim`
        elements. If `head_dim` is 0, keys have the layout's size."""
        key = (threads, max(MAX_ROWS, group), head_dim or self.pool.layout.head_dim)
        if key not in self._memory:
            self._memory[key] = WorkingMemory(*key)
        return self._memory[key]


class NumbaPlan:
    """The attention of one step on a CPU.

    `NumbaAttention.plan` creates this object for one batch, and the engine's thread uses it. The plan divides the
    step's work among threads once for each window size and shape of heads, and keeps the result.
    """

    def __init__(self, backend: NumbaAttention, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch
        self._threads = torch.get_num_threads()
        self._prepared: dict[tuple[int, int, int], PreparedAttention] = {}  # keyed by (window, head_dim, wide)
        layout = backend.pool.layout
        self._strides = (layout.block_bytes, layout.layers * layout.layer_bytes, layout.block_tokens)

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        if q.dtype != torch.float32:
            raise ValueError(f"numba attention computes in float32, but the queries are {q.dtype}")
        q = q.contiguous()
        prepared = self.prepared(q.shape[1], layer.window, q.shape[2], layer.wide)
        out = empty(*q.shape)
        rest = (self._backend.layer_address(layer.index), *prepared.rest)
        memory = self._backend.memory(torch.get_num_threads(), prepared.group, q.shape[2])
        sinks = 0 if layer.sinks is None else layer.sinks.data_ptr()
        softcap = self._backend.address_of(layer.softcap) if layer.softcap else 0
        attend(
            prepared.operations, 0, *prepared.units, q.data_ptr(), out.data_ptr(), *rest, memory.address, sinks, softcap
        )
        if prepared.merged:
            units, items, parts, *shape = prepared.merged
            merge(prepared.merge_operations, 0, units, items, out.data_ptr(), parts, *shape, sinks)
        return out[..., : layer.latent] if layer.latent else out

    def prepared(self, num_heads: int, window: int, head_dim: int = 0, wide: int = 0) -> "PreparedAttention":
        """Return the kernel arguments that all layers with the same window, `head_dim` and `wide` share.

        `head_dim` is the number of elements of a query head. It is twice the `head_dim` of the KV layout if the layers
        have latent attention or are `wide` (see `AttentionLayer`).
        """
        key = (window, head_dim or self._backend.pool.layout.head_dim, wide)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(num_heads, *key)
        return self._prepared[key]

    def _prepare(self, num_heads: int, window: int, head_dim: int, wide: int) -> "PreparedAttention":
        layout, table = self._backend.pool.layout, self._batch.block_table
        heads = wide or layout.kv_heads
        group, item = num_heads // heads, BYTES_OF[layout.dtype]
        work = AttentionWork(self._batch, heads, group, window, self._threads)
        parts = torch.empty(work.part_rows * (head_dim + 2))
        shape = (heads, group, head_dim)
        value_at = head_dim if head_dim == layout.head_dim else wide * self._strides[1] // item
        tables = (table.data_ptr(), table.shape[1], *self._strides, CODES[layout.dtype])
        rest = (parts.data_ptr(), *tables, *shape, window, value_at, 2 * layout.head_dim * item)
        units = (work.num_items * heads, work.items_at)
        merged = (work.num_merged * heads, work.merged_at, parts.data_ptr(), *shape) if work.num_merged else ()
        work_of = (work.operations * head_dim, work.part_rows * head_dim)
        return PreparedAttention(group, *work_of, units, rest, merged, (work, parts))


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """Kernel arguments that several layers share, and the objects whose addresses are among these arguments."""

    group: int
    operations: int
    merge_operations: int
    units: tuple[int, ...]
    rest: tuple[int, ...]
    merged: tuple[int, ...]  # empty if no context is divided
    kept: tuple[object, ...]
