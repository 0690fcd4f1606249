"""Outlier ejection: a node that fails gets no requests for some time. Callers pass the current time.

Ejection works as in Envoy, except that each ejection lasts twice as long as the previous one (Envoy adds a constant).
"""

from collections import deque
from dataclasses import dataclass, field

EJECT_S, MAX_EJECT_S = 1.0, 60.0  # durations of the first and of the longest ejection
FORGET_S = 60.0  # if the last ejection ended longer ago than this, the next ejection counts as the first
MAX_FAILURES, WINDOW_S = 5, 10.0  # MAX_FAILURES consecutive failures within WINDOW_S eject the node


@dataclass(slots=True)
class OutlierDetector:
    """The failures and ejections of one node, over all its incarnations."""

    ejected_until: float = 0.0
    times: int = 0  # number of successive ejections, with at most FORGET_S between them
    failures: deque[float] = field(default_factory=deque)

    def died(self, now: float) -> None:
        """Eject the node, because it crashed, stopped answering or failed too often."""
        if now - self.ejected_until > FORGET_S:
            self.times = 0
        self.ejected_until = now + min(MAX_EJECT_S, EJECT_S * 2.0 ** min(self.times, 30))
        self.times += 1
        self.failures.clear()

    def failed(self, now: float) -> bool:
        """Count a failure that involved the node. Return whether this failure ejects the node."""
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
        """Return whether all recorded failures are too old to matter."""
        return now - max(self.ejected_until, *self.failures, 0.0) > FORGET_S
