"""Test that the CUDA runner with real CUDA graphs generates the reference runner's tokens, in float32 on one GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.attention import TorchAttention
from engine.cuda.build import GRAPH_BYTES
from engine.cuda.device import CudaAccelerator
from engine.cuda.runner import CudaRunner
from engine.cuda.selection import attention_on_cuda, kernels_on_cuda, weights_on_cuda
from engine.cuda.staging import StepCapacity
from engine.kernels import TorchKernels
from engine.kv_pool import KVPool
from engine.linear import Plain
from engine.lora.files import AdapterFiles, LowRank
from engine.lora.linear import ModelAdapters
from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.models.spec import AttentionSpec, DeltaSpec, LatentSpec, LayerSpec, MlpSpec, MoeSpec
from engine.runner import TorchRunner
from scheduler.request import Request, Step
from tests.engine.build import CONFIG, GREEDY, Blocks, States, in_one_piece, layout_of, piece, run_step, state_size
from tests.engine.cuda_workload import BLOCK_TOKENS, CAPACITY, NUM_BLOCKS, SAMPLINGS, SEEDS, answer, drive, requests_of

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


# Layers unlike those of Qwen3: recurrent layers, experts, and other kinds of attention
OTHER_LAYERS = {
    "delta rule and experts": (
        LayerSpec(DeltaSpec(2, 4, 16, 32, 4), MoeSpec(8, 3, MlpSpec(24, "clamped_swiglu"))),
        LayerSpec(AttentionSpec(4, 2, 16, softcap=5.0, sinks=True), MoeSpec(8, 2, MlpSpec(24), "sigmoid")),
    ),
    "latents": (LayerSpec(LatentSpec(4, 0, 32, 16, 16, 16), MoeSpec(8, 2, MlpSpec(24), scores_chosen=True)),) * 2,
    "heads of twice the size": (
        LayerSpec(AttentionSpec(4, 2, 16, norms_values=True), MlpSpec(20, "gelu_tanh")),
        LayerSpec(AttentionSpec(4, 1, 32, norms_values=True, values_are_keys=True), MlpSpec(20)),
    ),
}


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_other_layers_give_the_tokens_of_the_reference(gpu: CudaAccelerator, kind: str, capture: bool) -> None:
    from engine.cuda.draw import draw

    config = replace(CONFIG, layers=OTHER_LAYERS[kind], embedding_scale=1.7)
    answers = []
    for ours in (True, False):
        linear = weights_on_cuda(torch.float32, triton=ours)
        decoder = random_decoder(config, torch.float32, gpu.device, linear, deviation=0.3)
        one = layout_of(decoder, NUM_BLOCKS, BLOCK_TOKENS)
        size, places = state_size(config, one.block_bytes), in_one_piece(config)
        layout = replace(one, num_blocks=one.num_blocks + 2 * len(SAMPLINGS) * size)
        pool = KVPool(layout, gpu.allocate(layout.num_blocks, layout.block_bytes), places)
        pool.tensor.fill_(torch.nan)
        attention, kernels = (
            attention_on_cuda("triton" if ours else "torch", pool, True),
            kernels_on_cuda(config, pool, ours),
        )
        capacity = replace(CAPACITY, tables=1, state_rows=places.state_rows)
        runner = CudaRunner(decoder, pool, attention, kernels, gpu.device, capacity, draw if ours else None)
        if ours and capture:
            assert decoder.can_be_captured(kernels)
            runner.capture(gpu.graphs())
        requests = requests_of(Blocks(one.num_blocks, BLOCK_TOKENS), 1)
        states = States(one.num_blocks, size) if size else None
        answers.append(answer(requests, drive(runner, requests, 1, ahead=capture and ours, states=states))[0])
    assert answers[0] == answers[1]


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

    def decode(requests: Sequence[Request], by: TorchRunner) -> list[int]:
        for request in requests:
            run_step(by, [piece(request)])
        return [token for output in run_step(by, [piece(request) for request in requests]) for token in output.tokens]

    ours = decode(requests_of(blocks, 7, [GREEDY] * size), runner)
    assert ours == decode(requests_of(their_blocks, 7, [GREEDY] * size), known)


@pytest.mark.parametrize("adapter", ["", "a"])
def test_a_launch_does_not_wait_for_the_device(gpu: CudaAccelerator, adapter: str) -> None:
    """`launch` returns while the device is still busy with earlier work. (A request with a grammar would wait.)"""
    decoder = random_decoder(CONFIG, torch.float32, gpu.device, deviation=0.3)
    runner, blocks = cuda_runner(gpu, decoder, "triton", capture=True)
    runner.adapters = ModelAdapters(decoder, Plain(torch.float32))
    update = LowRank(torch.randn(4, CONFIG.hidden_size), torch.randn(64, 4))
    runner.adapters.add(AdapterFiles("a", Path(), {"model.layers.0.self_attn.q_proj": update}))
    request = blocks.request(range(3, 12), GREEDY, adapter=adapter)
    for _ in range(2):  # these steps compile the kernels that the launch needs
        run_step(runner, [piece(request)])
    torch.cuda._sleep(4_000_000_000)  # clock cycles: about two seconds, longer than `launch` takes
    step = Step(1, [piece(request)], [])
    pending = runner.launch(step)
    assert not torch.cuda.current_stream(gpu.device).query()
    assert pending()[0].tokens


def test_capturing_at_a_real_size_fits_in_the_reserved_memory(gpu: CudaAccelerator) -> None:
    config = replace(CONFIG, hidden_size=1024, layers=(LayerSpec(AttentionSpec(4, 2, 128), MlpSpec(3072)),) * 28)
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
