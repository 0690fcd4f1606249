"""The routes that show what the cluster did: requests and their timelines, steps, the trace."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router.history.chrome_trace import trace_events
from router.history.events import EventStream
from router.history.history import MAX_REQUESTS, RequestHistory
from router.history.step_ring import CAPACITY, FIELDS, StepRing
from router.http.responses import dump
from shared.clock import now_ns
from shared.errors import RequestError

AT_ONCE = 200  # rows
JSON = "application/json; charset=utf-8"
MAX_LAST_S = 3600.0
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)?")
SECONDS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0}


def observe_routes(records: RequestHistory, feed: EventStream) -> list[Route]:
    seen = HistoryRoutes(records)
    return [
        Route("/v1/requests", seen.requests),
        Route("/v1/requests/{id}/timeline", seen.timeline),
        Route("/v1/steps", seen.steps),
        Route("/v1/steps/{node}/{number}", seen.step),
        Route("/events", feed, methods=["GET"]),
        Route("/trace", seen.trace),
    ]


class HistoryRoutes:
    def __init__(self, records: RequestHistory) -> None:
        self._records = records

    async def requests(self, request: Request) -> Response:
        limit = _number(request, "limit", 100, MAX_REQUESTS)
        return _listing({}, "requests", self._records.latest_requests(limit), limit)

    async def timeline(self, request: Request) -> Response:
        name = request.path_params["id"]
        found = self._records.request(name)
        if found is None:
            raise RequestError(
                f"No request {name[:80]!r} is among the latest {MAX_REQUESTS}.", "id", "request_not_found", 404
            )
        return _answer(found)

    async def steps(self, request: Request) -> Response:
        """The oldest `limit` since `since_ms`; without it, the latest."""
        node = request.query_params.get("node")
        if node is None:
            raise RequestError("`node` is missing: name one of those in /v1/status.", "node")
        ring, limit = self._ring(node), _number(request, "limit", 1000, CAPACITY)
        if "since_ms" in request.query_params:
            first = ring.place(round(_float(request, "since_ms") * 1e6))
        else:
            first = max(0, ring.num_ever - limit)
        last = min(ring.num_ever, first + limit)
        shown = (ring.shown(row) for row in ring.rows(first, last))
        return _listing({"node": node, "fields": FIELDS}, "steps", shown, last - first)

    async def step(self, request: Request) -> Response:
        """One step, and whose tokens it computed."""
        node, text = request.path_params["node"], request.path_params["number"]
        ring = self._ring(node)
        row = ring.numbered(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else None
        if row is None:
            raise RequestError(
                f"No step {text[:40]!r} of node {node} is among its latest {CAPACITY}.", "number", "step_not_found", 404
            )
        members = [
            {
                "id": self._records.client_id(node, member.serial),
                "start": member.start,
                "count": member.num_tokens,
                "kind": "chunk" if member.is_chunk else "decode",
            }
            for member in ring.members(row.number) or []
        ]
        values = dict(zip(FIELDS, ring.shown(row), strict=True))
        return _answer({"node": node, **values, "members": members})

    async def trace(self, request: Request) -> Response:
        """Chrome's trace format, as a file."""
        text = request.query_params.get("last", "30s")
        match = DURATION.fullmatch(text)
        last_s = float(match[1]) * SECONDS[match[2]] if match is not None else 0.0
        if not 0 < last_s <= MAX_LAST_S:
            raise RequestError("`last` must be a time up to one hour, such as 30s, 500ms or 2m.", "last")
        since_ns = now_ns() - round(last_s * 1e9)
        head = {"displayTimeUnit": "ms", "otherData": {"began_unix_ms": since_ns / 1e6}}
        answer = _listing(head, "traceEvents", trace_events(self._records, since_ns), CAPACITY)
        answer.headers["content-disposition"] = 'attachment; filename="baton-trace.json"'
        return answer

    def _ring(self, node: str) -> StepRing:
        ring = self._records.ring(node)
        if ring is None:
            raise RequestError(
                f"No node {node[:80]!r} has told anything yet; see /v1/status.", "node", "node_not_found", 404
            )
        return ring


def _answer(value: object) -> Response:
    return Response(dump(value), media_type=JSON)


def _listing(head: Mapping[str, object], name: str, rows: Iterable[object], size: int) -> Response:
    """`head` and, under `name`, the rows. More than a few are written on another thread, some at a time: a whole one
    would hold the interpreter, and with it every client's stream, until it is written."""
    if size <= AT_ONCE:
        return _answer({**head, name: list(rows)})
    return StreamingResponse(_pieces(head, name, iter(rows)), media_type=JSON)


def _pieces(head: Mapping[str, object], name: str, rows: Iterator[object]) -> Iterator[str]:
    yield dump({**head, name: []})[:-2]
    comma = ""
    while some := list(islice(rows, AT_ONCE)):
        yield comma + dump(some)[1:-1]
        comma = ","
    yield "]}"


def _number(request: Request, name: str, otherwise: int, most: int) -> int:
    text = request.query_params.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"`{name}` must be a whole number from 1 to {most}.", name)
    return int(text)


def _float(request: Request, name: str) -> float:
    try:
        value = float(request.query_params[name])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e14:
        raise RequestError(f"`{name}` must be a Unix time in milliseconds.", name)
    return value
