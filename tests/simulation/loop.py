"""An asyncio event loop for a whole cluster, with virtual time. A seed determines the order in which processes run.

If no process can run, time jumps to the next timer. Each process has its own queue of callbacks, which run in order, as
asyncio guarantees. The loop chooses the next process at random. Callbacks of a frozen or slow process run late;
callbacks of a dead process never run. The loop reads no real clock, and no iteration order depends on memory addresses,
so a seed determines every event. The design follows FoundationDB's simulator (Zhou et al., SIGMOD 2021).
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import Any

EPOCH_S = 1_000_000.0  # the virtual monotonic time at the start


class Died(BaseException):
    """Raised to end the current callback when its process is killed."""


class Process:
    """One simulated process. It runs no callback before the time `thaws_at`, and pauses `lag_s` between callbacks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.thaws_at = 0.0
        self.lag_s = 0.0
        self.clock_offset_s = 0.0  # offset of this process's monotonic clock
        self.wall_offset_s = 0.0  # offset of its Unix time, which may jump
        self.ready: deque[SimHandle] = deque()
        self.is_queued = False

    def __repr__(self) -> str:
        return self.name


WORLD = Process("world")  # the simulation itself, which is never frozen or killed
CURRENT: ContextVar[Process] = ContextVar("process", default=WORLD)


class SimHandle:
    """A callback with the public interface of asyncio's `Handle` and `TimerHandle`."""

    __slots__ = ("_when", "args", "callback", "context", "is_cancelled", "process")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when: float) -> None:
        self.callback: Callable[..., Any] | None = callback
        self.args = args
        self.context = context
        self.process: Process = context.get(CURRENT, WORLD)
        self.is_cancelled = False
        self._when = when

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when


class SimTask(asyncio.Task[Any]):
    """A task whose hash, and so its position in a set, depends on its serial number and not on its address."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: "SimLoop", context: Context | None) -> None:
        self.serial = next(loop.serials)
        self.process = (context or copy_context()).get(CURRENT, WORLD)
        super().__init__(coroutine, loop=loop, name=f"t{self.serial}", context=context)

    def __hash__(self) -> int:
        return self.serial


class SimFuture(asyncio.Future[Any]):
    """A future whose hash is its serial number, as in SimTask."""

    def __init__(self, loop: "SimLoop") -> None:
        self.serial = next(loop.serials)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.serial


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop. `on_error(process, text, exception)` receives uncaught exceptions."""

    def __init__(self, random: Random, on_error: Callable[[Process, str, BaseException | None], None]) -> None:
        self.now = EPOCH_S
        self.random = random
        self.network: Any = None
        self.serials = count(1)
        self.num_callbacks = 0
        self.fingerprint = 0  # a hash of all callbacks so far
        self._on_error = on_error
        self._timers: list[tuple[float, int, SimHandle | Process]] = []
        self._runnable: list[Process] = []
        self._closed = False

    # ---- the interface of AbstractEventLoop -----------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        handle = SimHandle(callback, args, context or copy_context(), self.now)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self.now + max(0.0, delay), callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        handle = SimHandle(callback, args, context or copy_context(), when)
        heapq.heappush(self._timers, (when, next(self.serials), handle))
        return handle

    def create_future(self) -> Any:
        return SimFuture(self)

    def create_task(self, coro: Any, *, context: Context | None = None, **_: Any) -> Any:
        return SimTask(coro, self, context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run `func` either at once or after a short random time, and deliver its result after that time."""
        future = self.create_future()
        early = self.random.random() < 0.5
        outcome = _outcome(func, args) if early else None

        def deliver() -> None:
            result, error = outcome or _outcome(func, args)
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self.random.expovariate(2000.0), deliver)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return self.network.listen(protocol_factory, host, port)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        process = getattr(task, "process", CURRENT.get())
        self._on_error(process, str(context.get("message")), context.get("exception"))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._timers.clear()
        for process in self._runnable:
            process.ready.clear()
        self._runnable.clear()

    # ---- running callbacks -----------------------------------------------------------------------------------------

    def run(self, main: Coroutine[Any, Any, Any], max_callbacks: int) -> Any:
        """Run `main` outside all processes until it ends. Raises RuntimeError after `max_callbacks` callbacks."""
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                if self.num_callbacks >= max_callbacks:
                    raise RuntimeError(f"not finished after {max_callbacks} callbacks, at {self.now - EPOCH_S:.1f} s")
                self._run_next()
            return task.result()
        finally:
            asyncio._set_running_loop(None)

    def _run_next(self) -> None:
        timers, runnable = self._timers, self._runnable
        if not runnable and timers:
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            self._due(heapq.heappop(timers)[2])
        if not runnable:
            return
        index = int(self.random.random() * len(runnable)) if len(runnable) > 1 else 0
        process = runnable[index]
        if process.thaws_at > self.now or not process.ready:
            self._leave(index, process.thaws_at)
            return
        handle = process.ready.popleft()
        if not process.ready or process.lag_s:
            self._leave(index, self.now + process.lag_s)
        self._run(handle)

    def _due(self, item: SimHandle | Process) -> None:
        if isinstance(item, SimHandle):
            if not item.is_cancelled:
                self._enqueue(item)
        elif item.thaws_at > self.now:
            self._sleep(item, item.thaws_at)
        else:
            self._runnable.append(item)

    def _enqueue(self, handle: SimHandle) -> None:
        process = handle.process
        if not process.alive or self._closed:
            return
        process.ready.append(handle)
        if not process.is_queued:
            process.is_queued = True
            self._sleep(process, max(process.thaws_at, self.now + process.lag_s))

    def _leave(self, index: int, until: float) -> None:
        """Make a process wait until the time `until` or, if its queue is empty, until it gets a callback."""
        process = self._runnable.pop(index)
        process.is_queued = bool(process.ready)
        if process.ready:
            self._sleep(process, max(until, process.thaws_at))

    def _sleep(self, process: Process, until: float) -> None:
        if until > self.now:
            heapq.heappush(self._timers, (until, next(self.serials), process))
        else:
            self._runnable.append(process)

    def _run(self, handle: SimHandle) -> None:
        if handle.is_cancelled or handle.callback is None:
            return
        self.num_callbacks += 1
        self.fingerprint = hash((self.fingerprint, self.now, len(self._timers), len(self._runnable)))
        try:
            handle.context.run(handle.callback, *handle.args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except Died:
            pass
        except BaseException as error:  # noqa: BLE001 - all errors are reported
            self._on_error(handle.process, "exception in a callback", error)


def _outcome(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return func(*args), None
    except Exception as error:  # noqa: BLE001 - raised in the awaiting task
        return None, error
