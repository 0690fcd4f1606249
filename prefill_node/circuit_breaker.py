"""A circuit breaker: after failures in a row of time, nothing is tried for a while, then one try decides.

Pure, with the time as an argument. After Nygard's pattern ("Release It!"); the numbers are Envoy's order of magnitude.
"""

from collections import deque

FAILURES, WITHIN_S = 5, 10.0
OPEN_S = 1.0


class CircuitBreaker:
    def __init__(self) -> None:
        self._failed_at: deque[float] = deque(maxlen=FAILURES)
        self._open_until: float | None = None  # None: closed

    def is_allowed(self, now: float) -> bool:
        """Whether to try. While open, once each `OPEN_S`, until a try has worked."""
        if self._open_until is None:
            return True
        if now < self._open_until:
            return False
        self._open_until = now + OPEN_S  # this one tries; the others wait for how it ends
        return True

    def succeeded(self) -> None:
        self._failed_at.clear()
        self._open_until = None

    def failed(self, now: float) -> None:
        self._failed_at.append(now)
        is_often = len(self._failed_at) == FAILURES and self._failed_at[0] > now - WITHIN_S
        if is_often or self._open_until is not None:
            self._open_until = now + OPEN_S
