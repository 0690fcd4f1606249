"""One client's HTTP/1.1 connection: uvicorn's protocol class with limits on the size and the duration of requests.

This module subclasses `HttpToolsProtocol`, which is not a documented interface of uvicorn. It adds a timeout for a
request's head, bounds on headers and chunk framing, a limit on connections (idle connections are closed first), and a
drain that answers requests in transit. tests/router/test_bad_input.py checks these additions. No public options of
uvicorn 0.54, Hypercorn 0.18 or Granian 2.8 provide them. docs/decisions.md compares these servers.

If a client exceeds a limit, `HttpConnection` sends an error in the API's format and closes the connection. It sends no
error if the client could mistake this error for the response to another request.
"""

import asyncio
import contextlib
import resource
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
from starlette.requests import Request
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.asgi import to_response
from shared.errors import BatonError, RequestError, UnavailableError

LINE_BYTES, HEAD_BYTES, MAX_HEADERS = 8 << 10, 32 << 10, 100
PIECE_BYTES = 8 << 10  # number of bytes parsed at a time; a limit may be exceeded by up to this number
MAX_CHUNKS = 10_000
FRAMING_BYTES, FRAMING_BYTES_A_CHUNK = 16 << 10, 16  # maximum bytes of chunk headers and trailers: base, plus per chunk
MAX_PIPELINED = 16  # maximum number of parsed requests that wait for earlier responses; further bytes are parsed later
UNSENT_BYTES = 64 << 10  # maximum number of bytes that are collected for one system call
CLOSE_S = 30.0  # how long a client may take to read the last response
SPARE_FILES = 256  # number of file descriptors for everything except connections of clients


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The maximum number of connections, and timeouts in seconds.

    `head_s` limits the time for a request's head, and `rest_s` the time for the rest of a request that was answered
    early. `idle_s` limits the time between requests, and `drain_s` the wait for a request while the server drains.
    """

    connections: int = 10_000
    head_s: float = 10.0
    rest_s: float = 2.0
    idle_s: float = 75.0
    drain_s: float = 1.0


@dataclass(slots=True)
class IdleConnections:
    """One server's connections that wait for a request, oldest first. If there are too many connections, the server
    closes one of these to admit a new connection. Connections that never sent a request are closed first."""

    is_draining: bool = False  # if set, each connection closes after its next response
    silent: dict["HttpConnection", None] = field(default_factory=dict)
    idle: dict["HttpConnection", None] = field(default_factory=dict)

    def oldest(self) -> "HttpConnection | None":
        return next(iter(self.silent or self.idle), None)

    def drop(self, connection: "HttpConnection") -> None:
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)


def raise_fd_limit(connections: int) -> int:
    """Raise the limit of file descriptors to allow `connections` connections. Return how many the new limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - SPARE_FILES)


class Flow(FlowControl):
    """Flow control that does not resume reading from the socket while received bytes wait to be parsed."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class HttpConnection(HttpToolsProtocol):
    """One connection: its parser, its single timer, and its requests in progress. All methods run on the event loop.

    uvicorn creates an `HttpConnection` for each client. The requests use this object as their transport (`write`,
    `close`, `is_closing`), and do not close the socket themselves. Closing a socket with unread bytes would reset the
    connection, and the client could lose a response that was sent early.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits = ConnectionLimits(),
        waiting: IdleConnections | None = None,
    ) -> None:
        """`waiting` holds the server's idle connections. If it is None, no idle connection is closed for a new one."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._waiting = waiting or IdleConnections()
        self._was_answered = False
        self._under_way: deque[RequestResponseCycle] = deque()
        self._unparsed = b""
        self._unsent = bytearray()
        self._in_head = self._in_body = self._is_leaving = False
        self._is_new = True  # no request has begun
        self._num_head_bytes = self._num_body_bytes = self._num_framing_bytes = self._num_chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        if len(self.connections) <= self._limits.connections:
            self._watch()
        elif (oldest := self._waiting.oldest()) is not None:
            self._waiting.drop(oldest)
            oldest._flush()
            oldest.transport.abort()
            self._watch()
        else:
            self._refuse(UnavailableError("Too many open connections."))
            transport.close()  # do not wait for the client, so that rejected connections do not accumulate

    def eof_received(self) -> None:
        self._flush()  # the transport closes after this call

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_leaving, self._unparsed = True, b""
        self._unset_keepalive_if_required()
        self._waiting.drop(self)
        self._abort()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # the cycle refers to this object, which is now freed at once

    def data_received(self, data: bytes) -> None:
        if not self._is_leaving:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        while self._unparsed and not self._is_leaving and len(self.pipeline) < MAX_PIPELINED:
            piece, self._unparsed = self._unparsed[:PIECE_BYTES], self._unparsed[PIECE_BYTES:]
            try:
                self._take(piece)
            except BatonError as error:
                self._refuse(error)
        flow = cast(Flow, self.flow)
        was_held, flow.is_held = flow.is_held, bool(self._unparsed)
        if flow.is_held:
            flow.pause_reading()
        elif was_held and not self.pipeline:
            flow.resume_reading()

    def _take(self, piece: bytes) -> None:
        """Parse a piece of the received bytes. Raises RequestError if they are not valid HTTP or exceed a limit."""
        was_in_head, was_in_body, self._num_body_bytes = self._in_head, self._in_body, 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, RequestError):
                raise error.__context__ from None
            raise RequestError("This is not a valid HTTP/1.1 request.", code="invalid_http") from None
        if self._in_head and was_in_head:
            self._num_framing_bytes += len(piece)
            _check_head(self._num_framing_bytes > HEAD_BYTES + PIECE_BYTES)
        if self._in_body and was_in_body:
            self._num_framing_bytes += len(piece) - self._num_body_bytes
            if self._num_framing_bytes > FRAMING_BYTES + FRAMING_BYTES_A_CHUNK * self._num_chunks:
                raise RequestError("The framing of the body's chunks is too large.", code="invalid_http")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade header.

        llhttp assumes that the bytes after a head with this header belong to another protocol. The HTTP clients of Java
        and curl may send the header with any request, and expect a normal response.
        """
        if self.parser.get_method() == b"CONNECT":
            raise RequestError("CONNECT is not supported.", status=405)
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        head = b"\r\n".join([self.parser.get_method() + b" " + self.url + b" HTTP/1.1", *kept, b"", b""])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._unparsed = head + rest + self._unparsed

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._is_new = True, False
        self._num_head_bytes = self._num_framing_bytes = self._num_chunks = 0
        self._watch()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > LINE_BYTES:
            raise RequestError(f"The URL is longer than {LINE_BYTES} bytes.", code="url_too_long", status=414)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # ignore trailers: the request is already being handled
        num_bytes = len(name) + len(value)
        _check_head(num_bytes > LINE_BYTES or len(self.headers) >= MAX_HEADERS)
        self._num_head_bytes += num_bytes
        _check_head(self._num_head_bytes > HEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self.parser.get_http_version() == "0.9":
            raise RequestError("HTTP/0.9 is not supported.", code="invalid_http")
        super().on_headers_complete()
        self._in_head, self._in_body, self._num_framing_bytes = False, True, 0
        self.cycle.keep_alive = self.cycle.keep_alive and not self._waiting.is_draining
        self.cycle.transport = cast(asyncio.Transport, self)
        self._under_way.append(self.cycle)
        self._watch()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            raise RequestError(f"The body has more than {MAX_CHUNKS} chunks.", code="body_too_large", status=413)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        super().on_message_complete()
        self._watch()

    def write(self, data: bytes) -> None:
        """Collect the data, and write it when all tasks that are ready have run. Tokens of one response that arrived
        together then need a single system call."""
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent += data
        if len(self._unsent) > UNSENT_BYTES:
            self._flush()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and not self.transport.is_closing():
            self.transport.write(unsent)

    def is_closing(self) -> bool:
        return self._is_leaving or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection after the client has read the response. Drop all bytes that still arrive from the
        client."""
        if self._is_leaving:
            return
        self._flush()
        self._is_leaving, self._unparsed = True, b""
        if not (self._in_head or self._in_body):
            self.transport.close()
        elif not self.transport.is_closing():
            cast(Flow, self.flow).is_held = False
            self.flow.resume_reading()
            if self.transport.can_write_eof():  # not with HTTPS
                with contextlib.suppress(OSError):  # already disconnected
                    self.transport.write_eof()
        self._watch()

    def on_response_complete(self) -> None:
        if self._under_way:
            self._under_way.popleft()
            self._was_answered = True
        if self._is_leaving:
            return
        super().on_response_complete()
        self._watch()
        if self._unparsed:
            self.loop.call_soon(self._parse)

    def shutdown(self) -> None:
        """Drain: answer requests that have begun, then close. If all requests were answered, close at once. If no
        request has arrived yet, wait for `drain_s`, because a request on its way would otherwise fail.
        """
        if self._under_way:
            self._under_way[-1].keep_alive = False
        elif self._was_answered and not (self._in_head or self._in_body):
            self._flush()
            self.transport.close()
        elif self._is_new:
            self._watch()

    def _watch(self) -> None:
        """Set the timer for the client's next action. No timer is set while a request is handled, because its handler
        has its own timeouts."""
        self._unset_keepalive_if_required()
        limits = self._limits
        if self._is_leaving or self._under_way or self._in_body:
            self._waiting.drop(self)
        else:
            (self._waiting.idle if self._was_answered else self._waiting.silent).setdefault(self)
        if self._is_leaving:
            left_s = limits.rest_s if self._in_head or self._in_body else CLOSE_S
        elif self._under_way:
            return
        elif self._in_body:
            left_s = limits.rest_s
        else:
            left_s = limits.head_s if self._in_head or self._is_new else limits.idle_s
            if self._waiting.is_draining and not self._in_head:
                left_s = limits.drain_s
        self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Handle the timer. uvicorn defines the name of this method."""
        self.timeout_keep_alive_task = None
        if self._in_head and not self._is_leaving:
            self._refuse(RequestError("The request did not arrive in time.", code="too_slow", status=408))
        else:
            self.transport.abort()

    def _refuse(self, error: BatonError) -> None:
        """Send an error and close the connection. Send no error if it would look like the response to another
        request."""
        response = to_response(Request({"type": "http", "path": "", "headers": []}), error)
        response.headers["connection"] = "close"
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        broken = [cycle for cycle in self._under_way if self._in_body and cycle is self.cycle]
        if list(self._under_way) == broken and not any(cycle.response_started for cycle in broken):
            self.write(b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", response.body]))
        self._abort()
        self._in_head = self._in_head or not self._in_body  # `close` then drops the invalid bytes that still arrive
        self.close()

    def _abort(self) -> None:
        """Signal the disconnect to all requests in progress. uvicorn itself signals it only to the last request."""
        for cycle in self._under_way:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()


def _check_head(is_too_large: bool) -> None:
    if is_too_large:
        raise RequestError(
            f"At most {MAX_HEADERS} headers are allowed, of {LINE_BYTES} bytes each and {HEAD_BYTES} bytes in total.",
            code="headers_too_large",
            status=431,
        )
