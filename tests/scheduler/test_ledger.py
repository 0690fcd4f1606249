"""The block ledger is counted against who holds what: it agrees in all traffic, and shows every planted bug."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given

from scheduler.blocks import BlockPool
from scheduler.request import Request
from scheduler.scheduler import AUDIT_STEPS, Scheduler, StepLimits
from tests.scheduler.drive import Driver, request, traffic


@given(given_traffic=traffic())
def test_every_block_is_in_one_place_and_counted_after_every_turn(
    given_traffic: tuple[Scheduler, list[tuple[int, Request]], int],
) -> None:
    scheduler, arrivals, depth = given_traffic
    driver = Driver(scheduler, depth)
    while driver.turns < 20 or scheduler.has_work or driver.in_flight or driver.landings or driver.leaving:
        for _, arrival in [entry for entry in arrivals if entry[0] == driver.turns]:
            scheduler.add(arrival)
        driver.turn()
        assert scheduler.audit() == ""
        assert scheduler.pool.ledger_error(sum(map(len, scheduler._held()))) == ""
        assert driver.turns < 5000


def forgets_the_last(pool: BlockPool, blocks: Sequence[int]) -> None:
    BlockPool.release(pool, blocks[:-1])


def retires_twice(pool: BlockPool, block: int) -> None:
    for _ in range(2):
        BlockPool._retire(pool, block)


def retires_nothing(_pool: BlockPool, _block: int) -> None: ...


def settles_uncounted(pool: BlockPool, blocks: Sequence[int]) -> None:
    pool._unreserve(blocks)


def settles_elsewhere(pool: BlockPool, blocks: Sequence[int]) -> None:
    BlockPool.settle(pool, blocks)
    pool._references[blocks[0]] += 1


def takes_uncounted(pool: BlockPool, count: int) -> list[int]:
    return [pool._pop() for _ in range(count)]


def names_another(pool: BlockPool, block: int, name: bytes) -> None:
    BlockPool.remember(pool, block, name)
    pool._by_hash[name] = block % pool.total + 1


PLANTED: dict[str, Callable[..., object]] = {
    "release": forgets_the_last,
    "_retire": retires_twice,
    "_retire ": retires_nothing,
    "settle": settles_uncounted,
    "settle ": settles_elsewhere,
    "take": takes_uncounted,
    "remember": names_another,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_a_breach_and_ends_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run, land and leave, so that every way a block can go is gone."""
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=16), 40, 4)
    planted = PLANTED[name]
    monkeypatch.setattr(scheduler.pool, name.strip(), lambda *given: planted(scheduler.pool, *given))
    driver = Driver(scheduler)
    for index in range(4):
        scheduler.add(request(f"r{index}", [3 + index] * 9, 5, receive_kv=index == 1, send_kv=index == 2))
    driver.finish()
    assert not scheduler.requests, "everybody was served"
    assert scheduler.audit() != ""
    first = scheduler.ledger_error
    assert scheduler.audit() == first, "told once, as it was found"


def test_leaks_show_while_requests_run_without_a_walk_over_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle moment may never come; sums over requests are compared every few steps."""
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=16), 200, 4)
    driver = Driver(scheduler)
    scheduler.add(request("long", [5, 6, 7], 3 * AUDIT_STEPS))
    driver.turn()
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.pool, "release", lambda blocks: forgets_the_last(scheduler.pool, blocks))
        scheduler.add(request("short", [8] * 9, 2))
        while "short" in scheduler.requests:
            driver.turn()
    assert scheduler.ledger_error == ""
    for _ in range(AUDIT_STEPS):
        driver.turn()
    assert "were allocated, and" in scheduler.ledger_error
    driver.finish()
