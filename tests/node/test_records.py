"""Test the records that a node keeps in bounded memory: a record of each step, and the events of requests from "queued"
to "ended"."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest import mock

import pytest

from dashboard.step_ring import members_of
from engine.runner import SliceOutput
from engine.step_time_fit import StepTiming
from node import router_sessions
from node.node import Node
from node.output_publisher import OutputPublisher
from node.recorder import SchedulerSnapshot, StepRecorder
from node.router_sessions import MAX_RECORDS, MAX_STEPS, RouterSessions, RouterStream
from scheduler.blocks import Ledger
from scheduler.request import Request, Slice, Step
from scheduler.role import DECODE
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.lifecycle import wait_until
from shared.rpc.codec import decode, encode
from shared.rpc.messages import (
    Logprobs,
    NodeStats,
    NodeUpdate,
    RequestEvent,
    RouterCommand,
    SamplingParams,
    StepRecord,
    TokenDelta,
)
from tests.node.harness import RouterLine, attached, hash_node, submission

SNAPSHOT = SchedulerSnapshot(Ledger(1, 2, 3, 4, 0, 10), 5, 6)


@asynccontextmanager
async def running_node(num_blocks: int = 64) -> AsyncIterator[tuple[Node, RouterLine, Scheduler]]:
    here = hash_node(DECODE, num_blocks=num_blocks, limits=StepLimits(8, 8), max_model_len=1 << 16)
    async with attached(here) as line:
        yield here.node, line, here.scheduler


async def test_every_step_is_recorded_once_with_its_work_its_members_and_its_times() -> None:
    async with running_node() as (_, line, scheduler):
        line.submit(submission("a", list(range(3, 21)), 6))
        line.submit(submission("b", list(range(40, 51)), 4))
        await line.ends("a", "b")
        await wait_until(lambda: len(line.steps) == scheduler.counters.steps, 2.0)
        steps = line.steps
        assert [step.number for step in steps] == list(range(scheduler.counters.steps))
        assert sum(step.prefill_tokens for step in steps) == 18 + 11 == scheduler.counters.prompt_tokens
        assert sum(step.num_decodes for step in steps) == 5 + 3, "the first tokens come from the prompts' last chunks"
        serials = {event.serial: event.count for event in line.events() if event.kind == "queued"}
        computed = dict.fromkeys(serials, 0)
        for step in steps:
            members = members_of(step.members, step.num_prefills)
            assert [member.is_chunk for member in members] == [True] * step.num_prefills + [False] * step.num_decodes
            assert sum(member.num_tokens for member in members if member.is_chunk) == step.prefill_tokens
            assert sum(member.start + 1 for member in members if not member.is_chunk) == step.decode_context
            assert (step.budget, step.reason) == (8, "fixed")
            for member in members:
                computed[member.serial] += member.num_tokens
            assert step.blocks_free + step.blocks_cached + step.blocks_owned == 63
        assert sorted(serials.values()) == [11, 18]
        assert sorted(computed.values()) == [11 + 3, 18 + 5], "every token but the last sampled one"
        ends = [step.start_ns + 1000 * step.duration_us for step in steps]
        assert all(end <= step.start_ns + 1000 for end, step in zip(ends, steps[1:], strict=False)), "passes overlap"


async def test_a_request_is_queued_admitted_sampled_first_and_ended() -> None:
    async with running_node() as (_, line, _):
        line.submit(submission("a", list(range(3, 21)), 6))
        await line.ends("a")
        assert line.kinds("a") == ["queued", "admitted", "first", "ended"]
        assert line.events("a")[-1].reason == "length"
        line.submit(submission("b", list(range(3, 21)), 6))
        await line.ends("b")
        admitted = next(event for event in line.events("b") if event.kind == "admitted")
        assert admitted.count == 16, "its prefix was found: four whole blocks"


def abort(line: RouterLine) -> None:
    line.abort("a")


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "also", "reason"),
    [(6, 18, lambda _: None, "length"), (600, 18, abort, "aborted"), (900, 100, lambda _: None, "the KV cache has 63")],
    ids=["finished", "aborted as it comes", "refused by the scheduler"],
)
async def test_every_queued_request_ends_once(
    max_tokens: int, prompt: int, also: Callable[[RouterLine], None], reason: str
) -> None:
    async with running_node() as (_, line, _):
        line.submit(submission("a", [5] * prompt, max_tokens))
        also(line)
        await line.ends("a")
        await asyncio.sleep(0.15)
        kinds = line.kinds("a")
        assert (kinds[0], kinds[-1]) == ("queued", "ended")
        assert (kinds.count("queued"), kinds.count("ended")) == (1, 1)
        assert reason in next(event.reason for event in line.events("a") if event.kind == "ended")


async def test_a_request_that_is_aborted_before_the_engine_adds_it_is_queued_before_it_ends() -> None:
    async with running_node() as (running, line, _):
        busy = threading.Event()
        running.engine.post(lambda _: busy.wait(5.0))  # the engine is busy, as in a long step
        line.submit(submission("a", [5] * 18, 6))
        abort(line)
        assert await wait_until(lambda: not line.commands.qsize(), 2.0)
        assert await wait_until(lambda: "a" not in running.requests, 2.0)
        await asyncio.sleep(0.15)
        busy.set()
        await line.ends("a")
        await asyncio.sleep(0.15)
        assert [event.kind for event in line.events("a")] == ["queued", "ended"], (
            "in the order in which they are sent, too"
        )
        queued, ended = line.events("a")
        assert queued.at_ns <= ended.at_ns < queued.at_ns + 100_000_000, "it ended when it was aborted"


async def test_a_router_that_leaves_ends_its_requests_and_later_records_count_as_dropped() -> None:
    async with running_node(num_blocks=8192) as (running, line, _):
        line.submit(submission("a", [5] * 18, 30_000))
        assert await wait_until(lambda: "a" in running.requests, 2.0)
        line.hang_up()
        assert await wait_until(lambda: "a" not in running.requests, 2.0)
        assert await wait_until(lambda: running.stats().records_dropped > 0, 2.0)


async def test_every_preemption_is_recorded() -> None:
    async with running_node(num_blocks=12) as (_, line, scheduler):
        line.submit(submission("a", [5] * 8, 28), submission("b", [6] * 8, 28))  # in one call, so that both run at once
        await line.ends("a", "b")
        recorded = sum(event.kind == "preempted" for event in line.events())
        assert recorded == scheduler.counters.preemptions > 0


# ---- bounds ------------------------------------------------------------------------------------------------------


def timing(number: int) -> StepTiming:
    chunk, decode = Request("c", [1] * 9, 9, 4, arrival=3), Request("d", [1] * 5, 4, 4, arrival=2)
    slices = [Slice(decode, 4, 1, True, 0), Slice(chunk, 0, 7, False, 0)]
    step = Step(number, slices, [])
    step.work.add_decode(5)
    step.work.add_chunk(0, 7)
    return StepTiming(step, 1_000_000, 2_500, 700)


def test_a_full_recorder_drops_the_oldest_and_counts_them() -> None:
    recorder = StepRecorder(max_steps=2, max_events=3)
    for number in range(5):
        recorder.ran(timing(number))
        recorder.turned(SNAPSHOT)
        recorder.event(f"r{number}", "received")
    steps, events = recorder.take()
    assert [step.number for step in steps] == [3, 4]
    assert [event.id for event in events] == ["r2", "r3", "r4"]
    assert recorder.dropped == 3 + 2


async def test_a_stream_sends_events_before_the_steps_that_refer_to_them_in_small_messages() -> None:
    stream, line = RouterStream(), RouterLine()
    steps = [StepRecord(number, 0, 0) for number in range(MAX_STEPS + 3)]
    assert stream.record(steps, [RequestEvent("a", "queued", 1)]) == 0
    writer = asyncio.ensure_future(stream.write(line))
    assert await wait_until(lambda: len(line.steps) == len(steps), 2.0)
    writer.cancel()
    assert [bool(update.events) for update in line.updates] == [True, False, False]
    assert max(len(update.steps) for update in line.updates) == MAX_STEPS


async def test_logprobs_are_divided_into_messages_that_the_router_decodes() -> None:
    def entries(count: int) -> list[Logprobs]:
        return [Logprobs(number, -1.0, 1, list(range(20)), [-1.0] * 20) for number in range(count)]

    stream, line = RouterStream(), RouterLine()
    stream.deltas += [TokenDelta("a", prompt_logprobs=entries(20_000), tokens=b"1234")]
    stream.deltas += [TokenDelta(str(number), prompt_logprobs=entries(512)) for number in range(40)]
    stream.wake.set()
    writer = asyncio.ensure_future(stream.write(line))
    assert await wait_until(lambda: bool(line.deltas) and line.deltas[-1].id == "39", 60.0)
    writer.cancel()
    decoded = [delta for update in line.updates for delta in decode(encode(update), NodeUpdate).deltas]
    first = [delta for delta in decoded if delta.id == "a"]
    assert [entry.token for delta in first for entry in delta.prompt_logprobs] == list(range(20_000))
    assert [delta.tokens for delta in first] == [b""] * (len(first) - 1) + [b"1234"]
    assert [delta.id for delta in decoded if delta.id != "a"] == [str(number) for number in range(40)]


async def test_logprobs_of_a_prompt_stay_in_order_when_they_are_divided() -> None:
    """Two chunks of a prompt wait to be sent, and the second one has more logprobs than a message."""
    entries = [Logprobs(number, -1.0, 1) for number in range(3000 + 5000)]
    stream, line = RouterStream(), RouterLine()
    stream.deltas += [TokenDelta("a", prompt_logprobs=chunk) for chunk in (entries[:3000], entries[3000:])]
    stream.deltas.append(TokenDelta("b"))
    stream.wake.set()
    writer = asyncio.ensure_future(stream.write(line))
    assert await wait_until(lambda: bool(line.deltas) and line.deltas[-1].id == "b", 60.0)
    writer.cancel()
    assert [entry.token for delta in line.deltas for entry in delta.prompt_logprobs] == list(range(len(entries)))


async def test_records_reach_a_router_that_is_sent_tokens_without_pause() -> None:
    class Busy(RouterLine):
        async def send_message(self, update: NodeUpdate) -> None:
            await super().send_message(update)
            stream.deltas.append(TokenDelta("a"))
            stream.wake.set()
            await asyncio.sleep(0)

    stream, line = RouterStream(), Busy()
    stream.deltas.append(TokenDelta("a"))
    stream.record([StepRecord(number, 0, 0) for number in range(3 * MAX_STEPS)], [])
    writer = asyncio.ensure_future(stream.write(line))
    assert await wait_until(lambda: len(line.steps) == 3 * MAX_STEPS, 2.0)
    writer.cancel()


def test_a_stream_that_is_not_read_stays_bounded() -> None:
    stream = RouterStream()
    steps = [StepRecord(number, 0, 0) for number in range(MAX_RECORDS)]
    assert stream.record(steps, []) == 0
    assert stream.record(steps[:10], []) == 10
    assert len(stream.steps) == MAX_RECORDS
    assert stream.steps[0].number == 10


# ---- prompt logprobs ---------------------------------------------------------------------------------------------


def scored(scheduler: Scheduler, tokens: int) -> tuple[Request, Step, StepOutput]:
    """Return a request, a step that computes its whole prompt, and the output of the step for this request."""
    request = Request(
        "r", [5] * tokens, tokens, 1, needs_prompt_logprobs=True, sampling=SamplingParams(temperature=0.0)
    )
    scheduler.add(request)
    return request, scheduler.schedule(), StepOutput(request, 0, [], None)


async def test_prompt_logprobs_are_published_once_for_each_request() -> None:
    scheduler = Scheduler(StepLimits(), 9, 4)
    publisher = OutputPublisher(scheduler, StepRecorder())
    publisher.subscribe(mock.Mock())
    first, step, event = scored(scheduler, 8)
    for expected in ([0.1, 0.2], []):  # the second result comes after a preemption
        output = SliceOutput(prompt_logprobs=[0.1, 0.2])
        publisher.on_step(step, [event], [output])
        assert output.prompt_logprobs == expected
        publisher.on_turn(scheduler)
    scheduler.abort(first)
    _, step, event = scored(scheduler, 8)
    output = SliceOutput(prompt_logprobs=[0.3, 0.4])
    publisher.on_step(step, [event], [output])
    assert output.prompt_logprobs == [0.3, 0.4], "another request with that id"


def _steps(line: RouterLine) -> list[int]:
    """Return the number of steps in each of the sent stats."""
    return [update.stats.steps for update in line.updates if update.stats is not None]


async def test_a_router_gets_records_and_repeated_stats_only_if_it_wants_them() -> None:
    recorder, line = StepRecorder(), RouterLine()
    sessions = RouterSessions(recorder)
    line.commands.put_nowait(RouterCommand("router", records=False))
    serving = asyncio.ensure_future(sessions.attach(line, NodeStats, lambda *_: None, lambda _: None))
    publishing = asyncio.ensure_future(sessions.publish_records())
    assert await wait_until(lambda: len(line.updates) == 1, 5.0)
    recorder.event("unwanted", "queued")
    assert await wait_until(lambda: recorder.take() == ([], []), 5.0)
    line.commands.put_nowait(RouterCommand("router"))
    assert await wait_until(lambda: line.commands.empty(), 5.0)
    recorder.event("wanted", "queued")
    assert await wait_until(lambda: bool(line.events()), 5.0)
    assert [event.id for event in line.events()] == ["wanted"]
    assert sessions.dropped_records == 0
    line.updates.clear()
    for steps in range(4):
        sessions.publish_stats(NodeStats(steps=steps, running=1))
        await sessions.flush()
    sessions.publish_stats(NodeStats(steps=4, running=2))
    await sessions.flush()
    assert _steps(line) == [0, 2, 4], "stats without news of the load are sent every second time"
    line.updates.clear()
    line.commands.put_nowait(RouterCommand("router", has_requests=False))
    assert await wait_until(lambda: line.commands.empty(), 5.0)
    for steps in range(11):
        sessions.publish_stats(NodeStats(steps=steps, running=3))
        await sessions.flush()
    assert _steps(line) == [0, 5, 10], "a router without requests gets fewer of them"
    line.updates.clear()
    for steps in (11, 11, 12, 12, 12):
        sessions.publish_stats(NodeStats(steps=steps))
        await sessions.flush()
    assert _steps(line) == [11, 12], "the counts of an idle node are news"
    line.updates.clear()
    line.commands.put_nowait(RouterCommand("router"))
    assert await wait_until(lambda: len(line.updates) == 1, 5.0), "a router with new requests gets stats at once"
    line.hang_up()
    await serving
    publishing.cancel()
    await sessions.close()


async def test_a_drain_takes_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if a router never reports that it knows of the drain, as a router of an earlier version does."""
    waits = list[float]()

    async def wait(_: object, timeout_s: float) -> None:
        waits.append(timeout_s)

    monkeypatch.setattr(router_sessions, "wait_until", wait)
    monkeypatch.setattr(router_sessions, "time", mock.Mock(monotonic=lambda: sum(waits)))
    await RouterSessions(StepRecorder()).wait_until_ended(lambda: False, 3.0, receives=True)
    assert sum(waits) == pytest.approx(3.0)
    assert len(waits) == 2
