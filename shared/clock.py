"""The clock for the times in all records: Unix time that never steps back within a process."""

import time

EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Return nanoseconds since 1970: the host's time at the start of the process plus the monotonic time since then."""
    return EPOCH_NS + time.monotonic_ns()
