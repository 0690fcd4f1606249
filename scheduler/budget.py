"""How many tokens a step may compute: a fixed number, or as many as keep it within a time between two tokens.

Nothing here reads a clock: the model of how long a step takes is an input, so the same inputs give the same budgets.
"""

from math import inf, sqrt
from typing import Protocol

from scheduler.cost import CostModel, StepWork

CEILING_TOKENS = 8192  # with an SLO: a step that nobody waits for; vLLM's default on large devices
UNWATCHED_S = 2.0  # how long it may last: who comes meanwhile waits, and a node that makes no turn counts as stuck
UNWATCHED_TOKENS = 512  # of such a step, before the model has seen larger ones
FLOOR_TOKENS = 16  # prompts always progress by so much
FLOOR_GROWTH = 1.1  # where decodes alone miss the SLO: prompts make their step longer by this factor, if that is more
FIRST_TOKENS = 64  # of prompts in a step, before the model has seen any
GROWTH = 1.25  # from one step to the next; shrinking is immediate
ENGINE_SHARE = 0.9  # of the time between two tokens; the rest is for their way through the router to the client
TRUST = 1.5  # times the largest step that a model was fitted on: so far is it believed


class Budget(Protocol):
    """Asked in this order, once a step: `begin`, `room` before each prompt that the step might compute, `end`."""

    @property
    def ceiling(self) -> int:
        """Tokens that no step exceeds."""
        ...

    def begin(self, cost: CostModel | None, watched: bool) -> None:
        """A step is being decided; `watched`: somebody waits for its next token while the step runs."""
        ...

    def room(self, work: StepWork, start: int) -> int:
        """Tokens, from position `start` of some prompt on, that the step may take beside the `work` it has already."""
        ...

    def end(self, work: StepWork) -> tuple[int, str]:
        """The step's work is decided. Returns how many tokens it was allowed, and why so many."""
        ...


class FixedBudget:
    """Every step has the same number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.ceiling = tokens

    def begin(self, cost: CostModel | None, watched: bool) -> None:
        pass

    def room(self, work: StepWork, start: int) -> int:
        return max(0, self.ceiling - work.tokens)

    def end(self, work: StepWork) -> tuple[int, str]:
        return self.ceiling, "fixed"


class SloBudget:
    """The largest step that the model predicts to last no longer than `target_s` at its residual quantile.

    The prediction counts the decodes that the step has already and the context that each chunk attends to. The reason
    says what bound the step: "slo", "slo floor" (the target leaves prompts next to nothing, or cannot be met), "slo
    growing" (more is likely to fit, but was not tried yet), "ceiling", "no decodes" (nobody waits for a token: up to
    `UNWATCHED_S`) or "no model yet".
    """

    def __init__(self, target_s: float, ceiling: int, floor: int = FLOOR_TOKENS, first: int = FIRST_TOKENS) -> None:
        self.target_s = target_s
        self.ceiling = ceiling
        self._floor = floor
        self._first = first
        self._cost: CostModel | None = None
        self._watched = False
        self._largest = 0  # prompt tokens of any step so far
        self._trusted = first  # prompt tokens that the model in force is believed for
        self._granted = first  # prompt tokens that the last watched step was allowed
        self._granted_before = first  # when the model in force came
        self._grant: tuple[int, str] | None = None  # of the step being decided

    def begin(self, cost: CostModel | None, watched: bool) -> None:
        if cost is not self._cost:
            self._cost = cost
            self._trusted = max(self._trusted, int(TRUST * self._largest))
            self._granted_before = self._granted
        self._watched = watched
        self._grant = None

    def room(self, work: StepWork, start: int) -> int:
        granted, reason = self._grant_for(work, start)
        if self._grant is None or granted > self._grant[0]:  # a prompt with less context may get more
            self._grant = granted, reason
        return max(0, min(granted - work.prefill_tokens, self.ceiling - work.tokens))

    def end(self, work: StepWork) -> tuple[int, str]:
        granted, reason = self._grant or self._grant_for(work, 0)
        self._largest = max(self._largest, work.prefill_tokens)
        if self._grant is not None and self._watched:
            self._granted = granted
        return min(self.ceiling, work.num_decodes + granted), reason

    def _grant_for(self, work: StepWork, start: int) -> tuple[int, str]:
        """Prompt tokens of the whole step, those that `work` holds included."""
        if not self._watched:
            return self._unwatched(work, start), "no decodes"
        if self._cost is None:
            return self._first, "no model yet"
        limit_s = self.target_s / (1 + self._cost.margin)
        alone_s = self._cost.seconds(StepWork(num_decodes=work.num_decodes, decode_context=work.decode_context))
        is_missed = alone_s > limit_s
        fits = self._fits(FLOOR_GROWTH * alone_s if is_missed else limit_s, work, start)
        # There is no slack to be wrong in: each model has to see what the one before it allowed.
        granted = min(self._granted, self._granted_before) if is_missed else self._granted
        tried = min(self._trusted, int(granted * GROWTH) + self._floor)
        if is_missed or fits < self._floor:
            return max(self._floor, int(min(fits, tried))), "slo floor"
        if min(fits, tried) + work.num_decodes >= self.ceiling:
            return self.ceiling, "ceiling"
        return (tried, "slo growing") if fits > tried else (int(fits), "slo")

    def _unwatched(self, work: StepWork, start: int) -> int:
        tried = max(self._trusted, UNWATCHED_TOKENS)
        fits = inf if self._cost is None else self._fits(max(UNWATCHED_S, self.target_s), work, start)
        return max(self._floor, int(min(fits, tried, self.ceiling)))

    def _fits(self, seconds: float, work: StepWork, start: int) -> float:
        assert self._cost is not None
        return work.prefill_tokens + tokens_within(self._cost, seconds, work, start)


def tokens_within(cost: CostModel, seconds: float, work: StepWork, start: int) -> float:
    """The largest chunk from position `start` on that `work` may have in addition and still be predicted to last
    `seconds`; 0 when it lasts longer without any.

    A chunk of n tokens costs `per_pair · (n·start + n·(n + 1)/2)`, and `per_token` for each token over the knee.
    """
    rest = seconds - cost.seconds(work)
    if rest <= 0:
        return 0.0
    linear = cost.per_pair * (start + 0.5)
    free = max(0.0, cost.knee_tokens - work.tokens)
    count = _root(cost.per_pair / 2, linear, rest)
    if count > free:
        count = _root(cost.per_pair / 2, linear + cost.per_token, rest + cost.per_token * free)
    return count


def _root(square: float, linear: float, value: float) -> float:
    """The n >= 0 with square·n² + linear·n = value, in the form that stays exact for a small square."""
    bottom = linear + sqrt(linear * linear + 4 * square * value)
    return 2 * value / bottom if bottom > 0 else inf


def budget_of(max_num_batched_tokens: int, tbt_slo_s: float) -> Budget:
    """The budget that a node's settings ask for; `tbt_slo_s`: longest time between two tokens at the client, 0: any.

    An SLO replaces the fixed number, which is then only a lower bound of the ceiling: who gives an SLO wants to be
    held back by it alone.
    """
    if tbt_slo_s <= 0:
        return FixedBudget(max_num_batched_tokens)
    return SloBudget(ENGINE_SHARE * tbt_slo_s, max(max_num_batched_tokens, CEILING_TOKENS))
