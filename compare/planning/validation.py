"""Measures the best candidates of a plan on live or emulated nodes, and compares the results with the prediction."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare.main import prepare as prepare_compare
from compare.planning.candidates import Simulations, traffic_options
from compare.planning.options import PlanOptions
from compare.planning.report import slo_of
from compare.planning.search import WIDENING, Measured
from compare.run.session import Experiment, run_session
from compare.stats.capacity import CapacityPoint, capacity_of
from compare.stats.measures import steady_attainment

SEEDS = 2
# Minimum length of a period: in seconds, as a number of requests, and as a multiple of an answer's duration. In a
# shorter period, the number of outstanding requests would still grow, so the period would count as overloaded.
MIN_S, REQUESTS, ANSWERS = 20.0, 300, 12


async def validate(
    options: PlanOptions, simulations: Simulations, best: Sequence[Measured], out: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for each candidate: its capacity as predicted by the plan, as measured, and as simulated with the
    requests of the measured periods. The prediction has one more source of error: its runs had other requests."""
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
        same = [simulated(simulations, arm, point, experiment) for point in points]
        rows.append(
            {
                "arm": arm,
                "predicted_rps": rates[arm],
                "measured_rps": {"mean": measured, "low": capacity.low, "high": capacity.high},
                "error_percent": 100 * (rates[arm] / measured - 1),
                "simulated_rps": (paired := capacity_of(same, options.attainment).rate),
                "simulated_error_percent": 100 * (paired / measured - 1),
            }
        )
        say(
            f"  {arm}: predicted {rates[arm]:.2f} req/s, measured {measured:.2f} ({rows[-1]['error_percent']:+.1f} %);"
            f" simulated with the requests of the measured periods {paired:.2f}"
            f" ({rows[-1]['simulated_error_percent']:+.1f} %)"
        )
    return rows


def simulated(simulations: Simulations, arm: str, point: CapacityPoint, experiment: Experiment) -> CapacityPoint:
    """Simulate the measured run `point`, and return the result. Its attainment covers the measured window, and is 0 if
    the simulated cluster was overloaded."""
    count = len(experiment.traffic(point.seed, point.rate).arrivals)
    outcomes = simulations.outcomes(arm, point.rate, point.seed, count, experiment.timeout_s)
    return replace(point, attainment=steady_attainment(outcomes, experiment.slo))
