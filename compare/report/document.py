"""Builds report.json from a session's findings: figures by period, arm and pair, caveats, and the verdict."""

import math
import os
import platform
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from compare.arms import ArmSettings
from compare.endpoint import STEPS, Document
from compare.load.outcome import LoadRecording, Outcome
from compare.load.traffic import spread
from compare.run.session import Experiment, Findings, Period, main_problem
from compare.stats import verdict as verdicts
from compare.stats.capacity import (
    CapacityEstimate,
    attainment_bands,
    capacity_of,
    complete_seeds,
    paired_capacities,
    paired_points,
)
from compare.stats.measures import (
    BETWEEN,
    RunMetrics,
    busy_shares,
    ecdf,
    gaps_s,
    inside,
    measure,
    measured_window,
    miss_causes,
    misses,
    phases_of,
    slo_excess,
    tbt_figure,
    ttft_s,
    values_ms,
)
from compare.stats.statistics import SHARES, Comparison, Runs, compare_arms, within
from compare.stats.verdict import ATTAINMENT, CAPACITY, LATENCIES, Ranking, rank
from scheduler.cost import CostModel
from shared.config.settings import parse_count

SCHEMA = "baton.compare/1"
# The metrics in which the control is compared. They exclude tail latencies, which vary too much between short runs.
CONTROLLED = ("attainment", "goodput_rps", "ttft_p50_ms", "tbt_p50_ms", "tpot_p50_ms", "ttst_p50_ms", "e2e_p50_ms")
TAILS = ("ttft_p99_ms", "tbt_p99_ms", "tbt_max_ms", "ttst_p99_ms", "fluidity", "throughput_tps")
COMPARED = CONTROLLED + TAILS
WORST = 10
STEADY_ANSWERS = 8  # a period that lasts this many times as long as an answer is long enough for a steady load
ALSO_SHOWN = ("exposed_transfer_p50_ms", "hidden_transfer_p50_ms", "interference_s", "client_lag_p99_ms")
PREDICTED = ("attainment", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tbt_p99_ms")
ESTIMATE = ("mean", "low", "high")
NOT_MEASURED = RunMetrics((0.0, 0.0), overloaded=False, arrived=0, finished=0, failed=0, metrics={})
LATE_REMEDY = "stop other programs, use fewer devices than cores, or set a longer --ttft-slo-ms"
MIN_INVALID = 2  # if fewer periods are invalid, it may be chance that all invalid periods are of one arm


@dataclass
class Figures:
    """The figures of a session's periods, each computed when it is first used.

    A seed counts if its periods are valid in all arms. The periods of such a seed, one per arm, form a pair.
    """

    experiment: Experiment
    findings: Findings

    @cached_property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.experiment.all_arms]

    @cached_property
    def compared(self) -> list[str]:
        return [arm.name for arm in self.experiment.arms]

    @cached_property
    def metrics(self) -> dict[int, RunMetrics]:
        """The metrics of every period that has requests, keyed by the position of its trial.

        The measured window begins when every arm has warmed up, so that the same requests count in all arms.
        """
        periods = [period for period in self.findings.periods if period.recording.outcomes]
        windows = [measured_window(period.recording.outcomes) for period in periods]
        begins: dict[tuple[int, float | None], list[float]] = defaultdict(list)
        for period, ((begin_s, _), _) in zip(periods, windows, strict=True):
            begins[period.trial.traffic] += [] if period.problems else [begin_s]
        found = {}
        for period, ((begin_s, end_s), overloaded) in zip(periods, windows, strict=True):
            window_s = max([begin_s, *begins[period.trial.traffic]]), end_s
            outcomes, slo = period.recording.outcomes, self.experiment.slo
            found[period.trial.position] = measure(outcomes, slo, period.summaries, window_s, overloaded=overloaded)
        return found

    @cached_property
    def pairs(self) -> list[dict[str, Period]]:
        """The periods of each seed that is valid in all arms, keyed by arm. Empty if the session finds capacities."""
        if self.experiment.finds_capacity:
            return []
        groups: dict[tuple[int, float | None], dict[str, Period]] = defaultdict(dict)
        for period in self.findings.periods:
            if not period.problems and period.trial.position in self.metrics:
                groups[period.trial.traffic][period.trial.arm] = period
        return [group for group in groups.values() if len(group) == len(self.arms)]

    def periods_of(self, arm: str) -> list[Period]:
        return [pair[arm] for pair in self.pairs]

    def population(self, period: Period) -> list[Outcome]:
        return inside(period.recording.outcomes, self.metrics[period.trial.position].window_s)

    def runs(self, metric: str) -> Runs:
        """Return the values of a metric by arm, with one value per seed."""
        if metric == CAPACITY.name:
            return self.capacities
        return {
            arm: [self.metrics[period.trial.position].metrics.get(metric) for period in self.periods_of(arm)]
            for arm in self.arms
        }

    def steady_periods(self, arm: str) -> list[Period]:
        """Return the arm's periods that were not overloaded. The latencies of an overloaded period have no meaning."""
        return [period for period in self.periods_of(arm) if not self.metrics[period.trial.position].overloaded]

    def pooled(self, periods: Sequence[Period]) -> tuple[list[Outcome], dict[str, Document]]:
        """Return the requests of all given periods, and the router's summaries of these requests."""
        return (
            [outcome for period in periods for outcome in self.population(period)],
            {name: summary for period in periods for name, summary in period.summaries.items()},
        )

    @cached_property
    def _kept_limits(self) -> dict[str, list[NDArray[np.float64]]]:
        """For each arm and period, the tightest limits (TTFT, TBT) that each request meets."""
        rows = {
            arm: [[self._kept_limit(outcome) for outcome in self.population(period)] for period in self.periods_of(arm)]
            for arm in self.compared
        }
        return {arm: [np.array(row).reshape(-1, 2) for row in periods] for arm, periods in rows.items()}

    def _kept_limit(self, outcome: Outcome) -> tuple[float, float]:
        slo = self.experiment.slo
        if not outcome.finished or (outcome.slo and misses(outcome, slo)):
            return math.inf, math.inf
        if outcome.slo:  # the request has its own SLO, which is not varied
            return 0.0, 0.0
        gaps = gaps_s(outcome)
        return ttft_s(outcome) * 1000, tbt_figure(gaps, slo.tbt_of) * 1000 if gaps else 0.0

    def attainment_under(self, ttft_ms: float, tbt_ms: float) -> Runs:
        """Return the attainment that the same outcomes would have under another SLO."""
        return {
            arm: [float((row <= (ttft_ms, tbt_ms)).all(axis=1).mean()) for row in periods if len(row)]
            for arm, periods in self._kept_limits.items()
        }

    @cached_property
    def capacities(self) -> Runs:
        """The jackknife pseudo-values of each arm's capacity, one per seed. If only a bound is known, all are None."""
        return paired_capacities(self.findings.points, self.experiment.attainment)

    @cached_property
    def estimates(self) -> dict[str, CapacityEstimate]:
        """Each arm's capacity, from the seeds of the verdict if these suffice to estimate it, else from all seeds."""
        found, paired = self.findings.capacities, paired_points(self.findings.points)
        known = [arm for arm, row in self.capacities.items() if len(row) > 1 and None not in row]
        own = {arm: capacity_of(paired[arm], self.experiment.attainment) for arm in known}
        return {arm: own.get(arm, one) if one.bounded == "yes" else one for arm, one in found.items()}

    @property
    def invalid(self) -> Counter[str]:
        """The number of invalid periods of each arm."""
        return Counter(period.trial.arm for period in self.findings.periods if period.problems)


# ---- the document ----------------------------------------------------------------------------------------------


def report_of(experiment: Experiment, findings: Findings, on: str, command: str) -> Document:
    """Return the complete document of report.json."""
    figures = Figures(experiment, findings)
    leading = CAPACITY if experiment.finds_capacity else ATTAINMENT
    metrics = [leading.name] if experiment.finds_capacity else list(COMPARED)
    control = _control(figures, metrics)
    ranking = rank(leading, {arm: figures.runs(leading.name).get(arm, []) for arm in figures.compared})
    problems = findings.problems + verdict_problems(figures, control, ranking)
    attainment = {arm: attainment_bands(points) for arm, points in findings.points.items() if points}
    causes = {arm: miss_causes(*figures.pooled(figures.periods_of(arm)), experiment.slo) for arm in figures.arms}
    return {
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "environment": environment(),
        "valid": not problems,
        "problems": problems,
        "notes": caveats(figures) + tuning_notes(experiment, causes),
        "traffic": traffic_notes(experiment) | {"laps": _laps(experiment, findings)},
        "slo": asdict(experiment.slo) | {"attainment": experiment.attainment},
        "on": on,
        "arms": [arm.document() for arm in findings.arms],
        "parity": asdict(findings.parity),
        "runs": [_run(period, figures) for period in findings.periods],
        "summary": _summary(figures, [*metrics, *ALSO_SHOWN]),
        "comparisons": [asdict(each) for each in _comparisons(figures, metrics)],
        "tokens": {"compared": findings.compared, "different": findings.different, "equal": not findings.different},
        "control": control,
        "phases": {arm: phases for arm in figures.arms if (phases := _phases(figures, arm))},
        "miss_causes": causes,
        "curves": {"ecdf": _ecdf(figures), "attainment": attainment or None},
        "frontier": _frontier(figures),
        "prediction": _prediction(figures),
        "busy": {arm: _busy(figures.periods_of(arm), figures) for arm in figures.arms},
        "strip": {arm: _strip(period, experiment) for pair in figures.pairs[:1] for arm, period in pair.items()},
        "worst": _worst(figures),
        "verdict": _verdict(figures, ranking, causes, problems, control),
        "repro": command,
    }


def _run(period: Period, figures: Figures) -> Document:
    measured = figures.metrics.get(period.trial.position) or NOT_MEASURED
    counts = period.counts
    return {
        **period.trial._asdict(),
        "valid": not period.problems,
        "problems": period.problems,
        **asdict(measured),
        "window_s": list(measured.window_s) if measured is not NOT_MEASURED else None,
        "kv": counts and {"blocks": counts["blocks_moved"], "bytes": counts["bytes_moved"], **counts},
    }


def _summary(figures: Figures, metrics: Sequence[str]) -> Document:
    """Return, for each arm, the mean of each metric over the seeds, with its interval."""
    shown: Document = {arm: {} for arm in figures.arms}
    for metric in metrics:
        for arm, row in figures.runs(metric).items():
            known = [value for value in row if value is not None]
            most = 1.0 if metric in SHARES else math.inf
            interval = asdict(within(0.0, most, known)) if known and len(known) == len(row) else dict.fromkeys(ESTIMATE)
            shown[arm][metric] = interval | {"per_seed": list(row)}
    for arm, found in figures.estimates.items():
        shown[arm][CAPACITY.name] |= {"mean": found.rate, "low": found.low, "high": found.high}
        shown[arm][CAPACITY.name] |= {"bounded": found.bounded, "cliff": found.cliff}
    return shown


def _comparisons(figures: Figures, metrics: Sequence[str]) -> list[Comparison]:
    """Compare the first arm with every other arm except the control."""
    found = []
    for metric in metrics:
        runs = figures.runs(metric)
        rows = {arm: runs[arm] for arm in figures.compared if runs.get(arm)}
        if len(rows) > 1 and figures.compared[0] in rows:
            found += compare_arms(metric, rows, figures.compared[0])
    return found


def _control(figures: Figures, metrics: Sequence[str]) -> Document | None:
    copy, original = figures.experiment.control, figures.compared[0]
    if copy is None:
        return None
    runs = {name: figures.runs(name) for name in metrics if name not in TAILS}
    if not all(row.get(copy.name) for row in runs.values()):
        return {"comparisons": [], "says": "nothing: there is no valid pair of runs"}
    found, says = verdicts.compare_control(copy.name, original, runs)
    return {"comparisons": [asdict(each) for each in found], "says": says}


def _phases(figures: Figures, arm: str) -> Document | None:
    outcomes, summaries = figures.pooled(figures.steady_periods(arm))
    found = phases_of(outcomes, summaries, figures.experiment.slo)
    if found is None:
        return None
    return found | {"requests": found["requests"] | {"arrived": len(outcomes)}}


def _ecdf(figures: Figures) -> Document:
    values = {arm: values_ms(figures.pooled(figures.steady_periods(arm))[0]) for arm in figures.arms}
    return {f"{name}_ms": {arm: ecdf(values[arm][name]) for arm in figures.arms} for name in ("ttft", "tbt", "ttst")}


def _frontier(figures: Figures) -> Document:
    """Return the mean tokens/s per device and per user, for each arm and rate. Only valid periods that were not
    overloaded count. The tokens/s per user are the inverse of the median TPOT."""
    rows: dict[str, dict[float, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    devices = {arm.name: arm.devices for arm in figures.findings.arms}
    for period in figures.findings.periods:
        found, rate = figures.metrics.get(period.trial.position), period.trial.rate
        if found is None or period.problems or rate is None or not devices.get(period.trial.arm):
            continue
        if (throughput := found.metrics.get("throughput_tps")) and (tpot_ms := found.metrics.get("tpot_p50_ms")):
            rows[period.trial.arm][rate].append((throughput / devices[period.trial.arm], 1000 / tpot_ms))
    means = {arm: {rate: np.mean(own[rate], axis=0).tolist() for rate in sorted(own)} for arm, own in rows.items()}
    return {
        arm: {
            "rate": list(own),
            "per_device": [each[0] for each in own.values()],
            "per_user": [each[1] for each in own.values()],
        }
        for arm, own in means.items()
    }


def _prediction(figures: Figures) -> Document:
    """Return, for each arm, the measured and the simulated mean of each metric in PREDICTED over the valid periods."""
    rows: dict[str, list[tuple[RunMetrics, RunMetrics]]] = defaultdict(list)
    for period in figures.findings.periods:
        outcomes = figures.findings.predicted.get(period.trial.position)
        measured = figures.metrics.get(period.trial.position)
        if outcomes and measured:
            slo, overloaded = figures.experiment.slo, measured.overloaded
            simulated = measure(outcomes, slo, {}, measured.window_s, overloaded=overloaded)
            rows[period.trial.arm].append((measured, simulated))
    return {arm: {name: row for name in PREDICTED if (row := _means(name, own))} for arm, own in rows.items()}


def _means(name: str, pairs: Sequence[tuple[RunMetrics, RunMetrics]]) -> Document | None:
    """Return a metric's measured and simulated mean over the pairs in which both runs have the metric."""
    values = [(one.metrics.get(name), other.metrics.get(name)) for one, other in pairs]
    if not (known := [row for row in values if None not in row]):
        return None
    measured, simulated = np.mean(np.array(known, float), axis=0).tolist()
    return {"measured": measured, "simulated": simulated, "periods": len(known)}


def _busy(periods: Sequence[Period], figures: Figures) -> Document:
    """Return the shares of time in which each node was busy or idle, averaged over the periods. The time before the
    first step that the router kept is left out."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for period in periods:
        begin_ms = period.recording.started_unix_ns / 1e6
        first_s, last_s = figures.metrics[period.trial.position].window_s
        for node, steps in period.steps.items():
            cost = period.costs.get(node)
            model = CostModel.unpacked(cost) if cost else None
            since_ms = steps[0]["start_ms"] if len(steps) >= STEPS else 0.0
            window_ms = max(begin_ms + first_s * 1e3, since_ms), begin_ms + last_s * 1e3
            if window_ms[1] > window_ms[0]:
                rows[node].append(busy_shares(steps, window_ms, model))
    return {
        node: {name: float(np.mean([each[name] for each in shares])) for name in shares[0]}
        for node, shares in rows.items()
    }


def _strip(period: Period, experiment: Experiment) -> Document:
    columns = ("start_ms", "duration_ms", "prefill_tokens", "num_decodes", "predicted_ms")
    return {
        "seed": period.trial.seed,
        "slo_ms": experiment.slo.tbt_ms,
        "origin_ms": period.recording.started_unix_ns / 1e6,
        "nodes": {node: [[step[name] for name in columns] for step in steps] for node, steps in period.steps.items()},
        "requests": list(period.timelines.values()),
    }


def _worst(figures: Figures) -> list[Document]:
    """Return the timelines of the requests that exceed the SLO most, worst first. Skip overloaded periods."""
    rows = []
    for period in figures.findings.periods:
        measured = figures.metrics.get(period.trial.position)
        for outcome in [] if measured and measured.overloaded else period.recording.outcomes:
            if outcome.id in period.timelines:
                excess = slo_excess(outcome, figures.experiment.slo)
                rows.append((excess, {"arm": period.trial.arm, **period.timelines[outcome.id]}))
    rows.sort(key=lambda row: row[0], reverse=True)
    return [row for _, row in rows[:WORST]]


def _verdict(
    figures: Figures,
    ranking: Ranking | None,
    causes: Mapping[str, Mapping[str, int]],
    problems: Sequence[str],
    control: Document | None,
) -> Document:
    empty = dict.fromkeys(("figures", "cause", "flips", "interval"))
    verdict: Document = {"sentence": "", **empty, "conditions": conditions(figures)}
    if problems:
        remedy = f"; {LATE_REMEDY}" if "the load generator " in problems[0] else ""
        return verdict | {"sentence": f"No verdict: {problems[0]}{remedy}."}
    if control is not None and len(figures.compared) == 1:
        return verdict | {"sentence": f"{figures.compared[0]} against itself: {control['says']}."}
    assert ranking is not None  # otherwise `verdict_problems` returns a problem
    slo = figures.experiment.slo
    compares_periods = not figures.experiment.finds_capacity
    also = (
        verdicts.latency_differences(ranking, {name: figures.runs(name) for name in LATENCIES})
        if compares_periods
        else None
    )
    own = figures.attainment_under(slo.ttft_ms, slo.tbt_ms)
    varies = bool(slo.ttft_ms and slo.tbt_ms) and compares_periods and all(own.values())

    def rank_at(ttft_ms: float, tbt_ms: float) -> Ranking | None:
        return rank(ATTAINMENT, figures.attainment_under(ttft_ms, tbt_ms))

    return verdict | {
        "sentence": verdicts.sentence(ranking, [arm for arm in figures.findings.arms if arm.name in figures.compared]),
        "figures": ". ".join(filter(None, (verdicts.figures_of(ranking), also))),
        "cause": verdicts.leading_cause(ranking, causes),
        "flips": verdicts.flips(rank_at, slo.ttft_ms, slo.tbt_ms) if varies else None,
        "interval": ranking.leading.gap(ranking.others[0]),
    }


def traffic_notes(experiment: Experiment) -> Document:
    """Return the notes on the traffic of all seeds together. `rate` is the actual rate, not the value of --rate."""
    drawn = [experiment.traffic(seed, None) for seed in experiment.seeds]
    first, arrivals = drawn[0].notes, [arrival for each in drawn for arrival in each.arrivals]
    duration_s = sum(each.notes["duration_s"] for each in drawn)
    counts = {name: sum(each.notes[name] for each in drawn) for name in ("cut", "refused")}
    return {
        **first,
        **counts,
        "num_requests": len(arrivals),
        "rate": len(arrivals) / duration_s if duration_s else None,
        "duration_s": duration_s,
        "prompt_tokens": spread([len(arrival.prompt) for arrival in arrivals]),
        "output_tokens": spread([arrival.max_tokens for arrival in arrivals]),
    }


def _laps(experiment: Experiment, findings: Findings) -> int:
    """Return the maximum number of passes over the trace in a period."""
    keys = {period.trial.traffic for period in findings.periods} or {(experiment.seeds[0], None)}
    return max(int(experiment.traffic(*key).notes["laps"]) for key in keys)


def conditions(figures: Figures) -> str:
    """Return the conditions of the verdict: devices, traffic and SLO."""
    experiment, notes = figures.experiment, traffic_notes(figures.experiment)
    slo, devices = experiment.slo, " or ".join(map(str, sorted({arm.devices for arm in figures.findings.arms})))
    load = "" if experiment.finds_capacity or notes["rate"] is None else f" at {notes['rate']:.3g} req/s"
    share = f" for {experiment.attainment:.0%}" if experiment.finds_capacity else ""
    device = f"{experiment.device} device".lstrip()
    return (
        f"{devices} {device}{'' if devices == '1' else 's'}, {notes['name']} x {notes['scale_tokens']:g}{load}, "
        f"TTFT <= {slo.ttft_ms:g} ms and TBT {slo.tbt_of} <= {slo.tbt_ms:g} ms{share}"
    )


def environment() -> Document:
    """Return the facts about the machine that affect the figures."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "machine": platform.machine(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


# ---- caveats -------------------------------------------------------------------------------------------------------


def verdict_problems(figures: Figures, control: Document | None, ranking: Ranking | None) -> list[str]:
    """Return the reasons why the figures permit no verdict. `ranking` is the ranking by the leading metric."""
    problems = []
    if not figures.findings.problems:
        problems += _unbounded(figures) or _too_few(figures)
    if not problems + figures.findings.problems and ranking is None and len(figures.compared) > 1:
        problems.append("fewer than two arms have a figure for every seed")
    if figures.findings.different:
        problems.append(f"{len(figures.findings.different)} requests got different answers from the arms")
    if control and control["comparisons"] and control["says"] != "no difference":
        problems.append(f"the control, an arm against itself, shows {control['says']}: these runs cannot be trusted")
    invalid, winner = figures.invalid, ranking.winner if ranking else None
    if winner is not None and set(invalid) == {winner} and invalid[winner] >= MIN_INVALID:
        problems.append(
            f"{winner} would lead, but all {invalid[winner]} invalid periods are its own: its load may be the cause, so"
            " the remaining seeds may favour it"
        )
    return problems


def _too_few(figures: Figures) -> list[str]:
    experiment, had, wanted = figures.experiment, len(figures.pairs), len(figures.experiment.seeds)
    if experiment.finds_capacity:
        had = min(map(len, figures.capacities.values()), default=0)
        text = f"only {had} of {wanted} seeds were measured at three rates around the capacity in every arm"
        return [] if had >= 2 else [f"{text}: give more --seeds, which allow more periods"]
    if had >= max(2, experiment.least_pairs):
        return []
    cause = "see the runs in the report" if wanted > 1 else "give --seeds 2 or more"
    if invalid := figures.invalid.total():
        cause = f"{invalid} periods are invalid, mostly because {main_problem(figures.findings.periods)}"
    return [f"only {had} of {wanted} seeds have a valid period in every arm: {cause}"]


def _unbounded(figures: Figures) -> list[str]:
    """Return a problem for each arm whose capacity is known only as a bound. The capacity must be known from all seeds,
    from the seeds that all arms share, and from the shared seeds with any one of them left out."""
    problems = []
    paired = paired_points(figures.findings.points)
    for arm, found in figures.findings.capacities.items():
        if found.bounded == "above":
            problems.append(f"{arm} sustains at least {found.rate:.3g} req/s, the highest measured rate")
        elif found.bounded == "below":
            problems.append(f"{arm} sustains less than {found.rate:.3g} req/s, the lowest measured rate")
        elif len(row := figures.capacities.get(arm, [])) > 1 and None in row:
            crosses = capacity_of(paired[arm], figures.experiment.attainment).bounded == "yes"
            cause, left_out = ("a single seed", "that seed") if crosses else ("seeds that other arms lack", "these")
            problems.append(
                f"the capacity of {arm}, about {found.rate:.3g} req/s, depends on {cause}: without {left_out}, it lies"
                " beyond the measured rates; give more --seeds or a longer --duration"
            )
    return problems


def tuning_notes(experiment: Experiment, causes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a note for each co-located arm that might do better with smaller chunks. In such an arm, most misses are
    tokens that waited for prompt chunks. The arm must have the smallest budget of all co-located arms."""
    default = ArmSettings.model_fields["max_num_batched_tokens"].default
    budgets = {
        arm.name: int(parse_count(arm.settings.get("max_num_batched_tokens", default)))
        for arm in experiment.arms
        if arm.mode == "colocated" and not arm.url
    }
    late = f"TBT: {BETWEEN['interference']}"
    return [
        f"{arm}: most misses are tokens that waited {BETWEEN['interference']}; before you decide, add this arm with"
        f" max_num_batched_tokens={budget // 2}"
        for arm, budget in budgets.items()
        if causes[arm].get(late, 0) > sum(causes[arm].values()) / 2 and budget == min(budgets.values())
    ]


def is_overloaded(figures: Figures, period: Period) -> bool:
    measured = figures.metrics.get(period.trial.position)
    return measured is not None and not period.problems and measured.overloaded


def short_periods(arm: str, overloaded: Sequence[LoadRecording]) -> list[str]:
    """Return a note if the arm's periods count as overloaded, perhaps because they are too short for its answers.

    The number of outstanding requests grows until the load is steady, which takes several durations of an answer.
    """
    outcomes = [one for recording in overloaded for one in recording.outcomes if one.token_s and one.ended_s]
    if not outcomes:
        return []
    answer_s = fmean((one.ended_s or 0.0) - one.token_s[0] for one in outcomes)
    period_s = max(one.scheduled_s for one in outcomes)
    if period_s >= STEADY_ANSWERS * answer_s:
        return []
    return [
        f"{arm} may not have been overloaded: its answers take {answer_s:.0f} s, so the number of outstanding requests"
        f" still grows after {period_s:.0f} s; use --duration {math.ceil(STEADY_ANSWERS * answer_s)} or more"
    ]


def caveats(figures: Figures) -> list[str]:
    """Return notes on the limitations of the figures, such as periods that are left out."""
    notes, experiment = list(figures.findings.notes), figures.experiment
    for arm, points in figures.findings.points.items():
        had = len(complete_seeds(points))
        if len(points) >= experiment.max_trials and had < len(experiment.seeds):
            notes.append(
                f"the search for the capacity of {arm} ended after {len(points)} periods, its maximum, with only {had}"
                f" of {len(experiment.seeds)} seeds measured at three rates around the capacity; more --seeds allow"
                " more periods"
            )
    for arm in figures.arms:
        own = [period for period in figures.findings.periods if period.trial.arm == arm]
        if invalid := [period for period in own if period.problems]:
            problem = main_problem(invalid)
            notes.append(
                f"{len(invalid)} of {len(own)} periods of {arm} are invalid and left out, mostly because {problem}"
            )
        if noted := [period for period in own if period.notes]:
            more = f" (also in {len(noted) - 1} more of its periods)" if len(noted) > 1 else ""
            notes.append(f"{arm}, seed {noted[0].trial.seed}: {noted[0].notes[0]}{more}")
        valid, steady = len(figures.periods_of(arm)), len(figures.steady_periods(arm))
        if steady < valid:
            notes.append(
                f"{arm} was overloaded in {valid - steady} of {valid} periods: its latency curves and phases"
                f" {'cover only the others' if steady else 'are left out'}"
            )
        notes += short_periods(arm, [period.recording for period in own if is_overloaded(figures, period)])
    if len(figures.invalid) == 1 and figures.invalid.total() >= MIN_INVALID:
        arm = next(iter(figures.invalid))
        notes.append(f"all invalid periods are of {arm}: its load may be the cause")
    return notes
