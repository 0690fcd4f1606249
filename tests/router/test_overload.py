"""Test overload: deadlines, slow clients, and which requests run, wait or are rejected. Each request must be counted
once, and its resources must be released."""

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

from router.__main__ import listen
from router.dispatch import attempt as attempt_module
from router.dispatch import dispatcher as dispatch_module
from router.dispatch.admission import AdmissionQueue, AdmissionRefusedError, QueueEntry
from router.dispatch.requests import GenerationRequest
from router.nodes.placement import PoolCapacity
from scheduler.cost import CostModel
from shared import failpoints
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import wait_until
from shared.rpc.messages import NodeStats, SamplingParams, TokenDelta, pack_ids, unpack_ids
from tests.router.simulated import (
    ANSWER,
    PROMPT,
    Piece,
    Reader,
    Stage,
    collect,
    generated,
    no_pauses,
    settle,
    stage,
    token,
    tokens_of,
)

__all__ = ["no_pauses"]
SMALL = PoolCapacity(requests=4, kv_tokens=100, prompt_tokens=30, prompts=2)


def entry(tenant: str = "", priority: int = 0, prompt: int = 5, answer: int = 5, count: int = 1) -> QueueEntry:
    return QueueEntry(tenant, priority, prompt, answer, count, expires=1e9)


# ---- the admission queue ---------------------------------------------------------------------------------------------


class Model:
    """An admission queue, and a simple model of its content."""

    def __init__(self) -> None:
        self.admission = AdmissionQueue(max_queued_tokens=10_000)
        self.admission.resize(SMALL, 0.0)
        self.waiting: list[QueueEntry] = []
        self.held: list[QueueEntry] = []
        self.now = 0.0

    def grant(self, granted: list[QueueEntry]) -> None:
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
        assert self.held or not self.waiting, "requests wait although none runs"

    is_smaller = False  # the capacity has shrunk, so running requests may exceed it


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
def test_held_and_waiting_requests_add_up_and_all_are_served(acts: list[tuple[Any, ...]]) -> None:
    it = Model()
    for act, *given_ in acts:
        it.now += 0.1
        if act == "offer":
            new = entry(*given_)
            it.waiting.append(new)
            it.grant(it.admission.offer(new, it.now))
        elif act == "resize":
            it.is_smaller = True
            it.grant(it.admission.resize(PoolCapacity(*given_, 30, 2), it.now))
        elif act == "leave" and it.waiting:
            one = it.waiting[given_[0] % len(it.waiting)]
            it.grant(it.admission.release(one, 0, it.now))
            if not one.num_left:
                it.waiting.remove(one)
        elif act in {"end", "computed", "known"} and it.held:
            one = it.held[given_[0] % len(it.held)]
            if act == "known":
                it.admission.credit_prefix_hit(one, given_[0])
            elif act == "computed":
                it.grant(it.admission.prompt_computed(one, it.now))
            else:
                it.grant(it.admission.release(one, 3, it.now))
        it.held = [each for each in it.held if each.num_left]
        it.check()
    while it.held:
        one = it.held[0]
        it.grant(it.admission.release(one, 3, it.now))
        it.held = [each for each in it.held if each.num_left]
        it.check()
    assert not it.waiting
    assert (it.admission.held_tokens, it.admission.pending_prefill_tokens, it.admission.queued_tokens) == (0, 0, 0)


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 60), min_size=30, max_size=60))
def test_tenants_share_tokens_equally(sizes: list[int]) -> None:
    """A tenant that requests ten times as many tokens as another tenant gets only half of the capacity."""
    it = AdmissionQueue(max_queued_tokens=10**9)
    it.resize(SMALL, 0.0)
    held: list[QueueEntry] = []
    for size in sizes * 10:
        held += it.offer(entry("greedy", prompt=size), 0.0)
    for _ in range(60):
        held += it.offer(entry("modest", prompt=10), 0.0)
    served = {"greedy": 0, "modest": 0}
    counted = False
    while "modest" in it.queued_tenants:
        one = held.pop(0)
        counted = counted or one.tenant == "modest"  # count from the first request of `modest` on
        served[one.tenant] += one.cost if counted else 0
        held += it.release(one, one.sample_tokens, 0.0)
    assert abs(served["greedy"] - served["modest"]) <= 2 * 100 + 65
    assert served["modest"] >= 0.45 * sum(served.values()) - 200


def test_requests_run_by_priority_then_by_arrival() -> None:
    it = AdmissionQueue()
    it.resize(PoolCapacity(1, 1000, 1000, 10), 0.0)
    (first,) = it.offer(entry(), 0.0)
    late, long, short, urgent = entry(priority=1), entry(prompt=900), entry(prompt=1), entry(priority=-1)
    for each in (late, long, short, urgent):
        assert it.offer(each, 0.0) == []
    order = []
    while first is not None:
        (granted,) = it.release(first, 5, 0.0) or [None]
        order.append(granted)
        first = granted
    assert order == [urgent, long, short, late, None]


def test_a_request_is_rejected_if_its_predicted_wait_is_too_long() -> None:
    it = AdmissionQueue(max_queued_tokens=10**6)
    it.resize(PoolCapacity(1, 10**6, 10**6, 10), 0.0)
    (held,) = it.offer(entry(prompt=90, answer=10), 0.0)
    for number in range(1, 11):  # the node serves 100 tokens per second while requests wait
        it.offer(entry(prompt=90, answer=10), float(number - 1))
        (held,) = it.release(held, 10, float(number))
    for _ in range(20):
        it.offer(replace(entry(prompt=90, answer=10), expires=60.0), 10.0)
    with pytest.raises(AdmissionRefusedError) as caught:
        it.offer(replace(entry(prompt=90, answer=10), expires=40.0), 10.0)
    assert caught.value.retry_after_s == pytest.approx(21.0, rel=0.2)
    urgent = replace(entry(priority=-1, prompt=90, answer=10), expires=12.5)
    assert it.offer(urgent, 10.0) == [], "no queued request is served earlier"
    other = replace(entry("other", prompt=90, answer=10), expires=16.5)
    assert it.offer(other, 10.0) == [], "tenants share the capacity"


@pytest.mark.parametrize("cached", [0, 80])
def test_the_predicted_wait_is_right_if_prompts_are_in_the_prefix_cache(cached: int) -> None:
    it = AdmissionQueue(max_queued_tokens=10**6)
    it.resize(PoolCapacity(1, 10**6, 10**6, 10), 0.0)
    (held,) = it.offer(entry(prompt=90, answer=10), 0.0)
    for number in range(1, 11):  # the node serves one request per second
        it.credit_prefix_hit(held, cached)
        it.offer(entry(prompt=90, answer=10), float(number - 1))
        (held,) = it.release(held, 10, float(number))
    for _ in range(20):
        it.offer(entry(prompt=90, answer=10), 10.0)
    assert it.expected_wait_s(entry(prompt=90, answer=10)) == pytest.approx(21.0, rel=0.2)


@pytest.mark.parametrize(("outage_s", "num_given_up"), [(30.0, 0), (1.0, 90)])
def test_the_predicted_wait_is_right_after_an_outage_of_all_nodes(outage_s: float, num_given_up: int) -> None:
    it, room, now = AdmissionQueue(max_queued_tokens=10**6), PoolCapacity(10, 10**6, 10**6, 100), 0.0
    it.resize(room, now)
    held = [granted for _ in range(300) for granted in it.offer(entry(prompt=90, answer=10), now)]
    for now in map(float, range(1, 11)):  # the nodes serve ten requests per second
        for _ in range(10):
            held += it.release(held.pop(0), 10, now)
    it.resize(PoolCapacity(), now)
    now += outage_s
    for _ in range(num_given_up):
        held += it.release(held.pop(0), 0, now)
    it.resize(room, now)
    assert it.expected_wait_s(entry(prompt=90, answer=10)) == pytest.approx(0.1 * it.queued_requests, rel=0.2)


def test_a_request_that_cannot_meet_its_deadline_is_rejected() -> None:
    it = AdmissionQueue()
    it.resize(PoolCapacity(1, 10**6, 10**6, 10), 0.0)
    (held,) = it.offer(entry(prompt=90, answer=10), 0.0)
    it.pause(held, 1.0)
    it.resume(held)
    it.release(held, 10, 100.0)  # not measured, because it paused for a client that did not read
    (held,) = it.offer(entry(prompt=90, answer=10), 100.0)
    it.release(held, 10, 102.0)  # 0.2 s per token
    it.offer(entry(prompt=90, answer=10), 102.0)
    with pytest.raises(AdmissionRefusedError):
        it.offer(replace(entry(prompt=90, answer=10), deadline=105.0), 102.0)
    assert it.offer(replace(entry(prompt=90, answer=2), deadline=105.0), 102.0) == [], (
        "there is time for a short answer"
    )


SLOTS, STAY_S, TIMEOUT_S, LAST_S = 16, 1.4, 4.0, 15.0


def served_and_late(loads: list[tuple[float, float]]) -> tuple[float, int]:
    """Simulate nodes that run SLOTS requests at once. Each request takes about STAY_S. A load is (multiple of the peak
    rate, seconds). Return the rate of served requests during the last load, as a share of the peak rate, and the number
    of queued requests that expired."""
    it, chance, number = AdmissionQueue(), random.Random(1), itertools.count()
    it.resize(PoolCapacity(SLOTS, 10**6, 10**6, 100), 0.0)
    due: list[tuple[float, int, str, QueueEntry]] = []
    begins = end = served = late = 0.0
    for times, seconds in loads:
        at = begins = end
        end += seconds
        while times and (at := at + chance.expovariate(times * SLOTS / STAY_S)) < end:
            due.append((at, next(number), "arrives", QueueEntry("", 0, 500, 32, 1, at + TIMEOUT_S)))
    while due:
        at, _, what, one = heapq.heappop(due)
        if what == "arrives":
            try:
                granted = it.offer(one, at)
            except AdmissionRefusedError:
                continue
            heapq.heappush(due, (one.expires, next(number), "expires", one))
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
def test_under_overload_the_nodes_stay_busy_and_no_admitted_request_is_late(
    before: list[tuple[float, float]], times: float
) -> None:
    share, late = served_and_late([*before, (times, LAST_S)])
    assert share >= 0.95
    assert late == 0


def test_a_full_queue_rejects_the_tenant_that_has_its_share() -> None:
    it = AdmissionQueue(max_queued_tokens=100)
    it.resize(PoolCapacity(1, 1000, 1000, 10), 0.0)
    it.offer(entry(), 0.0)
    for _ in range(10):
        it.offer(entry("greedy"), 0.0)
    with pytest.raises(AdmissionRefusedError):
        it.offer(entry("greedy"), 0.0)
    for _ in range(5):
        it.offer(entry("modest"), 0.0)
    with pytest.raises(AdmissionRefusedError):
        it.offer(entry("modest"), 0.0)
    assert it.queued_tokens == 150, "the queue is bounded"


# ---- in the router ---------------------------------------------------------------------------------------------------


def crowded(**rules: Any) -> Stage:
    """Return a stage with one node that has room for three requests."""
    here = stage("d0", **rules)
    here.d0.info = replace(here.d0.info, max_num_seqs=1)
    here.fleet.notify()
    return here


async def fill(here: Stage, count: int = 3) -> list[Any]:
    return [await here.submit(name=f"held-{number}") for number in range(count)]


async def finish(here: Stage, name: str) -> None:
    here.d0.send(*generated(f"{name}.0.0"))
    await settle()


async def test_requests_beyond_the_nodes_capacity_wait_in_the_router() -> None:
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


async def test_a_rejection_is_immediate_and_has_a_retry_time() -> None:
    here = crowded(max_queued_tokens=1)
    runs = await fill(here)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=r"The queue is full; try again later\.") as caught:
        await here.submit(n=2, name="refused")
    assert time.monotonic() - began < 1.0, "the rejection is immediate"
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "overloaded", 1.0)
    assert len(here.d0.submits) == 3
    assert here.counts()["refused"] == 2
    for run in runs:
        await run.close()
    here.check_over()


async def test_a_request_that_another_router_accepted_waits_where_a_new_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_module, "WAIT_NEW_S", 0.02)
    here = crowded(max_queued_tokens=1, max_queue_s=0.02, ttft_slo_s=0.5)
    runs = await fill(here)
    request = GenerationRequest("r", PROMPT, len(ANSWER), SamplingParams(), generated=(ANSWER[0],), is_accepted=True)
    run = Reader(here.dispatch, request)
    await asyncio.sleep(0.1)
    assert here.queue.queued_requests == 1
    here.d0.die()
    other = Reader(here.dispatch, replace(request, id="other"))
    await asyncio.sleep(0.1)
    here.d0.revive()
    here.d0.report(NodeStats(cost=CostModel(overhead=9.0).packed(), prompt_tokens=100_000))
    for held in runs:
        await held.close()
    await settle()
    here.d0.send(*generated("r.0.0", 1), *generated("other.0.0", 1))
    assert [tokens_of(await collect(reader)) for reader in (run, other)] == [ANSWER[1:], ANSWER[1:]]
    here.check_over()


async def test_a_request_that_no_node_can_hold_is_a_client_error() -> None:
    here = stage("d0 d1")
    with pytest.raises(
        RequestError, match="4009 tokens need 1003 blocks of 4 tokens, and the KV cache has 999"
    ) as caught:
        await here.submit(max_tokens=4000)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "max_tokens", "request_too_large")
    here.check_over()


async def test_a_request_waits_at_most_the_queue_timeout() -> None:
    here = crowded(max_queue_s=0.05)
    runs = await fill(here)
    late = await here.submit(name="late")
    further = await here.submit(name="further", first_sample=8)  # samples 0 to 7 may run already
    with pytest.raises(UnavailableError, match="waited too long") as caught:
        await collect(late)
    assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
    await asyncio.sleep(0.1)
    assert (here.counts()["refused"], here.counts()["failed"]) == (1, 0), "no node received it"
    assert len(here.d0.submits) == 3
    for run in runs:
        await run.close()
    await settle()
    assert here.d0.submits[-1].id == "further.8.0"
    await further.close()
    here.check_over()


async def test_the_queue_shrinks_when_a_client_leaves_or_capacity_grows() -> None:
    here = crowded()
    runs = await fill(here)
    leaver, stayer = await here.submit(name="leaver"), await here.submit(name="stayer")
    await leaver.close()
    assert here.queue.queued_requests == 1
    here.d0.info = replace(here.d0.info, max_num_seqs=8)
    here.fleet.notify()
    await settle()
    assert here.d0.submits[-1].id == "stayer.0.0"
    for run in [*runs, stayer]:
        await run.close()
    here.check_over()


# ---- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "placed", "decoding", "landed", "no_node"])
async def test_a_request_ends_at_its_deadline_in_every_phase(phase: str) -> None:
    here = crowded() if phase == "queued" else stage("p0 d0")
    runs = await fill(here) if phase == "queued" else []
    with pytest.raises(UnavailableError, match="timed out"):
        await here.submit(deadline=time.monotonic() - 1, name="expired")
    run = await here.submit(deadline=time.monotonic() + 1.0)
    if phase in {"decoding", "landed"}:
        here.p0.send(token("r.0.0", 0))
    if phase == "landed":
        here.d0.send(TokenDelta("r.0.0", 1, handed_off=True), token("r.0.0", 1))
    if phase == "no_node":
        here.p0.die()
        here.d0.die()
    await settle()
    with pytest.raises(UnavailableError, match="timed out") as caught:
        await collect(run)
    assert (caught.value.status, caught.value.code) == (504, "deadline")
    assert phase in {"queued", "no_node"} or "r.0.0" in here.p0.aborts
    assert here.counts()["failed"] == 2
    for each in runs:
        await each.close()
    here.check_over()


# ---- slow readers ----------------------------------------------------------------------------------------------------


def deltas_of(identity: str, start: int, count: int) -> list[TokenDelta]:
    return [TokenDelta(identity, position, pack_ids([position % 1000])) for position in range(start, start + count)]


async def test_generation_pauses_while_a_client_does_not_read() -> None:
    here = stage("d0", max_attempts=1)
    run = await here.submit(max_tokens=3000, slowly=True)
    sent = 0
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    while not here.d0.aborts:
        here.d0.send(*deltas_of("r.0.0", sent, 50))
        sent += 50
        assert sent < 3000, "generation is not paused"
        await asyncio.sleep(0.01)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held <= 256 << 10, f"{held} bytes are buffered for a client that does not read"
    assert here.d0.aborts == ["r.0.0"]
    received: list[Piece] = []
    while len(here.d0.submits) == 1:
        received.append(await anext(run))
        await settle()
    again = here.d0.submits[1]
    resumed_at = len(unpack_ids(again.tokens)) - len(PROMPT)
    assert sent - 50 <= resumed_at <= sent
    here.d0.send(*deltas_of(again.id, resumed_at, 5), TokenDelta(again.id, resumed_at + 5, finish="stop"))
    received += await collect(run)
    assert tokens_of(received) == [position % 1000 for position in range(resumed_at + 5)]
    assert (here.counts()["paused"], here.counts()["moved"], here.counts()["finished"]) == (1, 0, 1)
    here.check_over()


async def test_a_burst_that_is_read_does_not_pause() -> None:
    here = stage("d0")
    run = await here.submit(max_tokens=3000)
    here.d0.send(*deltas_of("r.0.0", 0, 2999), TokenDelta("r.0.0", 2999, finish="length"))
    assert len(tokens_of(await collect(run))) == 2999
    assert here.counts()["paused"] == 0
    here.check_over()


async def test_a_request_fails_if_its_client_does_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "SLOW_S", 0.1)
    here = stage("d0")
    run = await here.submit(n=2, max_tokens=3000, slowly=True)
    here.d0.send(*deltas_of("r.0.0", 0, 2000))
    assert await wait_until(lambda: not here.counts()["running"], 10.0)
    with pytest.raises(UnavailableError, match="read nothing") as caught:
        await collect(run)
    assert caught.value.code == "slow_reader"
    here.check_over()


def test_the_kernel_closes_connections_of_vanished_clients() -> None:
    """Accepted connections inherit the timeout and keepalive options of the listening socket."""
    (listener,) = listen("127.0.0.1", 0, "--port")
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30


# ---- every request is counted once -----------------------------------------------------------------------------------

ENDINGS = ("finish", "close", "cancel", "reject", "internal", "kill", "bug", "late", "leave")


@settings(max_examples=80)
@given(endings=st.lists(st.tuples(st.sampled_from(ENDINGS), st.integers(1, 3)), min_size=1, max_size=8))
def test_every_request_is_counted_once_however_it_ends(endings: list[tuple[str, int]]) -> None:
    async def play() -> None:
        here = stage("d0 d1", max_queued_tokens=60, max_attempts=2)
        total, runs, refused = 0, [], []
        for number, (ending, n) in enumerate(endings):
            total += n
            try:
                deadline = time.monotonic() + 0.05 if ending == "late" else None
                run = await here.submit(n, name=f"{ending}-{number}", deadline=deadline)
                runs.append((ending, f"{ending}-{number}", run))
            except UnavailableError as error:  # on a busy machine, the deadline may pass before admission
                refused.append("failed" if error.code == "deadline" else "refused")
        assert all(here.counts()[outcome] for outcome in refused)
        for ending, name, run in runs:
            await end(here, ending, name, run)
        for _, _, run in runs:
            await run.close()
        await settle()
        assert here.counts()["total"] == total
        here.check_over()

    asyncio.run(play())


async def end(here: Stage, how: str, name: str, run: Any) -> None:
    def deliver(delta: TokenDelta) -> None:
        for node in here.nodes.values():
            if delta.id in node.listeners:
                node.send(delta)

    match how:
        case "finish":
            for delta in generated(f"{name}.0.0"):
                deliver(delta)
        case "cancel":
            run.enough(0)
            deliver(token(f"{name}.0.0", 0))
        case "reject" | "internal":
            deliver(TokenDelta(f"{name}.0.0", error="internal" if how == "internal" else "invalid"))
        case "kill":
            here.d0.die()
            here.d0.revive()
        case "bug":
            failpoints.configure(f"router.received@{name}.0.0=raise", allowed=True)
            deliver(token(f"{name}.0.0", 0))
            failpoints.configure("", allowed=False)
        case "late":
            await asyncio.wait([run.task])
        case "leave":
            await run.close()
    await settle()


async def test_an_exception_fails_only_its_own_request() -> None:
    """An exception in the delivery of one request's tokens fails only that request."""
    here = stage("d0")
    runs = [await here.submit(name=name) for name in ("good", "bad")]
    failpoints.configure("router.received:2@bad.0.0=raise", allowed=True)
    try:
        for position in range(len(ANSWER)):
            here.d0.send(token("good.0.0", position), token("bad.0.0", position))
    finally:
        failpoints.configure("", allowed=False)
    with pytest.raises(failpoints.FailpointError):
        await collect(runs[1])
    assert tokens_of(await collect(runs[0])) == ANSWER
    assert (here.counts()["finished"], here.counts()["failed"]) == (1, 1)
    assert here.d0.is_alive
    assert here.d0.aborts == ["bad.0.0"]
    here.check_over()
