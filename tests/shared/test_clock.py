"""Test the ticks to which periodic messages are aligned."""

import time
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from shared.clock import TICK_S, to_tick


@given(st.floats(0.001, 100.0), st.integers(10**18, 2 * 10**18))
def test_a_delay_ends_at_a_tick_near_its_end(delay_s: float, now_ns: int) -> None:
    tick_s = min(TICK_S, delay_s / 10)
    with mock.patch.object(time, "time_ns", return_value=now_ns):
        found_s = to_tick(delay_s)
    assert abs(found_s - delay_s) <= tick_s / 2 + 1e-6
    if delay_s >= 10 * TICK_S:
        since_tick_s = (now_ns % 50_000_000) / 1e9 + found_s
        assert abs(since_tick_s / TICK_S - round(since_tick_s / TICK_S)) < 0.01
