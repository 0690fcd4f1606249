"""Measures the best candidates of a plan on live or emulated nodes, and compares the results with the prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from compare.main import prepare as prepare_compare
from compare.planning.candidates import Simulations, traffic_options
from compare.planning.options import PlanOptions
from compare.planning.report import slo_of
from compare.planning.search import WIDENING, Measured
from compare.run.session import Experiment, run_session
from compare.stats.capacity import CapacityPoint
from compare.stats.measures import steady_attainment

SEEDS = 2
# Minimum length of a period: in seconds, in requests, and in durations of an answer. In shorter periods, the number of
# outstanding requests still grows to its steady value, so that the periods count as overloaded.
MIN_S, REQUESTS, ANSWERS = 20.0, 300, 12


async def validate(
    options: PlanOptions, simulations: Simulations, best: Sequence[Measured], out: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for each candidate: its predicted and measured capacity, and the mean difference between predicted
    and measured attainment of the same runs."""
    rates = {one.arm: one.capacity.rate for one in best}
    compare = replace(
        traffic_options(options),
        arms=list(rates),
        on=options.validate,
        emulate=options.cost if options.validate == "emulated" else "",
        duration=max(MIN_S, REQUESTS / min(rates.values()), ANSWERS * simulations.request_s(slo_of(options))[2]),
        find_capacity=True,
        rate=None,
        seeds=SEEDS,
        ttft_slo_ms=options.ttft_slo_ms,
        tbt_slo_ms=options.tbt_slo_ms,
        attainment=options.attainment,
        set=options.set,
        out=out,
    )
    experiment, deployments, plan = prepare_compare(compare, rates)
    say(plan)
    findings = await run_session(replace(experiment, widening=WIDENING), deployments, say)
    for problem in findings.problems:
        say(f"  {problem}")
    rows = []
    for arm, capacity in findings.capacities.items():
        measured, points = capacity.rate, findings.points[arm]
        differences = [difference(simulations, arm, point, experiment) for point in points]
        rows.append(
            {
                "arm": arm,
                "predicted_rps": rates[arm],
                "measured_rps": {"mean": measured, "low": capacity.low, "high": capacity.high},
                "error_percent": 100 * (rates[arm] / measured - 1),
                "attainment_points": fmean(differences),
            }
        )
        say(
            f"  {arm}: predicted {rates[arm]:.2f} req/s, measured {measured:.2f} ({rows[-1]['error_percent']:+.1f} %);"
            f" in the same runs, attainment differs by {rows[-1]['attainment_points']:.1f} points"
        )
    return rows


def difference(simulations: Simulations, arm: str, point: CapacityPoint, experiment: Experiment) -> float:
    """Return by how many points the attainment of a period differs from that of the same simulated run. Both cover the
    measured window, and are 0 under overload."""
    count = len(experiment.traffic(point.seed, point.rate).arrivals)
    outcomes = simulations.outcomes(arm, point.rate, point.seed, count, experiment.timeout_s)
    return 100 * abs(steady_attainment(outcomes, experiment.slo) - point.attainment)
