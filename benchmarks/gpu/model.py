"""Benchmark a whole model on a GPU: the shape of Llama-3.1-8B with random weights, in the runner that nodes use.

Times are measured on the host. As in the engine, each step is launched before the result of the previous step is read.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from statistics import median

import torch

from benchmarks.gpu.attention import GpuScene, GpuSection
from benchmarks.random_model import random_decoder
from benchmarks.result import Cell, Table
from engine.cuda.device import CudaAccelerator
from engine.cuda.runner import CudaRunner, Sampler
from engine.cuda.selection import BLOCK_TOKENS, attention_on_cuda, kernels_on_cuda
from engine.cuda.staging import StepCapacity
from engine.kv_pool import KVPool
from engine.runner import PendingStep
from scheduler.request import Request, Slice, Step, cdiv
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from shared.rpc.messages import SamplingParams

CONTEXT, STEPS, WARMUP = 1024, 40, 4
DECODE_GOALS_MS = {1: 5.3, 64: 8.3, 256: 16.8}
CHUNK, CHUNK_GOAL_MS, CHUNKS = 2048, 48.5, 6
MIXED = (64, 448)  # the numbers of decodes and of prompt tokens in one step
LONGEST = 32_768  # maximum number of tokens of one request
GREEDY, NUCLEUS = SamplingParams(temperature=0.0), SamplingParams(seed=1, top_p=0.9)
NUMBERS = count()


class ModelBench:
    """The model, its pool, and two runners that share both: `runner` replays CUDA graphs, `eager` uses none."""

    def __init__(self, scene: GpuScene) -> None:
        self.scene = scene
        self.most = 3 if scene.toy else max(DECODE_GOALS_MS)
        self.model = random_decoder(scene.config, scene.dtype, scene.device)
        self.block_tokens = 4 if scene.toy else BLOCK_TOKENS
        self.pool = self._pool()
        self.eager, self.runner = self._runner(), self._runner()

    def _pool(self) -> KVPool:
        config = self.scene.config
        held = cdiv(self.scene.tokens(CONTEXT) + STEPS + WARMUP, self.block_tokens)
        blocks = 1 + self.most * held + cdiv(self.scene.tokens(CHUNK), self.block_tokens)
        dtype = str(self.scene.dtype).removeprefix("torch.")
        layout = KVLayout(blocks, config.num_kv_heads, config.num_layers, self.block_tokens, config.head_dim, dtype)
        host = self.scene.device.type == "cpu"
        allocate = HostMemory if host else CudaAccelerator(str(self.scene.device)).allocate
        self.memory = allocate(layout.num_blocks, layout.block_bytes)
        pool = KVPool(layout, self.memory)
        for block in pool.tensor:
            block.normal_()
        return pool

    def _runner(self) -> CudaRunner:
        device, sampler = self.scene.device, _sampler(self.scene)
        triton = device.type == "cuda"
        attention = attention_on_cuda("auto", self.pool, triton, self.scene.dtype)
        kernels = kernels_on_cuda(self.scene.config, self.pool, triton)
        tokens, longest = self.scene.tokens(CHUNK), self.scene.tokens(LONGEST)
        capacity = StepCapacity(self.most, tokens, cdiv(longest, self.block_tokens), self.block_tokens)
        return CudaRunner(self.model, self.pool, attention, kernels, device, capacity, sampler)

    def capture(self) -> tuple[float, float, float]:
        """Capture the CUDA graphs. Return the capture's seconds and GiB, and the seconds of the warm-up after it."""
        began, before = time.monotonic(), self._free()
        if self.scene.device.type != "cpu":  # a test on a CPU has no graphs
            self.runner.capture(CudaAccelerator(str(self.scene.device)).graphs())
        captured, after = time.monotonic(), self._free()
        self.runner.warm_up()
        return captured - began, (before - after) / 2**30, time.monotonic() - captured

    def _free(self) -> int:
        return 0 if self.scene.device.type == "cpu" else CudaAccelerator(str(self.scene.device)).memory()[0]

    def requests(self, number: int, sampling: SamplingParams = GREEDY) -> list[Request]:
        """Return requests whose prompts are marked as computed. Their KV is random."""
        blocks = list(range(1, self.pool.layout.num_blocks))
        Random(0).shuffle(blocks)
        context, held = self.scene.tokens(CONTEXT), cdiv(self.scene.tokens(CONTEXT) + STEPS + WARMUP, self.block_tokens)
        made = []
        for _ in range(number):
            request = Request(f"r{next(NUMBERS)}", [7] * context, context, STEPS + WARMUP, sampling=sampling)
            request.tables[0] = [blocks.pop() for _ in range(held)]
            request.num_scheduled = context - 1
            made.append(request)
        return made

    def prompt(self, tokens: int) -> Request:
        """Return a request that uses the pool's last blocks. Requests may share blocks, because all KV is random."""
        request = Request(f"p{next(NUMBERS)}", [7] * tokens, tokens, 1, sampling=GREEDY)
        last = self.pool.layout.num_blocks
        request.tables[0] = list(range(last - cdiv(tokens, self.block_tokens), last))
        return request


def _sampler(scene: GpuScene) -> Sampler | None:
    if scene.device.type == "cpu":
        return None
    from engine.cuda.draw import draw

    return draw


def driven(runner: CudaRunner, next_slices: Callable[[], list[Slice]], steps: int, ahead: bool) -> tuple[float, float]:
    """Return the mean seconds between the ends of successive steps, and the median seconds of a launch on the host."""
    ends: list[float] = []
    launches: list[float] = []
    pending: tuple[Step, PendingStep] | None = None
    for _ in range(WARMUP + steps):
        step = Step(next(NUMBERS), next_slices(), [])
        began = time.perf_counter()
        launched = runner.launch(step, pending[0] if pending is not None else None)
        launches.append(time.perf_counter() - began)
        if pending is not None:
            _apply(*pending)
        pending = step, launched
        if not ahead:
            _apply(*pending)
            pending = None
        ends.append(time.perf_counter())
    if pending is not None:
        _apply(*pending)
    return (ends[-1] - ends[WARMUP - 1]) / steps, median(launches[WARMUP:])


def _apply(step: Step, pending: PendingStep) -> None:
    for piece, output in zip(step.slices, pending(), strict=True):
        if not output.tokens:
            raise RuntimeError(f"{piece.request.id} got no token: {output.error}")
        piece.request.num_sampling -= 1
        piece.request.tokens += output.tokens


def decodes_of(requests: Sequence[Request]) -> list[Slice]:
    """Return one slice per request, for its next token."""
    slices = []
    for request in requests:
        slices.append(Slice(request, request.num_scheduled, 1, True, 0))
        request.num_scheduled += 1
        request.num_sampling += 1
    return slices


def chunk_of(request: Request) -> list[Slice]:
    """Return one slice for a whole prompt."""
    request.num_sampling += 1
    return [Slice(request, 0, len(request.tokens), True, 0)]


def model(scene: GpuScene) -> GpuSection:
    bench = ModelBench(scene)
    try:
        return _model(scene, bench)
    finally:  # torch does not free this memory, because the CUDA driver allocated it
        if scene.device.type == "cuda":
            torch.cuda.synchronize(scene.device)
        bench.memory.close()


def _model(scene: GpuScene, bench: ModelBench) -> GpuSection:
    capture_s, graphs_gib, warm_s = bench.capture()
    steps = 2 if scene.toy else STEPS
    rows: list[list[Cell]] = []

    def add(what: str, goal_ms: float | None, fresh: Callable[[], Callable[[], list[Slice]]], steps: int) -> None:
        """Measure one row of the table. `fresh` creates new but equal work for each measurement of the row."""

        def measure() -> None:
            ahead_s, host_s = driven(bench.runner, fresh(), steps, ahead=True)
            waiting_s, _ = driven(bench.runner, fresh(), steps, ahead=False)
            eager_s, eager_host_s = driven(bench.eager, fresh(), steps, ahead=True)
            met = ahead_s * 1e3 <= goal_ms if goal_ms is not None else None
            rows.append([what, *(1e3 * s for s in (ahead_s, host_s, waiting_s, eager_s, eager_host_s)), goal_ms, met])

        scene.attempt(what, measure)

    for number, goal_ms in DECODE_GOALS_MS.items():
        most = min(number, bench.most)
        add(f"decode {number} x {CONTEXT}", goal_ms, lambda n=most: partial(decodes_of, bench.requests(n)), steps)  # type: ignore[misc]
    for number in (1, bench.most):
        drawn = f"decode {number} x {CONTEXT}, sampled with top_p"
        add(drawn, None, lambda n=number: partial(decodes_of, bench.requests(n, NUCLEUS)), steps)  # type: ignore[misc]
    chunk = scene.tokens(CHUNK)
    add(f"a chunk of {CHUNK}", CHUNK_GOAL_MS, lambda: lambda: chunk_of(bench.prompt(chunk)), 1 if scene.toy else CHUNKS)
    mixed, part = min(MIXED[0], bench.most - 1), scene.tokens(MIXED[1])

    def both() -> Callable[[], list[Slice]]:
        requests = bench.requests(mixed)
        return lambda: decodes_of(requests) + chunk_of(bench.prompt(part))

    add(f"{MIXED[0]} decodes and {MIXED[1]} tokens of a prompt", None, both, steps)
    columns = ["step", "ms", "host, ms", "not ahead, ms", "eager, ms", "eager host, ms", "goal, ms", ""]
    facts = bench.runner.attributes()
    note = f"{facts}. Graphs: {capture_s:.1f} s, {graphs_gib:.2f} GiB; warm-up {warm_s:.1f} s.{scene.failures}"
    return GpuSection([Table("Llama-3.1-8B's shape, bfloat16, random weights", columns, rows, note)], {"rows": rows})
