"""Test that tokens do not depend on chunks, block size, preemption, handoff, or other requests and their faults."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.batch import build
from engine.models.decoder import Decoder
from engine.models.spec import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, MoeSpec
from engine.runner import TorchRunner
from scheduler.request import Slice
from shared.kv.layout import KVLayout
from shared.rpc.messages import Logprobs, SamplingParams
from tests.engine.build import (
    CONFIG,
    CPU,
    GREEDY,
    VOCABULARY,
    Blocks,
    device_code,
    every_backend,
    generate,
    model_fixture,
    piece,
    run_step,
    thinned,
    torch_runner,
)

torch.set_num_threads(1)
__all__ = ["every_backend", "model_fixture"]  # fixtures
NUM_TOKENS = 14
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=8, min_p=0.01, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(seed=1),  # has the prompt and seed of the second request, so it draws the same tokens
    replace(GREEDY, repetition_penalty=1.2, logit_bias={5: 3.0}),
]


def prompts() -> list[list[int]]:
    random = Random(11)
    rows = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (1, 17, 30, 8, 0, 5)]
    rows[4] = rows[1]
    return rows


@pytest.fixture(scope="module")
def alone(model: Decoder) -> list[list[int]]:
    """Return the tokens of each request when it runs alone, with its prompt in one step."""
    answers = []
    for prompt, sampling in zip(prompts(), SAMPLINGS, strict=True):
        runner, _, blocks = torch_runner(model)
        answers += generate(runner, [blocks.request(prompt, sampling, NUM_TOKENS)], 4096)
    assert answers[1] == answers[4]
    assert len(set(map(tuple, answers))) == 5
    return answers


@pytest.mark.parametrize(("budget", "block_tokens"), thinned(product([1, 3, 10, 4096], [1, 4, 16]), 7))
def test_tokens_do_not_depend_on_chunks_other_requests_or_block_size(
    model: Decoder, alone: list[list[int]], budget: int, block_tokens: int
) -> None:
    runner, _, blocks = torch_runner(model, 200, block_tokens)
    requests = [
        blocks.request(prompt, sampling, NUM_TOKENS) for prompt, sampling in zip(prompts(), SAMPLINGS, strict=True)
    ]
    assert generate(runner, requests, budget) == alone


LATENT = LatentSpec(heads=4, q_rank=12, kv_rank=24, nope_dim=10, rope_dim=8, value_dim=14, query_scale=1.3)
GROUPED = MoeSpec(6, 2, MlpSpec(20), score="sigmoid", groups=3, top_groups=2, shared=MlpSpec(20))
NARROW = AttentionSpec(4, 2, 16, window=7, qk_norm=True, norms_values=True)
WIDE = AttentionSpec(4, 1, 32, qk_norm=True, norms_values=True, values_are_keys=True)


@pytest.mark.parametrize(
    "layers",
    [
        (LayerSpec(LATENT, MlpSpec(52)), LayerSpec(LATENT, GROUPED)),
        (LayerSpec(NARROW, MlpSpec(52)), LayerSpec(WIDE, MlpSpec(52))),
    ],
    ids=["latents", "heads of two sizes"],
)
def test_tokens_do_not_depend_on_chunks_or_other_requests_with(layers: tuple[LayerSpec, ...]) -> None:
    model = random_decoder(replace(CONFIG, layers=layers), torch.float32, CPU, deviation=0.3)
    alone = []
    for prompt in prompts():
        runner, _, blocks = torch_runner(model)
        alone += generate(runner, [blocks.request(prompt, SAMPLINGS[1], NUM_TOKENS)], 4096)
    for budget, block_tokens in ((3, 1), (10, 4), (4096, 16)):
        runner, _, blocks = torch_runner(model, 200, block_tokens)
        requests = [blocks.request(prompt, SAMPLINGS[1], NUM_TOKENS) for prompt in prompts()]
        assert generate(runner, requests, budget) == alone


def test_preemption_and_handoff_do_not_change_tokens(model: Decoder, alone: list[list[int]]) -> None:
    for index, (prompt, sampling) in enumerate(zip(prompts(), SAMPLINGS, strict=True)):
        runner, pool, blocks = torch_runner(model)
        request = blocks.request(prompt, sampling, NUM_TOKENS)
        for _ in range(5):
            run_step(runner, [piece(request)])
        # Preempt the request: its blocks are lost, and all its tokens are computed again in chunks, in other blocks.
        request.tables = blocks.request(prompt, sampling, NUM_TOKENS).tables
        request.num_computed = 0
        for table in blocks.request(prompt).tables:
            pool.tensor[table] = torch.nan
        while request.num_computed < len(request.tokens) - 3:
            run_step(runner, [piece(request, 3)])
        run_step(runner, [piece(request)])
        # Hand the request over: its rows are copied to other blocks of another pool.
        other, target, others = torch_runner(model)
        landed = others.request(prompt, sampling, NUM_TOKENS)
        for ours, theirs in zip(request.tables, landed.tables, strict=True):
            theirs.reverse()
            target.tensor[theirs] = pool.tensor[ours]
        landed.tokens, landed.num_computed = list(request.tokens), request.num_computed
        assert generate(other, [landed], 64)[0] == alone[index]


def scored(model: Decoder, prompt: list[int], sizes: list[int]) -> list[Logprobs]:
    runner, _, blocks = torch_runner(model)
    others = blocks.request([1, 2, 3], replace(GREEDY, logprobs=1))
    request = blocks.request(prompt, replace(GREEDY, prompt_logprobs=2), needs_prompt_logprobs=True)
    found: list[Logprobs] = []
    for size in sizes:
        outputs = run_step(runner, [piece(others), piece(request, size)])
        assert outputs[0].logprobs
        assert outputs[0].prompt_logprobs == []
        found += outputs[1].prompt_logprobs
    assert request.num_generated == 1
    assert run_step(runner, [piece(request)])[0].prompt_logprobs == []  # a generated token is not a prompt token
    return found


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 12, 1], [19, 1]])
def test_prompt_logprobs_describe_each_next_prompt_token(model: Decoder, sizes: list[int]) -> None:
    prompt = [(7 * at) % VOCABULARY for at in range(20)]
    found = scored(model, prompt, sizes)
    assert [entry.token for entry in found] == prompt[1:]
    for at, entry in enumerate(found):  # compare with the next-token logprobs after prompt[: at + 1]
        runner, _, blocks = torch_runner(model)
        request = blocks.request(prompt[: at + 1], replace(GREEDY, logprobs=VOCABULARY))
        (drawn,) = run_step(runner, [piece(request)])[0].logprobs
        place = drawn.top_tokens.index(entry.token)
        assert entry.logprob == pytest.approx(drawn.top_logprobs[place], abs=1e-4)
        assert (entry.rank, entry.top_tokens) == (place + 1, drawn.top_tokens[:2])


def test_a_resumed_request_scores_only_its_prompt(model: Decoder) -> None:
    runner, _, blocks = torch_runner(model)
    request = blocks.request([1, 2, 3, 4, 5, 6], replace(GREEDY, prompt_logprobs=0), needs_prompt_logprobs=True)
    request.num_prompt = 4
    (output,) = run_step(runner, [piece(request)])
    assert [entry.token for entry in output.prompt_logprobs] == [2, 3, 4]
    assert output.tokens


@pytest.mark.parametrize("needs_prompt_logprobs", [False, True])
def test_a_request_whose_kv_is_broken_fails_alone(
    model: Decoder, alone: list[list[int]], needs_prompt_logprobs: bool
) -> None:
    runner, pool, blocks = torch_runner(model)
    requests = [
        blocks.request(prompt, GREEDY, NUM_TOKENS, needs_prompt_logprobs=needs_prompt_logprobs)
        for prompt in prompts()[:3]
    ]
    run_step(runner, [piece(one, 8) for one in requests])
    pool.tensor[requests[1].tables[0][0], 0, 0, 2] = torch.nan
    outputs = run_step(runner, [piece(one) for one in requests])
    assert [output.error for output in outputs] == ["", "numerical", ""]
    assert outputs[1].tokens == []
    assert requests[0].tokens[len(prompts()[0]) :] == alone[0][:2]


def test_a_request_with_every_token_banned_fails_alone(model: Decoder, alone: list[list[int]]) -> None:
    runner, _, blocks = torch_runner(model)
    stuck = blocks.request([1, 2], GREEDY, stop_tokens=frozenset(range(VOCABULARY)), min_tokens=1)
    fine = blocks.request(prompts()[0], GREEDY)
    outputs = run_step(runner, [piece(stuck), piece(fine)])
    assert [(output.tokens, output.error) for output in outputs] == [([], "no_token"), ([alone[0][0]], "")]


def test_an_unfinished_chunk_and_an_empty_step_give_no_output(model: Decoder) -> None:
    runner, _, blocks = torch_runner(model)
    (output,) = run_step(runner, [piece(blocks.request(range(9)), 4)])
    assert (output.tokens, output.logprobs, output.prompt_logprobs, output.error) == ([], [], [], "")
    assert run_step(runner, []) == []


def test_a_slice_beyond_its_tokens_or_blocks_is_refused() -> None:
    request = Blocks(16, 4).request(range(6), max_tokens=2)
    for blocks, end in ((request.tables[0], 7), (request.tables[0][:1], 6)):
        request.tables[0] = blocks
        with pytest.raises(ValueError, match="beyond the request's tokens or blocks"):
            build([Slice(request, 0, end, True, 0)], 4, CPU)


def test_a_pool_of_another_model_is_refused(model: Decoder) -> None:
    _, pool, _ = torch_runner(model)
    code = device_code(model, pool)
    pool.layout = KVLayout(64, 2, 3, 4, 8, "float32")
    with pytest.raises(ValueError, match="another model"):
        TorchRunner(model, pool, *code, CPU)
