from dataclasses import replace

from compare.statistics import TOO_CLOSE, compare
from compare.verdict import (
    ATTAINMENT,
    CAPACITY,
    Standing,
    cause,
    clear_winner,
    flips,
    held_to_itself,
    sentence,
    standing,
)

GOOD = [0.95, 0.96, 0.94, 0.95, 0.96, 0.94]
FAIR = [0.85, 0.87, 0.84, 0.86, 0.85, 0.84]
POOR = [0.41, 0.45, 0.40, 0.42, 0.46, 0.43]


def found(**runs: list[float | None]) -> Standing:
    result = standing(ATTAINMENT, runs)
    assert result is not None
    return result


def test_the_best_arm_leads_the_others_by_an_interval():
    told, interval = sentence("2 devices", found(fair=FAIR, good=GOOD, poor=POOR))
    assert told.startswith("2 devices: good 95.0 % leads fair 85.2 % (+9.8 points [")
    assert "poor 42.8 % (+52.2 points [" in told
    assert told.endswith("6 paired runs")
    assert interval is not None
    assert interval.startswith("+9.8 points [+")


def test_arms_that_do_not_differ_are_too_close_to_call():
    told, _ = sentence("x", found(a=GOOD, b=[value + 0.001 for value in reversed(GOOD)], poor=POOR))
    assert TOO_CLOSE in told
    assert "behind: poor 42.8 %" in told
    assert clear_winner(found(a=GOOD, b=GOOD)) is None


def test_there_is_no_verdict_without_two_arms_or_without_pairs():
    assert standing(ATTAINMENT, {"a": GOOD, "b": []}) is None
    assert standing(ATTAINMENT, {"a": GOOD, "b": [*GOOD[:5], None]}) is None
    assert "no verdict" in sentence("x", None)[0]
    told, interval = sentence("x", found(a=[0.9], b=[0.5]))
    assert "no verdict from one pair" in told
    assert interval is None


def test_the_cause_is_the_most_common_of_the_arm_that_is_furthest_behind():
    causes = {"poor": {"TBT: behind prompt chunks": 71, "TTFT: prefill queue": 29}, "good": {"failed": 1}}
    assert cause(found(good=GOOD, poor=POOR), causes) == "71% of the 100 misses of poor are TBT: behind prompt chunks"


def test_nothing_is_blamed_where_nobody_is_behind():
    assert cause(found(a=GOOD, b=GOOD), {"a": {"failed": 3}}) is None
    everyone_perfect = cause(found(a=[1.0] * 6, b=[1.0] * 6), {})
    assert everyone_perfect is not None
    assert "tighter SLO" in everyone_perfect


def test_flips_are_where_another_arm_wins():
    def winner_at(ttft_ms: float, tbt_ms: float) -> str | None:
        return "colocated" if tbt_ms >= 90 or ttft_ms < 100 else "disaggregated"

    told = flips(winner_at, ttft_ms=450, tbt_ms=40)
    assert told == [
        "colocated wins if the TBT SLO is at least 95.1 ms",
        "colocated wins if the TTFT SLO is at most 94.6 ms",
    ]


def test_a_verdict_that_does_not_flip_says_where_it_was_looked():
    told = flips(lambda *_: "a", 400, 40)
    assert told == ["no other arm wins with a TBT SLO of 5 to 320 ms or a TTFT SLO of 50 to 3.2e+03 ms"]


def test_what_is_too_close_here_may_be_clear_elsewhere():
    told = flips(lambda _, tbt_ms: "a" if tbt_ms < 20 else None, 400, 40)
    assert told == ["a wins if the TBT SLO is at most 16.8 ms"]


def test_a_control_without_a_difference_says_so():
    _, says = held_to_itself("copy", "a", {"attainment": {"copy": GOOD, "a": list(reversed(GOOD))}})
    assert says == "no difference"


def test_a_control_with_a_difference_names_the_metric():
    found_, says = held_to_itself(
        "copy", "a", {"attainment": {"copy": FAIR, "a": GOOD}, "ttft_p50_ms": {"copy": GOOD, "a": GOOD}}
    )
    assert says == "a difference in attainment"
    assert [one.metric for one in found_] == ["attainment", "ttft_p50_ms"]


def test_a_control_is_corrected_for_the_number_of_metrics():
    """One of many metrics may differ by chance."""
    marginal = {"copy": [1.1, 1.3, 1.2, 1.3, 1.25, 1.5], "a": [1.0, 1.0, 1.1, 1.1, 1.2, 1.0]}
    alone = compare("ttft_p50_ms", ("copy", marginal["copy"]), ("a", marginal["a"]))
    assert alone.says != TOO_CLOSE
    figures = {"ttft_p50_ms": marginal} | {f"metric_{number}": {"copy": GOOD, "a": GOOD} for number in range(9)}
    assert held_to_itself("copy", "a", figures)[1] == "no difference"


def test_a_capacity_is_told_in_requests_per_second():
    result = standing(CAPACITY, {"a": [10.0, 11.0, 10.5], "b": [5.0, 5.5, 5.2]})
    assert result is not None
    assert "a 10.5 req/s leads b 5.2 req/s (+5.3 req/s [" in sentence("x", result)[0]
    assert cause(replace(result, others=()), {}) is None
