"""More requests than a cluster can serve: what it still serves, how soon the others are told, what it costs the router.

    python -m benchmarks overload --seconds 60

A router, and nodes that are emulated (`--emulate`): their steps are slept, and long enough that two cores have time for
a client that offers ten times what they can do. What the router's core was busy with, and how full the decode nodes'
steps were, is shown: else this would measure the machine. First the peak is measured, with as many clients as the nodes
can run at once and half as many more, each waiting for its answer. Then each of `--loads` times the peak meets a
cluster that has just started, and so has everything to learn: requests come at times of a Poisson process, whatever
becomes of the earlier ones. Goodput: tokens of whole answers that came within the load's time, without its first
`--warm` seconds. Recovery: from the end of a load until a new request, of which four are sent a second, has its answer
within twice its time on idle nodes.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.result import Result, Table, median, parser, versions
from benchmarks.router import Router, free_port, num_ready
from cluster.plan import DEMO_MODEL

MODEL = "h200-qwen3-32b"
MAX_NUM_SEQS = 16  # of a decode node
PROMPT_TOKENS, ANSWER_TOKENS = 500, 64
PROBE_S, PATIENCE_S = 0.25, 120.0
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    "content-type: application/json\r\ncontent-length: "
)
GOODPUT, REFUSAL_MS, GROWTH_MIB, RECOVERY_S = 0.95, 50.0, 64.0, 5.0  # the goals


@dataclass(slots=True)
class Load:
    """What became of requests: (when the answer was there, seconds it took, status), on the monotonic clock."""

    answers: list[tuple[float, float, int]] = field(default_factory=list)

    def goodput(self, start: float, end: float) -> float:
        """Tokens a second."""
        served = sum(start <= at <= end and status == 200 for at, _, status in self.answers)
        return ANSWER_TOKENS * served / (end - start)

    def took_ms(self, wanted: int, share: float) -> float | None:
        """Of the answers with this status, at this percentile."""
        took = sorted(seconds for _, seconds, status in self.answers if status == wanted)
        return 1000 * took[int(share * (len(took) - 1))] if took else None


class Client:
    """Sends prompts that no cache knows, each over a connection of its own."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self._port = port
        self._random = random.Random(seed)

    async def ask(self, load: Load) -> float:
        """One request. Returns the seconds that it took."""
        prompt = [self._random.randrange(3, 2048) for _ in range(PROMPT_TOKENS)]
        body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True})
        began, status = time.monotonic(), 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(f"{HEAD}{len(body)}\r\n\r\n{body}".encode())
                answer = await reader.read()
                writer.close()
                status = int(answer[9:12] or 0)
        except (OSError, TimeoutError, ValueError):
            status = 0
        now = time.monotonic()
        load.answers.append((now, now - began, status))
        return now - began

    async def closed(self, count: int, seconds: float, load: Load) -> None:
        """So many at once, each sending its next request at its last one's answer."""
        end = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < end:
                await self.ask(load)

        await asyncio.gather(*(one() for _ in range(count)))

    async def open(self, rate: float, seconds: float, load: Load) -> None:
        """`rate` requests a second, answered or not. Returns when all are answered."""
        due, end = time.monotonic(), time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while due < end:
                group.create_task(self.ask(load))
                due += self._random.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))


@asynccontextmanager
async def started(args: argparse.Namespace) -> AsyncIterator[Router]:
    """A router, prefill and decode nodes that have found each other."""
    port, registry_port = free_port(), free_port()
    model = ["--model", str(DEMO_MODEL), "--log-level", "error"]
    router = [
        *("router", *model, "--served-model-name", "model", "--port", str(port), "--registry-port", str(registry_port)),
        *("--max-queue-s", str(args.max_queue_s), "--max-concurrent-requests", "4096"),
    ]
    node = ["--registry", f"127.0.0.1:{registry_port}", "--emulate", MODEL, "--max-num-seqs", str(MAX_NUM_SEQS)]
    commands = [router]
    for role, count in (("prefill", args.prefill), ("decode", args.decode)):
        commands += [[f"{role}_node", *model, *node, "--id", f"{role}-{number}"] for number in range(count)]
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-m", *command) for command in commands]
    try:
        while await num_ready(port) < args.prefill + args.decode:
            if any(process.returncode is not None for process in processes):
                raise RuntimeError("a process of the cluster has ended")
            await asyncio.sleep(0.1)
        os.sched_setaffinity(processes[0].pid, {min(os.sched_getaffinity(0))})
        yield Router(processes[0].pid, port)
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        for process in processes:
            await process.wait()


async def timed(work: Callable[[Load], Awaitable[None]]) -> tuple[Load, float]:
    """What became of the load, and when it began."""
    load, began = Load(), time.monotonic()
    await work(load)
    return load, began


async def recovered(client: Client, idle_s: float) -> float:
    """Seconds until a new request is sent that is answered in about the time that it takes on idle nodes."""
    load, began = Load(), time.monotonic()

    def sent() -> list[float]:
        return [at - took - began for at, took, status in load.answers if status == 200 and took <= 2 * idle_s]

    async with asyncio.TaskGroup() as group:
        while not sent():
            group.create_task(client.ask(load))
            await asyncio.sleep(PROBE_S)
    return min(sent())


async def decodes_a_step(port: int) -> float:
    """Of the decode nodes, since they started."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    nodes = [node for node in json.loads(answer.partition(b"\r\n\r\n")[2])["nodes"] if node["role"] == "decode"]
    return float(sum(node["generated_tokens"] for node in nodes) / max(1, sum(node["steps"] for node in nodes)))


async def at(router: Router, client: Client, times: float, peak: float, idle_s: float, args: Any) -> dict[str, Any]:
    highest = before = router.memory_bytes()
    cpu_before = router.cpu_s()
    ended: list[float] = []

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, router.memory_bytes())
            await asyncio.sleep(0.2)

    async def end(after_s: float) -> None:
        await asyncio.sleep(after_s)
        ended.append((router.cpu_s() - cpu_before) / after_s)
        ended.append(await decodes_a_step(router.port))
        ended.append(await recovered(Client(router.port, seed=-1), idle_s))

    watching, ending = asyncio.ensure_future(watch()), asyncio.ensure_future(end(args.seconds))
    load, began = await timed(lambda load: client.open(times * peak / ANSWER_TOKENS, args.seconds, load))
    await ending
    watching.cancel()
    goodput = load.goodput(began + args.warm, began + args.seconds)
    return {
        "times_peak": times,
        "goodput_tokens_per_s": goodput,
        "share_of_peak": goodput / peak,
        "answers": dict(Counter(str(status) for _, _, status in load.answers)),
        "served_p50_ms": load.took_ms(200, 0.5),
        "served_p99_ms": load.took_ms(200, 0.99),
        "refused_p50_ms": load.took_ms(429, 0.5),
        "refused_p99_ms": load.took_ms(429, 0.99),
        "router_mib_before": before / 2**20,
        "router_mib_highest": highest / 2**20,
        "router_busy": ended[0],
        "decodes_a_step": ended[1],
        "recovery_s": ended[2],
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    async with started(args) as router:
        client = Client(router.port)
        idle_s = median([await client.ask(Load()) for _ in range(10)])
        count = args.decode * MAX_NUM_SEQS * 3 // 2
        load, began = await timed(lambda load: client.closed(count, args.seconds, load))
        peak = load.goodput(began + args.warm, began + args.seconds)
    print(f"peak: {peak:.0f} tokens/s; a request on idle nodes: {1000 * idle_s:.0f} ms", flush=True)
    runs = []
    for times in args.loads:
        async with started(args) as router:
            runs.append(await at(router, Client(router.port), times, peak, idle_s, args))
        print(json.dumps(runs[-1]), flush=True)
    return {"peak_tokens_per_s": peak, "idle_s": idle_s, "loads": runs}


def row_of(run: dict[str, Any]) -> list[Any]:
    served, others = run["answers"].get("200", 0), sum(run["answers"].values())
    is_over, refused = run["times_peak"] > 1, run["refused_p99_ms"]
    growth = run["router_mib_highest"] - run["router_mib_before"]
    return [
        run["times_peak"],
        run["goodput_tokens_per_s"],
        run["share_of_peak"],
        run["share_of_peak"] >= GOODPUT if is_over else None,
        served / others,
        others - served - run["answers"].get("429", 0),
        run["refused_p50_ms"],
        refused,
        None if refused is None else refused <= REFUSAL_MS,
        run["served_p99_ms"],
        run["router_busy"],
        run["decodes_a_step"],
        growth,
        growth <= GROWTH_MIB,
        run["recovery_s"],
        run["recovery_s"] <= RECOVERY_S,
    ]


def main() -> None:
    flags = parser(__doc__, repeats=1)
    flags.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0, 10.0], help="times the peak")
    flags.add_argument("--seconds", type=float, default=60.0, help="of each load")
    flags.add_argument("--warm", type=float, default=5.0)
    flags.add_argument("--prefill", type=int, default=1)
    flags.add_argument("--decode", type=int, default=1)
    flags.add_argument("--max-queue-s", type=float, default=4.0)
    args = flags.parse_args()
    runs = [asyncio.run(measure(args)) for _ in range(args.repeats)]
    rows = [row_of(load) for run in runs for load in run["loads"]]
    columns = ["load, × peak", "goodput, tokens/s", "of the peak", "≥ 0.95", "served", "late", "refused p50, ms", "p99"]
    columns += ["≤ 50 ms", "served p99, ms", "router busy", "decodes a step", "router, + MiB", "≤ 64", "recovery, s"]
    columns += ["≤ 5 s"]
    peak = median([run["peak_tokens_per_s"] for run in runs])
    note = (
        f"Peak: {peak:,.0f} tokens/s. Served: of all requests; refused: with 429, at once; late: how many were let in, "
        "and had waited too long when their turn had not come. Router busy: of one core."
    )
    Result(
        "overload",
        f"A router, {args.prefill} prefill and {args.decode} decode node that emulate {MODEL} with {MAX_NUM_SEQS} "
        f"requests at once; prompts of {PROMPT_TOKENS} tokens, answers of {ANSWER_TOKENS}, {args.seconds:g} s a load, "
        f"--max-queue-s {args.max_queue_s:g}.",
        [Table("Overload", columns, rows, note)],
        runs,
        versions("uvloop", "uvicorn", "starlette", "httptools", "grpclib"),
    ).finish(args.out)


if __name__ == "__main__":
    main()
