"""The figures of a session: valid periods and their windows, metrics of each arm and pair, and caveats."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from compare.endpoint import Document
from compare.load.outcome import Outcome
from compare.load.traffic import spread
from compare.run.experiment import Experiment, Findings, Period
from compare.stats.capacity import balanced, influences
from compare.stats.measures import RunMetrics, gaps_s, inside, measure, measured_window, misses, tbt_figure, ttft_s
from compare.stats.statistics import Runs
from compare.stats.verdict import Ranking

LEAST_PAIRS = 0.75  # this share of the seeds must have a valid period in every arm
LEAST_LOST = 2  # this many invalid periods of a single arm are not attributed to chance


@dataclass
class Figures:
    """The figures of a session's periods, computed on first use. It does not change the findings.

    A seed counts if its periods are valid in all arms. These periods form a pair.
    """

    experiment: Experiment
    findings: Findings

    @cached_property
    def arms(self) -> list[str]:
        return [arm.name for arm in self.experiment.everyone]

    @cached_property
    def compared(self) -> list[str]:
        return [arm.name for arm in self.experiment.arms]

    @cached_property
    def metrics(self) -> dict[int, RunMetrics]:
        """Metrics of every period, by the position of its trial."""
        return {
            period.trial.position: self._measure(period, own)
            for period, own in zip(self.findings.periods, self._windows, strict=True)
            if own is not None
        }

    @cached_property
    def _windows(self) -> list[tuple[tuple[float, float], bool] | None]:
        """The window of every period and whether the period is overloaded, or None if it has no requests."""
        outcomes = [period.recording.outcomes for period in self.findings.periods]
        return [measured_window(row) if row else None for row in outcomes]

    def _measure(self, period: Period, own: tuple[tuple[float, float], bool]) -> RunMetrics:
        """Measure the window after the longest warm-up of an arm, so that the same requests count in all arms."""
        (begin_s, end_s), overloaded = own
        for other, window in zip(self.findings.periods, self._windows, strict=True):
            if window and not other.problems and other.trial.traffic == period.trial.traffic:
                begin_s = max(begin_s, window[0][0])
        outcomes, slo = period.recording.outcomes, self.experiment.slo
        return measure(outcomes, slo, period.summaries, (begin_s, end_s), overloaded=overloaded)

    @cached_property
    def pairs(self) -> list[dict[str, Period]]:
        """For each seed that is valid in all arms, its periods by arm. Empty if the session searches for capacities."""
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
        """Return a metric of every arm, with one value per seed."""
        return {
            arm: [self.metrics[period.trial.position].metrics.get(metric) for period in self.periods_of(arm)]
            for arm in self.arms
        }

    def steady_periods(self, arm: str) -> list[Period]:
        """Return the arm's periods that were not overloaded. Latencies of the others have no meaning."""
        return [period for period in self.periods_of(arm) if not self.metrics[period.trial.position].overloaded]

    def pooled(self, periods: Sequence[Period]) -> tuple[list[Outcome], dict[str, Document]]:
        """Return the requests of all given periods, and the router's summaries of these requests."""
        return (
            [outcome for period in periods for outcome in self.population(period)],
            {name: summary for period in periods for name, summary in period.summaries.items()},
        )

    @cached_property
    def _kept_limits(self) -> dict[str, list[NDArray[np.float64]]]:
        """The tightest limits (TTFT, TBT) that each request meets, by arm and period."""
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
        """Return the attainment that the same outcomes have under another SLO."""
        return {
            arm: [float((row <= (ttft_ms, tbt_ms)).all(axis=1).mean()) for row in periods if len(row)]
            for arm, periods in self._kept_limits.items()
        }

    @cached_property
    def capacities(self) -> Runs:
        """The capacity's pseudo-values by arm, or None if the capacity is only a bound. They are for the seeds with
        which every arm was measured at three or more rates."""
        by_arm = {arm: balanced(points) for arm, points in self.findings.points.items()}
        rates = [Counter(seed for seed, _ in {(one.seed, one.rate) for one in points}) for points in by_arm.values()]
        enough = [{seed for seed, count in counts.items() if count >= 3} for counts in rates]
        shared = sorted(set.intersection(*enough)) if enough else []
        rows = {arm: [point for point in points if point.seed in shared] for arm, points in by_arm.items()}
        return {arm: list(influences(row, self.experiment.attainment).values()) for arm, row in rows.items()}

    @property
    def invalid(self) -> Counter[str]:
        """The number of invalid periods of each arm."""
        return Counter(period.trial.arm for period in self.findings.periods if period.problems)


def traffic_notes(experiment: Experiment) -> Document:
    """Return the notes for the traffic of all seeds. Their rate is the actual rate, not the value of --rate."""
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


# ---- caveats -------------------------------------------------------------------------------------------------------


def verdict_problems(figures: Figures, control: Document | None, ranking: Ranking | None) -> list[str]:
    """Return the reasons why the figures permit no verdict. `ranking` is the ranking by the leading metric."""
    problems = []
    if not figures.findings.problems:
        problems += _unbounded(figures) or _too_few(figures)
    if figures.findings.different:
        problems.append(f"{len(figures.findings.different)} requests were not answered alike by all arms")
    if control and control["comparisons"] and control["says"] != "no difference":
        problems.append(f"the control, an arm against itself, shows {control['says']}: these runs cannot be trusted")
    invalid, winner = figures.invalid, ranking.winner if ranking else None
    if winner is not None and set(invalid) == {winner} and invalid[winner] >= LEAST_LOST:
        problems.append(
            f"{winner} would lead, but all {invalid[winner]} invalid periods are its own: its load may be the cause,"
            " and then the remaining seeds are its easier ones"
        )
    return problems


def _too_few(figures: Figures) -> list[str]:
    wanted, had = len(figures.experiment.seeds), len(figures.pairs)
    if figures.experiment.finds_capacity:
        had = min(map(len, figures.capacities.values()), default=0)
    cause = ""
    if problems := Counter(period.problems[0] for period in figures.findings.periods if period.problems):
        cause = f"{problems.total()} periods are invalid, mostly because {problems.most_common(1)[0][0]}"
    if had < 2:
        return [f"{had} paired runs are too few: {cause or 'give --seeds 2 or more'}"]
    if had < LEAST_PAIRS * wanted and not figures.experiment.finds_capacity:
        return [f"only {had} of {wanted} seeds have a valid period in every arm: {cause or 'see `runs`'}"]
    return []


def _unbounded(figures: Figures) -> list[str]:
    """Return a problem for each arm whose capacity is only a bound, because it cannot be compared."""
    problems = []
    for arm, found in figures.findings.capacities.items():
        if found.bounded == "above":
            problems.append(f"{arm} carries at least {found.rate:.3g} req/s, the highest rate that was measured")
        elif found.bounded == "below":
            problems.append(f"{arm} does not even carry {found.rate:.3g} req/s, the lowest rate that was measured")
        elif (row := figures.capacities.get(arm)) and None in row:
            problems.append(
                f"the capacity of {arm}, about {found.rate:.3g} req/s, depends on a single seed: without it, it lies"
                " beyond the rates that were measured; give more --seeds or a longer --duration"
            )
    return problems


def caveats(figures: Figures) -> list[str]:
    """Return notes on the data that the figures leave out."""
    notes = list(figures.findings.notes)
    for arm in figures.arms:
        own = [period for period in figures.findings.periods if period.trial.arm == arm]
        if invalid := [period for period in own if period.problems]:
            problem = Counter(period.problems[0] for period in invalid).most_common(1)[0][0]
            notes.append(
                f"{len(invalid)} of {len(own)} periods of {arm} are invalid and in no figure; mostly: {problem}"
            )
        if noted := [period for period in own if period.notes]:
            more = f" (and so in {len(noted) - 1} more of its periods)" if len(noted) > 1 else ""
            notes.append(f"{arm}, seed {noted[0].trial.seed}: {noted[0].notes[0]}{more}")
        valid, steady = len(figures.periods_of(arm)), len(figures.steady_periods(arm))
        if steady < valid:
            notes.append(
                f"{arm} was overloaded in {valid - steady} of {valid} periods: its latency curves and phases are"
                f" {'of the others, its better ones' if steady else 'left out'}"
            )
    if len(figures.invalid) == 1 and figures.invalid.total() >= LEAST_LOST:
        arm = next(iter(figures.invalid))
        notes.append(f"all invalid periods are of {arm}: its load may be the cause, and the rest are its easier seeds")
    return notes
