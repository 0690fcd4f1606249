"""Benchmark KV handoff between two processes on one GPU, by copies through `cuda_ipc` and in a shared pool.

The second process runs this module (`python -m benchmarks.gpu.handoff`) and owns the memory that receives the KV.
"""

import asyncio
import secrets
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention import GpuScene, GpuSection
from benchmarks.peers.worker import serve
from benchmarks.process import PeerProcess
from benchmarks.result import Cell, Table
from engine.cuda.kv.cuda_ipc import CudaIpcChannel
from engine.cuda.kv.driver import CudaDevice
from engine.cuda.kv.pool import PoolClient, PoolOwner, descriptor_file
from engine.cuda.memory import DeviceMemory
from engine.cuda.selection import BLOCK_TOKENS
from shared.kv.local import LocalChannel
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel

PROMPT, REPEATS = 8192, 7
COPY_GOAL, POOL_GOAL_MS = 0.7, 1.0
CHUNKS, PREFILL_MS = 4, 189  # number of chunks (of 2048 tokens); published prefill time of Llama-3.1-8B on an H200
TIMEOUT_S = 5.0
Memory = HostMemory | DeviceMemory


@dataclass(frozen=True, slots=True)
class HandoffJob:
    """The setup of both processes. `on_gpu`: KV is in GPU memory; `shares`: the second process owns a shared pool."""

    directory: str
    on_gpu: bool
    num_rows: int
    row_bytes: int
    shares: bool = False

    def memory(self) -> Memory:
        if not self.on_gpu:
            return HostMemory(self.num_rows, self.row_bytes)
        return DeviceMemory(torch.device("cuda", 0), self.num_rows, self.row_bytes)

    def gpu(self) -> CudaDevice | None:
        return CudaDevice(0) if self.on_gpu else None

    async def channel(self, memory: Memory) -> LocalChannel[Any]:
        kind = CudaIpcChannel if self.on_gpu else ShmChannel
        incarnation_id = secrets.token_hex(16)
        return kind(memory, incarnation_id, lambda _: None, self.directory, TIMEOUT_S)  # type: ignore[arg-type]


class HandoffPeer:
    """The second process, with its memory and a channel on its own event loop. `facts` is the channel's descriptor."""

    def __init__(self, **job: Any) -> None:
        made = HandoffJob(**job)
        self._memory, loop = made.memory(), asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        channel = asyncio.run_coroutine_threadsafe(made.channel(self._memory), loop).result()
        owner = PoolOwner(channel, descriptor_file(made.directory, made.gpu())) if made.shares else channel
        self.facts = owner.descriptor().hex()

    def sums(self, rows: list[int]) -> str:
        return self._memory.checksums(rows).hex()


def handoff(scene: GpuScene) -> GpuSection:
    rows: list[list[Cell]] = []
    row_bytes = scene.token_bytes * BLOCK_TOKENS
    count = max(2, scene.tokens(PROMPT) // BLOCK_TOKENS)
    source, target = (torch.ones(count * row_bytes, dtype=torch.uint8, device=scene.device) for _ in range(2))
    copied_s = median(scene.elapsed_s(lambda: target.copy_(source)) for _ in range(REPEATS))
    rows.append(["device copy, by torch", 1e3 * copied_s, count * row_bytes / copied_s / 1e9, None, None])
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        job = HandoffJob(directory, scene.device.type == "cuda", count + count // 4, row_bytes)
        took_s = asyncio.run(_pushed_s(job, count))
        share, name = copied_s / took_s, "cuda_ipc" if job.on_gpu else "shm"
        rows.append([name, 1e3 * took_s, count * row_bytes / took_s / 1e9, share, share >= COPY_GOAL])
        took_s = asyncio.run(_handed_s(replace(job, shares=True), count))
    rows.append(["pool", 1e3 * took_s, None, None, 1e3 * took_s < POOL_GOAL_MS])
    columns = ["handoff", "ms", "GB/s", "of the copy", "goal"]
    note = (
        f"{count} blocks of {row_bytes / 2**20:.1f} MiB, a prompt of {scene.tokens(PROMPT)} tokens, to another process "
        f"on the same device. Goals: {COPY_GOAL:.0%} of the copy's speed; {POOL_GOAL_MS:g} ms in one pool. Only the "
        f"transfer of the last of {CHUNKS} chunks is exposed. If that takes 1 % of the prefill ({PREFILL_MS} ms, "
        f"published), all chunks take {CHUNKS * PREFILL_MS / 100:.1f} ms, to compare with this table."
    )
    return GpuSection([Table("Handoff of a prompt's KV on one GPU", columns, rows, note)], rows)


async def _pushed_s(job: HandoffJob, count: int) -> float:
    """Return the median seconds of a push of `count` random rows; the first push, which maps memory, is left out."""
    memory = job.memory()
    _fill(memory)
    source, target = (Random(seed).sample(range(job.num_rows), count) for seed in (1, 2))
    channel = await job.channel(memory)
    with closing(PeerProcess("benchmarks.gpu.handoff", asdict(job))) as other:
        took_s = await _timed(channel, other, source, target)
        if other.call("sums", rows=target) != memory.checksums(source).hex():
            raise RuntimeError("the received rows differ from the sent rows")
        await channel.close()
    memory.close()
    return took_s


async def _handed_s(job: HandoffJob, count: int) -> float:
    """Return the median time, in seconds, of a handoff within a shared pool. Such a handoff copies nothing."""
    with closing(PeerProcess("benchmarks.gpu.handoff", asdict(job))) as other:
        client = PoolClient.attach(job.directory, job.gpu(), secrets.token_hex(16), TIMEOUT_S, TIMEOUT_S)
        memory: Memory | PoolClient = client
        if client.region is not None:
            memory = DeviceMemory(torch.device("cuda", 0), job.num_rows, job.row_bytes, client.region)
        _fill(memory)
        rows = list(range(count))
        took_s = await _timed(client, other, rows, rows)
        if other.call("sums", rows=rows) != memory.checksums(rows).hex():
            raise RuntimeError("the two processes see different memory")
        await client.close()
    return took_s


async def _timed(
    channel: LocalChannel[Any] | PoolClient, other: PeerProcess, source: list[int], to: list[int]
) -> float:
    took_s = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        await channel.push(bytes.fromhex(other.facts), secrets.token_bytes(16), source, to)
        took_s.append(time.perf_counter() - began)
    return median(took_s[1:])


def _fill(memory: Memory | PoolClient) -> None:
    if isinstance(memory, DeviceMemory):
        memory.rows.random_(0, 256)
        torch.cuda.synchronize(memory.device)
    else:
        memory.rows[:] = np.random.default_rng(0).integers(0, 256, memory.rows.shape, np.uint8)


if __name__ == "__main__":
    serve(HandoffPeer)
