"""Test which tokens are guessed, and how many of them a step verifies."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.budget import SloBudget
from scheduler.cost import CostModel, StepWork
from scheduler.draft import DraftCandidate, DraftHistory, DraftLimits, choose_counts
from scheduler.drafters import PromptLookup, Speculation
from scheduler.scheduler import Scheduler, StepLimits
from tests.scheduler.drive import Driver, Guesses, expected, request

UNLIMITED = DraftLimits(10**6)


def looked_up(tokens: list[int], shortest: int, longest: int, limit: int) -> list[int]:
    """Compute the guess from its definition. Find the longest suffix that also occurs earlier in the tokens. The guess
    repeats the tokens that follow the last of these earlier occurrences."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1 - size, -1, -1):
            if tokens[place : place + size] == tokens[len(tokens) - size :]:
                following = tokens[place + size :]
                return [following[index % len(following)] for index in range(limit)]
    return []


@given(
    tokens=st.lists(st.integers(0, 3) | st.sampled_from([0xD800, 70_000]), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    limit=st.integers(1, 9),
)
def test_a_lookup_continues_the_longest_earlier_match(tokens: list[int], shortest: int, more: int, limit: int) -> None:
    lookup, one = PromptLookup(shortest, shortest + more), request("r", tokens[:1], 9)
    for token in [*tokens[1:], tokens[0]]:
        assert list(lookup.propose(one, limit)) == looked_up(one.tokens, shortest, shortest + more, limit)
        one.tokens.append(token)


def test_acceptance_follows_the_guesses() -> None:
    history = DraftHistory()
    first = history.acceptance
    for _ in range(100):
        history.guess = (4, 5, 6)
        history.compare([4, 5, 6, 7])
    assert history.acceptance > 0.99
    for _ in range(100):
        history.guess = (4, 5)
        history.compare([7])  # counts even if the step did not verify the guess
    assert history.acceptance < 0.01 < first
    before = history.acceptance
    history.compare([7])
    assert history.acceptance == before, "there was no guess"


COSTS = [
    CostModel(overhead=1.0, per_token=0.2),
    CostModel(overhead=0.1, per_token=0.1, knee_tokens=6, per_context=0.001, per_decode=0.05),
    CostModel(per_token=1.0),
]


@pytest.mark.parametrize("cost", COSTS)
@given(
    acceptances=st.lists(st.sampled_from([0.1, 0.4, 0.7, 0.95]), min_size=1, max_size=3),
    chunk=st.sampled_from([0, 20]),
    pass_s=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_the_chosen_counts_yield_the_most_tokens_per_second(
    cost: CostModel, acceptances: list[float], chunk: int, pass_s: float
) -> None:
    candidates = [DraftCandidate(acceptance, 4, 10) for acceptance in acceptances]

    def rate(counts: tuple[int, ...]) -> float:
        work = StepWork(1, chunk, 5 * chunk, len(candidates), 10 * len(candidates))
        gain = 0.0
        for one, count in zip(candidates, counts, strict=True):
            gain += sum(one.acceptance**number for number in range(1, count + 1))
            for number in range(count):
                work.add_draft(one.context + number + 1)
        return (len(candidates) + gain) / (cost.seconds(work) + max(counts) * pass_s)

    work = StepWork(1, chunk, 5 * chunk, len(candidates), 10 * len(candidates))
    chosen = tuple(choose_counts(candidates, work, cost, UNLIMITED, pass_s))
    best = max(product(range(5), repeat=len(candidates)), key=rate)
    assert rate(chosen) >= 0.999 * rate(best), (chosen, best)


def test_no_more_is_verified_than_the_step_may_have() -> None:
    work, sure = StepWork(num_decodes=2, decode_context=20), [DraftCandidate(0.9, 8, 10)] * 2
    assert choose_counts(sure, work, None, UNLIMITED) == [8, 8]
    assert sum(choose_counts(sure, work, None, DraftLimits(7))) == 5
    assert choose_counts(sure, work, None, DraftLimits(100, 1.0)) == [0, 0], "without a model, the time is unknown"
    cost = CostModel(overhead=1.0, per_token=0.1)
    assert sum(choose_counts(sure, work, cost, DraftLimits(100, 1.55))) == 3


def test_the_cost_of_guesses_is_explored_within_the_limits() -> None:
    work, unsure = StepWork(num_decodes=2, decode_context=20), [DraftCandidate(0.1, 8, 10), DraftCandidate(0.2, 8, 10)]
    cost = CostModel(overhead=1.0, per_token=1.0)
    assert choose_counts(unsure, work, cost, UNLIMITED) == [0, 0]
    assert sum(choose_counts(unsure, work, cost, UNLIMITED, explores=True)) == 2
    assert sum(choose_counts(unsure, work, cost, DraftLimits(100, 4.5), explores=True)) == 1
    scheduler = Scheduler(StepLimits(), 100, 4, speculation=Speculation(PromptLookup(1), 4))
    scheduler.cost = cost
    scheduler.add(request("r", [5, 6] * 8, 60))
    Driver(scheduler).finish()
    assert 1 <= scheduler.counters.num_drafts <= 6


def drafting(budget: SloBudget | None = None, num_rows: int = 100) -> Scheduler:
    return Scheduler(StepLimits(), num_rows, 4, budget=budget, speculation=Speculation(Guesses(1), 4))


def test_drafts_keep_a_step_within_its_slo() -> None:
    scheduler = drafting(SloBudget(1.0, 64))
    scheduler.cost = CostModel(overhead=0.6, per_token=0.1, margin=0.1)
    driver = Driver(scheduler)
    for index in range(2):
        scheduler.add(request(f"r{index}", [5, 6, index], 40))
    driver.finish()
    verified = [step for step in driver.steps if step.work.draft_tokens]
    assert verified
    assert all(step.predicted_s <= 1.0 / 1.1 for step in verified)


def test_prompts_get_their_tokens_before_drafts() -> None:
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=8), 100, 4, speculation=Speculation(Guesses(1), 4))
    driver = Driver(scheduler)
    scheduler.add(request("decodes", [5, 6], 60))
    driver.iterate()
    scheduler.add(request("prompt", list(range(3, 45)), 1))
    for _ in range(5):
        driver.iterate()
        assert (driver.steps[-1].work.prefill_tokens, driver.steps[-1].work.draft_tokens) == (7, 0)
    driver.finish()
    assert scheduler.counters.accepted_tokens > 10


def test_a_request_can_refuse_drafts() -> None:
    scheduler = drafting()
    scheduler.add(request("r", [5, 6], 30, speculates=False))
    driver = Driver(scheduler)
    driver.finish()
    assert scheduler.counters.draft_tokens == 0


def test_drafts_stop_where_the_answer_does() -> None:
    scheduler = drafting()
    answer = expected([5, 6], 30)
    stop = answer[17]
    place = answer.index(stop)
    done = request("r", [5, 6], 30, stop_tokens=frozenset([stop]))
    scheduler.add(done)
    Driver(scheduler).finish()
    assert (done.tokens[2:], done.finish) == (answer[: place + 1], "stop")
