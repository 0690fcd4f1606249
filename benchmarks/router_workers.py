"""Compare the CPU time of a streamed token in a router with one worker and in a router with two workers.

    python -m benchmarks router_workers

A launch starts the routers of one load on the first CPU. Each router has its own fake nodes and clients
(benchmarks/router.py) on the last CPU. Only one router gets tokens at a time. A round measures every router once, and
each ratio compares two routers in the same round, so that changes of the machine's speed affect both routers. The
result combines several launches, because two launches of the same router can differ by 10%.

Two workers that share a core also share its caches, so each slice of CPU time probably begins with cache misses. Slices
of 100 ms instead of about 4 ms make these misses rare, as if the workers had cores of their own. For the same reason, a
warm-up precedes each measurement: the router that was measured before has filled the caches with its own data.
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
ROUNDS = 5  # in each launch
WARM_UP_S = 0.5
SLICE_MS = 100
SCHED_SETATTR = 314  # number of the system call on x86-64
LOADS = (NUM_STREAMS, 2 * NUM_STREAMS, 4 * NUM_STREAMS)  # numbers of streams
ROUTERS = ((1, None), (2, None), (2, SLICE_MS))  # workers, and slice in ms (None: default slices)
GOAL = 1.05


@dataclass(slots=True)
class MeasuredRouter:
    """A router with open streams. `us` has the router's CPU time per token in each round, in microseconds."""

    router: RouterProcess
    fleet: PacedFleet
    delays: list[float]
    us: list[float] = field(default_factory=list)

    async def measure(self, seconds: float) -> None:
        """Send tokens for WARM_UP_S seconds, and then measure for `seconds` seconds."""
        await self._send(WARM_UP_S)
        self.delays.clear()
        before_s = self.router.cpu_s()
        await self._send(seconds)
        self.us.append((self.router.cpu_s() - before_s) / len(self.delays) * 1e6)

    async def _send(self, seconds: float) -> None:
        """Send tokens for some seconds, and wait until all have arrived."""
        await self.fleet.run(RATE, seconds, is_patient=True)
        while any(row.num_received < len(row.sent) for row in self.fleet.rows.values()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)


def set_slice(pids: list[int], milliseconds: int) -> None:
    """Set the CPU time slice of these processes. Raises OSError if the kernel is older than Linux 6.12."""
    attributes = struct.pack("<IIQiIQQQII", 56, 0, 0, 0, 0, milliseconds * 1_000_000, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    for thread in [int(name) for each in pids for name in os.listdir(f"/proc/{each}/task")]:
        if libc.syscall(SCHED_SETATTR, thread, attributes, 0):
            raise OSError(ctypes.get_errno(), "sched_setattr")


async def measure(num_streams: int, seconds: float, cpus: list[int]) -> list[list[float]]:
    """Launch the routers, and return the CPU times per token of each router."""
    async with AsyncExitStack() as cleanup:
        routers = []
        for workers, slice_ms in ROUTERS:
            fleet, delays = PacedFleet(), list[float]()
            router = await cleanup.enter_async_context(started(fleet, cpus[0], workers))
            await cleanup.enter_async_context(streams(router, fleet, num_streams, delays))
            if slice_ms is not None:
                set_slice(router.pids(), slice_ms)
            routers.append(MeasuredRouter(router, fleet, delays))
        for number in range(ROUNDS):
            for each in routers if number % 2 else routers[::-1]:
                await each.measure(seconds)
        return [each.us for each in routers]


def main() -> None:
    flags = parser(__doc__, repeats=7)
    flags.add_argument("--seconds", type=float, default=0.7, help="duration of a measurement; each repeat has 45")
    args = flags.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    runs: dict[int, list[list[float]]] = {load: [[] for _ in ROUTERS] for load in LOADS}
    for _ in range(args.repeats):
        for load in LOADS:
            launch = uvloop.run(measure(load, args.seconds, cpus))
            runs[load] = [before + us for before, us in zip(runs[load], launch, strict=True)]
    rows = list[list[Cell]]()
    for load in LOADS:
        for (workers, slice_ms), us in zip(ROUTERS, runs[load], strict=True):
            times = ratio(us, runs[load][0]) if workers > 1 else None
            slices = "default" if slice_ms is None else f"{slice_ms} ms"
            rows.append([load, workers, slices, median(us), times, None if times is None else times <= GOAL])
    columns = ["streams", "workers", "slices", "CPU µs/token", "ratio to one worker", f"≤ {GOAL}"]
    note = "Medians. The ratios are of measurements in the same round. All workers of a router share one core."
    Result(
        "router_workers",
        "Routers with one or two workers on one core, and 256, 512 or 1,024 streams of 16 nodes that compute nothing.",
        [Table("Workers of a router", columns, rows, note)],
        runs,
        versions("uvloop", "uvicorn", "starlette", "httptools", "grpclib", "msgpack", "tokenizers"),
    ).finish(args.out)
