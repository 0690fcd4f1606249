"""More requests than the nodes can hold: who goes, who waits in which order, who is turned away, who is too late or
too slow; and whatever happens, each is counted once and gives back what it held."""

import asyncio
import heapq
import itertools
import random
import socket
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.__main__ import _listener
from router.dispatch import attempt as attempt_module
from router.dispatch.admission import AdmissionQueue, AdmissionRefusedError, QueueEntry
from router.dispatch.requests import GenerationRequest
from router.nodes.pool import PoolCapacity
from shared import failpoints
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import wait_until
from shared.rpc.messages import Logprobs, RouterCommand, SamplingParams, TokenDelta, pack_ids, unpack_ids
from tests.router.played import (
    ANSWER,
    PROMPT,
    Piece,
    Stage,
    collect,
    generated,
    no_pauses,
    stage,
    token,
    tokens_of,
    turns,
)

__all__ = ["no_pauses"]
SMALL = PoolCapacity(requests=4, kv_tokens=100, prompt_tokens=30, prompts=2)


def ticket(tenant: str = "", priority: int = 0, prompt: int = 5, answer: int = 5, count: int = 1) -> QueueEntry:
    return QueueEntry(tenant, priority, prompt, answer, count, expires=1e9)


# ---- admission, alone ------------------------------------------------------------------------------------------------


class Model:
    """An admission, and beside it a plain account of what it was told."""

    def __init__(self) -> None:
        self.admission = AdmissionQueue(max_queued_tokens=10_000)
        self.admission.resize(SMALL, 0.0)
        self.waiting: list[QueueEntry] = []
        self.held: list[QueueEntry] = []
        self.now = 0.0

    def took(self, granted: list[QueueEntry]) -> None:
        for each in granted:
            assert each.is_granted
            self.waiting.remove(each)
            self.held.append(each)

    def check(self) -> None:
        it = self.admission
        assert it.queued_requests == sum(each.num_left for each in self.waiting)
        assert it.queued_tokens == sum(each.cost for each in self.waiting)
        assert it.held_requests == sum(each.num_left for each in self.held)
        assert it.held_tokens == sum(each.cost for each in self.held)
        assert it.pending_prefills == sum(each.has_pending_prefill for each in self.held)
        assert it.pending_prefill_tokens == sum(each.prompt_tokens for each in self.held if each.has_pending_prefill)
        if len(self.held) > 1:
            assert it.held_requests <= it.capacity.requests or self.is_smaller
            assert it.held_tokens <= it.capacity.kv_tokens or self.is_smaller
        assert self.held or not self.waiting, "somebody waits, and nobody is served"

    is_smaller = False  # nodes left: who is there may stay


ACTS = st.one_of(
    st.tuples(
        st.just("offer"), st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 60), st.integers(1, 60),
        st.integers(1, 3),
    ),
    st.tuples(st.sampled_from(["end", "end", "leave", "computed", "known"]), st.integers(0, 30)),
    st.tuples(st.just("resize"), st.integers(1, 8), st.integers(20, 200)),
)  # fmt: skip


@settings(max_examples=150)
@given(acts=st.lists(ACTS, max_size=60))
def test_what_is_held_and_waits_adds_up_and_everybody_gets_a_turn(acts: list[tuple[Any, ...]]) -> None:
    it = Model()
    for act, *given_ in acts:
        it.now += 0.1
        if act == "offer":
            new = ticket(*given_)
            it.waiting.append(new)
            it.took(it.admission.offer(new, it.now))
        elif act == "resize":
            it.is_smaller = True
            it.took(it.admission.resize(PoolCapacity(*given_, 30, 2), it.now))
        elif act == "leave" and it.waiting:
            one = it.waiting[given_[0] % len(it.waiting)]
            it.took(it.admission.release(one, 0, it.now))
            if not one.num_left:
                it.waiting.remove(one)
        elif act in {"end", "computed", "known"} and it.held:
            one = it.held[given_[0] % len(it.held)]
            if act == "known":
                it.admission.credit_prefix_hit(one, given_[0])
            elif act == "computed":
                it.took(it.admission.prompt_computed(one, it.now))
            else:
                it.took(it.admission.release(one, 3, it.now))
        it.held = [each for each in it.held if each.num_left]
        it.check()
    while it.held:
        one = it.held[0]
        it.took(it.admission.release(one, 3, it.now))
        it.held = [each for each in it.held if each.num_left]
        it.check()
    assert not it.waiting
    assert (it.admission.held_tokens, it.admission.pending_prefill_tokens, it.admission.queued_tokens) == (0, 0, 0)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 60), min_size=30, max_size=60))
def test_tenants_who_both_wait_get_the_same_tokens_whatever_the_size_of_their_requests(sizes: list[int]) -> None:
    """S2: one asks for ten times as much, in requests of any size, and gets half."""
    it = AdmissionQueue(max_queued_tokens=10**9)
    it.resize(SMALL, 0.0)
    held: list[QueueEntry] = []
    for size in sizes * 10:
        held += it.offer(ticket("greedy", prompt=size), 0.0)
    for _ in range(60):
        held += it.offer(ticket("modest", prompt=10), 0.0)
    served = {"greedy": 0, "modest": 0}
    counted = False
    while "modest" in it.queued_tenants:
        one = held.pop(0)
        counted = counted or one.tenant == "modest"  # what was there before anybody had to share
        served[one.tenant] += one.cost if counted else 0
        held += it.release(one, one.sample_tokens, 0.0)
    assert abs(served["greedy"] - served["modest"]) <= 2 * 100 + 65
    assert served["modest"] >= 0.45 * sum(served.values()) - 200


def test_who_waits_goes_by_priority_and_then_by_arrival_and_nobody_overtakes_a_long_one() -> None:
    it = AdmissionQueue()
    it.resize(PoolCapacity(1, 1000, 1000, 10), 0.0)
    (first,) = it.offer(ticket(), 0.0)
    late, long, short, urgent = ticket(priority=1), ticket(prompt=900), ticket(prompt=1), ticket(priority=-1)
    for each in (late, long, short, urgent):
        assert it.offer(each, 0.0) == []
    order = []
    while first is not None:
        (granted,) = it.release(first, 5, 0.0) or [None]
        order.append(granted)
        first = granted
    assert order == [urgent, long, short, late, None]


def test_a_short_request_does_not_overtake_a_long_one_that_waits_for_room() -> None:
    it = AdmissionQueue()
    it.resize(PoolCapacity(9, 100, 1000, 10), 0.0)
    (held,) = it.offer(ticket(prompt=50), 0.0)
    long, short = ticket(prompt=80), ticket(prompt=5)
    assert it.offer(long, 0.0) == []
    assert it.offer(short, 0.0) == [], "there would be room for it"
    assert it.release(held, 5, 1.0) == [long, short]


def test_a_request_is_turned_away_by_the_pace_that_was_measured_and_told_when_to_return() -> None:
    it = AdmissionQueue(max_queued_tokens=10**6)
    it.resize(PoolCapacity(1, 10**6, 10**6, 10), 0.0)
    (held,) = it.offer(ticket(prompt=90, answer=10), 0.0)
    for number in range(1, 11):  # 100 tokens a second, while somebody waits
        it.offer(ticket(prompt=90, answer=10), float(number - 1))
        (held,) = it.release(held, 10, float(number))
    for _ in range(20):
        it.offer(replace(ticket(prompt=90, answer=10), expires=60.0), 10.0)
    with pytest.raises(AdmissionRefusedError) as caught:
        it.offer(replace(ticket(prompt=90, answer=10), expires=40.0), 10.0)
    assert caught.value.retry_after_s == pytest.approx(21.0, rel=0.2)
    urgent = replace(ticket(priority=-1, prompt=90, answer=10), expires=12.5)
    assert it.offer(urgent, 10.0) == [], "before it goes nobody"
    other = replace(ticket("other", prompt=90, answer=10), expires=16.5)
    assert it.offer(other, 10.0) == [], "and tenants take turns"


def test_a_pace_is_that_of_times_with_a_queue_is_remembered_and_follows_the_nodes_that_come_and_go() -> None:
    it = AdmissionQueue(max_queued_tokens=10**9)
    it.resize(PoolCapacity(1, 10**6, 10**6, 10), 0.0)
    for number in range(3600):  # an hour without a queue
        (held,) = it.offer(ticket(prompt=90, answer=10), float(number))
        it.release(held, 10, number + 0.5)
    (held,) = it.offer(ticket(prompt=90, answer=10), 3600.0)
    for number in range(3600, 3620):  # 100 tokens a second
        it.offer(ticket(prompt=90, answer=10), float(number))
        (held,) = it.release(held, 10, number + 1.0)
    it.release(held, 10, 3621.0)
    it.offer(ticket(), 7200.0)
    assert it.offer(ticket(prompt=90, answer=10), 7200.0) == []
    assert it.expected_wait_s(ticket(prompt=90, answer=10)) == pytest.approx(2.0, rel=0.2)
    it.capacity = PoolCapacity(2, 10**6, 10**6, 10)
    assert it.expected_wait_s(ticket(prompt=90, answer=10)) == pytest.approx(1.0, rel=0.2)


def test_who_could_not_be_complete_by_its_deadline_is_turned_away_and_not_cut_on_its_node() -> None:
    it = AdmissionQueue()
    it.resize(PoolCapacity(1, 10**6, 10**6, 10), 0.0)
    (held,) = it.offer(ticket(prompt=90, answer=10), 0.0)
    it.pause(held, 1.0)
    it.resume(held)
    it.release(held, 10, 100.0)  # its client did not read: that says nothing of the nodes
    (held,) = it.offer(ticket(prompt=90, answer=10), 100.0)
    it.release(held, 10, 102.0)  # 0.2 s a token
    it.offer(ticket(prompt=90, answer=10), 102.0)
    with pytest.raises(AdmissionRefusedError):
        it.offer(replace(ticket(prompt=90, answer=10), deadline=105.0), 102.0)
    assert it.offer(replace(ticket(prompt=90, answer=2), deadline=105.0), 102.0) == [], "a short answer has the time"


SLOTS, STAY_S, PATIENCE_S, LAST_S = 16, 1.4, 4.0, 15.0


def served_and_late(loads: list[tuple[float, float]]) -> tuple[float, int]:
    """Nodes that run SLOTS requests at once, about STAY_S each, meet loads: times the peak, and seconds. Returns what
    share of the peak they served during the last, and how many were let in and waited too long."""
    it, chance, number = AdmissionQueue(), random.Random(1), itertools.count()
    it.resize(PoolCapacity(SLOTS, 10**6, 10**6, 100), 0.0)
    due: list[tuple[float, int, str, QueueEntry]] = []
    begins = end = served = late = 0.0
    for times, seconds in loads:
        at = begins = end
        end += seconds
        while times and (at := at + chance.expovariate(times * SLOTS / STAY_S)) < end:
            due.append((at, next(number), "comes", QueueEntry("", 0, 500, 32, 1, at + PATIENCE_S)))
    while due:
        at, _, what, one = heapq.heappop(due)
        if what == "comes":
            try:
                granted = it.offer(one, at)
            except AdmissionRefusedError:
                continue
            heapq.heappush(due, (one.expires, next(number), "is late", one))
        elif what == "ends":
            served += begins + STAY_S < at <= end
            granted = it.release(one, 64, at)
        elif one.is_granted:
            continue
        else:
            late += 1
            granted = it.release(one, 0, at)
        for each in granted:
            heapq.heappush(due, (at + STAY_S * chance.uniform(0.7, 1.3), next(number), "ends", each))
    return served * STAY_S / SLOTS / (end - begins - STAY_S), int(late)


@pytest.mark.parametrize("before", [[], [(0.5, 10.0)], [(1.0, 20.0)], [(10.0, 10.0), (0.0, 60.0)]])
@pytest.mark.parametrize("times", [2.0, 10.0])
def test_whatever_was_before_too_much_is_turned_away_early_and_the_nodes_stay_busy(
    before: list[tuple[float, float]], times: float
) -> None:
    share, late = served_and_late([*before, (times, LAST_S)])
    assert share >= 0.95
    assert late == 0


def test_a_full_queue_turns_away_whoever_has_had_its_share_of_it() -> None:
    it = AdmissionQueue(max_queued_tokens=100)
    it.resize(PoolCapacity(1, 1000, 1000, 10), 0.0)
    it.offer(ticket(), 0.0)
    for _ in range(10):
        it.offer(ticket("greedy"), 0.0)
    with pytest.raises(AdmissionRefusedError):
        it.offer(ticket("greedy"), 0.0)
    for _ in range(5):
        it.offer(ticket("modest"), 0.0)
    with pytest.raises(AdmissionRefusedError):
        it.offer(ticket("modest"), 0.0)
    assert it.queued_tokens == 150, "bounded for all that"


def test_a_prompt_that_is_cached_takes_no_place_twice() -> None:
    it = AdmissionQueue()
    it.resize(PoolCapacity(10, 100, 1000, 10), 0.0)
    for _ in range(4):
        (granted,) = it.offer(ticket(prompt=80, answer=5), 0.0) or [None]
        assert granted is not None
        it.credit_prefix_hit(granted, 80)
    assert it.held_tokens == 20


# ---- in the router ---------------------------------------------------------------------------------------------------


def crowded(**rules: Any) -> Stage:
    """One node that should hold three requests."""
    here = stage("d0", **rules)
    here.d0.info = replace(here.d0.info, max_num_seqs=1)
    here.fleet.notify()
    return here


async def fill(here: Stage, count: int = 3) -> list[Any]:
    return [await here.submit(name=f"held-{number}") for number in range(count)]


async def finish(here: Stage, name: str) -> None:
    here.d0.say(*generated(f"{name}.0.0"))
    await turns()


async def test_what_the_nodes_should_not_hold_waits_in_the_router_and_goes_when_there_is_room() -> None:
    here = crowded()
    runs = await fill(here)
    waiting = await here.submit(name="waiting")
    urgent = await here.submit(name="urgent", priority=-1)
    assert len(here.d0.submits) == 3
    assert here.queue.queued_requests == 2
    assert here.queue.queued_tokens == 2 * (len(PROMPT) + len(ANSWER) // 2)
    await finish(here, "held-0")
    assert here.d0.submits[-1].id == "urgent.0.0"
    await finish(here, "held-1")
    assert here.d0.submits[-1].id == "waiting.0.0"
    for name in ("held-2", "urgent", "waiting"):
        await finish(here, name)
    for run in [*runs, waiting, urgent]:
        assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_a_light_load_is_placed_without_a_turn_of_the_loop_more() -> None:
    here = stage("d0")
    async with here.dispatch.admit(GenerationRequest("r", list(PROMPT), 4, SamplingParams())) as (stream,):
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # the task begins
        assert len(here.d0.submits) == 1
        here.d0.say(token("r.0.0", 0))
        await reader


async def test_who_is_turned_away_hears_it_at_once_with_a_time_to_return_and_no_node_hears_of_it() -> None:
    here = crowded(max_queued_tokens=1)
    runs = await fill(here)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="try again later") as caught:
        await here.submit(n=2, name="refused")
    assert time.monotonic() - began < 1.0, "at once: no wait is in it"
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "overloaded", 1.0)
    assert len(here.d0.submits) == 3
    assert here.counts()["refused"] == 2
    for run in runs:
        await run.close()
    here.check_over()


async def test_where_one_sample_fails_the_others_meet_no_node_however_slow_their_client_is() -> None:
    here = stage("d0")
    run = await here.submit(n=3)
    here.d0.say(TokenDelta("r.0.0", error="internal"))
    await turns()
    assert [submit.id for submit in here.d0.submits] == ["r.0.0"]
    assert (here.counts()["failed"], here.counts()["cancelled"]) == (1, 2)
    with pytest.raises(UnavailableError, match="internal"):
        await collect(run)
    here.check_over()


async def test_what_is_given_up_before_it_was_sent_never_reaches_its_node() -> None:
    """Of one command a node takes the aborts first."""
    here = stage("d0")
    sent = await here.submit(name="sent")
    here.d0.take_command()  # as when it is written
    unsent = await here.submit(name="unsent")
    await unsent.close()
    await sent.close()
    assert here.d0.take_command() == RouterCommand("router", aborts=["sent.0.0"])
    here.check_over()


async def test_a_request_that_no_node_could_hold_is_the_clients_error() -> None:
    here = stage("d0 d1")
    with pytest.raises(
        RequestError, match="4009 tokens need 1003 blocks of 4 tokens, and the KV cache has 999"
    ) as caught:
        await here.submit(max_tokens=4000)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "max_tokens", "request_too_large")
    here.check_over()


async def test_a_request_waits_for_its_turn_so_long_and_no_longer() -> None:
    here = crowded(max_queue_s=0.05)
    runs = await fill(here)
    late = await here.submit(name="late")
    with pytest.raises(UnavailableError, match="waited too long") as caught:
        await collect(late)
    assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
    assert len(here.d0.submits) == 3
    for run in runs:
        await run.close()
    here.check_over()


async def test_who_leaves_the_queue_makes_room_in_it_and_nodes_that_come_empty_it() -> None:
    here = crowded()
    runs = await fill(here)
    leaver, stayer = await here.submit(name="leaver"), await here.submit(name="stayer")
    await leaver.close()
    assert here.queue.queued_requests == 1
    here.d0.info = replace(here.d0.info, max_num_seqs=8)
    here.fleet.notify()
    await turns()
    assert here.d0.submits[-1].id == "stayer.0.0"
    for run in [*runs, stayer]:
        await run.close()
    here.check_over()


# ---- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "placed", "told", "landed", "no_node"])
async def test_at_its_deadline_a_request_ends_everywhere_in_whatever_phase_it_is(phase: str) -> None:
    here = crowded() if phase == "queued" else stage("p0 d0")
    runs = await fill(here) if phase == "queued" else []
    run = await here.submit(deadline=time.monotonic() + 0.1)
    if phase in {"told", "landed"}:
        here.p0.say(token("r.0.0", 0))
    if phase == "landed":
        here.d0.say(TokenDelta("r.0.0", 1, handed_off=True), token("r.0.0", 1))
    if phase == "no_node":
        here.p0.die()
        here.d0.die()
    await turns()
    with pytest.raises(UnavailableError, match="timed out") as caught:
        await collect(run)
    assert (caught.value.status, caught.value.code) == (504, "deadline")
    assert phase in {"queued", "no_node"} or "r.0.0" in here.p0.aborts
    assert here.counts()["failed"] == 1
    for each in runs:
        await each.close()
    here.check_over()


async def test_a_request_whose_time_is_over_before_it_began_meets_no_node() -> None:
    here = stage("d0")
    with pytest.raises(UnavailableError, match="timed out"):
        await here.submit(deadline=time.monotonic() - 1)
    assert here.d0.submits == []


# ---- slow readers ----------------------------------------------------------------------------------------------------


def spoken(identity: str, start: int, count: int) -> list[TokenDelta]:
    return [TokenDelta(identity, position, pack_ids([position % 1000])) for position in range(start, start + count)]


async def test_a_client_that_stops_reading_has_its_generation_taken_off_the_node_and_back_when_it_reads() -> None:
    here = stage("d0", max_attempts=1)
    run = await here.submit(max_tokens=3000, slowly=True)
    said = 0
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    while not here.d0.aborts:
        here.d0.say(*spoken("r.0.0", said, 50))
        said += 50
        assert said < 3000, "it is never paused"
        await asyncio.sleep(0.01)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held <= 256 << 10, f"{held} bytes are held for a client that reads nothing"
    assert here.d0.aborts == ["r.0.0"]
    heard: list[Piece] = []
    while len(here.d0.submits) == 1:
        heard.append(await anext(run))
        await turns()
    again = here.d0.submits[1]
    told = len(unpack_ids(again.tokens)) - len(PROMPT)
    assert said - 50 <= told <= said
    here.d0.say(*spoken(again.id, told, 5), TokenDelta(again.id, told + 5, finish="stop"))
    heard += await collect(run)
    assert tokens_of(heard) == [position % 1000 for position in range(told + 5)]
    assert (here.counts()["paused"], here.counts()["moved"], here.counts()["finished"]) == (1, 0, 1)
    here.check_over()


async def test_a_burst_that_is_read_at_once_pauses_nothing() -> None:
    here = stage("d0")
    run = await here.submit(max_tokens=3000)
    here.d0.say(*spoken("r.0.0", 0, 2999), TokenDelta("r.0.0", 2999, finish="length"))
    assert len(tokens_of(await collect(run))) == 2999
    assert here.counts()["paused"] == 0
    here.check_over()


async def test_a_client_that_reads_nothing_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "SLOW_S", 0.1)
    here = stage("d0")
    run = await here.submit(n=2, max_tokens=3000, slowly=True)
    here.d0.say(*spoken("r.0.0", 0, 2000))
    assert await wait_until(lambda: not here.counts()["running"], 10.0)
    with pytest.raises(UnavailableError, match="Nothing was read") as caught:
        await collect(run)
    assert caught.value.code == "slow_reader"
    here.check_over()


def test_a_client_that_takes_nothing_or_is_gone_without_a_word_is_cut_off_by_the_kernel() -> None:
    """Accepted connections inherit the option from the listening socket."""
    with _listener("127.0.0.1", 0, "--port") as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30


def test_what_is_held_for_a_client_counts_its_logprobs() -> None:
    entry = Logprobs(5, -1.0, 1, list(range(20)), [-1.0] * 20)
    assert (
        attempt_module.size_of(TokenDelta("r", tokens=pack_ids([1]), logprobs=[entry]))
        > attempt_module.size_of(TokenDelta("r", tokens=pack_ids([1]))) + 1000
    )


# ---- every request is counted once -----------------------------------------------------------------------------------

ENDINGS = ("finish", "close", "cancel", "reject", "internal", "kill", "bug", "late", "leave")


@settings(max_examples=80)
@given(endings=st.lists(st.tuples(st.sampled_from(ENDINGS), st.integers(1, 3)), min_size=1, max_size=8))
def test_every_request_is_counted_once_however_it_ends(endings: list[tuple[str, int]]) -> None:
    async def play() -> None:
        here = stage("d0 d1", max_queued_tokens=60, max_attempts=2)
        total, runs = 0, []
        for number, (ending, n) in enumerate(endings):
            total += n
            try:
                deadline = time.monotonic() + 0.05 if ending == "late" else None
                run = await here.submit(n, name=f"{ending}-{number}", deadline=deadline)
                runs.append((ending, f"{ending}-{number}", run))
            except UnavailableError:
                assert here.counts()["refused"]
        for ending, name, run in runs:
            await end(here, ending, name, run)
        for _, _, run in runs:
            await run.close()
        await turns()
        assert here.counts()["total"] == total
        here.check_over()

    asyncio.run(play())


async def end(here: Stage, how: str, name: str, run: Any) -> None:
    def say(delta: TokenDelta) -> None:
        for node in here.nodes.values():
            if delta.id in node.listeners:
                node.say(delta)

    match how:
        case "finish":
            for delta in generated(f"{name}.0.0"):
                say(delta)
        case "cancel":
            run.enough(0)
            say(token(f"{name}.0.0", 0))
        case "reject" | "internal":
            say(TokenDelta(f"{name}.0.0", error="internal" if how == "internal" else "it is wrong"))
        case "kill":
            here.d0.die()
            here.d0.revive()
        case "bug":
            failpoints.configure(f"router.received@{name}.0.0=raise", allowed=True)
            say(token(f"{name}.0.0", 0))
            failpoints.configure("", allowed=False)
        case "late":
            await asyncio.wait([run.task])
        case "leave":
            await run.close()
    await turns()


async def test_a_bug_in_one_request_is_its_own_affair() -> None:
    """An exception while one request's tokens are delivered fails it with a 500; others on that node continue."""
    here = stage("d0")
    runs = [await here.submit(name=name) for name in ("good", "bad")]
    failpoints.configure("router.received:2@bad.0.0=raise", allowed=True)
    try:
        for position in range(len(ANSWER)):
            here.d0.say(token("good.0.0", position), token("bad.0.0", position))
    finally:
        failpoints.configure("", allowed=False)
    with pytest.raises(failpoints.FailpointError):
        await collect(runs[1])
    assert tokens_of(await collect(runs[0])) == ANSWER
    assert (here.counts()["finished"], here.counts()["failed"]) == (1, 1)
    assert here.d0.is_alive
    assert here.d0.aborts == ["bad.0.0"]
    here.check_over()
