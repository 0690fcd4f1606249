"""Count the resources that a process may leak: memory, descriptors, threads, sockets and shared memory."""

import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cluster.harness import Cluster

MIB = 1 << 20
# Maximum number of threads that a process may start after the first count, for the asyncio pool and KV pushes.
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)


@dataclass(slots=True)
class Count:
    """The resources of one process. `descriptors` counts descriptors by kind, such as socket or file."""

    pid: int
    rss_mib: float
    threads: int
    descriptors: Counter[str] = field(default_factory=Counter)

    @property
    def num_descriptors(self) -> int:
        return self.descriptors.total()


def count(pid: int) -> Count:
    """Count the resources of a process. Raises psutil.NoSuchProcess if the process has ended."""
    process = psutil.Process(pid)
    with process.oneshot():
        rss_mib, threads = process.memory_info().rss / MIB, process.num_threads()
    return Count(pid, rss_mib, threads, Counter(_kinds(Path(f"/proc/{pid}/fd"))))


def count_all(running: Cluster) -> dict[str, Count]:
    return {name: count(process.pid) for name, process in running.processes.items() if process.poll() is None}


def count_shared(running: Cluster) -> Counter[str]:
    """Count the sockets in the KV directory and the mapped files in /dev/shm; both kinds can outlive a process."""
    directory = Path(str(running.settings["kv_directory"]))
    sockets = sum(stat.S_ISSOCK(path.stat().st_mode) for path in directory.iterdir())
    alive = [process.pid for process in running.processes.values() if process.poll() is None]
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in alive]
    return Counter({"unix sockets": sockets, "files in /dev/shm": sum(text.count(" /dev/shm/") for text in maps)})


def leaks(before: Mapping[str, Count], after: Mapping[str, Count]) -> list[str]:
    """Return one line for each resource that has grown in a process. Up to POOL_THREADS more threads are allowed."""
    found = []
    for name, now in after.items():
        then = before[name]
        more = {kind: num - then.descriptors[kind] for kind, num in now.descriptors.items()}
        if grown := {kind: num for kind, num in more.items() if num > 0}:
            found.append(f"{name}: {grown} more descriptors than the {then.num_descriptors} before")
        if now.threads > then.threads + POOL_THREADS:
            found.append(f"{name}: {now.threads} threads, {then.threads} before")
    return found


def _kinds(directory: Path) -> list[str]:
    kinds = []
    for entry in directory.iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the descriptor was closed after the directory was listed
            continue
        kinds.append("memfd" if "memfd:" in target else target.partition(":")[0] if ":" in target else "file")
    return kinds
