"""Speculative decoding: guesses of a request's next tokens, and how many of them a step verifies. Pure decisions.

A guess of k tokens costs a decode k more rows of its step. Up to the first wrong one, each saves a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import TYPE_CHECKING, Protocol

from scheduler.cost import CostModel, StepWork

if TYPE_CHECKING:
    from scheduler.request import Request

PRIOR_ACCEPTED, PRIOR_TRIED = 1.0, 2.0  # what a request's acceptance is estimated from before any guess was compared
EXPLORE_STEPS, EXPLORED = 16, 2  # see `choose_counts`
DECAY = 0.95  # weight of a comparison relative to the next one: the last 14 have half of the weight


@dataclass(slots=True)
class DraftHistory:
    """What is known about the guesses for one request. The scheduler owns it with the request."""

    text: str = ""  # the request's tokens so far, one character each: see `PromptLookup`
    guess: Sequence[int] = ()  # of the tokens after the request's last one, verified or not
    accepted: float = PRIOR_ACCEPTED
    tried: float = PRIOR_TRIED

    @property
    def acceptance(self) -> float:
        """The estimated probability that a guessed token is right, if those before it are."""
        return self.accepted / self.tried

    def compare(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that a step generated, which need not have verified the guess."""
        for token, guessed in zip(tokens, self.guess, strict=False):
            is_right = token == guessed
            self.accepted, self.tried = DECAY * self.accepted + is_right, DECAY * self.tried + 1
            if not is_right:
                break
        self.guess = ()


class Drafter(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time, and never changes an answer.

    The scheduler calls `find` for each decode of a step, chooses how many tokens to guess, and calls `draft` once. The
    requests then have blocks for these tokens.
    """

    pass_s: float = 0.0  # seconds that each further token of a step's longest guess takes

    def warm_up(self) -> None:
        """Do one-time work, such as compilation, before requests arrive."""
        return

    def find(self, request: "Request", limit: int) -> int:
        """Return how many of the request's next tokens can be guessed now, at most `limit`."""

    def draft(self, requests: Sequence["Request"], counts: Sequence[int]) -> tuple[list[Sequence[int]], float]:
        """Return guesses of up to `counts[i]` tokens for requests[i], and the seconds that this took.

        Tokens that were guessed, also if not all are returned, are left in `Request.drafts.guess`.
        """


class TextDrafter(Drafter):
    """A drafter that guesses from a request's tokens, in no time worth counting."""

    def propose(self, request: "Request", limit: int) -> Sequence[int]:
        """Return up to `limit` tokens that may follow those of the request."""
        raise NotImplementedError

    def find(self, request: "Request", limit: int) -> int:
        request.drafts.guess = self.propose(request, limit)
        return len(request.drafts.guess)

    def draft(self, requests: Sequence["Request"], counts: Sequence[int]) -> tuple[list[Sequence[int]], float]:
        return [request.drafts.guess[:count] for request, count in zip(requests, counts, strict=True)], 0.0


class PromptLookup(TextDrafter):
    """Finds the last `longest` to `shortest` tokens at an earlier place, and proposes what followed there.

    From "Prompt Lookup Decoding" (Saxena, 2023); vLLM calls it "ngram". Of several places, the latest counts. A match
    that overlaps the end repeats its period.
    """

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, request: "Request", limit: int) -> Sequence[int]:
        history = request.drafts
        text = history.text = history.text + "".join(map(chr, request.tokens[len(history.text) :]))
        end, place = 0, -1
        for length in range(self._shortest, min(self._longest, len(text) - 1) + 1):
            # A longer match can only end where, or before, a shorter one does.
            found = text.rfind(text[-length:], 0, end or len(text) - 1)
            if found < 0:
                break
            end = place = found + length
        if place < 0:
            return ()
        following = text[place:]
        return [ord(one) for one in (following * (limit // len(following) + 1))[:limit]]


@dataclass(slots=True)
class Speculation:
    """How a scheduler drafts: by which drafter, and at most how many tokens of a request in one step."""

    drafter: Drafter = field(default_factory=PromptLookup)
    num_tokens: int = 8


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A decode of a step for which `limit` tokens can be guessed. `context` is its length without them."""

    acceptance: float
    limit: int
    context: int


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of a step with guesses: its tokens, and its predicted seconds."""

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

    The i-th guess of a request is worth acceptance ** i tokens. Guesses are added to the step with `work` in the order
    of their worth, while they increase the expected tokens per predicted second. Each further token of the longest
    guess takes `pass_s` seconds. Without a step-time model, all tokens are guessed, unless the duration is limited. If
    `explores`, at least EXPLORED guesses are added, so that the model learns what they cost; steps of equal sizes do
    not show it.
    """
    longest = max((one.limit for one in candidates), default=0)
    if cost is None:
        return (
            _fill(candidates, work, None, limits, longest, pass_s)[0]
            if limits.seconds == inf
            else [0] * len(candidates)
        )
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
    """Return the counts of guesses of at most `depth` tokens, and the expected tokens per second."""
    counts, tokens = [0] * len(candidates), work.tokens
    expected, seconds = float(work.num_decodes), depth * pass_s + (cost.seconds(work) if cost is not None else 0.0)
    gains = [(-one.acceptance, index) for index, one in enumerate(candidates)] if depth else []
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
