"""Benchmark attention over a paged KV pool on a GPU, for decodes and prompts, in two memory layouts.

The published figures in this file are from NVIDIA aiconfigurator, for an H200 (vLLM, FlashAttention 3; 32 query heads
and 8 KV heads of 128, bfloat16). On a CPU, Triton's interpreter runs everything at toy size. A run on a CPU only tests
the code; its times mean nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from random import Random
from statistics import median

import torch
from torch import Tensor

from benchmarks.result import Cell, Table
from engine.attention import AttentionBackend, AttentionLayer
from engine.batch import build
from engine.cuda.flash_attention import FLASH_2, FlashAttention
from engine.cuda.selection import BLOCK_TOKENS, flash_attn_here
from engine.kv_pool import DTYPES, KVPool
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, Rope
from scheduler.request import Request, Slice, cdiv
from shared.kv.layout import KVLayout

POINTS = [(batch, context) for context in (1024, 8192, 32768) for batch in (1, 8, 64, 256)]
FA3_DECODE_TBS = {(1, 1024): 0.31, (1, 8192): 1.8, (64, 1024): 3.3, (256, 1024): 3.9, (64, 8192): 4.4}
FA3_PREFILL_TFS = {512: 99.0, 1024: 244.0, 2048: 393.0, 4096: 513.0, 8192: 586.0, 16384: 652.0}
CHUNKS = [(32704, 32768), (32256, 32768), (30720, 32768)]
PREFILL_GOAL_TFS, PREFILL_GOAL_AT = 400, 8192
OURS, LAYER_MAJOR = "ours", "ours, LBNHC"  # Baton's own layout is BHLNC
KV_SHARE = 0.6  # the share of the free GPU memory that the KV takes
FILL_NUMBERS = 2**28  # how many random numbers are generated at a time
CALLS = 32  # calls per timing, each on another layer, so that no call reads cached data
TOY_SCALE = 64  # lengths are divided by this at toy size
LLAMA_8B = ModelConfig(
    "LlamaForCausalLM", 4096, 128_256, (LayerSpec(AttentionSpec(32, 8, 128, Rope(500_000.0)), MlpSpec(14336)),) * 32,
    1e-5, False, 131_072,
)  # fmt: skip
TOY = ModelConfig("LlamaForCausalLM", 64, 97, (LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(96)),) * 2, 1e-5, False, 2048)


@dataclass(slots=True)
class GpuSection:
    """The result of one section."""

    tables: list[Table] = field(default_factory=list)
    runs: object = None


@dataclass(frozen=True, slots=True)
class GpuScene:
    """The device and the sizes of a run. `failed` lists the figures that could not be measured, with their errors."""

    device: torch.device
    toy: bool
    failed: list[str] = field(default_factory=list)

    @property
    def config(self) -> ModelConfig:
        return TOY if self.toy else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.toy else torch.bfloat16  # Triton's interpreter uses numpy, which has no bfloat16

    @property
    def token_bytes(self) -> int:
        return self.config.num_layers * self.config.num_kv_heads * 2 * self.config.head_dim * self.dtype.itemsize

    def tokens(self, count: int) -> int:
        """Return `count`, divided by TOY_SCALE at toy size."""
        return max(2, count // TOY_SCALE) if self.toy else count

    def attempt(self, what: str, work: Callable[[], None]) -> None:
        """Call `work` to measure one figure. If that fails, as when a tile is too large, add the error to `failed`."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the other figures are still measured
            self.failed.append(f"{what}: {type(error).__name__} {error}")

    @property
    def failures(self) -> str:
        return f" Failed: {'; '.join(self.failed)}." if self.failed else ""

    def seconds(self, work: Callable[[int], object], repeats: int = 5) -> float:
        """Return the seconds of one call of `work` on the device, without the launches of its kernels. To measure this,
        replay a CUDA graph of CALLS calls repeatedly, and take the median. `work` gets the number of the call."""
        if self.device.type == "cpu":
            return self.elapsed_s(lambda: work(0))
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(0)  # the first call compiles the kernels
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
    """The memory of a pool. Each row is one block."""

    rows: Tensor


class LayerMajorPool(KVPool):
    """A pool in the layout LBNHC of vLLM and most engines, for comparison. For kernels, only the strides differ."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        layout = self.layout
        shape = layout.layers, layout.num_blocks, layout.block_tokens, layout.kv_heads, 2, layout.head_dim
        both = self.tensor.view(DTYPES[layout.dtype]).view(shape)[index].transpose(1, 2)
        return both[..., 0, :], both[..., 1, :]


class RandomKV:
    """Random KV in one allocation, which can be viewed as a pool of any layout and block size."""

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


def backend_of(flat: RandomKV, arm: str) -> tuple[KVPool, AttentionBackend]:
    """Return the pool and the kernels of an arm, which is OURS, LAYER_MAJOR, or the name of a flash-attn version."""
    if arm not in {OURS, LAYER_MAJOR}:
        pool = flat.pool(256 if arm == FLASH_2 else BLOCK_TOKENS)
        return pool, FlashAttention(pool, arm)
    from engine.cuda.attention import TritonAttention  # imported late, because the import reads TRITON_INTERPRET

    pool = flat.pool(BLOCK_TOKENS, arm == LAYER_MAJOR)
    return pool, TritonAttention(pool)


def attention_s(scene: GpuScene, flat: RandomKV, arm: str, spans: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of one layer's attention, without the time to plan the step. `spans` has each request's range
    of tokens. Blocks are in random order. Raises ValueError if the requests do not fit into the pool."""
    (pool, backend), config, slices = backend_of(flat, arm), scene.config, []
    size = pool.layout.block_tokens
    free = list(range(1, pool.layout.num_blocks))
    Random(0).shuffle(free)
    if sum(cdiv(end, size) for _, end in spans) > len(free):
        raise ValueError("the pool is too small")
    for number, (start, end) in enumerate(spans):
        request = Request(f"r{number}", [0] * end, end, 1)
        request.tables[0] = [free.pop() for _ in range(cdiv(end, size))]
        slices.append(Slice(request, start, end - start, True, 0))
    batch = build(slices, size, scene.device)
    q = torch.randn(len(batch.tokens), config.num_heads, config.head_dim, device=scene.device).to(scene.dtype)
    plan = backend.plan(batch)
    return scene.seconds(lambda call: plan.attend(AttentionLayer(call % config.num_layers), q))


Point = tuple[int, int]  # (sequences, context), or (start, end) of the tokens of a prompt
Rates = dict[Point, dict[str, float]]  # the rates by point and arm


def rates_of(
    scene: GpuScene,
    arms: Sequence[str],
    points: Sequence[tuple[int, int]],
    rate: Callable[[str, tuple[int, int]], float],
) -> Rates:
    """Return the rates of all arms and installed flash-attn versions at every point. Leave out failed measurements."""
    found: Rates = {point: {} for point in points}

    def measure(arm: str, point: Point) -> None:
        found[point][arm] = rate(arm, point)

    flash = [] if scene.toy else flash_attn_here(scene.device)
    for arm, point in product([*arms, *flash], points):
        scene.attempt(f"{arm} at {point}", partial(measure, arm, point))
    return {point: own for point, own in found.items() if own}


def decode(scene: GpuScene) -> GpuSection:
    """Measure the TB/s at which attention reads KV, with our kernels in two layouts and with flash-attn."""
    flat = RandomKV(scene, 1 << 20 if scene.toy else int(torch.cuda.mem_get_info(scene.device)[0] * KV_SHARE))

    def terabytes_s(arm: str, point: Point) -> float:
        batch, context = (2 if scene.toy else point[0]), scene.tokens(point[1])
        read = batch * context * scene.token_bytes // scene.config.num_layers
        return read / attention_s(scene, flat, arm, [(context - 1, context)] * batch) / 1e12

    rates = rates_of(scene, [OURS, LAYER_MAJOR], POINTS[:: 3 if scene.toy else 1], terabytes_s)
    rows: list[list[Cell]] = []
    for point, found in rates.items():
        published, best = FA3_DECODE_TBS.get(point), max(found, key=found.__getitem__)
        share = found[OURS] / published if OURS in found and published else None
        rows.append([*point, found.get(OURS), published, share, found.get(LAYER_MAJOR), found[best], best])
    columns = ["sequences", "context", "ours, TB/s", "FA3 published", "ours / FA3", "LBNHC", "best", "which"]
    runs = {f"{batch} x {context}": found for (batch, context), found in rates.items()}
    note = f"One layer; bytes of KV read per second.{scene.failures}"
    return GpuSection([Table("Attention of decodes", columns, rows, note)], runs)


def prefill(scene: GpuScene) -> GpuSection:
    """Measure the TFLOP/s of attention for whole prompts, and for chunks after a long context."""
    flat = RandomKV(scene, (max(scene.tokens(32768), 64) + 1024) * scene.token_bytes)
    spans = [(0, length) for length in list(FA3_PREFILL_TFS)[: 1 if scene.toy else None]] + CHUNKS

    def teraflops_s(arm: str, span: Point) -> float:
        start, end = map(scene.tokens, span) if span[0] else (0, scene.tokens(span[1]))
        return flops(scene.config, start, end) / attention_s(scene, flat, arm, [(start, end)]) / 1e12

    rates = rates_of(scene, [OURS], spans, teraflops_s)
    rows: list[list[Cell]] = []
    for span, found in rates.items():
        ours, published = found.get(OURS), None if span[0] else FA3_PREFILL_TFS[span[1]]
        best = max(found, key=found.__getitem__)
        share = ours / published if ours and published else None
        goal = ours is not None and ours >= PREFILL_GOAL_TFS if span == (0, PREFILL_GOAL_AT) else None
        rows.append([*span, ours, published, share, found[best], best, goal])
    columns = ["from", "to", "ours, TF/s", "FA3 published", "ours / FA3", "best", "which", "goal"]
    note = f"One layer, causal. The goal is {PREFILL_GOAL_TFS} TF/s at {PREFILL_GOAL_AT} tokens.{scene.failures}"
    runs = {f"{start} to {end}": found for (start, end), found in rates.items()}
    return GpuSection([Table("Attention of prompts", columns, rows, note)], runs)


def flops(config: ModelConfig, start: int, end: int) -> float:
    """Return the FLOPs of one layer: two products, each with two operations per head element and query-key pair."""
    return 2.0 * config.num_heads * config.head_dim * (end * (end + 1) - start * (start + 1))
