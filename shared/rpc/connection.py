"""HTTP/2 connections between Baton's processes: grpclib, with limits for hostile peers and detection of silent ones.

grpclib's own protocol class accepts messages of any size, any number of frames and connections, and does not notice a
peer that stopped answering while bytes for it are unsent. These classes replace it, using grpclib's public parts
(Connection, Stream, EventsProcessor, AbstractHandler, request_handler). The one override of private methods is
`RpcChannel`; tests/shared/test_services.py fails if a release of grpclib stops calling them.
"""

import asyncio
import contextlib
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpclib.client
import grpclib.server
from grpclib.config import Configuration
from grpclib.const import Handler as Method
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import AbstractHandler, Connection, EventsProcessor, H2Protocol
from grpclib.protocol import Stream as H2Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PingAckReceived, StreamEnded, StreamReset
from h2.exceptions import DenialOfServiceError
from h2.exceptions import ProtocolError as H2ProtocolError
from h2.settings import SettingCodes

from shared.logs import peer_log
from shared.rpc.codec import MAX_MESSAGE_BYTES, DecodeError
from shared.rpc.tls import AuthenticationError, ClusterIdentity

HANDSHAKE_S = 4.0
CONNECT_S = 5.0  # to reach a peer, including the TLS handshake
# A peer that is frozen or cut off sends no reset. By default, a client detects it after 2.0 to 2.6 s.
PING_S = 0.65
ANSWER_S = 1.9
SERVER_ANSWER_S = 6.0  # longer than the clients' own; it frees what a lost or silent client holds
FLUSH_S = 1.0  # to send the remaining bytes when a connection is closed
MAX_CONNECTIONS_PER_ADDRESS = 1024  # `baton up` may run 512 nodes at one address

WINDOW_BYTES = 4 << 20
MAX_CLOSED_STREAMS = 1024  # that a connection remembers; h2's default is 64 times that
FEED_BYTES = 16 << 10  # processed between two checks of the frame budget
# Budget for frames with little or no data, against rapid resets (CVE-2023-44487) and floods of pings, settings etc.
FRAMES_AT_ONCE = 10_000
FRAMES_PER_S = 5_000  # several times what 1,000 calls a second need
SMALL_BYTES = 64  # a data frame with less counts against the budget
RESET_FRAMES = 10  # what a reset costs, since starting and ending a call is expensive
REJECTED_FRAMES = 20  # what a call with invalid headers costs

MAX_TIMEOUT_S = 3600
TIMEOUT = re.compile(r"(\d{1,20})([HMSmun])", re.ASCII)
UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
HEADERS = {":method", ":path", "content-type", "te", "grpc-timeout", "user-agent"}  # all others are ignored
Headers = list[tuple[str, str]]


# ---- one connection --------------------------------------------------------------------------------------------------


class ClosingTransport:
    """A transport whose `write` raises StreamTerminatedError once closed, and whose `close` takes at most FLUSH_S.

    Without it, a write after the end raises RuntimeError in uvloop and is ignored in asyncio, and both wait without
    limit for a peer that does not read.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise StreamTerminatedError("Connection lost")
        try:
            self._transport.write(data)
        except RuntimeError as error:
            raise StreamTerminatedError("Connection lost") from error

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self._transport.abort)


class BoundedStream(H2Stream):
    """A stream that rejects messages that are too long or compressed, before it receives them."""

    _at_header = True

    async def recv_data(self, size: int) -> bytes:
        """Receive `size` bytes. grpclib calls it for the 5-byte header of a message, then for the message."""
        if size > MAX_MESSAGE_BYTES:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        try:
            data = await super().recv_data(size)
        except AssertionError:  # grpclib raises it for a stream that ended too soon
            raise DecodeError("the stream ended within a message") from None
        if self._at_header and data[:1] > b"\0":
            raise GRPCError(Status.UNIMPLEMENTED, "compressed messages are not supported")
        if not self._at_header and len(data) < size:
            raise DecodeError(f"the stream ended before a message of {size} bytes")
        self._at_header = not self._at_header
        return data


class RpcConnection(Connection):
    """The state that grpclib keeps for a connection, with streams that are bounded."""

    def __init__(self, http: H2Connection, transport: ClosingTransport, config: Configuration) -> None:
        super().__init__(http, cast(asyncio.Transport, transport), config=config)
        self.http = http
        self._sender = cast(asyncio.Transport, transport)

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> H2Stream:
        return BoundedStream(self, self.http, self._sender, stream_id=stream_id, wrapper=wrapper)


class PeerProtocol(H2Protocol):
    """One HTTP/2 connection, on the client or the server, from `connection_made` to `connection_lost`.

    Runs on the event loop. It limits the frames that the peer may send, pings the peer, and closes the connection when
    the peer violates the protocol, exceeds the limit, or leaves a ping unanswered for `answer_s`.
    """

    connection: RpcConnection
    transport: asyncio.Transport
    peer = "?"

    def __init__(self, handler: AbstractHandler, is_client: bool, answer_s: float) -> None:
        config = Configuration()
        super().__init__(
            handler,
            config.__for_client__() if is_client else config.__for_server__(),
            H2Configuration(
                client_side=is_client,
                header_encoding="ascii",
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
            ),
        )
        self.fell_silent = False
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._pinged_at: float | None = None  # when the unanswered ping was sent
        self._checked_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._frames_left = float(FRAMES_AT_ONCE)
        self._earned_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.peer = peer_name(transport)
        http = H2Connection(config=self.h2_config)
        http.MAX_CLOSED_STREAMS = MAX_CLOSED_STREAMS
        http.initiate_connection()
        http.increment_flow_control_window(WINDOW_BYTES - http.local_settings.initial_window_size)
        http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        self.connection = RpcConnection(http, ClosingTransport(self.transport), self.config)
        self.connection.flush()
        self.processor = EventsProcessor(self.handler, self.connection)
        self._checked_at = self._loop.time()
        self._watch = self._loop.call_later(PING_S, self._ping)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)
        self.connection.write_ready.set()  # wake pending writers so that they see the closed connection

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), FEED_BYTES):
            if self.connection.is_closing():
                return
            self._process(data[start : start + FEED_BYTES])

    def spend(self, frames: int) -> None:
        """Count frames against the budget. Raises DenialOfServiceError when it is used up."""
        self._frames_left -= frames
        if self._frames_left < 0:
            now = time.monotonic()
            self._frames_left = min(FRAMES_AT_ONCE, self._frames_left + FRAMES_PER_S * (now - self._earned_at))
            self._earned_at = now
            if self._frames_left < 0:
                self.connection.http.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
                raise DenialOfServiceError("too many frames that carry nothing")

    def _process(self, data: bytes) -> None:
        try:
            events = self.connection.feed(data)
            self.spend(sum(map(_cost, events)))
            self._flush()
            for event in events:
                if type(event) is DataReceived and not event.flow_controlled_length:
                    continue  # within a message, grpclib would treat an empty frame as the end of the stream
                if type(event) is PingAckReceived:
                    self._pinged_at = None
                with contextlib.suppress(NotImplementedError):  # raised for a frame of an HTTP/2 extension
                    self.processor.process(event)
            self._flush()
        except Exception as error:  # noqa: BLE001 - invalid input of any kind closes only this connection
            peer_log.warn(self.peer, f"RPC connection closed: {str(error) or type(error).__name__}")
            with contextlib.suppress(StreamTerminatedError):
                self._flush()  # sends the reason if it was an HTTP/2 error
            self.processor.close("Protocol error")

    def _flush(self) -> None:
        if not self.connection.is_closing():
            self.connection.flush()

    def _ping(self) -> None:
        now = self._loop.time()
        if self.connection.is_closing():
            return
        if self._pinged_at is None:
            self._pinged_at = now
            self.connection.http.ping(bytes(8))
            self.connection.flush()
        else:
            # Exclude the time in which this process did not run.
            self._pinged_at += max(0.0, now - self._checked_at - PING_S)
            if now - self._pinged_at > self._answer_s:
                self.fell_silent = True
                self.processor.close("it does not answer")
                self.transport.abort()
                return
        self._checked_at = now
        self._watch = self._loop.call_later(PING_S, self._ping)


def peer_name(transport: asyncio.BaseTransport) -> str:
    address = transport.get_extra_info("peername")
    return str(address[0]) if isinstance(address, tuple) else "local"


def _cost(event: Event) -> int:
    if type(event) is DataReceived:
        return len(event.data) < SMALL_BYTES
    return RESET_FRAMES if type(event) is StreamReset else type(event) is not StreamEnded


# ---- server ----------------------------------------------------------------------------------------------------------


class ServerProtocol(PeerProtocol):
    """A connection from a client, after the TLS handshake if there is one."""

    def __init__(self, listener: "RpcListener") -> None:
        super().__init__(CallHandler(listener.methods, listener.codec, self), False, listener.answer_s)
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._listener.closed(self)
        super().connection_lost(exc)


class CallHandler(AbstractHandler):
    """The calls on one connection to a server, each in a task of its own."""

    def __init__(self, methods: Mapping[str, Method], codec: CodecBase, protocol: PeerProtocol) -> None:
        self._methods = dict(methods)
        self._codec = codec
        self._protocol = protocol
        self._dispatch = grpclib.server.Server([]).__dispatch__
        self._tasks: dict[H2Stream, asyncio.Task[None]] = {}

    def accept(self, stream: H2Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        try:
            known = _checked(headers)
        except GRPCError as error:
            self._protocol.spend(REJECTED_FRAMES)
            work = _reject(stream, error)
        else:
            # The stream is released below. A task that is cancelled before it starts would not release it.
            work = grpclib.server.request_handler(
                self._methods, stream, known, self._codec, None, self._dispatch, lambda: None
            )
        task = self._tasks[stream] = asyncio.get_running_loop().create_task(work)

        def release(_: "asyncio.Task[None]") -> None:
            del self._tasks[stream]
            release_stream()

        task.add_done_callback(release)

    def cancel(self, stream: H2Stream) -> None:
        if stream in self._tasks:
            self._tasks[stream].cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def tasks(self) -> list["asyncio.Task[None]"]:
        return list(self._tasks.values())


class RpcListener:
    """Accepts connections on one port until `close`; over TLS if there is an identity."""

    def __init__(
        self, methods: Mapping[str, Method], codec: CodecBase, identity: ClusterIdentity | None, answer_s: float
    ) -> None:
        self.methods = methods
        self.codec = codec
        self.answer_s = answer_s
        self._identity = identity
        self._server: asyncio.Server | None = None
        self._connections: dict[ServerProtocol, None] = {}
        self._per_address: Counter[str] = Counter()

    @property
    def num_connections(self) -> int:
        """The number of connections that have completed the TLS handshake."""
        return len(self._connections)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port in use. Raises OSError if it cannot be bound."""
        tls: dict[str, Any] = (
            {"ssl": self._identity.server_context, "ssl_handshake_timeout": HANDSHAKE_S} if self._identity else {}
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ServerProtocol(self), host, port, **tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening, cancel the calls in progress, wait for them up to `timeout_s`, and close all connections."""
        if self._server is not None:
            self._server.close()
        for protocol in self._connections:
            protocol.handler.close()
        tasks = [task for protocol in self._connections for task in cast(CallHandler, protocol.handler).tasks()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for protocol in list(self._connections):
            protocol.processor.close()

    def opened(self, protocol: ServerProtocol) -> None:
        self._connections[protocol] = None
        self._per_address[protocol.peer] += 1
        if self._per_address[protocol.peer] > MAX_CONNECTIONS_PER_ADDRESS:
            peer_log.warn(protocol.peer, f"has {MAX_CONNECTIONS_PER_ADDRESS} RPC connections: no more are accepted")
            protocol.transport.abort()

    def closed(self, protocol: ServerProtocol) -> None:
        if self._connections.pop(protocol, self) is None:
            self._per_address[protocol.peer] -= 1
            if not self._per_address[protocol.peer]:
                del self._per_address[protocol.peer]


def _checked(headers: Headers) -> Headers:
    """Return the headers that a call needs, with its timeout limited. Raises GRPCError for invalid headers."""
    known = [(name, value) for name, value in headers if name in HEADERS]
    names = [name for name, _ in known]
    if len(set(names)) < len(names) or not {":method", ":path"} <= set(names):
        raise GRPCError(Status.INVALID_ARGUMENT, "a call needs one :method and one :path, and no header twice")
    return [(name, bounded_timeout(value) if name == "grpc-timeout" else value) for name, value in known]


def bounded_timeout(text: str) -> str:
    """Return the value of a grpc-timeout header, limited to an hour. Raises GRPCError if it is invalid."""
    match = TIMEOUT.fullmatch(text)
    if match is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "grpc-timeout: must be a whole number and one of H, M, S, m, u, n")
    seconds = int(match[1]) * UNIT_S[match[2]]
    if not seconds:
        raise GRPCError(Status.DEADLINE_EXCEEDED, "grpc-timeout: expired before the call")
    return text if seconds < MAX_TIMEOUT_S else f"{MAX_TIMEOUT_S}S"


async def _reject(stream: H2Stream, error: GRPCError) -> None:
    with contextlib.suppress(H2ProtocolError, StreamTerminatedError):  # the call was reset, or the connection ended
        trailers = [("grpc-status", str(error.status.value)), ("grpc-message", str(error.message))]
        await stream.send_headers(
            [(":status", "200"), ("content-type", "application/grpc+msgpack"), *trailers], end_stream=True
        )
        if stream.closable:
            stream.reset_nowait()


# ---- client ----------------------------------------------------------------------------------------------------------


class RpcChannel(grpclib.client.Channel):
    """A channel to one peer. It connects at the first call, and again at the first call after a loss.

    It closes a connection when the peer's certificate is not accepted, or a ping is unanswered for `answer_s`.
    """

    def __init__(
        self, host: str, port: int, identity: ClusterIdentity | None, codec: CodecBase, answer_s: float
    ) -> None:
        super().__init__(host, port, codec=codec, ssl=identity.client_context if identity else None)
        self._answer_s = answer_s
        self._name = f"{host}:{port}"
        self._last: PeerProtocol | None = None

    @property
    def is_connected(self) -> bool:
        return self._last is not None and not self._last.connection.is_closing()

    @property
    def fell_silent(self) -> bool:
        """Return whether the last connection ended because the peer did not answer."""
        return self._last is not None and self._last.fell_silent

    def _protocol_factory(self) -> H2Protocol:
        return PeerProtocol(grpclib.client.Handler(), True, self._answer_s)

    async def _create_connection(self) -> H2Protocol:
        """Connect. Raises OSError, which includes AuthenticationError and TimeoutError."""
        try:
            async with asyncio.timeout(CONNECT_S):
                protocol = cast(PeerProtocol, await super()._create_connection())
        except ssl.SSLError as error:
            other = isinstance(error, ssl.SSLCertVerificationError)
            problem = "its certificate is of another cluster" if other else f"no TLS ({error.reason}): it has no secret"
            peer_log.warn(self._name, f"not connected: {problem}")
            raise AuthenticationError(f"{problem}; give all processes the same --cluster-secret-file") from error
        if protocol.connection.is_closing():  # grpclib does not check it
            raise ConnectionResetError("the peer hung up at once")
        peer_log.reset(self._name)
        self._last = protocol
        return protocol
