"""Makes report.json from a session's findings: figures by period, arm and pair, and the verdict that they support."""

import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from compare.endpoint import Document
from compare.report.figures import Figures, caveats, traffic_notes, verdict_problems
from compare.run.experiment import Experiment, Findings, Period
from compare.stats import verdict as verdicts
from compare.stats.capacity import attainment_bands
from compare.stats.causes import busy_shares, miss_causes, phases_of
from compare.stats.measures import ecdf, slo_excess, values_ms
from compare.stats.statistics import Comparison, Runs, compare_arms, student
from compare.stats.verdict import ATTAINMENT, CAPACITY, LATENCIES, Ranking, rank
from scheduler.cost import CostModel

SCHEMA = "baton.compare/1"
# The metrics in which the control is compared. Tails of short runs vary too much for that.
CONTROLLED = ("attainment", "goodput_rps", "ttft_p50_ms", "tbt_p50_ms", "tpot_p50_ms", "ttst_p50_ms", "e2e_p50_ms")
TAILS = ("ttft_p99_ms", "tbt_p99_ms", "tbt_max_ms", "ttst_p99_ms", "fluidity", "throughput_tps")
COMPARED = CONTROLLED + TAILS
WORST = 10
ALSO_SHOWN = ("exposed_transfer_p50_ms", "hidden_transfer_p50_ms", "interference_s", "client_lag_p99_ms")
ESTIMATE = ("mean", "low", "high")


def report_of(experiment: Experiment, findings: Findings, on: str, command: str) -> Document:
    """Return the complete document of report.json."""
    figures = Figures(experiment, findings)
    leading = CAPACITY if experiment.finds_capacity else ATTAINMENT
    runs = figures.capacities if experiment.finds_capacity else figures.runs(leading.name)
    metrics = [leading.name] if experiment.finds_capacity else list(COMPARED)
    control = _control(figures, metrics, runs)
    ranking = rank(leading, {arm: runs.get(arm, []) for arm in figures.compared})
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
        "notes": caveats(figures),
        "traffic": traffic_notes(experiment),
        "slo": asdict(experiment.slo) | {"attainment": experiment.attainment},
        "on": on,
        "arms": [arm.document() for arm in findings.arms],
        "parity": asdict(findings.parity),
        "runs": [_run(period, figures) for period in findings.periods],
        "summary": _summary(figures, [*metrics, *ALSO_SHOWN], runs if experiment.finds_capacity else {}),
        "comparisons": [asdict(each) for each in _comparisons(figures, metrics, runs)],
        "tokens": {"compared": findings.compared, "different": findings.different, "equal": not findings.different},
        "control": control,
        "phases": {arm: phases for arm in figures.arms if (phases := _phases(figures, arm))},
        "miss_causes": causes,
        "curves": {"ecdf": _ecdf(figures), "attainment": attainment or None},
        "busy": {arm: _busy(figures.periods_of(arm), figures) for arm in figures.arms},
        "strip": {arm: _strip(period, experiment) for pair in figures.pairs[:1] for arm, period in pair.items()},
        "worst": _worst(figures),
        "verdict": _verdict(figures, ranking, causes, problems, control),
        "repro": command,
    }


def _run(period: Period, figures: Figures) -> Document:
    measured = figures.metrics.get(period.trial.position)
    counts = period.counts
    return {
        **period.trial._asdict(),
        "valid": not period.problems,
        "overloaded": bool(measured and measured.overloaded),
        "problems": period.problems,
        "window_s": list(measured.window_s) if measured else None,
        "arrived": measured.arrived if measured else 0,
        "finished": measured.finished if measured else 0,
        "failed": measured.failed if measured else 0,
        "metrics": measured.metrics if measured else {},
        "kv": counts and {"blocks": counts["blocks_moved"], "bytes": counts["bytes_moved"], **counts},
    }


def _summary(figures: Figures, metrics: Sequence[str], given: Runs) -> Document:
    """Return means over seeds with their intervals. `given` has the capacities, which are not metrics of periods."""
    shown: Document = {arm: {} for arm in figures.arms}
    for metric in metrics:
        for arm, row in (given if metric == CAPACITY.name else figures.runs(metric)).items():
            known = [value for value in row if value is not None]
            interval = asdict(student(known)) if known and len(known) == len(row) else dict.fromkeys(ESTIMATE)
            shown[arm][metric] = interval | {"per_seed": list(row)}
    for arm, found in figures.findings.capacities.items():  # from all points; bounds may be missing
        shown[arm][CAPACITY.name] |= {"mean": found.rate, "low": found.low, "high": found.high}
        shown[arm][CAPACITY.name] |= {"bounded": found.bounded, "cliff": found.cliff}
    return shown


def _comparisons(figures: Figures, metrics: Sequence[str], leading: Runs) -> list[Comparison]:
    """Compare the first arm with every other arm except the control."""
    found = []
    for number, metric in enumerate(metrics):
        runs = leading if number == 0 else figures.runs(metric)
        rows = {arm: runs[arm] for arm in figures.compared if runs.get(arm)}
        if len(rows) > 1 and figures.compared[0] in rows:
            found += compare_arms(metric, rows, figures.compared[0])
    return found


def _control(figures: Figures, metrics: Sequence[str], leading: Runs) -> Document | None:
    copy, original = figures.experiment.control, figures.compared[0]
    if copy is None:
        return None
    names = metrics if figures.experiment.finds_capacity else list(CONTROLLED)
    runs = {name: leading if name == metrics[0] else figures.runs(name) for name in names}
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


def _busy(periods: Sequence[Period], figures: Figures) -> Document:
    """Return the busy shares of each node, averaged over the periods."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for period in periods:
        begin_ms = period.recording.started_unix_ns / 1e6
        first_s, last_s = figures.metrics[period.trial.position].window_s
        for node, steps in period.steps.items():
            cost = period.costs.get(node)
            model = CostModel.unpacked(cost) if cost else None
            if last_s > first_s:
                window_ms = (begin_ms + first_s * 1e3, begin_ms + last_s * 1e3)
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
    """Return the requests that exceed the SLO most, worst first, if they have timelines. Skip overloaded periods."""
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
    verdict: Document = {"sentence": "", "cause": None, "flips": None, "interval": None}
    if problems:
        return verdict | {"sentence": f"no verdict: {problems[0]}"}
    if control is not None and len(figures.compared) == 1:
        text = f"{figures.compared[0]} against itself: {control['says']}"
        return verdict | {"sentence": f"{text}. {conditions(figures)}"}
    slo = figures.experiment.slo
    text, interval = verdicts.sentence(ranking)
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

    return {
        "sentence": ". ".join(filter(None, (text, also, conditions(figures)))),
        "cause": verdicts.leading_cause(ranking, causes),
        "flips": verdicts.flips(rank_at, slo.ttft_ms, slo.tbt_ms) if varies else None,
        "interval": interval,
    }


def conditions(figures: Figures) -> str:
    """Return the conditions of the verdict: devices, traffic and SLO."""
    experiment, notes = figures.experiment, traffic_notes(figures.experiment)
    slo, devices = experiment.slo, " or ".join(map(str, sorted({arm.devices for arm in figures.findings.arms})))
    load = "" if experiment.finds_capacity or notes["rate"] is None else f" at {notes['rate']:.3g} req/s"
    share = f" for {experiment.attainment:.0%}" if experiment.finds_capacity else ""
    return (
        f"{devices} device{'' if devices == '1' else 's'}, {notes['name']} x {notes['scale_tokens']:g}{load}, "
        f"TTFT <= {slo.ttft_ms:g} ms and TBT {slo.tbt_of} <= {slo.tbt_ms:g} ms{share}"
    )


def environment() -> Document:
    """Return the facts of the machine that affect the figures."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "machine": platform.machine(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
