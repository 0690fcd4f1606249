"""Measure the channels between two processes of one host: speed, CPU time, and delay of the receiver's event loop.

    python -m benchmarks transport

A push transfers 64 MiB of rows in random order on both sides. Just before each push, a `memcpy` of the same size
between two pools of one process is measured for comparison. The CPU time is that of both processes. A timer runs every
millisecond on the receiver's event loop. The largest delay of this timer is the longest time that other work on the
loop would have waited.
"""

import asyncio
import random
import secrets
import sys
import tempfile
import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import uvloop

from benchmarks.peers.worker import serve
from benchmarks.process import PeerProcess
from benchmarks.result import Result, Table, medians, parser, versions
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel

PUSH_BYTES = 64 << 20
ROW_KIB = (16, 64, 256, 1024, 4096)
KINDS = ("shm", "tcp")
NOTE = (
    "Goals for rows ≥ 256 KiB: shm ≥ 0.8 of memcpy; tcp ≥ 1 GB/s and ≤ 0.5 CPU s/GB. Checksums: their time at both "
    "ends as a share of the push. Nodes compute them in threads, during the next chunk. Late: the largest delay of the "
    "receiver's event loop during a push. Idle: the same before the push; on a busy machine, both may be equal."
)
SWITCH_S = 0.0005  # the value that nodes use


async def channel_of(kind: str, memory: HostMemory, directory: str) -> ShmChannel | TcpChannel:
    common = memory, secrets.token_hex(16), lambda _: None
    return TcpChannel(*common, "127.0.0.1") if kind == "tcp" else ShmChannel(*common, directory)


class TransportReceiver:
    """The receiving process, with a channel on its own event loop. `facts` is the channel's descriptor."""

    def __init__(self, kind: str, row_bytes: int, directory: str) -> None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._memory = HostMemory(PUSH_BYTES // row_bytes, row_bytes)
        channel = channel_of(kind, self._memory, directory)
        self._channel = asyncio.run_coroutine_threadsafe(channel, self._loop).result()
        self._late_s = 0.0
        self._ticking = asyncio.run_coroutine_threadsafe(self._tick(), self._loop)
        self.facts = self._channel.descriptor().hex()

    def used(self, reservation: str = "") -> list[float]:
        """Grant `reservation` if given. Return the process's CPU seconds so far, and the event loop's largest delay
        since this method was last called."""
        if reservation:
            rows = range(len(self._memory.rows))
            self._loop.call_soon_threadsafe(self._channel.grant, bytes.fromhex(reservation), rows)
        late_s, self._late_s = self._late_s, 0.0
        return [time.process_time(), late_s]

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + 0.001
            await asyncio.sleep(0.001)
            self._late_s = max(self._late_s, time.monotonic() - due)


async def pushes(kind: str, row_bytes: int, count: int) -> list[dict[str, float]]:
    """Measure `count` pushes to one receiver. A push before them connects to the receiver and maps its memory."""
    ours, local = (HostMemory(PUSH_BYTES // row_bytes, row_bytes) for _ in range(2))
    ours.rows[:] = 1
    rows, found = list(range(len(ours.rows))), []
    with tempfile.TemporaryDirectory() as directory:
        options = {"kind": kind, "row_bytes": row_bytes, "directory": directory}
        with closing(PeerProcess("benchmarks.transport", options)) as there:
            channel = await channel_of(kind, ours, directory)
            for _ in range(count + 1):
                reservation, source, target = (
                    secrets.token_bytes(16),
                    *(random.sample(rows, len(rows)) for _ in range(2)),
                )
                started = time.monotonic()
                np.copyto(local.rows, ours.rows)
                copied_s = time.monotonic() - started
                await asyncio.sleep(0.05)
                before_s, idle_late_s = there.call("used", reservation=reservation.hex())
                cpu_s, started = time.process_time(), time.monotonic()
                await channel.push(bytes.fromhex(there.facts), reservation, source, target)
                pushed_s, cpu_s = time.monotonic() - started, time.process_time() - cpu_s
                there_s, late_s = there.call("used")
                started = time.monotonic()
                ours.checksums(source)
                summed_s = time.monotonic() - started
                figures = {"gb_per_s": PUSH_BYTES / pushed_s / 1e9, "of_memcpy": copied_s / pushed_s}
                figures |= {"cpu_s_per_gb": (cpu_s + there_s - before_s) / PUSH_BYTES * 1e9}
                figures |= {"sums": 2 * summed_s / pushed_s}
                found.append(figures | {"late_ms": late_s * 1000, "idle_late_ms": idle_late_s * 1000})
            await channel.close()
    for memory in (ours, local):
        memory.close()
    return found[1:]


def row_of(kind: str, kib: int, runs: list[dict[str, float]]) -> list[Any]:
    shown = medians(runs)
    fast = shown["of_memcpy"] >= 0.8 if kind == "shm" else shown["gb_per_s"] >= 1 and shown["cpu_s_per_gb"] <= 0.5
    return [kind, kib, *shown.values(), fast if kib >= 256 else None, shown["late_ms"] <= max(5, shown["idle_late_ms"])]


def main() -> None:
    args = parser(__doc__, repeats=9).parse_args()
    sys.setswitchinterval(SWITCH_S)
    runs = {(kind, kib): uvloop.run(pushes(kind, kib << 10, args.repeats)) for kind in KINDS for kib in ROW_KIB}
    columns = ["channel", "KiB per row", "GB/s", "of memcpy", "CPU s/GB", "checksums", "loop late, ms", "idle, ms"]
    rows = [row_of(kind, kib, found) for (kind, kib), found in runs.items()]
    Result(
        "transport",
        "KV rows between two processes of one host, in pushes of 64 MiB.",
        [Table("shm and tcp", [*columns, "goal", "≤ 5 ms late"], rows, NOTE)],
        [{"channel": kind, "row_kib": kib, "pushes": found} for (kind, kib), found in runs.items()],
        versions("numpy", "uvloop"),
    ).finish(args.out)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_S)
    serve(TransportReceiver)
