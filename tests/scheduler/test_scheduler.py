"""Test the scheduler's guarantees under random traffic, without a device."""

import random
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import CostModel
from scheduler.geometry import Geometry, Group
from scheduler.policy import POLICIES, Policy
from scheduler.prefix import block_hashes
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler, StepLimits
from tests.scheduler.drive import Driver, expected, request, traffic

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
MODELS = (None, CostModel(overhead=1.0), CostModel(1.0, 1.0, 4.0, 0.1, 0.01, 0.1, 0.2), CostModel(per_token=0.1))


def expected_of(done: Request) -> list[int]:
    """Return the tokens that the request should have generated so far."""
    return expected(done.tokens[: done.num_prompt], done.num_generated, done.salt)


@every_policy
@given(case=traffic())
def test_every_request_gets_its_tokens_and_every_block_returns(
    policy: Policy, case: tuple[Scheduler, list[tuple[int, Request]], int]
) -> None:
    scheduler, arrivals, depth = case
    scheduler.policy = policy
    driver = Driver(scheduler, depth)
    for iteration in range(20):
        scheduler.cost = MODELS[iteration // 3 % len(MODELS)]
        for when, arrival in arrivals:
            if when == iteration:
                scheduler.add(arrival)
        driver.iterate()
        assert scheduler.audit() == ""
        if not driver.in_flight:
            driver.recount()
    driver.finish()
    for _, done in arrivals:
        assert done.state is RequestState.DONE
        assert done.tokens[done.num_prompt :] == expected_of(done), "tokens depend on the schedule"
        assert done.send_kv or done.num_generated == done.max_tokens
    ledger = scheduler.ledger()
    assert ledger.free + ledger.cached == ledger.total
    assert not scheduler.requests


@every_policy
@given(case=traffic(), rng=st.randoms(use_true_random=False))
def test_an_abort_in_any_state_frees_its_blocks_and_affects_no_other_request(
    policy: Policy, case: tuple[Scheduler, list[tuple[int, Request]], int], rng: random.Random
) -> None:
    scheduler, arrivals, depth = case
    scheduler.policy = policy
    driver = Driver(scheduler, depth)
    for _, arrival in arrivals:
        scheduler.add(arrival)
    aborted = set()
    for _ in range(15):
        driver.iterate()
        _, victim = rng.choice(arrivals)
        if rng.random() < 0.3 and victim.state is not RequestState.DONE:
            aborted.add(victim.id)
            scheduler.abort(victim)
    driver.finish()
    for _, done in arrivals:
        if done.id not in aborted:
            assert done.tokens[done.num_prompt :] == expected_of(done)
    ledger = scheduler.ledger()
    assert ledger.free + ledger.cached == ledger.total


@pytest.mark.parametrize("name", ["stall_free", "decode_maximal", "split_fuse", "whole_prompt_mixed", "decode_first"])
@given(case=traffic())
def test_decodes_never_wait_for_a_prompt(name: str, case: tuple[Scheduler, list[tuple[int, Request]], int]) -> None:
    scheduler, arrivals, _ = case
    scheduler.policy = POLICIES[name]
    driver = Driver(scheduler)
    for iteration in range(120):
        for when, arrival in arrivals:
            if when == iteration:
                scheduler.add(arrival)
        # The last token of a prompt whose KV is sent is not a decode, so it may wait for a block.
        decoding = {r.id for r in scheduler.running if r.num_tokens - r.num_scheduled == 1 and not r.send_kv}
        before = scheduler.counters.preemptions
        driver.iterate()
        if driver.steps and scheduler.counters.preemptions == before and decoding:
            assert decoding <= {piece.request.id for piece in driver.steps[-1].slices}


def test_a_prompt_is_computed_once_and_its_prefix_is_shared_within_its_salt_only() -> None:
    driver = Driver(scheduler := Scheduler(StepLimits(), 100, 4))
    prompt = list(range(10, 31))
    for name, salt, cached in (("a", b"", 0), ("b", b"", 20), ("c", b"other", 0)):
        arrival = request(name, prompt, 2, salt=salt)
        scheduler.add(arrival)
        driver.finish()
        assert arrival.num_cached == cached
    assert (scheduler.counters.cache_queries, scheduler.counters.cache_hits) == (63, 20)


def test_requests_that_are_aborted_behind_waiting_requests_are_not_kept() -> None:
    driver = Driver(scheduler := Scheduler(StepLimits(max_num_seqs=1), 300, 4))
    for name in ("running", "waiting"):
        scheduler.add(request(name, [5], 500))
        driver.iterate()
    sampling = object()
    for index in range(400):
        scheduler.add(late := request(f"late {index}", [5], 9, priority=1, sampling=sampling))
        scheduler.abort(late)
        driver.iterate()
    assert scheduler.num_waiting == 1
    assert sys.getrefcount(sampling) < 100
    driver.finish()


def test_a_request_changes_its_state_only_in_legal_ways() -> None:
    waiting, receiving, running, sending, done = RequestState
    legal = {waiting: {running, receiving, done}, receiving: {running, done}, running: {waiting, sending, done}}
    for before, after in product(RequestState, repeat=2):
        row = request("r", [1], 1, state=before)
        if after in legal.get(before, {done} - {before}):
            row.move_to(after)
            assert row.state is after
        else:
            with pytest.raises(AssertionError, match="is not a legal transition"):
                row.move_to(after)


def test_the_same_commands_give_the_same_steps() -> None:
    def log() -> list[list[tuple[str, int, int]]]:
        driver = Driver(Scheduler(StepLimits(max_num_batched_tokens=9, max_num_seqs=3), 14, 4))
        for index in range(6):
            driver.scheduler.add(request(f"r{index}", list(range(index, index + 7 + index)), 12))
        driver.finish()
        return [[(p.request.id, p.start, p.count) for p in step.slices] for step in driver.steps]

    assert log() == log()


def test_requests_of_one_priority_are_admitted_in_order_of_arrival() -> None:
    driver = Driver(Scheduler(StepLimits(max_num_batched_tokens=8, max_num_seqs=2), 40, 4))
    for index, priority in enumerate([1, 1, 0, 1]):
        driver.scheduler.add(request(f"r{index}", list(range(10)), 3, priority=priority))
    driver.finish()
    first_seen = list(dict.fromkeys(piece.request.id for step in driver.steps for piece in step.slices))
    assert first_seen == ["r2", "r0", "r1", "r3"]


def test_short_prompts_share_steps_with_a_long_one_below_the_threshold() -> None:
    limits = StepLimits(max_num_batched_tokens=32, long_prefill_token_threshold=16, max_num_partial_prefills=2)
    driver = Driver(Scheduler(limits, 200, 4))
    long, short = request("long", list(range(200)), 1), request("short", [1, 2, 3], 1)
    driver.scheduler.add(long)
    driver.iterate()
    driver.scheduler.add(short)
    driver.iterate()
    assert short.state is RequestState.DONE
    assert long.state is RequestState.RUNNING


def test_chunks_end_on_tiles_where_that_does_not_stop_progress() -> None:
    driver = Driver(Scheduler(StepLimits(max_num_batched_tokens=30, tile_tokens=16), 200, 4))
    driver.scheduler.add(request("r", list(range(50)), 1))
    driver.finish()
    assert [step.slices[0].end for step in driver.steps] == [16, 32, 50]
    driver = Driver(Scheduler(StepLimits(max_num_batched_tokens=7, tile_tokens=16), 200, 4))
    driver.scheduler.add(request("r", list(range(20)), 1))
    driver.finish()
    assert driver.steps[-1].slices[0].end == 20


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = Scheduler(StepLimits(), 11, 4)
    with pytest.raises(ValueError, match=r"41 tokens need 11 blocks of 4 tokens, and the KV cache has 10"):
        scheduler.add(request("r", list(range(30)), 11))
    refused = request("too long", list(range(40)), 1)
    with pytest.raises(ValueError, match="41 tokens"):
        scheduler.add(refused)
    assert scheduler.abort(refused) == []
    assert scheduler.num_waiting == 0
    scheduler.add(request("r", list(range(30)), 10))
    with pytest.raises(ValueError, match="already exists on this node"):
        scheduler.add(request("r", [1], 1))


@pytest.mark.parametrize("other", [Group("state", rows=4), Group("window", size=64)])
@pytest.mark.parametrize("num_spare", range(6))
def test_a_cached_prefix_never_keeps_a_request_from_starting(other: Group, num_spare: int) -> None:
    """In addition to the rows of its own states and windows, a request holds the cached prefix from which it starts."""
    groups = (Group("full"), other)
    num_rows = Geometry(16, groups).rows_for(320, 64) + num_spare
    scheduler = Scheduler(StepLimits(64), 1 + num_rows, 16, groups=groups)
    for name, count in (("first", 160), ("longer", 319)):
        scheduler.add(done := request(name, list(range(count)), 1))
        for _ in range(9):
            step = scheduler.schedule()
            scheduler.update(step, [[7] if slice_.samples else [] for slice_ in step.slices])
        assert done.finish == "length"


def test_a_request_that_sends_kv_holds_its_blocks_until_it_is_released() -> None:
    scheduler = Scheduler(StepLimits(), 20, 4)
    sending = request("r", list(range(10)), 5, send_kv=True)
    scheduler.add(sending)
    events = Driver(scheduler).iterate()
    assert events[0].tokens == expected(list(range(10)), 1)
    assert sending.state is RequestState.SENDING_KV
    assert scheduler.ledger().owned == 3
    scheduler.release(sending)
    assert scheduler.ledger()._replace(free=0, total=0) == (0, 2, 0, 0, 0, 0)


def test_received_kv_is_reserved_then_owned_and_continued_at_the_second_token() -> None:
    scheduler = Scheduler(StepLimits(), 20, 4)
    driver = Driver(scheduler)
    prompt = list(range(10))
    received = request("r", prompt, 4, receive_kv=True)
    scheduler.add(received)
    driver.iterate()
    assert received.state is RequestState.RECEIVING_KV
    assert scheduler.ledger().reserved == 3
    driver.receive(received)
    driver.finish()
    assert received.tokens[10:] == expected(prompt, 4)
    second = request("again", prompt, 4, receive_kv=True)
    scheduler.add(second)
    driver.iterate()
    assert (second.num_computed, scheduler.ledger().reserved) == (8, 1)


@pytest.mark.parametrize("window", range(4, 12))
@pytest.mark.parametrize("num_prompt", range(9, 14))
def test_further_samples_start_from_received_kv_of_layers_with_windows(num_prompt: int, window: int) -> None:
    scheduler = Scheduler(StepLimits(), 60, 4, groups=(Group("full"), Group("window", 1, window)))
    driver = Driver(scheduler)
    prompt = list(range(num_prompt))
    scheduler.add(request("first", prompt, 4, receive_kv=True))
    driver.finish()
    scheduler.add(further := request("further", prompt, 4))
    driver.finish()
    assert further.num_cached == (num_prompt - 1) // 4 * 4
    assert further.tokens[num_prompt:] == expected(prompt, 4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("num_prompt", [9, 11, 12, 13])
def test_a_sender_keeps_all_rows_of_the_landing_order(num_prompt: int, chunk: int) -> None:
    scheduler = Scheduler(StepLimits(chunk), 60, 4, groups=(Group("full"), Group("window", 1, 6)))
    scheduler.add(sending := request("r", list(range(num_prompt)), 4, send_kv=True))
    driver = Driver(scheduler)
    while sending.state is not RequestState.SENDING_KV:
        driver.iterate()
    order = scheduler.geometry.landing_order(num_prompt, 0)
    assert all(sending.tables[place.group][place.block] for place in order)


def test_blocks_of_an_aborted_transfer_wait_until_their_writer_has_stopped() -> None:
    scheduler = Scheduler(StepLimits(), 20, 4)
    received = request("r", list(range(10)), 4, receive_kv=True)
    scheduler.add(received)
    scheduler.schedule()
    blocks = scheduler.abort(received, writer_stopped=False)
    assert scheduler.ledger().quarantined == 3
    scheduler.pool.clear(blocks)
    assert scheduler.ledger().free == 19


def test_a_failed_slice_ends_its_request_only_and_caches_nothing() -> None:
    scheduler = Scheduler(StepLimits(), 40, 4)
    bad, good = request("bad", list(range(9)), 3), request("good", list(range(20, 29)), 3)
    scheduler.add(bad)
    scheduler.add(good)
    driver = Driver(scheduler)
    step = scheduler.schedule()
    events = scheduler.update(step, [[], [7]], [True, False])
    assert [(event.finish, event.tokens) for event in events] == [("error", []), (None, [7])]
    assert (bad.state, good.state) == (RequestState.DONE, RequestState.RUNNING)
    assert not scheduler.pool.match(bad.hashes)
    scheduler.abort(good)
    driver.recount()


def test_a_state_that_a_failed_slice_saved_is_not_found() -> None:
    for failed in (False, True):
        scheduler = Scheduler(StepLimits(), 60, 4, groups=(Group("full"), Group("state", 3)))
        first, second = (request(name, list(range(9)), 3) for name in ("first", "second"))
        scheduler.add(first)
        step = scheduler.schedule()
        (piece,) = step.slices
        assert piece.state is not None
        assert (bool(piece.state.save), piece.state.save_at) == (True, 8)
        scheduler.update(step, [[] if failed else [7]], [failed])
        assert (scheduler.pool.find((1, first.hashes[1])) is None) == failed
        scheduler.add(second)
        assert [piece.start for piece in scheduler.schedule().slices if piece.request is second] == [0 if failed else 8]


@pytest.mark.parametrize("fails", [False, True])
def test_a_state_that_was_saved_after_the_end_of_its_request_is_not_found(fails: bool) -> None:
    """If a step fails, its slices run again one by one, except the slices of requests that have ended."""
    scheduler = Scheduler(StepLimits(), 60, 4, groups=(Group("full"), Group("state", 3)))
    scheduler.add(ends := request("ends", list(range(6)), 9, stop_tokens=frozenset({9})))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, [[7]])
    third = scheduler.schedule()
    assert [piece.state is not None and piece.state.save_at for piece in third.slices] == [8]
    scheduler.update(second, [[] if fails else [9]], [fails])
    assert ends.finish == ("error" if fails else "stop")
    scheduler.update(third, [[]])
    assert scheduler.audit() == ""
    assert scheduler.pool.find((1, block_hashes([*range(6), 7, 9], 4, b"")[1])) is None


def test_stop_tokens_end_a_request_but_not_before_min_tokens() -> None:
    prompt = [4, 5, 6]
    stop = expected(prompt, 1)[0]
    for min_tokens, finish in ((0, "stop"), (2, "length")):
        scheduler = Scheduler(StepLimits(), 20, 4)
        arrival = request("r", prompt, 3, stop_tokens=frozenset({stop}), min_tokens=min_tokens)
        scheduler.add(arrival)
        Driver(scheduler).finish()
        assert arrival.finish == finish or stop in arrival.tokens[4:]
