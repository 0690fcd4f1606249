"""Test the statistics: intervals cover the true value as often as stated, random differences are rarely reported, and
the warm-up and overload of a run are detected from its queue."""

import numpy as np
import pytest

from compare.load.outcome import Outcome
from compare.stats.measures import is_growing, measured_window, mser, outstanding
from compare.stats.statistics import TOO_CLOSE, compare, compare_arms, holm, student, within

DRAWS = 400


@pytest.mark.parametrize("count", [3, 6, 20])
def test_a_95_percent_interval_covers_the_truth_about_95_times_in_100(count: int) -> None:
    random = np.random.default_rng(7)
    covered = 0
    for _ in range(DRAWS):
        found = student(list(random.normal(50.0, 4.0, count)))
        covered += found.low <= 50.0 <= found.high
    assert 0.90 <= covered / DRAWS <= 0.99


@pytest.mark.parametrize("truth", [0.5, 0.9, 0.97])
def test_the_interval_of_a_share_covers_the_truth_and_ends_at_its_bounds(truth: float) -> None:
    """For a share of 97 %, Student's interval ends above 100 % in most sessions, and covers the truth too rarely."""
    random = np.random.default_rng(7)
    covered = {within: 0, student: 0}
    for _ in range(DRAWS):
        shares = list(random.binomial(80, random.beta(30 * truth, 30 * (1 - truth), 6)) / 80)
        found = within(0.0, 1.0, shares)
        assert 0 <= found.low <= found.mean <= found.high <= 1
        covered[within] += found.low <= truth <= found.high
        covered[student] += student(shares).low <= truth <= student(shares).high
    assert 0.91 <= covered[within] / DRAWS <= 0.99
    assert truth < 0.95 or covered[student] / DRAWS < 0.9


def test_intervals_at_and_far_from_their_bounds() -> None:
    two = within(-1.0, 1.0, [0.02, 0.38])  # Student's interval would be -2.1 to 2.5
    assert (two.low, two.high) == pytest.approx((-0.885, 0.947), abs=1e-3)
    assert within(0.0, np.inf, [500.0, 900.0]).low > 0
    assert within(0.0, 1.0, [1.0] * 6) == student([1.0] * 6)
    narrow = [0.5, 0.501, 0.499, 0.5]
    assert within(0.0, 1.0, narrow).low == pytest.approx(student(narrow).low, abs=1e-5)


def test_students_interval_of_known_values() -> None:
    found = student([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.low, found.high) == pytest.approx((2.5, 2.5 - 2.05426, 2.5 + 2.05426), abs=1e-4)
    assert student([1.0]).low is None


@pytest.mark.parametrize("num_arms", [2, 6])
def test_equal_arms_are_rarely_called_different(num_arms: int) -> None:
    """Results differ much more between seeds than between arms. Pairing the arms by seed removes this noise, but must
    not cause false differences. A false difference must be as rare with several arms as with two arms."""
    random = np.random.default_rng(11)
    called = 0
    for _ in range(DRAWS):
        seeds = random.normal(100.0, 20.0, 6)
        runs = {str(arm): list(seeds + random.normal(0.0, 8.0, 6)) for arm in range(num_arms)}
        called += any(found.says != TOO_CLOSE for found in compare_arms("ttft_p99_ms", runs, "0"))
    assert called / DRAWS <= 0.07


def test_pairs_by_seed_find_a_difference_that_unpaired_runs_would_hide() -> None:
    random = np.random.default_rng(5)
    seeds = random.normal(100.0, 30.0, 6)
    ours, theirs = list(seeds * 0.9 + random.normal(0, 1, 6)), list(seeds)
    found = compare("tbt_p99_ms", ("ours", ours), ("theirs", theirs))
    assert found.says == "better"
    assert found.percent == pytest.approx(-10, abs=2)
    assert found.percent_low < found.percent < found.percent_high < 0
    assert student(ours).low < student(theirs).mean < student(ours).high


@pytest.mark.parametrize(
    ("metric", "ours", "says"),
    [
        ("ttft_p50_ms", [90.0, 91.0, 89.0, 90.5], "better"),
        ("ttft_p50_ms", [110.0, 111.0, 109.0, 110.5], "worse"),
        ("attainment", [110.0, 111.0, 109.0, 110.5], "better"),
        ("attainment", [90.0, 91.0, 89.0, 90.5], "worse"),
        ("ttft_p50_ms", [102.0, 102.1, 101.9, 102.0], TOO_CLOSE),  # significant, but only 2 %
        ("ttft_p50_ms", [70.0, 140.0, 80.0, 130.0], TOO_CLOSE),  # large, but not significant
        ("ttft_p50_ms", [90.0, 90.0, 90.0, 90.0], TOO_CLOSE),  # no spread, and only 4 pairs
        ("ttft_p50_ms", [100.0, 100.0, 100.0, 100.0], TOO_CLOSE),
    ],
)
def test_a_difference_counts_if_it_is_significant_and_large(metric: str, ours: list[float], says: str) -> None:
    assert compare(metric, ("ours", ours), ("theirs", [100.0] * 4)).says == says


def test_equal_differences_of_a_few_seeds_are_not_certain() -> None:
    """One arm is better by one request of 20 with both seeds. With equal arms, that happens by chance half the time."""
    ours, theirs = [1.0, 0.95], [0.95, 0.90]  # differences that are equal except for rounding
    found = compare("attainment", ("ours", ours), ("theirs", theirs))
    assert (found.says, found.p) == (TOO_CLOSE, 0.5)
    assert compare("attainment", ("ours", [1.0] * 6), ("theirs", [0.95] * 6)).says == "better"
    assert compare("attainment", ("ours", [1.0] * 6), ("theirs", [1.0] * 6)).p == 1.0


@pytest.mark.parametrize(("worse", "count", "says"), [(0.0, 2, "better"), (0.7, 3, "better"), (0.9, 3, TOO_CLOSE)])
def test_equal_differences_are_certain_if_they_are_large(worse: float, count: int, says: str) -> None:
    found = compare("attainment", ("ours", [1.0] * count), ("theirs", [worse] * count))
    assert (found.says, found.low, found.high) == (says, pytest.approx(1 - worse), pytest.approx(1 - worse))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_shares_of_few_requests_of_equal_arms_are_rarely_called_different(count: int) -> None:
    random = np.random.default_rng(3)
    shares = random.binomial(10, 0.9, (DRAWS, 2, count)) / 10
    called = [compare("attainment", ("a", list(a)), ("b", list(b))).says != TOO_CLOSE for a, b in shares]
    assert sum(called) / DRAWS <= 0.07


def test_a_pair_or_a_seed_without_a_figure_decides_nothing() -> None:
    found = compare("ttft_p50_ms", ("ours", [10.0]), ("theirs", [100.0]))
    assert (found.difference, found.low, found.says, found.note) == (-90.0, None, TOO_CLOSE, "one pair of runs")

    found = compare("ttft_p50_ms", ("ours", [10.0, None, 10.0]), ("theirs", [100.0, 101.0, 99.0]))
    note = "1 of 3 pairs of runs lack this figure"
    assert (found.difference, found.says, found.note) == (None, TOO_CLOSE, note)
    with pytest.raises(ValueError, match="2 runs of a and 1 of b are not pairs"):
        compare("ttft_p50_ms", ("a", [1.0, 2.0]), ("b", [1.0]))
    found = compare("tbt_max_ms", ("a", [5.0, 6.0, 5.5]), ("b", [0.0, 0.0, 0.0]))
    assert (found.percent, found.says) == (None, "worse")


def test_holm_multiplies_the_smallest_by_the_count_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


# ---- which part of a run counts ------------------------------------------------------------------------------------


def queue(load: float, count: int, seed: int, rate: float = 10.0) -> list[Outcome]:
    """Return requests of a server that processes one at a time. A `load` over 1 overloads the server."""
    random = np.random.default_rng(seed)
    due = np.cumsum(random.exponential(1 / rate, count))
    outcomes, free = [], 0.0
    for index, (at_s, takes_s) in enumerate(zip(due, random.exponential(load / rate, count), strict=True)):
        free = max(free, at_s) + takes_s
        outcomes.append(Outcome(index, "", float(at_s), ended_s=float(free)))
    return outcomes


def test_outstanding_requests_were_scheduled_and_have_not_ended() -> None:
    outcomes = [Outcome(0, "", 1.0, ended_s=3.0), Outcome(1, "", 2.0, ended_s=None)]
    assert list(outstanding(outcomes, np.array([0.0, 1.0, 2.5, 3.0, 9.0]))) == [0, 1, 2, 1, 1]


def test_mser_cuts_a_beginning_that_differs_from_the_rest() -> None:
    random = np.random.default_rng(1)
    ramp = np.linspace(0, 20, 100)
    series = np.concatenate([ramp, np.full(400, 20.0)]) + random.normal(0, 1, 500)
    assert 70 <= mser(series) <= 130
    assert mser(random.normal(20, 1, 500)) <= 50
    assert mser(np.array([1.0, 2.0])) == 0
    assert mser(np.linspace(0, 100, 500)) <= 250


@pytest.mark.parametrize(
    ("load", "low", "high"), [(0.5, 0.0, 0.02), (0.7, 0.0, 0.1), (1.5, 0.95, 1.0), (2.0, 0.99, 1.0)]
)
def test_a_run_is_overloaded_if_its_queue_keeps_growing(load: float, low: float, high: float) -> None:
    share = np.mean([measured_window(queue(load, 600, seed))[1] for seed in range(100)])
    assert low <= share <= high


def test_the_window_ends_with_the_last_arrival_and_not_with_the_drain() -> None:
    outcomes = queue(0.5, 300, 1)
    (first_s, last_s), _ = measured_window(outcomes)
    assert last_s == outcomes[-1].scheduled_s < max(outcome.ended_s for outcome in outcomes)
    assert 0 <= first_s <= last_s / 2 + 1
    assert measured_window([Outcome(0, "", 2.0)]) == ((2.0, 2.0), False)
    assert measured_window([Outcome(index, "", index / 10) for index in range(200)])[1], "no request ends"


def test_the_window_has_half_of_the_requests_even_if_most_arrive_early() -> None:
    """Without this minimum, the window could have only a few requests if nearly all arrived in the first half."""
    due = [*np.linspace(0.0, 4.0, 16), 6.0, 7.0, 8.0, 10.0]
    outcomes = [Outcome(index, "", float(at_s), ended_s=float(at_s) + 3 * (at_s < 5)) for index, at_s in enumerate(due)]
    (begin_s, _), _ = measured_window(outcomes)
    assert sum(at_s >= begin_s for at_s in due) >= 10


def test_requests_that_time_out_count_as_overload() -> None:
    """At twice the capacity, requests time out after 2 s, so the number of requests at the server stays constant."""
    outcomes = queue(2.0, 300, 1)
    for outcome in outcomes:
        if outcome.ended_s - outcome.scheduled_s > 2:
            outcome.ended_s, outcome.error = outcome.scheduled_s + 2, "timeout"
    assert sum(outcome.error == "timeout" for outcome in outcomes) > 150
    assert measured_window(outcomes)[1]
    steady = queue(0.5, 300, 1)
    for outcome in steady[::100]:  # three requests hang, but the server is not overloaded
        outcome.ended_s, outcome.error = outcome.scheduled_s + 2, "timeout"
    assert not measured_window(steady)[1]


def test_noise_and_constants_do_not_grow() -> None:
    assert not is_growing(np.full(300, 7.0))
    assert not is_growing(np.arange(5.0))
    assert not is_growing(np.linspace(100, 101, 300))  # significant, but too small
