"""HTTP/2 connections between Baton's processes: grpclib with a limit on message sizes and detection of silent peers.

grpclib's own protocol class accepts messages of any size, and while it has unsent bytes, it does not notice that the
peer has stopped answering. The classes here replace that class, using grpclib's public parts (Connection, Stream,
EventsProcessor, AbstractHandler, request_handler). Only `RpcChannel` overrides private methods of grpclib;
tests/shared/test_services.py fails if a release of grpclib no longer calls them.

Every peer either has proved by its certificate that it belongs to the cluster, or runs on this machine.
"""

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast

import grpclib.client
import grpclib.server
from grpclib.config import Configuration
from grpclib.const import Handler as Method
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import AbstractHandler, Connection, EventsProcessor, H2Protocol
from grpclib.protocol import Stream as H2Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import PingAckReceived
from h2.settings import SettingCodes

from shared.clock import to_tick
from shared.logs import peer_log
from shared.rpc import tls
from shared.rpc.codec import MAX_MESSAGE_BYTES, DecodeError, MessageCodec

CODEC = MessageCodec()
CONNECT_S = 5.0  # time limit for connecting to a peer, including the TLS handshake
# A peer that is frozen or cut off does not close its connections. With these defaults, a client notices such a peer
# after 2.0 to 2.6 s.
PING_S = 0.65
ANSWER_S = 1.9
IDLE_PINGS = 8  # with `pings_idle`, the interval between pings is IDLE_PINGS * PING_S
SERVER_ANSWER_S = 6.0  # after this time, a server closes the connection of a silent client; longer than ANSWER_S
FLUSH_S = 1.0  # time limit for sending the remaining bytes when a connection is closed
WINDOW_BYTES = 4 << 20


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port`. An IPv6 address may be in brackets, as in a URL."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


# ---- one connection --------------------------------------------------------------------------------------------------


class ClosingTransport:
    """A transport whose `write` raises StreamTerminatedError after `close`, and whose `close` takes at most FLUSH_S.

    Without this class, uvloop would raise RuntimeError for a write to a closed transport, asyncio would ignore the
    write, and `close` would wait without limit for a peer that does not read.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        try:
            if not self._transport.is_closing():
                return self._transport.write(data)
        except RuntimeError:
            pass
        raise StreamTerminatedError("Connection lost")

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self._transport.abort)


class BoundedStream(H2Stream):
    """A stream that rejects compressed messages and long messages after reading only their headers."""

    _at_header = True

    async def recv_data(self, size: int) -> bytes:
        """Receive `size` bytes. grpclib first calls this for the 5-byte header of a message, then for the message."""
        if size > MAX_MESSAGE_BYTES:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        try:
            data = await super().recv_data(size)
        except AssertionError:  # grpclib raises this if the stream ended too early
            raise DecodeError("the stream ended within a message") from None
        if self._at_header and data[:1] > b"\0":
            raise GRPCError(Status.UNIMPLEMENTED, "compressed messages are not supported")
        if not self._at_header and len(data) < size:
            raise DecodeError(f"the stream ended before a message of {size} bytes")
        self._at_header = not self._at_header
        return data


class RpcConnection(Connection):
    """The state that grpclib keeps for a connection, whose streams are BoundedStreams."""

    def __init__(self, http: H2Connection, transport: ClosingTransport, config: Configuration) -> None:
        super().__init__(http, cast(asyncio.Transport, transport), config=config)
        self.http = http
        self._sender = cast(asyncio.Transport, transport)

    def create_stream(self, *, stream_id: int | None = None, wrapper: Any = None) -> H2Stream:
        return BoundedStream(self, self.http, self._sender, stream_id=stream_id, wrapper=wrapper)


class PeerProtocol(H2Protocol):
    """One HTTP/2 connection, on the client or the server, from `connection_made` to `connection_lost`.

    Runs on the event loop. It pings the peer, and closes the connection when the peer violates the protocol or leaves a
    ping unanswered for `answer_s` seconds. A server, or a client with `pings_idle`, pings only while nothing arrives.
    `connections` contains all open connections of a server, and is None in a client.
    """

    connection: RpcConnection
    transport: asyncio.Transport

    def __init__(
        self,
        handler: AbstractHandler,
        answer_s: float,
        connections: "dict[PeerProtocol, None] | None" = None,
        pings_idle: bool = False,
    ) -> None:
        config = H2Configuration(
            client_side=connections is None,
            header_encoding="ascii",
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        super().__init__(handler, Configuration(), config)
        self.fell_silent = False
        self._answer_s = answer_s
        self._pings_idle = pings_idle or connections is not None
        self._ping_s = PING_S * (IDLE_PINGS if self._pings_idle else 1)
        self._has_received = False  # whether data has arrived since the last check
        self._connections = {} if connections is None else connections
        self._loop = asyncio.get_running_loop()
        self._pinged_at: float | None = None  # when the unanswered ping was sent
        self._checked_at = self._loop.time()
        self._watch: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        http = H2Connection(config=self.h2_config)
        http.initiate_connection()
        http.increment_flow_control_window(WINDOW_BYTES - http.local_settings.initial_window_size)
        http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        self.connection = RpcConnection(http, ClosingTransport(self.transport), self.config)
        self.connection.flush()
        self.processor = EventsProcessor(self.handler, self.connection)
        # The first check is made earlier by a random time, because many nodes may connect at once.
        self._watch = self._loop.call_later(to_tick(self._ping_s * random.uniform(0.5, 1.0)), self._ping)
        self._connections[self] = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.pop(self, None)
        self._watch.cancel()
        super().connection_lost(exc)
        self.connection.write_ready.set()  # wake pending writers so that they see the closed connection

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self.connection.is_closing():
            return
        try:
            events = self.connection.feed(data)
            self._flush()
            for event in events:
                if type(event) is PingAckReceived:
                    self._pinged_at = None
                self.processor.process(event)
            self._flush()
        except Exception as error:  # noqa: BLE001 - invalid input of any kind closes only this connection
            address = self.transport.get_extra_info("peername")
            peer = str(address[0]) if isinstance(address, tuple) else "local"
            peer_log.warn(peer, f"RPC connection closed: {str(error) or type(error).__name__}")
            with contextlib.suppress(StreamTerminatedError):
                self._flush()  # if the error was an HTTP/2 error, this sends the reason to the peer
            self.processor.close("Protocol error")

    def _flush(self) -> None:
        if not self.connection.is_closing():
            self.connection.flush()

    def _ping(self) -> None:
        now = self._loop.time()
        if self.connection.is_closing():
            return
        if self._pings_idle and self._has_received and self._pinged_at is None:
            self._has_received = False
        elif self._pinged_at is None:
            self._pinged_at = now
            self.connection.http.ping(bytes(8))
            with contextlib.suppress(StreamTerminatedError):  # `connection_lost` follows
                self.connection.flush()
        else:
            # Do not count the time during which this process itself did not run.
            self._pinged_at += max(0.0, now - self._checked_at - self._ping_s)
            if now - self._pinged_at > self._answer_s:
                self.fell_silent = True
                self.processor.close("the peer does not answer")
                self.transport.abort()
                return
        self._checked_at = now
        self._watch = self._loop.call_later(to_tick(self._ping_s), self._ping)


# ---- server ----------------------------------------------------------------------------------------------------------


class CallHandler(AbstractHandler):
    """The calls on one connection to a server, each in a separate task."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self.tasks: dict[H2Stream, asyncio.Task[None]] = {}
        self._methods = dict(methods)
        self._dispatch = grpclib.server.Server([]).__dispatch__

    def accept(self, stream: H2Stream, headers: Any, release_stream: Callable[[], Any]) -> None:
        # The stream is released below, because a task that is cancelled before it starts would not release it.
        work = grpclib.server.request_handler(self._methods, stream, headers, CODEC, None, self._dispatch, lambda: None)
        task = self.tasks[stream] = asyncio.get_running_loop().create_task(work)

        def release(_: "asyncio.Task[None]") -> None:
            del self.tasks[stream]
            release_stream()

        task.add_done_callback(release)

    def cancel(self, stream: H2Stream) -> None:
        if stream in self.tasks:
            self.tasks[stream].cancel()

    def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()


# ---- client ----------------------------------------------------------------------------------------------------------


class RpcChannel(grpclib.client.Channel):
    """A client's channel to `host:port`. The owner of the channel must close it.

    The channel connects at the first call, and after a lost connection at the next call. It closes a connection if the
    peer's certificate is not accepted, or if a ping is unanswered for `answer_s` seconds. With `pings_idle`, it pings
    less often, and only while nothing arrives. By default, `identity` is the identity of this process, if it has one.
    """

    def __init__(
        self,
        address: str,
        identity: tls.ClusterIdentity | None = None,
        answer_s: float = ANSWER_S,
        pings_idle: bool = False,
    ) -> None:
        identity = identity or tls.own()
        super().__init__(*host_and_port(address), codec=CODEC, ssl=identity.client_context if identity else None)
        self._answer_s = answer_s
        self._pings_idle = pings_idle
        self._name = address
        self._last: PeerProtocol | None = None

    @property
    def is_connected(self) -> bool:
        return self._last is not None and not self._last.connection.is_closing()

    @property
    def fell_silent(self) -> bool:
        """Whether the last connection ended because the peer did not answer."""
        return self._last is not None and self._last.fell_silent

    def _protocol_factory(self) -> H2Protocol:
        return PeerProtocol(grpclib.client.Handler(), self._answer_s, pings_idle=self._pings_idle)

    async def _create_connection(self) -> H2Protocol:
        """Connect. Raises OSError, which includes AuthenticationError and TimeoutError."""
        try:
            async with asyncio.timeout(CONNECT_S):
                protocol = cast(PeerProtocol, await super()._create_connection())
        except ssl.SSLError as error:
            other = isinstance(error, ssl.SSLCertVerificationError)
            problem = (
                "its certificate belongs to another cluster" if other else f"no TLS ({error.reason}): it has no secret"
            )
            peer_log.warn(self._name, f"not connected: {problem}")
            raise tls.AuthenticationError(f"{problem}; give all processes the same --cluster-secret-file") from error
        if protocol.connection.is_closing():  # grpclib does not check this
            raise ConnectionResetError("the peer hung up at once")
        peer_log.reset(self._name)
        self._last = protocol
        return protocol
