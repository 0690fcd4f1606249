"""Test the CUDA runner on a CPU, with fake CUDA graphs that poison all memory that a replay does not write again. The
runner must generate the tokens of the reference runner, however steps are captured, padded and overlapped."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from benchmarks.random_model import random_decoder
from engine.attention import AttentionBackend, AttentionLayer, TorchAttention, TorchPlan
from engine.batch import Batch, BlockRows, build
from engine.cuda.graphs import GraphRecording
from engine.cuda.runner import CudaRunner
from engine.cuda.staging import StepBuffers, StepCapacity, StepShape
from engine.kernels import TorchKernels
from engine.kv_pool import KVPool
from engine.linear import Plain
from engine.lora.files import AdapterFiles, LowRank
from engine.lora.linear import ModelAdapters
from engine.models.decoder import Decoder
from engine.models.kv_places import all_in_one_row, kv_places
from engine.models.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec
from scheduler.geometry import Group
from scheduler.request import Request, Slice, StateUse, Step
from shared.rpc.messages import SamplingParams
from tests.engine import drive as overlap
from tests.engine.build import (  # noqa: F401
    CONFIG,
    CPU,
    GREEDY,
    VOCABULARY,
    Blocks,
    generate,
    layout_of,
    model_fixture,
    piece,
    pool_of,
    run_step,
    thinned,
    torch_runner,
)
from tests.engine.cuda_workload import BLOCK_TOKENS, CAPACITY, NUM_BLOCKS, SEEDS, Answer, answer, drive, requests_of
from tests.engine.fake_graph import FakeGraphPool

torch.set_num_threads(1)
CAPTURES = ["nothing", "pieces", "decodes whole"]


class StaticAttention:
    """Attention that a CUDA graph can capture: it reads lengths from tensors, and reads the whole block table."""

    name = "static"
    captures = True

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._chunks = TorchAttention(pool)

    def plan(self, batch: Batch) -> object:
        decodes = all(count == 1 for count in batch.counts)
        return StaticPlan(self._pool, batch) if decodes else self._chunks.plan(batch)


class StaticPlan:
    def __init__(self, pool: KVPool, batch: Batch) -> None:
        self._pool, self._batch = pool, batch

    def attend(self, layer: AttentionLayer, q: Tensor) -> Tensor:
        batch, size = self._batch, self._pool.layout.block_tokens
        keys, values = (
            part[batch.block_table.long()].transpose(2, 3).flatten(1, 2) for part in self._pool.layer(layer.index)
        )
        at = torch.arange(batch.block_table.shape[1] * size)
        seen = (at < batch.kv_len[:, None]) & (at >= batch.kv_len[:, None] - (layer.window or len(at)))
        group = q.shape[1] // keys.shape[2]
        keys, values = (
            torch.where(seen[:, :, None, None], part, 0.0).repeat_interleave(group, dim=2) for part in (keys, values)
        )
        scores = torch.einsum("shd,sthd->sht", q, keys) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(dim=2).nan_to_num()
        return torch.einsum("sht,sthd->shd", weights, values)


def cuda_runner(model: Decoder, captures: str) -> tuple[CudaRunner, Blocks, KVPool]:
    layout = layout_of(model, NUM_BLOCKS, BLOCK_TOKENS)
    pool = pool_of(model, layout)
    attention: AttentionBackend = StaticAttention(pool) if captures == "decodes whole" else TorchAttention(pool)
    runner = CudaRunner(model, pool, attention, TorchKernels(CONFIG, pool), CPU, CAPACITY)
    if captures != "nothing":
        runner.capture(FakeGraphPool())
    return runner, Blocks(layout.num_blocks, BLOCK_TOKENS, pool.places.groups), pool


@pytest.fixture(scope="module")
def expected(model: Decoder) -> dict[int, Answer]:
    """Return the answers of the reference runner, by seed. Its steps differ from those of the CUDA runner."""
    answers = {}
    for seed in SEEDS:
        reference, _, blocks = torch_runner(model, NUM_BLOCKS, BLOCK_TOKENS)
        requests = requests_of(blocks, seed)
        answers[seed] = answer(requests, drive(reference, requests, seed + 100, ahead=False))
    return answers


@pytest.mark.parametrize(("captures", "ahead", "seed"), thinned(product(CAPTURES, [False, True], SEEDS), 5))
def test_random_workloads_give_the_tokens_of_the_reference(
    model: Decoder, expected: dict[int, Answer], captures: str, ahead: bool, seed: int
) -> None:
    runner, blocks, _ = cuda_runner(model, captures)
    requests = requests_of(blocks, seed)
    tokens, logprobs = answer(requests, drive(runner, requests, seed, ahead))
    assert tokens == expected[seed][0]
    for ours, theirs in zip(logprobs, expected[seed][1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(("seed", "tight", "aborts"), thinned(product(range(3), [False, True], [False, True]), 5))
def test_the_real_engine_gives_the_same_tokens_with_preemption_and_aborts(
    model: Decoder, seed: int, tight: bool, aborts: bool
) -> None:
    expected = overlap.expected_of(model, seed)
    rows, random = overlap.workload(seed), Random(seed)
    todo: dict[int, list[tuple[str, Request]]] = {}
    for row in rows:
        at = random.randrange(20)
        todo.setdefault(at, []).append(("add", row))
        if aborts and random.random() < 0.4:
            todo.setdefault(at + random.randrange(1, 12), []).append(("abort", row))
    num_blocks = 18 if tight else NUM_BLOCKS
    layout = replace(layout_of(model, num_blocks, BLOCK_TOKENS), block_tokens=overlap.BLOCK_TOKENS)
    pool = pool_of(model, layout)
    capacity = StepCapacity(slices=64, tokens=64, blocks=64, block_tokens=layout.block_tokens, tables=2)
    runner = CudaRunner(model, pool, StaticAttention(pool), TorchKernels(CONFIG, pool), CPU, capacity)
    runner.capture(FakeGraphPool())
    drive = overlap.Drive(overlap.scheduler_of(num_blocks, random.choice([6, 16, 64])), runner, todo)
    drive.run()
    assert drive.failure is None
    for row, (tokens, finish) in zip(rows, expected, strict=True):
        found = row.tokens[row.num_prompt :]
        assert found == tokens[: len(found)]
        assert row.finish == finish if len(found) == len(tokens) else aborts
    ledger = drive.scheduler.ledger()
    assert (ledger.owned, ledger.reserved, ledger.free + ledger.cached) == (0, 0, ledger.total)


@pytest.mark.parametrize("size", thinned(range(1, CAPACITY.slices + 1), 4))
def test_each_number_of_decodes_replays_the_next_larger_size(model: Decoder, size: int) -> None:
    runner, blocks, pool = cuda_runner(model, "decodes whole")
    reference, other, their_blocks = torch_runner(model, NUM_BLOCKS, BLOCK_TOKENS)
    for each, tokens_of in ((runner, blocks), (reference, their_blocks)):
        requests = requests_of(tokens_of, 7, [GREEDY] * size)
        for request in requests:
            run_step(each, [piece(request)])
        outputs = run_step(each, [piece(request) for request in requests])
        tokens_of.tokens = [output.tokens for output in outputs]
    assert blocks.tokens == their_blocks.tokens
    # Padding is stored only in the dummy block. All other blocks have the same content as in the reference.
    torch.testing.assert_close(pool.tensor[1:], other.tensor[1:], equal_nan=True)


@pytest.mark.parametrize("num_tokens", [CAPACITY.tokens + 8, 3])
def test_a_step_larger_than_the_buffers_gets_its_own_buffers(model: Decoder, num_tokens: int) -> None:
    """The buffers are too small for the step's tokens or, in the case of 3 tokens, for the blocks of its request."""
    runner, blocks, pool = cuda_runner(model, "decodes whole")
    if num_tokens < CAPACITY.tokens:
        narrow = replace(CAPACITY, blocks=1)
        runner = CudaRunner(model, pool, StaticAttention(pool), TorchKernels(CONFIG, pool), CPU, narrow)
        runner.capture(FakeGraphPool())
    reference, _, their_blocks = torch_runner(model, NUM_BLOCKS, BLOCK_TOKENS)
    prompt = [index % VOCABULARY for index in range(num_tokens)]
    ours, theirs = blocks.request(prompt, GREEDY, 6), their_blocks.request(prompt, GREEDY, 6)
    assert generate(runner, [ours], 4096) == generate(reference, [theirs], 4096)


@pytest.mark.parametrize("captures", CAPTURES)
def test_broken_logits_end_their_request_alone(model: Decoder, captures: str) -> None:
    runner, blocks, pool = cuda_runner(model, captures)
    broken, whole, banned = requests_of(blocks, 3, [GREEDY, SamplingParams(seed=4), GREEDY])
    banned.sampling = replace(GREEDY, logit_bias=dict.fromkeys(range(VOCABULARY), -torch.inf))
    for request in (broken, whole):
        run_step(runner, [piece(request)])
    banned.num_computed = 0
    pool.tensor[broken.tables[0][0]] = torch.nan
    slices = [piece(broken), piece(whole)]
    step = Step(1, slices, [])
    first = runner.launch(step)
    broken.num_computed, whole.num_computed = slices[0].end, slices[1].end
    behind = [Slice(request, request.num_computed, 1, True, 0) for request in (broken, whole)]
    second = runner.launch(Step(2, behind, []), step)  # the input token of `broken` comes from a failed draw
    assert [output.error for output in first()] == ["numerical", ""]
    assert [output.error for output in second()] == ["numerical", ""]
    assert runner.run(Step(3, [piece(banned)], []))[0].error == "no_token"


class RecordingAttention(TorchAttention):
    seen: list[int]

    def plan(self, batch: Batch) -> TorchPlan:
        self.seen = batch.counts
        return super().plan(batch)


def test_decodes_come_first_for_any_order_of_slices(model: Decoder) -> None:
    _, blocks, pool = cuda_runner(model, "nothing")
    attention = RecordingAttention(pool)
    runner = CudaRunner(model, pool, attention, TorchKernels(CONFIG, pool), CPU, CAPACITY)
    long, short = blocks.request(range(3, 12), GREEDY), blocks.request([5], GREEDY)
    outputs = runner.run(Step(1, [piece(long), piece(short)], []))
    assert attention.seen == [1, 9]
    alone = [runner.run(Step(at, [piece(request)], []))[0] for at, request in enumerate((long, short))]
    assert [output.tokens for output in outputs] == [output.tokens for output in alone]


@pytest.mark.parametrize("captures", CAPTURES)
def test_requests_with_adapters_get_the_tokens_of_the_reference(captures: str) -> None:
    model, answers = random_decoder(CONFIG, torch.float32, CPU, deviation=0.3), []
    runner, blocks, _ = cuda_runner(model, captures)
    reference, _, their_blocks = torch_runner(model, NUM_BLOCKS, BLOCK_TOKENS)
    reference.adapters = runner.adapters = ModelAdapters(model, Plain(torch.float32))
    torch.manual_seed(0)
    for name in "ab":
        update = LowRank(torch.randn(4, CONFIG.hidden_size), torch.randn(64, 4))
        reference.adapters.add(AdapterFiles(name, Path(), {"model.layers.1.self_attn.q_proj": update}))
    for each, tokens_of in ((runner, blocks), (reference, their_blocks)):
        requests = requests_of(tokens_of, 1)
        for index, request in enumerate(requests):
            request.adapter = ("", "a", "b")[index % 3]
        answers.append(answer(requests, drive(each, requests, 1, ahead=each is runner))[0])
    assert answers[0] == answers[1]


def test_a_step_is_padded_to_the_next_captured_size(model: Decoder) -> None:
    runner, blocks, _ = cuda_runner(model, "decodes whole")
    passes = runner.passes
    for request in (requests := requests_of(blocks, 5, [GREEDY] * 9)):
        request.num_computed = len(request.tokens) - 1
    for count, size in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 9)):
        step = _built([piece(request) for request in requests[:count]])
        assert passes.choose(step)[0] == StepShape(size, size, size)
    requests[0].num_computed = 0
    long = piece(requests[0], 30)
    assert passes.choose(_built([long]))[0] == StepShape(32, 9, 9)
    # One graph each for 1, 2, 4, 8 and 9 decodes, and three graphs for each mixed size (16, 32 and 40).
    assert passes.num_graphs == 5 + 3 * 3


def test_decodes_are_not_captured_whole_if_the_reference_computes_a_layer() -> None:
    capped = LayerSpec(AttentionSpec(4, 2, 16, softcap=3.0), MlpSpec(8))
    config = replace(CONFIG, layers=(*CONFIG.layers, capped))
    decoder = random_decoder(config, torch.float32, CPU)
    pool = pool_of(decoder, layout_of(decoder, NUM_BLOCKS, BLOCK_TOKENS))
    runner = CudaRunner(decoder, pool, StaticAttention(pool), TorchKernels(config, pool), CPU, CAPACITY)
    runner.capture(FakeGraphPool())
    assert runner.passes.describe() == "steps of up to 40 tokens"


def _built(slices: list[Slice]) -> Batch:
    return build(slices, BLOCK_TOKENS, CPU, rows=BlockRows(kv_places(CONFIG)))


# ---- the fake graphs -----------------------------------------------------------------------------------------------


def recorded(work: Callable[[GraphRecording], Tensor]) -> tuple[GraphRecording, Tensor]:
    recording = GraphRecording(FakeGraphPool())
    return recording, recording.capture(lambda: work(recording))


def test_a_pause_is_repeated_in_each_replay() -> None:
    static, eager = torch.ones(1), torch.zeros(1)

    def work(recording: GraphRecording) -> Tensor:
        doubled = static * 2
        recording.pause(lambda: eager.copy_(static + 100))
        return doubled + eager

    recording, out = recorded(work)
    static.fill_(3)
    recording.replay()
    assert out.tolist() == [109.0]
    assert recording.num_graphs == 2


@pytest.mark.parametrize("captures", CAPTURES)
def test_a_warm_up_touches_the_dummy_block_only(model: Decoder, captures: str) -> None:
    runner, _, pool = cuda_runner(model, captures)
    for run in (runner.warm_up, runner.check):
        pool.tensor[0] = 0
        run()
        assert pool.tensor[1:].isnan().all()
        assert pool.tensor[0].isfinite().all()
        assert pool.tensor[0].any()


def test_a_warm_up_draws_with_and_without_adjusted_logits(model: Decoder) -> None:
    """Triton compiles a kernel of the draw for each of the two cases."""
    pool = pool_of(model, layout_of(model, NUM_BLOCKS, BLOCK_TOKENS))
    sampler = Mock(side_effect=lambda logits, *_: torch.zeros(len(logits), dtype=torch.int64))
    CudaRunner(model, pool, TorchAttention(pool), TorchKernels(CONFIG, pool), CPU, CAPACITY, sampler).warm_up()
    assert {call.args[2] is None for call in sampler.call_args_list} == {False, True}


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_tensors_on_the_device_are_aligned_to_16_bytes(tokens: int) -> None:
    """Triton compiles its kernels again for a pointer without this alignment."""
    buffers = StepBuffers(CAPACITY, CPU)
    batch = buffers.clear(StepShape(tokens, tokens, tokens))
    names = ("tokens", "positions", "slots", "logit_rows", "cu_q", "kv_len", "block_table")
    assert {getattr(batch, name).data_ptr() % 16 for name in names} == {0}
    assert len(batch.cu_q) == tokens + 1


def test_slices_of_padding_have_no_states() -> None:
    """A padding slice has at most one token. Values of earlier steps, which had more slices, have no effect."""
    buffers, tokens = StepBuffers(replace(CAPACITY, tables=1, state_rows=2), CPU), torch.zeros(9, dtype=torch.int64)
    groups = (Group("full", 1), Group("state", 2))
    rows, blocks = BlockRows(replace(all_in_one_row(1), groups=groups)), Blocks(NUM_BLOCKS, BLOCK_TOKENS)
    requests = requests_of(blocks, 1)[:4]
    for count in (4, 4, 1, 2):
        slices = [piece(request, 1) for request in requests[:count]]
        for at, one in enumerate(slices):
            one.state = StateUse(None if at == 0 else (7, at), (8, at), 1, (9, at))
        step = build(slices, BLOCK_TOKENS, CPU, rows=rows)
        shape = StepShape(5, 6, 6)
        own, _ = buffers.load(step, [], shape, tokens)
        padded = buffers.view(shape)
        assert own.states is not None
        assert padded.states is not None
        assert step.states is not None
        assert torch.equal(own.states.rows, step.states.rows)
        assert torch.equal(padded.states.rows[:, :count], step.states.rows)
        assert padded.states.save_at.tolist() == [1] * count + [0] * (6 - count)
        assert bool((padded.states.rows[:, count:] == -1).all())
        assert padded.cu_q.tolist() == [0, 1, 2, 3, 4, 5, 5]


# Layers whose heads differ from the pool's layout. The test also scales the embeddings.
OTHER_LAYERS = {
    "latents": tuple(LayerSpec(LatentSpec(3, size, 12, 6, 4, 10), MlpSpec(20)) for size in (0, 8)),
    "heads of twice the size": (
        LayerSpec(AttentionSpec(4, 2, 8, norms_values=True), MlpSpec(20, "gelu_tanh")),
        LayerSpec(AttentionSpec(4, 1, 16, norms_values=True, values_are_keys=True), MlpSpec(20)),
    ),
}


@pytest.mark.parametrize("kind", OTHER_LAYERS)
def test_graphs_contain_layers_with_other_heads(kind: str) -> None:
    config = replace(CONFIG, layers=OTHER_LAYERS[kind], embedding_scale=3.3)
    decoder = random_decoder(config, torch.float32, CPU, deviation=0.3)
    layout = layout_of(decoder, NUM_BLOCKS, BLOCK_TOKENS)
    answers = []
    for captures in (False, True):
        pool = pool_of(decoder, layout)
        kernels, capacity = TorchKernels(config, pool), replace(CAPACITY, tables=1)
        assert decoder.can_be_captured(kernels)
        runner = CudaRunner(decoder, pool, TorchAttention(pool), kernels, CPU, capacity)
        if captures:
            runner.capture(FakeGraphPool())
        requests = requests_of(Blocks(layout.num_blocks, BLOCK_TOKENS), 2)
        answers.append(answer(requests, drive(runner, requests, 2, ahead=captures)))
    assert answers[0][0] == answers[1][0]
