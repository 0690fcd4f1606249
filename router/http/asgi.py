"""ASGI helpers: they read bodies under limits, write responses, and notice clients that disconnect."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from router.http.keys import Identity, identity_of
from router.http.responses import dump, event
from shared.errors import RequestError, UnavailableError
from shared.logs import about, fields
from shared.trace_context import traceparent_of

access = logging.getLogger("baton.access")
log = logging.getLogger(__name__)

LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:[eE][0-9])?")
MAX_TIMEOUT_S = 86_400.0
CLIENT_GONE = 499  # nginx's status for a client that disconnected, in the access log only
KINDS = {  # the `type` of an error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ClientDisconnected(Exception):
    """The client has disconnected."""


def label_of(scope: Scope, fallback: str) -> str:
    """Return the client's X-Request-Id if it is well-formed, else `fallback`. It is only echoed and logged."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if LABEL.fullmatch(given) else fallback


def deadline_of(scope: Scope, arrived: float, longest_s: float) -> float | None:
    """Return the deadline of a request on the clock of `arrived`, or None if it has none.

    The header `x-request-timeout` sets a timeout in seconds. `longest_s` is the maximum and the default; if it is 0,
    there is no default and the maximum is a day. Raises RequestError if the header is invalid.
    """
    given = Headers(scope=scope).getlist("x-request-timeout")
    if not given:
        return arrived + longest_s if longest_s else None
    seconds = float(given[0]) if len(given) == 1 and SECONDS.fullmatch(given[0]) else 0.0
    if not seconds > 0:
        raise RequestError("`x-request-timeout` must be a number of seconds above 0, given once.", "x-request-timeout")
    return arrived + min(seconds, longest_s or MAX_TIMEOUT_S)


def check_headers(headers: Headers, limit: int) -> None:
    """Raise RequestError if the headers announce something other than plain JSON, or more than `limit` bytes."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type must be application/json.", status=415)
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError("Content-Encoding is not supported.", status=415)
    if headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise RequestError("The only supported Transfer-Encoding is chunked.", status=415)
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:19]) > limit:
        raise too_large(limit)


def too_large(limit: int) -> RequestError:
    return RequestError(f"The body is larger than {limit} bytes.", code="body_too_large", status=413)


async def read_body(scope: Scope, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """Return the body if it has at most `limit` bytes. Raises RequestError (408, 413, 415) or ClientDisconnected."""
    check_headers(Headers(scope=scope), limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestError("The body did not arrive in time.", status=408) from None


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
    """Return an error's status, error object in OpenAI's format, and headers. The details of an unexpected error are
    logged under `label`, and are not sent to the client."""
    headers: dict[str, str] = {}
    param = code = None
    match error:
        case RequestError():
            status, message, param, code = error.status, error.message, error.param, error.code
            if status in (408, 413, 415):  # the rest of the body was not read
                headers["connection"] = "close"
        case UnavailableError():
            status, message, code = error.status, error.message, error.code
            if status != 504:  # the client may repeat a request that timed out at once
                headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        case HTTPException():
            status, message = error.status_code, str(error.detail)
            headers |= error.headers or {}
        case _:
            log.error("request %s failed with an unexpected error", label, exc_info=error)
            status, message = 500, "The server failed to handle this request."
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers


class ResponseWriter:
    """One response: either a JSON object or a stream of events. The task of the request creates it, on the event loop.
    It also sets the request id of the task's log lines, and writes the request's line of the access log."""

    def __init__(self, scope: Scope, send: Send, label: str) -> None:
        self._send = send
        self._label = self._name = label
        self._scope = scope
        self.traceparent = traceparent_of(Headers(scope=scope).getlist("traceparent"))
        self.arrived = time.monotonic()
        self.deadline: float | None = None  # on the clock of `arrived`
        self._log_fields: Callable[[], Mapping[str, object]] = dict
        self._status = CLIENT_GONE
        self._outcome = "client_gone"
        self._streams = False
        about(label, self.traceparent)

    @property
    def identity(self) -> Identity:
        """The owner of the request's key. Raises KeyError if the request was not authenticated."""
        return identity_of(self._scope)

    def name(self, identity: str) -> None:
        """Set the id by which clients and the history refer to this request."""
        self._name = identity
        about(identity, self.traceparent)

    def add_log_fields(self, fields: Callable[[], Mapping[str, object]]) -> None:
        """Set the function that returns more fields for the access log when the request ends."""
        self._log_fields = fields

    def log(self) -> None:
        """Write the request's line of the access log. Called once, when the request ends."""
        if not access.isEnabledFor(logging.INFO):
            return
        duration_ms = round(1000 * (time.monotonic() - self.arrived), 1)
        seen: dict[str, object] = {"request": self._name, "path": self._scope["path"], "status": self._status}
        seen |= {"tenant": self.identity.tenant} if self.identity.tenant else {}
        seen |= {"outcome": self._outcome, "duration_ms": duration_ms, **self._logged()}
        access.info(" ".join(f"{name}={value}" for name, value in seen.items()), extra=fields(**seen))

    def _logged(self) -> Mapping[str, object]:
        try:
            return self._log_fields()
        except Exception:  # the response has been sent, so an error here must not fail the request
            log.exception("request %s: the fields of its access log line failed", self._name)
            return {}

    async def json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = dump(value).encode()
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(body))} | (headers or {})
        )
        await self._send({"type": "http.response.body", "body": body})
        self._outcome = "answered"

    async def events(self, data: bytes) -> None:
        """Send a part of a stream. The first part sends the status, so that an earlier failure can send its own."""
        if not self._streams:
            self._streams = True
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End a stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._outcome = "answered"

    async def fail(self, error: Exception) -> None:
        """Send an error, as a status or, if the stream has started, as its last event."""
        status, value, headers = described(error, self._label)
        if not self._streams:
            await self.json(value, status, headers)
        else:
            await self.events(event(value))
            await self.end()
        self._outcome = type(error).__name__

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        named = headers | {"x-request-id": self._label, "traceparent": self.traceparent}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
