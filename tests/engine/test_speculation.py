"""Test that guessed tokens change no answer: tokens, logprobs and ends are those without speculative decoding, for any
drafter, sampling and schedule."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import random_decoder
from engine.models.decoder import Decoder
from engine.runner import SliceOutput
from engine.speculation import expanded, verified
from scheduler.draft import Drafter, DraftHistory, PromptLookup, Speculation
from scheduler.request import Request, RequestState, Slice
from scheduler.scheduler import Scheduler, StepLimits
from shared.rpc.messages import Logprobs, SamplingParams
from tests.engine.build import (
    CONFIG,
    CPU,
    GREEDY,
    VOCABULARY,
    every_backend,
    model_fixture,
    torch_runner,
)

torch.set_num_threads(1)
__all__ = ["every_backend", "model_fixture"]  # fixtures
BLOCK_TOKENS = 4
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
Answer = tuple[list[int], str | None, list[Logprobs]]


class Guesses(Drafter):
    """Guesses the tokens of known answers, each right with a given probability."""

    def __init__(self, seed: int, rightness: float, answers: Sequence[Sequence[int]]) -> None:
        self._rng, self._rightness, self._answers = Random(seed), rightness, answers

    def propose(self, tokens: Sequence[int], history: DraftHistory, limit: int) -> list[int]:
        """`answers` contain the prompts."""
        following = next((row[len(tokens) :] for row in self._answers if list(row[: len(tokens)]) == list(tokens)), [])
        return [
            token if self._rng.random() < self._rightness else self._rng.randrange(VOCABULARY)
            for token in following[:limit]
        ]


def requests_of(seed: int) -> list[Request]:
    rng, rows = Random(seed), []
    for index, sampling in enumerate(SAMPLINGS):
        part = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 9))]
        row = Request(
            f"r{index}",
            part * rng.randrange(1, 4),
            0,
            rng.randrange(1, 30),
            min_tokens=rng.choice([0, 0, 6]),
            stop_tokens=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 5]))),
            needs_prompt_logprobs=sampling.prompt_logprobs is not None,
            sampling=sampling,
        )
        row.num_prompt = len(row.tokens)
        rows.append(row)
    return rows


def answer(
    model: Decoder, rows: Sequence[Request], speculation: Speculation | None, budget: int = 64, blocks: int = 200
) -> tuple[list[Answer], Scheduler]:
    """Run the requests to their ends. Return what a client gets of each, and the scheduler."""
    runner, pool, _ = torch_runner(model, blocks, BLOCK_TOKENS)
    limits, groups = StepLimits(max_num_batched_tokens=budget), pool.places.groups
    scheduler = Scheduler(limits, pool.layout.num_blocks, BLOCK_TOKENS, groups=groups, speculation=speculation)
    logprobs: dict[str, list[Logprobs]] = {row.id: [] for row in rows}
    for row in rows:
        scheduler.add(row)
    while scheduler.has_work:
        step = scheduler.schedule()
        outputs = verified(step.slices, runner.run(expanded(step)))
        for event in scheduler.update(step, [output.tokens for output in outputs]):
            logprobs[event.request.id] += outputs[event.slice_index].logprobs[: len(event.tokens)]
        assert not scheduler.audit()
    assert all(row.state is RequestState.DONE for row in rows)
    return [(row.tokens[row.num_prompt :], row.finish, logprobs[row.id]) for row in rows], scheduler


@settings(max_examples=6)
@given(
    seed=st.integers(0, 50),
    rightness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_tokens=st.integers(1, 6),
    budget=st.sampled_from([7, 16, 64]),
    tight=st.booleans(),
)
def test_answers_do_not_depend_on_guesses(
    model: Decoder, seed: int, rightness: float, num_tokens: int, budget: int, tight: bool
) -> None:
    expected, _ = answer(model, requests_of(seed), None)
    known = [row.tokens + tokens for row, (tokens, *_) in zip(requests_of(seed), expected, strict=True)]
    speculation = Speculation(Guesses(seed, rightness, known), num_tokens)
    found, scheduler = answer(model, requests_of(seed), speculation, budget, 18 if tight else 200)
    assert_equal(found, expected)
    counters = scheduler.counters
    if rightness == 1.0:
        assert counters.accepted_tokens == counters.draft_tokens
    assert counters.accepted_tokens == sum(counters.accepted_per_pos) <= counters.draft_tokens


def test_right_guesses_save_steps(model: Decoder) -> None:
    alone, scheduler = answer(model, requests_of(0), None)
    known = [row.tokens + tokens for row, (tokens, *_) in zip(requests_of(0), alone, strict=True)]
    found, faster = answer(model, requests_of(0), Speculation(Guesses(0, 1.0, known), 4))
    assert_equal(found, alone)
    assert faster.counters.steps < 0.4 * scheduler.counters.steps
    assert faster.counters.accepted_tokens > 50


def test_looked_up_guesses_change_no_answer(model: Decoder) -> None:
    """A large bias makes answers repeat themselves, so that many guesses are right and some are wrong."""
    rows = [Request(f"r{seed}", [seed, 2, 3], 3, 60, sampling=biased(seed)) for seed in range(8)]
    expected, _ = answer(model, rows, None)
    rows = [Request(f"r{seed}", [seed, 2, 3], 3, 60, sampling=biased(seed)) for seed in range(8)]
    found, scheduler = answer(model, rows, Speculation(PromptLookup(1, 4), 5))
    assert_equal(found, expected)
    counters = scheduler.counters
    assert 50 < counters.accepted_tokens < counters.draft_tokens


def assert_equal(found: list[Answer], expected: list[Answer]) -> None:
    """The logits of a position may differ in their last bits, as they do with other chunks."""
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for (*_, ours), (*_, theirs) in zip(found, expected, strict=True):
        assert [(one.token, one.rank, one.top_tokens) for one in ours] == [
            (one.token, one.rank, one.top_tokens) for one in theirs
        ]
        values = [[value for one in given for value in (one.logprob, *one.top_logprobs)] for given in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def biased(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=0.6, logit_bias=dict.fromkeys(range(10, 14), 9.0), logprobs=1)


def test_an_error_behind_a_wrong_guess_is_no_error() -> None:
    request = Request("r", [1, 2], 2, 9, sampling=GREEDY)
    slice_ = Slice(request, 1, 3, True, 0, drafts=(5, 6))
    broken, drawn = SliceOutput(error="numerical"), SliceOutput
    assert verified([slice_], [drawn([5]), drawn([7]), broken]) == [drawn([5, 7])]
    assert verified([slice_], [drawn([4]), broken, broken]) == [drawn([4])]
    # The right guess is kept. The next step draws at the failing position again.
    assert verified([slice_], [drawn([5]), broken, broken]) == [drawn([5])]
    assert verified([slice_], [broken, drawn([6]), drawn([7])]) == [broken]


def test_all_layers_with_windows_draw_alike() -> None:
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=5)) for layer in CONFIG.layers)
    model = random_decoder(replace(CONFIG, layers=layers), torch.float32, CPU, deviation=0.3)
    expected, _ = answer(model, requests_of(1), None)
    known = [row.tokens + tokens for row, (tokens, *_) in zip(requests_of(1), expected, strict=True)]
    assert_equal(answer(model, requests_of(1), Speculation(Guesses(1, 0.7, known), 6))[0], expected)
