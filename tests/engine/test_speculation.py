"""Test that guessed tokens change no answer: tokens, logprobs and finish reasons are the same as without speculative
decoding, for any drafter, sampling and mode."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import random_decoder
from engine.models.decoder import Decoder
from engine.models.spec import DeltaSpec, LayerSpec, MlpSpec
from engine.runner import SliceOutput
from engine.speculation import verified
from scheduler.drafters import PromptLookup, Speculation
from scheduler.request import Request, Slice
from scheduler.scheduler import StepLimits
from shared.rpc.messages import Logprobs, SamplingParams
from tests.engine.build import CONFIG, CPU, GREEDY, VOCABULARY, every_backend, model_fixture, thinned
from tests.engine.nodes import Guesses, Node, run_together

torch.set_num_threads(1)
__all__ = ["every_backend", "model_fixture"]  # fixtures
LONGEST = 60
SAMPLINGS = [
    GREEDY,
    replace(GREEDY, logprobs=3),
    SamplingParams(seed=1, logprobs=0),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, repetition_penalty=1.3, logprobs=2),
    SamplingParams(seed=3, top_k=8, min_p=0.01, presence_penalty=0.8, frequency_penalty=0.6),
    SamplingParams(seed=4, temperature=0.4, logit_bias={5: 3.0, 9: -100.0}, logprobs=1),
    replace(GREEDY, repetition_penalty=1.2, logit_bias={7: 4.0}),
    replace(GREEDY, prompt_logprobs=1, logprobs=1),
]
RECURRENT = LayerSpec(DeltaSpec(1, 2, 4, 8, 3), MlpSpec(20))
Answer = tuple[list[int], str | None, list[Logprobs]]


def requests_of(seed: int) -> list[Request]:
    """Return a request for each of `SAMPLINGS`, and one more request. The additional request has the same prompt as the
    request before it, and the third sampling with another seed."""
    rng, rows = Random(seed), []
    prompt: list[int] = []
    for index, sampling in enumerate([*SAMPLINGS, replace(SAMPLINGS[2], seed=5)]):
        if index != len(SAMPLINGS):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))] * rng.randrange(1, 4)
        row = Request(f"r{index}", list(prompt), len(prompt), rng.randrange(1, 34), sampling=sampling)
        row.min_tokens = rng.choice([0, 0, 6])
        row.stop_tokens = frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 5])))
        row.needs_prompt_logprobs = sampling.prompt_logprobs is not None
        rows.append(row)
    return rows


def run(
    model: Decoder, rows: Sequence[Request], speculation: Speculation | None = None, *, budget: int = 64,
    tight: bool = False, handed_over: bool = False,
) -> tuple[list[Answer], Node]:  # fmt: skip
    """Return the answers that clients get, and the node that decoded."""
    limits = StepLimits(max_num_batched_tokens=budget)
    here, there = (Node(model, limits, 1.5 if tight else 9, 4, speculation=speculation, longest=LONGEST) for _ in "ht")
    tokens = run_together(rows, here, there if handed_over else None)
    for node in (here, there):
        assert not node.scheduler.audit()
        assert node.scheduler.ledger().owned == 0
    logprobs = [there.logprobs.get(row.id, []) + here.logprobs.get(row.id, []) for row in rows]
    return list(zip(tokens, [row.finish for row in rows], logprobs, strict=True)), here


def guesses(answers: Sequence[Answer], rows: Sequence[Request], seed: int, rightness: float) -> Guesses:
    return Guesses(seed, rightness, [row.tokens + one[0] for row, one in zip(rows, answers, strict=True)])


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Assert that the answers are equal. Logprobs may differ in their last bits, because the chunks differ."""
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for (*_, ours), (*_, theirs) in zip(found, expected, strict=True):
        assert [(one.token, one.rank, one.top_tokens) for one in ours] == [
            (one.token, one.rank, one.top_tokens) for one in theirs
        ]
        values = [[value for one in given for value in (one.logprob, *one.top_logprobs)] for given in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize(
    "layers", [CONFIG.layers, (RECURRENT, CONFIG.layers[0], RECURRENT)], ids=["attention", "states"]
)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 50),
    rightness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_tokens=st.integers(1, 6),
    budget=st.sampled_from([7, 16, 64]),
    tight=st.booleans(),
    handed_over=st.booleans(),
)
def test_answers_do_not_depend_on_guesses(
    layers: tuple[LayerSpec, ...],
    seed: int,
    rightness: float,
    num_tokens: int,
    budget: int,
    tight: bool,
    handed_over: bool,
) -> None:
    model = random_decoder(replace(CONFIG, layers=layers), torch.float32, CPU, deviation=0.3)
    expected, _ = run(model, requests_of(seed))
    speculation = Speculation(guesses(expected, requests_of(seed), seed, rightness), num_tokens)
    found, node = run(model, requests_of(seed), speculation, budget=budget, tight=tight, handed_over=handed_over)
    assert_equal(found, expected)
    counters = node.scheduler.counters
    assert counters.draft_tokens > 0 or tight
    if rightness == 1.0:  # two requests share a prompt: where their answers diverge, guesses are wrong
        assert counters.draft_tokens - counters.accepted_tokens <= num_tokens
    assert counters.accepted_tokens == sum(counters.accepted_per_pos) <= counters.draft_tokens


@pytest.mark.parametrize(("least", "handed_over"), thinned([(1_500, True), (50_000, False), (50_000, True)], 3))
def test_many_guesses_give_no_different_answer(model: Decoder, least: int, handed_over: bool) -> None:
    """Together, the cases of `make nightly` verify 100,000 guesses with each backend."""
    drafted = accepted = seed = 0
    while drafted < least:
        expected, _ = run(model, requests_of(seed))
        speculation = Speculation(guesses(expected, requests_of(seed), seed, Random(seed).random()), 1 + seed % 8)
        found, node = run(model, requests_of(seed), speculation, handed_over=handed_over)
        assert_equal(found, expected)
        drafted += node.scheduler.counters.draft_tokens
        accepted += node.scheduler.counters.accepted_tokens
        seed += 1
    assert 0.1 * drafted < accepted < 0.9 * drafted


def test_right_guesses_save_steps(model: Decoder) -> None:
    alone, node = run(model, requests_of(0))
    found, faster = run(model, requests_of(0), Speculation(guesses(alone, requests_of(0), 0, 1.0), 4))
    assert_equal(found, alone)
    assert faster.scheduler.counters.steps < 0.4 * node.scheduler.counters.steps
    assert faster.scheduler.counters.accepted_tokens > 50


def test_looked_up_guesses_change_no_answer(model: Decoder) -> None:
    """A large bias makes answers repeat themselves, so that many guesses are right and some are wrong."""

    def rows() -> list[Request]:
        biased = SamplingParams(temperature=0.6, logit_bias=dict.fromkeys(range(10, 14), 9.0), logprobs=1)
        return [Request(f"r{seed}", [seed, 2, 3], 3, 57, sampling=replace(biased, seed=seed)) for seed in range(8)]

    expected, _ = run(model, rows())
    found, node = run(model, rows(), Speculation(PromptLookup(1, 4), 5))
    assert_equal(found, expected)
    assert 50 < node.scheduler.counters.accepted_tokens < node.scheduler.counters.draft_tokens


def test_the_same_guesses_are_right_in_both_modes(model: Decoder) -> None:
    """Each request runs alone. There is no step-time model, which could choose different numbers of guesses."""
    total = 0
    for seed in range(3):
        for index in range(len(SAMPLINGS)):
            counts = []
            for handed_over in (False, True):
                _, node = run(
                    model, [requests_of(seed)[index]], Speculation(PromptLookup(1, 4), 4), handed_over=handed_over
                )
                found = node.scheduler.counters
                counts.append((found.draft_tokens, found.accepted_tokens, found.accepted_per_pos))
            assert counts[0] == counts[1]
            total += counts[0][1]
    assert total > 20


def test_an_error_behind_a_wrong_guess_is_no_error() -> None:
    request = Request("r", [1, 2], 2, 9, sampling=GREEDY)
    slice_ = Slice(request, 1, 3, True, 0, drafts=(5, 6))
    broken, drawn = SliceOutput(error="numerical"), SliceOutput
    assert verified([slice_], [drawn([5]), drawn([7]), broken]) == [drawn([5, 7])]
    assert verified([slice_], [drawn([4]), broken, broken]) == [drawn([4])]
    # The right guess is kept. The next step draws at the failing position again.
    assert verified([slice_], [drawn([5]), broken, broken]) == [drawn([5])]
    assert verified([slice_], [broken, drawn([6]), drawn([7])]) == [broken]
