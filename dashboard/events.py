"""`/events`: the cluster's activity as server-sent events, which are formatted once for all subscribers.

The types are "status" (the document of `/v1/status`, once a second), "steps" (of one node, up to ten times a second),
"requests" (summaries of changed requests, up to five times a second), and "transfers". Ids are Unix milliseconds. A
client that reconnects with `Last-Event-ID` gets the events that it missed in the last half minute; up to a second of
them may be repeated. A client that reads slowly loses the oldest waiting events, and one that does not read is
disconnected.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from dashboard.history import RequestHistory, Transfer
from dashboard.step_ring import FIELDS, StepRing, StepRow
from router.http.asgi import ResponseWriter, while_connected
from router.http.responses import dump
from shared.clock import now_ns
from shared.errors import BatonError, RequestError, UnavailableError
from shared.lifecycle import TaskGroup

MAX_SUBSCRIBERS = 64
MAX_WAITING_BYTES = 1 << 20  # of one subscriber
TICK_S = 0.1
REQUEST_TICKS, STATUS_TICKS = 2, 10
MAX_CHANGED = 200  # requests per event; the others are in the next one
SILENT_S = 5.0  # a subscriber that does not read for this time is disconnected
MISSED_NS, TWICE_NS = 30 * 10**9, 10**9


class Subscriber:
    """The events that wait for one client. It gets the steps of `node`, or of all nodes if `node` is None."""

    def __init__(self, node: str | None) -> None:
        self.node = node
        self.wake = asyncio.Event()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0

    def put(self, message: bytes) -> None:
        self._waiting.append(message)
        self._num_bytes += len(message)
        while self._num_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            self._num_bytes -= len(self._waiting.popleft())
        self.wake.set()

    def take(self) -> bytes:
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        self.wake.clear()
        return data


class EventStream:
    """An ASGI app that streams events to its subscribers.

    It reads the history on a timer while it has subscribers, and costs nothing otherwise. The server closes it when it
    drains, because its streams do not end by themselves.
    """

    def __init__(
        self,
        history: RequestHistory,
        status: Callable[[], dict[str, Any]],
        *,
        max_subscribers: int = MAX_SUBSCRIBERS,
        tick_s: float = TICK_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._max_subscribers = max_subscribers
        self._tick_s = tick_s
        self._silent_s = silent_s
        self._history = history
        self._status = status
        self._subscribers: dict[Subscriber, None] = {}
        self._tasks = TaskGroup()
        self._ticks: asyncio.Task[None] | None = None
        self._closed = False
        self._seen: dict[str, tuple[StepRing, int]] = {}  # by node: its ring, and how many of its steps were sent
        self._num_transfers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ResponseWriter(scope, send)
        try:
            subscriber = self._subscribe(Request(scope))
        except BatonError as error:
            await reply.fail(error)
            return
        try:
            await while_connected(receive, self._serve(subscriber, reply))
        except TimeoutError:
            return  # do not send an error to a client that does not read
        finally:
            del self._subscribers[subscriber]
            if not self._subscribers and self._ticks is not None:
                self._ticks.cancel()
                self._ticks = None
                self._seen.clear()
                self._history.watch(False)

    def close(self) -> None:
        """End all streams, and reject new ones, so that the server can drain."""
        self._closed = True
        for subscriber in self._subscribers:
            subscriber.wake.set()

    def _subscribe(self, request: Request) -> Subscriber:
        node = request.query_params.get("node")
        if node is not None and self._history.ring(node) is None:
            raise RequestError(f"No node {node!r} has reported yet; see /v1/status.", "node", "node_not_found", 404)
        since_ns = _since(request.headers.get("last-event-id"))
        if self._closed:
            raise UnavailableError("Server is shutting down.")
        if len(self._subscribers) >= self._max_subscribers:
            raise UnavailableError(f"Too many subscribers: the limit is {self._max_subscribers}.", retry_after_s=5.0)
        subscriber = Subscriber(node)
        if self._ticks is None:
            self._skip_to_now()
            self._ticks = self._tasks.start(self._tick())
        self._subscribers[subscriber] = None
        subscriber.put(b"retry: 1000\n\n")
        subscriber.put(_message("status", self._status()))
        if since_ns is not None:
            for _, message in self._missed(since_ns, node):
                subscriber.put(message)
        return subscriber

    async def _serve(self, subscriber: Subscriber, reply: ResponseWriter) -> None:
        while not self._closed:
            data = subscriber.take()
            if data:
                async with asyncio.timeout(self._silent_s):
                    await reply.events(data)
            await subscriber.wake.wait()
        await reply.end()

    # ---- messages --------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(self._tick_s)
            tick += 1
            for node, message in self._messages(tick):
                for subscriber in self._subscribers:
                    if node is None or subscriber.node in {None, node}:
                        subscriber.put(message)

    def _messages(self, tick: int) -> Iterator[tuple[str | None, bytes]]:
        """Yield the messages since the last tick, each with its node if it belongs to one."""
        before, self._seen = self._seen, {}
        for node in self._history.nodes():
            ring = self._history.ring(node)
            if ring is None:
                continue
            known, num_seen = before.get(node, (ring, 0))
            self._seen[node] = (ring, ring.num_ever)
            rows = list(ring.rows(num_seen if known is ring else 0))
            if rows:
                yield node, _steps(node, ring, rows)
        self._num_transfers, pushes = self._history.transfers_after(self._num_transfers)
        if pushes:
            yield None, _transfers(pushes)
        if tick % REQUEST_TICKS == 0 and (changed := self._history.changed(MAX_CHANGED)):
            yield None, _message("requests", {"requests": changed})
        if tick % STATUS_TICKS == 0:
            yield None, _message("status", self._status())

    def _skip_to_now(self) -> None:
        """Skip what happened before the first subscriber."""
        self._history.watch(True)
        self._num_transfers, _ = self._history.transfers_after(self._num_transfers)
        for node in self._history.nodes():
            if (ring := self._history.ring(node)) is not None:
                self._seen[node] = (ring, ring.num_ever)

    def _missed(self, since_ns: int, only: str | None) -> Iterator[tuple[str | None, bytes]]:
        for node in self._history.nodes() if only is None else [only]:
            ring, rows = self._history.ring(node), self._history.steps(node, since_ns)
            if ring is not None and rows:
                yield node, _steps(node, ring, rows)
        if pushes := self._history.transfers(since_ns):
            yield None, _transfers(pushes)
        yield None, _message("requests", {"requests": list(self._history.latest_requests(MAX_CHANGED))})


def _since(last_event_id: str | None) -> int | None:
    """Return the time from which a reconnected client continues, or None for a new client or another server's id."""
    if last_event_id is None or not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 16):
        return None
    return max(int(last_event_id) * 10**6 - TWICE_NS, now_ns() - MISSED_NS)


def _steps(node: str, ring: StepRing, rows: list[StepRow]) -> bytes:
    return _message("steps", {"node": node, "fields": FIELDS, "steps": [ring.shown(row) for row in rows]})


def _transfers(pushes: list[Transfer]) -> bytes:
    return _message("transfers", {"transfers": [shown(push) for push in pushes]})


def shown(push: Transfer) -> dict[str, object]:
    mark = push.event
    return {
        "request": push.request,
        "from": mark.node,
        "to": push.attempt.decode,
        "start_ms": mark.start_ns / 1e6,
        "end_ms": mark.at_ns / 1e6,
        "bytes": mark.bytes,
        "channel": mark.channel,
        "exposed_ms": push.exposed_ns / 1e6,
    }


def _message(kind: str, value: object) -> bytes:
    return f"id: {now_ns() // 10**6}\nevent: {kind}\ndata: {dump(value)}\n\n".encode()
