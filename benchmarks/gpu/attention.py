"""Benchmark attention over a paged pool on a GPU, for decodes and prompts, over tiles, splits, layouts and block sizes.

Published: NVIDIA aiconfigurator's data of an H200 (vLLM, FlashAttention 3; 32 and 8 heads of 128, bfloat16). On a CPU,
at toy size, everything runs under Triton's interpreter. Those times mean nothing; the tests check that the code runs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

import torch
from torch import Tensor

from benchmarks.result import Cell, Table
from engine.attention import AttentionBackend
from engine.batch import build
from engine.cuda.flash_attention import FLASH_2, FlashAttention
from engine.cuda.selection import BLOCK_TOKENS, flash_attn_here
from engine.kv_pool import DTYPES, KVPool
from engine.models.config import ModelConfig, Rope
from scheduler.request import Request, Slice, cdiv
from shared.kv.layout import KVLayout

POINTS = [(batch, context) for context in (1024, 8192, 32768) for batch in (1, 8, 64, 256)]
KEY_POINTS = [(1, 1024), (1, 8192), (8, 8192), (64, 1024), (256, 1024), (64, 8192)]
FA3_DECODE_TBS = {(1, 1024): 0.31, (1, 8192): 1.8, (64, 1024): 3.3, (256, 1024): 3.9, (64, 8192): 4.4}
FA3_PREFILL_TFS = {512: 99.0, 1024: 244.0, 2048: 393.0, 4096: 513.0, 8192: 586.0, 16384: 652.0}
PREFILL_GOAL_TFS, PREFILL_GOAL_AT = 400, 8192
DECODE_TILES = [(16, 32, 4, 3), (16, 64, 2, 3), (16, 64, 4, 2), (16, 64, 4, 4), (16, 64, 8, 3), (16, 128, 4, 3),
                (16, 128, 8, 2)]  # fmt: skip
CHUNK_TILES = [(128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 4), (128, 64, 4, 3),
               (64, 128, 4, 3), (128, 128, 8, 3), (128, 32, 8, 4), (64, 64, 4, 4)]  # fmt: skip
TOY_TILES = [(16, 16, 4, 2)]
KV_SHARE = 0.6  # of free memory
FILL_NUMBERS = 2**28  # random numbers generated at a time
CALLS = 32  # per timing, each in another layer, so that no call reads cached data
TOY_SCALE = 64  # lengths are divided by it
LLAMA_8B = ModelConfig(
    "LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128, 128_256, 1e-5, Rope(500_000.0), False, False, False, False, False,
    (0,) * 32, 131_072, None, (),
)  # fmt: skip
TOY = replace(
    LLAMA_8B, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=97, windows=(0, 0), max_position_embeddings=2048,
)  # fmt: skip


@dataclass(slots=True)
class GpuSection:
    """The result of one section."""

    tables: list[Table] = field(default_factory=list)
    runs: object = None


@dataclass(frozen=True, slots=True)
class GpuScene:
    """The device and sizes of a run, and the failures of single figures, which do not prevent the others."""

    device: torch.device
    toy: bool
    failed: list[str] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig:
        return TOY if self.toy else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.toy else torch.bfloat16  # numpy, and therefore the interpreter, has no bfloat16

    @property
    def token_bytes(self) -> int:
        return self.config.num_layers * self.config.num_kv_heads * 2 * self.config.head_dim * self.dtype.itemsize

    def tokens(self, count: int) -> int:
        """Return `count`, scaled down at toy size."""
        return max(2, count // TOY_SCALE) if self.toy else count

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Measure one figure. A failure, such as a tile too large, is kept in `failed`."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the other figures are still measured
            self.failed.append(f"{what}: {type(error).__name__} {error}")

    @property
    def failures(self) -> str:
        return f" Failed: {'; '.join(self.failed)}." if self.failed else ""

    def seconds(self, work: Callable[[int], object], repeats: int = 5) -> float:
        """Return the seconds of one call on the device: the median over replays of a CUDA graph of CALLS calls, which
        excludes launch time. `work` gets the number of the call."""
        if self.device.type == "cpu":
            return self.elapsed_s(lambda: work(0))
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(0)  # compiles
        with torch.cuda.graph(graph, stream=stream):
            for call in range(CALLS):
                work(call)
        graph.replay()
        return median(self.elapsed_s(graph.replay) for _ in range(repeats)) / CALLS

    def elapsed_s(self, work: Callable[[], object]) -> float:
        """Return the seconds on the device from the first to the last operation that `work` issues."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class RowMemory:
    """Memory of a pool, as rows of one block each."""

    rows: Tensor


class LayerMajorPool(KVPool):
    """LBNHC, the layout of vLLM and most engines, for comparison: the kernels only see other strides."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        layout = self.layout
        shape = layout.layers, layout.num_blocks, layout.block_tokens, layout.kv_heads, 2, layout.head_dim
        both = self.tensor.view(DTYPES[layout.dtype]).view(shape)[index].transpose(1, 2)
        return both[..., 0, :], both[..., 1, :]


class RandomKV:
    """Random KV: one allocation, viewed as a pool of any layout and block size."""

    def __init__(self, scene: GpuScene, num_bytes: int) -> None:
        self.scene = scene
        numbers = torch.empty(num_bytes // scene.dtype.itemsize, dtype=scene.dtype, device=scene.device)
        for first in range(0, len(numbers), FILL_NUMBERS):
            numbers[first : first + FILL_NUMBERS].normal_()
        self.bytes = numbers.view(torch.uint8)

    def pool(self, block_tokens: int, layer_major: bool = False) -> KVPool:
        config, dtype = self.scene.config, str(self.scene.dtype).removeprefix("torch.")
        one = KVLayout(1, config.num_kv_heads, config.num_layers, block_tokens, config.head_dim, dtype)
        layout = replace(one, num_blocks=len(self.bytes) // one.block_bytes)
        rows = self.bytes[: layout.num_blocks * layout.block_bytes].view(layout.num_blocks, -1)
        return (LayerMajorPool if layer_major else KVPool)(layout, RowMemory(rows))


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """A configuration of our kernels, or with `flash` the name of another; the defaults are the product's. `programs`
    is per processor; `tile` is that of decodes or chunks, whichever is measured."""

    block_tokens: int = BLOCK_TOKENS
    layer_major: bool = False
    programs: float = 2
    split_tokens: int = 256
    tile: tuple[int, int, int, int] | None = None
    flash: str = ""

    @property
    def name(self) -> str:
        changed = [f"tile {self.tile}"] if self.tile else []
        changed += [f"{self.programs:g} programs"] if self.programs != 2 else []
        changed += [f"splits of {self.split_tokens}"] if self.split_tokens != 256 else []
        return self.flash or ", ".join([f"{'LBNHC' if self.layer_major else 'BHLNC'} of {self.block_tokens}", *changed])

    def pool(self, flat: RandomKV) -> KVPool:
        return flat.pool(256 if self.flash == FLASH_2 else self.block_tokens, self.layer_major)

    def backend(self, pool: KVPool) -> AttentionBackend:
        if self.flash:
            return FlashAttention(pool, self.flash)
        from engine.cuda.attention import PROGRAMS_A_PROCESSOR, Tile, TritonAttention

        tile = Tile(*self.tile) if self.tile else None
        backend = TritonAttention(pool, self.split_tokens, decode=tile, chunk=tile)
        backend.processors = max(1, round(backend.processors * self.programs / PROGRAMS_A_PROCESSOR))
        return backend


def attention_s(scene: GpuScene, flat: RandomKV, variant: KernelVariant, spans: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of one layer's attention, excluding the step's plan. `spans`: the tokens of each request from
    start to end, over blocks in random order. Raises ValueError if they do not fit."""
    pool, config, slices = variant.pool(flat), scene.config, []
    size = pool.layout.block_tokens
    free = list(range(1, pool.layout.num_blocks))
    Random(0).shuffle(free)
    if sum(cdiv(end, size) for _, end in spans) > len(free):
        raise ValueError("the pool is too small")
    for number, (start, end) in enumerate(spans):
        request = Request(f"r{number}", [0] * end, end, 1)
        request.blocks = [free.pop() for _ in range(cdiv(end, size))]
        slices.append(Slice(request, start, end - start, True, 0))
    batch = build(slices, size, scene.device)
    q = torch.randn(len(batch.tokens), config.num_heads, config.head_dim, device=scene.device).to(scene.dtype)
    plan = variant.backend(pool).plan(batch)
    return scene.seconds(lambda call: plan.attend(call % config.num_layers, q, 0))


def decode(scene: GpuScene) -> GpuSection:
    """Measure the terabytes of KV read per second: the product's variant at every point, the others at some."""
    flat = RandomKV(scene, 1 << 20 if scene.toy else int(torch.cuda.mem_get_info(scene.device)[0] * KV_SHARE))
    others = [KernelVariant(block_tokens=16), KernelVariant(block_tokens=128)]
    others += [KernelVariant(programs=count) for count in (1, 4)]
    others += [KernelVariant(split_tokens=count) for count in (128, 512)]
    others += [KernelVariant(tile=tile) for tile in (TOY_TILES if scene.toy else DECODE_TILES)]
    others += [KernelVariant(flash=name) for name in flash_attn_here(scene.device) if not scene.toy]
    work = [(KernelVariant(layer_major=major), point) for major in (False, True) for point in POINTS]
    work += [(variant, point) for variant in others for point in KEY_POINTS]
    rates: dict[tuple[int, int], dict[str, float]] = {point: {} for point in POINTS}

    def measure(variant: KernelVariant, point: tuple[int, int]) -> None:
        batch, context = (2 if scene.toy else point[0]), scene.tokens(point[1])
        read = batch * context * scene.token_bytes // scene.config.num_layers
        spans = [(context - 1, context)] * batch
        rates[point][variant.name] = read / attention_s(scene, flat, variant, spans) / 1e12

    for variant, point in work[:: 1 + len(work) // 12] if scene.toy else work:
        scene.attempt(f"{variant.name} at {point}", lambda v=variant, p=point: measure(v, p))  # type: ignore[misc]
    rows: list[list[Cell]] = []
    for point, found in rates.items():
        if found:
            ours, published = found.get(KernelVariant().name), FA3_DECODE_TBS.get(point)
            best = max(found, key=found.__getitem__)
            share = ours / published if ours and published else None
            layer_major = found.get(KernelVariant(layer_major=True).name)
            rows.append([*point, ours, published, share, layer_major, found[best], best])
    columns = ["sequences", "context", "ours, TB/s", "FA3 published", "ours / FA3", "LBNHC", "best", "which"]
    runs = {f"{batch} x {context}": found for (batch, context), found in rates.items()}
    note = f"One layer; KV read over time.{scene.failures}"
    return GpuSection([Table("Attention of decodes", columns, rows, note)], runs)


def prefill(scene: GpuScene) -> GpuSection:
    """Measure the TFLOP/s of whole prompts, and of a chunk of 2048 tokens after 30k."""
    flat = RandomKV(scene, (max(scene.tokens(32768), 64) + 1024) * scene.token_bytes)
    arms = {"as chosen": KernelVariant()}
    arms |= {str(tile): KernelVariant(tile=tile) for tile in (TOY_TILES if scene.toy else CHUNK_TILES)}
    arms |= {name: KernelVariant(flash=name) for name in flash_attn_here(scene.device) if not scene.toy}
    spans = [(0, length) for length in list(FA3_PREFILL_TFS)[: 1 if scene.toy else None]] + [(30720, 32768)]
    rates: dict[tuple[int, int], dict[str, float]] = {span: {} for span in spans}

    def measure(name: str, span: tuple[int, int]) -> None:
        start, end = map(scene.tokens, span) if span[0] else (0, scene.tokens(span[1]))
        took_s = attention_s(scene, flat, arms[name], [(start, end)])
        rates[span][name] = flops(scene.config, start, end) / took_s / 1e12

    for name in arms:
        for span in spans:
            scene.attempt(f"{name} from {span[0]} to {span[1]}", lambda n=name, s=span: measure(n, s))  # type: ignore[misc]
    rows: list[list[Cell]] = []
    for span, found in rates.items():
        if found:
            ours, published = found.get("as chosen"), None if span[0] else FA3_PREFILL_TFS[span[1]]
            best = max(found, key=found.__getitem__)
            share = ours / published if ours and published else None
            goal = ours is not None and ours >= PREFILL_GOAL_TFS if span == (0, PREFILL_GOAL_AT) else None
            rows.append([*span, ours, published, share, found[best], best, goal])
    columns = ["from", "to", "ours, TF/s", "FA3 published", "ours / FA3", "best", "which", "goal"]
    note = f"One layer, causal. The goal is {PREFILL_GOAL_TFS} TF/s at {PREFILL_GOAL_AT} tokens.{scene.failures}"
    runs = {f"{start} to {end}": found for (start, end), found in rates.items()}
    return GpuSection([Table("Attention of prompts", columns, rows, note)], runs)


def flops(config: ModelConfig, start: int, end: int) -> float:
    """Return the FLOPs of one layer: two products of a multiply and an add per visible query and key."""
    return 2.0 * config.num_heads * config.head_dim * (end * (end + 1) - start * (start + 1))
