"""Synthetic sessions and their reports."""

import json
from pathlib import Path
from typing import Any

from compare.arms import copy_of, parse_arms
from compare.load.outcome import LatencySlo, LoadRecording, Outcome
from compare.load.traffic import Arrival, Traffic
from compare.report import document
from compare.run.equivalence import ParityCheck, check_parity
from compare.run.session import Experiment, Findings, Period, Trial, trials_of
from compare.stats.capacity import CapacityPoint

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\">{{data}}"
ARMS = parse_arms(["colocated:2", "disaggregated:1p1d"])
CONTROL = copy_of(ARMS[0])
NUM, STARTED_NS = 40, 1_700_000_000_000_000_000


def experiment(*, num_seeds: int = 4, first_rate: float | None = None) -> Experiment:
    arrivals = tuple(Arrival(0.1 * index, (1, 2, 3), 3) for index in range(NUM))
    notes = {"name": "made", "rate": 10.0, "duration_s": 4.0, "scale_tokens": 1.0, "cut": 0, "refused": 0, "laps": 1}
    traffic = Traffic(arrivals, notes)
    seeds = tuple(range(1, num_seeds + 1))
    return Experiment(
        tuple(ARMS), CONTROL, lambda seed, rate: traffic, seeds, LatencySlo(100, 40), 0.9, first_rate,
        ((1,),), (), "ids", 5.0, Path(),
    )  # fmt: skip


def summary(name: str) -> dict[str, Any]:
    phases = {"router": 1.0, "prefill_queue": 2.0, "prefill": 10.0, "transfer_exposed": 0.0, "decode_queue": 0.0}
    phases |= {"decode": 20.0, "interference": 60.0}
    return {
        "id": name, "accepted_ms": 0.0, "first_token_ms": 13.0, "attempts": 1, "phases_ms": phases,
        "transfer": {"bytes": 64, "busy_ms": 1.0, "hidden_ms": 0.5, "exposed_ms": 0.5, "channel": "shm"},
    }  # fmt: skip


def period(trial: Trial, gap_s: float, *, slow: int, problems: tuple[str, ...] = ()) -> Period:
    """Return a period in which `slow` evenly spread requests have one gap of `gap_s`. All other gaps are 9 ms."""
    outcomes, start = [], 1e-3 * trial.seed  # so that figures differ between seeds
    for index in range(NUM):
        at = 0.1 * index
        gap = gap_s if (index * 7 - 1) % NUM < slow else 0.009
        times = [at + 0.02 + start, at + 0.029 + start, at + 0.029 + start + gap]
        name = f"{trial.arm}.{trial.position}.{index}"
        outcomes.append(Outcome(index, name, at, at, at, times, [7, 8, 9], "length", max_tokens=3, ended_s=times[-1]))
    start_ms = STARTED_NS / 1e6 + 1000
    columns = {"number": 1, "start_ms": start_ms, "duration_ms": 500.0, "predicted_ms": None, "waiting": 0}
    work = {"num_prefills": 1, "prefill_tokens": 30, "num_decodes": 10, "decode_context": 100}
    kept = Period(trial, LoadRecording(STARTED_NS, outcomes))
    kept.summaries = {outcome.id: summary(outcome.id) for outcome in outcomes}
    kept.steps = {"node-0": [columns | work]}
    kept.costs = {"node-0": []}
    kept.timelines = {outcomes[0].id: summary(outcomes[0].id) | {"spans": []}}
    kept.counts = {"handoffs": 0, "blocks_moved": 0, "bytes_moved": 0}
    kept.problems = list(problems)
    return kept


def findings(made: Experiment) -> Findings:
    """Return findings. All requests of disaggregated arms meet the SLO; in other arms, at least a quarter miss it."""
    names = [arm.name for arm in made.all_arms]
    order = [trial for number, seed in enumerate(made.seeds) for trial in trials_of(names, seed, number)]
    is_split = {arm.name: bool(arm.prefill) for arm in made.all_arms}
    periods = [period(trial, 0.09, slow=0 if is_split[trial.arm] else 10 + trial.seed % 2) for trial in order]
    return Findings(list(made.all_arms), ParityCheck(True, []), periods, {}, NUM * 4, [])


def session(num_seeds: int = 4) -> tuple[Experiment, Findings]:
    made = experiment(num_seeds=num_seeds)
    return made, findings(made)


def recording(*answers: list[int], error: str = "") -> LoadRecording:
    rows = [
        Outcome(index, f"r{index}", 0.0, tokens=answer, finish="length", error=error, token_s=[0.1] * len(answer))
        for index, answer in enumerate(answers)
    ]
    return LoadRecording(outcomes=rows)


# ---- reports for the page --------------------------------------------------------------------------------------------

NODES = {False: ("decode-0", "decode-1"), True: ("prefill-0", "decode-0")}


def page_report(seconds: float = 8.0, *, capacity: bool = False) -> dict[str, Any]:
    """Return a session's report. In each period, each node has `seconds` of steps, and ten requests have timelines."""
    made, found = session(num_seeds=3)
    facts = {arm.name: {"dtype": "float32", "policy": "static" if arm.prefill else "mixed"} for arm in found.arms}
    found.parity = check_parity(found.arms, facts, ["policy"])
    for one in found.periods:
        nodes = NODES[one.trial.arm == ARMS[1].name]
        one.steps = {node: _steps(node, seconds) for node in nodes}
        one.costs = {node: [] for node in nodes}
        one.timelines = {outcome.id: _timeline(outcome, *nodes) for outcome in one.recording.outcomes[:10]}
    if capacity:
        shares = [(2.0, 1.0), (3.0, 0.95), (4.0, 0.4)]
        found.points = {
            arm.name: [CapacityPoint(rate, seed, share - seed / 100) for seed in range(3) for rate, share in shares]
            for arm in found.arms
        }
        for one in found.periods:  # each seed has its own rate, and the prediction equals the measurement
            one.trial = one.trial._replace(rate=float(one.trial.seed))
            found.predicted[one.trial.position] = one.recording.outcomes
    report: dict[str, Any] = document.report_of(made, found, "live", "baton compare --control")
    if capacity:
        for metrics, rate in zip(report["summary"].values(), (3.0, 4.0, 3.0), strict=True):
            metrics["capacity_rps"] = {"mean": rate, "low": None, "high": None, "bounded": "yes"}
    return json.loads(json.dumps(report))  # type: ignore[no-any-return]


def hostile() -> dict[str, Any]:
    """Return a report in which texts that users or servers choose contain HTML markup."""
    text = json.dumps(page_report()).replace("colocated:2", json.dumps(HOSTILE)[1:-1])
    report: dict[str, Any] = json.loads(text)
    report["traffic"]["name"] = report["repro"] = report["verdict"]["sentence"] = HOSTILE
    report["runs"][0]["problems"] = [HOSTILE]
    return report


def bare() -> dict[str, Any]:
    """Return the report of a session that was interrupted before its first period."""
    made = experiment()
    report = document.report_of(made, Findings(list(made.all_arms), problems=["interrupted"]), "live", "baton compare")
    return report | {"environment": {}, "control": None}


def _steps(node: str, seconds: float) -> list[dict[str, Any]]:
    """Return steps of 10 ms. Every 20th step has a prompt and takes 55 ms, longer than the SLO."""
    rows, start_ms = [], STARTED_NS / 1e6
    while start_ms < STARTED_NS / 1e6 + seconds * 1000:
        is_late = len(rows) % 20 == 5
        work = {"num_prefills": int(is_late), "prefill_tokens": 256 * is_late, "num_decodes": 8, "decode_context": 900}
        duration_ms = 55.0 if is_late else 10.0
        row = {"start_ms": start_ms, "duration_ms": duration_ms, "predicted_ms": duration_ms * 0.98, "waiting": 0}
        rows.append({"node": node, "number": len(rows)} | row | work)
        start_ms += duration_ms + 1
    return rows


def _timeline(outcome: Outcome, first: str, last: str) -> dict[str, Any]:
    accepted_ms = STARTED_NS / 1e6 + outcome.scheduled_s * 1000
    parts = [("queued", first, 10, ""), ("chunk", first, 10, ""), ("transfer", last, 5, ""), ("decode", last, 4, "")]
    parts += [("wait", last, 70, "behind a prompt chunk"), ("decode", last, 9, "")]
    spans, at_ms = [], accepted_ms
    for kind, node, length_ms, cause in parts:
        span = {"kind": kind, "node": node, "start_ms": at_ms, "end_ms": at_ms + length_ms, "tokens": 1, "cause": cause}
        spans.append(span)
        at_ms += length_ms
    ends = {"second_token_ms": accepted_ms + 29, "last_token_ms": at_ms, "ended_ms": at_ms, "finish": "length"}
    sizes = {"prompt_tokens": 3, "generated_tokens": 3}
    starts = {"accepted_ms": accepted_ms, "first_token_ms": accepted_ms + 20}
    return {"id": outcome.id, "spans": spans} | starts | sizes | ends
