"""Measure a router with many nodes: CPU time while idle, longest turn of its event loop, join time, CPU time per token.

    python -m benchmarks fleet

The router runs alone on the first CPU. On the last CPU, one process emulates the nodes, which keep their streams to the
router open and send it the same messages as real nodes. The "busy" nodes generate tokens for this router's clients. All
others work for other routers: they report their load, and offer step records ten times a second."""

import asyncio
import gc
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from benchmarks.result import Result, Table, medians, parser, versions
from benchmarks.router import HEARTBEAT_S, NUM_NODES, PacedFleet, RouterProcess, running_router, streaming
from node.recorder import StepRecorder
from node.router_sessions import RouterSessions
from shared.clock import now_ns, to_tick
from shared.lifecycle import TaskGroup
from shared.registry import Announcer, StreamAnnouncer
from shared.rpc.messages import NodeInfo, NodeStats, RequestEvent, StepRecord
from shared.rpc.methods import ATTACH, RpcServer

RATE = 10_000.0  # tokens per second of the busy nodes
SETTLE_S = 2.0
JOIN_LIMIT_S = 120.0


class EndlessSteps(StepRecorder):
    """A recorder that has one new step each time it is read."""

    def take(self) -> tuple[list[StepRecord], list[RequestEvent]]:
        return [StepRecord(now_ns() // 1_000_000, now_ns(), 1000, num_decodes=16)], []


class IdleFleet:
    """Prefill nodes that get no requests from this router. All nodes share a port, because the router identifies nodes
    by their ids."""

    def __init__(self, num_nodes: int) -> None:
        self.num_attached = 0
        self._num_nodes = num_nodes
        self._server = RpcServer({ATTACH: self._attach})
        self._announcers: list[Announcer] = []

    async def join(self, registry: str) -> None:
        port = await self._server.start("127.0.0.1", 0)
        sizes = (64, 1 << 20, 1 << 20, 1 << 20, 4096)
        for number in range(self._num_nodes):
            boot = secrets.token_hex(16)
            info = NodeInfo(f"idle-{number}", boot, "prefill", f"127.0.0.1:{port}", "model", "paced", *sizes)
            self._announcers.append(StreamAnnouncer(registry, _loopback))
            await self._announcers[-1].start(info)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._announcers))
        await self._server.close()

    async def _attach(self, stream: Any) -> None:
        sessions, tasks = RouterSessions(EndlessSteps()), TaskGroup()
        tasks.start(sessions.publish_records())
        tasks.start(self._beat(sessions))
        self.num_attached += 1
        try:
            await sessions.attach(stream, NodeStats, lambda *_: None, lambda _: None)
        finally:
            self.num_attached -= 1
            await tasks.close()
            await sessions.close()

    async def _beat(self, sessions: RouterSessions) -> None:
        """Report every HEARTBEAT_S, from a random start and at the ticks of `to_tick`, as nodes do."""
        steps, delay_s = 0, random.random() * HEARTBEAT_S
        while True:
            await asyncio.sleep(to_tick(delay_s))
            steps, delay_s = steps + 1, HEARTBEAT_S
            sessions.publish_stats(NodeStats(running=1, steps=steps))


async def _loopback() -> list[str]:
    return ["127.0.0.1"]


async def longest_turn_s(router: RouterProcess, seconds: float) -> float:
    """Return the longest turn of the event loop of a probed router."""
    assert router.process.stdout is not None
    router.process.send_signal(signal.SIGUSR1)
    await asyncio.sleep(seconds)
    router.process.send_signal(signal.SIGUSR2)
    return float(await asyncio.to_thread(router.process.stdout.readline))


@asynccontextmanager
async def started(
    busy: PacedFleet, num_nodes: int, cpu: int, flags: list[str]
) -> AsyncIterator[tuple[RouterProcess, dict[str, float]]]:
    """Start a router on `cpu`. When `num_nodes` nodes are attached, yield the router and the figures of joining."""
    idle = IdleFleet(num_nodes - len(busy.nodes))
    with running_router("benchmarks.probed_router", cpu, ["--disaggregate", "never", *flags]) as router:
        announcers: list[Announcer] = []
        try:
            await _until_listening(int(router.registry.rpartition(":")[2]))
            started_at, before_s = time.monotonic(), router.cpu_s()
            turns = asyncio.ensure_future(longest_turn_s(router, SETTLE_S))
            await idle.join(router.registry)
            announcers += [await node.join(router.registry) for node in busy.nodes]
            async with asyncio.timeout(JOIN_LIMIT_S):
                while idle.num_attached + sum(node.is_attached for node in busy.nodes) < num_nodes:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            joined_s, used_s = time.monotonic() - started_at, router.cpu_s() - before_s
            figures = {"join_s": joined_s, "join_turn_ms": 1000 * await turns, "join_cpu_s": used_s}
            await asyncio.sleep(SETTLE_S)
            yield router, figures
        finally:
            await asyncio.gather(idle.close(), *(each.close() for each in announcers))


async def _until_listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def measure(num_nodes: int, num_busy: int, cpu: int, seconds: float, flags: list[str]) -> dict[str, float]:
    """Return the figures of a router with `num_nodes` nodes, of which `num_busy` generate tokens."""
    busy = PacedFleet(num_busy)
    async with started(busy, num_nodes, cpu, flags) as (router, figures):
        before_s, started_at = router.cpu_s(), time.monotonic()
        await asyncio.sleep(seconds)
        figures["idle_busy"] = (router.cpu_s() - before_s) / (time.monotonic() - started_at)
        figures["idle_turn_ms"] = 1000 * await longest_turn_s(router, seconds)
        if num_busy == NUM_NODES:
            served = await streaming(router, busy, RATE, seconds)
            figures |= {"cpu_us_per_token": served["router_cpu_us_per_token"], "tokens_per_s": served["tokens_per_s"]}
            idle_us = figures["idle_busy"] / served["tokens_per_s"] * 1e6
            figures["added_us_per_token"] = figures["cpu_us_per_token"] - idle_us
        return {"nodes": num_nodes} | figures


async def measure_all(sizes: list[int], seconds: float, repeats: int, flags: list[str]) -> list[dict[str, float]]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    runs = []
    for _ in range(repeats):
        for size in sizes:
            runs.append(await measure(size, min(size, NUM_NODES), cpus[0], seconds, flags))
            print(runs[-1], file=sys.stderr, flush=True)
    return runs


def table_of(runs: list[dict[str, float]], sizes: list[int]) -> Table:
    columns = ["nodes", "joined, s", "≤ 5 s", "idle, share of a core", "≤ 0.1", "longest turn, ms", "≤ 5 ms"]
    columns += ["longest while joining, ms", "CPU µs/token", "of which not idle", "ratio to 16 nodes", "≤ 1.1"]
    rows: list[list[Any]] = []
    shown = {size: medians([run for run in runs if run["nodes"] == size]) for size in sizes}
    alone_us = shown.get(NUM_NODES, {}).get("added_us_per_token")
    for size, figures in shown.items():
        us = figures.get("added_us_per_token")
        ratio = us / alone_us if us and alone_us else None
        goal = [figures["join_s"] <= 5, figures["idle_busy"] <= 0.1, figures["idle_turn_ms"] <= 5]
        row: list[Any] = [size, figures["join_s"], goal[0], figures["idle_busy"], goal[1]]
        row += [figures["idle_turn_ms"], goal[2], figures["join_turn_ms"], figures.get("cpu_us_per_token"), us, ratio]
        rows.append([*row, None if ratio is None else ratio <= 1.1])
    note = (
        "Idle: no requests, while the nodes work for other routers. Longest turn: CPU time of one turn of the router's "
        "event loop. CPU per token: 16 of the nodes send 10,000 tokens per second in 256 streams; "
        "the ratio is computed without the share of a core that an idle router uses. The process that "
        "emulates the nodes shares its CPU with the clients, so it limits the join time."
    )
    return Table("A router and its nodes", columns, rows, note)


def main() -> None:
    flags = parser(__doc__, repeats=1)
    flags.add_argument("--sizes", type=int, nargs="+", default=[10, NUM_NODES, 30, 100, 300, 1000])
    flags.add_argument("--seconds", type=float, default=5.0)
    args, rest = flags.parse_known_args()
    gc.disable()  # a collection would stop all emulated nodes, whose messages would then arrive at once
    runs = uvloop.run(measure_all(args.sizes, args.seconds, args.repeats, rest))
    table = table_of(runs, args.sizes)
    what = "A router on a core of its own, with up to 1,000 nodes that hold their streams and compute nothing."
    Result("fleet", what, [table], runs, versions("uvloop", "grpclib", "msgpack")).finish(args.out)
