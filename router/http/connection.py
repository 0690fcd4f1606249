"""One client's connection: uvicorn's HTTP/1.1 protocol, with limits on what may come before anybody has asked for it.

Lines, headers, chunks and what frames them, time, requests under way and connections are counted while they are read.
What breaks a limit is answered in the API's own form, where an answer can still be told apart, and the connection ends.
"""

import asyncio
import contextlib
from collections import deque
from secrets import token_hex
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.asgi import described
from router.http.limits import ConnectionLimits, IdleConnections
from router.http.responses import dump
from shared.errors import RequestError, UnavailableError

LINE_BYTES, HEAD_BYTES, MAX_HEADERS = 8 << 10, 32 << 10, 100
PIECE_BYTES = 8 << 10  # parsed at once: what is over a limit is known this much later
MAX_CHUNKS = 10_000
FRAMING_BYTES, FRAMING_BYTES_A_CHUNK = 16 << 10, 16  # chunk sizes and their extensions, trailers
MAX_PIPELINED = 16  # requests parsed and waiting for their turn; what comes behind them waits as bytes
CLOSE_S = 30.0  # for a client to take an answer that it has not read


class Flow(FlowControl):
    """Reads nothing more while what was read waits to be parsed."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class HttpConnection(HttpToolsProtocol):
    """Also what its requests write to (`write`, `close`, `is_closing`): an answer that ends the connection before all
    of the request has come would else be lost, as a socket closed with bytes unread tells its peer to forget the rest.
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
        """`waiting` is that of its server; None: nobody gives way."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._waiting = waiting or IdleConnections()
        self._was_answered = False
        self._under_way: deque[RequestResponseCycle] = deque()
        self._unparsed = b""
        self._in_head = self._in_body = self._is_leaving = False
        self._is_new = True  # nothing was asked yet
        self._num_head_bytes = self._num_body_bytes = self._num_framing_bytes = self._num_chunks = 0

    # ---- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        if len(self.connections) <= self._limits.connections:
            self._watch()
        elif (oldest := self._waiting.oldest()) is not None:
            self._waiting.drop(oldest)
            oldest.transport.abort()
            self._watch()
        else:
            self._refuse(UnavailableError("Too many connections are open; try again soon."))
            transport.close()  # no word of the client's is waited for: these must not pile up

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_leaving, self._unparsed = True, b""
        self._unset_keepalive_if_required()
        self._waiting.drop(self)
        self._abort()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_leaving:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        while self._unparsed and not self._is_leaving and len(self.pipeline) < MAX_PIPELINED:
            piece, self._unparsed = self._unparsed[:PIECE_BYTES], self._unparsed[PIECE_BYTES:]
            try:
                self._take(piece)
            except (RequestError, UnavailableError) as error:
                self._refuse(error)
        flow = cast(Flow, self.flow)
        was_held, flow.is_held = flow.is_held, bool(self._unparsed)
        if flow.is_held:
            flow.pause_reading()
        elif was_held and not self.pipeline:
            flow.resume_reading()

    def _take(self, piece: bytes) -> None:
        """Raises Rejected for what is not HTTP, or is beyond a limit."""
        was_in_head, was_in_body, self._num_body_bytes = self._in_head, self._in_body, 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(piece[upgrade.args[0] :])
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
                raise RequestError("The chunks of the body have too much around them.", code="invalid_http")

    def _stay(self, rest: bytes) -> None:
        """The client offers another protocol, and llhttp takes what follows for that. It is asked again without the
        offer: Java's and curl's clients make it with every request, and expect to be served all the same."""
        if self.parser.get_method() == b"CONNECT":
            raise RequestError("This is no proxy.", status=405)
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        head = b"\r\n".join([self.parser.get_method() + b" " + self.url + b" HTTP/1.1", *kept, b"", b""])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._unparsed = head + rest + self._unparsed

    # ---- what the parser tells ------------------------------------------------------------------------------------

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
            return  # a trailer: nothing that was decided may be changed by it
        num_bytes = len(name) + len(value)
        _check_head(num_bytes > LINE_BYTES or len(self.headers) >= MAX_HEADERS)
        self._num_head_bytes += num_bytes
        _check_head(self._num_head_bytes > HEAD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self.parser.get_http_version() == "0.9":
            raise RequestError("HTTP/1.1 is needed.", code="invalid_http")
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

    # ---- what requests do -------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self._is_leaving or self.transport.is_closing()

    def close(self) -> None:
        """Lets the client read what was written. Bytes of it that still come are dropped."""
        if self._is_leaving:
            return
        self._is_leaving, self._unparsed = True, b""
        if not (self._in_head or self._in_body):
            self.transport.close()
        elif not self.transport.is_closing():
            cast(Flow, self.flow).is_held = False
            self.flow.resume_reading()
            with contextlib.suppress(OSError):  # it is gone already
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
        """The server drains. What was asked, or has begun to come, is answered, and so is what a client asks that has
        only just connected: on a connection that ended at once, its request would have failed."""
        if self._under_way:
            self._under_way[-1].keep_alive = False
        elif self._was_answered and not (self._in_head or self._in_body):
            self.transport.close()
        elif self._is_new:
            self._watch()

    # ---- time and refusals ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Sets the one timer to what is awaited of the client now. While a request is at work, that is its own word."""
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
        """Uvicorn's name for it: the time is over."""
        self.timeout_keep_alive_task = None
        if self._in_head and not self._is_leaving:
            self._refuse(RequestError("The request did not arrive in time.", code="too_slow", status=408))
        else:
            self.transport.abort()

    def _refuse(self, error: RequestError | UnavailableError) -> None:
        """Tells the client why, unless that would stand where the answer to another of its requests is awaited."""
        label = token_hex(16)
        status, value, headers = described(error, label)
        body = dump(value).encode()
        headers |= {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": label}
        lines = [f"{name}: {text}\r\n".encode() for name, text in (headers | {"connection": "close"}).items()]
        broken = [cycle for cycle in self._under_way if self._in_body and cycle is self.cycle]
        if list(self._under_way) == broken and not any(cycle.response_started for cycle in broken):
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self._abort()
        self._in_head = self._in_head or not self._in_body  # of what is no HTTP, more may come
        self.close()

    def _abort(self) -> None:
        """Whoever works for this client learns that it is gone; uvicorn tells only the request that came last."""
        for cycle in self._under_way:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()


def _check_head(is_too_large: bool) -> None:
    if is_too_large:
        raise RequestError(
            f"A header may have {LINE_BYTES} bytes; all may be {MAX_HEADERS} and have {HEAD_BYTES}.",
            code="headers_too_large",
            status=431,
        )
