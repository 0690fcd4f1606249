"""Notices what makes no progress in a process that lives on: a device or a lock that never comes back.

How long a step may take is learnt from the steps before it, so that a slow machine is not taken for a stuck one. Time
in which the process itself did not run (stopped, suspended, starved of its CPU) does not count: nobody could progress.
While its memory comes back from the disk, time counts for little.
"""

import math
import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.request import Step

TICK_S = 0.25
SLACK = 10.0  # times what is known: company on the machine, a first chunk among decodes
FIRST_S = 300.0  # for steps of which nothing is known yet


class Patience:
    """How long a step may take: `least_s`, or `SLACK` times what the step-time model predicts or the fewest seconds a
    token has taken, by the step's tokens. A prompt's tokens are cheaper than decodes, which read all weights for each,
    so this holds also for the first long chunk of a node that has only decoded."""

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self._token_s = math.inf

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._token_s = min(self._token_s, seconds / max(1, tokens))

    def seconds(self, step: Step) -> float:
        if self._token_s == math.inf:
            return max(self.least_s, FIRST_S)
        return max(self.least_s, SLACK * max(step.predicted_s, step.work.tokens * self._token_s))


@dataclass(slots=True)
class Watched:
    """`progress` is another number at every sign of life; `allowed_s` may pass without one, as of now."""

    name: str
    progress: Callable[[], int]
    allowed_s: Callable[[], float]
    _seen: int = -1
    _silent_s: float = 0.0

    def is_stuck(self, lived_s: float) -> bool:
        """After `lived_s` more of this process's life."""
        if (progress := self.progress()) != self._seen:
            self._seen, self._silent_s = progress, 0.0
        else:
            self._silent_s += lived_s
        return self._silent_s > self.allowed_s()


class Watchdog:
    """A thread of its own, which waits for nobody. `on_stuck(why)` is called there, once."""

    def __init__(self, watched: Sequence[Watched], on_stuck: Callable[[str], None]) -> None:
        self._watched = watched
        self._on_stuck = on_stuck
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        before, faults_before = time.monotonic(), _faults()
        while not self._ended.wait(TICK_S):
            now, faults = time.monotonic(), _faults()
            lived_s = min(now - before, 2 * TICK_S) / (SLACK if faults != faults_before else 1)
            before, faults_before = now, faults
            for one in self._watched:
                if one.is_stuck(lived_s):
                    self._on_stuck(f"{one.name} made no progress for {one.allowed_s():.1f} s")
                    return


def _faults() -> int:
    """Pages that this process has waited for until they were read from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
