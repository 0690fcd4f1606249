"""The base of the GPU benchmarks: a device and its clock, a model's shape, KV in any layout over one allocation.

On a CPU, at toy size, everything runs under Triton's interpreter. Those times mean nothing; the tests use it to check
that the code runs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median

import torch
from torch import Tensor

from benchmarks.result import Table
from engine.attention import AttentionBackend
from engine.batch import Batch, build
from engine.kv_pool import DTYPES, KVPool
from engine.models.config import ModelConfig, Rope
from scheduler.request import Request, Slice, cdiv
from shared.kv.layout import KVLayout

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


@contextmanager
def one_of_many(what: str, failed: list[str]) -> Iterator[None]:
    """Catch a failure, so that the other figures are still measured, and add it to `failed`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - for example a tile too large, out of memory, a bug in a kernel
        failed.append(f"{what}: {type(error).__name__} {error}")


def failure_note(failed: list[str]) -> str:
    """Return the end of a table's note."""
    return f" Failed: {'; '.join(failed)}." if failed else ""


@dataclass(frozen=True, slots=True)
class GpuScene:
    """The device and sizes of a run. `until`: when the section must end, by `time.monotonic`."""

    device: torch.device
    toy: bool
    until: float

    @property
    def config(self) -> ModelConfig:
        return TOY if self.toy else LLAMA_8B

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.toy else torch.bfloat16  # numpy, and therefore the interpreter, has no bfloat16

    def tokens(self, count: int) -> int:
        """Return `count`, scaled down at toy size."""
        return max(2, count // TOY_SCALE) if self.toy else count

    def has_left(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.until

    def seconds(self, work: Callable[[int], object], calls: int = CALLS, repeats: int = 5) -> float:
        """Return the seconds of one call on the device: the median over replays of a CUDA graph of `calls` calls, which
        excludes launch time. `work` gets the number of the call."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            work(0)
            return time.perf_counter() - start
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(0)  # compiles
        with torch.cuda.graph(graph, stream=stream):
            for call in range(calls):
                work(call)
        graph.replay()
        return median(self.elapsed_s(graph.replay) for _ in range(repeats)) / calls

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


class RandomKV:
    """Random KV: one allocation, viewed as a pool of any layout and block size."""

    def __init__(self, scene: GpuScene, most_bytes: int) -> None:
        self.scene = scene
        numbers = torch.empty(most_bytes // scene.dtype.itemsize, dtype=scene.dtype, device=scene.device)
        for first in range(0, len(numbers), FILL_NUMBERS):
            numbers[first : first + FILL_NUMBERS].normal_()
        self.bytes = numbers.view(torch.uint8)

    def layout(self, block_tokens: int) -> KVLayout:
        config = self.scene.config
        dtype = str(self.scene.dtype).removeprefix("torch.")
        one = KVLayout(1, config.num_kv_heads, config.num_layers, block_tokens, config.head_dim, dtype)
        return replace(one, num_blocks=len(self.bytes) // one.block_bytes)

    def pool(self, block_tokens: int, layer_major: bool = False) -> KVPool:
        layout = self.layout(block_tokens)
        rows = self.bytes[: layout.num_blocks * layout.block_bytes].view(layout.num_blocks, -1)
        return (LayerMajorPool if layer_major else KVPool)(layout, RowMemory(rows))


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


def batch_of(scene: GpuScene, pool: KVPool, spans: Sequence[tuple[int, int]]) -> Batch:
    """Return a batch of one slice per request, from start to end, over blocks in random order."""
    size = pool.layout.block_tokens
    free = list(range(1, pool.layout.num_blocks))
    Random(0).shuffle(free)
    slices = []
    for number, (start, end) in enumerate(spans):
        request = Request(f"r{number}", [0] * end, end, 1)
        request.blocks = [free.pop() for _ in range(cdiv(end, size))]
        slices.append(Slice(request, start, end - start, True, 0))
    return build(slices, size, scene.device)


def fits(pool: KVPool, spans: Sequence[tuple[int, int]]) -> bool:
    return sum(cdiv(end, pool.layout.block_tokens) for _, end in spans) < pool.layout.num_blocks


def attention_s(scene: GpuScene, pool: KVPool, backend: AttentionBackend, spans: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of one layer's attention, excluding the step's plan."""
    config = scene.config
    batch = batch_of(scene, pool, spans)
    q = torch.randn(len(batch.tokens), config.num_heads, config.head_dim, device=scene.device).to(scene.dtype)
    plan = backend.plan(batch)
    return scene.seconds(lambda call: plan.attend(call % config.num_layers, q, 0))
