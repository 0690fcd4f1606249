"""The routes of the history: requests and their timelines, steps, events, the Chrome trace, and the page."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from dashboard.bottleneck import bottleneck
from dashboard.chrome_trace import trace_events
from dashboard.events import EventStream
from dashboard.history import MAX_REQUESTS, NodeActivity, RequestHistory
from dashboard.step_ring import CAPACITY, FIELDS, StepRing
from router.http.responses import dump
from shared.clock import now_ns
from shared.errors import RequestError

ROWS_AT_ONCE = 200  # rows to format at a time
JSON = "application/json; charset=utf-8"
MAX_LAST_S = 3600.0
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)?")
SECONDS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0}

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
    "cache-control": "no-cache",  # browsers revalidate by ETag, so that an upgrade shows at once
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
    "/trace": {"last": {"type": "string", "pattern": "^[1-9][0-9]{0,2}(ms|s)?$"}},
}


class Dashboard(RequestHistory):
    """The history with its routes and its part of `/v1/status`: the observer of a router that has the dashboard on."""

    queries = QUERIES

    def __init__(self) -> None:
        super().__init__()
        self._event_streams: list[EventStream] = []

    def routes(self, status: Callable[[], dict[str, Any]]) -> list[BaseRoute]:
        """Return all routes of the history and its page."""
        stream = EventStream(self, status)
        self._event_streams.append(stream)
        return history_routes(self, stream)

    def extend_status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Add each node's activity in the last seconds, and a sentence about the cluster's bottleneck."""
        nodes = [
            node | {"clock_offset_ms": self.offset_ms(node["id"])} | _activity(self.activity(node["id"]))
            for node in status["nodes"]
        ]
        whole = status | {"nodes": nodes}
        return whole | {"summary": bottleneck(whole)}

    def close(self) -> None:
        for stream in self._event_streams:
            stream.close()


def _activity(activity: NodeActivity | None) -> dict[str, object]:
    """Return a node's activity for `/v1/status`, which is 0 before its first step."""
    last = None if activity is None else activity.last
    prefills, prompts, decodes = (last.num_prefills, last.prefill_tokens, last.num_decodes) if last else (0, 0, 0)
    steps_per_s, tokens_per_s, busy = activity[:3] if activity is not None else (0.0, 0.0, 0.0)
    return {
        "steps_per_s": round(steps_per_s, 1),
        "tokens_per_s": round(tokens_per_s, 1),
        "busy": round(busy, 6),
        "batch": {"tokens": prompts + decodes, "prefills": prefills, "decodes": decodes},
        "budget": last.budget if last else 0,
        "budget_reason": activity.reason if activity is not None else "",
    }


def history_routes(history: RequestHistory, events: EventStream, rows_at_once: int = ROWS_AT_ONCE) -> list[BaseRoute]:
    """Return all routes of the history and its page."""
    handlers = HistoryHandlers(history, rows_at_once)
    return [
        Route("/v1/requests", handlers.requests),
        Route("/v1/requests/{id}/timeline", handlers.timeline),
        Route("/v1/steps", handlers.steps),
        Route("/v1/steps/{node}/{number}", handlers.step),
        Route("/events", events, methods=["GET"]),
        Route("/trace", handlers.trace),
        *page_routes(),
    ]


class HistoryHandlers:
    """The handlers of the routes that read the history. They run on the event loop."""

    def __init__(self, history: RequestHistory, rows_at_once: int) -> None:
        self._history = history
        self._rows_at_once = rows_at_once

    async def requests(self, request: Request) -> Response:
        limit = _number(request, "limit", 100, MAX_REQUESTS)
        return self._listing({}, "requests", self._history.latest_requests(limit), limit)

    async def timeline(self, request: Request) -> Response:
        name = request.path_params["id"]
        found = self._history.request(name)
        if found is None:
            raise RequestError(
                f"No request {name[:80]!r} is among the latest {MAX_REQUESTS}.", "id", "request_not_found", 404
            )
        return _answer(found)

    async def steps(self, request: Request) -> Response:
        """Return the oldest `limit` steps since `since_ms`, or the latest without it."""
        node = request.query_params.get("node")
        if node is None:
            raise RequestError("`node` is missing; /v1/status lists the nodes.", "node")
        ring, limit = self._ring(node), _number(request, "limit", 1000, CAPACITY)
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
        ring = self._ring(node)
        row = ring.numbered(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else None
        if row is None:
            raise RequestError(
                f"No step {text[:40]!r} of node {node} is among its latest {CAPACITY}.", "number", "step_not_found", 404
            )
        members = [
            {
                "id": self._history.client_id(node, member.serial),
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
        answer = self._listing(head, "traceEvents", trace_events(self._history, since_ns), CAPACITY)
        answer.headers["content-disposition"] = 'attachment; filename="baton-trace.json"'
        return answer

    def _ring(self, node: str) -> StepRing:
        ring = self._history.ring(node)
        if ring is None:
            raise RequestError(
                f"No node {node[:80]!r} has reported yet; see /v1/status.", "node", "node_not_found", 404
            )
        return ring

    def _listing(self, head: Mapping[str, object], name: str, rows: Iterable[object], size: int) -> Response:
        """Return `head` and, under `name`, the rows. More than `rows_at_once` rows are formatted in parts on another
        thread. Formatting all of them at once would hold the interpreter lock, and delay every client's stream."""
        if size <= self._rows_at_once:
            return _answer({**head, name: list(rows)})
        return StreamingResponse(_pieces(head, name, iter(rows), self._rows_at_once), media_type=JSON)


def _answer(value: object) -> Response:
    return Response(dump(value), media_type=JSON)


def _pieces(head: Mapping[str, object], name: str, rows: Iterator[object], rows_at_once: int) -> Iterator[str]:
    yield dump({**head, name: []})[:-2]
    comma = ""
    while some := list(islice(rows, rows_at_once)):
        yield comma + dump(some)[1:-1]
        comma = ","
    yield "]}"


def _number(request: Request, name: str, otherwise: int, most: int) -> int:
    text = request.query_params.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"`{name}` must be an integer from 1 to {most}.", name)
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
    """Return the routes of the page's files."""
    files = PageFiles(directory=FOLDER)

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    return [Route("/", index), Mount("/page", files)]


class PageFiles(StaticFiles):
    """The page's files, with headers that allow it nothing but its own scripts and this router's API."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
