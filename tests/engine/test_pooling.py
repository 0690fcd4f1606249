"""Test that runners return the same vectors for any chunks of a prompt, in any batch, and also if a step runs twice."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.attention import TorchAttention
from engine.cuda.runner import CudaRunner
from engine.kernels import TorchKernels
from engine.models.decoder import Decoder
from engine.runner import Runner, SliceOutput
from scheduler.request import Request, Slice, Step
from shared.rpc.messages import SamplingParams, pack_ids
from tests.engine.build import (  # noqa: F401
    CPU,
    GREEDY,
    VOCABULARY,
    Blocks,
    layout_of,
    model_fixture,
    piece,
    pool_of,
    run_step,
    torch_runner,
)
from tests.engine.cuda_workload import CAPACITY

torch.set_num_threads(1)
KINDS = ("last", "mean", "logits")
PROMPT = [(7 * at * at + 3) % VOCABULARY for at in range(23)]
TOKENS = (5, 9)


def sampling_of(kind: str) -> SamplingParams:
    return SamplingParams(0.0, pooling=kind, allowed_tokens=pack_ids(TOKENS))


def cuda_runner(model: Decoder) -> tuple[CudaRunner, Blocks]:
    layout = layout_of(model, 64, 4)
    pool = pool_of(model, layout)
    runner = CudaRunner(model, pool, TorchAttention(pool), TorchKernels(model.config, pool), CPU, CAPACITY)
    return runner, Blocks(64, 4, pool.places.groups)


def vector_of(outputs: Sequence[SliceOutput], index: int) -> torch.Tensor:
    assert not outputs[index].error
    return torch.from_numpy(np.frombuffer(outputs[index].vector, np.float32).copy())


def computed(runner: Runner, blocks: Blocks, kind: str, size: int, twice: bool = False) -> torch.Tensor:
    """Return the vector of the prompt, computed in chunks of `size` tokens alongside a request that generates."""
    request = blocks.request(PROMPT, sampling_of(kind), 1, needs_prompt_logprobs=kind == "mean")
    other = blocks.request(PROMPT[:3], GREEDY, 30)
    run_step(runner, [piece(other)])
    while request.num_computed < len(PROMPT):
        slices = [piece(other), piece(request, size)]
        if twice:
            runner.run(step_of(slices))
        outputs = run_step(runner, slices)
        if request.num_computed < len(PROMPT):
            assert not outputs[1].vector
        assert not outputs[0].vector
        assert outputs[0].tokens
    return vector_of(outputs, 1)


def step_of(slices: Sequence[Slice]) -> Step:
    return Step(0, list(slices), [])


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_do_not_depend_on_chunks_runners_and_repeated_steps(model: Decoder, kind: str) -> None:
    runner, _, blocks = torch_runner(model)
    whole = computed(runner, blocks, kind, len(PROMPT))
    assert len(whole) == (len(TOKENS) if kind == "logits" else model.config.hidden_size)
    assert whole.abs().max() > 1e-3
    for size in (1, 5, 22):
        runner, _, blocks = torch_runner(model)
        assert torch.allclose(computed(runner, blocks, kind, size), whole, atol=1e-5), size
    runner, _, blocks = torch_runner(model)
    assert torch.allclose(computed(runner, blocks, kind, 5, twice=True), whole, atol=1e-5)
    on_device, blocks = cuda_runner(model)
    assert torch.allclose(computed(on_device, blocks, kind, 6), whole, atol=1e-5)


def test_the_mean_is_that_of_the_last_vectors_of_all_prefixes(model: Decoder) -> None:
    """Attention is causal: a token's hidden state is the last hidden state of the prompt that ends with this token."""
    runner, _, blocks = torch_runner(model, num_blocks=256)
    last = []
    for end in range(1, 9):
        request = blocks.request(PROMPT[:end], sampling_of("last"), 1)
        last.append(vector_of(run_step(runner, [piece(request)]), 0))
    request = blocks.request(PROMPT[:8], sampling_of("mean"), 1, needs_prompt_logprobs=True)
    assert torch.allclose(vector_of(run_step(runner, [piece(request)]), 0), torch.stack(last).mean(0), atol=1e-5)


def test_a_preempted_prompt_begins_its_sum_again(model: Decoder) -> None:
    runner, _, blocks = torch_runner(model)
    request: Request = blocks.request(PROMPT, sampling_of("mean"), 1, needs_prompt_logprobs=True)
    run_step(runner, [piece(request, 9)])
    request.num_computed = 0
    outputs = [run_step(runner, [piece(request, size)]) for size in (6, 17)]
    runner, _, blocks = torch_runner(model)
    assert torch.allclose(vector_of(outputs[-1], 0), computed(runner, blocks, "mean", 23), atol=1e-5)


def test_a_vector_that_is_not_finite_is_an_error_of_its_request(model: Decoder) -> None:
    runner, pool, blocks = torch_runner(model)
    good, bad = (blocks.request(PROMPT, sampling_of("last"), 1) for _ in range(2))
    run_step(runner, [piece(good, 10), piece(bad, 10)])
    pool.tensor[bad.tables[0][0]] = torch.nan
    outputs = run_step(runner, [piece(good), piece(bad)])
    assert outputs[1].error == "numerical"
    assert not outputs[0].error
