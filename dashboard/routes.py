"""The routes of the history: requests and their timelines, steps, events, the Chrome trace, and the page."""

import asyncio
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from dashboard.bottleneck import bottleneck
from dashboard.chrome_trace import trace_events
from dashboard.history import MAX_REQUESTS, RequestHistory
from dashboard.simulate import SimulateHandler
from dashboard.step_ring import CAPACITY, FIELDS, StepRing
from router.http.asgi import ResponseWriter, while_connected
from router.http.responses import dump
from shared.clock import now_ns
from shared.errors import RequestError, UnavailableError

ROWS_AT_ONCE = 200  # maximum number of rows that are formatted at once
JSON = "application/json; charset=utf-8"
MAX_LAST_S = 3600.0
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)?")
SECONDS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0}

# Limits and intervals of /events.
MAX_SUBSCRIBERS = 64
TICK_S = 0.1
MAX_RECORDED = 64  # with more nodes, a node sends records only if a client has recently read that node's steps
ASKED_NS = 60 * 10**9  # a client that read the steps within this time has read them recently
REQUEST_TICKS, STATUS_TICKS = 2, 10
MAX_CHANGED = 200  # maximum requests per event; further requests follow in the next event
MAX_STEPS = 2000  # maximum steps per event; if there are more, the oldest are omitted
SILENT_S = 5.0  # a subscriber that does not read for this time is disconnected

FOLDER = Path(__file__).parent / "page"
# uPlot sets styles through the DOM, which `style-src 'self'` allows; nothing needs 'unsafe-inline'.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate by ETag, so that an upgrade takes effect at once
}
QUERIES: dict[str, dict[str, Any]] = {  # the query parameters of each route with a JSON answer, for /openapi.json
    "/v1/requests": {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_REQUESTS}},
    "/v1/requests/{id}/timeline": {},
    "/v1/steps": {
        "node": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": CAPACITY},
        "since_ms": {"type": "number", "minimum": 0, "maximum": 1e13},
    },
    "/v1/steps/{node}/{number}": {},
    "/trace": {"last": {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?(ms|s|m)?$"}},
}


class EventStream:
    """`/events`, an ASGI app: the cluster's activity as server-sent events.

    The events are "status" (the document of `/v1/status`, once a second), "steps" (of one node, up to ten times a
    second), and "requests" (summaries of changed requests, up to five times a second). A client that reads slowly
    misses the oldest steps, and a client that does not read is disconnected.

    Each client has a task that reads the history on a timer. Without clients, the app does no work. A draining server
    closes this app, because the streams do not end by themselves.
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
        self.num_subscribers = 0
        self._closed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ResponseWriter(scope, send)
        if self._closed.is_set():
            await reply.fail(UnavailableError("The server is shutting down."))
            return
        if self.num_subscribers >= self._max_subscribers:
            text = f"Too many subscribers: the limit is {self._max_subscribers}."
            await reply.fail(UnavailableError(text, retry_after_s=5.0))
            return
        self.num_subscribers += 1
        try:
            await while_connected(receive, self._serve(reply))
        except TimeoutError:
            return  # do not send an error to a client that does not read
        finally:
            self.num_subscribers -= 1

    def close(self) -> None:
        """End all streams, and reject new ones, so that the server can drain."""
        self._closed.set()

    async def _serve(self, reply: ResponseWriter) -> None:
        for data in self._messages():
            if data:
                async with asyncio.timeout(self._silent_s):
                    await reply.events(data)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._closed.wait()
            if self._closed.is_set():
                break
        await reply.end()

    def _messages(self) -> Iterator[bytes]:
        """Yield the first status and then, at each tick, the messages since the previous tick."""
        sent = {ring: ring.num_ever for ring in self._history.rings().values()}  # the number of steps sent, by ring
        version = self._history.version
        yield b"retry: 1000\n\n" + _message("status", self._status())
        for tick in itertools.count(1):
            messages, rings = [], self._history.rings()
            for node, ring in rings.items():
                first = max(sent.get(ring, 0), ring.num_ever - MAX_STEPS)
                if rows := [ring.shown(row) for row in ring.rows(first)]:
                    messages.append(_message("steps", {"node": node, "fields": FIELDS, "steps": rows}))
            sent = {ring: ring.num_ever for ring in rings.values()}
            if tick % REQUEST_TICKS == 0:
                version, changed = self._history.changed(version, MAX_CHANGED)
                messages += [_message("requests", {"requests": changed})] if changed else []
            if tick % STATUS_TICKS == 0:
                messages.append(_message("status", self._status()))
            yield b"".join(messages)


def _message(kind: str, value: object) -> bytes:
    return f"event: {kind}\ndata: {dump(value)}\n\n".encode()


def _ring(history: RequestHistory, node: str) -> StepRing:
    ring = history.ring(node)
    if ring is None:
        raise RequestError(f"No node {node[:80]!r} has reported yet; see /v1/status.", "node", "node_not_found", 404)
    return ring


def _answer(value: object) -> Response:
    return Response(dump(value), media_type=JSON)


def _pieces(head: Mapping[str, object], name: str, rows: Iterator[object], rows_at_once: int) -> Iterator[str]:
    yield dump({**head, name: []})[:-2]
    comma = ""
    while some := list(islice(rows, rows_at_once)):
        yield comma + dump(some)[1:-1]
        comma = ","
    yield "]}"


def _number(request: Request, name: str, default: int, limit: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= limit):
        raise RequestError(f"`{name}` must be an integer from 1 to {limit}.", name)
    return int(text)


def _float(request: Request, name: str) -> float:
    try:
        value = float(request.query_params[name])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e14:
        raise RequestError(f"`{name}` must be a Unix time in milliseconds.", name)
    return value


def page_routes() -> list[BaseRoute]:
    files = PageFiles(directory=FOLDER)

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def simulator(request: Request) -> Response:
        return await files.get_response("simulator.html", request.scope)

    return [Route("/", index), Route("/simulator", simulator), Mount("/page", files)]


class PageFiles(StaticFiles):
    """The page's files, with headers that restrict the page to its own scripts and this router's API."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


class Dashboard(RequestHistory):
    """The observer of a router whose dashboard is enabled: the history, its routes and its part of `/v1/status`.

    The handlers of the routes run on the event loop. Answers of more than `rows_at_once` rows are formatted on another
    thread.
    """

    queries = QUERIES

    def __init__(self, now: Callable[[], int] = now_ns, rows_at_once: int = ROWS_AT_ONCE) -> None:
        super().__init__(now)
        self._rows_at_once = rows_at_once
        self._event_streams: list[EventStream] = []
        # When a client last read the steps of each node. The node that was read most recently comes last.
        self._asked_ns: dict[str, int] = {}

    def routes(self, status: Callable[[], dict[str, Any]]) -> list[BaseRoute]:
        stream = EventStream(self, status)
        self._event_streams.append(stream)
        return [
            Route("/v1/requests", self.requests),
            Route("/v1/requests/{id}/timeline", self.timeline),
            Route("/v1/steps", self.steps),
            Route("/v1/steps/{node}/{number}", self.step),
            Route("/events", stream, methods=["GET"]),
            Route("/trace", self.trace),
            Route("/v1/simulate", SimulateHandler().__call__, methods=["POST"]),
            *page_routes(),
        ]

    def extend_status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Add each node's activity in the last seconds, and a sentence about the cluster's bottleneck."""
        whole = status | {"nodes": [node | self.activity(node["id"]) for node in status["nodes"]]}
        return whole | {"summary": bottleneck(whole)}

    def close(self) -> None:
        for stream in self._event_streams:
            stream.close()

    # ---- records of many nodes ----------------------------------------------------------------------------------

    def wants_records(self, node: str, num_nodes: int) -> bool:
        """Return True if there are few nodes. If there are many, return True only for nodes whose steps a client has
        read recently."""
        if num_nodes <= MAX_RECORDED:
            return True
        asked_ns = self._asked_ns.get(node)
        if asked_ns is None:
            return False
        return self._now() - asked_ns < ASKED_NS or any(stream.num_subscribers for stream in self._event_streams)

    def _ask(self, node: str) -> None:
        self._asked_ns.pop(node, None)
        self._asked_ns[node] = self._now()
        if len(self._asked_ns) > MAX_RECORDED:
            del self._asked_ns[next(iter(self._asked_ns))]

    # ---- handlers ---------------------------------------------------------------------------------------------------

    async def requests(self, request: Request) -> Response:
        limit = _number(request, "limit", 100, MAX_REQUESTS)
        return self._listing({}, "requests", self.latest_requests(limit), limit)

    async def timeline(self, request: Request) -> Response:
        name = request.path_params["id"]
        found = self.request(name)
        if found is None:
            raise RequestError(
                f"No request {name[:80]!r} is among the latest {MAX_REQUESTS}.", "id", "request_not_found", 404
            )
        return _answer(found)

    async def steps(self, request: Request) -> Response:
        """Return the first `limit` steps since `since_ms`; without `since_ms`, return the latest `limit` steps."""
        node = request.query_params.get("node")
        if node is None:
            raise RequestError("`node` is missing; /v1/status lists the nodes.", "node")
        self._ask(node)
        ring, limit = _ring(self, node), _number(request, "limit", 1000, CAPACITY)
        if "since_ms" in request.query_params:
            first = ring.place(round(_float(request, "since_ms") * 1e6))
        else:
            first = max(0, ring.num_ever - limit)
        last = min(ring.num_ever, first + limit)
        shown = (ring.shown(row) for row in ring.rows(first, last))
        return self._listing({"node": node, "fields": FIELDS}, "steps", shown, last - first)

    async def step(self, request: Request) -> Response:
        """Return one step and the requests in it."""
        node, text = request.path_params["node"], request.path_params["number"]
        ring = _ring(self, node)
        row = ring.numbered(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else None
        if row is None:
            raise RequestError(
                f"Node {node} has no step {text[:40]!r} among its latest {CAPACITY}.", "number", "step_not_found", 404
            )
        members = [
            {
                "id": self.client_id(node, member.serial),
                "start": member.start,
                "count": member.num_tokens,
                "kind": "chunk" if member.is_chunk else "decode",
            }
            for member in ring.members(row.number) or []
        ]
        values = dict(zip(FIELDS, ring.shown(row), strict=True))
        return _answer({"node": node, **values, "members": members})

    async def trace(self, request: Request) -> Response:
        """Return the history in Chrome's trace format, as a file."""
        text = request.query_params.get("last", "30s")
        match = DURATION.fullmatch(text)
        last_s = float(match[1]) * SECONDS[match[2]] if match is not None else 0.0
        if not 0 < last_s <= MAX_LAST_S:
            raise RequestError("`last` must be a duration of up to one hour, such as 30s, 500ms or 2m.", "last")
        since_ns = now_ns() - round(last_s * 1e9)
        head = {"displayTimeUnit": "ms", "otherData": {"began_unix_ms": since_ns / 1e6}}
        answer = self._listing(head, "traceEvents", trace_events(self, since_ns), CAPACITY)
        answer.headers["content-disposition"] = 'attachment; filename="baton-trace.json"'
        return answer

    def _listing(self, head: Mapping[str, object], name: str, rows: Iterable[object], size: int) -> Response:
        """Return `head` with the rows added under `name`. More than `rows_at_once` rows are formatted in parts on
        another thread, because formatting them at once would hold the interpreter lock and delay all streams."""
        if size <= self._rows_at_once:
            return _answer({**head, name: list(rows)})
        return StreamingResponse(_pieces(head, name, iter(rows), self._rows_at_once), media_type=JSON)
