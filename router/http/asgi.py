"""ASGI helpers that read bodies under limits, write responses, and detect clients that disconnect."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.http.responses import dump, event
from shared.errors import RequestError, UnavailableError, status_and_message
from shared.logs import about, fields
from shared.trace_context import traceparent_of

access = logging.getLogger("baton.access")
log = logging.getLogger(__name__)

LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:[eE][0-9])?")
MAX_TIMEOUT_S = 86_400.0
STREAM_TYPE = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"content-type": STREAM_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}
CLIENT_GONE = 499  # nginx's status for a client that disconnected; used only in the access log
# The types of errors without their suffix `_error`, keyed by HTTP status. `described` has the defaults.
KINDS = {401: "authentication", 403: "permission", 404: "not_found", 429: "rate_limit"}
KINDS |= {503: "service_unavailable", 504: "timeout"}
ANTHROPIC = "/v1/messages"  # the path of Anthropic's API, which has other names for some types of errors
ANTHROPIC_KINDS = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
SCOPE_KEY = "baton.identity"  # the key of the Identity in the ASGI scope


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a request's API key. An admin may view and change the cluster. `tenant` is "" if no keys are
    set."""

    tenant: str
    is_admin: bool = False

    def allowed_priority(self, wanted: int) -> int:
        """Return the priority of a request that asks for `wanted`. Only an admin may give a number below 0, which
        raises the priority."""
        return wanted if self.is_admin else max(0, wanted)


ANONYMOUS = Identity("", is_admin=True)


def label_of(scope: Scope) -> str:
    """Return the client's X-Request-Id if it is well-formed, or a random id. The id is only sent back and logged."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if LABEL.fullmatch(given) else token_hex(16)


def deadline_of(scope: Scope, arrived: float, longest_s: float) -> float | None:
    """Return a request's deadline on the clock of `arrived`, or None if the request has no deadline.

    The header `x-request-timeout` sets a timeout in seconds. `longest_s` is both the maximum and the default of this
    timeout. If it is 0, there is no default, and the maximum is a day. Raises RequestError if the header is invalid.
    """
    given = Headers(scope=scope).getlist("x-request-timeout")
    if not given:
        return arrived + longest_s if longest_s else None
    seconds = float(given[0]) if len(given) == 1 and SECONDS.fullmatch(given[0]) else 0.0
    if not seconds > 0:
        raise RequestError("`x-request-timeout` must be a number of seconds above 0, given once.", "x-request-timeout")
    return arrived + min(seconds, longest_s or MAX_TIMEOUT_S)


def check_headers(headers: Headers, limit: int) -> None:
    """Raise RequestError if the headers declare a body that is not plain JSON or has more than `limit` bytes."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type must be application/json.", status=415)
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError("Content-Encoding is not supported.", status=415)
    if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise RequestError("The only supported Transfer-Encoding is chunked.", status=415)
    length = headers.get("content-length", "0")
    _check_size(int(length[:19]) if length.isascii() and length.isdigit() else 0, limit)


def _check_size(num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise RequestError(f"The body is larger than {limit} bytes.", code="body_too_large", status=413)


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """Return the body. Raises ClientDisconnect, or RequestError (408: late, 413: over `limit` bytes, 415: bad type)."""
    check_headers(Headers(scope=scope), limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in Request(scope, receive).stream():
                body += piece
                _check_size(len(body), limit)
    except TimeoutError:
        raise RequestError("The body did not arrive in time.", status=408) from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it as soon as the client disconnects."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def described(error: Exception, label: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the status, the body (in OpenAI's format) and the headers of the response to an error. The details of an
    unexpected error are logged under `label`, and are not sent to the client."""
    headers: dict[str, str] = {}
    param = code = None
    match error:
        case RequestError():
            status, message, param, code = error.status, error.message, error.param, error.code
            if status in (408, 413, 415):  # the rest of the body may be unread
                headers["connection"] = "close"
        case UnavailableError():
            status, message, code = error.status, error.message, error.code
            if status != 504:  # a request that missed its own deadline may be repeated at once
                headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        case HTTPException():
            status, message = error.status_code, str(error.detail)
            headers |= error.headers or {}
        case _:
            log.error("request %s failed with an unexpected error", label, exc_info=error)
            status, message = status_and_message(error)
    kind = KINDS.get(status, "invalid_request" if status < 500 else "server") + "_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers


def error_body(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return an error in the format of the API that the path belongs to: OpenAI's or Anthropic's."""
    if not path.startswith(ANTHROPIC):
        return value
    kind = ANTHROPIC_KINDS.get(value["error"]["type"], value["error"]["type"])
    more = {"details": {"error_code": "thread_unsupported_request"}} if value["error"]["param"] == "thread" else {}
    return {"type": "error", **value, "error": value["error"] | {"type": kind} | more}


def to_response(request: Request, error: Exception) -> Response:
    """Return an error as a response. This is the app's exception handler."""
    label = label_of(request.scope)
    status, value, headers = described(error, label)
    return JSONResponse(error_body(request.url.path, value), status, headers | {"x-request-id": label})


class ResponseWriter:
    """Sends one response: either a JSON object or a stream of events.

    The task that handles the request creates the writer on the event loop. The writer also sets the request id that the
    task's log lines show, and writes the request's line in the access log.
    """

    def __init__(self, scope: Scope, send: Send, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called when the whole response is sent, before the client's next request is handled."""
        self.scope = scope
        self._send, self._on_end = send, on_end
        self._label = self._name = label_of(scope)
        self.traceparent = traceparent_of(Headers(scope=scope).getlist("traceparent"))
        self.arrived = time.monotonic()
        self.deadline: float | None = None  # on the monotonic clock; set by the endpoint
        self.log_fields: Mapping[str, object] = {}  # more fields for the access log
        self._status = CLIENT_GONE
        self._outcome = "client_gone"
        self._streams = self._is_complete = False
        about(self._label, self.traceparent)

    @property
    def identity(self) -> Identity:
        """The owner of the request's key. Raises KeyError if the request was not authenticated."""
        identity: Identity = self.scope[SCOPE_KEY]
        return identity

    def name(self, name: str) -> None:
        """Set the id that clients and the request history use for this request."""
        self._name = name
        about(name, self.traceparent)

    def log(self) -> None:
        """Write the request's line in the access log. Called once, when the request ends."""
        if not access.isEnabledFor(logging.INFO):
            return
        duration_ms = round(1000 * (time.monotonic() - self.arrived), 1)
        seen: dict[str, object] = {"request": self._name, "path": self.scope["path"], "status": self._status}
        seen |= {"tenant": self.identity.tenant} if self.identity.tenant else {}
        seen |= {"outcome": self._outcome, "duration_ms": duration_ms, **self.log_fields}
        access.info(" ".join(f"{name}={value}" for name, value in seen.items()), extra=fields(**seen))

    async def json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self.encoded_json(dump(value).encode(), status, headers)

    async def encoded_json(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        own = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, own | dict(headers or {}))
        await self.end(body)

    async def events(self, data: bytes) -> None:
        """Send a part of a stream. The status 200 is sent with the first part. A request that fails earlier can
        therefore have an error status."""
        if not self._streams:
            self._streams = True
            await self._start(200, STREAM_HEADERS)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._is_complete, self._outcome = True, "answered"
        self._on_end()

    async def fail(self, error: Exception) -> None:
        """Send an error as the response or, if a stream has started, as the stream's last event."""
        status, value, headers = described(error, self._label)
        value = error_body(self.scope["path"], value)
        if self._is_complete:
            return
        if not self._streams:
            await self.json(value, status, headers)
        else:
            name = b"event: error\n" if self.scope["path"].startswith(ANTHROPIC) else b""
            await self.events(name + event(value))
            await self.end()
        self._outcome = type(error).__name__

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        named = {**headers, "x-request-id": self._label, "traceparent": self.traceparent}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
