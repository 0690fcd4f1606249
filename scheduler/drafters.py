"""Speculative decoding: the drafters, which guess a request's next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.request import Request


class Drafter(Protocol):
    """Guesses the next tokens of requests. A wrong guess costs time, but does not change the generated tokens.

    The scheduler calls `find` for each decode of a step that may get guesses. It then chooses how many tokens to guess,
    allocates blocks for these tokens, and calls `draft` once.
    """

    pass_s: float = 0.0  # seconds that `draft` takes for each token of the longest guess in a step

    def warm_up(self) -> None:
        """Do one-time work, such as compilation, before requests arrive."""
        return

    def find(self, request: Request, limit: int) -> int:
        """Return how many of the request's next tokens can be guessed now, at most `limit`."""

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> tuple[list[Sequence[int]], float]:
        """Return guesses of up to `counts[i]` tokens for requests[i], and the seconds that this took.

        All guessed tokens, even those that are not returned, are stored in `Request.drafts.guess`.
        """


class TextDrafter(Drafter):
    """A drafter that guesses from a request's tokens, in negligible time."""

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return up to `limit` tokens that may follow the request's tokens."""
        raise NotImplementedError

    def find(self, request: Request, limit: int) -> int:
        request.drafts.guess = self.propose(request, limit)
        return len(request.drafts.guess)

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> tuple[list[Sequence[int]], float]:
        return [request.drafts.guess[:count] for request, count in zip(requests, counts, strict=True)], 0.0


class PromptLookup(TextDrafter):
    """Finds an earlier occurrence of a request's last tokens, and proposes the tokens that followed it.

    The method is "Prompt Lookup Decoding" (Saxena, 2023); vLLM calls it "ngram". It takes the longest suffix of
    `shortest` to `longest` tokens that occurs earlier in the sequence, and the latest earlier occurrence of this
    suffix. If fewer than `limit` tokens follow this occurrence, these tokens are repeated."""

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        history = request.drafts
        text = history.text = history.text + "".join(map(chr, request.tokens[len(history.text) :]))
        end, place = 0, -1
        for length in range(self._shortest, min(self._longest, len(text) - 1) + 1):
            # The latest match of a longer suffix never ends after the latest match of a shorter suffix.
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
    """How a scheduler drafts: the drafter, and the maximum number of guessed tokens of a request in one step."""

    drafter: Drafter = field(default_factory=PromptLookup)
    num_tokens: int = 8
