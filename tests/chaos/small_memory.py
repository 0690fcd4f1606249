"""Run a router whose history is full within a minute: `python -m tests.chaos.small_memory python -m router ...`.

If memory still grows after this minute, there is a leak. With the default limits, the history would grow for an hour.
"""

import runpy
import sys
from functools import partialmethod

from dashboard.history import HistoryLimits, RequestHistory
from dashboard.step_ring import StepRing
from scheduler.placement import PrefixIndex


def main(arguments: list[str]) -> None:
    limits = HistoryLimits(requests=100, rows=5000, serials=100)
    RequestHistory.__init__ = partialmethod(RequestHistory.__init__, limits=limits)
    for kind, sizes in ((StepRing, (1000, 1 << 16)), (PrefixIndex, (5000,))):
        kind.__init__ = partialmethod(kind.__init__, *sizes)
    _, _, module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
