"""Measure the channels between two processes of one host: speed, CPU time, and delay of the receiver's event loop.

    python -m benchmarks transport

A push is 64 MiB of rows in random order on both sides, compared with a `memcpy` of the same size between two
pools of one process just before it. CPU time is that of both processes. The receiver's event loop runs a timer every
millisecond; its largest delay is the longest that anything else on the loop would have waited.
"""

import asyncio
import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from benchmarks.result import Result, Table, median, parser, versions
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel

PUSH_BYTES = 64 << 20
ROW_KIB = (16, 64, 256, 1024, 4096)
GOALS = {"shm": "≥ 0.8 of memcpy (rows ≥ 256 KiB)", "tcp": "≥ 1 GB/s, ≤ 0.5 CPU s/GB (rows ≥ 256 KiB)"}
NOTE = (
    "Goals: "
    + "; ".join(f"{kind} {goal}" for kind, goal in GOALS.items())
    + ". Checksums: their time at both ends, in threads while the next chunk is computed, as a share of the push. "
    "Late: the largest delay of the receiver's event loop during a push; on a busy machine it may be as large as the "
    "delay before the push."
)
SWITCH_S = 0.0005  # as in a node (shared.serve)


async def channel_of(kind: str, memory: HostMemory, directory: str) -> ShmChannel | TcpChannel:
    common = memory, secrets.token_hex(16), lambda _: None
    return await (TcpChannel.start(*common, "127.0.0.1") if kind == "tcp" else ShmChannel.start(*common, directory))


async def receive(kind: str, row_bytes: int, directory: str) -> None:
    """The other process: answer each line with JSON. "open" grants a reservation; answers have CPU time and delay."""
    memory = HostMemory(PUSH_BYTES // row_bytes, row_bytes)
    channel = await channel_of(kind, memory, directory)
    late_s = [0.0]

    async def tick() -> None:
        while True:
            due = time.monotonic() + 0.001
            await asyncio.sleep(0.001)
            late_s[0] = max(late_s[0], time.monotonic() - due)

    ticking = asyncio.ensure_future(tick())
    print(json.dumps(channel.descriptor().hex()), flush=True)
    used_s = time.process_time()
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.startswith("open"):
            channel.grant(bytes.fromhex(line.split()[1]), range(len(memory.rows)))
        print(json.dumps([time.process_time() - used_s, late_s[0]]), flush=True)
        used_s, late_s[0] = time.process_time(), 0.0
    ticking.cancel()
    await channel.close()


@dataclass(slots=True)
class TransportPeer:
    """The other process, and the two pipes to it."""

    process: "subprocess.Popen[str]"

    def ask(self, line: str = "") -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if line:
            print(line, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


@contextmanager
def receiver(kind: str, row_bytes: int, directory: str) -> Iterator[TransportPeer]:
    command = [sys.executable, "-m", "benchmarks.transport", "receive", kind, str(row_bytes), directory]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield TransportPeer(process)
        assert process.stdin is not None
        process.stdin.close()


async def pushes(kind: str, row_bytes: int, count: int) -> list[dict[str, float]]:
    """Measure `count` pushes to one receiver, after one push that connects and maps."""
    ours, local = (HostMemory(PUSH_BYTES // row_bytes, row_bytes) for _ in range(2))
    ours.rows[:] = 1
    rows = list(range(len(ours.rows)))
    with tempfile.TemporaryDirectory() as directory, receiver(kind, row_bytes, directory) as there:
        descriptor = bytes.fromhex(there.ask())
        channel = await channel_of(kind, ours, directory)
        found = []
        for _ in range(count + 1):
            reservation, source, target = (
                secrets.token_bytes(16),
                random.sample(rows, len(rows)),
                random.sample(rows, len(rows)),
            )
            started = time.monotonic()
            np.copyto(local.rows, ours.rows)
            copied_s = time.monotonic() - started
            await asyncio.sleep(0.05)
            _, idle_late_s = there.ask("open " + reservation.hex())
            cpu_s, started = time.process_time(), time.monotonic()
            await channel.push(descriptor, reservation, source, target)
            pushed_s, cpu_s = time.monotonic() - started, time.process_time() - cpu_s
            there_s, late_s = there.ask("used")
            started = time.monotonic()
            ours.checksums(source)
            summed_s = time.monotonic() - started
            found.append(
                {
                    "gb_per_s": PUSH_BYTES / pushed_s / 1e9,
                    "of_memcpy": copied_s / pushed_s,
                    "cpu_s_per_gb": (cpu_s + there_s) / PUSH_BYTES * 1e9,
                    "sums": 2 * summed_s / pushed_s,
                    "late_ms": late_s * 1000,
                    "idle_late_ms": idle_late_s * 1000,
                }
            )
        await channel.close()
    for memory in (ours, local):
        memory.close()
    return found[1:]


def row_of(kind: str, kib: int, runs: list[dict[str, float]]) -> list[Any]:
    shown = {key: median([run[key] for run in runs]) for key in runs[0]}
    fast = shown["of_memcpy"] >= 0.8 if kind == "shm" else shown["gb_per_s"] >= 1 and shown["cpu_s_per_gb"] <= 0.5
    return [kind, kib, *shown.values(), fast if kib >= 256 else None, shown["late_ms"] <= max(5, shown["idle_late_ms"])]


def main() -> None:
    if sys.argv[1:2] == ["receive"]:
        sys.setswitchinterval(SWITCH_S)
        uvloop.run(receive(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
        return
    args = parser(__doc__, repeats=9).parse_args()
    sys.setswitchinterval(SWITCH_S)
    runs = {(kind, kib): uvloop.run(pushes(kind, kib << 10, args.repeats)) for kind in GOALS for kib in ROW_KIB}
    columns = [
        "channel",
        "KiB per row",
        "GB/s",
        "of memcpy",
        "CPU s/GB",
        "checksums",
        "loop late, ms",
        "idle, ms",
        "goal",
        "≤ 5 ms late",
    ]
    rows = [row_of(kind, kib, found) for (kind, kib), found in runs.items()]
    Result(
        "transport",
        "KV rows between two processes of one host, in pushes of 64 MiB.",
        [Table("shm and tcp", columns, rows, NOTE)],
        [{"channel": kind, "row_kib": kib, "pushes": found} for (kind, kib), found in runs.items()],
        versions("numpy", "uvloop"),
    ).finish(args.out)


if __name__ == "__main__":
    main()
