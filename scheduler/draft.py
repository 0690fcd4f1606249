"""Decides how many guessed tokens a step verifies, and tracks the guesses of a request.

To verify a guess of k tokens, a decode computes k more tokens in its step. Each guessed token before the first wrong
one saves a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import inf

from scheduler.cost import CostModel, StepWork

PRIOR_ACCEPTED, PRIOR_TRIED = 1.0, 2.0  # initial values of `DraftHistory.accepted` and `DraftHistory.tried`
# After EXPLORE_STEPS steps without guesses, a step verifies EXPLORED guessed tokens: see `choose_counts`.
EXPLORE_STEPS, EXPLORED = 16, 2
DECAY = 0.95  # each compared token multiplies the weights of earlier tokens by this; the last 14 tokens weigh half


@dataclass(slots=True)
class DraftHistory:
    """The history of the guesses for one request. The scheduler owns the history, as it owns the request."""

    text: str = ""  # the request's tokens so far, one character each: see `PromptLookup`
    guess: Sequence[int] = ()  # guessed continuation of the request's tokens, even if no step verifies it
    accepted: float = PRIOR_ACCEPTED
    tried: float = PRIOR_TRIED

    @property
    def acceptance(self) -> float:
        """The estimated probability that a guessed token is right if all guesses before it are right."""
        return self.accepted / self.tried

    def compare(self, tokens: Sequence[int]) -> None:
        """Compare the guess with the tokens that a step generated, even if the step did not verify the guess."""
        for token, guessed in zip(tokens, self.guess, strict=False):
            is_right = token == guessed
            self.accepted, self.tried = DECAY * self.accepted + is_right, DECAY * self.tried + 1
            if not is_right:
                break
        self.guess = ()


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A decode for which up to `limit` tokens can be guessed. `context` is the sequence's length before the guesses."""

    acceptance: float
    limit: int
    context: int


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits on a step with guesses: its number of tokens, and its predicted duration in seconds."""

    tokens: int
    seconds: float = inf


def choose_counts(
    candidates: Sequence[DraftCandidate],
    work: StepWork,
    cost: CostModel | None,
    limits: DraftLimits,
    pass_s: float = 0.0,
    explores: bool = False,
) -> list[int]:
    """Return how many tokens to guess for each candidate, so that the step yields the most tokens per second.

    `work` is the work of the step without guesses. The i-th guessed token of a request adds acceptance ** i expected
    tokens. Guessed tokens are added in descending order of this value, as long as they increase the expected tokens per
    predicted second. The drafter takes `pass_s` seconds for each token of the longest guess. Without a step-time model,
    all tokens that can be guessed are added if `limits.seconds` is infinite; otherwise no tokens are guessed. If
    `explores` is true and no guess would pay, up to EXPLORED tokens are added within the limits, because the model
    needs steps of different sizes to learn the cost of guesses.
    """
    longest = max((one.limit for one in candidates), default=0)
    if cost is None:
        depth = longest if limits.seconds == inf else 0
        return _fill(candidates, work, None, limits, depth, pass_s)[0]
    depths = range(longest + 1) if pass_s else (longest,)
    filled = [_fill(candidates, work, cost, limits, depth, pass_s) for depth in depths]
    counts, _ = max(filled, key=lambda one: one[1])
    if explores and not any(counts):
        counts, _ = _fill(candidates, work, cost, limits, min(longest, EXPLORED), pass_s, EXPLORED)
    return counts


def _fill(
    candidates: Sequence[DraftCandidate], work: StepWork, cost: CostModel | None, limits: DraftLimits, depth: int,
    pass_s: float, least: int = 0,
) -> tuple[list[int], float]:  # fmt: skip
    """Return how many tokens to guess for each candidate, at most `depth` each, and the expected tokens per second.

    The first `least` guessed tokens are added even if they do not increase the expected tokens per second.
    """
    counts, tokens = [0] * len(candidates), work.tokens
    expected, seconds = float(work.num_decodes), depth * pass_s + (cost.seconds(work) if cost is not None else 0.0)
    gains = [(-one.acceptance, index) for index, one in enumerate(candidates) if one.limit] if depth else []
    heapify(gains)
    while gains and tokens < limits.tokens:
        worth, index = -gains[0][0], gains[0][1]
        one = candidates[index]
        if cost is not None:
            longer = seconds + cost.decode_seconds(tokens, one.context + counts[index] + 1)
            pays = (expected + worth) * seconds > expected * longer or tokens < work.tokens + least
            if longer > limits.seconds or not pays:
                break
            seconds = longer
        tokens, expected = tokens + 1, expected + worth
        counts[index] += 1
        if counts[index] < min(one.limit, depth):
            heapreplace(gains, (-worth * one.acceptance, index))
        else:
            heappop(gains)
    return counts, expected / seconds if seconds else 0.0
