from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from compare.arms import parse_arms
from compare.stats.verdict import (
    ATTAINMENT,
    CAPACITY,
    RankAt,
    Ranking,
    compare_control,
    figures_of,
    flips,
    latency_differences,
    leading_cause,
    rank,
    sentence,
)

GOOD = [0.95, 0.96, 0.94, 0.95, 0.96, 0.94]
FAIR = [0.85, 0.87, 0.84, 0.86, 0.85, 0.84]
POOR = [0.41, 0.45, 0.40, 0.42, 0.46, 0.43]


def found(**runs: list[float | None]) -> Ranking:
    result = rank(ATTAINMENT, runs)
    assert result is not None
    return result


ARMS = parse_arms(["colocated:2", "disaggregated:1p1d", "colocated:2@prefill_first"])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([FAIR, GOOD], "Disaggregate: 95.0 % instead of 85.2 % of requests met the SLO (95 % interval: 9.0 to 10.6 points)."),
        ([GOOD, FAIR], "Do not disaggregate: 95.0 % instead of 85.2 % of requests met the SLO (95 % interval: 9.0 to 10.6 points)."),
        ([POOR, GOOD, FAIR], "Disaggregate: 95.0 % instead of 42.8 % of requests met the SLO, compared with colocated:2 ("),
        ([FAIR, POOR, GOOD], "Use colocated:2@prefill_first: 95.0 % instead of 85.2 % of requests met the SLO, compared"),
        ([GOOD, POOR, FAIR], "Use colocated:2: 95.0 % instead of 85.2 % of requests met the SLO, compared with colocated:2@p"),
        ([GOOD, [0.949, *GOOD[1:]], POOR], "Too close to call: 95.0 % (colocated:2) and 95.0 % (disaggregated:1p1d) of requests met"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_plain_sentence(rows: list[list[float]], expected: str):
    ranking = found(**{arm.name: row for arm, row in zip(ARMS, rows, strict=False)})
    text = sentence(ranking, ARMS[: len(rows)])
    assert text.startswith(expected), text
    assert text.endswith(".")
    assert figures_of(ranking).endswith("; 6 paired runs")


def test_there_is_no_ranking_without_two_arms():
    assert rank(ATTAINMENT, {"a": GOOD, "b": []}) is None
    assert rank(ATTAINMENT, {"a": GOOD, "b": [*GOOD[:5], None]}) is None
    assert found(a=GOOD, b=GOOD).winner is None


def test_the_cause_is_the_most_common_cause_of_the_last_arm():
    causes = {"poor": {"TBT: behind prompt chunks": 71, "TTFT: prefill queue": 29}, "good": {"failed": 1}}
    text = leading_cause(found(good=GOOD, poor=POOR), causes)
    assert text == "71% of the 100 misses of poor are TBT: behind prompt chunks"


def test_there_is_no_cause_if_no_arm_is_behind():
    assert leading_cause(found(a=GOOD, b=GOOD), {"a": {"failed": 3}}) is None
    assert "tighter SLO" in str(leading_cause(found(a=[1.0] * 6, b=[1.0] * 6), {}))


def ahead(winner: str | None, t: float = 20.0) -> Ranking:
    """Return a ranking of two arms in which the winner leads by `t` standard errors."""
    spread = [-0.03, 0.03, -0.03, 0.03, -0.03, 0.03]
    lead = 0.0 if winner is None else t * 0.01342  # 0.01342 is the standard error of `spread`
    other = {"a": "b", "b": "a"}[winner or "a"]
    return found(**{winner or "a": [0.5 + lead + each for each in spread], other: [0.5] * 6})


def mixed(ttft_ms: float, tbt_ms: float) -> Ranking:
    return ahead("b" if tbt_ms >= 90 or 100 < ttft_ms < 200 else "a")


@pytest.mark.parametrize(
    ("rank_at", "flips_at"),
    [
        (mixed, ["b wins with a TBT SLO of 113 to 320 ms", "b wins with a TTFT SLO of 112 to 159 ms"]),
        (
            lambda _, tbt_ms: ahead("b" if 110 < tbt_ms < 115 else "a"),  # b wins at only one SLO, which is not a range
            ["no other arm wins clearly with a TBT SLO of 5 to 320 ms or a TTFT SLO of 56.2 to 3,600 ms"],
        ),
        (
            lambda _, tbt_ms: ahead("b" if tbt_ms > 90 else None, 3.0),  # p = 0.03 is not significant among 24 SLOs
            ["no arm wins clearly with a TBT SLO of 5 to 320 ms or a TTFT SLO of 56.2 to 3,600 ms"],
        ),
        (lambda _, tbt_ms: ahead("a" if tbt_ms < 20 else None), ["a wins with a TBT SLO of 5 to 14.1 ms"]),
    ],
)
def test_flips_are_ranges_of_slos_in_which_another_arm_wins(rank_at: RankAt, flips_at: list[str]):
    assert flips(rank_at, ttft_ms=450, tbt_ms=40) == flips_at
    assert ahead("b", 3.0).winner == "b"


def attained(rows: dict[str, list[NDArray[np.float64]]], ttft_ms: float, tbt_ms: float) -> Ranking | None:
    """Return the ranking under an SLO. `rows` has the latencies (TTFT, TBT) by arm and seed."""
    shares = {
        arm: [float((row <= (ttft_ms, tbt_ms)).all(axis=1).mean()) for row in seeds] for arm, seeds in rows.items()
    }
    return rank(ATTAINMENT, shares)


def latencies(random: np.random.Generator, factors: tuple[float, float]) -> list[NDArray[np.float64]]:
    """Return 80 TTFTs (near 250 ms) and TBTs (near 25 ms) per seed. They vary more within a seed than between seeds."""
    scale = np.array([250.0, 25.0]) * factors
    return [np.exp(random.normal(0, 0.7, (80, 2)) + random.normal(0, 0.15, 2)) * scale for _ in range(6)]


def test_two_equal_arms_hardly_ever_flip():
    """Without the correction for the number of SLOs, four of ten reports would show a false flip."""
    random, claimed, draws = np.random.default_rng(5), 0, 60
    for _ in range(draws):
        rows = {arm: latencies(random, (1.0, 1.0)) for arm in "ab"}
        claimed += not flips(partial(attained, rows), 450, 40)[0].startswith("no ")
    assert claimed / draws <= 0.05


def test_arms_that_trade_one_latency_for_the_other_do_flip():
    random = np.random.default_rng(5)
    rows = {"calm": latencies(random, (1.6, 0.6)), "quick": latencies(random, (0.6, 1.6))}
    text = flips(partial(attained, rows), 450, 40)
    assert any(line.startswith("quick wins with a T") for line in text)
    assert any(line.startswith("calm wins with a T") for line in text)


def test_the_best_of_several_arms_is_corrected_for_all_pairs():
    """Without the correction, the best of five equal arms would often lead the worst significantly by chance."""
    random, called, draws = np.random.default_rng(3), 0, 120
    for _ in range(draws):
        result = rank(ATTAINMENT, {arm: list(random.normal(0.5, 0.05, 6)) for arm in "abcde"})
        assert result is not None
        called += bool(result.beaten)
    assert called / draws <= 0.07


# ---- where attainment does not decide ------------------------------------------------------------------------------

FAST = [30.0, 31.0, 29.0, 30.5, 30.0, 29.5]
SLOW = [43.0, 45.0, 44.0, 43.5, 44.0, 42.5]


def test_arms_that_keep_the_slo_are_compared_by_their_latencies():
    figures = {
        "tbt_p99_ms": {"a": SLOW, "b": FAST},
        "ttft_p50_ms": {"a": FAST, "b": SLOW},
        "e2e_p50_ms": {"a": FAST, "b": FAST},
    }
    text = str(latency_differences(found(a=[1.0] * 6, b=[1.0] * 6), figures))
    assert text.startswith("Both keep the SLO; b has 31 % lower TBT p99 [-3")
    assert "; a has 31 % lower TTFT p50 [-3" in text
    assert "E2E" not in text


MARGINAL = {"a": [1.0, 1.0, 1.1, 1.1, 1.2, 1.0], "b": [1.1, 1.3, 1.2, 1.3, 1.25, 1.5]}


def test_latencies_and_the_control_are_corrected_for_the_number_of_metrics():
    """The difference is significant if one metric is compared, but not if five or more metrics are compared."""
    perfect, even = found(a=[1.0] * 6, b=[1.0] * 6), {"a": FAST, "b": FAST[::-1]}
    rest = dict.fromkeys(["ttft_p50_ms", "ttft_p99_ms", "tbt_p50_ms", "e2e_p50_ms"], even)
    assert "lower TBT p99" in str(latency_differences(perfect, {"tbt_p99_ms": MARGINAL}))
    text = latency_differences(perfect, {"tbt_p99_ms": MARGINAL} | rest)
    assert text == "Both keep the SLO; no latency differs clearly"
    assert compare_control("b", "a", {"tbt_p99_ms": MARGINAL})[1] == "a difference in tbt_p99_ms"
    assert compare_control("b", "a", {"tbt_p99_ms": MARGINAL} | rest | {"tpot_p50_ms": even})[1] == "no difference"


def test_latencies_name_both_arms_of_several_and_leave_out_beaten_arms():
    text = latency_differences(
        found(a=GOOD, b=list(reversed(GOOD)), c=POOR), {"tbt_p99_ms": {"a": SLOW, "b": FAST, "c": [1.0] * 6}}
    )
    assert text is not None
    assert text.startswith("b has 31 % lower TBT p99")
    assert " c " not in text
    perfect = [1.0] * 6
    three = {"tbt_p99_ms": {"a": SLOW, "b": FAST, "c": SLOW}}
    assert str(latency_differences(found(a=perfect, b=perfect, c=perfect), three)).endswith("] than a")


def test_latencies_are_left_out_if_attainment_decides_or_runs_were_overloaded():
    figures = {"tbt_p99_ms": {"a": SLOW, "b": FAST}}
    assert latency_differences(found(a=GOOD, b=POOR), figures) is None
    assert latency_differences(found(a=GOOD, b=GOOD), {"tbt_p99_ms": {"a": [None] * 6, "b": FAST}}) is None


def test_a_control_with_a_difference_names_the_metric():
    figures = {"attainment": {"copy": FAIR, "a": GOOD}, "ttft_p50_ms": {"copy": GOOD, "a": GOOD}}
    comparisons, says = compare_control("copy", "a", figures)
    assert says == "a difference in attainment"
    assert [one.metric for one in comparisons] == ["attainment", "ttft_p50_ms"]


def test_a_capacity_is_in_requests_per_second():
    result = rank(CAPACITY, {"a": [10.0, 11.0, 10.5], "b": [5.0, 5.5, 5.2]})
    assert result is not None
    assert figures_of(result).startswith("a 10.5 req/s; b 5.2 req/s (+5.3 req/s [")
    assert leading_cause(replace(result, others=()), {}) is None
