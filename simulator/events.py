"""The virtual clock and its queue of events."""

import heapq
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any


class EventQueue:
    """Runs functions at given times of a virtual clock, in seconds.

    Functions with equal times run in the order in which they were added, except that those with `late` run last.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, bool, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, time_s: float, function: Callable[..., object], *args: Any, late: bool = False) -> None:
        """Call `function(*args)` at `time_s`. If `late` is set, call it after the other functions of this time."""
        heapq.heappush(self._heap, (time_s, late, next(self._numbers), function, args))

    def run(self, until_s: float = inf) -> None:
        """Run the events up to `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, _, function, args = heapq.heappop(heap)
            function(*args)
