"""The RPCs of Baton. Each RPC is defined in one line, which both the server's handler and the client's call use."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpclib.client
import grpclib.server
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import ProtocolError as H2ProtocolError
from h2.exceptions import StreamClosedError

from shared.rpc import tls
from shared.rpc.codec import DecodeError
from shared.rpc.connection import SERVER_ANSWER_S, CallHandler, PeerProtocol
from shared.rpc.messages import (
    AcceptRequest,
    Ack,
    CommitRequest,
    EncodeReply,
    EncodeRequest,
    NodeInfo,
    NodeListChange,
    NodeUpdate,
    PushedNotice,
    RenewReply,
    RenewRequest,
    ReserveReply,
    ReserveRequest,
    RouterCommand,
    SetAdapterRequest,
    SetRoleRequest,
    StopRequest,
)

Request = TypeVar("Request")
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Rpc(Generic[Request, Reply]):
    path: str
    request: type[Request]
    reply: type[Reply]
    streams: bool = False  # whether each side may send any number of messages during one call

    def serve(self, handle: "Handle[Request, Reply]") -> Handler:
        async def handler(stream: Any) -> None:
            try:
                await handle(stream)
            except DecodeError as error:
                raise GRPCError(Status.INVALID_ARGUMENT, str(error)) from None

        kind = Cardinality.STREAM_STREAM if self.streams else Cardinality.UNARY_UNARY
        return Handler(handler, kind, self.request, self.reply)

    async def call(self, channel: grpclib.client.Channel, request: Request, timeout_s: float) -> Reply:
        """Send one request and return the reply. Raises PeerError if the peer refuses, is gone or does not answer."""
        method = grpclib.client.UnaryUnaryMethod(channel, self.path, self.request, self.reply)
        try:
            return await method(request, timeout=timeout_s)
        except PEER_FAILURES as error:
            raise PeerError(f"{self.path}: {str(error) or type(error).__name__}") from error

    @asynccontextmanager
    async def open(self, channel: grpclib.client.Channel) -> AsyncIterator["ClientStream[Request, Reply]"]:
        """Open a stream, and reset it when the `with` block ends. Raises the errors in PEER_FAILURES."""
        method = grpclib.client.StreamStreamMethod(channel, self.path, self.request, self.reply)
        async with method.open() as stream:
            try:
                yield stream
            finally:
                with suppress(ProtocolError, StreamTerminatedError):  # the stream is not open yet, or has ended
                    await stream.cancel()


Handle = Callable[["ServerStream[Request, Reply]"], Awaitable[None]]
ServerStream = grpclib.server.Stream
ClientStream = grpclib.client.Stream
# Raised when a message is sent on a stream that has ended. To a receiver, the stream ends without an error.
STREAM_ENDED = (StreamTerminatedError, StreamClosedError)
# grpclib raises AssertionError and KeyError for replies without a message or status, and UnicodeError if an address is
# not a valid name.
PEER_FAILURES = (
    GRPCError, *STREAM_ENDED, OSError, asyncio.TimeoutError, DecodeError, UnicodeError, AssertionError, KeyError,
    H2ProtocolError,
)  # fmt: skip


def is_late(record: logging.LogRecord) -> bool:
    """Return whether `record` reports a call whose deadline had passed when the call arrived. This happens after a
    freeze of the caller, and is no error of this process."""
    error = record.exc_info[1] if record.exc_info else None
    is_expired = isinstance(error, asyncio.TimeoutError) and error.args == ("Deadline exceeded",)
    return is_expired and record.msg == "Timeout occurred"


logging.getLogger("grpclib.server").addFilter(lambda record: not is_late(record))


class PeerError(Exception):
    """The peer rejected the call, is gone, or did not answer in time. Another peer may succeed."""


JOIN = Rpc("/baton.Registry/Join", NodeInfo, Ack, streams=True)
FOLLOW = Rpc("/baton.Registry/Follow", Ack, NodeListChange, streams=True)
ATTACH = Rpc("/baton.Node/Attach", RouterCommand, NodeUpdate, streams=True)
SET_ROLE = Rpc("/baton.Node/SetRole", SetRoleRequest, Ack)
SET_ADAPTER = Rpc("/baton.Node/SetAdapter", SetAdapterRequest, Ack)
ENCODE = Rpc("/baton.Node/Encode", EncodeRequest, EncodeReply)
RESERVE = Rpc("/baton.Decode/Reserve", ReserveRequest, ReserveReply)
PUSHED = Rpc("/baton.Decode/Pushed", PushedNotice, Ack)
COMMIT = Rpc("/baton.Decode/Commit", CommitRequest, Ack)
STOP = Rpc("/baton.Decode/Stop", StopRequest, Ack)
ACCEPT = Rpc("/baton.Decode/Accept", AcceptRequest, Ack)
RENEW = Rpc("/baton.Decode/Renew", RenewRequest, RenewReply)


def unary(handle: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[None]]:
    """Return a handler that calls `handle` with the request and sends the result as the reply."""

    async def handler(stream: Any) -> None:
        request = await stream.recv_message()
        if request is None:
            raise GRPCError(Status.INVALID_ARGUMENT, "the call has no message")
        await stream.send_message(await handle(request))

    return handler


class RpcServer:
    """Serves RPCs on one port until `close`. With an identity, it uses TLS and rejects peers outside the cluster.

    By default, `identity` is this process's identity, if it has one.
    """

    def __init__(
        self,
        handlers: Mapping[Rpc[Any, Any], Callable[[Any], Awaitable[None]]],
        identity: tls.ClusterIdentity | None = None,
        answer_s: float = SERVER_ANSWER_S,
    ) -> None:
        methods = {rpc.path: rpc.serve(handle) for rpc, handle in handlers.items()}
        self.connections: dict[PeerProtocol, None] = {}  # the connections whose TLS handshake is complete
        self._make = lambda: PeerProtocol(CallHandler(methods), answer_s, self.connections)
        self._identity = identity or tls.own()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, listener: socket.socket | None = None) -> int:
        """Listen on `port`, or serve on the listening socket `listener`, and return the port in use.

        Raises OSError if the port cannot be bound."""
        secure: dict[str, Any] = {}
        if self._identity is not None:
            secure = {"ssl": self._identity.server_context, "ssl_handshake_timeout": tls.HANDSHAKE_S}
        where = {"host": host, "port": port} if listener is None else {"sock": listener}
        self._server = await asyncio.get_running_loop().create_server(self._make, **where, **secure)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening and cancel all calls. When they end, or after `timeout_s` seconds, close all connections."""
        if self._server is not None:
            self._server.close()
        tasks = [task for each in self.connections for task in cast(CallHandler, each.handler).tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for protocol in list(self.connections):
            protocol.processor.close()
