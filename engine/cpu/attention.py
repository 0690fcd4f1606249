"""Attention on a CPU by numba kernels that read the KV pool in place, for any block size, GQA group and window."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionLayer
from engine.batch import Batch
from engine.cpu.attention_kernels import AREAS, attend, merge
from engine.cpu.attention_tiles import FEW_ROWS, FIELDS, TILE
from engine.cpu.malloc import empty
from engine.cpu.simd import CODES, LANES
from engine.kv_pool import KVPool
from shared.kv.layout import BYTES_OF

# Maximum number of rows that are computed together. A row is a query of one query head; all rows share a key head. The
# matrix product of 128 rows and the keys consists of whole panels, and the sums of 128 rows fit into the L2 cache.
MAX_ROWS = 128
MIN_PART = 256  # minimum number of tokens in each part of a divided context
PARTS_PER_THREAD = 2  # long contexts are divided so that each thread gets about this many parts

IntArray = NDArray[np.int32]


class WorkingMemory:
    """The working memory of each thread. The areas of a thread are, in order:

    0. the queries of a decode, as rows
    1. the scores of a tile
    2. the sums of weighted values of each row; the kernel also uses this area while it transposes a chunk's queries
    3. the largest score of each row
    4. the sum of the weights of each row
    5. the addresses of the tokens of three tiles, and room for the addresses or the scales of LANES rows
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


class AttentionWork:
    """The attention of a step for one window size, divided into items.

    An item consists of adjacent queries of one slice, and of all or a part of the context that these queries read.
    Threads take units of work: a unit is the work of one item for one key head.
    """

    def __init__(self, batch: Batch, kv_heads: int, group: int, window: int, threads: int) -> None:
        starts, ends = np.array(batch.starts, np.int64), np.array(batch.kv_lens, np.int64)
        counts = ends - starts
        at_once = max(1, MAX_ROWS // group)
        tiles = -(-counts // at_once)
        slices = np.repeat(np.arange(len(counts)), tiles)
        skipped = at_once * (np.arange(len(slices)) - np.repeat(tiles.cumsum() - tiles, tiles))
        count = np.minimum(at_once, counts[slices] - skipped)
        row = (counts.cumsum() - counts)[slices] + skipped
        start = starts[slices] + skipped
        low = np.maximum(batch.first_key, start + 1 - window if window else np.zeros_like(start))
        # The fields of an item, in the kernel's order. The last is the row where a part's result begins, or else -1.
        items = np.stack((slices, row, count, start, low, start + count, np.full_like(row, -1)), axis=1)
        length = start + count - low
        cost = length * (count * group + 8)  # the 8 accounts for reading the keys and values
        fair = max(1, kv_heads * int(cost.sum()) // (threads * PARTS_PER_THREAD))
        parts = np.minimum(-(-cost // fair), np.maximum(1, length // MIN_PART)) if threads > 1 else np.ones_like(row)
        order = np.argsort(-cost // parts, kind="stable")  # costliest first, so that threads finish together
        items, parts = items[order], parts[order]
        self.merged = np.zeros((0, FIELDS), np.int32)
        self.part_rows = 0
        if parts.max(initial=1) > 1:
            items = self._divided(items, parts, kv_heads * group)
        self.items: IntArray = np.ascontiguousarray(items, np.int32)
        self.operations = kv_heads * int(cost.sum())

    def _divided(self, items: NDArray[np.int64], parts: NDArray[np.int64], heads: int) -> NDArray[np.int64]:
        """Divide the context of items[i] into parts[i] parts. Return an item for each part. In `merged`, store the
        items that were divided, because the results of their parts must be merged."""
        number = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
        whole, parts_of = np.repeat(items, parts, axis=0), np.repeat(parts, parts)
        low, length = whole[:, 4], whole[:, 5] - whole[:, 4]
        is_part = parts_of > 1
        rows = np.where(is_part, whole[:, 2] * heads, 0)
        divided = whole.copy()
        divided[:, 4] = low + length * number // parts_of
        divided[:, 5] = low + length * (number + 1) // parts_of
        divided[:, 6] = np.where(is_part, rows.cumsum() - rows, -1)
        firsts = divided[is_part & (number == 0)]
        merged = np.zeros((len(firsts), FIELDS), np.int32)
        merged[:, :4] = np.column_stack((firsts[:, [1, 2, 6]], parts[parts > 1]))
        self.merged, self.part_rows = merged, int(rows.sum())
        return divided


class NumbaAttention:
    """Attention over `pool` by numba kernels. Queries must be float32.

    Importing this module compiles the kernels or loads them from disk.
    """

    name = "numba"

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
        self._prepared: dict[tuple[int, int, int], PreparedAttention] = {}  # by (window, head_dim, wide)
        layout = backend.pool.layout
        self._strides = (layout.block_bytes, layout.layers * layout.layer_bytes, layout.block_tokens)

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        if q.dtype != torch.float32:
            raise ValueError(f"numba attention computes in float32, but the queries are {q.dtype}")
        q = q.contiguous()
        prepared = self.prepared(q.shape[1], layer.window, q.shape[2], layer.wide)
        out = empty(*q.shape)
        rest = (self._backend.layer_address(layer.index), *prepared.rest)
        memory = self._backend.memory(torch.get_num_threads(), prepared.group, q.shape[2])  # separate for each thread
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
        pool = (*self._strides, CODES[layout.dtype])
        rest = (
            parts.data_ptr(),
            table.data_ptr(),
            table.shape[1],
            *pool,
            *shape,
            window,
            value_at,
            2 * layout.head_dim * item,
        )
        units = (len(work.items) * heads, work.items.ctypes.data)
        merged = (len(work.merged) * heads, work.merged.ctypes.data, parts.data_ptr(), *shape)
        work_of = (work.operations * head_dim, work.part_rows * head_dim)
        merged_or_none = merged if len(work.merged) else ()
        return PreparedAttention(group, *work_of, units, rest, merged_or_none, (work, parts))


@dataclass(frozen=True, slots=True)
class PreparedAttention:
    """Kernel arguments that are the same for every layer, and the objects whose addresses are among the arguments."""

    group: int
    operations: int
    merge_operations: int
    units: tuple[int, ...]
    rest: tuple[int, ...]
    merged: tuple[int, ...]  # empty if no context is divided
    kept: tuple[object, ...]
