"""The step-time model and the watchdog's deadline, both estimated from earlier steps on this device.

The model is fitted to the latest steps by non-negative least squares of relative errors. A few older steps of each
kind also count, with a small weight, so that rare kinds are not forgotten (as in NVIDIA Dynamo's bucketed reservoir).
Memory is bounded, and fitting takes less than 1 % of the duration of the steps.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from scheduler.cost import MAX_COEFFICIENT, CostModel, StepWork
from scheduler.request import Step

RECENT = 256  # number of latest steps that are kept; `margin` is computed from them
FITTED = 128  # number of latest steps that the model is fitted to
DECAY = 0.98  # weight of a step relative to the next newer step; the weight halves every 34 steps
KINDS, PER_KIND, OLD_WEIGHT = 48, 2, 0.02  # older steps: how many kinds are kept, how many steps per kind, their weight
INERTIA = 1e-4  # weight of the previous model in a fit; matters only for coefficients that the steps do not determine
NOISE = 0.1  # assumed relative error of a measurement; a larger value pulls the cost of attention more strongly to 0
REACH = 1024  # it is assumed that attention to this many tokens takes at most about as long as the rest of a step
KNEE_GAIN = 0.98  # `knee_tokens` changes only if the new squared error is below this fraction of the current error
FIRST_FIT = 8  # number of steps before the first fit
REFIT_STEPS, REFIT_S = 16, 0.1  # minimum steps and seconds between fits; a fit takes less than a millisecond
CHANGE = 1.5  # the device's speed has changed if the median of the last WATCHED predictions is off by this factor
WATCHED = 8
MAX_RESCALE = 32.0  # limit of the total factor by which changes of speed rescale a measurement
QUANTILE = 0.99  # `margin` covers this quantile of the relative prediction errors of steps with prompts
ENOUGH = 20  # if fewer recent steps than this have prompts, the margin is computed from all recent steps
MARGIN_CAP = 1.0
KNEES = (0.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
FINE_KNEES = range(0, 513, 8)
SLACK = 10.0  # the deadline is at least this multiple of the expected time, because the machine may be busy
FIRST_S = 300.0  # deadline of the first step, in seconds


class StepTiming(NamedTuple):
    """The start of a step's pass (Unix time), and the durations of the pass and of the rest of the iteration."""

    step: Step
    start_ns: int
    device_ns: int
    host_ns: int


class StepObservation(NamedTuple):
    """The work of a step, its measured duration (`measured_s`), and that duration rescaled to the device's current
    speed (`seconds`)."""

    work: StepWork
    seconds: float
    measured_s: float

    def slower(self, factor: float) -> "StepObservation":
        """Return the observation with `seconds` rescaled to a device that is slower by `factor`.

        The total rescaling is limited, because the product of many factors could diverge on a busy machine.
        """
        least_s, most_s = self.measured_s / MAX_RESCALE, self.measured_s * MAX_RESCALE
        return self._replace(seconds=min(most_s, max(least_s, self.seconds * factor)))


Kind = tuple[int, int, int]


def _kind(work: StepWork) -> Kind:
    """Return the kind of a step: steps of one kind have similar numbers of tokens and lengths of context."""
    prompt = work.prefill_tokens
    reach = (work.prefill_pairs // prompt).bit_length() // 2 if prompt else -1
    return prompt.bit_length(), reach, work.num_decodes > 0 if prompt else work.decode_tokens.bit_length()


class CostFit:
    """Fits a `CostModel` to the steps that a device runs.

    The engine owns this object. The engine's thread calls `observe` after each step and passes `model()` to the
    scheduler:

        fit.observe(step.work, seconds)
        scheduler.cost = fit.model()

    Guarantees: Memory is limited to RECENT + KINDS * PER_KIND observations. Between fits, `model()` returns the same
    object. After a change of the device's speed, the model is corrected when at least WATCHED steps of known kinds
    have run, which took at least REFIT_S seconds in total.
    """

    def __init__(self) -> None:
        self._recent: deque[StepObservation] = deque(maxlen=RECENT)
        self._old: OrderedDict[Kind, deque[StepObservation]] = OrderedDict()
        self._ratios: deque[float] = deque(maxlen=WATCHED)  # measured time / predicted time of the last steps
        self._model: CostModel | None = None
        self._known: set[Kind] = set()  # kinds of steps that the model was fitted to
        self._steps = 0  # number of steps since the last fit
        self._seconds = 0.0
        self._challenger = 0

    @property
    def num_observations(self) -> int:
        """The number of observations that are kept, at most RECENT + KINDS * PER_KIND."""
        return len(self._recent) + sum(map(len, self._old.values()))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record that a step with `work` took `seconds`. Takes a few microseconds."""
        if work.tokens == 0 or seconds <= 0:
            return
        if len(self._recent) == RECENT:
            self._keep(self._recent[0])
        self._recent.append(StepObservation(work, seconds, seconds))
        self._steps += 1
        self._seconds += seconds
        # For a new kind of step, a wrong prediction does not mean that the device's speed has changed.
        if self._model is not None and _kind(work) in self._known:
            self._ratios.append(seconds / max(self._model.seconds(work), 1e-9))

    def model(self) -> CostModel | None:
        """Fit the model if a fit is due, and return it. Return None until FIRST_FIT steps have run."""
        if self._model is None:
            due = self._steps >= FIRST_FIT
        elif self._seconds < REFIT_S:
            due = False
        elif len(self._ratios) == WATCHED and not 1 / CHANGE < (ratio := median(self._ratios)) < CHANGE:
            self._rescale(ratio)
            due = True
        else:
            due = self._steps >= REFIT_STEPS
        if due:
            self._refit()
        return self._model

    def _keep(self, sample: StepObservation) -> None:
        """Keep an observation that is no longer recent, together with others of its kind. If there are too many kinds,
        drop the kind that was seen least recently."""
        kind = _kind(sample.work)
        self._old.setdefault(kind, deque(maxlen=PER_KIND)).append(sample)
        self._old.move_to_end(kind)
        if len(self._old) > KINDS:
            self._old.popitem(last=False)

    def _rescale(self, factor: float) -> None:
        """Rescale the model and older observations to a device that has become slower by `factor`."""
        assert self._model is not None
        overhead, per_token, knee, *rest = self._model.packed()[:-1]
        overhead, per_token, *rest = (min(MAX_COEFFICIENT, factor * value) for value in (overhead, per_token, *rest))
        self._model = CostModel(overhead, per_token, knee, *rest)
        kept = [(old, len(old)) for old in self._old.values()]
        for samples, count in ((self._recent, len(self._recent) - WATCHED), *kept):
            for index in range(count):
                samples[index] = samples[index].slower(factor)

    def _refit(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._ratios.clear()
        self._challenger = (self._challenger + 1) % len(KNEES)
        before = self._model or CostModel()
        samples = list(islice(reversed(self._recent), FITTED))
        weights = WEIGHTS[: len(samples)]
        for old in self._old.values():
            samples += old
            weights += [OLD_WEIGHT**0.5] * len(old)
        try:
            error, fields = _fit(samples, weights, before, before.knee_tokens)
            other_error, other_fields = _fit(samples, weights, before, KNEES[self._challenger])
        except RuntimeError:  # the solver did not converge: keep the current model until the next fit
            return
        self._known = {_kind(sample.work) for sample in samples}
        model = CostModel(*(other_fields if other_error < KNEE_GAIN * error else fields))
        self._model = replace(model, margin=self._margin(model))

    def _margin(self, model: CostModel) -> float:
        """Return the margin for predictions: the quantile QUANTILE of (measured time / predicted time - 1). The steps
        are the recent steps with prompts, or all recent steps if fewer than ENOUGH have prompts."""
        samples = [sample for sample in self._recent if sample.work.prefill_tokens]
        if len(samples) < ENOUGH:
            samples = list(self._recent)
        excess = sorted(sample.seconds / max(model.seconds(sample.work), 1e-9) - 1 for sample in samples)
        return min(MARGIN_CAP, max(0.0, excess[int(QUANTILE * (len(excess) - 1))]))


WEIGHTS = [DECAY ** (age / 2) for age in range(FITTED)]  # square roots, because the fit sums squared errors


def _fit(
    samples: Sequence[StepObservation], weights: Sequence[float], before: CostModel, knee: float
) -> tuple[float, tuple[float, ...]]:
    """Fit a model whose `knee_tokens` is `knee`. Return the weighted sum of squared relative errors, and the fields of
    the CostModel except `margin`.

    Solves a non-negative least squares problem with a row for each sample. One more row for each coefficient (weight
    INERTIA) pulls the coefficient towards its value in `before`.

    The coefficients of attention (per_pair and per_context) are instead pulled towards 0, with a greater weight. This
    weight assumes that REACH tokens of context take at most as long as the rest of a step. Once steps with long
    contexts have been seen, this pull has no effect. Without it, the noise of short prompts would determine per_pair,
    and the time of a long prompt could seem 100 times too long. Raises RuntimeError if the solver does not converge.
    """
    works, seconds = [sample.work for sample in samples], np.array([sample.seconds for sample in samples])
    terms = [(1, max(knee, w.tokens), w.prefill_pairs, w.decode_context, w.decode_tokens) for w in works]
    target = np.asarray(weights, np.float64)
    # Dividing by the measured time makes errors relative, and limits the effect of a step that the system delays.
    columns = np.array(terms, np.float64) * (target / seconds)[:, None]
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    old = np.array([before.overhead, before.per_token, before.per_pair, before.per_context, before.per_decode])
    pulls = np.full(len(norms), INERTIA**0.5)
    goals = pulls * old * norms

    def solve(used: list[int]) -> tuple[NDArray[np.float64], float]:
        matrix = np.concatenate((columns[:, used] / norms[used], np.diag(pulls)[np.ix_(used, used)]))
        solution, distance = nnls(matrix, np.concatenate((target, goals[used])))
        return solution / norms[used], float(distance)

    overhead, per_token, per_decode = solve([0, 1, 4])[0]  # the costs of a step, fitted without attention
    rest = np.array([per_token, overhead + per_token * max(knee, 1) + per_decode])
    strong = NOISE * REACH / np.maximum(rest, 1e-12) / norms[2:4]
    goals[2:4] = np.where(strong > pulls[2:4], 0.0, goals[2:4])
    pulls[2:4] = np.maximum(strong, pulls[2:4])
    (overhead, per_token, *others), distance = solve([0, 1, 2, 3, 4])
    return distance**2, (float(overhead), float(per_token), knee, *map(float, others))


def fit_cost(works: Sequence[StepWork], seconds: Sequence[float]) -> CostModel:
    """Return the model with the smallest sum of squared relative errors over these steps, without a margin.

    Raises ValueError if there are fewer than FIRST_FIT steps or a step took no time.
    """
    if len(works) < FIRST_FIT or min(seconds) <= 0:
        raise ValueError(f"a fit needs {FIRST_FIT} steps or more, each of which took some time")
    samples = [StepObservation(work, each, each) for work, each in zip(works, seconds, strict=True)]
    weights = [1.0] * len(samples)
    _, fields = min(_fit(samples, weights, CostModel(), knee) for knee in FINE_KNEES)
    return CostModel(*fields)


class StepDeadline:
    """Computes the watchdog's deadline for a step from the steps before it.

    The deadline is at least `least_s`, and at least `SLACK` times the expected time. The expected time is the larger of
    two values: the predicted time, and the number of tokens times the shortest time per token so far. The second value
    matters for the first long chunk of a node that has only decoded. A decode reads all weights for one token, so it
    takes longer than a token of a long chunk. The deadline is therefore long enough for the chunk.
    """

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self._token_s = math.inf

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` tokens took `seconds`."""
        self._token_s = min(self._token_s, seconds / max(1, tokens))

    def seconds(self, step: Step) -> float:
        """Return the number of seconds that a step may take."""
        if self._token_s == math.inf:
            return max(self.least_s, FIRST_S)
        return max(self.least_s, SLACK * max(step.predicted_s, step.work.tokens * self._token_s))
