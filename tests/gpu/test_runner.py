"""Test that the CUDA runner with real CUDA graphs generates the reference runner's tokens, in float32 on one GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.attention import TorchAttention
from engine.cuda.build import GRAPH_BYTES
from engine.cuda.device import CudaAccelerator
from engine.cuda.runner import CudaRunner
from engine.cuda.selection import attention_on_cuda, kernels_on_cuda
from engine.cuda.staging import StepCapacity
from engine.kernels import TorchKernels
from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.runner import TorchRunner
from scheduler.request import Request, Step
from tests.engine.build import CONFIG, GREEDY, Blocks, layout_of, piece, run_step
from tests.engine.cuda_workload import BLOCK_TOKENS, CAPACITY, NUM_BLOCKS, SEEDS, answer, drive, requests_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def gpu() -> CudaAccelerator:
    return CudaAccelerator("cuda")


@pytest.fixture(scope="module")
def model(gpu: CudaAccelerator) -> Decoder:
    return random_decoder(CONFIG, torch.float32, gpu.device, deviation=0.3)


def pool_of(gpu: CudaAccelerator, model: Decoder) -> KVPool:
    layout = layout_of(model, NUM_BLOCKS, BLOCK_TOKENS)
    pool = KVPool(layout, gpu.allocate(layout.num_blocks, layout.block_bytes), kv_places(model.config))
    pool.tensor.fill_(torch.nan)
    return pool


def reference(gpu: CudaAccelerator, model: Decoder) -> tuple[TorchRunner, Blocks]:
    pool = pool_of(gpu, model)
    runner = TorchRunner(model, pool, TorchAttention(pool), TorchKernels(CONFIG, pool), gpu.device)
    return runner, Blocks(pool.layout.num_blocks, BLOCK_TOKENS, pool.places.groups)


def cuda_runner(gpu: CudaAccelerator, model: Decoder, backend: str, capture: bool) -> tuple[CudaRunner, Blocks]:
    triton = gpu.has_triton()
    if backend == "triton" and not triton:
        pytest.skip("triton is not installed")
    sampler = None
    if backend == "triton":
        from engine.cuda.draw import draw

        sampler = draw
    pool = pool_of(gpu, model)
    attention = attention_on_cuda(backend, pool, triton)
    kernels = kernels_on_cuda(CONFIG, pool, triton and backend == "triton")
    runner = CudaRunner(model, pool, attention, kernels, gpu.device, CAPACITY, sampler)
    if capture:
        runner.capture(gpu.graphs())
    return runner, Blocks(pool.layout.num_blocks, BLOCK_TOKENS, pool.places.groups)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads_give_the_tokens_of_the_reference(
    gpu: CudaAccelerator, model: Decoder, backend: str, capture: bool, ahead: bool, seed: int
) -> None:
    runner, blocks = cuda_runner(gpu, model, backend, capture)
    requests = requests_of(blocks, seed)
    tokens, logprobs = answer(requests, drive(runner, requests, seed, ahead))
    known, blocks = reference(gpu, model)
    expected = requests_of(blocks, seed)
    wanted, their_logprobs = answer(expected, drive(known, expected, seed + 100, ahead=False))
    assert tokens == wanted
    for ours, theirs in zip(logprobs, their_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("size", range(1, CAPACITY.slices + 1))
def test_each_number_of_decodes_replays_a_graph(gpu: CudaAccelerator, model: Decoder, size: int) -> None:
    runner, blocks = cuda_runner(gpu, model, "triton", capture=True)
    known, their_blocks = reference(gpu, model)

    def decode(requests: Sequence[Request], by: TorchRunner) -> list[int | None]:
        for request in requests:
            run_step(by, [piece(request)])
        return [output.token for output in run_step(by, [piece(request) for request in requests])]

    ours = decode(requests_of(blocks, 7, [GREEDY] * size), runner)
    assert ours == decode(requests_of(their_blocks, 7, [GREEDY] * size), known)


def test_a_launch_does_not_wait_for_the_device(gpu: CudaAccelerator, model: Decoder) -> None:
    """`launch` returns while the device is still busy with earlier work."""
    runner, blocks = cuda_runner(gpu, model, "triton", capture=True)
    request = requests_of(blocks, 1, [GREEDY])[0]
    run_step(runner, [piece(request)])
    torch.cuda._sleep(200_000_000)  # clock cycles, about a tenth of a second
    step = Step(1, [piece(request)], [])
    pending = runner.launch(step)
    assert not torch.cuda.current_stream(gpu.device).query()
    assert pending()[0].token is not None


def test_capturing_at_a_real_size_fits_in_the_reserved_memory(gpu: CudaAccelerator) -> None:
    config = replace(CONFIG, hidden_size=1024, intermediate_size=3072, num_layers=28, windows=(0,) * 28, head_dim=128)
    decoder = random_decoder(config, torch.bfloat16, gpu.device)
    layout = replace(layout_of(decoder, 64, 64), dtype="bfloat16")
    pool = KVPool(layout, gpu.allocate(layout.num_blocks, layout.block_bytes), kv_places(decoder.config))
    triton = gpu.has_triton()
    attention, kernels = attention_on_cuda("auto", pool, triton), kernels_on_cuda(config, pool, triton)
    runner = CudaRunner(decoder, pool, attention, kernels, gpu.device, StepCapacity(256, 512, 32, 64))
    before, _ = gpu.memory()
    runner.capture(gpu.graphs())
    after, _ = gpu.memory()
    assert before - after < GRAPH_BYTES
