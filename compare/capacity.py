"""Capacity: the largest rate at which a share `alpha` of the requests is good, searched for and fitted.

Pure: who measures is an argument.
"""

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.optimize import isotonic_regression

RESAMPLES = 200
TAIL = 0.025  # of the resamples: what a 95 % interval leaves out at either end
CLOSE_RATES = 1.1  # two rates no further apart than that have nothing between them
CLIFF_DROP = 0.25  # of attainment between such rates
ENOUGH = 0.03  # half of the interval, as a share of the capacity
MAX_SEEDS = 20
BRACKET_RATIO = 1.15  # what bisection ends at
STEP = 1.08
SPREAD = (1 / STEP, 1.0, STEP)  # rates, about the estimate, that every seed is measured at
WIDEST = 2.0**12  # a capacity is looked for between the first rate over and times this


@dataclass(frozen=True, slots=True)
class Point:
    """One run. `attainment` is 0 for one that was overloaded: it would go on falling for as long as it ran."""

    rate: float
    seed: int
    attainment: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests per second, with a 95 % interval over seeds (None from fewer than two, and for an end that lies beyond
    the rates that were measured).

    bounded: "yes"; "above" when the highest rate measured is still carried, "below" when the lowest is not. `cliff`:
    attainment drops at once there, so the capacity is the last rate before the drop and no crossing.
    """

    rate: float
    low: float | None
    high: float | None
    bounded: str = "yes"
    cliff: bool = False


def fit_attainment(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """Rates, ascending, and the attainment at each: the non-increasing curve nearest to the means of the runs
    (isotonic regression, by pool adjacent violators), weighted by their number."""
    by_rate: dict[float, list[float]] = defaultdict(list)
    for point in points:
        by_rate[point.rate].append(point.attainment)
    rates = sorted(by_rate)
    means = [float(np.mean(by_rate[rate])) for rate in rates]
    weights = [len(by_rate[rate]) for rate in rates]
    return rates, [float(value) for value in isotonic_regression(means, weights=weights, increasing=False).x]


def crossing(rates: Sequence[float], shares: Sequence[float], alpha: float) -> Capacity:
    """Where the curve falls below alpha, between two rates on a line. Raises ValueError for an empty curve."""
    if not rates:
        raise ValueError("no rate was measured")
    below = next((index for index, share in enumerate(shares) if share < alpha), None)
    if below is None:
        return Capacity(rates[-1], None, None, "above")
    if below == 0:
        return Capacity(rates[0], None, None, "below")
    left, right = below - 1, below
    if shares[left] - shares[right] >= CLIFF_DROP and rates[right] <= CLOSE_RATES * rates[left]:
        return Capacity(rates[left], None, None, cliff=True)
    share = (shares[left] - alpha) / (shares[left] - shares[right])
    return Capacity(rates[left] + share * (rates[right] - rates[left]), None, None)


def capacity_of(points: Sequence[Point], alpha: float, seed: int = 0) -> Capacity:
    """The crossing of the fit over all points, and its interval: seeds are drawn anew with all their points, and the
    spread of those crossings is widened by Student's t, because a few seeds' percentiles are too narrow."""
    found = crossing(*fit_attainment(points), alpha)
    seeds = sorted({point.seed for point in points})
    if len(seeds) < 2 or found.bounded != "yes":
        return found
    of_seed = {each: [point for point in points if point.seed == each] for each in seeds}
    random = np.random.default_rng(seed)
    crossings = []
    for _ in range(RESAMPLES):
        drawn = [point for index in random.integers(len(seeds), size=len(seeds)) for point in of_seed[seeds[index]]]
        crossings.append(crossing(*fit_attainment(drawn), alpha))
    widening = math.sqrt(len(seeds) / (len(seeds) - 1)) * float(stats.t.ppf(0.975, len(seeds) - 1))
    reach = float(np.std([each.rate for each in crossings])) * widening
    # What never crosses tells the last rate measured, and so much of it would make any interval narrow.
    beyond = {each for each in ("below", "above") if [one.bounded for one in crossings].count(each) > TAIL * RESAMPLES}
    low = None if "below" in beyond else max(0.0, found.rate - reach)
    high = None if "above" in beyond else found.rate + reach
    return Capacity(found.rate, low, high, found.bounded, found.cliff)


def influences(points: Sequence[Point], alpha: float) -> dict[int, float | None]:
    """By seed, the capacity as the seed moves it (jackknife pseudo-values, Tukey 1958, of the crossing of all): their
    mean is the crossing, and their spread tells how sure it is, as figures of paired runs do.

    All None where the crossing, of all seeds or without one, lies beyond the rates that were measured: a bound is no
    figure. A single seed often does not cross within them, which says nothing of all.
    """
    seeds = sorted({point.seed for point in points})
    without = [[point for point in points if point.seed != seed] for seed in seeds]
    found = [crossing(*fit_attainment(own), alpha) for own in (points, *without) if own]
    if len(found) <= len(seeds) or any(each.bounded != "yes" for each in found):
        return dict.fromkeys(seeds)
    whole, *parts = (each.rate for each in found)
    mean = math.fsum(parts) / len(parts)
    return {seed: whole + (len(seeds) - 1) * (mean - part) for seed, part in zip(seeds, parts, strict=True)}


def balanced(points: Sequence[Point]) -> list[Point]:
    """Points at rates that several seeds were measured at, once there are: the first seed alone looked about."""
    if len({point.seed for point in points}) < 2:
        return list(points)
    at = defaultdict(set)
    for point in points:
        at[point.rate].add(point.seed)
    return [point for point in points if len(at[point.rate]) > 1]


def attainment_bands(points: Sequence[Point]) -> dict[str, list[float]]:
    """For a chart: the fitted share at every rate, and the lowest and highest that a seed had there."""
    rates, shares = fit_attainment(points)
    at = [[point.attainment for point in points if point.rate == rate] for rate in rates]
    return {"rate": rates, "share": shares, "low": [min(row) for row in at], "high": [max(row) for row in at]}


Measure = Callable[[float, int], Awaitable[float]]  # rate, seed -> attainment, 0 if overloaded


class Search:
    """Looks for one arm's capacity: bracket and bisect geometrically with the first seed, then every seed at rates
    about it, one seed after the other until the interval is narrow. `points` is what was measured so far."""

    def __init__(self, measure: Measure, alpha: float, *, max_runs: int, min_seeds: int = 6) -> None:
        self.points: list[Point] = []
        self._measure = measure
        self._alpha = alpha
        self._max_runs = max_runs
        self._min_seeds = min_seeds

    @property
    def exhausted(self) -> bool:
        return len(self.points) >= self._max_runs

    async def run(self, first_rate: float) -> Capacity:
        """The capacity, as well as `max_runs` runs can tell. Raises ValueError for a rate that is not over 0."""
        if not 0 < first_rate < math.inf:
            raise ValueError(f"the first rate is {first_rate}; it must be over 0")
        bracket = await self._bracket(first_rate)
        if bracket is None:
            return capacity_of(self.points, self._alpha)
        good, bad = bracket
        while bad / good > BRACKET_RATIO and not self.exhausted:
            middle = math.sqrt(good * bad)
            good, bad = (middle, bad) if await self._holds(middle, 0) else (good, middle)
        return await self._replicate([math.sqrt(good * bad) * factor for factor in SPREAD])

    async def _replicate(self, rates: list[float]) -> Capacity:
        """Every seed at all rates, to which others are added where the means do not cross alpha between them."""
        missing = [(rate, 0) for rate in rates]
        for seed in range(1, MAX_SEEDS + 1):
            while missing:
                for rate, each in missing:
                    if self.exhausted:
                        return self._found()
                    await self._holds(rate, each)
                missing = []
                if (bounded := self._found().bounded) != "yes":
                    rates.append(max(rates) * STEP if bounded == "above" else min(rates) / STEP)
                    missing = [(rates[-1], each) for each in range(seed)]
            if seed == MAX_SEEDS or (seed >= self._min_seeds and self._is_narrow()):
                break
            missing = [(rate, seed) for rate in rates]
        return self._found()

    async def _bracket(self, rate: float) -> tuple[float, float] | None:
        """A rate that holds and one that does not, a factor of 2 apart; None if there is none within WIDEST."""
        holds = await self._holds(rate, 0)
        factor = 2.0 if holds else 0.5
        first = rate
        while not self.exhausted and 1 / WIDEST < rate / first < WIDEST:
            last, rate = rate, rate * factor
            if await self._holds(rate, 0) != holds:
                return (last, rate) if holds else (rate, last)
        return None

    async def _holds(self, rate: float, seed: int) -> bool:
        self.points.append(Point(rate, seed, await self._measure(rate, seed)))
        return self.points[-1].attainment >= self._alpha

    def _found(self) -> Capacity:
        return capacity_of(balanced(self.points), self._alpha)

    def _is_narrow(self) -> bool:
        found = self._found()
        if found.low is None or found.high is None:
            return False
        return (found.high - found.low) / 2 <= ENOUGH * found.rate
