"""The clock for the times in all records: Unix time that never steps back within a process."""

import time

TICK_S = 0.05
EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Return nanoseconds since 1970: the host's time at the start of the process plus the monotonic time since then."""
    return EPOCH_NS + time.monotonic_ns()


def to_tick(delay_s: float) -> float:
    """Round a delay to the tick nearest to its end, and return the rounded delay in seconds.

    Ticks are multiples of TICK_S (or of a tenth of the delay, if that is shorter) in Unix time. Periodic messages that
    are sent at ticks arrive together, also from several hosts if their clocks are synchronized. A router with many
    nodes then wakes up less often, and each message costs it less CPU time.
    """
    tick_s = min(TICK_S, delay_s / 10)
    at_s = time.time_ns() / 1e9 + delay_s
    return delay_s + round(at_s / tick_s) * tick_s - at_s
