"""grpclib wakes a task whose stream has ended by cancelling it, and makes that the stream's error, but never takes the
cancellation back: the task counts as being cancelled for good. Before Python 3.11.3 the next `asyncio.timeout` that
runs out in it raises CancelledError (CPython issue 102780), so who dials a lost node again would be silently gone."""

from asyncio import current_task
from collections import Counter
from types import TracebackType

from grpclib.utils import Wrapper

_leave = Wrapper.__exit__


def _cancel(wrapper: Wrapper, error: Exception) -> None:
    wrapper._error = error
    woken = vars(wrapper).setdefault("woken", Counter())
    for task in wrapper._tasks:
        woken[task] += task.cancel()
    wrapper.cancelled = True


def _exit(
    wrapper: Wrapper,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    task = current_task()
    assert task is not None  # or it could not have entered
    for _ in range(vars(wrapper).get("woken", {}).pop(task, 0)):
        task.uncancel()
    _leave(wrapper, kind, error, trace)


def take_back_cancellations() -> None:
    """From here on, in this process, a task has its cancellations by a stream taken back as it leaves the call."""
    Wrapper.cancel = _cancel  # type: ignore[assignment, method-assign]
    Wrapper.__exit__ = _exit  # type: ignore[method-assign]
