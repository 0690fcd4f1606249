"""Long-lived streams between a node and its routers. The node receives commands and sends deltas, statistics and
records.

The memory for a router that does not read its stream is limited. If the router has too many unread records, the oldest
ones are dropped. If it has too many unread deltas, its stream is closed and its requests are aborted.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from node.recorder import StepRecorder
from shared.clock import now_ns
from shared.lifecycle import TaskGroup, wait_until
from shared.rpc.messages import NodeStats, NodeUpdate, RequestEvent, RouterCommand, StepRecord, TokenDelta
from shared.rpc.methods import STREAM_ENDED

log = logging.getLogger("baton.node")
MAX_UNREAD_DELTAS = 100_000
MAX_ROUTERS = 64
RECORDS_S = 0.1  # seconds between two deliveries of records to the routers
# While the load is unchanged, a router with requests on the node gets only every REPORT_EVERY-th report of stats, and
# any other router only every REPORT_EVERY_UNUSED-th report.
REPORT_EVERY, REPORT_EVERY_UNUSED = 2, 5
DRAIN_SEEN_S = 2.0  # maximum wait until all routers confirm that they know of the drain; older routers never confirm it
FLUSH_S = 0.2  # how long an ending node waits for its last messages to be sent
MAX_DELTAS = 1000  # deltas per message
# Logprobs per message. With 20 alternatives, a message then has a quarter of the items that the decoder accepts.
MAX_LOGPROBS_SENT = 4096
MAX_STEPS = 64  # steps per message; even with 4,096 members for each step, a message is far below the size limit
MAX_EVENTS = 2000
MAX_RECORDS = 8192  # maximum number of unsent records of each kind


@dataclass(slots=True)
class RouterStream:
    """The unsent deltas, statistics and records for one router, and the state of its stream."""

    wants_records: bool = True
    has_requests: bool = True
    has_seen_drain: bool = False
    deltas: list[TokenDelta] = field(default_factory=list)
    stats: NodeStats | None = None
    steps: list[StepRecord] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    read_timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))

    @property
    def awaits_handoffs(self) -> bool:
        """Whether the router knows that this node drains, but still has requests that it placed here before."""
        return self.has_seen_drain and self.has_requests

    def record(self, steps: list[StepRecord], events: list[RequestEvent]) -> int:
        """Queue records. Return the number of old records that were dropped to make room."""
        self.steps += steps
        self.events += events
        dropped = 0
        for rows in (self.steps, self.events):
            excess = max(0, len(rows) - MAX_RECORDS)
            del rows[:excess]
            dropped += excess
        self.wake.set()
        return dropped

    async def write(self, stream: Any) -> None:
        """Send queued messages until this task is cancelled or the stream has ended."""
        with suppress(*STREAM_ENDED):
            while True:
                await self.wake.wait()
                self.wake.clear()
                await self._send_pending(stream)

    async def _send_pending(self, stream: Any) -> None:
        deltas, self.deltas = self.deltas, []
        for message in _messages(deltas):
            await stream.send_message(NodeUpdate(message))
        stats, self.stats = self.stats, None
        if stats is not None:
            stats.sent_ns = now_ns()
            await stream.send_message(NodeUpdate([], stats))
        if self.events or self.steps:
            await stream.send_message(self._next_records())
            if self.events or self.steps:
                self.wake.set()

    def _next_records(self) -> NodeUpdate:
        """Build the next message of records. All events are sent before the steps that may refer to them."""
        if self.events:
            events, self.events = self.events[:MAX_EVENTS], self.events[MAX_EVENTS:]
            return NodeUpdate(events=events)
        steps, self.steps = self.steps[:MAX_STEPS], self.steps[MAX_STEPS:]
        return NodeUpdate(steps=steps)


def _messages(deltas: list[TokenDelta]) -> Iterator[list[TokenDelta]]:
    """Divide deltas into messages that the router accepts. A delta with many prompt logprobs is divided, too."""
    message, num_logprobs = list[TokenDelta](), 0
    for delta in deltas:
        while len(delta.prompt_logprobs) > MAX_LOGPROBS_SENT:
            if message:  # the message may contain earlier logprobs of the same prompt
                yield message
                message, num_logprobs = [], 0
            yield [TokenDelta(delta.id, delta.position, prompt_logprobs=delta.prompt_logprobs[:MAX_LOGPROBS_SENT])]
            del delta.prompt_logprobs[:MAX_LOGPROBS_SENT]
        count = len(delta.logprobs) + len(delta.prompt_logprobs)
        if message and (len(message) == MAX_DELTAS or num_logprobs + count > MAX_LOGPROBS_SENT):
            yield message
            message, num_logprobs = [], 0
        message.append(delta)
        num_logprobs += count
    if message:
        yield message


class RouterSessions:
    """The open streams, one for each attached router.

    The node owns this object and uses it on the event loop only. A router has one stream at a time: a new stream
    replaces the old one. When a stream ends or is replaced, `on_router_lost` is called once, to abort the router's
    requests. When `send` closes a router's stream, the caller of `send` aborts the router's requests.
    """

    def __init__(
        self, recorder: StepRecorder, max_routers: int = MAX_ROUTERS, max_unread: int = MAX_UNREAD_DELTAS
    ) -> None:
        self.dropped_records = 0  # records dropped because a router was too slow, or because no router was attached
        self._recorder = recorder
        self._max_routers = max_routers
        self._max_unread = max_unread
        self._streams: dict[str, RouterStream] = {}
        self._writers = TaskGroup()
        self._load: tuple[object, ...] = ()  # load in the latest stats
        self._num_unchanged = 0  # number of stats since the load changed

    async def close(self) -> None:
        await self._writers.close()

    @property
    def num_routers(self) -> int:
        return len(self._streams)

    def is_attached(self, router: str) -> bool:
        return router in self._streams

    async def attach(
        self,
        stream: Any,
        stats: Callable[[], NodeStats],
        on_command: Callable[[str, RouterCommand], None],
        on_router_lost: Callable[[str], None],
    ) -> None:
        """Serve `ATTACH`: read commands and write updates until either side ends the stream."""
        hello: RouterCommand | None = await stream.recv_message()
        if hello is None or (len(self._streams) >= self._max_routers and hello.router not in self._streams):
            return
        router, session = (
            hello.router,
            RouterStream(hello.records, hello.has_requests, hello.has_seen_drain, stats=stats()),
        )
        session.wake.set()
        if router in self._streams:
            self._end(router)
            on_router_lost(router)
        self._streams[router] = session
        writer = self._writers.start(session.write(stream))
        try:
            async with session.read_timeout:
                async for command in stream:
                    session.wants_records = command.records
                    on_command(router, command)
                    if command.has_requests and not session.has_requests:
                        session.stats = stats()
                        session.wake.set()
                    session.has_requests, session.has_seen_drain = command.has_requests, command.has_seen_drain
        except TimeoutError:
            return  # `_end` has removed this stream
        finally:
            writer.cancel()
            if self._streams.get(router) is session:
                del self._streams[router]
                on_router_lost(router)

    def send(self, router: str, *deltas: TokenDelta) -> bool:
        """Queue deltas for a router, or drop the deltas if the router is not attached.

        Return False if the router had too many unread deltas and its stream was closed; the caller then aborts the
        router's requests.
        """
        session = self._streams.get(router)
        if session is None:
            return True
        session.deltas.extend(deltas)
        session.wake.set()
        if len(session.deltas) <= self._max_unread:
            return True
        log.error("router %s does not read its stream: the stream is closed and its requests are aborted", router)
        self._end(router)
        return False

    def publish_stats(self, stats: NodeStats) -> None:
        """Send the stats to every router. While the load is unchanged, skip most calls: see REPORT_EVERY."""
        load = _load(stats)
        self._num_unchanged = self._num_unchanged + 1 if load == self._load else 0
        self._load = load
        for session in self._streams.values():
            if self._num_unchanged % (REPORT_EVERY if session.has_requests else REPORT_EVERY_UNUSED) == 0:
                session.stats = stats
                session.wake.set()

    async def wait_until_ended(self, have_ended: Callable[[], bool], timeout_s: float, *, receives: bool) -> None:
        """Wait at most `timeout_s` seconds until `have_ended` returns True: the requests on this draining node have
        ended. Call this after the stats with the state "draining" have been published.

        If the node `receives` handoffs, also wait for the requests that routers have placed on it and that other nodes
        have not yet handed over.
        """
        streams, until_s = self._streams.values(), time.monotonic() + timeout_s
        if receives:
            await wait_until(lambda: all(each.has_seen_drain for each in streams), min(DRAIN_SEEN_S, timeout_s))
        await wait_until(
            lambda: have_ended() and not (receives and any(each.awaits_handoffs for each in streams)),
            until_s - time.monotonic(),
        )

    async def flush(self) -> None:
        """Wait until the queued deltas and stats have been passed to the transport, at most FLUSH_S seconds."""
        await wait_until(lambda: not any(each.deltas or each.stats for each in self._streams.values()), FLUSH_S)

    async def publish_records(self) -> None:
        """Send all records to every router that wants records, until cancelled. Each router ignores records of requests
        that are not its own."""
        while True:
            await asyncio.sleep(RECORDS_S)
            steps, events = self._recorder.take()
            if not steps and not events:
                continue
            if not self._streams:
                self.dropped_records += len(steps) + len(events)
            for session in self._streams.values():
                if session.wants_records:
                    self.dropped_records += session.record(steps, events)

    def _end(self, router: str) -> None:
        """Remove the router's stream and end its reader, which would otherwise wait for further commands."""
        session = self._streams.pop(router)
        session.read_timeout.reschedule(asyncio.get_running_loop().time())


def _load(stats: NodeStats) -> tuple[object, ...]:
    """Return the part of the stats whose changes are sent to routers at once.

    If the node is idle, this part includes counters, because requests may have begun and ended since the last report.
    """
    requests = stats.running, stats.waiting
    counts = () if any(requests) else (stats.steps, stats.handoffs, stats.handoffs_failed)
    blocks = stats.blocks_reserved, stats.blocks_quarantined
    return stats.state, stats.ledger_error, *requests, *counts, *blocks
