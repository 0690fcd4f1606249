"""The worker processes of one router, which serve on the same ports.

The first process opens all ports and forks the workers. It also forks a registry process, unless Redis is the registry.
When a process ends, the first process restarts it. The first process keeps a worker's listening sockets open in the
meantime, so that new connections wait for the new process. If the first process dies, the kernel kills all others.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from shared.lifecycle import set_parent_death_signal

log = logging.getLogger("baton.router")
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
HANDLED = ENDING | {signal.SIGCHLD, signal.SIGALRM}  # the signals for which the supervisor waits
INVALID = 2  # exit status of a process with invalid settings; it is not restarted, and the other processes end too
RESTART_S = 1.0  # minimum time between two starts of a process, so that a process that always crashes uses little CPU
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """One worker's share of its router. `number` is the index of the worker, and `count` is the number of workers.

    The workers divide the limits of the router among themselves. Worker i answers the other workers at `sockets[i]`.
    `registry` is the address of the registry process, if there is one. A router without workers has no `sockets`.
    """

    number: int = 0
    count: int = 1
    sockets: tuple[Path, ...] = ()
    registry: str = ""

    def of(self, limit: int) -> int:
        """Return this worker's part of a limit. The part is 0 only if the limit is 0. If the limit is at least `count`,
        the parts of all workers add up to the limit."""
        return max(limit > 0, limit // self.count + (self.number < limit % self.count))


def supervise(
    workers: Mapping[str, Callable[[], int]], helpers: Mapping[str, Callable[[], int]], on_drain: Callable[[], None]
) -> int:
    """Run each function in a separate process until SIGTERM, and return the exit status.

    After SIGTERM, the `workers` drain, and this process calls `on_drain`. When all workers have ended, the `helpers`
    get SIGTERM too. A second signal kills all processes.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # by default, it would end the process if a thread does not block it
    signal.setitimer(signal.ITIMER_REAL, POLL_S, POLL_S)
    try:
        return WorkerSupervisor({**helpers, **workers}, set(workers), on_drain).run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


class WorkerSupervisor:
    """Starts, restarts, drains and reaps the processes.

    The supervisor runs on the main thread without an event loop, because it forks. The signals in HANDLED are blocked,
    and `sigwait` receives them. A timer sends SIGALRM, because `signal.sigtimedwait` is not safe: if the process is
    stopped and continued, it may return a signal that was not sent."""

    def __init__(self, jobs: Mapping[str, Callable[[], int]], workers: set[str], on_drain: Callable[[], None]) -> None:
        self._jobs, self._workers, self._on_drain = jobs, workers, on_drain
        self._running: dict[int, str] = {}  # the names of the running processes, keyed by process id
        self._due = dict.fromkeys(jobs, 0.0)  # when to start each process; infinity while the process runs
        self._started = dict.fromkeys(jobs, 0.0)
        self._is_draining = False
        self._status = 0

    def run(self) -> int:
        while self._running or not self._is_draining:
            self._start_due()
            received = signal.sigwait(HANDLED)
            self._reap()
            if received not in ENDING:
                continue
            if self._is_draining:
                self._send(signal.SIGKILL, self._jobs.keys())
                return 128 + received
            self._drain()
        return self._status

    def _start_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now and not self._is_draining]:
            self._running[self._fork(self._jobs[name])] = name
            self._due[name], self._started[name] = float("inf"), now

    def _fork(self, job: Callable[[], int]) -> int:
        sys.stdout.flush()
        parent = os.getpid()
        if (pid := os.fork()) > 0:
            return pid
        status = 1
        try:
            set_parent_death_signal(parent)()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            status = job()
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - the child must not return into the caller's code
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while self._running:
            pid, waited = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if (name := self._running.pop(pid, None)) is None:
                continue
            status = os.waitstatus_to_exitcode(waited)
            if self._is_draining:
                self._status = self._status or max(0, status if name in self._workers else 0)
            elif status == INVALID:
                self._status = INVALID
                self._drain()
            else:
                log.warning("%s ended with status %d: starting it again", name, status)
                self._due[name] = self._started[name] + RESTART_S
        if self._is_draining and not self._workers & {*self._running.values()}:
            self._send(signal.SIGTERM, self._jobs.keys() - self._workers)

    def _drain(self) -> None:
        self._is_draining = True
        self._on_drain()
        self._send(signal.SIGTERM, self._workers)

    def _send(self, number: int, names: Set[str]) -> None:
        for pid, name in self._running.items():
            if name in names:
                os.kill(pid, number)
