"""Search for an arm's capacity: the largest rate at which a share `alpha` of the requests meets the SLO."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import fmean

import numpy as np
from scipy.optimize import isotonic_regression

from compare.stats.statistics import student

CLOSE_RATES = 1.1  # largest ratio between two rates that count as adjacent
CLIFF_DROP = 0.25  # smallest drop of attainment between adjacent rates that counts as a cliff
PRECISION = 0.03  # the search ends when half of the interval's width is at most this share of the capacity
MAX_SEEDS = 20
BRACKET_RATIO = 1.15  # bisection ends when the ratio of its two rates is at most this
STEP = 1.08  # every seed is measured at the estimate, at estimate / STEP and at estimate * STEP
WIDEST = 2.0**12  # the search covers rates from the first rate / WIDEST to the first rate * WIDEST


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """One run. If it was overloaded, `attainment` is 0, because the real value would depend on the run's duration."""

    rate: float
    seed: int
    attainment: float


@dataclass(frozen=True, slots=True)
class CapacityEstimate:
    """A capacity in requests per second, with a 95 % interval over seeds.

    `low` or `high` is None with fewer than two seeds, or if it lies beyond the measured rates. `bounded` is
    "above" if even the highest measured rate meets the SLO, "below" if even the lowest does not, else "yes". If
    `cliff` is true, the attainment drops abruptly, and `rate` is the last rate before the drop.
    """

    rate: float
    low: float | None
    high: float | None
    bounded: str = "yes"
    cliff: bool = False


def fit_attainment(points: Sequence[CapacityPoint]) -> tuple[list[float], list[float]]:
    """Return the rates in ascending order, and the fitted attainment at each rate. The fit is a non-increasing isotonic
    regression of the mean attainment at each rate, weighted by the number of runs at that rate."""
    rates = sorted({point.rate for point in points})
    runs = [[point.attainment for point in points if point.rate == rate] for rate in rates]
    fit = isotonic_regression(list(map(np.mean, runs)), weights=list(map(len, runs)), increasing=False)
    return rates, fit.x.tolist()


def crossing(rates: Sequence[float], shares: Sequence[float], alpha: float) -> CapacityEstimate:
    """Return the rate at which the curve of `shares` over `rates` falls below alpha, interpolated linearly."""
    below = next((index for index, share in enumerate(shares) if share < alpha), None)
    if below is None:
        return CapacityEstimate(rates[-1], None, None, "above")
    if below == 0:
        return CapacityEstimate(rates[0], None, None, "below")
    left, right = below - 1, below
    if shares[left] - shares[right] >= CLIFF_DROP and rates[right] <= CLOSE_RATES * rates[left]:
        return CapacityEstimate(rates[left], None, None, cliff=True)
    share = (shares[left] - alpha) / (shares[left] - shares[right])
    return CapacityEstimate(rates[left] + share * (rates[right] - rates[left]), None, None)


def capacity_of(points: Sequence[CapacityPoint], alpha: float) -> CapacityEstimate:
    """Return the rate at which the fit to all points crosses alpha, with Student's interval over the `influences`."""
    found = crossing(*fit_attainment(points), alpha)
    values = [value for value in influences(points, alpha).values() if value is not None]
    interval = student(values) if values else None
    if interval is None or interval.low is None or interval.high is None:
        return found
    rates = [point.rate for point in points]
    low = interval.low if interval.low >= min(rates) else None
    return replace(found, low=low, high=interval.high if interval.high <= max(rates) else None)


def influences(points: Sequence[CapacityPoint], alpha: float) -> dict[int, float | None]:
    """Return, for each seed, a jackknife pseudo-value (Tukey, 1958) of the rate at which the fit crosses alpha.

    Pseudo-values estimate this rate and its uncertainty, so they can be compared like the figures of paired runs. The
    fit is repeated without each seed in turn. If any of the fits does not cross alpha, all values are None.
    """
    seeds = sorted({point.seed for point in points})
    without = [[point for point in points if point.seed != seed] for seed in seeds]
    found = [crossing(*fit_attainment(own), alpha) for own in (points, *without) if own]
    if len(found) <= len(seeds) or any(each.bounded != "yes" for each in found):
        return dict.fromkeys(seeds)
    whole, *parts = (each.rate for each in found)
    return {seed: whole + (len(seeds) - 1) * (fmean(parts) - part) for seed, part in zip(seeds, parts, strict=True)}


def balanced(points: Sequence[CapacityPoint]) -> list[CapacityPoint]:
    """Return the points whose rate was measured with several seeds, or all points if there is only one seed."""
    measured = Counter(rate for rate, _ in {(point.rate, point.seed) for point in points})
    several = [point for point in points if measured[point.rate] > 1]
    return several if len({point.seed for point in points}) > 1 else list(points)


def complete_seeds(points: Sequence[CapacityPoint]) -> set[int]:
    """Return the seeds that have `balanced` points at three or more rates."""
    counts = Counter(seed for seed, _ in {(point.seed, point.rate) for point in balanced(points)})
    return {seed for seed, count in counts.items() if count >= 3}


def paired_points(points_by_arm: Mapping[str, Sequence[CapacityPoint]]) -> dict[str, list[CapacityPoint]]:
    """Return each arm's `balanced` points, restricted to the seeds that are complete in every arm."""
    rows = points_by_arm.values()
    shared = set.intersection(*map(complete_seeds, rows)) if rows else set()
    return {arm: [one for one in balanced(points) if one.seed in shared] for arm, points in points_by_arm.items()}


def paired_capacities(
    points_by_arm: Mapping[str, Sequence[CapacityPoint]], alpha: float
) -> dict[str, list[float | None]]:
    """Return the `influences` of each arm's `paired_points`, one per seed. All values of an arm are None if one of its
    fits does not cross alpha."""
    return {arm: list(influences(row, alpha).values()) for arm, row in paired_points(points_by_arm).items()}


def attainment_bands(points: Sequence[CapacityPoint]) -> dict[str, list[float]]:
    """Return data for a chart: for every rate, the fitted attainment and the lowest and highest attainment of a run."""
    rates, shares = fit_attainment(points)
    at = [[point.attainment for point in points if point.rate == rate] for rate in rates]
    return {"rate": rates, "share": shares, "low": [min(row) for row in at], "high": [max(row) for row in at]}


Measure = Callable[[float, int], Awaitable[float]]  # (rate, seed) -> attainment, which is 0 if the arm was overloaded


@dataclass(slots=True)
class CapacitySearch:
    """Searches for one arm's capacity. `run` appends each measurement to `points`.

    `run` brackets and bisects the rate with the first seed. Then it measures one seed after the other at rates around
    the estimate until the interval is narrow. `measure` is called on the event loop of `run`, one call at a time.
    """

    measure: Measure
    alpha: float
    _: KW_ONLY
    max_runs: int
    min_seeds: int = 6
    max_seeds: int = MAX_SEEDS
    widening: float = 2.0  # factor between successive rates while the search brackets the capacity
    # Factor between the rates at which all seeds are measured after bisection. Use a larger factor if seeds differ.
    step: float = STEP
    lowest: float = 0.0  # a rate; the search ends if the capacity is lower
    points: list[CapacityPoint] = field(default_factory=list)

    @property
    def exhausted(self) -> bool:
        return len(self.points) >= self.max_runs

    async def run(self, first_rate: float) -> CapacityEstimate:
        """Search from `first_rate` with at most `max_runs` runs, and return the capacity."""
        bracket = await self._bracket(first_rate)
        if bracket is None:
            return capacity_of(self.points, self.alpha)
        good, bad = bracket
        while bad / good > BRACKET_RATIO and not self.exhausted:
            middle = math.sqrt(good * bad)
            good, bad = (middle, bad) if await self._holds(middle, 0) else (good, middle)
        middle = math.sqrt(good * bad)
        return await self._replicate([middle / self.step, middle, middle * self.step])

    async def _replicate(self, rates: list[float]) -> CapacityEstimate:
        """Measure every seed at all rates. While the fit does not cross alpha within the range of the rates, extend the
        range by one rate."""
        missing = [(rate, 0) for rate in rates]
        for seed in range(1, self.max_seeds + 1):
            while missing:
                for rate, each in missing:
                    if self.exhausted:
                        return self._found()
                    await self._holds(rate, each)
                missing = []
                if (bounded := self._found().bounded) != "yes":
                    rates.append(max(rates) * self.step if bounded == "above" else min(rates) / self.step)
                    missing = [(rates[-1], each) for each in range(seed)]
            if seed == self.max_seeds or (seed >= self.min_seeds and self._is_narrow()):
                break
            missing = [(rate, seed) for rate in rates]
        return self._found()

    async def _bracket(self, rate: float) -> tuple[float, float] | None:
        """Return a rate at which the attainment reaches alpha, and the next higher rate, at which it does not. Return
        None if no such pair is found."""
        holds = await self._holds(rate, 0)
        factor = self.widening if holds else 1 / self.widening
        first = rate
        while not self.exhausted and 1 / WIDEST < rate / first < WIDEST and rate * factor >= self.lowest:
            last, rate = rate, rate * factor
            if await self._holds(rate, 0) != holds:
                return (last, rate) if holds else (rate, last)
        return None

    async def _holds(self, rate: float, seed: int) -> bool:
        self.points.append(CapacityPoint(rate, seed, await self.measure(rate, seed)))
        return self.points[-1].attainment >= self.alpha

    def _found(self) -> CapacityEstimate:
        return capacity_of(balanced(self.points), self.alpha)

    def _is_narrow(self) -> bool:
        found = self._found()
        is_closed = found.low is not None and found.high is not None
        return is_closed and (found.high - found.low) / 2 <= PRECISION * found.rate  # type: ignore[operator]
