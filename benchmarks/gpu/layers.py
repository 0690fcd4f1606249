"""Benchmark recurrent layers, experts and sampling on a GPU, in the shapes of Qwen3.5 9B, gpt-oss-20b and Llama 3.

Ideally, a decode takes only the time to read and write its states or, in a layer with experts, the time to read the
weights of the experts that its tokens chose.
"""

from itertools import product
from random import Random

import torch
from torch import Tensor

from benchmarks.gpu.attention import GpuScene, GpuSection, RowMemory
from benchmarks.result import Cell, Table
from engine.batch import BlockRows, StateBatch, build
from engine.kv_pool import KVPool
from engine.linear import PlainLinear
from engine.models.kv_places import kv_places
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelConfig, unit_sizes
from engine.recurrence import RecurrentLayer
from engine.sampling import SamplingRow, parameters_of
from scheduler.request import Request, Slice, StateUse
from shared.kv.layout import KVLayout
from shared.rpc.messages import SamplingParams

DELTA, TOY_DELTA = DeltaSpec(16, 32, 128, 128, 4), DeltaSpec(1, 2, 16, 16, 4)
STEPS = {"1 decode": [1], "64 decodes": [1] * 64, "a chunk of 512": [512], "a chunk of 4096": [4096]}
EXPERTS, HIDDEN, INNER, TOP_K = 32, 2880, 5760, 4
TOKENS = (1, 64, 4096)
VOCABULARY, ROWS = 128_256, (1, 64, 256)
FILTERS = {
    "none": SamplingParams(seed=1), "top_p 0.9": SamplingParams(seed=1, top_p=0.9),
    "top_k 20, top_p 0.8": SamplingParams(seed=1, top_k=20, top_p=0.8),
}  # fmt: skip


def recurrent_layer(scene: GpuScene, name: str) -> list[Cell]:
    """Return a row: the step's name, its milliseconds, and the GB/s at which it moves states."""
    from engine.cuda.layer import TritonKernels

    spec, counts = (TOY_DELTA, [1, 2]) if scene.toy else (DELTA, STEPS[name])
    layers = LayerSpec(spec, MlpSpec(64)), LayerSpec(AttentionSpec(1, 1, 128), MlpSpec(64))
    config = ModelConfig("Test", 64, 100, layers, 1e-6, False, 4096)
    layout = KVLayout(1, 1, 1, 1024, 128, "float32")
    state_rows = kv_places(config, layout.block_bytes).state_rows
    blocks = 1 + sum(-(-count // 1024) for count in counts) + 2 * len(counts) * state_rows
    rows = torch.zeros(blocks, layout.block_bytes, dtype=torch.uint8, device=scene.device)
    pool = KVPool(KVLayout(blocks, 1, 1, 1024, 128, "float32"), RowMemory(rows), kv_places(config, layout.block_bytes))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=scene.device)

    heads = spec.value_heads
    layer = RecurrentLayer(
        spec, 0, numbers(spec.conv, spec.channels), None, -numbers(heads).exp(), numbers(heads), numbers(heads),
        numbers(spec.inner), spec.value_dim,
    )  # fmt: skip
    free, slices = list(range(1, blocks)), []
    for number, count in enumerate(counts):
        request = Request(f"r{number}", [7] * (count + 1), count + 1, 1)
        request.tables = [[free.pop() for _ in range(-(-count // 1024))]]
        read, write = (tuple(free.pop() for _ in range(state_rows)) for _ in range(2))
        slices.append(Slice(request, 0, count, False, 0, StateUse(read, write)))
    batch = build(slices, 1024, scene.device, rows=BlockRows(pool.places))
    assert batch.states is not None
    batch.states = StateBatch(batch.states.rows.to(scene.device), batch.states.save_at.to(scene.device))
    step, tokens = TritonKernels(config, pool).begin(batch), sum(counts)
    inputs, gate, steps = (numbers(tokens, n).to(scene.dtype) for n in (spec.channels, spec.inner, 2 * heads))
    seconds = scene.seconds(lambda _: step.recur(layer, inputs, gate, steps))
    return [name, 1e3 * seconds, 2 * 4 * sum(unit_sizes(spec)) * len(counts) / seconds / 1e9]


def experts(scene: GpuScene, tokens: int) -> list[Cell]:
    """Return a row: the number of tokens, and the milliseconds of a product, its GB/s of weights, and its TFLOP/s."""
    from engine.cuda.products import TritonFormat

    count, hidden, inner = (4, 32, 16) if scene.toy else (EXPERTS, HIDDEN, INNER)
    tokens = min(tokens, 3) if scene.toy else tokens
    weights = torch.randn(count, inner, hidden, device=scene.device, dtype=scene.dtype)
    linear = TritonFormat(scene.dtype).of_experts([PlainLinear(weight) for weight in weights])
    random = Random(1)
    chosen = sorted(expert for _ in range(tokens) for expert in random.sample(range(count), TOP_K))
    counts = torch.bincount(torch.tensor(chosen), minlength=count).to(scene.device)
    rows = torch.randn(len(chosen), hidden, device=scene.device, dtype=scene.dtype)
    seconds = scene.seconds(lambda _: linear(rows, counts))
    read = len(set(chosen)) * weights[0].nbytes
    return [f"{tokens} tokens", 1e3 * seconds, read / seconds / 1e9, 2 * rows.numel() * inner / seconds / 1e12]


def sampled(scene: GpuScene, name: str, rows: int) -> list[Cell]:
    """Return a row with the milliseconds to draw a token for each of `rows` requests, for two kinds of logits: in the
    first kind, tens of thousands of tokens are likely; in the second, a few hundred."""
    from engine.cuda.draw import draw

    count, vocab = (2, 300) if scene.toy else (rows, VOCABULARY)
    parameters = torch.from_numpy(parameters_of([SamplingRow(FILTERS[name], (), 0, n) for n in range(count)]))
    parameters, logits = parameters.to(scene.device), torch.randn(count, vocab, device=scene.device)
    certain = logits * 4
    return [name, rows, *(1e3 * scene.seconds(lambda _, of=of: draw(of, parameters)) for of in (logits, certain))]  # type: ignore[misc]


def layers(scene: GpuScene) -> GpuSection:
    recurrent: list[list[Cell]] = []
    products: list[list[Cell]] = []
    for name in STEPS:
        scene.attempt(name, lambda name=name: recurrent.append(recurrent_layer(scene, name)))  # type: ignore[misc]
    for tokens in TOKENS:
        scene.attempt(f"{tokens} tokens", lambda tokens=tokens: products.append(experts(scene, tokens)))  # type: ignore[misc]
    draws: list[list[Cell]] = []
    for name, rows in product(FILTERS, ROWS):
        scene.attempt(f"{name}, {rows}", lambda name=name, rows=rows: draws.append(sampled(scene, name, rows)))  # type: ignore[misc]
    tables = [
        Table("A delta rule, 32 heads of 128 x 128", ["step", "ms", "states, GB/s"], recurrent, scene.failures),
        Table("A product of 4 of 32 experts, 2,880 x 5,760", ["step", "ms", "weights, GB/s", "TFLOP/s"], products),
        Table(f"Sampling from {VOCABULARY:,} tokens", ["filters", "rows", "random, ms", "certain, ms"], draws),
    ]
    return GpuSection(tables, {"recurrent": recurrent, "experts": products, "sampling": draws})
