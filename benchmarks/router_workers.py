"""Compare the CPU time of a streamed token in a router with one worker and in a router with two workers.

    python -m benchmarks router_workers

All routers run on the first CPU. Each router has its own fake nodes and clients (benchmarks/router.py) on the last CPU.
Only one router gets tokens at a time. A round measures every router once, and each ratio compares two routers in the
same round, so that changes of the machine's speed affect both routers.

Two workers that share a core also share its caches, so each slice of CPU time probably begins with cache misses. Slices
of 100 ms instead of about 4 ms make these misses rare, as if the workers had cores of their own.
"""

import asyncio
import ctypes
import os
import struct
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import uvloop

from benchmarks.result import Cell, Result, Table, median, parser, ratio, versions
from benchmarks.router import NUM_STREAMS, PacedFleet, RouterProcess, started, streams

RATE = 100_000  # tokens per second; more than a router can send on one core
SLICE_MS = 100
SCHED_SETATTR = 314  # number of the system call on x86-64
# (workers, streams, slice in ms; None: default slices). Each arm is compared with the one-worker arm above it.
ARMS = [
    (workers, streams, ms)
    for streams in (NUM_STREAMS, 2 * NUM_STREAMS, 4 * NUM_STREAMS)
    for workers, ms in ((1, None), (2, None), (2, SLICE_MS))
]
GOAL = 1.05


@dataclass(slots=True)
class MeasuredRouter:
    """A router with open streams. `us` has the router's CPU time per token in each round, in microseconds."""

    router: RouterProcess
    fleet: PacedFleet
    delays: list[float]
    us: list[float] = field(default_factory=list)

    async def measure(self, seconds: float) -> None:
        """Send tokens for some seconds, and wait until all have arrived."""
        self.delays.clear()
        before_s = self.router.cpu_s()
        await self.fleet.run(RATE, seconds, is_patient=True)
        while any(row.num_received < len(row.sent) for row in self.fleet.rows.values()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)
        self.us.append((self.router.cpu_s() - before_s) / len(self.delays) * 1e6)


def set_slice(pids: list[int], milliseconds: int) -> None:
    """Set the CPU time slice of these processes. Raises OSError if the kernel is older than Linux 6.12."""
    attributes = struct.pack("<IIQiIQQQII", 56, 0, 0, 0, 0, milliseconds * 1_000_000, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    for thread in [int(name) for each in pids for name in os.listdir(f"/proc/{each}/task")]:
        if libc.syscall(SCHED_SETATTR, thread, attributes, 0):
            raise OSError(ctypes.get_errno(), "sched_setattr")


async def measure(rounds: int, seconds: float) -> list[list[float]]:
    """Return the CPU times per token of each arm."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    async with AsyncExitStack() as cleanup:
        arms = []
        for workers, num_streams, slice_ms in ARMS:
            fleet, delays = PacedFleet(), list[float]()
            router = await cleanup.enter_async_context(started(fleet, cpus[0], workers))
            await cleanup.enter_async_context(streams(router, fleet, num_streams, delays))
            if slice_ms is not None:
                set_slice(router.pids(), slice_ms)
            arms.append(MeasuredRouter(router, fleet, delays))
        for number in range(rounds + 1):
            for arm in arms if number % 2 else arms[::-1]:
                await arm.measure(seconds)
        return [arm.us[1:] for arm in arms]  # the first round warms up


def main() -> None:
    flags = parser(__doc__, repeats=30)
    flags.add_argument("--seconds", type=float, default=0.5, help="duration of a measurement; each repeat has nine")
    args = flags.parse_args()
    runs = uvloop.run(measure(args.repeats, args.seconds))
    rows = list[list[Cell]]()
    for place, (workers, num_streams, slice_ms) in enumerate(ARMS):
        one = runs[place - place % 3]  # the first of three arms has one worker
        times = ratio(runs[place], one) if workers > 1 else None
        slices = "default" if slice_ms is None else f"{slice_ms} ms"
        is_met = None if times is None else times <= GOAL
        rows.append([num_streams, workers, slices, median(runs[place]), times, is_met])
    columns = ["streams", "workers", "slices", "CPU µs/token", "ratio to one worker", f"≤ {GOAL}"]
    note = "Medians. The ratios are of measurements in the same round. All workers of a router share one core."
    Result(
        "router_workers",
        "Routers with one or two workers on one core, and 256, 512 or 1,024 streams of 16 nodes that compute nothing.",
        [Table("Workers of a router", columns, rows, note)],
        runs,
        versions("uvloop", "uvicorn", "starlette", "httptools", "grpclib", "msgpack", "tokenizers"),
    ).finish(args.out)
