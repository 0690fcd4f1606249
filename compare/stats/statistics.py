"""Significance of differences between arms. A pair is two arms' runs with the same seed and the same traffic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

import numpy as np
from scipy import stats

HIGHER_IS_BETTER = frozenset({"attainment", "goodput_rps", "fluidity", "throughput_tps", "capacity_rps"})
SHARES = frozenset({"attainment", "fluidity"})
CONFIDENCE = 0.95
MIN_PERCENT = 3.0  # smaller differences, in percent, are too close to call even if they are significant
ROUNDING = 1e-9  # relative deviation up to which differences count as equal
ASSUMED_SPREAD = 0.1  # standard deviation that the t-test assumes if all differences of shares are equal
TOO_CLOSE = "too close to call"

Runs = Mapping[str, Sequence[float | None]]  # figures by arm, with the seeds in the same order for all arms


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval. The bounds are None if there are fewer than two values."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two arms in one metric: the paired difference (`arm` - `against`) with its interval.

    `percent`, `percent_low` and `percent_high` are relative to the mean of `against`, or None if that mean is 0. `p`
    is corrected for the number of comparisons. If `difference` is None, `note` says why.
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


def student(values: Sequence[float]) -> Interval:
    """Return the mean with its confidence interval by Student's t distribution."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(mean, None, None)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * stats.sem(values))
    return Interval(mean, mean - reach, mean + reach)


def within(low: float, high: float, values: Sequence[float]) -> Interval:
    """Return the mean of values that are bounded by `low` and `high`, and a confidence interval within these bounds.

    The interval is Wilson's score interval with two changes for clustered samples (Franco et al. 2019, PMC6690503): it
    uses Student's t, and it derives an effective sample size from the spread of the seeds. If `high` is infinite, the
    variance is proportional to the distance from `low` to the mean, as it is for small shares. Far from the bounds, the
    result is close to Student's interval.
    """
    found, above = student(values), fmean(values) - low
    curve = above / (high - low)  # 0 if there is no upper bound
    if found.high is None or above <= 0 or curve >= 1:
        return found
    k = (found.high - found.mean) ** 2 / (above * above * (1 - curve))
    scale, reach = above / (1 + k * curve), math.sqrt(k * (1 - curve) + k * k / 4)
    below, beyond = (low + scale * (1 + k / 2 + way * reach) for way in (-1, 1))
    return Interval(found.mean, max(low, below), min(high, beyond))


def compare(
    metric: str, arm: tuple[str, Sequence[float | None]], against: tuple[str, Sequence[float | None]]
) -> Comparison:
    """Compare two arms, each given as its name and its figures. Raises ValueError if the figures are not paired.

    If a seed has no figure in one of the arms, for example because the run was overloaded, return a comparison without
    a difference: the remaining seeds would be a biased selection.
    """
    (name, ours), (other, theirs) = arm, against
    if len(ours) != len(theirs):
        raise ValueError(f"{metric}: {len(ours)} runs of {name} and {len(theirs)} of {other} are not pairs")
    pairs = [(one, two) for one, two in zip(ours, theirs, strict=True) if one is not None and two is not None]
    if len(pairs) < len(ours) or not pairs:
        note = f"{len(ours) - len(pairs)} of {len(ours)} pairs of runs lack this figure"
        return Comparison(name, other, metric, None, None, None, None, 1.0, TOO_CLOSE, note=note)
    differences = [one - two for one, two in pairs]
    found = within(-1.0, 1.0, differences) if metric in SHARES else student(differences)
    base = abs(fmean([two for _, two in pairs]))
    percent, low, high = (
        None if value is None or base == 0 else 100 * value / base for value in (found.mean, found.low, found.high)
    )
    p, note = (1.0, "one pair of runs") if found.low is None else (_p_value(differences, metric in SHARES), "")
    values = (name, other, metric, found.mean, percent, found.low, found.high)
    return with_p(Comparison(*values, p, TOO_CLOSE, low, high, note), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values, adjusted for multiple comparisons (Holm, 1979), in the order of `p_values`."""
    adjusted = [0.0] * len(p_values)
    reached = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        reached = max(reached, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = reached
    return adjusted


def compare_arms(metric: str, runs: Runs, against: str) -> list[Comparison]:
    """Compare every other arm with `against`, which was chosen in advance. Correct p-values for the number of arms."""
    return corrected([compare(metric, (arm, runs[arm]), (against, runs[against])) for arm in runs if arm != against])


def compare_with_best(metric: str, runs: Runs, best: str) -> list[Comparison]:
    """Compare every other arm with `best`, which was chosen after the runs, by its figures. Correct p-values for all
    pairs of arms, because any arm could have been the best."""
    pairs = list(combinations(runs, 2))
    p_values = holm([compare(metric, (one, runs[one]), (other, runs[other])).p for one, other in pairs])
    p_of = dict(zip(map(frozenset, pairs), p_values, strict=True))
    found = [compare(metric, (arm, runs[arm]), (best, runs[best])) for arm in runs if arm != best]
    return [with_p(one, p_of[frozenset((one.arm, best))]) for one in found]


def corrected(found: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with p-values that are corrected for the number of comparisons."""
    return [with_p(one, p) for one, p in zip(found, holm([one.p for one in found]), strict=True)]


def with_p(found: Comparison, p: float) -> Comparison:
    """Return the comparison with another p-value, and update `says` accordingly."""
    found = replace(found, p=p)
    return replace(found, says=_says(found))


def _says(found: Comparison) -> str:
    """Return "better" or "worse" if 0 is outside the interval, p is significant, and the difference is at least 3 %."""
    if found.difference is None or found.low is None or found.high is None:
        return TOO_CLOSE
    is_small = found.percent is not None and abs(found.percent) < MIN_PERCENT
    if found.low <= 0 <= found.high or found.p > 1 - CONFIDENCE or is_small:
        return TOO_CLOSE
    return "better" if (found.difference > 0) == (found.metric in HIGHER_IS_BETTER) else "worse"


def _p_value(differences: Sequence[float], are_shares: bool) -> float:
    """Return the p-value of Student's t-test. If all differences are equal, they have no spread, so use the sign test.

    Equal differences are common if shares are computed from few requests. The sign test is significant only with six
    pairs or more, even if all requests of one arm and none of the other meet the SLO. For shares, therefore, a t-test
    with an assumed spread is also computed, and the smaller p-value counts.
    """
    mean, count = fmean(differences), len(differences)
    if float(np.ptp(differences)) > ROUNDING * abs(mean):
        return float(stats.ttest_1samp(differences, 0.0).pvalue)
    p = 1.0 if mean == 0 else 2.0 ** (1 - count)
    assumed = float(2 * stats.t.sf(abs(mean) * math.sqrt(count) / ASSUMED_SPREAD, count - 1))
    return min(p, assumed) if are_shares else p
