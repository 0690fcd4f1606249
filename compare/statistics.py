"""How sure a difference is. The unit is the seed: one run of every arm under the same traffic makes one pair."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy import stats

HIGHER_IS_BETTER = frozenset(
    {"attainment", "goodput_rps", "fluidity", "throughput_tps", "capacity_rps", "transfer_gb_s"}
)
CONFIDENCE = 0.95
LEAST_PERCENT = 3.0  # a smaller difference is too close to call, however sure it is
ROUNDING = 1e-9  # of a difference: what floating point alone makes of equal ones
TOO_CLOSE = "too close to call"


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where the true one is, as far as the runs can tell; no bounds from fewer than two."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against another in one metric: the paired difference (`arm` - `against`) with its interval.

    `percent`, `percent_low`, `percent_high` are of the mean of `against`; None where that is 0. `p` is corrected for
    as many as it is one of. `note` says why there is no difference to tell.
    """

    arm: str
    against: str
    metric: str
    difference: float | None
    percent: float | None
    low: float | None
    high: float | None
    p: float
    says: str  # "better" | "worse" | "too close to call"
    percent_low: float | None = None
    percent_high: float | None = None
    note: str = ""


def student(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean. Raises ValueError for no values."""
    mean, error = _mean(values), _error(values)
    if error is None:
        return Interval(mean, None, None)
    reach = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * error
    return Interval(mean, mean - reach, mean + reach)


def compare(
    metric: str, arm: tuple[str, Sequence[float | None]], against: tuple[str, Sequence[float | None]]
) -> Comparison:
    """Two arms, each with its name and its figure for every seed, in one order. Raises ValueError if not paired.

    A seed without the figure in either arm (overloaded, or never reached) leaves nothing to compare: the seeds that
    are left would be the survivors.
    """
    (name, ours), (other, theirs) = arm, against
    if len(ours) != len(theirs):
        raise ValueError(f"{metric}: {len(ours)} runs of {name} and {len(theirs)} of {other} are no pairs")
    nothing = Comparison(name, other, metric, None, None, None, None, 1.0, TOO_CLOSE)
    missing = sum(one is None or two is None for one, two in zip(ours, theirs, strict=True))
    if missing or not ours:
        return replace(nothing, note=f"{missing} of {len(ours)} pairs of runs have no such figure")
    differences = [float(one or 0.0) - float(two or 0.0) for one, two in zip(ours, theirs, strict=True)]
    interval, base = student(differences), _mean([float(two or 0.0) for two in theirs])

    def percent(value: float | None) -> float | None:
        return None if value is None or base == 0 else 100 * value / abs(base)

    error = _error(differences)
    p = 1.0 if error is None else _p_value(differences, interval.mean, error)
    found = replace(nothing, difference=interval.mean, low=interval.low, high=interval.high, p=p)
    found = replace(found, percent=percent(interval.mean), percent_low=percent(interval.low))
    found = replace(found, percent_high=percent(interval.high), note="" if error is not None else "one pair of runs")
    return replace(found, says=_says(found))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for being the best of several (Holm, 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    reached = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = reached
    return adjusted


def compare_arms(metric: str, runs: Mapping[str, Sequence[float | None]], against: str) -> list[Comparison]:
    """Every other arm against one that was named beforehand, corrected over the arms. `runs`: by arm, the figure of
    every seed."""
    return corrected([compare(metric, (arm, runs[arm]), (against, runs[against])) for arm in runs if arm != against])


def compare_with_best(metric: str, runs: Mapping[str, Sequence[float | None]], best: str) -> list[Comparison]:
    """Every other arm against one that was picked for its figures: corrected over all pairs of arms, because any of
    them could have come out as the best."""
    pairs = list(combinations(runs, 2))
    p_values = holm([compare(metric, (one, runs[one]), (other, runs[other])).p for one, other in pairs])
    p_of = dict(zip(map(frozenset, pairs), p_values, strict=True))
    found = [compare(metric, (arm, runs[arm]), (best, runs[best])) for arm in runs if arm != best]
    return [with_p(one, p_of[frozenset((one.arm, best))]) for one in found]


def corrected(found: Sequence[Comparison]) -> list[Comparison]:
    """The same, none of them called for being one of many."""
    return [with_p(one, p) for one, p in zip(found, holm([one.p for one in found]), strict=True)]


def with_p(found: Comparison, p: float) -> Comparison:
    """The same difference with a corrected probability, and what it then says."""
    found = replace(found, p=p)
    return replace(found, says=_says(found))


def _says(found: Comparison) -> str:
    """A call needs an interval without 0, a corrected p to match, and a difference of 3 % (of any base but 0)."""
    if found.difference is None or found.low is None or found.high is None:
        return TOO_CLOSE
    if found.low <= 0 <= found.high or found.p > 1 - CONFIDENCE:
        return TOO_CLOSE
    if found.percent is not None and abs(found.percent) < LEAST_PERCENT:
        return TOO_CLOSE
    return "better" if (found.difference > 0) == (found.metric in HIGHER_IS_BETTER) else "worse"


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("no values have no mean")
    return math.fsum(values) / len(values)


def _error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None from one value."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None


def _p_value(differences: Sequence[float], mean: float, error: float) -> float:
    """Of Student's t-test. Equal differences, as shares of a few requests often are, have no spread to be sure by: then
    of the sign test, which knows only that all point one way."""
    if float(np.ptp(differences)) <= ROUNDING * abs(mean):
        return 1.0 if mean == 0 else 2.0 ** (1 - len(differences))
    return float(2 * stats.t.sf(abs(mean) / error, len(differences) - 1))
