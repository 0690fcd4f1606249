"""Requests, steps and pools for tests that drive a runner without a scheduler."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import accumulate, count
from random import Random
from typing import Any

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.attention import AttentionBackend
from engine.cpu.selection import attention_on_cpu, kernels_on_cpu
from engine.kernels import Kernels, TorchKernels
from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.models.kv_places import KVPlaces, kv_places
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, state_units
from engine.runner import Runner, SliceOutput, TorchRunner
from scheduler.geometry import UNIFORM, Group
from scheduler.request import Request, Slice, StateUse, Step
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from shared.rpc.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
VOCABULARY = 97
CONFIG = ModelConfig(
    "Qwen3ForCausalLM", 32, VOCABULARY,
    tuple(LayerSpec(AttentionSpec(4, 2, 16, window=size, qkv_bias=True, qk_norm=True), MlpSpec(52)) for size in (0, 7)),
    1e-6, False, 64,
)  # fmt: skip


@pytest.fixture(scope="module", name="model")
def model_fixture() -> Decoder:
    """A small random model with biases and with a norm for each head. Its second layer has a sliding window."""
    return random_decoder(CONFIG, torch.float32, CPU, deviation=0.3)


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the cases as test parameters. `make test` runs one case in `every`, and `make nightly` runs the others.

    If the cases are a product of axes, choose an `every` that shares no factor with the number of values of any axis.
    Then `make test` runs each value of each axis.
    """
    rest = pytest.mark.exhaustive
    return [
        case if index % every == 0 else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=rest)
        for index, case in enumerate(cases)
    ]


BACKEND: ContextVar[str] = ContextVar("backend", default="torch")


@pytest.fixture(autouse=True, params=["torch", "numba"])
def every_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test of a file that imports this fixture twice: with the kernels of torch, and with those of numba."""
    if request.param == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    chosen = BACKEND.set(request.param)
    yield
    BACKEND.reset(chosen)


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run each test of a file that imports this fixture with 1 thread and with 3."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# For a test that runs no kernel, in a file that imports `every_backend`
once = pytest.mark.parametrize("every_backend", ["torch"], indirect=True)


def device_code(model: Decoder, pool: KVPool) -> tuple[AttentionBackend, Kernels]:
    """Return the attention and the kernels of the running test's backend."""
    name = BACKEND.get()
    kernels = TorchKernels(model.config, pool) if name == "torch" else kernels_on_cpu(model.config, pool)
    return attention_on_cpu(name, pool), kernels


class Blocks:
    """An allocator that returns blocks in random order, so that no test passes only because its blocks are adjacent."""

    def __init__(self, num_blocks: int, block_tokens: int, groups: tuple[Group, ...] = UNIFORM, seed: int = 0) -> None:
        self.block_tokens = block_tokens
        self._groups = [group for group in groups if group.kind != "state"]
        self._free = list(range(1, num_blocks))
        Random(seed).shuffle(self._free)

    def request(
        self, tokens: Sequence[int], sampling: SamplingParams = GREEDY, max_tokens: int = 64, **more: object
    ) -> Request:
        """Return a request with blocks for its prompt and `max_tokens` more tokens."""
        request = Request(f"r{len(self._free)}", list(tokens), len(tokens), max_tokens, sampling=sampling, **more)
        num_blocks = -(-(len(tokens) + max_tokens) // self.block_tokens)
        request.tables = [[self._free.pop() for _ in range(num_blocks * group.rows)] for group in self._groups]
        return request


def state_size(config: ModelConfig, row_bytes: int) -> int:
    """Return the number of rows of a state that is placed as in `in_one_piece`."""
    return -(-4 * sum(state_units(config)) // row_bytes)


def in_one_piece(config: ModelConfig) -> KVPlaces:
    """Return where a model stores its layers and states in a pool whose rows may be smaller than a unit of a state. The
    units of a state are contiguous and begin at the first row of the state."""
    places, starts = kv_places(config), accumulate(state_units(config), initial=0)
    units = tuple((0, start) for start in starts)[:-1]
    return replace(places, groups=(*places.groups, *([Group("state", 1)] if units else [])), units=units)


class States:
    """The two states of each request, in the rows of the pool from `first_row` on.

    A request reads its current state and writes the other one, as in the scheduler.
    """

    def __init__(self, first_row: int, rows: int, in_one_piece: bool = True) -> None:
        """A state has `rows` rows. A slice lists all of these rows, or only the first row if `in_one_piece` is true."""
        self._next, self._size, self._named = first_row, rows, 1 if in_one_piece else rows
        self._sets: dict[str, tuple[int, int]] = {}

    def use(self, slices: Sequence[Slice]) -> None:
        """Give each slice its states, and swap the two states of its request."""
        for one in slices:
            if one.request.id not in self._sets:
                self._sets[one.request.id] = self._next, self._next + self._size
                self._next += 2 * self._size
            current, other = self._sets[one.request.id]
            read, write = (tuple(range(row, row + self._named)) for row in (current, other))
            one.state = StateUse(read if one.start else None, write)
            self._sets[one.request.id] = other, current


def states_in(groups: Sequence[Group], first_row: int) -> States | None:
    """Return states in the rows of a pool from `first_row` on, or None if the model has no states."""
    rows = [group.rows for group in groups if group.kind == "state"]
    return States(first_row, *rows, in_one_piece=False) if rows else None


def layout_of(model: Decoder, num_blocks: int, block_tokens: int) -> KVLayout:
    """Return the layout of a pool with room for a request of `num_blocks - 1` blocks and for the dummy block."""
    config, places = model.config, kv_places(model.config)
    rows = 1 + (num_blocks - 1) * sum(group.rows for group in places.groups)
    return KVLayout(rows, config.num_kv_heads, places.row_layers, block_tokens, config.head_dim, "float32")


def pool_of(model: Decoder, layout: KVLayout, places: KVPlaces | None = None) -> KVPool:
    """Return a pool. Unwritten KV is NaN, so that a wrong read makes the result NaN."""
    pool = KVPool(layout, HostMemory(layout.num_blocks, layout.block_bytes), places or kv_places(model.config))
    pool.tensor.fill_(torch.nan)
    return pool


def torch_runner(model: Decoder, num_blocks: int = 64, block_tokens: int = 4) -> tuple[TorchRunner, KVPool, Blocks]:
    """Return a runner, its pool and its blocks."""
    layout = layout_of(model, num_blocks, block_tokens)
    pool = pool_of(model, layout)
    return (
        TorchRunner(model, pool, *device_code(model, pool), CPU),
        pool,
        Blocks(layout.num_blocks, block_tokens, pool.places.groups),
    )


def piece(request: Request, size: int | None = None) -> Slice:
    """Return a slice of the request's next `size` tokens, or of all its remaining tokens."""
    start = request.num_computed
    end = len(request.tokens) if size is None else min(start + size, len(request.tokens))
    return Slice(request, start, end - start, end == len(request.tokens), request.epoch)


STEP_NUMBERS = count()


def run_step(runner: Runner, slices: Sequence[Slice]) -> list[SliceOutput]:
    """Run the slices as one step. Advance `num_computed` of their requests and append the sampled tokens."""
    step = Step(next(STEP_NUMBERS), list(slices), [])
    for one in slices:
        if one.is_decode:
            step.work.add_decode(one.end)
        else:
            step.work.add_chunk(one.start, one.count)
    outputs = runner.run(step)
    for one, output in zip(slices, outputs, strict=True):
        one.request.num_computed = one.end
        one.request.tokens += output.tokens
    return outputs


def generate(runner: Runner, requests: Sequence[Request], budget: int, states: States | None = None) -> list[list[int]]:
    """Run requests to their end, decodes first, with at most `budget` tokens per step. Return the generated tokens."""
    while running := [request for request in requests if request.finish is None]:
        running.sort(key=lambda request: len(request.tokens) - request.num_computed > 1)
        slices, left = [], budget
        for request in running:
            if left > 0:
                slices.append(piece(request, left))
                left -= slices[-1].count
        if states is not None:
            states.use(slices)
        for output in run_step(runner, slices):
            assert not output.error
        for request in running:
            if len(request.tokens) > request.num_prompt:
                request.finish = request.finish_reason()
    return [request.tokens[request.num_prompt :] for request in requests]
