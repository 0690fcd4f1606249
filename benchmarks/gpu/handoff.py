"""Benchmark KV handoff between two processes on one GPU: copies through `cuda_ipc`, and a shared pool.

The second process is this module itself (`python -m benchmarks.gpu.handoff`); it owns the memory that is written.
"""

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.kernels import token_bytes
from benchmarks.gpu.scene import GpuScene, GpuSection
from benchmarks.models import checkpoint
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
CHUNKS, PREFILL_MS = 4, 189  # of such a prompt with a budget of 2048; published time of Llama-3.1-8B on an H200
PATIENCE_S, ANSWER_S = 5.0, 60.0
CLUSTER = "A cluster on one GPU"
ROOT = Path(__file__).resolve().parents[2]
ARMS = ("colocated:1", "disaggregated:1p1d@kv_channel=pool")
# One node on the GPU, or two that share it, with different numbers of blocks.
ARMS_DIFFER = ("--unequal", "--treatment", "num_blocks", "--set", "max_num_seqs=32")  # fewer graphs, so a faster start
TRAFFIC = ("--preset", "chat", "--rate", "8", "--duration", "5", "--seeds", "2")
VERDICT_OR_NONE = (0, 1)  # exit statuses of `baton compare` when it has written its report
SHOWN = ("ttft_p50_ms", "ttft_p99_ms", "tbt_p50_ms", "tbt_p99_ms", "attainment", "exposed_transfer_p50_ms")


@dataclass(frozen=True, slots=True)
class PeerJob:
    """The second process: `on_gpu` says where its KV memory is; `shares`: it is the owner of a shared pool."""

    directory: str
    on_gpu: bool
    num_rows: int
    row_bytes: int
    shares: bool = False

    def memory(self) -> "HostMemory | DeviceMemory":
        if not self.on_gpu:
            return HostMemory(self.num_rows, self.row_bytes)
        return DeviceMemory(torch.device("cuda", 0), self.num_rows, self.row_bytes)

    def gpu(self) -> CudaDevice | None:
        return CudaDevice(0) if self.on_gpu else None

    async def channel(self, memory: "HostMemory | DeviceMemory", incarnation_id: str) -> LocalChannel[Any]:
        kind = CudaIpcChannel if self.on_gpu else ShmChannel
        return await kind.start(memory, incarnation_id, lambda _: None, self.directory, PATIENCE_S)  # type: ignore[arg-type]


# ---- the second process -----------------------------------------------------------------------------------------


async def receive(job: PeerJob) -> None:
    """Print the channel's descriptor, then the checksums of the rows that each input line names, until end of input."""
    memory = job.memory()
    channel = await job.channel(memory, secrets.token_hex(16))
    owner = PoolOwner(channel, descriptor_file(job.directory, job.gpu())) if job.shares else channel
    print(owner.descriptor().hex(), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(memory.checksums(json.loads(line)).hex(), flush=True)
    await owner.close()
    memory.close()


class GpuPeer:
    """The second process, killed after ANSWER_S so that a hung GPU does not block the other sections."""

    def __init__(self, job: PeerJob) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.handoff", json.dumps(asdict(job))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._watchdog = threading.Timer(ANSWER_S, self._process.kill)
        self._watchdog.start()
        try:
            self.descriptor = bytes.fromhex(self._line())
        except BaseException:
            self.close()
            raise

    def sums(self, rows: Sequence[int]) -> bytes:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(rows)) + "\n")
        self._process.stdin.flush()
        return bytes.fromhex(self._line())

    def close(self) -> None:
        self._watchdog.cancel()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("the second process ended; its output is above")
        return line


@contextlib.contextmanager
def receiver(job: PeerJob) -> Iterator[GpuPeer]:
    started = GpuPeer(job)
    try:
        yield started
    finally:
        started.close()


# ---- this process ---------------------------------------------------------------------------------------------------


def handoff(scene: GpuScene) -> GpuSection:
    rows: list[list[Cell]] = []
    row_bytes = token_bytes(scene) * BLOCK_TOKENS
    count = max(2, scene.tokens(PROMPT) // BLOCK_TOKENS)
    num_rows = count + count // 4
    copied_s = _copy_s(scene, count * row_bytes)
    rate = count * row_bytes / copied_s / 1e9
    rows.append(["device copy, by torch", 1e3 * copied_s, rate, None, None])
    on_gpu = scene.device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        took = median(asyncio.run(_pushed_s(PeerJob(directory, on_gpu, num_rows, row_bytes), count)))
        share, name = copied_s / took, "cuda_ipc" if on_gpu else "shm"
        rows.append([name, 1e3 * took, count * row_bytes / took / 1e9, share, share >= COPY_GOAL])
        took = median(asyncio.run(_handed_s(PeerJob(directory, on_gpu, num_rows, row_bytes, shares=True), count)))
    rows.append(["pool", 1e3 * took, None, None, 1e3 * took < POOL_GOAL_MS])
    columns = ["handoff", "ms", "GB/s", "of the copy", "goal"]
    note = (
        f"{count} blocks of {row_bytes / 2**20:.1f} MiB, a prompt of {scene.tokens(PROMPT)} tokens, to another process "
        f"on the same device. Goals: {COPY_GOAL:.0%} of the copy's speed; {POOL_GOAL_MS:g} ms in one pool. Only the "
        f"last of a prompt's {CHUNKS} chunks is exposed: 1 % of its prefill ({PREFILL_MS} ms, published) is "
        f"{CHUNKS * PREFILL_MS / 100:.1f} ms in this table."
    )
    return GpuSection([Table("Handing a prompt's KV over on one GPU", columns, rows, note)], rows)


def _copy_s(scene: GpuScene, size: int) -> float:
    source, target = (torch.ones(size, dtype=torch.uint8, device=scene.device) for _ in range(2))
    target.copy_(source)
    return median(scene.elapsed_s(lambda: target.copy_(source)) for _ in range(REPEATS))


async def _pushed_s(job: PeerJob, count: int) -> list[float]:
    """Return the seconds of pushes of `count` rows in random order."""
    memory = job.memory()
    _fill(memory)
    source, target = Random(1).sample(range(job.num_rows), count), Random(2).sample(range(job.num_rows), count)
    try:
        channel = await job.channel(memory, secrets.token_hex(16))
        with receiver(job) as other:
            took = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                await channel.push(other.descriptor, secrets.token_bytes(16), source, target)
                took.append(time.perf_counter() - began)
            if other.sums(target) != memory.checksums(source):
                raise RuntimeError("the received rows differ from the sent rows")
            await channel.close()
    finally:
        memory.close()
    return took[1:]  # the first push maps the peer's memory


async def _handed_s(job: PeerJob, count: int) -> list[float]:
    """Return the seconds of handoffs of blocks in a shared pool, which need no copy."""
    with receiver(job) as other:
        client = PoolClient.attach(job.directory, job.gpu(), secrets.token_hex(16), PATIENCE_S, PATIENCE_S)
        memory: HostMemory | DeviceMemory | PoolClient = client
        if client.region is not None:
            memory = DeviceMemory(torch.device("cuda", 0), job.num_rows, job.row_bytes, client.region)
        _fill(memory)
        rows, took = list(range(count)), []
        for _ in range(REPEATS):
            began = time.perf_counter()
            await client.push(other.descriptor, secrets.token_bytes(16), rows, rows)
            took.append(time.perf_counter() - began)
        if other.sums(rows) != memory.checksums(rows):
            raise RuntimeError("the two processes see different memory")
        await client.close()
    return took


def _fill(memory: "HostMemory | DeviceMemory | PoolClient") -> None:
    if isinstance(memory, DeviceMemory):
        memory.rows.random_(0, 256)
        torch.cuda.synchronize(memory.device)
    else:
        memory.rows[:] = np.random.default_rng(0).integers(0, 256, memory.rows.shape, np.uint8)


# ---- whole clusters ---------------------------------------------------------------------------------------------


def lacking() -> str:
    """Return why no cluster can run on this machine; empty if one can."""
    command = [sys.executable, "-c", "import cluster.cli, compare.cli, router.http.app, node.process"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    return run.stderr.strip().rpartition("\n")[2] if run.returncode else ""


def cluster(scene: GpuScene) -> GpuSection:
    """Run `baton compare`: a co-located node against a prefill and a decode node, all on one GPU."""
    if why := lacking():
        return GpuSection([Table(CLUSTER, ["not run"], [[f"on this machine: {why}"]])])
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        report = Path(directory) / "report"
        command = [sys.executable, "-m", "cluster", "compare", "--arms", *ARMS, *ARMS_DIFFER, *TRAFFIC]
        command += ["--model", str(checkpoint("0.5b", "bfloat16")), "--out", str(report)]
        left_s = max(1.0, scene.until - time.monotonic())
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left_s, check=False)
        if run.returncode not in VERDICT_OR_NONE or not (report / "report.json").exists():
            raise RuntimeError(f"baton compare ended with {run.returncode}: {(run.stdout + run.stderr)[-2000:]}")
        return compared(json.loads((report / "report.json").read_text()))


def compared(report: dict[str, object]) -> GpuSection:
    """Return a table of every arm's means, with the verdict as its note."""
    summary, verdict = report["summary"], report["verdict"]
    assert isinstance(summary, dict)
    assert isinstance(verdict, dict)
    rows: list[list[Cell]] = [
        [arm, *(found.get(metric, {}).get("mean") for metric in SHOWN)] for arm, found in summary.items()
    ]
    tokens = report["tokens"]
    assert isinstance(tokens, dict)
    answers = "the same in every arm" if tokens["equal"] else f"{len(tokens['different'])} differ between arms"
    note = (
        f"{verdict['sentence']} Answers: {answers}, of {tokens['compared']}. Problems: {report['problems'] or 'none'}."
    )
    return GpuSection([Table(CLUSTER, ["arm", *SHOWN], rows, note)], {"summary": summary})


if __name__ == "__main__":
    asyncio.run(receive(PeerJob(**json.loads(sys.argv[1]))))
