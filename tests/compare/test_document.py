"""Test reports on synthetic periods, whose figures are known."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from compare.load.outcome import LatencySlo
from compare.report.document import Figures, report_of, tuning_notes
from compare.report.terminal import row_of
from compare.run.equivalence import ParityCheck
from compare.run.session import Experiment, Findings, Period, trials_of
from compare.stats.capacity import CapacityPoint, capacity_of
from tests.compare.reports import ARMS, CONTROL, NUM, experiment, findings, period, session

BEHIND_CHUNKS = (
    "colocated:2: most misses are tokens that waited behind prompt chunks; before you decide, add this arm with"
    " max_num_batched_tokens=256"
)


def reported(made: Experiment, found: Findings) -> dict[str, Any]:
    """Return the report, and check that it is valid JSON, without NaN or infinity."""
    report = report_of(made, found, "live", "baton compare")
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    return report


def test_the_report_has_a_verdict():
    report = reported(*session())
    assert report["valid"]
    verdict = report["verdict"]
    assert verdict["sentence"].startswith(
        "Disaggregate: 100.0 % instead of 73.1 % of requests met the SLO (95 % interval: 2"
    )
    assert verdict["figures"].startswith("disaggregated:1p1d 100.0 %; colocated:2 73.1 % (+26.9 points [+2")
    assert verdict["figures"].endswith("; 4 paired runs")
    assert verdict["conditions"] == "2 devices, made x 1 at 10 req/s, TTFT <= 100 ms and TBT p99 <= 40 ms"
    assert report["verdict"]["cause"].endswith("misses of colocated:2 are TBT: behind prompt chunks")
    assert report["control"]["says"] == "no difference"
    assert report["notes"] == [BEHIND_CHUNKS]


def test_no_smaller_budget_is_proposed_for_an_arm_if_another_one_has_it():
    made, _ = session()
    tuned = replace(made.arms[0], name="tuned", settings={"max_num_batched_tokens": "0.25K"})
    causes = {arm.name: {"TBT: behind prompt chunks": 9} for arm in (*made.arms, tuned)}
    assert [note.split(":")[0] for note in tuning_notes(replace(made, arms=(*made.arms, tuned)), causes)] == ["tuned"]


def test_the_figures_are_those_of_the_periods():
    report = reported(*session())
    run = report["runs"][0]
    assert (run["arm"], run["seed"], run["arrived"], run["finished"]) == ("colocated:2", 1, NUM - 1, NUM - 1)
    assert run["metrics"]["attainment"] == pytest.approx(1 - 11 / (NUM - 1))  # the first request is in the warm-up
    mean = report["summary"]["colocated:2"]["attainment"]
    assert mean["per_seed"] == pytest.approx([1 - 11 / (NUM - 1), 1 - 10 / (NUM - 1)] * 2)
    assert mean["low"] < mean["mean"] < mean["high"]
    busy = report["busy"]["colocated:2"]["node-0"]
    assert busy["busy"] == pytest.approx(0.5 / 3.9, rel=0.02)
    assert busy["prefill"] == pytest.approx(busy["busy"] * 0.75)
    assert report["phases"]["colocated:2"]["mean"]["interference"] == pytest.approx(60.0)
    assert report["traffic"]["num_requests"] == 4 * NUM


def test_the_verdict_flips_where_the_gaps_are_within_the_slo():
    """If the SLO allows 100 ms between tokens, all requests meet it and no arm wins, so the verdict does not flip."""
    flips = reported(*session())["verdict"]["flips"]
    assert flips is not None
    assert flips[0].startswith("no other arm wins")


def test_a_seed_with_an_invalid_period_is_left_out_of_all_arms_and_a_spare_seed_replaces_it():
    made, found = session()
    found.periods[0].problems.append("the load generator was late")
    assert [next(iter(pair.values())).trial.seed for pair in Figures(made, found).pairs] == [2, 3, 4]
    report = reported(made, found)
    assert report["valid"]
    assert "3 paired runs" in report["verdict"]["figures"]
    assert report["runs"][0]["problems"] == ["the load generator was late"]
    names = [arm.name for arm in made.all_arms]
    found.periods += [period(trial, 0.09, slow=11) for trial in trials_of(names, 5, 4)]
    assert [next(iter(pair.values())).trial.seed for pair in Figures(made, found).pairs] == [2, 3, 4, 5]


def test_the_warm_up_that_one_arm_needs_is_cut_off_in_all_arms():
    made, found = session()
    for outcome in found.periods[0].recording.outcomes[:8]:  # the first arm answers slowly at the beginning
        outcome.ended_s = 1.5
    figures = Figures(made, found)
    windows = {tuple(figures.metrics[one.trial.position].window_s) for one in found.periods if one.trial.seed == 1}
    assert len(windows) == 1
    assert windows.pop()[0] > 0.5
    assert figures.metrics[found.periods[-1].trial.position].window_s[0] < 0.1


def few_valid(made: Experiment, found: Findings) -> None:
    for one in found.periods[:6]:
        one.problems.append("a node was lost")


def late_client(made: Experiment, found: Findings) -> None:
    found.problems = ["stopped early: the load generator was late"]


def one_seed(made: Experiment, found: Findings) -> None:
    found.periods = [one for one in found.periods if one.trial.seed == 1]


def other_answers(made: Experiment, found: Findings) -> None:
    found.different.append({"seed": 1, "index": 3, "arms": ["a", "b"]})


def differing_control(made: Experiment, found: Findings) -> None:
    for one in found.periods:
        if one.trial.arm == CONTROL.name:
            one.recording = period(one.trial, 0.09, slow=one.trial.seed).recording


def not_comparable(made: Experiment, found: Findings) -> None:
    found.periods, found.problems = [], ["not comparable: num_blocks differs"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (few_valid, "only 2 of 4 seeds have a valid period in every arm: 6 periods are invalid, mostly because a node"),
        (late_client, "stopped early: the load generator was late; stop other programs, use fewer devices than cores"),
        (one_seed, "only 1 of 4 seeds have a valid period in every arm: see the runs in the report"),
        (other_answers, "1 requests got different answers from the arms"),
        (differing_control, "the control, an arm against itself, shows a difference in attainment"),
        (not_comparable, "not comparable: num_blocks differs"),
    ],
)
def test_there_is_no_verdict(change: Callable[[Experiment, Findings], None], sentence: str):
    made, found = session()
    change(made, found)
    report = reported(made, found)
    assert not report["valid"]
    assert report["verdict"]["sentence"].startswith(f"No verdict: {sentence}")
    assert report["tokens"]["equal"] == (change is not other_answers)


def test_a_comparison_of_an_arm_with_itself_alone():
    made = experiment()
    alone = Experiment(
        (ARMS[0],), CONTROL, made.traffic, made.seeds, made.slo, 0.9, None, ((1,),), (), "ids", 5.0, Path()
    )
    found = findings(made)
    found.arms = list(alone.all_arms)
    found.periods = [one for one in found.periods if one.trial.arm != ARMS[1].name]
    report = reported(alone, found)
    assert report["valid"]
    assert report["verdict"]["sentence"].startswith("colocated:2 against itself: no difference.")


def test_capacities_are_compared_seed_by_seed():
    made = experiment(first_rate=10.0)
    rows = [[0.95 + seed / 1e4, 0.9 + seed / 1e4, 0.5 + seed / 1e4] for seed in range(4)]
    faster = [[0.99, 0.98, 0.93 + seed / 1e4, 0.6] for seed in range(4)]
    report = reported(made, searched(made, {"colocated:2": rows, "disaggregated:1p1d": faster}))
    assert report["valid"]
    sentence = report["verdict"]["sentence"]
    assert sentence.startswith(
        "Disaggregate: 11.8 req/s instead of 10.0 req/s are possible within the SLO (95 % interval: 1."
    )
    assert set(report["curves"]["attainment"]) == {"colocated:2", "disaggregated:1p1d", CONTROL.name}
    assert report["summary"]["colocated:2"]["capacity_rps"]["mean"] == pytest.approx(10.0, abs=0.05)
    assert report["summary"]["colocated:2"]["capacity_rps"]["bounded"] == "yes"


RATES = (9.0, 10.0, 11.5, 14.5)


def searched(made: Experiment, shares: dict[str, list[list[float]]]) -> Findings:
    """Return findings of a search. `shares` maps an arm to a row per seed: the attainment at the first RATES."""
    found = Findings(list(made.all_arms), ParityCheck(True, []))
    for arm, rows in {CONTROL.name: [[0.99, 0.9, 0.5]] * 4, **shares}.items():
        by_seed = [(seed, zip(RATES, row, strict=False)) for seed, row in enumerate(rows)]
        points = [CapacityPoint(rate, seed, share) for seed, row in by_seed for rate, share in row]
        found.points[arm], found.capacities[arm] = points, capacity_of(points, 0.9)
    return found


def test_a_capacity_beyond_the_highest_rate_is_a_bound():
    """Treating the bound as an estimate would give every seed exactly 11.5 req/s, so there would be no uncertainty."""
    made = experiment(first_rate=10.0)
    found = searched(made, {"colocated:2": [[0.99, 0.9, 0.5]] * 4, "disaggregated:1p1d": [[1.0, 0.99, 0.95]] * 4})
    report = reported(made, found)
    assert not report["valid"]
    assert report["verdict"]["sentence"] == (
        "No verdict: disaggregated:1p1d sustains at least 11.5 req/s, the highest measured rate."
    )
    bound = report["summary"]["disaggregated:1p1d"]["capacity_rps"]
    assert (bound["mean"], bound["low"], bound["high"], bound["bounded"]) == (11.5, None, None, "above")
    assert bound["per_seed"] == [None] * 4
    assert row_of(report, "disaggregated:1p1d")[1] == ">= 11.50"


def test_the_table_of_capacities_has_the_figures_of_the_verdict():
    """The search of one arm ended with a seed that the other arms do not have."""
    made = experiment(first_rate=10.0)
    rows = [[0.95 + seed / 1e4, 0.9 + seed / 1e4, 0.5 + seed / 1e4] for seed in range(4)]
    faster = [[0.99, 0.98, 0.93 + seed / 1e4, 0.6] for seed in range(4)]
    found = searched(made, {"colocated:2": [*rows, [0.99, 0.98, 0.8]], "disaggregated:1p1d": faster})
    assert f"{found.capacities['colocated:2'].rate:.1f}" == "10.1"
    report = reported(made, found)
    shown = {arm: own["capacity_rps"] for arm, own in report["summary"].items()}
    assert report["verdict"]["sentence"].startswith("Disaggregate: 11.8 req/s instead of 10.0 req/s are possible")
    assert [f"{shown[arm.name]['mean']:.1f}" for arm in ARMS] == ["10.0", "11.8"]
    assert all(one["mean"] == pytest.approx(fmean(one["per_seed"])) for one in shown.values())
    assert all(one["low"] <= one["mean"] <= one["high"] for one in shown.values())


def test_a_seed_that_never_crosses_does_not_count_as_the_last_rate():
    """With one of four seeds, attainment exceeds 0.9 at all rates. The capacity over all seeds is still estimated."""
    made = experiment(first_rate=10.0)
    rows = [[0.99, 0.92, 0.5], [0.99, 0.91, 0.5], [0.98, 0.9, 0.5], [1.0, 0.97, 0.93]]
    figures = Figures(made, searched(made, {"colocated:2": rows, "disaggregated:1p1d": rows}))
    row = [value for value in figures.capacities["colocated:2"] if value is not None]
    assert len(row) == 4
    assert sum(row) / 4 == pytest.approx(figures.findings.capacities["colocated:2"].rate)
    assert 11.5 > row[3] > max(row[:3])


def test_a_capacity_that_depends_on_one_seed_has_no_verdict():
    made = experiment(first_rate=10.0)
    rows = [[0.99, 0.99, 0.92], [0.99, 0.99, 0.93], [0.99, 0.98, 0.91], [0.9, 0.5, 0.2]]
    report = report_of(made, searched(made, {"colocated:2": rows, "disaggregated:1p1d": rows}), "live", "x")
    assert "depends on a single seed" in report["verdict"]["sentence"]


def test_a_capacity_that_the_paired_seeds_do_not_have_has_no_verdict():
    """One arm reaches its capacity only with seeds that the other arm lacks."""
    made = experiment(first_rate=10.0)
    high, low, other = [0.99, 0.99, 0.95], [0.92, 0.4, 0.2], [0.99, 0.9, 0.5]
    found = searched(made, {"colocated:2": [high] * 3 + [low] * 2, "disaggregated:1p1d": [other] * 3})
    (problem,) = report_of(made, found, "live", "x")["problems"]
    assert problem.startswith("the capacity of colocated:2, about")
    assert "depends on seeds that other arms lack: without these, it lies beyond the measured rates" in problem


def test_a_report_states_how_often_the_trace_was_repeated():
    made, found = session()
    traffic = made.traffic(1, None)
    repeated = replace(made, traffic=lambda seed, rate: replace(traffic, notes=traffic.notes | {"laps": seed}))
    assert report_of(repeated, found, "live", "x")["traffic"]["laps"] == 4


def test_a_search_that_ends_before_all_seeds_have_run_is_noted():
    made = experiment(first_rate=10.0)
    rows = [[0.99, 0.9, 0.5]] * 4
    found = searched(made, {"colocated:2": rows, "disaggregated:1p1d": rows})
    assert not any("ended after" in note for note in report_of(made, found, "live", "x")["notes"])
    bracketing = [CapacityPoint(20.0 + number, 0, 0.1) for number in range(14)]
    found.points["colocated:2"] = [*bracketing, *found.points["colocated:2"][:-2]]
    (note,) = [note for note in report_of(made, found, "live", "x")["notes"] if "ended after" in note]
    assert note.startswith("the search for the capacity of colocated:2 ended after 24 periods")
    assert "only 3 of 4 seeds measured at three rates around the capacity" in note


def test_the_rates_at_which_a_search_begins_do_not_complete_a_seed():
    """Each search ended while its second seed ran, so only two rates have figures of both seeds."""
    made, rows = experiment(first_rate=10.0), [[0.99, 0.9, 0.5], [0.99, 0.89]]
    found = searched(made, {"colocated:2": rows, "disaggregated:1p1d": rows})
    for points in found.points.values():
        points += [CapacityPoint(20.0 + number, 0, 0.1) for number in range(19)]
    report = reported(made, found)
    notes = [note for note in report["notes"] if "ended after 24 periods" in note]
    assert len(notes) == 2
    assert all("with only 0 of 4 seeds measured at three rates around the capacity" in note for note in notes)
    assert report["verdict"]["sentence"] == (
        "No verdict: only 0 of 4 seeds were measured at three rates around the capacity in every arm: give more"
        " --seeds, which allow more periods."
    )


# ---- caveats -------------------------------------------------------------------------


def overload(one: Period) -> None:
    """Delay the tokens of a request that arrives after t seconds by t seconds, so that later requests wait longer."""
    for outcome in one.recording.outcomes:
        late = outcome.scheduled_s
        outcome.token_s = [at + late for at in outcome.token_s]
        outcome.ended_s = outcome.token_s[-1]


def test_the_time_before_the_first_kept_step_does_not_count_as_idle(monkeypatch: pytest.MonkeyPatch):
    """The only step begins after one second and takes half a second."""
    monkeypatch.setattr("compare.report.document.STEPS", 1)
    assert reported(*session())["busy"]["colocated:2"]["node-0"]["busy"] == pytest.approx(0.5 / 2.9, rel=0.02)


def test_latencies_of_overloaded_periods_are_left_out():
    made, found = session()
    delayed = next(one for one in found.periods if one.trial[:2] == ("disaggregated:1p1d", 1))
    overload(delayed)
    report = reported(made, found)
    assert next(run for run in report["runs"] if run["position"] == delayed.trial.position)["overloaded"]
    assert max(report["curves"]["ecdf"]["ttft_ms"]["disaggregated:1p1d"]["x"]) < 30
    assert report["phases"]["disaggregated:1p1d"]["requests"]["arrived"] == 3 * (NUM - 1)
    assert not any(each["id"].startswith(f"disaggregated:1p1d.{delayed.trial.position}.") for each in report["worst"])
    assert report["notes"] == [
        "disaggregated:1p1d was overloaded in 1 of 4 periods: its latency curves and phases cover only the others",
        BEHIND_CHUNKS,
    ]


@pytest.mark.parametrize(("answer_s", "is_noted"), [(3.0, True), (0.4, False)])
def test_a_growing_load_in_a_period_that_is_short_for_its_answers_may_be_no_overload(answer_s, is_noted):
    made, found = session()
    overload(found.periods[0])
    for outcome in found.periods[0].recording.outcomes:
        outcome.token_s[-1] = outcome.ended_s = outcome.token_s[0] + answer_s
    notes = [note for note in reported(made, found)["notes"] if "may not have been overloaded" in note]
    arm = found.periods[0].trial.arm
    assert notes == is_noted * [
        f"{arm} may not have been overloaded: its answers take 3 s, so the number of outstanding requests still grows"
        " after 4 s; use --duration 24 or more"
    ]


def test_an_arm_that_was_always_overloaded_has_no_latency():
    made, found = session()
    for one in found.periods:
        if one.trial.arm == "disaggregated:1p1d":
            overload(one)
    report = reported(made, found)
    assert report["curves"]["ecdf"]["tbt_ms"]["disaggregated:1p1d"] == {"x": [], "y": []}
    assert "disaggregated:1p1d" not in report["phases"]
    assert report["notes"][0].endswith("phases are left out")


def test_invalid_periods_are_noted_by_arm_with_their_reason():
    made, found = session()
    found.periods[0].problems.append("the load generator was late")
    found.periods[4].notes.append("the router kept no record of 3 of 40 requests")
    assert reported(made, found)["notes"] == [
        "1 of 4 periods of colocated:2 are invalid and left out, mostly because the load generator was late",
        "disaggregated:1p1d, seed 2: the router kept no record of 3 of 40 requests",
        BEHIND_CHUNKS,
    ]


@pytest.mark.parametrize(("loser", "is_valid"), [("disaggregated:1p1d", False), ("colocated:2", True), ("", True)])
def test_an_arm_cannot_lead_if_only_its_periods_were_invalid(loser: str, is_valid: bool):
    """The invalid periods of an arm may have been its worst. If the arm is behind even without them, the verdict holds.
    Invalid periods of several arms are attributed to chance."""
    made, found = session(num_seeds=8)
    for one in [one for one in found.periods if loser in {"", one.trial.arm}][:2]:
        one.problems.append("the load generator was late")
    report = reported(made, found)
    assert report["valid"] == is_valid
    noted = any(note.startswith(f"all invalid periods are of {loser}: its load may") for note in report["notes"])
    assert noted == bool(loser)
    if not is_valid:
        assert "would lead, but all 2 invalid periods are its own" in report["verdict"]["sentence"]


def test_phases_have_their_number_of_requests():
    made, found = session()
    for one in found.periods:
        one.recording.outcomes[-1].error = "timeout"
    report = reported(made, found)
    arrived = 4 * (NUM - 1)
    assert report["phases"]["colocated:2"]["requests"] == {"mean": arrived - 4, "missed": 42, "arrived": arrived}


def test_if_all_keep_the_slo_the_verdict_compares_latencies():
    made = replace(experiment(num_seeds=8), slo=LatencySlo(100, 200))
    report = reported(made, findings(made))
    assert report["verdict"]["sentence"].startswith("Too close to call: 100.0 % (")
    assert "Both keep the SLO; disaggregated:1p1d has 90 % lower TBT p99 [" in report["verdict"]["figures"]
