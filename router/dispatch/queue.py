"""Where requests wait for their turn: `router.dispatch.admission` with a clock, and with those who are to be told."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

from router.dispatch.admission import Admission, QueueEntry, QueueFullError
from router.dispatch.requests import GenerationRequest
from router.dispatch.run import AdmissionRefusedError
from router.nodes.pool import NodePool
from shared.errors import RequestError, UnavailableError

MAX_RETRY_AFTER_S = 60.0


class AdmissionQueue:
    """Owns who waits. `ttft_slo_s` 0: no promise; `max_queued_tokens`: see `Admission`."""

    def __init__(self, fleet: NodePool, max_queue_s: float, ttft_slo_s: float, max_queued_tokens: int) -> None:
        self._fleet = fleet
        self._max_wait_s = min(max_queue_s, ttft_slo_s or inf)  # one that waits longer breaks the promise already
        self._admission = Admission(max_queued_tokens)
        self._waiting: dict[QueueEntry, asyncio.Event] = {}
        fleet.on_change = self._resize

    def enqueue(self, generation: GenerationRequest) -> QueueEntry:
        """A place, or one in the queue. Raises Refused where it would wait too long, Rejected where no node could hold
        it even alone."""
        self._check_fits(generation)
        now, deadline = time.monotonic(), inf if generation.deadline is None else generation.deadline
        ticket = QueueEntry(
            generation.tenant,
            generation.priority,
            len(generation.prompt),
            max(1, generation.max_tokens // 2),  # as an attempt is charged
            generation.n,
            min(now + self._max_wait_s, deadline),
            deadline,
        )
        self._admission.capacity = self._fleet.capacity()
        self._waiting[ticket] = asyncio.Event()
        try:
            self._wake(self._admission.offer(ticket, now))
        except QueueFullError as error:
            del self._waiting[ticket]
            raise AdmissionRefusedError(
                "The cluster has as many requests as it can answer in time; try again later.",
                retry_after_s=min(error.wait_s, MAX_RETRY_AFTER_S),
                status=429,
                code="overloaded",
            ) from None
        return ticket

    async def wait_for_slot(self, ticket: QueueEntry, deadline: float | None) -> None:
        """Returns when it is the ticket's turn. Raises Unavailable when that takes too long; at the request's deadline,
        its run ends it."""
        if ticket.is_granted:
            return
        try:
            async with asyncio.timeout(None if ticket.expires == deadline else ticket.expires - time.monotonic()):
                await self._waiting[ticket].wait()
        except TimeoutError:
            raise UnavailableError("The request waited too long for its turn.", 2.0, code="queue_timeout") from None

    def credit_prefix_hit(self, ticket: QueueEntry, cached_tokens: int) -> None:
        """So much of its prompt is on its node already."""
        self._admission.credit_prefix_hit(ticket, cached_tokens)

    def on_prompt_computed(self, ticket: QueueEntry) -> None:
        """Its prompt is."""
        self._wake(self._admission.prompt_computed(ticket, time.monotonic()))

    def release(self, ticket: QueueEntry, num_generated: int) -> None:
        """One of its samples is over."""
        granted = self._admission.release(ticket, num_generated, time.monotonic())
        if not ticket.num_left:
            self._waiting.pop(ticket, None)
        self._wake(granted)

    @asynccontextmanager
    async def paused(self, ticket: QueueEntry) -> AsyncIterator[None]:
        """Meanwhile one of its samples takes nobody's place."""
        self._wake(self._admission.paused(ticket, time.monotonic()))
        try:
            yield
        finally:
            self._admission.resumed(ticket)

    def status(self) -> dict[str, int]:
        return {"requests": self._admission.queued_requests, "tokens": self._admission.queued_tokens}

    def _wake(self, granted: list[QueueEntry]) -> None:
        for ticket in granted:
            self._waiting.pop(ticket).set()

    def _resize(self) -> None:
        if self._waiting:
            self._wake(self._admission.resize(self._fleet.capacity(), time.monotonic()))

    def _check_fits(self, generation: GenerationRequest) -> None:
        prefill, decode = self._fleet.routable()
        largest = max(decode or prefill, key=lambda link: link.kv_capacity_tokens, default=None)
        tokens = len(generation.prompt) + generation.max_tokens
        if largest is None or tokens <= largest.kv_capacity_tokens:
            return
        size = largest.info.block_tokens
        raise RequestError(
            f"{tokens} tokens need {-(-tokens // size)} blocks of {size} tokens, and the KV cache has "
            f"{largest.info.num_blocks - 1}: shorten the request or give the nodes more --kv-cache-memory",
            "max_tokens",
            "request_too_large",
        )
