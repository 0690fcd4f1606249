"""What a node records: a record a step, events of every request from its queueing to its one end, in bounded memory."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from engine.engine import StepTiming
from engine.hash_model import HashRunner
from node.node import Node
from node.recorder import SchedulerSnapshot, StepRecorder
from node.router_stream import MAX_RECORDS, MAX_STEPS, RouterStream
from router.history.step_ring import members_of
from scheduler.blocks import Ledger
from scheduler.cost import StepWork
from scheduler.request import Request, Slice, Step, work_of
from scheduler.role import DECODE
from scheduler.scheduler import Scheduler, StepLimits
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    NodeInfo,
    NodeStats,
    NodeUpdate,
    RequestEvent,
    RouterCommand,
    SamplingParams,
    StepRecord,
    SubmitRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)

BLOCK_TOKENS, LAYERS, VOCABULARY = 4, 2, 97
SEEN = SchedulerSnapshot(Ledger(1, 2, 3, 4, 0, 10), 5, 6)


@dataclass
class Line:
    """A router's end of the standing stream, in memory."""

    commands: asyncio.Queue[RouterCommand | None] = field(default_factory=asyncio.Queue)
    reports: list[NodeUpdate] = field(default_factory=list)

    async def recv_message(self) -> RouterCommand | None:
        return await self.commands.get()

    def __aiter__(self) -> "Line":
        return self

    async def __anext__(self) -> RouterCommand:
        command = await self.commands.get()
        if command is None:
            raise StopAsyncIteration
        return command

    async def send_message(self, report: NodeUpdate) -> None:
        self.reports.append(report)

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        submit = SubmitRequest(
            name, "router", pack_ids(prompt), len(prompt), max_tokens, SamplingParams(temperature=0.0)
        )
        self.commands.put_nowait(RouterCommand("router", [submit]))

    @property
    def steps(self) -> list[StepRecord]:
        return [step for report in self.reports for step in report.steps]

    def events(self, name: str | None = None) -> list[RequestEvent]:
        found = [event for report in self.reports for event in report.events]
        return [event for event in found if name in {None, event.id}]

    def kinds(self, name: str) -> list[str]:
        return [event.kind for event in sorted(self.events(name), key=lambda event: event.at_ns)]

    async def ends(self, *names: str) -> None:
        def all_ended() -> bool:
            return all(any(event.kind == "ended" for event in self.events(name)) for name in names)

        assert await wait_until(all_ended, 5.0), self.events()


@asynccontextmanager
async def node(num_blocks: int = 64, budget: int = 8) -> AsyncIterator[tuple[Node, Line, Scheduler]]:
    rows = np.zeros((num_blocks, BLOCK_TOKENS * LAYERS * 8), dtype=np.uint8)
    scheduler = Scheduler(StepLimits(budget, 8), num_blocks, BLOCK_TOKENS)
    info = NodeInfo("d", "b" * 32, "decode", "", "m", "print", BLOCK_TOKENS, rows.shape[1], num_blocks, 1 << 16, 8)
    running = Node(info, DECODE, scheduler, HashRunner(rows, BLOCK_TOKENS, LAYERS, VOCABULARY), 0.05, VOCABULARY)
    line = Line()
    running.start()
    attached = asyncio.ensure_future(running.attach(line))
    line.commands.put_nowait(RouterCommand("router"))
    await asyncio.sleep(0)
    try:
        yield running, line, scheduler
    finally:
        line.commands.put_nowait(None)
        await attached
        await running.close()


async def test_every_step_is_told_once_with_its_work_its_members_and_its_times() -> None:
    async with node() as (_, line, scheduler):
        line.submit("a", list(range(3, 21)), 6)
        line.submit("b", list(range(40, 51)), 4)
        await line.ends("a", "b")
        await wait_until(lambda: len(line.steps) == scheduler.counters.steps, 2.0)
        steps = line.steps
        assert [step.number for step in steps] == list(range(scheduler.counters.steps))
        assert sum(step.prefill_tokens for step in steps) == 18 + 11 == scheduler.counters.prompt_tokens
        assert sum(step.num_decodes for step in steps) == 5 + 3, "the first tokens come from the prompts' last chunks"
        for step in steps:
            members = members_of(step.members, step.num_prefills)
            assert [member.is_chunk for member in members] == [True] * step.num_prefills + [False] * step.num_decodes
            assert sum(member.num_tokens for member in members if member.is_chunk) == step.prefill_tokens
            assert sum(member.start + 1 for member in members if not member.is_chunk) == step.decode_context
            assert (step.budget, step.reason) == (8, "fixed")
            assert step.blocks_free + step.blocks_cached + step.blocks_owned == 63
        ends = [step.start_ns + 1000 * step.duration_us for step in steps]
        assert all(end <= step.start_ns + 1000 for end, step in zip(ends, steps[1:], strict=False)), "passes overlap"


async def test_members_name_their_requests_by_the_serial_of_their_queueing() -> None:
    async with node() as (_, line, scheduler):
        for name in ("a", "b"):
            line.submit(name, [ord(name) % 90] * 9, 3)
        await line.ends("a", "b")
        await wait_until(lambda: len(line.steps) == scheduler.counters.steps, 2.0)
        serials = {event.serial: event for event in line.events() if event.kind == "queued"}
        computed = dict.fromkeys(serials, 0)
        for step in line.steps:
            for member in members_of(step.members, step.num_prefills):
                computed[member.serial] += member.num_tokens
        assert computed == dict.fromkeys(serials, 9 + 2), "every token but the last sampled one"
        assert {event.count for event in serials.values()} == {9}


async def test_a_request_goes_from_queued_over_admitted_and_first_to_its_end() -> None:
    async with node() as (_, line, _):
        line.submit("a", list(range(3, 21)), 6)
        await line.ends("a")
        assert line.kinds("a") == ["queued", "admitted", "first", "ended"]
        assert line.events("a")[-1].reason == "length"
        line.submit("b", list(range(3, 21)), 6)
        await line.ends("b")
        admitted = next(event for event in line.events("b") if event.kind == "admitted")
        assert admitted.count == 16, "its prefix was found: four whole blocks"


def abort(line: Line) -> None:
    line.commands.put_nowait(RouterCommand("router", aborts=["a"]))


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "also", "reason"),
    [
        (6, 18, lambda _: None, "length"),
        (600, 18, abort, "aborted"),
        (900, 100, lambda _: None, "the KV cache has 63"),
    ],
    ids=["finished", "aborted as it comes", "refused by the scheduler"],
)
async def test_every_queued_request_ends_once(
    max_tokens: int, prompt: int, also: Callable[[Line], None], reason: str
) -> None:
    async with node() as (_, line, _):
        line.submit("a", [5] * prompt, max_tokens)
        also(line)
        await line.ends("a")
        await asyncio.sleep(0.15)
        kinds = line.kinds("a")
        assert (kinds[0], kinds[-1]) == ("queued", "ended")
        assert (kinds.count("queued"), kinds.count("ended")) == (1, 1)
        assert reason in next(event.reason for event in line.events("a") if event.kind == "ended")


async def test_a_request_that_is_aborted_before_the_engine_looks_is_queued_before_it_ends() -> None:
    async with node() as (running, line, _):
        busy = threading.Event()
        running.engine.post(lambda _: busy.wait(5.0))  # as in a long pass
        line.submit("a", [5] * 18, 6)
        abort(line)
        assert await wait_until(lambda: not line.commands.qsize(), 2.0)
        assert await wait_until(lambda: not running.owns("a"), 2.0)
        await asyncio.sleep(0.15)
        busy.set()
        await line.ends("a")
        await asyncio.sleep(0.15)
        assert [event.kind for event in line.events("a")] == ["queued", "ended"], "in the order of their telling too"
        queued, ended = line.events("a")
        assert queued.at_ns <= ended.at_ns < queued.at_ns + 100_000_000, "it ended when it was aborted"


async def test_a_router_that_leaves_ends_its_requests_and_later_records_count_as_dropped() -> None:
    async with node(num_blocks=8192) as (running, line, _):
        line.submit("a", [5] * 18, 30_000)
        assert await wait_until(lambda: running.owns("a"), 2.0)
        line.commands.put_nowait(None)
        assert await wait_until(lambda: not running.owns("a"), 2.0)
        assert await wait_until(lambda: running.stats().records_dropped > 0, 2.0)


async def test_preempted_requests_say_so() -> None:
    async with node(num_blocks=12) as (_, line, scheduler):
        line.submit("a", [5] * 8, 28)
        line.submit("b", [6] * 8, 28)
        await line.ends("a", "b")
        told = sum(event.kind == "preempted" for event in line.events())
        assert told == scheduler.counters.preemptions > 0


async def test_the_load_says_when_it_was_sent_and_brings_the_fitted_model() -> None:
    async with node() as (_, line, _):
        line.submit("a", list(range(3, 21)), 60)
        await line.ends("a")

        def latest() -> NodeStats | None:
            return next((report.stats for report in reversed(line.reports) if report.stats is not None), None)

        assert await wait_until(lambda: (load := latest()) is not None and bool(load.cost), 2.0)
        sent = [report.stats.sent_ns for report in line.reports if report.stats is not None]
        assert sent == sorted(sent)
        assert sent[0] > 0


# ---- bounds ------------------------------------------------------------------------------------------------------


def ran(number: int) -> StepTiming:
    chunk, decode = Request("c", [1] * 9, 9, 4, arrival=3), Request("d", [1] * 5, 4, 4, arrival=2)
    slices = [Slice(decode, 4, 1, True, 0), Slice(chunk, 0, 7, False, 0)]
    step = Step(number, slices, [], work=StepWork())
    step.work = work_of(step)
    return StepTiming(step, 1_000_000, 2_500, 700)


def test_a_record_is_what_the_step_was() -> None:
    recorder = StepRecorder()
    recorder.ran(ran(4))
    recorder.turned(SEEN)
    recorder.turned(SEEN)  # a turn without a step
    ((record,), events) = recorder.take()
    assert events == []
    assert (record.number, record.start_ns, record.duration_us, record.host_us) == (4, 1_000_000, 2, 0)
    assert (record.num_prefills, record.prefill_tokens, record.num_decodes, record.decode_context) == (1, 7, 1, 5)
    assert unpack_ids(record.members) == [3, 0, 7, 2, 4, 1]
    assert (record.running, record.waiting, record.blocks_free, record.blocks_reserved) == (5, 6, 1, 4)
    assert recorder.take() == ([], [])


def test_a_full_recorder_drops_the_oldest_and_counts_them() -> None:
    recorder = StepRecorder(max_steps=2, max_events=3)
    for number in range(5):
        recorder.ran(ran(number))
        recorder.turned(SEEN)
        recorder.event(f"r{number}", "landed")
    steps, events = recorder.take()
    assert [step.number for step in steps] == [3, 4]
    assert [event.id for event in events] == ["r2", "r3", "r4"]
    assert recorder.dropped == 3 + 2


async def test_an_outbox_sends_events_before_the_steps_that_name_them_in_small_messages() -> None:
    outbox, line = RouterStream(), Line()
    steps = [StepRecord(number, 0, 0) for number in range(MAX_STEPS + 3)]
    assert outbox.record(steps, [RequestEvent("a", "queued", 1)]) == 0
    writer = asyncio.ensure_future(outbox.write(line))
    assert await wait_until(lambda: len(line.steps) == len(steps), 2.0)
    writer.cancel()
    assert [bool(report.events) for report in line.reports] == [True, False, False]
    assert max(len(report.steps) for report in line.reports) == MAX_STEPS


async def test_records_reach_a_router_that_is_told_tokens_without_pause() -> None:
    class Busy(Line):
        async def send_message(self, report: NodeUpdate) -> None:
            await super().send_message(report)
            outbox.deltas.append(TokenDelta("a"))
            outbox.wake.set()
            await asyncio.sleep(0)

    outbox, line = RouterStream(), Busy()
    outbox.deltas.append(TokenDelta("a"))
    outbox.record([StepRecord(number, 0, 0) for number in range(3 * MAX_STEPS)], [])
    writer = asyncio.ensure_future(outbox.write(line))
    assert await wait_until(lambda: len(line.steps) == 3 * MAX_STEPS, 2.0)
    writer.cancel()


def test_an_outbox_that_nobody_empties_stays_bounded() -> None:
    outbox = RouterStream()
    steps = [StepRecord(number, 0, 0) for number in range(MAX_RECORDS)]
    assert outbox.record(steps, []) == 0
    assert outbox.record(steps[:10], []) == 10
    assert len(outbox.steps) == MAX_RECORDS
    assert outbox.steps[0].number == 10
