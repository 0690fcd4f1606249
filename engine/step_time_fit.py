"""Learns a device's step-time model from the steps that it ran, while it runs. Pure Python, bounded in memory and time.

Non-negative least squares of relative errors over the latest steps and, at a small weight, a few of each kind of step
that was seen before them, so that rare kinds are not forgotten (the bucketed reservoir is NVIDIA Dynamo's idea).
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from operator import mul
from statistics import median
from typing import NamedTuple

from scheduler.cost import MOST, CostModel, StepWork

RECENT = 256  # steps in full, which the margin is taken from
FITTED = 128  # of them, the newer the heavier
DECAY = 0.98  # of a step's weight from one to the next: half of it after 34
KINDS, PER_KIND, OLD_WEIGHT = 48, 2, 0.02  # of older steps, by kind
INERTIA = 1e-4  # of the model before, where 1 is all that the steps say of a coefficient: what they do not tell stays
KNEE_GAIN = 0.98  # another knee has to bring the squared error down to this
FIRST_FIT = 8  # steps
REFIT_STEPS, REFIT_S = 16, 0.1  # a refit takes under a millisecond: less than 1 % of the steps that it is for
CHANGE = 1.5  # the median of WATCHED steps is off by this factor: the device's speed has changed
WATCHED = 8
MOST_CHANGE = 32.0  # by so much, up or down, what was measured before is reckoned anew, however often the speed changes
QUANTILE = 0.99  # of the relative residuals of steps with prompts; of all where fewer than ENOUGH had any
ENOUGH = 20
MARGIN_CAP = 1.0
KNEES = (0.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class StepObservation(NamedTuple):
    """One step: what it did, and how long it took; `seconds` as the device is now, `measured_s` as it was then."""

    tokens: int
    pairs: int
    context: int
    decodes: int
    prefill_tokens: int
    seconds: float
    measured_s: float

    def slower(self, factor: float) -> "StepObservation":
        """As if measured on a device that is slower by `factor`, within bounds: on a busy machine factors come without
        end, and their product goes anywhere."""
        least_s, most_s = self.measured_s / MOST_CHANGE, self.measured_s * MOST_CHANGE
        return self._replace(seconds=min(most_s, max(least_s, self.seconds * factor)))


Kind = tuple[int, int, int]


def _kind(sample: StepObservation) -> Kind:
    """Steps of one kind have about as many tokens, and chunks that attend to about as much."""
    prompt = sample.prefill_tokens
    reach = (sample.pairs // prompt).bit_length() // 2 if prompt else -1
    return prompt.bit_length(), reach, sample.decodes > 0 if prompt else sample.decodes.bit_length()


class CostFit:
    """The engine's thread calls `observe` after each step and hands `model()` to the scheduler:

    fit.observe(step.work, seconds)
    scheduler.cost = fit.model()
    """

    def __init__(self) -> None:
        self._recent: deque[StepObservation] = deque(maxlen=RECENT)
        self._old: OrderedDict[Kind, deque[StepObservation]] = OrderedDict()
        self._ratios: deque[float] = deque(maxlen=WATCHED)  # of measured to predicted time
        self._model: CostModel | None = None
        self._known: set[Kind] = set()  # kinds of steps that it was fitted to
        self._steps = 0  # since the last fit
        self._seconds = 0.0
        self._challenger = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """One step took so long. Costs a few microseconds."""
        if work.tokens == 0 or seconds <= 0:
            return
        if len(self._recent) == RECENT:
            self._keep(self._recent[0])
        terms = work.tokens, work.prefill_pairs, work.decode_context, work.num_decodes, work.prefill_tokens
        sample = StepObservation(*terms, seconds, seconds)
        self._recent.append(sample)
        self._steps += 1
        self._seconds += seconds
        # Of a kind that is new to the model, it is the model that is wrong, and not the device that changed.
        if self._model is not None and _kind(sample) in self._known:
            self._ratios.append(seconds / max(self._model.seconds(work), 1e-9))

    def model(self) -> CostModel | None:
        """The model in force; None before the first steps. Refits it where that is due, which costs under 1 % of the
        time of the steps since the last fit; between fits it is the same object."""
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
        """A sample leaves the recent ones: it stays as one of its kind. Kinds not seen for longest go."""
        kind = _kind(sample)
        self._old.setdefault(kind, deque(maxlen=PER_KIND)).append(sample)
        self._old.move_to_end(kind)
        if len(self._old) > KINDS:
            self._old.popitem(last=False)

    def _rescale(self, factor: float) -> None:
        """The device has become slower by `factor`: what it did before is taken as if it had been so then, until steps
        of that kind come again."""
        assert self._model is not None
        overhead, per_token, knee, *rest = self._model.packed()[:-1]
        overhead, per_token, *rest = (min(MOST, factor * value) for value in (overhead, per_token, *rest))
        self._model = CostModel(overhead, per_token, knee, *rest)
        for samples, count in (
            (self._recent, len(self._recent) - WATCHED),
            *((old, len(old)) for old in self._old.values()),
        ):
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
        self._known = set(map(_kind, samples))
        error, fields = _fit(samples, weights, before, before.knee_tokens)
        other_error, other_fields = _fit(samples, weights, before, KNEES[self._challenger])
        model = CostModel(*(other_fields if other_error < KNEE_GAIN * error else fields))
        self._model = replace(model, margin=self._margin(model))

    def _margin(self, model: CostModel) -> float:
        """By how much of its prediction a recent step lasted longer, at the quantile."""
        samples = [sample for sample in self._recent if sample.prefill_tokens]
        if len(samples) < ENOUGH:
            samples = list(self._recent)
        excess = sorted(sample.seconds / max(_predicted(model, sample), 1e-9) - 1 for sample in samples)
        return min(MARGIN_CAP, max(0.0, excess[int(QUANTILE * (len(excess) - 1))]))


WEIGHTS = [DECAY ** (age / 2) for age in range(FITTED)]  # square roots, as squares are summed


def _predicted(model: CostModel, sample: StepObservation) -> float:
    return model.seconds(StepWork(0, sample.tokens - sample.decodes, sample.pairs, sample.decodes, sample.context))


def _fit(
    samples: Sequence[StepObservation], weights: Sequence[float], before: CostModel, knee: float
) -> tuple[float, tuple[float, ...]]:
    """Returns (weighted sum of squared relative errors, the CostModel's fields but its margin) for one knee."""
    # Dividing by the measured time makes errors relative, and bounds what one stall of the system can do.
    scales = [weight / sample.seconds for weight, sample in zip(weights, samples, strict=True)]
    values = (
        [max(knee, sample.tokens) for sample in samples],
        [sample.pairs for sample in samples],
        [sample.context for sample in samples],
        [sample.decodes for sample in samples],
    )
    columns = [scales, *(list(map(mul, scales, column)) for column in values)]
    size = len(columns)
    norms = [sum(map(mul, column, column)) ** 0.5 or 1.0 for column in columns]
    gram = [[sum(map(mul, columns[i], columns[j])) / (norms[i] * norms[j]) for j in range(i + 1)] for i in range(size)]
    matrix = [[gram[max(i, j)][min(i, j)] for j in range(size)] for i in range(size)]
    wanted = [sum(map(mul, column, weights)) / norm for column, norm in zip(columns, norms, strict=True)]
    error = sum(map(mul, weights, weights))
    old = (before.overhead, before.per_token, before.per_pair, before.per_context, before.per_decode)
    for i in range(size):
        matrix[i][i] += INERTIA
        wanted[i] += INERTIA * old[i] * norms[i]
        error += INERTIA * (old[i] * norms[i]) ** 2
    solution = non_negative_solution(matrix, wanted)
    error += sum(
        value * (sum(map(mul, row, solution)) - 2 * b) for value, row, b in zip(solution, matrix, wanted, strict=True)
    )
    overhead, per_token, *rest = (value / norm for value, norm in zip(solution, norms, strict=True))
    return error, (overhead, per_token, knee, *rest)


def non_negative_solution(matrix: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 that minimises x·matrix·x - 2·wanted·x, for a positive definite matrix with a unit diagonal: the
    active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974)."""
    size = len(wanted)
    solution = [0.0] * size
    active: list[int] = []  # coordinates that may be above 0
    for _ in range(3 * size):
        slope = [wanted[i] - sum(map(mul, matrix[i], solution)) for i in range(size)]
        steepest = max((i for i in range(size) if i not in active), key=lambda i: slope[i], default=None)
        if steepest is None or slope[steepest] <= 1e-9 * max(map(abs, wanted)):
            break
        active = sorted([*active, steepest])
        while active:
            found = _solve([[matrix[i][j] for j in active] for i in active], [wanted[i] for i in active])
            if min(found) > 0:
                break
            # As far towards it as nobody falls below 0; who arrives there leaves.
            share = min(
                solution[i] / (solution[i] - value) for i, value in zip(active, found, strict=True) if value <= 0
            )
            for i, value in zip(active, found, strict=True):
                solution[i] += share * (value - solution[i])
            leaving = {i for i, value in zip(active, found, strict=True) if value <= 0 and solution[i] <= 1e-12}
            active = [i for i in active if i not in leaving]
            for i in leaving:
                solution[i] = 0.0
        for i, value in zip(active, found, strict=True) if active else ():
            solution[i] = value
    return solution


def _solve(matrix: list[list[float]], wanted: list[float]) -> list[float]:
    """Gauss-Jordan elimination; a positive definite matrix needs no pivoting. Changes its arguments."""
    for pivot in range(len(wanted)):
        scale = 1 / matrix[pivot][pivot]
        for row in range(len(wanted)):
            factor = matrix[row][pivot] * scale
            if row != pivot and factor:
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
                wanted[row] -= factor * wanted[pivot]
    return [value / matrix[index][index] for index, value in enumerate(wanted)]
