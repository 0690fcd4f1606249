"""Token budgets of steps: a fixed number, or the largest number that keeps the time between two tokens below an SLO.

The step-time model is an input, and no clock is read, so equal inputs give equal budgets.
"""

from math import inf, sqrt

from scheduler.cost import CostModel, StepWork

CEILING_TOKENS = 8192  # maximum number of tokens in a step on a node with an SLO: vLLM's default on large devices
UNWATCHED_S = 2.0  # maximum duration of a step without decodes; a request that arrives must wait until the step ends
UNWATCHED_TOKENS = 512  # a step without decodes may have this many tokens, even if no earlier step was as large
FLOOR_TOKENS = 16  # prompt tokens that every step may compute, even if the step then misses the SLO
FLOOR_GROWTH = 1.1  # if the decodes of a step alone miss the SLO, prompts may lengthen the step by up to this factor
FIRST_TOKENS = 64  # prompt tokens that a step may have before the first model is fitted
GROWTH = 1.25  # largest factor by which the budget grows from one step to the next; it may shrink by any factor
ENGINE_SHARE = 0.9  # the engine's share of the time between two tokens; the rest is for the router and the network
TRUST = 1.5  # a model is trusted up to this multiple of the largest step to which it was fitted


class Budget:
    """A token budget that allows `ceiling` tokens in every step, and the base class of other budgets.

    For each step the scheduler calls `begin`, then `room` before each prompt that the step may compute, then `end`.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling

    def begin(self, cost: CostModel | None, watched: bool) -> None:
        """Start a step. `watched` is true if a running request waits for its next token during the step."""

    def room(self, work: StepWork, start: int) -> int:
        """Return how many prompt tokens from position `start` on may be added to a step that already has `work`."""
        return max(0, self.ceiling - work.tokens)

    def longest_s(self) -> float:
        """Return the limit, in seconds, on the predicted duration of a step with guessed tokens."""
        return inf

    def end(self, work: StepWork) -> tuple[int, str]:
        """Finish a step with `work`. Return the number of tokens that the step was allowed, and the reason for it."""
        return self.ceiling, "fixed"


class SloBudget(Budget):
    """A budget that allows the largest step whose predicted duration is at most `target_s` / (1 + `CostModel.margin`).

    The prediction includes the step's decodes and the context that each chunk attends to. The scheduler owns the
    budget; all calls come from the engine's thread. `end` returns one of these reasons for the number of tokens:

    - "slo": the target limited the step.
    - "slo floor": the target leaves almost no room for prompts, or cannot be met. Prompts get at least `floor` tokens.
    - "slo growing": the model predicts that more tokens would fit, but the budget grows by at most `GROWTH` per step.
    - "ceiling": the step has the maximum size.
    - "no decodes": no request waits for a token, so the step may last up to `UNWATCHED_S`.
    - "no model yet": no step-time model has been fitted.
    """

    def __init__(self, target_s: float, ceiling: int, floor: int = FLOOR_TOKENS, first: int = FIRST_TOKENS) -> None:
        super().__init__(ceiling)
        self.target_s = target_s
        self._floor = floor
        self._first = first
        self._cost: CostModel | None = None
        self._watched = False  # whether any request waits for a token of the current step
        self._largest = 0  # the most prompt tokens in any step so far
        self._trusted = first  # the current model is trusted for steps of up to this many prompt tokens
        self._granted = first  # number of prompt tokens that the last watched step was allowed
        self._granted_before = first  # the value of `_granted` when the current model was set
        self._grant: tuple[int, str] | None = None  # tokens and reason for the current step

    def begin(self, cost: CostModel | None, watched: bool) -> None:
        if cost is not self._cost:
            self._cost = cost
            self._trusted = max(self._trusted, int(TRUST * self._largest))
            self._granted_before = self._granted
        self._watched = watched
        self._grant = None

    def room(self, work: StepWork, start: int) -> int:
        granted, reason = self._grant_for(work, start)
        if self._grant is None or granted > self._grant[0]:  # a prompt with less context may get more tokens
            self._grant = granted, reason
        return max(0, min(granted - work.prefill_tokens, self.ceiling - work.tokens))

    def longest_s(self) -> float:
        return self.target_s / (1 + self._cost.margin) if self._cost is not None else 0.0

    def end(self, work: StepWork) -> tuple[int, str]:
        granted, reason = self._grant or self._grant_for(work, 0)
        self._largest = max(self._largest, work.prefill_tokens)
        if self._grant is not None and self._watched:
            self._granted = granted
        return min(self.ceiling, work.decode_tokens + granted), reason

    def _grant_for(self, work: StepWork, start: int) -> tuple[int, str]:
        """Return how many prompt tokens the whole step may have, including those in `work`, and the reason for it."""
        if not self._watched:
            return self._unwatched(work, start), "no decodes"
        if self._cost is None:
            return self._first, "no model yet"
        limit_s = self.target_s / (1 + self._cost.margin)
        alone_s = self._cost.seconds(StepWork(num_decodes=work.num_decodes, decode_context=work.decode_context))
        is_missed = alone_s > limit_s
        fits = self._fits(FLOOR_GROWTH * alone_s if is_missed else limit_s, work, start)
        # While the SLO is missed, errors of the model do the most harm, so the budget grows only once per fitted model.
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
    """Return how many prompt tokens, from position `start` on, can be added to a step with `work`, so that the step is
    predicted to last at most `seconds`. Return 0 if `work` alone takes longer.

    A chunk of n tokens costs `per_pair · (n·start + n·(n + 1)/2)`, plus `per_token` for each token above the knee.
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
    """Return the solution n >= 0 of square·n² + linear·n = value. The formula is accurate even for a small `square`."""
    bottom = linear + sqrt(linear * linear + 4 * square * value)
    return 2 * value / bottom if bottom > 0 else inf


def budget_of(max_num_batched_tokens: int, tbt_slo_s: float, *, is_fitted: bool = False) -> Budget:
    """Return the budget for a node's settings.

    `tbt_slo_s` is the longest allowed time in seconds between two tokens at the client; 0 means no SLO. With an SLO,
    the ceiling is CEILING_TOKENS, or `max_num_batched_tokens` if that is larger. If `is_fitted` is true, the first
    model is trusted for steps of any size, as after a long run.
    """
    if tbt_slo_s <= 0:
        return Budget(max_num_batched_tokens)
    ceiling = max(max_num_batched_tokens, CEILING_TOKENS)
    return SloBudget(ENGINE_SHARE * tbt_slo_s, ceiling, first=ceiling if is_fitted else FIRST_TOKENS)
