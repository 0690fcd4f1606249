"""Measure the router: CPU time and latency of a streamed token, and memory of an open stream.

    python -m benchmarks router

The router runs alone on the first CPU. On the last CPU, a single process runs all clients and 16 fake nodes. The nodes
take turns. In its turn, a node sends one token for each of its requests, in the same messages as a real node. Because
nodes and clients are in one process, that process knows when each token was sent and received. The kernel reports the
CPU time of the router.
"""

import asyncio
import itertools
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.process import free_port, memory_of
from benchmarks.result import Result, Table, median, medians, parser, versions
from node.router_sessions import RouterStream
from router.text.tokenizer import Tokenizer
from shared.model_files import DEMO_MODEL
from shared.registry import StreamAnnouncer
from shared.rpc.messages import NodeInfo, NodeStats, RouterCommand, SubmitRequest, TokenDelta, pack_ids
from shared.rpc.methods import ATTACH, RpcServer

NUM_NODES, NUM_STREAMS, NUM_IDLE = 16, 256, 2000
CPU_GOAL_FROM = 25_000  # lowest rate to which the goal for CPU time applies: tokens per second on one core
MAX_TOKENS = 8000  # fits the context of the demo model
NOTE = (
    "Delay: time from a node's message to the client's socket. Clients and nodes share the other core. If that core is "
    "fully used, it limits the tokens per second, and the router's own limit is 1 / CPU time."
)
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{}"

# Maximum tokens in flight per stream. If the router cannot keep up with the rate, this limit lowers the rate.
WINDOW = 16
HEARTBEAT_S = 0.5


@dataclass(slots=True)
class PacedRequest:
    """One request, as seen by its node and its client. Times are on the monotonic clock."""

    submit: SubmitRequest
    stream: RouterStream
    sent: list[float] = field(default_factory=list)
    num_received: int = 0


class PacedNode:
    """A fake decode node that sends one token for each of its requests when `step` is called."""

    def __init__(self, name: str, token_ids: list[int], rows: dict[str, PacedRequest]) -> None:
        """The node adds its requests to `rows`, under the ids that clients receive."""
        self._name = name
        self._all_rows = rows
        self._rows: list[PacedRequest] = []
        self._streams: list[RouterStream] = []  # one for each worker of the router
        self._packed = [pack_ids([token]) for token in token_ids]
        self._server = RpcServer({ATTACH: self._attach})
        self._steps = 0
        self.is_attached = False

    async def join(self, registry: str) -> StreamAnnouncer:
        port = await self._server.start("127.0.0.1", 0)
        boot = secrets.token_hex(16)
        sizes = (64, 1 << 20, 1 << 20, 1 << 20, 4096)  # block tokens, block bytes, blocks, context, requests
        info = NodeInfo(self._name, boot, "decode", f"127.0.0.1:{port}", "model", "paced", *sizes)
        announcer = StreamAnnouncer(registry)
        await announcer.start(info)
        return announcer

    async def _attach(self, stream: Any) -> None:
        hello: RouterCommand = await stream.recv_message()
        assert hello.router
        self.is_attached = True
        session = RouterStream(stats=NodeStats())
        session.wake.set()
        self._streams.append(session)
        tasks = [asyncio.ensure_future(work) for work in (session.write(stream), self._beat(session))]
        try:
            async for command in stream:
                for submit in command.submits:
                    self._rows.append(PacedRequest(submit, session))
                    self._all_rows[submit.id.split("-")[1]] = self._rows[-1]
                # The benchmark ends all streams at the same time, so an abort ends all requests of the session.
                if command.aborts:
                    self._rows = [row for row in self._rows if row.stream is not session]
        finally:
            self._streams.remove(session)
            for task in tasks:
                task.cancel()

    async def _beat(self, session: RouterStream) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            session.stats = NodeStats(steps=self._steps, running=len(self._rows))
            session.wake.set()

    @property
    def is_full(self) -> bool:
        """Whether a request has WINDOW tokens in flight."""
        return any(len(row.sent) - row.num_received >= WINDOW for row in self._rows)

    def step(self) -> None:
        """Send the next token of every request that has fewer than WINDOW tokens in flight."""
        now = time.monotonic()
        for row in self._rows:
            if (position := len(row.sent)) - row.num_received < WINDOW and position < row.submit.max_tokens:
                row.sent.append(now)
                packed = self._packed[position % len(self._packed)]
                row.stream.deltas.append(TokenDelta(row.submit.id, position, packed))
        self._steps += 1
        for session in self._streams:
            if session.deltas:
                session.wake.set()


class StreamingClient(asyncio.Protocol):
    """The client of one stream, which counts its events and records their delays."""

    def __init__(self, rows: dict[str, PacedRequest], delays: list[float]) -> None:
        self._rows = rows
        self._delays = delays
        self._row: PacedRequest | None = None
        self.answer = b""  # the beginning of the response
        self._rest = b""  # the beginning of an event whose end has not arrived

    def connection_made(self, transport: Any) -> None:  # uvloop's transport has no type
        body = f'{{"model":"model","prompt":[5,6,7],"max_tokens":{MAX_TOKENS},"ignore_eos":true,"stream":true}}'
        transport.write(HEAD.format(len(body), body).encode())

    def data_received(self, data: bytes) -> None:
        self.answer = self.answer or data[:500]
        data, _, self._rest = (self._rest + data).rpartition(b"\n\n")
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
class RouterProcess:
    """The router's processes, whose CPU time the kernel reports. Nodes join at `registry`."""

    process: "subprocess.Popen[str]"
    port: int
    registry: str

    def pids(self) -> list[int]:
        """Return the ids of the process and its children."""
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def cpu_s(self) -> float:
        used = [Path(f"/proc/{pid}/schedstat").read_text().split()[0] for pid in self.pids()]
        return sum(map(int, used)) / 1e9


@contextmanager
def running_router(module: str, cpu: int, flags: Sequence[str]) -> Iterator[RouterProcess]:
    """Run the module `module` as a router on `cpu`, and kill the router at the end."""
    port, registry_port = free_port(), free_port()
    ports = f"--port {port} --registry-port {registry_port} --max-concurrent-requests 4096 --log-level error"
    command = [sys.executable, "-m", module, "--model", str(DEMO_MODEL), "--served-model-name", "model", *ports.split()]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        os.sched_setaffinity(process.pid, {cpu})  # threads that the process starts later inherit this affinity
        try:
            yield RouterProcess(process, port, f"127.0.0.1:{registry_port}")
        finally:
            process.kill()


class PacedFleet:
    """The fake nodes, and their requests, keyed by the id that the clients receive."""

    def __init__(self, num_nodes: int = NUM_NODES) -> None:
        text = Tokenizer.load(DEMO_MODEL)
        # Use only tokens of letters, because a token that ends inside a character produces no event.
        plain = [token for token in range(text.vocabulary.size) if text.vocabulary.bytes_of(token).isalpha()]
        self.rows: dict[str, PacedRequest] = {}
        self.nodes = [PacedNode(f"paced-{number}", plain[-997:], self.rows) for number in range(num_nodes)]

    async def run(self, rate: float, seconds: float, *, is_patient: bool = False) -> None:
        """Call `step` of each node in turn, at `rate` tokens per second in total. A late call delays later calls.

        If `is_patient`, a full node skips its turn. Each message then has tokens of all requests, as from a real node.
        """
        period_s = len(self.rows) / rate / len(self.nodes)
        due, end = time.monotonic(), time.monotonic() + seconds
        for node in itertools.cycle(self.nodes):
            if not (is_patient and node.is_full):
                node.step()
            due = max(due + period_s, time.monotonic())
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if due > end:
                break


@asynccontextmanager
async def started(fleet: PacedFleet, cpu: int, workers: int) -> AsyncIterator[RouterProcess]:
    """Start a router on `cpu` and wait until all nodes have joined it."""
    with running_router("router", cpu, ["--workers", str(workers)]) as router:
        announcers = [await node.join(router.registry) for node in fleet.nodes]
        try:
            while await num_ready(router.port) < NUM_NODES:
                if router.process.poll() is not None:
                    raise RuntimeError("The router did not start; its message is above.")
                await asyncio.sleep(0.05)
            yield router
        finally:
            for announcer in announcers:
                await announcer.close()


async def num_ready(port: int) -> int:
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer.count(b'"alive":true')
    return 0


@asynccontextmanager
async def streams(router: RouterProcess, fleet: PacedFleet, count: int, delays: list[float]) -> AsyncIterator[None]:
    """Open `count` streams and wait until each is placed on a node."""
    loop, rows = asyncio.get_running_loop(), fleet.rows
    clients = [
        await loop.create_connection(lambda: StreamingClient(rows, delays), "127.0.0.1", router.port)
        for _ in range(count)
    ]
    try:
        deadline = loop.time() + 30
        while len(rows) < count:
            if loop.time() > deadline:
                answers = {client.answer for _, client in clients if not client.answer.startswith(b"HTTP/1.1 200")}
                raise TimeoutError(f"{len(rows)} of {count} streams were placed; answers to the others: {answers}")
            await asyncio.sleep(0.01)
        yield
    finally:
        for transport, _ in clients:
            transport.abort()
        rows.clear()
        await asyncio.sleep(1)


async def streaming(router: RouterProcess, fleet: PacedFleet, rate: float, seconds: float) -> dict[str, float]:
    """Measure the router's CPU time per token and its delay, with 256 streams and `rate` tokens per second in total."""
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


async def memory(router: RouterProcess, fleet: PacedFleet) -> dict[str, float]:
    """Measure how much memory the router needs for each open stream."""
    # Open and close some streams before the measurement, because the memory that they leave allocated must not count.
    async with streams(router, fleet, NUM_STREAMS, []):
        await fleet.run(1000, 1)
    before = memory_of(router.process.pid)
    async with streams(router, fleet, NUM_IDLE, []):
        await fleet.run(1000, 2)
        return {"open_streams": NUM_IDLE, "kib_per_stream": (memory_of(router.process.pid) - before) / 1024 / NUM_IDLE}


async def measure(rates: list[float], seconds: float, repeats: int, workers: int) -> dict[str, list[dict[str, float]]]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1]})
    fleet = PacedFleet()
    async with started(fleet, cpus[0], workers) as router:
        runs = [await streaming(router, fleet, rate, seconds) for _ in range(repeats) for rate in rates]
        return {"streaming": runs, "memory": [await memory(router, fleet)]}


def row_of(runs: list[dict[str, float]]) -> list[Any]:
    shown = medians(runs)
    cpu_us, busy, p50_ms = shown["router_cpu_us_per_token"], shown["router_busy"], shown["delay_p50_ms"]
    on_time = p50_ms <= 1 if busy < 0.5 else None
    offered, served = shown["offered_tokens_per_s"], shown["tokens_per_s"]
    is_quick = cpu_us <= 40 if offered >= CPU_GOAL_FROM else None
    return [offered, served, cpu_us, is_quick, busy, p50_ms, shown["delay_p99_ms"], on_time]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rates", type=float, nargs="+", default=[5_000, 10_000, 25_000, 100_000])
    flags.add_argument("--seconds", type=float, default=5.0)
    flags.add_argument("--workers", type=int, default=1, help="processes of the router, which share its core")
    args = flags.parse_args()
    runs = uvloop.run(measure(args.rates, args.seconds, args.repeats, args.workers))
    rows = [row_of([run for run in runs["streaming"] if run["offered_tokens_per_s"] == rate]) for rate in args.rates]
    kib = runs["memory"][0]["kib_per_stream"]
    columns = ["offered/s", "tokens/s", "CPU µs/token", "≤ 40 µs", "router busy", "delay p50, ms", "p99", "p50 ≤ 1 ms"]
    note = (
        "Router busy: share of one core. The CPU time goal applies from 25,000 tokens per second on one core; at lower "
        "rates, wake-ups are a larger part of the CPU time. The delay goal applies if the router is busy for less than "
        "half of the time. " + NOTE
    )
    Result(
        "router",
        "A router on a core of its own, 256 streams of detokenized text from 16 nodes that compute nothing.",
        [
            Table("Streamed tokens", columns, rows, note),
            Table("Memory", ["open streams", "KiB per stream", "≤ 32 KiB"], [[NUM_IDLE, kib, kib <= 32]]),
        ],
        runs,
        versions("uvloop", "uvicorn", "starlette", "httptools", "grpclib", "msgpack", "tokenizers"),
    ).finish(args.out)
