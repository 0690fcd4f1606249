from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from benchmarks.random_model import random_decoder
from engine.attention import TorchAttention
from engine.cuda.attention import FEW_SPLITS, SPLIT_TOKENS, TritonAttention
from engine.cuda.layer import TritonKernels
from engine.cuda.products import TritonFormat
from engine.cuda.runner import FAR, CudaRunner
from engine.cuda.staging import StepCapacity
from engine.kernels import TorchKernels
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec
from engine.runner import TorchRunner
from scheduler.request import Slice, Step
from tests.engine.build import CPU, Blocks, States, generate, in_one_piece, layout_of, pool_of, state_size
from tests.engine.fake_graph import FakeGraphPool, recorded_launches

CONFIG = ModelConfig(
    "Test", 16, 31,
    (
        LayerSpec(DeltaSpec(1, 2, 4, 8, 3), MoeSpec(4, 2, MlpSpec(8, "clamped_swiglu"))),
        LayerSpec(AttentionSpec(2, 1, 16, softcap=3.0, sinks=True), MlpSpec(12, "gelu_tanh")),
    ),
    1e-6, False, 64, embedding_scale=1.7,
)  # fmt: skip
WINDOWS = replace(
    CONFIG, layers=tuple(LayerSpec(AttentionSpec(2, 1, 16, window=size), MlpSpec(12)) for size in (0, 24))
)
CAPACITY = StepCapacity(slices=2, tokens=4, blocks=8, block_tokens=4, state_rows=1)


def generated(capture: bool, reference: bool) -> list[list[int]]:
    linear = None if reference else TritonFormat(torch.float32)
    model = random_decoder(CONFIG, torch.float32, CPU, linear, seed=2, deviation=0.4)
    one = layout_of(model, 20, 4)
    size = state_size(CONFIG, one.block_bytes)
    pool = pool_of(model, replace(one, num_blocks=one.num_blocks + 6 * size), in_one_piece(CONFIG))
    if reference:
        runner = TorchRunner(model, pool, TorchAttention(pool), TorchKernels(CONFIG, pool), CPU)
    else:
        runner = CudaRunner(
            model, pool, TritonAttention(pool, split_tokens=8), TritonKernels(CONFIG, pool), CPU, CAPACITY
        )
        assert model.can_be_captured(runner.kernels)
    if capture:
        runner.capture(FakeGraphPool())
        assert runner.passes.describe() == "up to 2 decodes, steps of up to 4 tokens"
    blocks = Blocks(one.num_blocks, 4)
    requests = [blocks.request(list(range(3, 3 + length)), max_tokens=3) for length in (6, 1)]
    return generate(runner, requests, 4, States(one.num_blocks, size))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of padding may have any value
def test_graphs_of_recurrent_layers_and_experts_give_the_tokens_of_the_reference() -> None:
    """Steps are padded in tokens and slices. As with CUDA, a replay runs the same launches at the same addresses."""
    with recorded_launches(GridExecutor):
        found = generated(True, False)
    assert found == generated(False, True)
    assert len({token for row in found for token in row}) > 3


def test_a_model_is_not_captured_if_its_launches_depend_on_values() -> None:
    separate = random_decoder(CONFIG, torch.float32, CPU)
    pool = pool_of(separate, layout_of(separate, 20, 4))
    assert not separate.can_be_captured(TritonKernels(CONFIG, pool))
    model = random_decoder(CONFIG, torch.float32, CPU, TritonFormat(torch.float32))
    assert model.can_be_captured(TritonKernels(CONFIG, pool))
    assert not model.can_be_captured(TorchKernels(CONFIG, pool))


@pytest.mark.parametrize(("captures", "num_slices"), [(False, 20), (True, 12)])
def test_a_warm_up_launches_every_kernel_of_later_steps(
    monkeypatch: pytest.MonkeyPatch, captures: bool, num_slices: int
) -> None:
    """Triton compiles a kernel for each combination of constants. A request must not wait for that. No kernel runs."""
    launched: set[tuple[object, ...]] = set()

    def record(_self: GridExecutor, *_: object, **constants: object) -> None:
        if "QUERIES" in constants:
            launched.add(tuple(constants[name] for name in ("QUERIES", "SPLIT", "BLOCK_M", "WINDOWED", "num_stages")))

    monkeypatch.setattr(GridExecutor, "__call__", record)
    model = random_decoder(WINDOWS, torch.float16, CPU)
    pool = pool_of(model, replace(layout_of(model, 90, 16), dtype="float16"))
    attention = TritonAttention(pool, split_tokens=16)
    attention.processors = 8  # the smallest number of programs for several decodes is 4, for many decodes 16
    capacity = StepCapacity(slices=num_slices, tokens=80, blocks=4, block_tokens=16, tables=pool.places.num_tables)
    runner = CudaRunner(model, pool, attention, TorchKernels(WINDOWS, pool), CPU, capacity)
    if captures:
        monkeypatch.setattr(FakeGraphPool, "begin", lambda _: Mock())  # graphs that compute nothing
        runner.capture(FakeGraphPool())
    runner.warm_up()
    warm = launched.copy()
    for mix in (
        [(40, 20)],
        [(40, 5)],
        [(40, 5)] + [(30, 1)] * 6,
        [(40, 5)] + [(30, 1)] * 18,
        [(30, 1)] * 6,
        [(0, 5)] + [(0, 1)] * 5,
        [(0, 12)] + [(0, 1)] * 10,
        [(40, 10)] * 8,  # as many tiles as processors
    ):
        blocks = Blocks(90, 16, pool.places.groups)
        requests = [blocks.request([1] * (start + count), max_tokens=1) for start, count in mix[:num_slices]]
        slices = [Slice(one, start, count, True, 0) for one, (start, count) in zip(requests, mix, strict=False)]
        runner.run(Step(0, slices, []))
    assert {(queries, split) for queries, split, *_ in warm} >= {(8, True), (8, False), (1, True), (1, False)}
    assert launched == warm
    assert FAR > FEW_SPLITS * SPLIT_TOKENS  # so both variants of `merge` are launched, too
