"""The lifecycle of one process: its event loop, its signals and its background tasks."""

import asyncio
import ctypes
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import uvloop

ROOT = Path(__file__).resolve().parents[1]  # the folder that contains Baton's packages
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
FULL_S = 60.0  # interval of collections of all garbage
NEVER = (1 << 31) - 1  # the largest threshold
Result = TypeVar("Result")


def in_container() -> bool:
    """Return whether this process runs in a container of Docker, Podman or Kubernetes."""
    return any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv", "/run/secrets/kubernetes.io")))


class ProcessLifetime:
    """Handles SIGTERM and SIGINT: the first signal sets `draining`, the second exits the process at once."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self._is_supervised = False
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def leave_end_to_supervisor(self) -> None:
        """Ignore all signals after the first. If the supervisor itself gets a second signal, it kills this process.

        Terminals, systemd and Slurm signal all processes, so this process gets the same signal twice: once from them,
        and once from its supervisor.
        """
        self._is_supervised = True

    def _on_signal(self, number: int) -> None:
        if self.draining.is_set() and not self._is_supervised:
            os._exit(128 + number)
        self.draining.set()


def exit_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process until `ProcessLifetime` handles them. Otherwise, the first process of a
    container would ignore these signals while it loads, because the kernel does not take default actions for it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))


def run(main: Callable[[ProcessLifetime], Coroutine[Any, Any, int]]) -> int:
    """Run `main` under uvloop and return its exit status."""
    # A node's engine thread and its event loop share the interpreter lock. With the default switch interval of 5 ms,
    # one of them could wait for the lock during most of a step of a small model.
    sys.setswitchinterval(0.0005)

    async def body() -> int:
        return await main(ProcessLifetime())

    return uvloop.run(body())


def set_parent_death_signal(parent: int) -> Callable[[], None]:
    """Return a function that, when called in the child process, makes the kernel kill the child when `parent` ends."""

    def ask() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return ask


def python_path(environment: Mapping[str, str]) -> str:
    """Return the PYTHONPATH with which a child process finds Baton's packages before others of the same names.

    The child also needs the flag -P. Without it, Python searches the current directory before PYTHONPATH.
    """
    return os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))


def freeze_gc() -> None:
    """Exclude all objects that exist now from later garbage collections, because long collections delay tokens."""
    gc.collect()
    gc.freeze()


async def collect_garbage() -> None:
    """Collect all garbage every FULL_S seconds, instead of as often as Python would. Young garbage is not affected.

    By default, a router that cannot keep up with its streams would collect all garbage several times in a second,
    because many tokens outlive two collections. With 1,024 streams, each collection would take 0.16 s.
    """
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)
    while True:
        await asyncio.sleep(FULL_S)
        gc.collect()


async def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Poll until the condition holds, and return True. Return False after `timeout_s` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(interval_s)
    return True


async def result_before(work: Awaitable[Result], end: Awaitable[object]) -> Result | None:
    """Return the result of `work`, or None if `end` completes first. Cancel the one that has not completed."""
    task, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((task, ending), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        ending.cancel()


class TaskGroup:
    """The background tasks of one owner. It holds references to the tasks while they run, and cancels them together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.getLogger("baton").error("a background task failed", exc_info=error)

    async def close(self) -> None:
        current = asyncio.current_task()
        # One cancellation may not suffice: if a task's stream ends at the same time, grpclib raises the stream's error
        # instead of CancelledError, and the task continues.
        while pending := {task for task in self._tasks if task is not current and not task.done()}:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.5)


async def listen(
    start: Callable[[str, int], Awaitable[int]], host: str, port: int, flag: str, host_flag: str = "--host"
) -> int:
    """Start a server and return its port. Raises OSError, which names the flag to change, if it cannot listen."""
    try:
        return await start(host, port)
    except OSError as error:
        raise cannot_listen(error, host, port, flag, host_flag) from None


def cannot_listen(error: OSError, host: str, port: int, port_flag: str, host_flag: str) -> OSError:
    """Return an error that names the flag to change: `port_flag` if the port is used or forbidden, else `host_flag`."""
    flag = port_flag if error.errno in {errno.EADDRINUSE, errno.EACCES} else host_flag
    return OSError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}")
