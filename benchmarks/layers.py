"""Measure two parts of a forward pass on a CPU: the share of a step that recurrent layers take, and the time of
experts, compared with a loop that only reads their weights.

    python -m benchmarks layers

The models have random weights. The step runs one chunk of 512 tokens in a model with the shape of Qwen3.5 0.8B. One
kernel computes the convolution, the recurrence and the norm of a layer. To measure the recurrence alone, another
kernel computes the recurrences of as many tokens, layers and heads, without the convolution and the norm. The experts
belong to a Qwen3-MoE model, in which each of 8 tokens chooses 8 of 128 experts. The time to read the weights is
measured as the time to sum an array of the same size as the chosen experts' weights.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import SHAPES
from benchmarks.random_model import random_decoder
from benchmarks.result import Cell, Result, Table, in_turn, median, parser, ratio
from engine.batch import BlockRows, build
from engine.cpu.jit import kernel, num_threads, thread_number
from engine.cpu.malloc import keep_large_blocks, share_one
from engine.cpu.recurrence_kernels import PIECE, TILE, clear_tile, recur_tokens
from engine.cpu.selection import attention_on_cpu, kernels_on_cpu, linear_on_cpu
from engine.kernels import Kernels
from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.models.experts import Experts
from engine.models.families import FAMILIES
from engine.models.kv_places import kv_places
from engine.models.spec import DeltaSpec, ModelConfig, MoeSpec
from engine.runner import TorchRunner
from scheduler.request import Request, Slice, StateUse, Step
from shared.config_reader import ConfigReader
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from shared.rpc.messages import SamplingParams

CPU = torch.device("cpu")
TOKENS, BLOCK_TOKENS, BATCH, MOE_LAYERS = 512, 16, 8, 6
SHARE, TIMES = 0.05, 1.3  # the goals: maximum share of recurrences in a step, maximum ratio of experts to reading
QWEN35: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3584,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "vocab_size": 248_320, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e7,
}  # fmt: skip


@kernel
def delta_rule(values: Any) -> None:
    """Compute the recurrences of a layer from inputs in the caches, as the kernel of the whole layer does between the
    convolution and the norm. `values`: tokens, heads, size of a head, and the threads' scratch memory with its size."""
    tokens, heads, size = values[0], values[1], values[2]
    states = values[3] + values[4] * thread_number()
    rows, results = states + 4 * size * size, states + 4 * size * (size + 3 * PIECE)
    for _ in range(thread_number(), heads, num_threads()):
        for column in range(0, size, TILE):
            clear_tile(states + 4 * column * size, size)
        for begin in range(0, tokens, PIECE):
            for column in range(0, size, TILE):
                recur_tokens(
                    states + 4 * column * size, min(PIECE, tokens - begin), rows, rows + 4 * size,
                    rows + 4 * (2 * size + column), 12 * size, results + 4 * column, 4 * size,
                    results + 4 * PIECE * size, 1, size, size - column, 0.0, 1, 0, 0, size, 0, 0, 0,
                )  # fmt: skip


class RecurrenceClock:
    """Wraps the kernels of one step, and appends the time of each recurrent layer to `seconds`."""

    def __init__(self, step: Any, seconds: list[float]) -> None:
        self._step, self._seconds = step, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def recur(self, *given: Any) -> Tensor:
        began_s = time.perf_counter()
        result: Tensor = self._step.recur(*given)
        self._seconds.append(time.perf_counter() - began_s)
        return result


class TimedKernels(Kernels):
    """Kernels whose steps record the time of each recurrent layer in `seconds`."""

    name = "timed"

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels.config, kernels.pool)
        self._kernels = kernels
        self.seconds: list[float] = []

    def begin(self, batch: Any) -> Any:
        return RecurrenceClock(self._kernels.begin(batch), self.seconds)


def config_of(values: dict[str, Any]) -> ModelConfig:
    return FAMILIES[values["architectures"][0]].read(ConfigReader(values, Path("config.json")))


def decoder_of(config: ModelConfig) -> Decoder:
    names = FAMILIES[config.architecture].weights
    return random_decoder(config, torch.float32, CPU, linear_on_cpu("auto", "none"), names=names)


def pool_for(config: ModelConfig, tokens: int) -> KVPool:
    """Return a pool for one request."""
    layout = KVLayout(1, config.num_kv_heads, kv_places(config).row_layers, BLOCK_TOKENS, config.head_dim, "float32")
    places = kv_places(config, layout.block_bytes)
    rows = 1 + tokens // BLOCK_TOKENS + places.state_rows
    return KVPool(replace(layout, num_blocks=rows), HostMemory(rows, layout.block_bytes), places)


def seconds_of_recurrences(layers: int, heads: int, size: int) -> float:
    """Return the seconds of the recurrences of a step, computed without the rest of their layers."""
    inputs = torch.randn(PIECE, 3, size)  # queries, keys and values
    inputs[:, :2] /= inputs[:, :2].norm(dim=-1, keepdim=True)
    state, results, sizes = torch.zeros(size * size), torch.zeros(PIECE * size), torch.full((2 * PIECE,), 0.5)
    one = torch.cat([state, inputs.flatten(), results, sizes])
    scratch = one.repeat(torch.get_num_threads(), 1)
    began_s = time.perf_counter()
    for _ in range(layers):
        delta_rule(TOKENS * heads * size * size, TOKENS, heads, size, scratch.data_ptr(), 4 * len(one))
    return time.perf_counter() - began_s


def recurrence_runs(config: ModelConfig, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of whole steps, of their recurrent layers, and of the recurrences in these layers."""
    spec = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, DeltaSpec))
    assert (spec.key_heads, spec.key_dim) == (spec.value_heads, spec.value_dim)
    pool = pool_for(config, TOKENS)
    kernels = TimedKernels(kernels_on_cpu(config, pool))
    runner = TorchRunner(decoder_of(config), pool, attention_on_cpu("auto", pool), kernels, CPU)
    blocks = list(range(1, 1 + TOKENS // BLOCK_TOKENS))
    state = StateUse(None, tuple(range(len(blocks) + 1, pool.layout.num_blocks)))
    runs: dict[str, list[float]] = {"step": [], "layers": [], "recurrences": []}
    for number in range(repeats + 1):
        request = Request("r", list(range(3, 3 + TOKENS)), TOKENS, 1, sampling=SamplingParams(temperature=0))
        request.tables = [blocks]
        kernels.seconds.clear()
        began_s = time.perf_counter()
        runner.run(Step(number, [Slice(request, 0, TOKENS, True, 0, state)], []))
        if number:  # the first one is a warm-up
            runs["step"].append(time.perf_counter() - began_s)
            runs["layers"].append(sum(kernels.seconds))
            runs["recurrences"].append(seconds_of_recurrences(len(kernels.seconds), spec.value_heads, spec.value_dim))
    return runs


def expert_arms(config: ModelConfig) -> tuple[dict[str, Callable[[], float]], int]:
    """Return two functions, and the size in bytes of the chosen experts' weights. The function "experts" times the
    experts of all layers, and "reading" times a loop that reads as many weights as the chosen experts have."""
    pool, model = pool_for(config, TOKENS), decoder_of(config)
    layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    moe = layers[0].spec
    request = Request("r", list(range(BATCH)), BATCH, 1)
    request.tables = [[1]]
    batch = build([Slice(request, 0, BATCH, True, 0)], BLOCK_TOKENS, CPU, (), BlockRows(pool.places))
    kernels = kernels_on_cpu(config, pool).begin(batch)
    rows = torch.randn(BATCH, config.hidden_size)
    chosen = sum(chosen_experts(layer, moe, rows, kernels) for layer in layers)
    count = chosen * 3 * moe.expert.inner * config.hidden_size  # number of weights of the chosen experts
    memory = torch.ones(count)

    def compute() -> float:
        began_s = time.perf_counter()
        for layer in layers:
            layer(rows, kernels)
        return time.perf_counter() - began_s

    def read() -> float:
        began_s = time.perf_counter()
        memory.sum()
        return time.perf_counter() - began_s

    return {"experts": compute, "reading": read}, 4 * count


def chosen_experts(layer: Experts, spec: MoeSpec, rows: Tensor, kernels: Any) -> int:
    _, chosen = kernels.route(spec, layer.router(rows), layer.correction, layer.factors)
    return len(chosen.unique())


@torch.inference_mode()
def main() -> None:
    arguments = parser(__doc__, repeats=9).parse_args()
    share_one()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    keep_large_blocks()  # as in a node
    arms, num_bytes = expert_arms(config_of(SHAPES["1b-moe"] | {"num_hidden_layers": MOE_LAYERS}))
    experts = {name: values[1:] for name, values in in_turn(arms, arguments.repeats + 1).items()}
    times = ratio(experts["experts"], experts["reading"])
    recurrences = recurrence_runs(config_of(QWEN35), arguments.repeats)
    share, step = ratio(recurrences["recurrences"], recurrences["step"]), 1e3 * median(recurrences["step"])
    shares: list[list[Cell]] = [
        [
            f"recurrent layers of a step of {TOKENS} tokens, Qwen3.5 0.8B, without their matrices",
            1e3 * median(recurrences["layers"]), step, ratio(recurrences["layers"], recurrences["step"]), "", None,
        ],
        [
            "of which the recurrences", 1e3 * median(recurrences["recurrences"]), step, share, f"≤ {SHARE}",
            share <= SHARE,
        ],
    ]  # fmt: skip
    reading: list[Cell] = [
        f"8 of 128 experts, {MOE_LAYERS} layers, batch {BATCH}; the chosen ones have {num_bytes / 2**20:,.0f} MiB",
        1e3 * median(experts["experts"]), 1e3 * median(experts["reading"]), times, f"≤ {TIMES}", times <= TIMES,
    ]  # fmt: skip
    columns = ["", "part, ms", "step, or reading, ms", "ratio", "goal", ""]
    what = "Parts of a pass with random float32 weights: recurrent layers in a step, and experts against reading them."
    table = Table(f"on a CPU, {threads} threads", columns, [*shares, reading])
    Result("layers", what, [table], {"recurrences": recurrences, "experts": experts}).finish(arguments.out)
