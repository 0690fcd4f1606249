"""What the periods of a run come to: which of them count, in which window, and the figures of each arm and pair."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from compare.capacity import Point, balanced, influences
from compare.endpoint import Document
from compare.experiment import Experiment, Findings
from compare.measures import Measured, gaps_s, held_against_tbt, inside, measure, misses, ttft_s
from compare.outcome import Outcome
from compare.period import Period
from compare.steady import measured_window
from compare.verdict import Runs


@dataclass
class Figures:
    """What the periods of a run come to. A seed counts when its period is valid in every arm: they are pairs."""

    experiment: Experiment
    findings: Findings

    @cached_property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.experiment.everyone]

    @cached_property
    def compared(self) -> list[str]:
        return [arm.name for arm in self.experiment.arms]

    @cached_property
    def measured(self) -> dict[int, Measured]:
        """By the period's position."""
        return {
            period.turn.position: self._measure(period, own)
            for period, own in zip(self.findings.periods, self._windows, strict=True)
            if own is not None
        }

    @cached_property
    def _windows(self) -> list[tuple[tuple[float, float], bool] | None]:
        """Of every period, its own window, and whether it is overloaded; None without requests."""
        outcomes = [period.recording.outcomes for period in self.findings.periods]
        return [measured_window(row) if row else None for row in outcomes]

    def _measure(self, period: Period, own: tuple[tuple[float, float], bool]) -> Measured:
        """In the window of all arms: what the slowest to warm up leaves. Else arms were held against other requests."""
        (begin_s, end_s), overloaded = own
        for other, window in zip(self.findings.periods, self._windows, strict=True):
            if window and not other.problems and other.turn.traffic == period.turn.traffic:
                begin_s = max(begin_s, window[0][0])
        outcomes, slo = period.recording.outcomes, self.experiment.slo
        return measure(outcomes, slo, period.summaries, (begin_s, end_s), overloaded=overloaded)

    @cached_property
    def pairs(self) -> list[dict[str, Period]]:
        """Of every seed with a valid period in each arm, those periods by arm. A search for capacities has none: its
        periods are at rates of their own."""
        if self.experiment.finds_capacity:
            return []
        groups: dict[tuple[int, float | None], dict[str, Period]] = {}
        for period in self.findings.periods:
            if not period.problems and period.turn.position in self.measured:
                groups.setdefault(period.turn.traffic, {})[period.turn.arm] = period
        return [group for group in groups.values() if len(group) == len(self.arms)]

    def of(self, arm: str) -> list[Period]:
        return [pair[arm] for pair in self.pairs]

    def population(self, period: Period) -> list[Outcome]:
        return inside(period.recording.outcomes, self.measured[period.turn.position].window_s)

    def runs(self, metric: str) -> Runs:
        """The metric of every arm, seed by seed."""
        return {
            arm: [self.measured[period.turn.position].metrics.get(metric) for period in self.of(arm)]
            for arm in self.arms
        }

    def steady(self, arm: str) -> list[Period]:
        """Without those that were overloaded: nothing that is a time may be told of them."""
        return [period for period in self.of(arm) if not self.measured[period.turn.position].overloaded]

    def pooled(self, periods: Sequence[Period]) -> tuple[list[Outcome], dict[str, Document]]:
        """The requests of all these periods, and the router's summaries of them."""
        return (
            [outcome for period in periods for outcome in self.population(period)],
            {name: summary for period in periods for name, summary in period.summaries.items()},
        )

    @cached_property
    def _limits(self) -> dict[str, list[NDArray[np.float64]]]:
        """By arm and period, for each request the SLOs (TTFT, TBT) that it would just have kept."""
        rows = {arm: [map(self._limit, self.population(period)) for period in self.of(arm)] for arm in self.compared}
        return {arm: [np.array([*row]).reshape(-1, 2) for row in periods] for arm, periods in rows.items()}

    def _limit(self, outcome: Outcome) -> tuple[float, float]:
        slo = self.experiment.slo
        if not outcome.finished or (outcome.slo and misses(outcome, slo)):
            return math.inf, math.inf
        if outcome.slo:  # its own SLO is not what is varied
            return 0.0, 0.0
        gaps = gaps_s(outcome)
        return ttft_s(outcome) * 1000, held_against_tbt(gaps, slo.tbt_of) * 1000 if gaps else 0.0

    def attainment_under(self, ttft_ms: float, tbt_ms: float) -> Runs:
        """As it had been under another SLO: the outcomes stay what they are."""
        return {
            arm: [float((row <= (ttft_ms, tbt_ms)).all(axis=1).mean()) for row in periods if len(row)]
            for arm, periods in self._limits.items()
        }

    @cached_property
    def capacities(self) -> Runs:
        """By arm, the capacity as each seed moves it, None where that is not bounded; of the seeds that every arm was
        measured with at three rates."""
        of_arms = {arm: balanced(points) for arm, points in self.findings.points.items()}
        enough = [{seed for seed, rates in _rates(points).items() if len(rates) >= 3} for points in of_arms.values()]
        shared = sorted(set.intersection(*enough)) if enough else []
        rows = {arm: [point for point in points if point.seed in shared] for arm, points in of_arms.items()}
        return {arm: list(influences(row, self.experiment.attainment).values()) for arm, row in rows.items()}


def _rates(points: Sequence[Point]) -> dict[int, set[float]]:
    """By seed, the rates that it was measured at."""
    rates: dict[int, set[float]] = {}
    for point in points:
        rates.setdefault(point.seed, set()).add(point.rate)
    return rates


def traffic_notes(experiment: Experiment) -> Document:
    """Over all seeds: the periods together. The rate is the mean of what was sent, not what was asked for."""
    drawn = [experiment.traffic(seed, None) for seed in experiment.seeds]
    first, arrivals = drawn[0].notes, [arrival for each in drawn for arrival in each.arrivals]
    duration_s = sum(each.notes["duration_s"] for each in drawn)
    counts = {name: sum(each.notes[name] for each in drawn) for name in ("cut", "refused")}
    return (
        first
        | counts
        | {
            "num_requests": len(arrivals),
            "rate": len(arrivals) / duration_s if duration_s else None,
            "duration_s": duration_s,
            "prompt_tokens": spread([len(arrival.prompt) for arrival in arrivals]),
            "output_tokens": spread([arrival.max_tokens for arrival in arrivals]),
        }
    )


def spread(lengths: Sequence[int]) -> dict[str, float]:
    p50, p99 = np.percentile(lengths, (50, 99))
    return {"mean": float(np.mean(lengths)), "p50": float(p50), "p99": float(p99)}
