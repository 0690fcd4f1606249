"""What recording costs a node: turns of an engine whose device takes no time, with and without records.

`python -m benchmarks.records`: the two take turns, each run generates the same tokens for the same requests. The
difference of the medians is what a step's record costs, from taking its times to encoding it for a router: in turns a
second of the engine (`wall`), and in processor time of the whole node (`cpu`), which other processes disturb less.
Compare it with the step that it is added to: a small model's step on one CPU core takes milliseconds.
"""

import argparse
import asyncio
import sys
import time
from statistics import median
from typing import NamedTuple

import uvloop

from engine.engine import StepTiming
from engine.runner import Runner, SliceOutput
from node.node import Node
from node.recorder import SchedulerSnapshot, StepRecorder
from scheduler.request import Step
from scheduler.role import DECODE
from scheduler.scheduler import Scheduler, StepLimits
from shared.lifecycle import wait_until
from shared.rpc.codec import encode
from shared.rpc.messages import (
    NodeInfo,
    NodeUpdate,
    RequestEvent,
    RouterCommand,
    SamplingParams,
    StepRecord,
    SubmitRequest,
    pack_ids,
)

BLOCK_TOKENS = 16
PROMPT = list(range(3, 67))
SWITCH_S = 0.0005  # between threads, as every process of Baton has it


class NoDevice(Runner):
    """Every token is 5, at once."""

    def run(self, step: Step) -> list[SliceOutput]:
        return [SliceOutput(5 if piece.samples else None) for piece in step.slices]


class Silent(StepRecorder):
    """Records nothing."""

    def event(self, identity: str, kind: str, at_ns: int | None = None, **fields: object) -> None:
        pass

    def ran(self, ran: StepTiming) -> None:
        pass

    def turned(self, seen: SchedulerSnapshot) -> None:
        pass

    def take(self) -> tuple[list[StepRecord], list[RequestEvent]]:
        return [], []


class Router:
    """The other end of the standing stream: reports are encoded, as for the wire, and counted."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[RouterCommand | None] = asyncio.Queue()
        self.num_steps = self.num_bytes = 0

    async def recv_message(self) -> RouterCommand | None:
        return await self.commands.get()

    def __aiter__(self) -> "Router":
        return self

    async def __anext__(self) -> RouterCommand:
        command = await self.commands.get()
        if command is None:
            raise StopAsyncIteration
        return command

    async def send_message(self, report: NodeUpdate) -> None:
        data = encode(report)
        if report.steps:
            self.num_steps += len(report.steps)
            self.num_bytes += len(data)


class Cost(NamedTuple):
    """Microseconds of a step."""

    wall: float
    cpu: float


async def run(recorder: StepRecorder, num_requests: int, num_tokens: int) -> tuple[Cost, Router]:
    """A step's cost, and what the router heard."""
    num_blocks = 2 + num_requests * (len(PROMPT) + num_tokens + BLOCK_TOKENS) // BLOCK_TOKENS
    scheduler = Scheduler(StepLimits(max(512, num_requests), num_requests), num_blocks, BLOCK_TOKENS)
    info = NodeInfo("d", "b" * 32, "decode", "", "m", "f", BLOCK_TOKENS, 64, num_blocks, 1 << 20, num_requests)
    node, router = Node(info, DECODE, scheduler, NoDevice(), 0.5, 100), Router()
    node.recorder = recorder
    node.start()
    router.commands.put_nowait(RouterCommand("router"))
    attached = asyncio.ensure_future(node.attach(router))
    submits = [
        SubmitRequest(
            f"r{number}", "router", pack_ids(PROMPT), len(PROMPT), num_tokens, SamplingParams(temperature=0.0)
        )
        for number in range(num_requests)
    ]
    began, began_cpu = time.perf_counter(), time.process_time()
    router.commands.put_nowait(RouterCommand("router", submits))
    await asyncio.sleep(0.01)
    await wait_until(lambda: not any(node.owns(submit.id) for submit in submits), 600.0, 0.005)
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.25)  # the last records are told
    cpu = time.process_time() - began_cpu
    router.commands.put_nowait(None)
    await attached
    await node.close()
    steps = scheduler.counters.steps
    return Cost(1e6 * seconds / steps, 1e6 * cpu / steps), router


async def compare(num_requests: int, num_tokens: int, repeats: int) -> tuple[Cost, Cost, Router]:
    """Medians without and with records."""
    off, on = [], []
    router = Router()
    for _ in range(repeats):
        off.append((await run(Silent(), num_requests, num_tokens))[0])
        cost, router = await run(StepRecorder(), num_requests, num_tokens)
        on.append(cost)
    return _median(off), _median(on), router


def _median(costs: list[Cost]) -> Cost:
    return Cost(median(cost.wall for cost in costs), median(cost.cpu for cost in costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64], help="decodes in a step")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    print(
        f"{'decodes':>8} {'wall off':>9} {'on':>9} {'cpu off':>9} {'on':>9} {'record':>8} {'of 1 ms':>8} {'bytes':>6}"
    )
    for num_requests in arguments.requests:
        off, on, router = uvloop.run(compare(num_requests, arguments.tokens, arguments.repeats))
        record, size = on.cpu - off.cpu, router.num_bytes / max(1, router.num_steps)
        print(
            f"{num_requests:>8} {off.wall:>9.1f} {on.wall:>9.1f} {off.cpu:>9.1f} {on.cpu:>9.1f} "
            f"{record:>8.1f} {record / 10:>7.2f}% {size:>6.0f}"
        )


if __name__ == "__main__":
    main()
