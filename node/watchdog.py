"""Notices what makes no progress in a process that lives on: a device or a lock that never comes back.

How long a step may take is learnt from the steps before it, so that a slow machine is not taken for a stuck one. Time
in which the process itself did not run (stopped, suspended, starved of its CPU) does not count: nobody could progress.
While its memory comes back from the disk, time counts for little.
"""

import resource
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TICK_S = 0.25
PAGING_SLACK = 10.0  # a tick with page faults from disk counts this many times less


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
            lived_s = min(now - before, 2 * TICK_S) / (PAGING_SLACK if faults != faults_before else 1)
            before, faults_before = now, faults
            for one in self._watched:
                if one.is_stuck(lived_s):
                    self._on_stuck(f"{one.name} made no progress for {one.allowed_s():.1f} s")
                    return


def _faults() -> int:
    """Pages that this process has waited for until they were read from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
