"""`python -m tests.chaos.small_memory python -m router …`: a router whose history is so short that it is full within a
minute. What grows after that, leaks; with the history that it has otherwise, it would grow for an hour and hide it.
"""

import runpy
import sys
from functools import partialmethod

from router.history import history as records
from router.history import node_history as node_memory
from router.history.step_ring import StepRing
from scheduler.placement import PrefixIndex


def main(arguments: list[str]) -> None:
    records.MAX_REQUESTS = records.MAX_TRANSFERS = node_memory.MAX_SERIALS = 100
    records.MAX_ROWS = 5000
    for kind, sizes in ((StepRing, (1000, 1 << 16)), (PrefixIndex, (5000,))):
        kind.__init__ = partialmethod(kind.__init__, *sizes)
    _, _, module, *sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
