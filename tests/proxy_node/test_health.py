"""Test when an engine counts as lost or stuck."""

from hypothesis import given
from hypothesis import strategies as st

from proxy_node.health import MAX_FAULTS, WINDOW_S, EngineHealth

KINDS = ["stream", "step", "load", "idle", "same", "wait"]
OBSERVATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.1, 9)))


@given(OBSERVATIONS)
def test_an_engine_is_stuck_if_and_only_if_it_made_no_progress_for_that_time(seen: list[tuple[str, float]]) -> None:
    """`same` is an answer to `/metrics` that shows no new step and no other load while requests run. It does not count
    as progress."""
    now = progress_at = 0.0
    steps, usage, stuck_s = 0.0, 0.0, 10.0
    health = EngineHealth(stuck_s, now)
    health.scraped(now, steps, (usage,), 0)
    for kind, passed_s in seen:
        now += passed_s
        expected = now - progress_at > stuck_s
        assert bool(health.check(now)) == expected
        if expected:
            assert "no progress" in health.failure
            return
        if kind == "stream":
            health.streamed(now)
        elif kind in {"step", "load", "idle", "same"}:
            steps += kind == "step"
            usage += kind == "load"
            health.scraped(now, steps, (usage,), 0 if kind == "idle" else 1)
        progress_at = progress_at if kind in {"same", "wait"} else now


def test_rare_malformed_answers_are_no_reason_to_leave_and_many_are() -> None:
    health = EngineHealth(1e9, 0.0)
    for number in range(20):
        health.failed(number * (WINDOW_S / (MAX_FAULTS - 1) + 0.1), "malformed")
    assert not health.check(500.0)
    for _ in range(MAX_FAULTS):
        health.failed(500.0, "malformed")
    assert "malformed" in health.check(500.0)


def test_refusals_count_until_the_engine_has_answered_a_later_request() -> None:
    health = EngineHealth(1e9, 0.0)
    for now in range(100):
        health.failed(float(now), "refused")
        health.answered(now - 0.5)  # to a request that was sent between the last two refusals
    assert not health.check(100.0)
    for now in (100.0, 101.0, 102.0):
        health.failed(now, "refused")
        health.answered(now - 60.0)  # to a request that was sent before all refusals, as while a server drains
    assert "refused" in health.check(102.0)


def test_a_fallen_number_of_steps_shows_a_restart() -> None:
    health = EngineHealth(5.0, 0.0)
    for steps, reason in ((0, ""), (7, ""), (7, ""), (1, "it was restarted")):
        health.scraped(1.0, steps, (1.0 / (1 + steps),), 0)
        assert health.check(1.0) == reason


def test_the_first_reason_is_kept() -> None:
    health = EngineHealth(5.0, 0.0)
    health.lost("refused")
    assert health.check(100.0) == "refused"
