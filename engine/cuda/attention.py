"""Attention on a GPU by Triton kernels, for any block size and GQA group size, in pools of every dtype.

If there are few slices, several GPU programs share a long context. Chunks are divided into tiles of queries. Tests run
the same code under Triton's interpreter, without a GPU.
"""

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from engine.attention import AttentionLayer
from engine.batch import Batch
from engine.cuda.attention_kernels import attend, merge
from engine.kv_pool import KVPool

SHORT = 8  # a slice of at most this many queries is treated as a decode
MAX_ITEMS = 2**16  # maximum number of decodes in a step; CUDA graphs read a preallocated list of this length
SPLIT_TOKENS = 256  # minimum tokens per split; a smaller split costs more time than it saves
FEW_SPLITS, MAX_SPLITS = 16, 64  # `merge` is compiled once for each of these limits; all splits must fit into registers
PROGRAMS_PER_PROCESSOR = 2
H200_PROCESSORS = 132
LARGEST_HEAD = 512
MOST_ROWS = 128  # the largest tile of decodes; a larger tile would not fit into registers
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program. The program computes `block_m` rows (queries times the GQA group size) and reads
    `block_n` tokens of context at a time, with `warps` warps and `stages` pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's query heads are divided among GPU programs. Each item of the work list (a decode, or a tile of a
    chunk) has `programs` programs. Each program computes `group` query heads, and `share` programs use the same key
    head. A key has `size` dimensions. If keys are latents, `rope` rotated dimensions follow; otherwise, `rope` is 0."""

    programs: int
    group: int
    size: int
    rope: int = 0
    share: int = 1

    @property
    def is_large(self) -> bool:
        return self.rope > 0 or self.size > 256


def large_tile(dtype: torch.dtype) -> Tile:
    """Return the tile for latents and for heads of 257 to 512 dimensions, which need many registers for their sums."""
    return Tile(16, 16, 8, 2) if dtype == torch.float32 else Tile(32, 32, 8, 2)


def decode_tile(head_dim: int, dtype: torch.dtype, rows: int, few: bool) -> Tile:
    """Return the tile for decodes with `rows` rows (queries times GQA group size). Tensor cores need 16 rows or more.

    `few` is true if there are too few decodes to give most processors a program. Each program then loads data further
    ahead. Otherwise, a program has one buffer less, and more programs fit on a processor, which hides latency better.
    """
    block_m = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:
        return Tile(block_m, 16, 8, 2)
    return Tile(block_m, 64 if head_dim <= 128 else 32, 8 if block_m >= MOST_ROWS else 4, 3 if few else 2)


def chunk_tile(head_dim: int, dtype: torch.dtype, few: bool) -> Tile:
    """Return the tile for chunks. `few` is true if there are too few tiles of 128 rows for all processors."""
    if dtype == torch.float32:
        return Tile(16, 16, 8, 2)
    if head_dim > 128:
        return Tile(64, 32, 4, 3) if few else Tile(128, 32, 8, 3)
    return Tile(64, 64, 4, 3) if few else Tile(128, 64, 8, 3)


class TritonAttention:
    """Attention over `pool` by Triton kernels.

    For tuning, `decode` and `chunk` set the tiles. By default, tiles are chosen according to the shapes. Raises
    ValueError if head_dim is over 256 and there are several KV heads, because a tile would be too large for a program.
    """

    name = "triton"
    captures = True

    def __init__(
        self,
        pool: KVPool,
        split_tokens: int = SPLIT_TOKENS,
        decode: Tile | None = None,
        chunk: Tile | None = None,
    ) -> None:
        layout, device = pool.layout, pool.tensor.device
        if layout.head_dim > 256 and layout.kv_heads > 1:  # with one head, these may be latents
            raise ValueError(f"--attention-backend triton: a head_dim of {layout.head_dim} is over 256; use torch")
        self.pool = pool
        self.decode, self.chunk = decode, chunk
        self._split_tokens = split_tokens
        cuda = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else H200_PROCESSORS
        slices = torch.arange(MAX_ITEMS, dtype=torch.int32, device=device)
        self.decodes = torch.stack((slices, torch.zeros_like(slices)), dim=1)

    def plan(self, batch: Batch) -> "TritonPlan":
        """Plan a step's attention.

        If all slices are decodes or padding, the plan depends only on shapes, so a CUDA graph may contain it. With
        chunks, the plan depends on the batch's values on the host, and a list of tiles is copied to the device.
        """
        return TritonPlan(self, batch)

    def splits(self, programs: int, most_tokens: int) -> int:
        """Return the number of parts into which each of `programs` programs splits its context of up to `most_tokens`
        tokens. If contexts are long enough, each processor gets about two parts.
        """
        wanted = -(-PROGRAMS_PER_PROCESSOR * self.processors // programs)
        return max(1, min(wanted, -(-most_tokens // self._split_tokens), MAX_SPLITS))


class TritonPlan:
    """Launches the attention kernels for the slices of one step on a GPU. Experimental.

    `TritonAttention.plan` creates a plan for one batch, and each layer uses the plan on the engine's thread. The plan
    owns the lists of slices on the device, splits long contexts, merges the parts, and divides chunks into tiles.
    """

    def __init__(self, backend: TritonAttention, batch: Batch) -> None:
        self._backend = backend
        self._batch = batch
        counts = batch.counts
        self._covered = sum(counts)
        short = [index for index, count in enumerate(counts) if count <= SHORT]
        self._chunks = [(index, count) for index, count in enumerate(counts) if count > SHORT]
        self._queries = SHORT if any(counts[index] > 1 for index in short) else 1
        self._decodes = self._listed(short)
        self._tiles: dict[Heads, tuple[int, Tile, Tensor]] = {}

    def _listed(self, short: list[int]) -> Tensor:
        """Return the work list of decodes, int32 [decodes, 2]. It is preallocated if no chunk precedes a decode."""
        if len(short) > MAX_ITEMS:
            raise ValueError(f"{len(short)} decodes in one step; --max-num-seqs may be {MAX_ITEMS} at most")
        if not short or short[-1] + 1 == len(short):
            return self._backend.decodes[: len(short)]
        return self._on_device([(index, 0) for index in short])

    def _on_device(self, items: list[tuple[int, int]]) -> Tensor:
        device = self._batch.cu_q.device
        return torch.tensor(items, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        size = layer.latent or q.shape[2]
        if size > LARGEST_HEAD:
            raise ValueError(f"--attention-backend triton: a head size of {size} is over {LARGEST_HEAD}; use torch")
        out = q.new_empty(*q.shape[:2], size)
        out[self._covered :].zero_()  # padding after the last slice
        if len(self._decodes):
            self._attend_decodes(layer, q, out)
        if self._chunks:
            heads = self._heads(layer, q, 1)
            if heads not in self._tiles:
                self._tiles[heads] = self._cut(heads, q.dtype)
            queries, tile, work = self._tiles[heads]
            splits = self._chunk_splits(layer, len(work) * heads.programs, queries)
            self._compute(layer, q, out, work, queries, tile, splits, heads)
        return out

    def _chunk_splits(self, layer: AttentionLayer, programs: int, queries: int) -> int:
        """Return how many programs share the context of a chunk. The number is above 1 only if `programs` programs
        would leave more than half of the device idle. In that case, the tiles are the small ones (`_chunk_tile`)."""
        if 2 * programs >= PROGRAMS_PER_PROCESSOR * self._backend.processors:
            return 1
        most = max(self._batch.starts[index] + count for index, count in self._chunks)
        return self._backend.splits(programs, min(most, layer.window + queries) if layer.window else most)

    def _heads(self, layer: AttentionLayer, q: Tensor, queries: int) -> Heads:
        """Return how the heads are divided among programs if each item of the work list has `queries` queries.

        Several programs share a key head if one program cannot hold the sums of all rows of the key head. This happens
        if the heads are large, or if there are many rows (queries times query heads)."""
        kv_heads, count, size = layer.wide or self._backend.pool.layout.kv_heads, q.shape[1], layer.latent or q.shape[2]
        whole = Heads(kv_heads, count // kv_heads, size, q.shape[2] - size)
        if not whole.is_large and (queries == 1 or queries * whole.group <= MOST_ROWS):
            return whole
        most = max(1, min(16, (large_tile(q.dtype).block_m if whole.is_large else MOST_ROWS) // queries))
        group = max(number for number in range(1, most + 1) if whole.group % number == 0)
        return replace(whole, programs=count // group, group=group, share=whole.group // group)

    def _cut(self, heads: Heads, dtype: torch.dtype) -> tuple[int, Tile, Tensor]:
        """Return the queries per tile, the tile's shape, and a work list of tiles, int32 [N, 2].

        Tiles with long contexts come first, so that all processors finish at about the same time.
        """
        tile = self._backend.chunk or (large_tile(dtype) if heads.is_large else self._chunk_tile(heads, dtype))
        queries = tile.block_m // heads.group
        pieces = [
            (self._batch.starts[index] + first, index, first)
            for index, count in self._chunks
            for first in range(0, count, queries)
        ]
        return queries, tile, self._on_device([(index, first) for _, index, first in sorted(pieces, reverse=True)])

    def _chunk_tile(self, heads: Heads, dtype: torch.dtype) -> Tile:
        tile = chunk_tile(heads.size, dtype, few=False)
        programs = heads.programs * sum(-(-count * heads.group // tile.block_m) for _, count in self._chunks)
        tile = chunk_tile(heads.size, dtype, few=programs < self._backend.processors)
        return replace(tile, block_m=max(tile.block_m, triton.next_power_of_2(heads.group)))

    def _attend_decodes(self, layer: AttentionLayer, q: Tensor, out: Tensor) -> None:
        layout, work, queries = self._backend.pool.layout, self._decodes, self._queries
        heads = self._heads(layer, q, queries)
        group = heads.group
        most = self._batch.block_table.shape[1] * layout.block_tokens
        programs = len(work) * heads.programs
        splits = self._backend.splits(programs, min(most, layer.window) if layer.window else most)
        few = 2 * programs < self._backend.processors
        own = large_tile(q.dtype) if heads.is_large else decode_tile(heads.size, q.dtype, queries * group, few)
        self._compute(layer, q, out, work, queries, self._backend.decode or own, splits, heads)

    def _compute(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, work: Tensor, queries: int, tile: Tile, splits: int,
        heads: Heads,
    ) -> None:  # fmt: skip
        """Compute the items of `work`, and merge the parts if several programs share a context."""
        if splits == 1:
            self._launch(layer, q, out, None, work, queries, tile, 1, heads)
            return
        shape = (len(work), heads.programs, splits, queries * heads.group)
        parts = q.new_empty((*shape, heads.size), dtype=torch.float32)
        weight_of = q.new_empty(shape, dtype=torch.float32)
        self._launch(layer, q, parts, weight_of, work, queries, tile, splits, heads)
        merge[(len(work), q.shape[1], queries)](
            out, parts, weight_of, work, self._batch.cu_q, out.stride(0), out.stride(1), splits,
            GROUP=heads.group, HEAD_DIM=heads.size, BLOCK_S=FEW_SPLITS if splits <= FEW_SPLITS else MAX_SPLITS,
            BLOCK_D=triton.next_power_of_2(heads.size), num_warps=4,
        )  # fmt: skip

    def _launch(
        self, layer: AttentionLayer, q: Tensor, out: Tensor, weight_of: Tensor | None, work: Tensor, queries: int,
        tile: Tile, splits: int, heads: Heads,
    ) -> None:  # fmt: skip
        layout, batch = self._backend.pool.layout, self._batch
        keys, values = self._backend.pool.layer(layer.index)
        values = keys[:, layer.wide :] if layer.wide else values
        key_scale, value_scale = self._backend.pool.scales[layer.index]
        scale, cap = q.shape[2] ** -0.5 * key_scale, layer.softcap * LOG2_E
        attend[(len(work), heads.programs, splits)](
            out, weight_of if weight_of is not None else out, q, keys, values,
            layer.sinks if layer.sinks is not None else out, work, batch.cu_q, batch.kv_len, batch.block_table,
            layer.window, scale / layer.softcap if layer.softcap else scale * LOG2_E, cap, value_scale,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), batch.block_table.stride(0),
            keys.stride(0), keys.stride(1), keys.stride(2),
            GROUP=heads.group, QUERIES=queries, SHARE=heads.share, PAGE=layout.block_tokens, HEAD_DIM=heads.size,
            SPLIT=splits > 1, WINDOWED=layer.window > 0, CAPPED=layer.softcap > 0, SINKS=layer.sinks is not None,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_D=max(16, triton.next_power_of_2(heads.size)), ROPE=heads.rope,
            BLOCK_R=max(16, triton.next_power_of_2(heads.rope)), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
