import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.counter_rng import GOLDEN, MASK, gumbel, key_of
from engine.runner import row_of
from engine.sampling import (
    CANDIDATES,
    SamplingRow,
    adjust,
    compiled_draw,
    distinct_prompt_ids,
    draw,
    parameters_of,
    restrict,
    sample,
)
from engine.token_masks import TokenMasks
from scheduler.request import Request, Slice
from shared.rpc.messages import SamplingParams, ThinkingBudget, pack_ids
from tests.gpu_less.draws import FILTERS as COMMON

torch.set_num_threads(1)
DRAW = SamplingParams()  # temperature 1 and no filter: vLLM's defaults
GREEDY = SamplingParams(temperature=0.0)


def row(sampling: SamplingParams, position: int = 5, **more: Any) -> SamplingRow:
    return SamplingRow(sampling, **{"tokens": [0] * position, "num_prompt": position, "position": position, **more})


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def drawn(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int | None]:
    return [draw.token for draw in sample(logits, rows)]


def allowed(logits: NDArray[np.float64], sampling: SamplingParams) -> list[int]:
    """Return the tokens that min_p, top_k and top_p keep by definition, if they are applied in this order."""
    scores = logits / sampling.temperature
    likely = np.exp(scores - scores.max())
    left = [int(token) for token in np.argsort(-scores, kind="stable") if likely[token] >= sampling.min_p]
    if sampling.top_k > 0:
        left = left[: sampling.top_k]
    total, mass, kept = sum(likely[left]), 0.0, []
    for token in left:
        if kept and sampling.top_p < 1 and mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += likely[token]
    return sorted(kept)


FILTERS = [*COMMON[1:], SamplingParams(top_k=2500)]


@pytest.mark.parametrize("vocab", [7, 97, CANDIDATES, CANDIDATES + 1, 3000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_filters_leave_exactly_the_defined_tokens(vocab: int, scale: float) -> None:
    logits = random_logits(len(FILTERS), vocab, vocab, scale)
    temperatures = torch.tensor([one.temperature for one in FILTERS])[:, None]
    left = restrict(logits / temperatures, FILTERS).isfinite()
    for index, sampling in enumerate(FILTERS):
        expected = allowed((logits[index] / sampling.temperature).double().numpy(), replace(sampling, temperature=1.0))
        assert left[index].nonzero()[:, 0].tolist() == expected, sampling


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 2.0]])
    assert restrict(logits, [SamplingParams(top_k=1)]).isfinite()[0].tolist() == [False, True, False, False, True]
    assert restrict(logits, [SamplingParams(top_k=3)]).isfinite()[0].tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("sampling", FILTERS)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """This is a chi-square test over 4,000 positions. The seed fixes the noise, so the result is always the same."""
    logits = random_logits(1, 12, seed=3, scale=1.5)[0]
    kept = allowed(logits.double().numpy(), sampling)
    weights = np.exp(logits.double().numpy()[kept] / sampling.temperature)
    count = 4000
    tokens = drawn(logits.expand(count, -1), [row(sampling, position) for position in range(count)])
    assert set(tokens) <= set(kept)
    expected = weights / weights.sum() * count
    observed = np.array([tokens.count(token) for token in kept])
    likely = expected >= 5
    if likely.sum() > 1:
        statistic = float(((observed - expected) ** 2 / expected)[likely].sum())
        degrees = int(likely.sum()) - 1
        assert statistic < degrees + 4 * math.sqrt(2 * degrees)


def test_seeds_positions_and_tokens_draw_independently() -> None:
    """Real requests have neighboring seeds and positions, so the noise of neighbors must be independent."""
    logits = torch.zeros(4096, 4)
    rows = [row(replace(DRAW, seed=seed), position) for seed in range(64) for position in range(64)]
    tokens = np.array(drawn(logits, rows)).reshape(64, 64)
    for pairs in (tokens[:-1] * 4 + tokens[1:], tokens[:, :-1] * 4 + tokens[:, 1:]):
        counts = np.bincount(pairs.ravel(), minlength=16)
        expected = pairs.size / 16
        assert ((counts - expected) ** 2 / expected).sum() < 15 + 4 * math.sqrt(30)


def test_noise_is_splitmix64_over_seed_position_and_token() -> None:
    """Two nodes draw the same token only if they compute the same noise, so the noise is part of the protocol."""

    def mix(value: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ (value >> shift)) * factor & MASK
        return value ^ (value >> 31)

    for seed, position, token in [(0, 0, 0), (1, 2, 3), (2**64 - 1, 10**6, 151_935), (2**63, 1, 2**31 - 1)]:
        key = mix((mix((seed + GOLDEN) & MASK) + position * GOLDEN) & MASK)
        value = mix((key + (token + 1) * GOLDEN) & MASK)
        expected = -math.log(-math.log(((value >> 12) + 0.5) / 2**52))
        found = gumbel(torch.tensor([key_of(seed, position)]), torch.tensor([token])).item()
        assert found == pytest.approx(expected, rel=1e-12)
    assert drawn(torch.zeros(8, 1000), [row(replace(DRAW, seed=7), at) for at in range(8)]) == PINNED


PINNED = [296, 859, 821, 994, 183, 977, 461, 134]
CHOICES = [
    GREEDY,
    DRAW,
    SamplingParams(temperature=0.7, top_p=0.9, seed=11),
    SamplingParams(top_k=4, seed=12, presence_penalty=0.5),
    SamplingParams(min_p=0.05, repetition_penalty=1.3, seed=13),
    SamplingParams(temperature=1.5, frequency_penalty=0.7, logit_bias={3: 5.0}),
]


@given(st.permutations(range(12)), st.integers(1, 12))
@settings(max_examples=30)
def test_a_draw_does_not_depend_on_other_rows(order: list[int], size: int) -> None:
    logits = random_logits(12, 50)
    rows = [
        SamplingRow(replace(CHOICES[index % 6], logprobs=index % 3), [index, 4, 4, index, 9, 9], 2, 4 + index % 3)
        for index in range(12)
    ]
    together = sample(logits, rows)
    assert sample(logits[order[:size]], [rows[index] for index in order[:size]]) == [together[i] for i in order[:size]]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-300, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(20, 30)
    rows = [row(SamplingParams(temperature=temperature, seed=seed)) for seed in range(20)]
    assert drawn(logits, rows) == logits.argmax(dim=1).tolist()


def test_penalties_and_bias_are_those_of_vllm() -> None:
    tokens, num_prompt = [2, 3, 3, 5, 5, 5, 7, 9], 3  # the last token is drawn at position 7 and must not count
    sampling = SamplingParams(
        repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=-0.3, logit_bias={1: 2.5, 5: -1.0, 999: 1.0}
    )
    one = SamplingRow(sampling, tokens, num_prompt, 7, frozenset({4, 888}), min_tokens=5)
    logits = random_logits(2, 10)
    before = logits.clone()
    found = adjust(logits, [one, row(GREEDY)])
    expected = logits[0].tolist()
    expected[1] += 2.5
    expected[5] -= 1.0
    expected[4] = -math.inf
    for token in (2, 3, 5, 7):
        expected[token] *= 1 / 1.7 if expected[token] > 0 else 1.7
    for token, count in {3: 0, 5: 3, 7: 1}.items():
        expected[token] -= 0.4 * (count > 0) - 0.3 * count
    assert torch.allclose(found[0], torch.tensor(expected), atol=1e-5)
    assert torch.equal(found[1], logits[1])
    assert torch.equal(logits, before)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 30), st.integers(0, 30), st.data())
def test_penalties_have_their_definition(tokens: list[int], cut: int, end: int, data: st.DataObject) -> None:
    num_prompt, position = sorted((min(cut, len(tokens)), min(end, len(tokens))))
    repetition = data.draw(st.sampled_from([1.0, 1.3, 0.5]))
    presence, frequency = data.draw(st.tuples(*[st.sampled_from([0.0, 0.5, -0.25])] * 2))
    sampling = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    one = SamplingRow(sampling, tokens, num_prompt, position)
    known = replace(one, prompt_ids=distinct_prompt_ids(sampling, tokens[:num_prompt]))
    logits = random_logits(3, 10)
    expected = logits[0].tolist()
    for token in {*tokens[:position]}:
        expected[token] *= 1 / repetition if expected[token] > 0 else repetition
        count = tokens[num_prompt:position].count(token)
        expected[token] -= presence * (count > 0) + frequency * count
    for first, second in ((one, known), (known, one)):
        found = adjust(logits, [first, row(GREEDY), second])
        assert torch.allclose(found[0], torch.tensor(expected), atol=1e-5)
        assert torch.equal(found[1], logits[1])
    alone = [adjust(logits[:1], [each]) for each in (one, known)]
    assert torch.equal(*alone)


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 5.0, 1.0]])
    one = SamplingRow(GREEDY, [0] * 9, 4, 6, frozenset({1, 2}), min_tokens=3)
    assert drawn(logits, [one]) == [3]
    assert drawn(logits, [replace(one, position=7)]) == [1]


def test_only_allowed_tokens_are_drawn() -> None:
    logits = random_logits(400, 20)
    samplings = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(logit_bias={3: 100.0}, top_p=0.9)]
    for sampling in samplings:
        rows = [row(replace(sampling, allowed_tokens=pack_ids([2, 7, 19])), position) for position in range(400)]
        found = set(drawn(logits, rows))
        assert found == {2, 7, 19}
    masked = logits.clone()
    masked[:, [token for token in range(20) if token not in {2, 7, 19}]] = -math.inf
    one = replace(samplings[1], allowed_tokens=pack_ids([2, 7, 19]))
    plain = draw(logits, masked, [row(samplings[1], position) for position in range(400)])
    assert drawn(logits, [row(one, position) for position in range(400)]) == plain


START, CLOSE, CALL = 5, 6, 7  # CLOSE and CALL end the reasoning


@pytest.mark.parametrize(
    ("begin", "num_tokens", "generated", "is_forced"),
    [
        (-1, 2, [START, 0], False),
        (-1, 2, [START, 0, 0], True),
        (-1, 2, [0, START, 0, 0], True),
        (-1, 2, [0, 0, 0, 0, START, 0, 0], False),  # reasoning only starts at the beginning of an answer
        (-1, 2, [START, CLOSE, 0], False),
        (-1, 2, [START, 0, CALL], False),
        (-1, 2, [START, *[0] * 17], True),  # the grammar forbade the end until now
        (-1, 2, [START, *[0] * 18], False),
        (-1, 0, [], False),
        (-1, 0, [START], True),
        (2, 3, [], False),
        (2, 3, [0], True),
        (2, 1, [], True),  # the reasoning in the prompt exceeds the budget
        (4, 1, [0], True),
        (4, 1, [0, CLOSE], False),
        (4, 1, [START], False),
        (4, 1, [START, 0], True),
    ],
)
def test_reasoning_ends_when_its_budget_is_used_up(
    begin: int, num_tokens: int, generated: list[int], is_forced: bool
) -> None:
    thinking = ThinkingBudget(num_tokens, START, pack_ids([CLOSE, CALL]), begin)
    tokens = [0, 0, 0, 0, *generated]
    for sampling in (GREEDY, DRAW, replace(DRAW, allowed_tokens=pack_ids([0]), bad_words=[pack_ids([CLOSE])])):
        # The token at the position is not read.
        one = SamplingRow(replace(sampling, thinking=thinking), [*tokens, CLOSE], 4, len(tokens))
        assert one.forced_token == (CLOSE if is_forced else None)
        logits = torch.tensor([[9.0, 0, 0, 0, 0, 0, -9, 0]] * 2)
        assert drawn(logits, [one, row(replace(GREEDY, seed=1))]) == [CLOSE if is_forced else 0, 0]


def test_the_last_token_of_a_bad_word_is_banned_after_its_others() -> None:
    sampling = replace(GREEDY, bad_words=[pack_ids([5]), pack_ids([1, 2]), pack_ids([3, 4, 6])])
    logits = torch.zeros(1, 8)
    for tokens, num_prompt, banned in (
        ([0, 0], 0, {5}),
        ([0, 1], 0, {5, 2}),
        ([0, 1], 2, {5}),  # the prompt does not count
        ([3, 4], 0, {5, 6}),
        ([3, 4], 1, {5}),
        ([4, 3], 0, {5}),
        ([], 0, {5}),
    ):
        one = SamplingRow(sampling, tokens, num_prompt, len(tokens))
        assert set(adjust(logits, [one])[0].isneginf().nonzero()[:, 0].tolist()) == banned


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3, 20)
    sampling = SamplingParams(temperature=0.0, logit_bias={4: 100.0}, logprobs=3)
    draws = sample(logits, [row(sampling), row(GREEDY), row(replace(GREEDY, logprobs=0))])
    raw = logits.log_softmax(dim=1)
    ranked = raw[0].argsort(descending=True).tolist()
    first = draws[0].logprobs
    assert first is not None
    assert (first.token, first.rank) == (4, ranked.index(4) + 1)
    assert first.logprob == pytest.approx(raw[0, 4].item())
    assert first.top_tokens == ranked[:3]
    assert first.top_logprobs == pytest.approx([raw[0, token].item() for token in ranked[:3]])
    assert draws[1].logprobs is None
    last = draws[2].logprobs
    assert last is not None
    assert (last.rank, last.top_tokens, last.top_logprobs) == (1, [], [])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sampling", [GREEDY, DRAW, SamplingParams(top_p=0.5), SamplingParams(top_k=2, repetition_penalty=1.2)]
)
def test_a_broken_row_fails_alone(bad: float, sampling: SamplingParams) -> None:
    logits = random_logits(4, 30)
    rows = [row(replace(sampling, seed=seed, logprobs=2)) for seed in range(4)]
    good = sample(logits, rows)
    logits[2, 17] = bad
    found = sample(logits, rows)
    assert (found[2].token, found[2].logprobs, found[2].error) == (None, None, "numerical")
    assert [found[index] for index in (0, 1, 3)] == [good[index] for index in (0, 1, 3)]


@pytest.mark.parametrize("sampling", [GREEDY, DRAW, SamplingParams(top_p=0.5, min_p=0.1)])
def test_a_row_with_every_token_banned_fails_alone(sampling: SamplingParams) -> None:
    logits = random_logits(3, 6)
    banned = SamplingRow(replace(sampling, logprobs=1), [1, 2], 2, 2, frozenset(range(6)), min_tokens=1)
    draws = sample(logits, [row(sampling), banned, row(sampling)])
    assert (draws[1].token, draws[1].logprobs, draws[1].error) == (None, None, "no_token")
    assert [draw.token for draw in (draws[0], draws[2])] == drawn(logits[[0, 2]], [row(sampling), row(sampling)])


def test_parameters_that_together_allow_no_token_fail_alone() -> None:
    both = replace(GREEDY, allowed_tokens=pack_ids([1]), bad_words=[pack_ids([1])])
    assert [one.error for one in sample(random_logits(2, 6), [row(both), row(GREEDY)])] == ["no_token", ""]


def test_no_rows_give_no_draws() -> None:
    assert sample(torch.empty(0, 9), []) == []


def test_draws_from_a_large_vocabulary_pass_the_filters() -> None:
    """The logits are so flat that top_p keeps more than CANDIDATES tokens. The whole row must then be sorted."""
    random = Random(5)
    logits = random_logits(24, 8 * CANDIDATES, scale=0.3)
    rows = [
        row(SamplingParams(top_p=random.choice([0.3, 0.95]), top_k=random.choice([0, 50, 5000]))) for _ in range(24)
    ]
    for index, token in enumerate(drawn(logits, rows)):
        assert token in allowed(logits[index].double().numpy(), rows[index].sampling)


def rows_of(sampling: SamplingParams, count: int) -> list[SamplingRow]:
    return [row(replace(sampling, seed=77 * seed + 1), 5 + seed) for seed in range(count)]


@pytest.mark.parametrize("vocab", [1, 7, 33, CANDIDATES - 1, CANDIDATES + 1, 3000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 5.0])
def test_the_compiled_draw_equals_the_reference(vocab: int, scale: float) -> None:
    compiled = compiled_draw()
    if compiled is None:
        pytest.skip("needs numba")
    logits = random_logits(40, vocab, vocab, scale)
    banned = logits.clone()
    banned[::3, vocab // 2] = -math.inf
    words = np.random.default_rng(vocab).integers(-(2**31), 2**31, (20, -(-vocab // 32)), np.int32)
    words[::4] &= words[1::4] & words[2::4]
    words[0], words[1], words[2, :-1] = 0, -1, 0
    masks = TokenMasks(list(range(0, 40, 2)), words)
    spoilt = logits.clone()
    spoilt[7, vocab - 1], spoilt[8, 0], spoilt[9, vocab // 2] = math.nan, math.inf, -math.inf
    for sampling in [*FILTERS, GREEDY, SamplingParams(top_k=900, top_p=0.8), SamplingParams(top_k=60, top_p=0.99)]:
        rows = rows_of(sampling, 40)
        parameters = torch.from_numpy(parameters_of(rows))
        for raw, adjusted in ((logits, logits), (logits, banned), (spoilt, spoilt), (logits[:, :vocab:2],) * 2):
            assert compiled(raw, adjusted, parameters, None) == draw(raw, adjusted, rows), sampling
            masked = adjusted.clone()
            masks.apply_(masked)
            assert compiled(raw, adjusted, parameters, masks) == draw(raw, masked, rows), sampling


@pytest.mark.timeout(60, method="thread")  # compiled code does not handle signals
@pytest.mark.parametrize("low", [2.0, math.inf])
def test_scores_that_overflow_are_drawn_like_the_reference(low: float) -> None:
    """A client may send a repetition penalty near 0. Such a penalty makes scores infinite, and their weights NaN."""
    compiled = compiled_draw()
    if compiled is None:
        pytest.skip("needs numba")
    logits = random_logits(1, 9000)  # enough logits for the kernel to use several threads
    logits[0, 5] = 3.0
    for sampling in (
        SamplingParams(min_p=1e-300),
        SamplingParams(min_p=1e-300, top_p=0.5),
        SamplingParams(top_k=3, top_p=0.5),
        DRAW,
    ):
        rows = [SamplingRow(replace(sampling, repetition_penalty=1e-300), [5, 7, 9], 3, 3)]
        adjusted = adjust(logits, rows)
        assert adjusted[0, 5] == math.inf
        adjusted[0] = torch.where(adjusted[0] > low, math.inf, adjusted[0])
        assert compiled(logits, adjusted, torch.from_numpy(parameters_of(rows)), None) == draw(logits, adjusted, rows)


def test_threads_share_the_rows_of_a_compiled_draw() -> None:
    logits, rows = random_logits(64, 2000), rows_of(SamplingParams(top_p=0.9), 64)
    alone = drawn(logits, rows)
    torch.set_num_threads(2)
    try:
        assert drawn(logits, rows) == alone
    finally:
        torch.set_num_threads(1)


def test_top_p_applies_within_a_large_top_k() -> None:
    logits = torch.zeros(1, 2 * CANDIDATES + 100)
    logits[0] -= torch.arange(logits.shape[1]) * 1e-4  # nearly equal logits, but all different
    sampling = SamplingParams(top_k=2 * CANDIDATES, top_p=0.5)
    left = restrict(logits, [sampling]).isfinite()[0].sum().item()
    assert left == len(allowed(logits[0].double().numpy(), sampling))


def test_the_tokens_of_a_prompt_are_sorted_once_for_all_draws() -> None:
    request = Request("r", [7, 3, 3], 3, max_tokens=4, sampling=SamplingParams(repetition_penalty=1.2))
    first, second = (row_of(Slice(request, start, 1, samples=True, epoch=0)) for start in (2, 3))
    assert first.prompt_ids is not None
    assert first.prompt_ids.tolist() == [3, 7]
    assert second.prompt_ids is first.prompt_ids
