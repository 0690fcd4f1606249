"""Benchmark GPU kernels against figures published for an H200: paged attention of decodes and of prompts over tiles,
splits, layouts and block sizes, and cuBLAS at Llama-3.1-8B's sizes.

Published: NVIDIA aiconfigurator's data of an H200 (vLLM, FlashAttention 3 and cuBLAS; 32 and 8 heads of 128, bfloat16).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.gpu.scene import CALLS, GpuScene, GpuSection, RandomKV, attention_s, failure_note, fits, one_of_many
from benchmarks.result import Cell, Table
from engine.attention import AttentionBackend
from engine.cuda.flash_attention import FLASH_2, FlashAttention
from engine.cuda.selection import BLOCK_TOKENS, flash_attn_here
from engine.kv_pool import KVPool

POINTS = [(batch, context) for context in (1024, 8192, 32768) for batch in (1, 8, 64, 256)]
KEY_POINTS = [(1, 1024), (1, 8192), (8, 8192), (64, 1024), (256, 1024), (64, 8192)]
FA3_DECODE_TBS = {(1, 1024): 0.31, (1, 8192): 1.8, (64, 1024): 3.3, (256, 1024): 3.9, (64, 8192): 4.4}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FA3_PREFILL_TFS = dict(zip(LENGTHS, (99, 244, 393, 513, 586, 652), strict=True))
PREFILL_GOAL_TFS, PREFILL_GOAL_AT = 400, 8192
DECODE_TILES = [(16, 32, 4, 3), (16, 64, 2, 3), (16, 64, 4, 2), (16, 64, 4, 4), (16, 64, 8, 3), (16, 128, 4, 3),
                (16, 128, 8, 2)]  # fmt: skip
CHUNK_TILES = [(128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 4), (128, 64, 4, 3),
               (64, 128, 4, 3), (128, 128, 8, 3), (128, 32, 8, 4), (64, 64, 4, 4)]  # fmt: skip
TOY_TILES = [(16, 16, 4, 2)]
ROWS = (1, 16, 64, 256, 512, 2048)
BANDWIDTH_TBS, PRODUCT_TFS = 4.3, 790.0  # measured on an H200
WEIGHT_BYTES = 512 << 20  # total of the copies of one matrix, so that none stays in the cache
KV_SHARE = 0.6  # of free memory
MOST_S = 4.0  # for one figure, excluding compilation


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A configuration of our kernels; the defaults are the product's. `programs` is per processor; `tile` is that of
    decodes or chunks, whichever is measured."""

    block_tokens: int = BLOCK_TOKENS
    layer_major: bool = False
    programs: float = 2
    split_tokens: int = 256
    tile: tuple[int, int, int, int] | None = None

    @property
    def name(self) -> str:
        layout = "LBNHC" if self.layer_major else "BHLNC"
        changed = [f"tile {self.tile}"] if self.tile else []
        changed += [f"{self.programs:g} programs"] if self.programs != 2 else []
        changed += [f"splits of {self.split_tokens}"] if self.split_tokens != 256 else []
        return ", ".join([f"{layout} of {self.block_tokens}", *changed])

    def backend(self, pool: KVPool) -> AttentionBackend:
        from engine.cuda.attention import PROGRAMS_A_PROCESSOR, Tile, TritonAttention

        tile = Tile(*self.tile) if self.tile else None
        backend = TritonAttention(pool, self.split_tokens, decode=tile, chunk=tile)
        backend.processors = max(1, round(backend.processors * self.programs / PROGRAMS_A_PROCESSOR))
        return backend


def spans_of(scene: GpuScene, point: tuple[int, int]) -> list[tuple[int, int]]:
    batch, context = (2 if scene.toy else point[0]), scene.tokens(point[1])
    return [(context - 1, context)] * batch


def kv_bytes(scene: GpuScene) -> int:
    return 1 << 20 if scene.toy else int(torch.cuda.mem_get_info(scene.device)[0] * KV_SHARE)


# ---- attention of decodes ---------------------------------------------------------------------------------------


def decode(scene: GpuScene) -> GpuSection:
    """Measure the terabytes of KV read per second: the product's variant at every point first, then the others, most
    important first, until the time is used up."""
    flat = RandomKV(scene, kv_bytes(scene))
    tiles = TOY_TILES if scene.toy else DECODE_TILES
    work = [(KernelVariant(), point) for point in POINTS] + [
        (KernelVariant(layer_major=True), point) for point in POINTS
    ]
    others = [
        KernelVariant(block_tokens=16),
        KernelVariant(block_tokens=128),
        KernelVariant(programs=1),
        KernelVariant(programs=4),
    ]
    others += [KernelVariant(split_tokens=128), KernelVariant(split_tokens=512)]
    work += [(variant, point) for variant in others for point in KEY_POINTS]
    work += [(KernelVariant(tile=tile), point) for tile in tiles for point in KEY_POINTS]
    work = work[:: 1 + len(work) // 12] if scene.toy else work
    rates: dict[tuple[int, int], dict[str, float]] = {point: {} for point in POINTS}
    failed: list[str] = []
    left_out = 0
    for variant, point in [*_flash_decodes(scene), *work]:
        if not scene.has_left(MOST_S):
            left_out += 1
            continue
        with one_of_many(f"{variant if isinstance(variant, str) else variant.name} at {point}", failed):
            _measure_decode(scene, flat, variant, point, rates[point])
    columns = ["sequences", "context", "ours, TB/s", "FA3 published", "ours / FA3", "LBNHC", "best", "which"]
    rows = [_decode_row(point, found) for point, found in rates.items() if found]
    note = f"One layer; KV read over time. Variants left out for lack of time: {left_out}.{failure_note(failed)}"
    shown = {f"{batch} x {context}": found for (batch, context), found in rates.items()}
    return GpuSection([Table("Attention of decodes", columns, rows, note)], shown)


def _flash_decodes(scene: GpuScene) -> list[tuple["KernelVariant | str", tuple[int, int]]]:
    return [(name, point) for name in flash_attn_here(scene.device) for point in KEY_POINTS if not scene.toy]


def _measure_decode(
    scene: GpuScene, flat: RandomKV, variant: "KernelVariant | str", point: tuple[int, int], rates: dict[str, float]
) -> None:
    config, spans = scene.config, spans_of(scene, point)
    name = variant if isinstance(variant, str) else variant.name
    pool = _pool_for(flat, variant)
    if not fits(pool, spans):
        return
    backend = FlashAttention(pool, variant) if isinstance(variant, str) else variant.backend(pool)
    read = sum(end for _, end in spans) * config.num_kv_heads * 2 * config.head_dim * scene.dtype.itemsize
    rates[name] = read / attention_s(scene, pool, backend, spans) / 1e12


def _pool_for(flat: RandomKV, variant: "KernelVariant | str") -> KVPool:
    if isinstance(variant, str):
        return flat.pool(256 if variant == FLASH_2 else BLOCK_TOKENS)
    return flat.pool(variant.block_tokens, variant.layer_major)


def _decode_row(point: tuple[int, int], found: dict[str, float]) -> list[Cell]:
    ours, published = found.get(KernelVariant().name), FA3_DECODE_TBS.get(point)
    best = max(found, key=lambda name: found[name])
    share = ours / published if ours and published else None
    return [*point, ours, published, share, found.get(KernelVariant(layer_major=True).name), found[best], best]


# ---- attention of prompts ---------------------------------------------------------------------------------------


def prefill(scene: GpuScene) -> GpuSection:
    """Measure the TFLOP/s of whole prompts, and of a chunk of 2048 tokens after 30k."""
    lengths = LENGTHS[:1] if scene.toy else LENGTHS
    longest = max(scene.tokens(32768), 64)
    flat = RandomKV(scene, (longest + 1024) * token_bytes(scene))
    tiles = TOY_TILES if scene.toy else CHUNK_TILES
    ours: list[tuple[str, Any]] = [("as chosen", KernelVariant())]
    ours += [(KernelVariant(tile=tile).name, KernelVariant(tile=tile)) for tile in tiles]
    arms = [*ours, *((name, name) for name in flash_attn_here(scene.device) if not scene.toy)]
    spans = [(0, scene.tokens(length)) for length in reversed(lengths)]  # the goal is for a long prompt
    spans.insert(2, (scene.tokens(30720), scene.tokens(32768)))
    rates: dict[tuple[int, int], dict[str, float]] = {span: {} for span in spans}
    failed: list[str] = []
    left_out = 0
    for name, variant in arms:
        for span in spans:
            if not scene.has_left(MOST_S):
                left_out += 1
                continue
            with one_of_many(f"{name} from {span[0]} to {span[1]}", failed):
                pool = _pool_for(flat, variant)
                backend = FlashAttention(pool, variant) if isinstance(variant, str) else variant.backend(pool)
                rates[span][name] = flops(scene, *span) / attention_s(scene, pool, backend, [span]) / 1e12
    rows = [_prefill_row(span, found) for span, found in sorted(rates.items()) if found]
    columns = ["from", "to", "ours, TF/s", "FA3 published", "ours / FA3", "best", "which", "goal"]
    verdict = default_kernel(rates.get((0, PREFILL_GOAL_AT), {}))
    note = f"One layer, causal. {verdict} Left out: {left_out}.{failure_note(failed)}"
    shown = {f"{start} to {end}": found for (start, end), found in rates.items()}
    return GpuSection([Table("Attention of prompts", columns, rows, note)], shown)


def default_kernel(found: dict[str, float]) -> str:
    """Return which kernel should be the default for prompts."""
    goal = f"The goal is {PREFILL_GOAL_TFS} TF/s at {PREFILL_GOAL_AT} tokens"
    if "as chosen" not in found:
        return f"{goal}: not measured."
    best = max(found, key=lambda name: found[name])
    if found["as chosen"] >= PREFILL_GOAL_TFS:
        return f"{goal}: met, our kernel stays the default."
    return f"{goal}: missed. The default should be {best}, at {found[best]:.0f} TF/s."


def token_bytes(scene: GpuScene) -> int:
    config = scene.config
    return config.num_layers * config.num_kv_heads * 2 * config.head_dim * scene.dtype.itemsize


def flops(scene: GpuScene, start: int, end: int) -> float:
    """Return the FLOPs of one layer: two products of a multiply and an add per visible query and key."""
    seen = (end * (end + 1) - start * (start + 1)) / 2
    return 4.0 * scene.config.num_heads * scene.config.head_dim * seen


def _prefill_row(span: tuple[int, int], found: dict[str, float]) -> list[Cell]:
    ours = found.get("as chosen")
    published = FA3_PREFILL_TFS.get(span[1]) if span[0] == 0 else None
    best = max(found, key=lambda name: found[name])
    share = ours / published if ours and published else None
    goal = ours is not None and ours >= PREFILL_GOAL_TFS if span == (0, PREFILL_GOAL_AT) else None
    return [*span, ours, published, share, found[best], best, goal]


# ---- matrix products --------------------------------------------------------------------------------------------


def products(scene: GpuScene) -> list[tuple[str, int, int]]:
    """Return the name, outputs and inputs of each matrix of the model."""
    config = scene.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        ("qkv", queries + 2 * keys, hidden),
        ("output", hidden, queries),
        ("gate and up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", config.vocab_size, hidden),
    ]


def gemm(scene: GpuScene) -> GpuSection:
    """Measure torch's matrix products against the floor that memory and tensor cores set."""
    rows: list[list[Cell]] = []
    per_layer: dict[int, float] = dict.fromkeys(ROWS, 0.0)
    for name, outputs, inputs in products(scene):
        size = outputs * inputs * scene.dtype.itemsize
        weights = [
            torch.randn(outputs, inputs, dtype=scene.dtype, device=scene.device)
            for _ in range(1 if scene.toy else max(2, WEIGHT_BYTES // size))
        ]
        line: list[Cell] = [name, outputs, inputs]
        for count in ROWS:
            tokens = torch.randn(scene.tokens(count), inputs, dtype=scene.dtype, device=scene.device)
            took = scene.seconds(lambda call, m=tokens, w=weights: linear(m, w[call % len(w)]), min(CALLS, 16))  # type: ignore[misc]
            line += [took * 1e6, _floor_s(count, outputs, inputs) / took]
            per_layer[count] += took * (1 if name == "head" else scene.config.num_layers)
        rows.append(line)
    columns = ["matrix", "outputs", "inputs", *(title for count in ROWS for title in (f"m={count}, µs", "of floor"))]
    note = f"Floor: {BANDWIDTH_TBS} TB/s or {PRODUCT_TFS:.0f} TF/s, the slower. The whole model: " + ", ".join(
        f"{took * 1e3:.2f} ms at {count}" for count, took in per_layer.items()
    )
    return GpuSection([Table("Matrix products, bfloat16", columns, rows, note)], {"model_s": per_layer, "rows": rows})


def _floor_s(rows: int, outputs: int, inputs: int) -> float:
    moved = 2 * (outputs * inputs + rows * (inputs + outputs))
    return max(moved / BANDWIDTH_TBS, 2.0 * rows * outputs * inputs / PRODUCT_TFS) / 1e12
