"""Attention by the packages of FlashAttention 2, 3 and 4 (Dao et al.), if one of them is installed.

The packages read the KV pool through strided views and the block table. FlashAttention 2, 3 and 4 each have an adapter,
because their function names and limits differ. A package is imported only when it is chosen.
"""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.attention import AttentionBackend, AttentionLayer, AttentionPlan, TorchAttention
from engine.batch import Batch
from engine.kv_pool import KVPool
from engine.startup import cause

log = logging.getLogger("baton.engine")


@dataclass(slots=True)
class FlashRows:
    """Adjacent slices of a batch, in the form that the packages require."""

    span: slice  # range of the batch's tokens
    cu_q: Tensor  # int32 [S + 1], starting at 0
    max_q: int
    kv_len: Tensor  # int32 [S]
    max_kv: int
    block_table: Tensor  # int32 [S, W]


Functions = Sequence[Callable[..., Tensor]]
FlashAttend = Callable[[Tensor, Tensor, Tensor, FlashRows, int], Tensor]


def _attend_2(functions: Functions, q: Tensor, k: Tensor, v: Tensor, rows: FlashRows, window: int) -> Tensor:
    varlen, with_cache = functions
    seen: dict[str, Any] = {"causal": True, "window_size": (window - 1, 0) if window else (-1, -1)}
    if rows.max_q == 1:  # unlike `varlen`, `with_cache` divides a long context among the processors of the device
        out = with_cache(q[:, None], k, v, cache_seqlens=rows.kv_len, block_table=rows.block_table, **seen)
        return out[:, 0]
    cu_k = torch.zeros_like(rows.cu_q)
    torch.cumsum(rows.kv_len, 0, dtype=torch.int32, out=cu_k[1:])
    return varlen(q, k, v, rows.cu_q, cu_k, rows.max_q, rows.max_kv, block_table=rows.block_table, **seen)


def _attend_3(functions: Functions, q: Tensor, k: Tensor, v: Tensor, rows: FlashRows, window: int) -> Tensor:
    return functions[0](
        q, k, v, cache_seqlens=rows.kv_len, page_table=rows.block_table, cu_seqlens_q=rows.cu_q,
        max_seqlen_q=rows.max_q, causal=True, window_size=(window - 1, 0) if window else (-1, -1),
    )  # fmt: skip


def _attend_4(functions: Functions, q: Tensor, k: Tensor, v: Tensor, rows: FlashRows, window: int) -> Tensor:
    found = functions[0](
        q, k, v, cu_seqlens_q=rows.cu_q, max_seqlen_q=rows.max_q, max_seqlen_k=rows.max_kv, seqused_k=rows.kv_len,
        page_table=rows.block_table, causal=True, window_size=(window - 1, 0) if window else (None, None),
    )  # fmt: skip
    return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True, slots=True)
class FlashVersion:
    """A generation of the package.

    `attend` takes the package's functions, q [T, heads, head_dim], strided k and v [num_blocks, block_tokens, kv_heads,
    head_dim], the rows and a window (0 for none). It returns causal attention [T, heads, head_dim].
    """

    module: str
    load: Callable[[], ModuleType]
    functions: tuple[str, ...]
    attend: Callable[[Functions, Tensor, Tensor, Tensor, FlashRows, int], Tensor]
    decodes: bool  # whether the generation divides long contexts among processors on Hopper, so that decodes are fast
    runs_on: Collection[int]  # major compute capabilities of GPUs
    supports: Callable[[KVPool], bool]  # whether the pool's blocks may have their number of tokens
    limit: str  # the error message for other block sizes


def _reads_contexts_only(pool: KVPool) -> bool:
    """Return whether FlashAttention 3 reads no values beyond the context (see issue 2374 of its repository).

    If the number of tokens in a tile divides the number of tokens in a block, FlashAttention 3 copies whole tiles. The
    size of its tiles depends on the size of the heads and on whether there is a window.
    """
    has_windows = any(group.kind == "window" for group in pool.places.groups)
    tiles = (96, 112, 128, 144, 160, 192) if pool.layout.head_dim <= 192 else (64, 80) if has_windows else (80,)
    return all(pool.layout.block_tokens % tile for tile in tiles)


HOPPER = 9  # major compute capability
FLASH_2, FLASH_3, FLASH_4 = "flash_attn 2", "flash_attn 3", "flash_attn 4"
_VARLEN, _WITH_CACHE = "flash_attn_varlen_func", "flash_attn_with_kvcache"
GENERATIONS = {  # best first on a Hopper GPU
    FLASH_3: FlashVersion(
        "flash_attn_interface", lambda: importlib.import_module("flash_attn_interface"), (_WITH_CACHE,), _attend_3,
        True, {HOPPER}, _reads_contexts_only,
        "FlashAttention 3 reads beyond the context with this --block-size and head_dim: use another block size",
    ),
    # FlashAttention 4 loads whole blocks of 128 tokens. A NaN in the unused tail of a block, such as the bits of a
    # recurrent state that was stored there, would therefore spread (0 * NaN).
    FLASH_4: FlashVersion(
        "flash_attn.cute", lambda: importlib.import_module("flash_attn.cute"), (_VARLEN,), _attend_4, False,
        {HOPPER, 10, 11}, lambda pool: pool.layout.block_tokens != 128,
        "FlashAttention 4 reads beyond the context with this --block-size: use another",
    ),
    FLASH_2: FlashVersion(
        "flash_attn", lambda: importlib.import_module("flash_attn"), (_VARLEN, _WITH_CACHE), _attend_2, True,
        range(8, 13), lambda pool: pool.layout.block_tokens % 256 == 0,
        "FlashAttention 2 needs a --block-size that is a multiple of 256",
    ),
}  # fmt: skip


def installed() -> list[str]:
    """Return the installed generations, best first. This does not import the packages, so `load` may still fail."""
    return [name for name, version in GENERATIONS.items() if _is_there(version.module)]


def _is_there(module: str) -> bool:
    """Return whether the module is installed, without importing its package, because the import may fail.

    For a submodule, `importlib.util.find_spec` would import the package.
    """
    package, _, submodule = module.partition(".")
    found = importlib.util.find_spec(package)
    if found is None or not submodule:
        return found is not None
    return PathFinder.find_spec(module, found.submodule_search_locations or []) is not None


def first_loadable(names: Sequence[str]) -> str:
    """Return the first of the generations `names` whose package can be loaded, or the last one if all fail."""
    for name in names[:-1]:
        try:
            load(name)
        except ValueError as error:
            log.info("this FlashAttention cannot be used; trying the next one: %s", error)
        else:
            return name
    return names[-1]


def load(name: str) -> list[Callable[..., Any]]:
    """Import a generation's package and return its functions. Raises ValueError if that fails.

    FlashAttention 2.8 contains an early `flash_attn.cute`, whose function lacks an argument that we pass.
    """
    try:
        module = GENERATIONS[name].load()
        functions = [getattr(module, function) for function in GENERATIONS[name].functions]
        if name == FLASH_4 and "max_seqlen_q" not in inspect.signature(functions[0]).parameters:
            raise TypeError(f"{_VARLEN} has no max_seqlen_q")
        return functions
    except Exception as error:
        raise ValueError(
            f"--attention-backend flash_attn: {name} cannot be loaded: {cause(error)}: reinstall it for torch "
            f"{torch.__version__}, or use auto"
        ) from error


class FlashAttention:
    """Attention over `pool` by the FlashAttention generation `name`.

    `ours` computes the layers that the package does not support. If the package is slow for decodes, `ours` also
    computes the leading slices of one token. Raises ValueError if the package cannot be loaded, or does not support the
    pool's dtype, head size or block size.
    """

    def __init__(self, pool: KVPool, name: str, ours: AttentionBackend | None = None) -> None:
        layout = pool.layout
        if pool.tensor.itemsize != 2 or layout.head_dim % 8 or layout.head_dim > 256:
            raise ValueError(
                f"--attention-backend flash_attn needs 16-bit KV and a head_dim of up to 256 that is a multiple of 8, "
                f"not {layout.dtype} and {layout.head_dim}: use triton"
            )
        version, functions = GENERATIONS[name], load(name)
        if not version.supports(pool):
            raise ValueError(f"--attention-backend flash_attn: {version.limit} (it is {layout.block_tokens})")
        self._pool = pool
        self._attend: FlashAttend = partial(version.attend, functions)
        self._ours = ours or TorchAttention(pool)
        self._decoding = None if version.decodes else ours
        self.name = name if self._decoding is None else f"{name}, {self._decoding.name} for decodes"
        self.captures = self._decoding is None or self._decoding.captures

    def plan(self, batch: Batch) -> "FlashPlan":
        return FlashPlan(self._pool, self._attend, self._ours, self._decoding, batch)


def part_of(batch: Batch, first: int, last: int) -> tuple[Batch, slice]:
    """Return a batch of only the slices [first, last), for planning attention, and the range of their tokens."""
    starts, kv_lens = batch.starts[first:last], batch.kv_lens[first:last]
    before = sum(batch.counts[:first])
    span = slice(before, before + sum(kv_lens) - sum(starts))
    cu_q = batch.cu_q[first : last + 1]
    part = replace(
        batch, tokens=batch.tokens[span], positions=batch.positions[span], slots=batch.slots[span],
        cu_q=cu_q - before if before else cu_q, kv_len=batch.kv_len[first:last],
        block_table=batch.block_table[first:last], starts=starts, kv_lens=kv_lens, sampled=[], scored=[],
    )  # fmt: skip
    return part, span


class FlashPlan:
    """The attention of one step, computed in up to two parts: the leading slices of one token, and all later slices."""

    def __init__(
        self,
        pool: KVPool,
        attend: FlashAttend,
        ours: AttentionBackend,
        decoding: AttentionBackend | None,
        batch: Batch,
    ) -> None:
        self._pool = pool
        self._attend = attend
        self._others, self._batch = ours, batch
        self._other: AttentionPlan | None = None
        counts = batch.counts
        num_decodes = next((at for at, count in enumerate(counts) if count > 1), len(counts))
        self._decoding: tuple[AttentionPlan, slice] | None = None
        self._parts: list[FlashRows] = []
        for first, last in ((0, num_decodes), (num_decodes, len(counts))):
            if first == last:
                continue
            part, span = part_of(batch, first, last)
            if first == 0 and num_decodes and decoding is not None:
                self._decoding = decoding.plan(part), span
            else:
                longest = max(part.counts), max(part.kv_lens)
                self._parts.append(FlashRows(span, part.cu_q, longest[0], part.kv_len, longest[1], part.block_table))

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        if not layer.is_plain:
            self._other = self._other or self._others.plan(self._batch)
            return self._other.attend(layer, q)
        window = layer.window
        k, v = (half.transpose(1, 2) for half in self._pool.layer(layer.index))
        if self._decoding is None and len(self._parts) == 1:
            return self._attend(q, k, v, self._parts[0], window)
        out = torch.empty_like(q)
        if self._decoding is not None:
            plan, span = self._decoding
            out[span] = plan.attend(layer, q[span])
        for rows in self._parts:
            out[rows.span] = self._attend(q[rows.span], k, v, rows, window)
        return out
