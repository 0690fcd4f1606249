"""Every RPC of Baton, one line each; server mapping and client call both derive from that line.

Also what grpclib lacks: a cap on message sizes and a close that ends; and what `shared.rpc.connection` and
`shared.rpc.limits` have against strangers and against peers that fall silent.
"""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpclib.client
import grpclib.server
from grpclib.config import Configuration
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import StreamClosedError

from shared.rpc import security
from shared.rpc.codec import MAX_MESSAGE_BYTES, DecodeError, MessageCodec
from shared.rpc.connection import ANSWER_S, GuardedChannel, GuardedServer
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    JoinReply,
    NodeInfo,
    NodeUpdate,
    PushedNotice,
    RenewReply,
    RenewRequest,
    ReserveReply,
    ReserveRequest,
    RouterCommand,
    SetRoleRequest,
    StopRequest,
)

Request = TypeVar("Request")
Reply = TypeVar("Reply")
CODEC = MessageCodec()
MESSAGE_S = 30.0  # that the one message of a call may take to come


@dataclass(frozen=True)
class Rpc(Generic[Request, Reply]):
    path: str
    request: type[Request]
    reply: type[Reply]
    streams: bool = False  # both ways, for the life of the connection

    def serve(self, handle: "Handle[Request, Reply]") -> Handler:
        async def handler(stream: Any) -> None:
            try:
                await handle(stream)
            except DecodeError as error:
                raise GRPCError(Status.INVALID_ARGUMENT, str(error)) from None

        kind = Cardinality.STREAM_STREAM if self.streams else Cardinality.UNARY_UNARY
        return Handler(handler, kind, self.request, self.reply)

    async def call(self, channel: grpclib.client.Channel, request: Request, timeout_s: float) -> Reply:
        """One request, one reply. Raises PeerError when the peer refuses, is gone or does not answer in time."""
        method = grpclib.client.UnaryUnaryMethod(channel, self.path, self.request, self.reply)
        try:
            return await method(request, timeout=timeout_s)
        except PEER_FAILURES as error:
            raise PeerError(f"{self.path}: {str(error) or type(error).__name__}") from error

    @asynccontextmanager
    async def open(self, channel: grpclib.client.Channel) -> AsyncIterator["ClientStream[Request, Reply]"]:
        """A standing stream. Leaving the block resets it."""
        method = grpclib.client.StreamStreamMethod(channel, self.path, self.request, self.reply)
        async with method.open() as stream:
            try:
                yield stream
            finally:
                with suppress(ProtocolError, StreamTerminatedError):  # it was not sent yet, or is over
                    await stream.cancel()


Handle = Callable[["ServerStream[Request, Reply]"], Awaitable[None]]
ServerStream = grpclib.server.Stream
ClientStream = grpclib.client.Stream
STREAM_ENDED = (StreamTerminatedError, StreamClosedError)  # under who sends on it: its reader hears so too
PEER_FAILURES = (GRPCError, *STREAM_ENDED, OSError, asyncio.TimeoutError, DecodeError)


class PeerError(Exception):
    """The peer refused, is gone, or did not answer in time: another one may do."""


JOIN = Rpc("/baton.Registry/Join", NodeInfo, JoinReply, streams=True)
ATTACH = Rpc("/baton.Node/Attach", RouterCommand, NodeUpdate, streams=True)
SET_ROLE = Rpc("/baton.Node/SetRole", SetRoleRequest, Ack)
RESERVE = Rpc("/baton.Decode/Reserve", ReserveRequest, ReserveReply)
PUSHED = Rpc("/baton.Decode/Pushed", PushedNotice, Ack)
COMMIT = Rpc("/baton.Decode/Commit", CommitRequest, Ack)
STOP = Rpc("/baton.Decode/Stop", StopRequest, Ack)
RENEW = Rpc("/baton.Decode/Renew", RenewRequest, RenewReply)


def unary(handle: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[None]]:
    """A handler of one request from a function of it."""

    async def handler(stream: Any) -> None:
        try:
            async with asyncio.timeout(MESSAGE_S):
                request = await stream.recv_message()
        except TimeoutError:
            raise GRPCError(Status.DEADLINE_EXCEEDED, f"no whole message within {MESSAGE_S:g} s") from None
        if request is None:
            raise GRPCError(Status.INVALID_ARGUMENT, "a call without a message")
        await stream.send_message(await handle(request))

    return handler


class RpcServer:
    """Serves RPCs on one port until `close`. Callers have to prove `secret`, by default this process's, if any."""

    def __init__(
        self,
        handlers: Mapping[Rpc[Any, Any], Callable[[Any], Awaitable[None]]],
        secret: security.Secret | None = None,
    ) -> None:
        self._routes = {rpc.path: rpc.serve(handle) for rpc, handle in handlers.items()}
        secret = secret or security.own()
        # Callers that are gone without a word are let go of; it is their side that has to notice soon.
        keepalive = Configuration(
            _keepalive_time=5.0,
            _keepalive_timeout=3.0,
            _keepalive_permit_without_calls=True,
            _http2_max_pings_without_data=0,
            _http2_min_sent_ping_interval_without_data=5.0,
        )
        self._server = GuardedServer([self], secret=secret, codec=CODEC, config=keepalive)

    def __mapping__(self) -> Mapping[str, Handler]:
        return self._routes

    async def start(self, host: str, port: int) -> int:
        """Returns the port in use. Raises OSError when it cannot be bound."""
        await self._server.start(host, port)
        listener: Any = self._server._server
        return int(listener.sockets[0].getsockname()[1])

    async def close(self, timeout_s: float = 2.0) -> None:
        """Ends every connection. grpclib's own wait does not end on every loop while clients stay."""
        self._server.close()
        try:
            await asyncio.wait_for(self._server.wait_closed(), timeout_s)
        except TimeoutError:
            return


def connect(address: str, secret: security.Secret | None = None, answer_s: float = ANSWER_S) -> GuardedChannel:
    """A channel to `host:port`; it connects at the first call, and only to who proves `secret`, by default this
    process's, if any. `answer_s`: how long a ping may go unanswered. Must be closed."""
    host, port = host_and_port(address)
    return GuardedChannel(host, port, secret=secret or security.own(), answer_s=answer_s, codec=CODEC)


def host_and_port(address: str) -> tuple[str, int]:
    """Of `host:port`, where the host of IPv6 may stand in brackets, as in a URL."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _receive_capped(stream: Any, codec: CodecBase, message_type: Any) -> Any:
    """grpclib's `recv_message`, which would buffer whatever length a peer announces, with a cap."""
    try:
        head = await stream.recv_data(5)
        if not head:
            return None
        compressed, length = struct.unpack(">?I", head)
        if compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "compressed messages are not supported")
        if length > MAX_MESSAGE_BYTES:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED, f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}"
            )
        data = await stream.recv_data(length)
    except AssertionError:  # how grpclib says that the stream ended within
        raise DecodeError("the stream ended within a message") from None
    if len(data) < length:
        raise DecodeError(f"the stream ended before a message of {length} bytes")
    return codec.decode(data, message_type)


for _module in (grpclib.server, grpclib.client):
    setattr(_module, "recv_message", _receive_capped)  # noqa: B010 - grpclib has no hook for it
