"""A watchdog that detects when a part of a process makes no progress, such as an engine that waits for its device
forever.

The allowed time of a step is derived from earlier steps, so a slow machine does not count as stuck. Time in which the
process did not run (stopped, suspended, starved of CPU) does not count, and time in which the process reads pages from
disk counts only in part.
"""

import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TICK_S = 0.25
PAGING_SLACK = 10.0  # if the process reads pages from disk in a tick, only 1 / PAGING_SLACK of the tick counts


@dataclass(slots=True)
class Watched:
    """A part of a process. `progress` returns a number, which must change at least once in `allowed_s()` seconds."""

    name: str
    progress: Callable[[], int]
    allowed_s: Callable[[], float]
    _last: int = -1
    _idle_s: float = 0.0

    def is_stuck(self, elapsed_s: float) -> bool:
        """Count `elapsed_s` as idle if there was no progress, and return whether the idle time exceeds the limit."""
        if (progress := self.progress()) != self._last:
            self._last, self._idle_s = progress, 0.0
        else:
            self._idle_s += elapsed_s
        return self._idle_s > self.allowed_s()


class Watchdog:
    """Checks progress on its own thread. When it finds a stuck part, it calls `on_stuck(reason)` on this thread, and
    ends."""

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
            elapsed_s = min(now - before, 2 * TICK_S) / (PAGING_SLACK if faults != faults_before else 1)
            before, faults_before = now, faults
            for part in self._watched:
                if part.is_stuck(elapsed_s):
                    self._on_stuck(f"{part.name} made no progress for {part.allowed_s():.1f} s")
                    return


def _faults() -> int:
    """Return how many page faults of this process have read from disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
