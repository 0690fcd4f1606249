"""The base class of drafters that run a model. It measures their passes, and ends all guessing after an exception."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from scheduler.drafters import Drafter
from scheduler.request import Request

log = logging.getLogger("baton.engine")
SMOOTHING = 0.1  # weight of the latest pass in `pass_s`
KEPT_REQUESTS = 256  # if a drafter keeps more requests than this, it drops the requests that have ended


class TimedDrafter(Drafter):
    """A drafter that computes guesses with a model, on the engine's thread. `pass_s` is the mean duration of a pass."""

    pass_s: float = 0.0
    has_failed: bool = False

    def guess(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Sequence[int]]:
        """Guess tokens for each request, and return them. A request may get more or fewer guesses than its count."""
        raise NotImplementedError

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> tuple[list[Sequence[int]], float]:
        began_s, guesses = time.perf_counter(), list[Sequence[int]]([()] * len(requests))
        if not self.has_failed:
            with self.guarded():
                guesses = self.guess(requests, counts)
        for request, guess in zip(requests, guesses, strict=True):
            request.drafts.guess = guess
        return [tuple(guess) for guess in guesses], time.perf_counter() - began_s

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Catch and log an exception of the `with` block. After an exception, the drafter guesses no more tokens."""
        try:
            yield
        except Exception:
            log.exception("the drafter failed; this node continues without speculative decoding")
            self.has_failed = True

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration of the pass in the `with` block, and update the mean `pass_s`."""
        began_s = time.perf_counter()
        yield
        self.pass_s += (SMOOTHING if self.pass_s else 1.0) * (time.perf_counter() - began_s - self.pass_s)
