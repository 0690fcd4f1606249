"""What the router costs: processor time and latency of a streamed token, and memory of an open stream.

    python -m benchmarks router

The router runs alone on the first processor. On the second, one process is both the clients and 16 nodes, which take
turns to answer each of their requests with a token, by a node's own messages (`node.router_stream`), without computing.
So it knows when each token left its node and when its client had it. Processor time is the kernel's for the router.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.paced import PacedNode, Row
from benchmarks.result import Result, Table, median, parser, versions
from cluster.plan import DEMO_MODEL
from router.text.tokenizer import Tokenizer
from shared.registry import StreamAnnouncer

NUM_NODES, NUM_STREAMS, NUM_IDLE = 16, 256, 2000
ENOUGH = 25_000  # tokens a second, for a core
MAX_TOKENS = 8000  # what the demo model allows, for whose tokenizer it is here
NOTE = (
    "Delay: from a node's message to the client's socket. Clients and nodes share the other core; where that one is "
    "full it bounds the tokens a second, and 1 / CPU time is what the router could do."
)
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{}"


class Client(asyncio.Protocol):
    """One stream: counts its events, and notes how long each was on its way."""

    def __init__(self, rows: dict[str, Row], delays: list[float]) -> None:
        self._rows = rows
        self._delays = delays
        self._row: Row | None = None
        self.transport: Any = None  # uvloop's has no type

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        body = f'{{"model":"model","prompt":[5,6,7],"max_tokens":{MAX_TOKENS},"ignore_eos":true,"stream":true}}'
        transport.write(HEAD.format(len(body), body).encode())

    def data_received(self, data: bytes) -> None:
        count = data.count(b'"text":')
        if self._row is None:
            if not count:
                return
            name = data.partition(b'"id":"cmpl-')[2].partition(b'"')[0].decode()
            self._row = self._rows[name]
        now, row = time.monotonic(), self._row
        for sent in row.sent[row.num_received : row.num_received + count]:
            self._delays.append(now - sent)
        row.num_received += count


@dataclass(slots=True)
class Router:
    """The router's process, and what the kernel knows of it."""

    pid: int
    port: int

    def cpu_s(self) -> float:
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Fleet:
    """The nodes, and the requests on them by the name that their clients know."""

    def __init__(self) -> None:
        text = Tokenizer.load(DEMO_MODEL)
        # Whole words: what ends inside a character makes no event.
        plain = [token for token in range(text.vocab_size) if text.vocabulary.bytes_of(token).isalpha()]
        self.rows: dict[str, Row] = {}
        self._nodes = [PacedNode(f"paced-{number}", plain[-997:], self.rows) for number in range(NUM_NODES)]

    async def join(self, registry: str) -> list[StreamAnnouncer]:
        return [await node.join(registry) for node in self._nodes]

    async def run(self, rate: float, seconds: float) -> None:
        """Turns at their times, `rate` tokens a second in all; a turn that is late moves those after it."""
        period_s = len(self.rows) / rate / NUM_NODES
        due, end = time.monotonic(), time.monotonic() + seconds
        for node in itertools.cycle(self._nodes):
            node.turn()
            due = max(due + period_s, time.monotonic())
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if due > end:
                break


def spawned(port: int, registry_port: int, cpu: int) -> "subprocess.Popen[bytes]":
    flags = {
        "--model": str(DEMO_MODEL),
        "--served-model-name": "model",
        "--port": str(port),
        "--registry-port": str(registry_port),
        "--max-concurrent-requests": "4096",
        "--log-level": "error",
    }
    command = [sys.executable, "-m", "router", *(part for flag in flags.items() for part in flag)]
    process = subprocess.Popen(command)
    os.sched_setaffinity(process.pid, {cpu})  # before it has any other thread
    return process


@asynccontextmanager
async def started(fleet: Fleet, cpu: int) -> AsyncIterator[Router]:
    """A router on this processor that has found the nodes."""
    port, registry_port = free_port(), free_port()
    process = spawned(port, registry_port, cpu)
    announcers = await fleet.join(f"127.0.0.1:{registry_port}")
    try:
        while process.poll() is None and await num_ready(port) < NUM_NODES:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)
        yield Router(process.pid, port)
    finally:
        for announcer in announcers:
            await announcer.close()
        process.kill()
        process.wait()


async def num_ready(port: int) -> int:
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.count(b'"alive":true')
    return 0


@asynccontextmanager
async def streams(router: Router, fleet: Fleet, count: int, delays: list[float]) -> AsyncIterator[None]:
    """So many open streams, each of which has its node."""
    loop, rows = asyncio.get_running_loop(), fleet.rows
    clients = [
        (await loop.create_connection(lambda: Client(rows, delays), "127.0.0.1", router.port))[1] for _ in range(count)
    ]
    try:
        async with asyncio.timeout(30):
            while len(rows) < count:  # noqa: ASYNC110 - several make it true
                await asyncio.sleep(0.01)
        yield
    finally:
        for client in clients:
            client.transport.abort()
        rows.clear()
        await asyncio.sleep(1)


async def streaming(router: Router, fleet: Fleet, rate: float, seconds: float) -> dict[str, float]:
    """256 streams at `rate` tokens a second in all: what a token costs the router, and how long it is on its way."""
    delays: list[float] = []
    async with streams(router, fleet, NUM_STREAMS, delays):
        await fleet.run(rate, 1.0)
        delays.clear()
        before_s, started_at = router.cpu_s(), time.monotonic()
        await fleet.run(rate, seconds)
        used_s, lasted_s = router.cpu_s() - before_s, time.monotonic() - started_at
        passed = sorted(delays)
    return {
        "offered_tokens_per_s": rate,
        "tokens_per_s": len(passed) / lasted_s,
        "router_cpu_us_per_token": used_s / len(passed) * 1e6,
        "router_busy": used_s / lasted_s,
        "delay_p50_ms": median(passed) * 1000,
        "delay_p99_ms": passed[len(passed) * 99 // 100] * 1000,
    }


async def memory(router: Router, fleet: Fleet) -> dict[str, float]:
    """The router's growth by streams that have begun and wait for more."""
    async with streams(router, fleet, NUM_STREAMS, []):  # what the first streams leave behind is not theirs
        await fleet.run(1000, 1)
    before = router.memory_bytes()
    async with streams(router, fleet, NUM_IDLE, []):
        await fleet.run(1000, 2)
        return {"open_streams": NUM_IDLE, "kib_per_stream": (router.memory_bytes() - before) / 1024 / NUM_IDLE}


async def measure(rates: list[float], seconds: float, repeats: int) -> dict[str, list[dict[str, float]]]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    fleet = Fleet()
    async with started(fleet, cpus[0]) as router:
        runs = [await streaming(router, fleet, rate, seconds) for _ in range(repeats) for rate in rates]
        return {"streaming": runs, "memory": [await memory(router, fleet)]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def row_of(runs: list[dict[str, float]]) -> list[Any]:
    """Medians of the runs at one rate."""
    shown = {key: median([run[key] for run in runs]) for key in runs[0]}
    cpu_us, busy, p50_ms = shown["router_cpu_us_per_token"], shown["router_busy"], shown["delay_p50_ms"]
    on_time = p50_ms <= 1 if busy < 0.5 else None
    offered, served = shown["offered_tokens_per_s"], shown["tokens_per_s"]
    is_quick = cpu_us <= 40 if offered >= ENOUGH else None
    return [offered, served, cpu_us, is_quick, busy, p50_ms, shown["delay_p99_ms"], on_time]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rates", type=float, nargs="+", default=[5_000, 10_000, 25_000, 100_000])
    flags.add_argument("--seconds", type=float, default=5.0)
    args = flags.parse_args()
    runs = uvloop.run(measure(args.rates, args.seconds, args.repeats))
    rows = [row_of([run for run in runs["streaming"] if run["offered_tokens_per_s"] == rate]) for rate in args.rates]
    kib = runs["memory"][0]["kib_per_stream"]
    columns = ["offered/s", "tokens/s", "CPU µs/token", "≤ 40 µs", "router busy", "delay p50, ms", "p99", "p50 ≤ 1 ms"]
    note = (
        "Router busy: of one core. The goal for the CPU time is 25,000 tokens a second and more on one core; at fewer, "
        "more of it is waking up. That for the delay is one below half of the router's load. " + NOTE
    )
    Result(
        "router",
        "A router on a core of its own, 256 streams of detokenized text from 16 nodes that compute nothing.",
        [
            Table("Streamed tokens", columns, rows, note),
            Table("Memory", ["open streams", "KiB a stream", "≤ 32 KiB"], [[NUM_IDLE, kib, kib <= 32]]),
        ],
        runs,
        versions("uvloop", "uvicorn", "starlette", "httptools", "grpclib", "msgpack", "tokenizers"),
    ).finish(args.out)


if __name__ == "__main__":
    main()
