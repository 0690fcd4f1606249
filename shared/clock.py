"""One clock for everything that is recorded: Unix time that never steps back within a process."""

import time

EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Nanoseconds since 1970, as this host has it, advancing as its monotonic clock does."""
    return EPOCH_NS + time.monotonic_ns()
