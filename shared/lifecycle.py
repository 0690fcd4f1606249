"""Runs one process of Baton: its event loop, its signals, its drain."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from shared import logs

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class ProcessLifetime:
    """How a process ends: the first SIGTERM or SIGINT asks for a drain, the second ends it at once."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.draining.is_set():
            os._exit(128 + number)
        self.draining.set()


def run(
    main: Callable[[ProcessLifetime], Coroutine[Any, Any, int]],
    log_level: str,
    log_format: str = "text",
    name: str = "",
) -> int:
    """Runs `main` under uvloop until it returns the process's exit status. `name`: of the process, in JSON lines."""
    logs.configure(log_level, log_format, name)

    # A node's engine thread and its event loop share the interpreter: at the default of 5 ms, each would make the
    # other wait for most of a small model's step.
    sys.setswitchinterval(0.0005)

    async def body() -> int:
        return await main(ProcessLifetime())

    return uvloop.run(body())


def set_parent_death_signal(parent: int) -> Callable[[], None]:
    """Run in the child before it becomes its program: whatever ends the parent, SIGKILL too, ends the child."""

    def ask() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it was gone before we asked
            os._exit(1)

    return ask


def freeze_gc() -> None:
    """After start-up: what lives for good is left out of garbage collections, which otherwise show as gaps."""
    gc.collect()
    gc.freeze()


async def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = 0.02) -> bool:
    """Waits for a condition that nothing announces; False when the time is over."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(interval_s)
    return True


class TaskGroup:
    """Background tasks of one owner: kept alive while they run, cancelled together."""

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
        # Again and again: grpclib turns a cancellation that meets the end of a stream into that stream's error.
        while pending := {task for task in self._tasks if task is not current and not task.done()}:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.5)
