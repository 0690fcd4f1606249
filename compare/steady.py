"""Which part of a run counts: the beginning is cut off, and a run that never settles is overloaded."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from compare.outcome import TIMEOUT, Outcome

Series = NDArray[np.float64]

POINTS, BATCH = 500, 5  # samples of a run's outstanding requests, and how many make one batch (the 5 of MSER-5)
TREND_BATCHES = 10
TREND_LEVEL = 0.01  # chance of calling a steady run overloaded, were its batches independent
LEAST_GROWTH, GROWTH_DEVIATIONS = 0.25, 2.0  # of the mean, and of its root (a Poisson number's deviation)


def measured_window(outcomes: Sequence[Outcome]) -> tuple[tuple[float, float], bool]:
    """The window in seconds of the run, from the end of its warm-up to its last arrival; and whether the run is
    overloaded: requests pile up all through the window. Half of the requests stay, however they came. Raises
    ValueError for a run without requests."""
    if not outcomes:
        raise ValueError("a run without requests has no window")
    last_s = max(outcome.scheduled_s for outcome in outcomes)
    first_s = min(outcome.scheduled_s for outcome in outcomes)
    if last_s <= first_s:
        return (first_s, last_s), False
    at_s = np.linspace(first_s, last_s, POINTS)
    waiting = outstanding(outcomes, at_s)
    cut = mser(waiting)
    median_s = float(np.median([outcome.scheduled_s for outcome in outcomes]))
    return (min(float(at_s[cut]), median_s), last_s), is_growing(waiting[cut:])


def outstanding(outcomes: Sequence[Outcome], at_s: Series) -> Series:
    """Requests that were due and not over, at each time. One without an end is never over, and neither is one that was
    given up: else a server that answers nobody would look steady as soon as the first ones are."""
    due = np.sort([outcome.scheduled_s for outcome in outcomes])
    over = np.sort([_over_s(outcome) for outcome in outcomes])
    counts = np.searchsorted(due, at_s, side="right") - np.searchsorted(over, at_s, side="right")
    return counts.astype(np.float64)


def _over_s(outcome: Outcome) -> float:
    return math.inf if outcome.ended_s is None or outcome.error == TIMEOUT else outcome.ended_s


def mser(series: Series, batch: int = BATCH) -> int:
    """How many of the first values to cut off: MSER-5 (White, Cobb and Spratt, 2000).

    The cut is where the rest's mean is known best: the least squared deviation over the squared number of batches.
    It is at most half, beyond which the rule is known to fail.
    """
    num_batches = len(series) // batch
    if num_batches < 2:
        return 0
    means = series[: num_batches * batch].reshape(num_batches, batch).mean(axis=1)
    errors = [
        np.square(means[cut:] - means[cut:].mean()).sum() / (num_batches - cut) ** 2
        for cut in range(num_batches // 2 + 1)
    ]
    return int(np.argmin(errors)) * batch


def is_growing(series: Series) -> bool:
    """Whether outstanding requests grow: a slope over batch means that chance does not explain (t-test, one-sided),
    and that matters: a quarter of the mean over the window, and more than two of its deviations."""
    size = len(series) // TREND_BATCHES
    if size == 0:
        return False
    means = series[: size * TREND_BATCHES].reshape(TREND_BATCHES, size).mean(axis=1)
    if float(np.ptp(means)) == 0:
        return False
    line = stats.linregress(np.arange(TREND_BATCHES), means, alternative="greater")
    growth, mean = line.slope * TREND_BATCHES, float(means.mean())
    matters = growth > max(LEAST_GROWTH * mean, GROWTH_DEVIATIONS * math.sqrt(mean))
    return bool(line.pvalue < TREND_LEVEL and matters)
