"""How far a node is trusted: after failures it is left out for a growing time. Pure: the time is an argument.

Envoy's outlier ejection, with its times doubled instead of added. Whoever asks must never leave out the last node.
"""

from collections import deque
from dataclasses import dataclass, field

EJECT_S, MAX_EJECT_S = 1.0, 60.0  # left out for; the first time and at most
FORGET_S = 60.0  # of good conduct, and the next failure is the first again
MAX_FAILURES, WINDOW_S = 5, 10.0  # in a row within so long are as bad as a death


@dataclass(slots=True)
class OutlierDetector:
    """Of one node under its name, through all its lives."""

    ejected_until: float = 0.0  # left out until then
    times: int = 0  # that it was left out, of late
    failures: deque[float] = field(default_factory=deque)

    def died(self, now: float) -> None:
        if now - self.ejected_until > FORGET_S:
            self.times = 0
        self.ejected_until = now + min(MAX_EJECT_S, EJECT_S * 2.0 ** min(self.times, 30))
        self.times += 1
        self.failures.clear()

    def failed(self, now: float) -> bool:
        """Something that it had a part in failed. True when it is left out for that from now on."""
        self.failures.append(now)
        while now - self.failures[0] > WINDOW_S:
            self.failures.popleft()
        if len(self.failures) < MAX_FAILURES:
            return False
        self.died(now)
        return True

    def succeeded(self) -> None:
        self.failures.clear()

    def is_ejected(self, now: float) -> bool:
        return now < self.ejected_until

    def is_forgotten(self, now: float) -> bool:
        """Nothing of it counts any more."""
        return now - max(self.ejected_until, *self.failures, 0.0) > FORGET_S
