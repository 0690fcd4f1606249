"""Speculative decoding: guesses of a request's next tokens, and how many of them a step verifies. Pure decisions.

A guess of k tokens costs a decode k more rows of its step. Up to the first wrong one, each saves a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from scheduler.cost import CostModel, StepWork

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
    """Guesses the next tokens of requests. A wrong guess costs time, and never changes an answer."""

    def propose(self, tokens: Sequence[int], history: DraftHistory, limit: int) -> Sequence[int]:
        """Return up to `limit` tokens that may follow `tokens`, the prompt and the answer so far."""


@dataclass(slots=True)
class PromptLookup(Drafter):
    """Finds the last `longest` to `shortest` tokens at an earlier place, and proposes what followed there.

    From "Prompt Lookup Decoding" (Saxena, 2023); vLLM calls it "ngram". Of several places, the latest counts. A match
    that overlaps the end repeats its period.
    """

    shortest: int = 2
    longest: int = 4

    def propose(self, tokens: Sequence[int], history: DraftHistory, limit: int) -> Sequence[int]:
        text = history.text = history.text + "".join(map(chr, tokens[len(history.text) :]))
        end, place = 0, -1
        for length in range(self.shortest, min(self.longest, len(text) - 1) + 1):
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
    """A decode of a step for which there is a guess of `limit` tokens. `context` is its length without the guess."""

    acceptance: float
    limit: int
    context: int


def choose_counts(
    candidates: Sequence[DraftCandidate],
    work: StepWork,
    cost: CostModel | None,
    most_tokens: int,
    longest_s: float,
    explores: bool = False,
) -> list[int]:
    """Return how many tokens to verify for each candidate, so that the step yields the most tokens per second.

    The i-th guess of a request is worth acceptance ** i tokens. Guesses are added in the order of their worth, while
    they increase the expected tokens per predicted second, and while the step with `work` has at most `most_tokens`
    tokens and lasts at most `longest_s` seconds. Without a step-time model, all guesses are verified, unless the
    duration is limited. If `explores`, at least EXPLORED guesses are, so that the model learns what they cost; steps of
    equal sizes do not show it.
    """
    counts, tokens = [0] * len(candidates), work.tokens
    if cost is None and longest_s < float("inf"):
        return counts
    expected, seconds = float(work.num_decodes), cost.seconds(work) if cost is not None else 0.0
    gains = [(-one.acceptance, index) for index, one in enumerate(candidates)]
    heapify(gains)
    while gains and tokens < most_tokens:
        worth, index = -gains[0][0], gains[0][1]
        one = candidates[index]
        if cost is not None:
            longer = seconds + cost.decode_seconds(tokens, one.context + counts[index] + 1)
            pays = (expected + worth) * seconds > expected * longer
            if longer > longest_s or not (pays or (explores and tokens < work.tokens + EXPLORED)):
                break
            seconds = longer
        tokens, expected = tokens + 1, expected + worth
        counts[index] += 1
        if counts[index] < one.limit:
            heapreplace(gains, (-worth * one.acceptance, index))
        else:
            heappop(gains)
    return counts
