"""Builds the plan as a document: the recommendation, its cost, why other candidates lose, and when they would win."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np
import typer

from compare.load.outcome import LatencySlo
from compare.load.traffic import spread
from compare.planning.candidates import SAME, Run, Simulations
from compare.planning.deployment import compose_override, kustomize_component
from compare.planning.options import PlanOptions
from compare.planning.search import Measured, SearchResult
from compare.report.terminal import BOUNDS, show_table
from compare.stats.capacity import CapacityEstimate, CapacityPoint, balanced, capacity_of, influences, paired_capacities
from compare.stats.measures import percentile
from compare.stats.statistics import MIN_PERCENT, TOO_CLOSE, Comparison, Runs, student
from compare.stats.verdict import CAPACITY, rank

SCHEMA = "baton.plan/1"
SHOWN = 2000  # number of requests whose lengths are shown
HOUR_S = 3600.0
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)  # factors for each SLO limit, to find the limits under which another arm wins
MIN_COARSE_PERCENT = 10.0  # smallest lead that is shown if the capacities were measured with a single seed
Document = dict[str, Any]
RunsByArm = Mapping[str, Mapping[tuple[float, int], Run]]


def document(options: PlanOptions, simulations: Simulations, result: SearchResult) -> Document:
    """Return the plan."""
    slo, found = slo_of(options), result.found
    runs = paired_capacities({one.arm: one.points for one in found}, options.attainment)
    rows = simulations.rows(0)[:SHOWN]
    cells, lengths = winners(result.varied, slo, options.attainment), winners_by_lengths(result, simulations)
    return {
        "schema": SCHEMA,
        "device": simulations.device.name,
        "gpus": options.gpus,
        "slo": asdict(slo) | {"attainment": options.attainment},
        "traffic": {
            "name": str(options.trace or options.preset or "chat"),
            "prompt_tokens": spread([row.prompt_len for row in rows]),
            "output_tokens": spread([row.max_tokens for row in rows]),
        },
        "finalists": [finalist(one, options, simulations, result.causes.get(one.arm, {})) for one in found],
        "candidates": [
            {"arm": arm} | score._asdict()
            for arm, score in sorted(result.scores.items(), key=lambda item: item[1], reverse=True)
        ],
        "splits": splits(result, simulations, options.attainment),
        "recommendation": recommendation(found, runs, options),
        "winners": cells,
        "lengths": lengths,
        "flips": flips(found[0], cells) + flips(found[0], lengths),
        "compose": compose_override(simulations.arm(found[0].arm)),
        "kustomize": kustomize_component(simulations.arm(found[0].arm)),
    }


def slo_of(options: PlanOptions) -> LatencySlo:
    return LatencySlo(options.ttft_slo_ms, options.tbt_slo_ms)


def finalist(one: Measured, options: PlanOptions, simulations: Simulations, causes: Mapping[str, int]) -> Document:
    """Return the plan's row of a finalist."""
    found = one.capacity
    values = [value for value in influences(balanced(one.points), options.attainment).values() if value is not None]
    interval = student(values) if values else None
    gpu_s = options.gpus / (found.rate * sum(simulations.mean_lengths)) * 1e6
    return {
        "arm": one.arm,
        "command": " ".join(["baton up", *simulations.arm(one.arm).flags()]),
        "capacity_rps": {
            "mean": found.rate,
            "low": interval and interval.low and max(0.0, interval.low),
            "high": interval and interval.high,
            "bounded": found.bounded,
        },
        "gpu_s_per_million_tokens": gpu_s,
        "dollars_per_million_tokens": gpu_s / HOUR_S * options.price if options.price else None,
        "latencies_ms": _latencies([run for (at, _), run in one.runs.items() if at <= found.rate * 1.05]),
        "miss_causes": dict(causes),
    }


def _latencies(runs: Sequence[Run]) -> Document:
    """Return percentiles of the latencies of all requests of these runs, or {} if there are no runs. The latencies of
    failed requests count as infinite, and an infinite percentile is None."""
    rows = {"ttft": [run.ttft_ms for run in runs], "tbt_p99": [run.tbt_ms for run in runs]}
    values = {name: np.concatenate(parts).tolist() for name, parts in rows.items() if parts}
    return {name: {f"p{q}": percentile(each, q, scale=1) for q in (50, 90, 99)} for name, each in values.items()}


# ---- the answer ----------------------------------------------------------------------------------------------------


def recommendation(found: Sequence[Measured], runs: Runs, options: PlanOptions) -> str:
    """Return the recommendation in one or two sentences. `runs` has the finalists' `paired_capacities`."""
    best, ranking, limits = (
        found[0],
        rank(CAPACITY, runs),
        f"within the SLO for {options.attainment:.0%} of the requests",
    )
    if all(point.attainment < options.attainment for one in found for point in one.points):
        return "No candidate meets the SLO at any rate that was tried: give a looser SLO, or a faster GPU or model."
    rates = {one.arm: one.capacity.rate for one in found}
    unknown = " and ".join(
        f"{arm} (about {rates[arm]:.3g} req/s)" for arm, row in runs.items() if not row or None in row
    )
    if ranking is None or best.arm not in [ranking.best, *(other.arm for other in ranking.others)]:
        about = f"{best.arm} carries about {best.capacity.rate:.3g} req/s"
        return f"No recommendation: {about}, but the interval of {unknown} is unknown; give more --seeds or --requests."
    more = f" The interval of {unknown} is unknown." if unknown else ""
    other = next((one for one in found if one.is_split != best.is_split), found[1] if len(found) > 1 else best)
    lead = _lead(next((each for each in ranking.beaten if each.arm == other.arm), None), rates, ranking.best)
    if ranking.close:
        equal = [ranking.best, *(each.arm for each in ranking.close)]
        *first, last = [f"{arm} ({rates[arm]:.1f} req/s)" for arm in equal]
        also = f" {ranking.best} carries {lead}." if lead else ""
        if len({arm.partition("@")[0] for arm in equal}) == 1:  # clusters of the same nodes with other settings
            return f"Use {', '.join(first)} or {last} {limits}: these are {TOO_CLOSE}.{also}{more}"
        return f"{TOO_CLOSE.capitalize()}: {', '.join(first)} and {last} {limits}.{also}{more}"
    text = f"Use {ranking.best}: it carries {rates[ranking.best]:.1f} req/s {limits}"
    return f"{text}, {lead}.{more}" if lead else f"{text}.{more}"


def _lead(beaten: Comparison | None, rates: Mapping[str, float], best: str) -> str:
    """Return a text about the best arm's lead over the arm of `beaten`, or "" if `beaten` or its interval is None."""
    if beaten is None or beaten.percent is None or beaten.percent_low is None or beaten.percent_high is None:
        return ""
    base = rates[beaten.arm] / rates[best]
    lead, low, high = (-value / base for value in (beaten.percent, beaten.percent_high, beaten.percent_low))
    return f"{lead:.0f} % more than {beaten.arm} [{low:+.0f}, {high:+.0f}]"


def winners(varied: RunsByArm, slo: LatencySlo, attainment: float) -> list[Document]:
    """Return a cell for each pair of limits around the SLO. The cell's winner is the arm with at least MIN_PERCENT more
    capacity than the others for every seed, or "". Capacities are interpolated between the rates of `varied`."""
    cells, seeds = [], sorted({seed for runs in varied.values() for _, seed in runs})
    for ttft in FACTORS:
        for tbt in FACTORS:
            limits = replace(slo, ttft_ms=slo.ttft_ms * ttft, tbt_ms=slo.tbt_ms * tbt)
            by_seed = [_capacities(varied, limits, attainment, seed) for seed in seeds]
            leads = Counter(_leader(rates) for rates in by_seed)
            rates = {arm: fmean(each[arm] for each in by_seed) for arm in varied}
            arm = next(iter(leads)) if len(leads) == 1 else ""
            cells.append({"ttft_ms": limits.ttft_ms, "tbt_ms": limits.tbt_ms, "winner": arm, "capacity_rps": rates})
    return cells


def splits(result: SearchResult, simulations: Simulations, attainment: float) -> list[Document]:
    """Return the best candidate for each number of prefill nodes, and its capacity. The capacities of finalists are
    measured. Other capacities are interpolated between the rates of the first rounds, or known only as bounds."""
    capacities = {arm: capacity_of(points, attainment) for arm, points in result.points.items()}
    measured = {one.arm: one.capacity for one in result.found}
    capacities |= measured
    ordered = sorted(capacities, key=lambda arm: (arm in measured, capacities[arm].rate, result.scores[arm]))
    best = {simulations.arm(arm).prefill: arm for arm in ordered}  # a later arm is better, and replaces an earlier one
    return [
        {"prefill": prefill, "arm": arm, "is_measured": arm in measured} | _capacity(capacities[arm])
        for prefill, arm in sorted(best.items())
    ]


def _capacity(found: CapacityEstimate) -> Document:
    return {"capacity_rps": found.rate, "bounded": found.bounded}


def winners_by_lengths(result: SearchResult, simulations: Simulations) -> list[Document]:
    """Return a cell for each pair of lengths: the mean lengths, the capacities by arm, and the winner. The winner
    is the arm with at least MIN_COARSE_PERCENT more capacity than the others, or "" if there is no such arm."""
    own = {one.arm: one.capacity for one in result.found if one.arm in result.varied}
    cells = []
    for lengths, capacities in sorted({**result.lengths, SAME: own}.items() if result.lengths else ()):
        rates = {arm: 0.0 if one.bounded == "below" else one.rate for arm, one in capacities.items()}
        prompt, answer = (mean * factor for mean, factor in zip(simulations.mean_lengths, lengths, strict=True))
        winner = _leader(rates, MIN_COARSE_PERCENT)
        cells.append({"prompt_tokens": prompt, "answer_tokens": answer, "winner": winner, "capacity_rps": rates})
    return cells


def _capacities(varied: RunsByArm, slo: LatencySlo, attainment: float, seed: int) -> dict[str, float]:
    """Return the capacity of each arm with the traffic of a seed. A capacity is 0 if the arm does not meet the SLO even
    at the lowest rate."""
    found = {}
    for arm, runs in varied.items():
        points = [CapacityPoint(rate, own, run.attainment(slo)) for (rate, own), run in runs.items() if own == seed]
        one = capacity_of(points, attainment)
        found[arm] = 0.0 if one.bounded == "below" else one.rate
    return found


def _leader(rates: Mapping[str, float], percent: float = MIN_PERCENT) -> str:
    if len(rates) < 2:
        return ""
    second, best = sorted(rates, key=rates.__getitem__)[-2:]
    return best if rates[best] > (1 + percent / 100) * rates[second] else ""


def flips(best: Measured, cells: Sequence[Document]) -> list[str]:
    """Return a sentence for each change of one limit, or of the lengths, that makes the other mode clearly better."""
    base = cells[len(cells) // 2] if cells else {}
    said = []
    for cell in cells:
        if not cell["winner"] or cell["winner"].split(":")[0] == best.arm.split(":")[0]:
            continue
        if "ttft_ms" not in cell:
            change = f"prompts of {cell['prompt_tokens']:.0f} tokens and answers of {cell['answer_tokens']:.0f}"
        elif (cell["ttft_ms"] == base["ttft_ms"]) != (cell["tbt_ms"] == base["tbt_ms"]):
            change = f"TTFT {cell['ttft_ms']:.4g} ms and TBT {cell['tbt_ms']:.4g} ms"
        else:
            continue
        rate, *others = sorted(cell["capacity_rps"].values(), reverse=True)
        said.append(f"with {change}, {cell['winner']} carries about {rate:.3g} req/s instead of {others[0]:.3g}")
    return said


# ---- the terminal --------------------------------------------------------------------------------------------------

COST_BOUNDS = {"above": "<= ", "below": "> "}  # signs of a cost, keyed by `bounded` of the capacity
HEADINGS = ["finalist", "req/s", "95 %", "TTFT ms p50", "p99", "TBT p99 ms p50", "p99", "per 1M tokens", "main miss"]


def show(plan: Document) -> None:
    """Print the finalists, and the recommendation with its reasons."""
    show_table([HEADINGS, *map(cells_of, plan["finalists"])])
    typer.secho(plan["recommendation"], bold=True)
    same = "no: if a limit or length is halved or doubled, the same mode is better, or neither is clearly better"
    for text in plan["flips"] or [same]:
        typer.echo(f"  flips:      {text}")
    typer.echo(f"  start:      {plan['finalists'][0]['command']}")


def cells_of(one: Document) -> list[str]:
    """Return a finalist's table row, with one cell for each of HEADINGS."""
    found, latencies = one["capacity_rps"], one["latencies_ms"]
    bound = BOUNDS.get(found["bounded"], "")
    interval = "-" if found["low"] is None or found["high"] is None else f"{found['low']:.1f} to {found['high']:.1f}"
    shown = [latencies[name][share] for name in latencies for share in ("p50", "p99")] or [None] * 4
    times = ["-" if value is None else f"{value:.0f}" for value in shown]
    dollars = one["dollars_per_million_tokens"]
    cost = COST_BOUNDS.get(found["bounded"], "")
    cost += f"{one['gpu_s_per_million_tokens']:.0f} GPU-s" if dollars is None else f"${dollars:.3f}"
    total = sum(one["miss_causes"].values())
    top = next(iter(one["miss_causes"]), None)
    cause = "-" if top is None else f"{top} ({one['miss_causes'][top] / total:.0%})"
    return [one["arm"], f"{bound}{found['mean']:.1f}", interval, *times, cost, cause]
