"""Threads that serve tenants in turn."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class FairThreads:
    """A pool of threads. When a thread becomes free, it runs the next work of the next tenant (round robin), so that
    one tenant with much work does not delay the others. The work of one tenant is started in order. Work that was
    cancelled takes no turn, and its arguments are released at once.

    `submit` may be called on any thread.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        # For each tenant: futures, each with [the function to call] (or [] if cancelled). The first tenant is next.
        self._waiting: dict[str, deque[tuple[Future[Any], list[Callable[[], Any]]]]] = {}

    def submit(
        self, tenant: str, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Return a future for the result of `work`. If the future is cancelled before its turn, the work is skipped."""
        future, works = Future[Result](), [lambda: work(*args, **kwargs)]
        future.add_done_callback(lambda _: works.clear())
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, works))
        self._executor.submit(self._run_next)
        return future

    async def run(
        self, tenant: str, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run `work` on a thread, and return its result. If the caller is cancelled before its turn, drop the work."""
        return await asyncio.wrap_future(self.submit(tenant, work, *args, **kwargs))

    def _run_next(self) -> None:
        with self._lock:
            found = self._next()
        if found is None:  # all other work was cancelled
            return
        future, works = found
        try:
            future.set_result(works[0]())
        except BaseException as error:  # noqa: BLE001 - the caller gets every error
            future.set_exception(error)

    def _next(self) -> tuple[Future[Any], list[Callable[[], Any]]] | None:
        """Remove and return the next work that was not cancelled."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            while queue:
                future, works = queue.popleft()
                if future.set_running_or_notify_cancel():
                    if queue:
                        self._waiting[tenant] = queue  # behind all other tenants
                    return future, works
        return None
