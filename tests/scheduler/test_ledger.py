"""Test that audits of the block ledger find injected bugs in the block accounting."""

from collections.abc import Callable

import pytest

from scheduler.blocks import BlockPool
from scheduler.scheduler import AUDIT_STEPS, Scheduler, StepLimits
from tests.scheduler.drive import Driver, request

INJECTED: dict[str, Callable[..., object]] = {
    "release": lambda pool, blocks: BlockPool.release(pool, blocks[:-1]),
    "settle": lambda pool, blocks: None,
    "take": lambda pool, count: BlockPool.take(pool, count + 1)[:count],
}


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_bug_is_found_and_ends_no_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests receive or send KV and others do neither, so that all transitions of a block occur."""
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=16), 40, 4)
    injected = INJECTED[name]
    monkeypatch.setattr(scheduler.pool, name, lambda *given: injected(scheduler.pool, *given))
    driver = Driver(scheduler)
    for index in range(4):
        scheduler.add(request(f"r{index}", [3 + index] * 9, 5, receive_kv=index == 1, send_kv=index == 2))
    driver.finish()
    assert not scheduler.requests, "every request was served"
    assert scheduler.audit() != ""
    first = scheduler.ledger_error
    assert scheduler.audit() == first, "the first error is kept"


def test_leaks_are_found_while_requests_run_without_a_scan_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some schedulers are never idle. Therefore a scheduler compares the ledger with sums over its requests every
    AUDIT_STEPS steps."""
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=16), 200, 4)
    driver = Driver(scheduler)
    scheduler.add(request("long", [5, 6, 7], 3 * AUDIT_STEPS))
    driver.iterate()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.pool, "release", lambda blocks: INJECTED["release"](scheduler.pool, blocks))
        scheduler.add(request("short", [8] * 9, 2))
        while "short" in scheduler.requests:
            driver.iterate()
    assert scheduler.ledger_error == ""
    for _ in range(AUDIT_STEPS):
        driver.iterate()
    assert "were allocated, and" in scheduler.ledger_error
    driver.finish()
