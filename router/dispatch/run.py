"""A run: all samples of one generation on their way to a client, who may be late, slow or gone.

What was generated and not read yet is bounded: a client that stops reading has its generation taken off the nodes, and
has it back when it reads on. A deadline ends everything at once, in whatever phase.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from router.dispatch.admission import QueueEntry
from router.dispatch.attempt import Attempt, SampleState
from router.dispatch.requests import GenerationRequest, SampleDelta
from router.nodes.connection import NodeConnection
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import TaskGroup

UNREAD_BYTES = 128 << 10  # of one run's pieces: a connection holds as much again, and the kernel what it likes
FULL_S = 0.05  # so long it may be over: what came in one burst is read in the next turns of the loop
SLOW_S = 30.0  # a client that reads nothing for so long, while its generation waits for it, is given up


class AdmissionRefusedError(UnavailableError):
    """Turned away before any node had it."""


def deadline_error() -> UnavailableError:
    return UnavailableError("The request's time was over before its answer was complete.", status=504, code="deadline")


def size_of(piece: SampleDelta) -> int:
    """About its bytes in this process."""
    size = 384 + 40 * len(piece.tokens)
    if piece.logprobs or piece.prompt_logprobs:
        size += sum(200 + 80 * len(entry.top_tokens) for entry in piece.logprobs + piece.prompt_logprobs)
    return size


class GenerationRun:
    """The rim's `TokenStream`."""

    def __init__(
        self,
        generation: GenerationRequest,
        ticket: QueueEntry,
        carry: Callable[["GenerationRun", SampleState], Awaitable[None]],
        on_computed: Callable[[QueueEntry], None],
        on_end: Callable[["GenerationRun", SampleState, str], None],
    ) -> None:
        """`carry` brings one sample to its end, `on_end` hears once of each, however it ended."""
        self.generation = generation
        self.ticket = ticket
        self.kv_node: NodeConnection | None = None  # the decode node that has the prompt's KV
        self.attempts: dict[int, Attempt] = {}  # under way, by sample
        self._run_attempts = carry
        self._on_computed = on_computed
        self._on_end = on_end
        self._pieces: asyncio.Queue[tuple[int, SampleDelta | BaseException]] = asyncio.Queue()
        self._unread_bytes = 0
        self._has_read = asyncio.Event()
        self._full: asyncio.TimerHandle | None = None
        self._is_late = False
        self._tasks = TaskGroup()
        self._prefill_done = asyncio.Event()
        self._samples = [SampleState(index, self) for index in range(generation.n)]
        self._running = {sample.index: self._tasks.start(self._run_sample(sample)) for sample in self._samples}
        for index, task in self._running.items():  # not by the task itself: one cancelled at once never begins
            task.add_done_callback(partial(self._ended, index))
        self._deadline_timer: asyncio.TimerHandle | None = None
        if generation.deadline is not None:
            left_s = max(0.0, generation.deadline - time.monotonic())
            self._deadline_timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    # ---- the client's side --------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[SampleDelta]:
        return self

    async def __anext__(self) -> SampleDelta:
        if not self._running and self._pieces.empty():
            raise StopAsyncIteration
        size, piece = await self._pieces.get()
        self._unread_bytes -= size
        self._has_read.set()
        if isinstance(piece, StopAsyncIteration):
            raise StopAsyncIteration
        if isinstance(piece, BaseException):
            await self.close()
            raise piece
        return piece

    def cancel(self, index: int) -> None:
        task = self._running.get(index)
        if task is not None:
            self._samples[index].is_enough = True
            task.cancel()

    async def close(self) -> None:
        await self._tasks.close()

    # ---- the nodes' side ----------------------------------------------------------------------------------------

    def put(self, piece: SampleDelta) -> None:
        size = size_of(piece)
        self._unread_bytes += size
        self._pieces.put_nowait((size, piece))
        if self._unread_bytes > UNREAD_BYTES and self._full is None:
            self._full = asyncio.get_running_loop().call_later(FULL_S, self._pause)

    def on_prefill_done(self, home: NodeConnection | None) -> None:
        """The first sample's prompt is computed: the others may start, where its KV is."""
        self.kv_node = home
        self._prefill_done.set()

    def on_prompt_computed(self) -> None:
        self._on_computed(self.ticket)

    def _pause(self) -> None:
        self._full = None
        if self._unread_bytes > UNREAD_BYTES:
            for attempt in self.attempts.values():
                attempt.pause()

    async def until_read(self) -> None:
        """Returns when most of what was told is read. Raises Unavailable when for long nothing is."""
        while self._unread_bytes > UNREAD_BYTES // 4:
            self._has_read.clear()
            try:
                async with asyncio.timeout(SLOW_S):
                    await self._has_read.wait()
            except TimeoutError:
                raise UnavailableError(f"Nothing was read for {SLOW_S:g} s.", status=408, code="slow_reader") from None

    def _expire(self) -> None:
        self._is_late = True
        self._pieces.put_nowait((0, deadline_error()))
        for task in list(self._running.values()):
            task.cancel()

    async def _run_sample(self, sample: SampleState) -> None:
        try:
            if sample.index:
                await self._prefill_done.wait()
            await self._run_attempts(self, sample)
        except (UnavailableError, RequestError) as error:
            sample.error = error

    def _ended(self, index: int, task: "asyncio.Task[None]") -> None:
        sample = self._samples[index]
        error = sample.error if task.cancelled() else sample.error or task.exception()
        del self._running[index]
        if index == 0:
            self._prefill_done.set()
        if sample.is_finished or sample.is_enough:
            self._on_end(self, sample, "finished")
        elif isinstance(error, AdmissionRefusedError):
            self._on_end(self, sample, "refused")
        else:
            self._on_end(self, sample, "failed" if error is not None or self._is_late else "cancelled")
        if error is not None:
            self._pieces.put_nowait((0, error))
            for other in self._running.values():  # it is the run's end: nothing of the others begins, or goes on, till
                other.cancel()  # a client who may be slow has read so far
        if not self._running:
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            self._pieces.put_nowait((0, StopAsyncIteration()))
