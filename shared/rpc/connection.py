"""A connection of RPCs: who is at its other end has to prove the cluster's secret, and to say something in time.

One handshake a connection, before HTTP/2, and not metadata of each call: a unary call's message follows its headers at
once, so only a proof before the first call keeps prompts from a false node; calls and messages then cost nothing more;
and what comes from somebody unproved never reaches the RPCs. Who begins with plain HTTP/2 instead is told
UNAUTHENTICATED for every call.
"""

import asyncio
from collections import Counter
from typing import Any, cast

import grpclib.client
import grpclib.server
from grpclib.exceptions import StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.events import DataReceived, PingAckReceived

from shared.rpc.cancellation import take_back_cancellations
from shared.rpc.limits import CarefulHandler
from shared.rpc.security import (
    CHALLENGE,
    MAGIC,
    OPENING,
    PROOF_BYTES,
    AuthenticationError,
    Called,
    Caller,
    Secret,
    complaints,
)

PURPOSE = "rpc"
PREFACE_S = 4.0  # for a connection to introduce itself
CONNECT_S = 5.0  # to reach a peer, and for its proof
# A peer that is frozen or cut off sends no reset. It is found after 2.0 to 2.6 s, where a channel is not more patient.
PING_S = 0.65
ANSWER_S = 1.9
FLUSH_S = 1.0  # for what is unsent when a connection is closed
MAX_CONNECTIONS_PER_ADDRESS = 1024  # `baton up` may have 512 nodes on one
MAX_UNPROVED = 128  # of a server, from everywhere; it takes milliseconds to prove the secret

take_back_cancellations()


class Outgoing:
    """A transport which says that it has ended as grpclib does: uvloop's RuntimeError could mean anything, and asyncio
    says nothing. And which does end."""

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
        """What is unsent may go yet, but to who takes no bytes it never would, and the connection would never end."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(FLUSH_S, self._abort)

    def _abort(self) -> None:
        if self._transport.get_write_buffer_size():
            self._transport.abort()


class Guarded(H2Protocol):
    """One connection, of either side: HTTP/2 once both have introduced themselves, and an end for whatever is none."""

    _transport: asyncio.Transport
    _peer = "?"

    def __init__(self, handler: Any, config: Any, h2_config: H2Configuration, secret: Secret | None) -> None:
        super().__init__(handler, config, h2_config)
        self._secret = secret
        self._said = b""  # by the other side, before HTTP/2 began
        self._has_begun = False
        self._pinged_at: float | None = None  # the ping that is not answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        address = transport.get_extra_info("peername")
        self._peer = str(address[0]) if isinstance(address, tuple) else "local"

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self._said += data
            try:
                data = self._introduced()
            except AuthenticationError as error:
                self._refuse(error)
                return
        if data:
            self._take(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._has_begun:
            super().connection_lost(exc)
            self.connection.write_ready.set()  # who waits to write is to find out, and not to wait for ever
        else:
            self.handler.close()

    def pause_writing(self) -> None:
        if self._has_begun:
            super().pause_writing()

    def resume_writing(self) -> None:
        if self._has_begun:
            super().resume_writing()

    def _introduced(self) -> bytes:
        """What of `_said` is HTTP/2's, which has begun then; nothing while more must come. Raises NotTrustedError."""
        raise NotImplementedError

    def _refuse(self, error: AuthenticationError) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        self._has_begun = True
        self._said = b""
        super().connection_made(cast(asyncio.Transport, Outgoing(self._transport)))

    def _take(self, data: bytes) -> bool:
        """HTTP/2. True when a whole frame of it came."""
        try:
            events = self.connection.feed(data)
        except Exception as error:  # noqa: BLE001 - whatever a stranger's bytes lead to ends his connection alone
            complaints.warn(self._peer, f"RPC connection closed: {str(error) or type(error).__name__}")
            self._flush()  # says why, if it was a fault of HTTP/2
            self.processor.close("Protocol error")
            return False
        self._flush()
        for event in events:
            if type(event) is DataReceived and not event.flow_controlled_length:
                continue  # grpclib takes an empty frame in the middle for the end
            if type(event) is PingAckReceived:
                self._pinged_at = None
            try:
                self.processor.process(event)
            except NotImplementedError:  # a frame of some extension
                continue
        self._flush()
        return bool(events)

    def _flush(self) -> None:
        if not self.connection.is_closing():
            self.connection.flush()


class ServerConnection(Guarded):
    """The side that was connected to."""

    handler: "CarefulHandler"

    def __init__(self, handler: Any, config: Any, h2_config: H2Configuration, server: "GuardedServer") -> None:
        super().__init__(handler, config, h2_config, server.secret)
        self._server = server
        self._is_counted = False  # in `server.open`
        self._called: Called | None = None
        self._deadline = asyncio.get_running_loop().call_later(PREFACE_S, self._hang_up)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        (self._admit if self._secret is None else self._wait)()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._deadline.cancel()
        self._server.unproved.pop(self, None)
        if self._is_counted:
            self._server.open -= Counter([self._peer])  # drops who has none left
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Nothing is proved yet. Of too many such, the oldest of the same address goes, else the oldest of all."""
        unproved = self._server.unproved
        if len(unproved) >= MAX_UNPROVED:
            complaints.warn(self._peer, f"{MAX_UNPROVED} RPC connections have proved nothing yet: the oldest is closed")
            oldest = next((one for one in unproved if one._peer == self._peer), next(iter(unproved)))
            del unproved[oldest]
            oldest._hang_up()
        unproved[self] = None

    def _admit(self) -> None:
        """It is proved, or needs no proof."""
        self._server.unproved.pop(self, None)
        self._server.open[self._peer] += 1
        self._is_counted = True
        if self._server.open[self._peer] > MAX_CONNECTIONS_PER_ADDRESS:
            complaints.warn(self._peer, f"has {MAX_CONNECTIONS_PER_ADDRESS} RPC connections: no more are taken")
            self._hang_up()
        else:
            self._begin()

    def _hang_up(self) -> None:
        self._transport.abort()

    def _introduced(self) -> bytes:
        assert self._secret is not None
        if self._called is None:
            if not MAGIC.startswith(self._said[: len(MAGIC)]):
                return self._as_stranger()
            if len(self._said) < OPENING.size:
                return b""
            called = Called(self._secret, PURPOSE)
            self._transport.write(called.challenge(self._said[: OPENING.size]))
            self._called, self._said = called, self._said[OPENING.size :]
        if len(self._said) < PROOF_BYTES:
            return b""
        self._called.check(self._said[:PROOF_BYTES])
        complaints.reset(self._peer)
        rest = self._said[PROOF_BYTES:]
        self._admit()
        return rest if self._has_begun else b""

    def _as_stranger(self) -> bytes:
        """HTTP/2 with somebody who proves nothing: every call is refused, and the deadline stays."""
        complaints.warn(self._peer, "RPCs refused: no proof of the cluster's secret")
        self.handler.refusal = "the cluster's secret was not proved: give --cluster-secret-file"
        said = self._said
        self._begin()
        return said

    def _refuse(self, error: AuthenticationError) -> None:
        complaints.warn(self._peer, f"RPC connection refused: {error}")
        self._hang_up()

    def _take(self, data: bytes) -> bool:
        has_heard = super()._take(data)
        if has_heard and not (self._deadline.cancelled() or self.handler.refusal):
            self._deadline.cancel()
        return has_heard


class ClientConnection(Guarded):
    """The side that connected. `ready` is set once the other side has proved the secret, and fails if it does not."""

    def __init__(self, handler: Any, config: Any, h2_config: H2Configuration, channel: "GuardedChannel") -> None:
        super().__init__(handler, config, h2_config, channel.secret)
        self._channel = channel
        self._caller = Caller(channel.secret, PURPOSE) if channel.secret is not None else None
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._watch: asyncio.TimerHandle | None = None
        self._watched_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._caller is None:
            self._begin()
            self.ready.set_result(None)
        else:
            self._transport.write(self._caller.opening)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._fail(exc or ConnectionResetError("it hung up at the introduction"))
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Hang up before it is ready."""
        self.ready.cancel()
        self._transport.abort()

    def _begin(self) -> None:
        super()._begin()
        self._watched_at = self._loop.time()
        self._watch = self._loop.call_later(PING_S, self._ping)

    def _ping(self) -> None:
        now, connection = self._loop.time(), self.connection
        if connection.is_closing():
            return
        if self._pinged_at is None:
            self._pinged_at = now
            cast(Any, connection)._connection.ping(bytes(8))
            connection.flush()
        else:
            self._pinged_at += max(0.0, now - self._watched_at - PING_S)  # as long as it was us who stood still
            if now - self._pinged_at > self._channel.answer_s:
                self._channel.fell_silent = True
                self.processor.close("it does not answer")
                self._transport.abort()
                return
        self._watched_at = now
        self._watch = self._loop.call_later(PING_S, self._ping)

    def _introduced(self) -> bytes:
        assert self._caller is not None
        size = CHALLENGE.size
        if MAGIC.startswith(self._said[: len(MAGIC)]) and len(self._said) < size:
            return b""
        # Who has no secret speaks HTTP/2 at once, in fewer bytes than a challenge has.
        proof, rest = self._caller.answer(self._said[:size].ljust(size)), self._said[size:]
        self._transport.write(proof)
        self._begin()
        self.ready.set_result(None)
        return rest

    def _refuse(self, error: AuthenticationError) -> None:
        self._fail(error)
        self._transport.abort()

    def _fail(self, error: BaseException) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # who waited may have given up


class GuardedServer(grpclib.server.Server):
    """grpclib's, with all of the above. `secret`: what its callers have to prove, None for nothing."""

    def __init__(self, handlers: Any, *, secret: Secret | None, **options: Any) -> None:
        super().__init__(handlers, **options)
        self.secret = secret
        self.open: Counter[str] = Counter()  # connections by address, without `unproved`
        self.unproved: dict[ServerConnection, None] = {}  # connections, oldest first

    def _protocol_factory(self) -> H2Protocol:
        self.__gc_step__()
        handler = CarefulHandler(self._mapping, self._codec, self._status_details_codec, self.__dispatch__)
        self._handlers.add(handler)
        return ServerConnection(handler, self._config, self._h2_config, self)


class GuardedChannel(grpclib.client.Channel):
    """grpclib's, which gives up on a peer that does not prove `secret`, if there is one, or does not answer a ping for
    `answer_s`. `fell_silent`: it did so once for the latter."""

    def __init__(
        self, host: str, port: int, *, secret: Secret | None, answer_s: float = ANSWER_S, **options: Any
    ) -> None:
        super().__init__(host, port, **options)
        self.secret = secret
        self.answer_s = answer_s
        self.fell_silent = False

    @property
    def is_connected(self) -> bool:
        return self._connected

    def _protocol_factory(self) -> H2Protocol:
        return ClientConnection(grpclib.client.Handler(), self._config, self._h2_config, self)

    async def _create_connection(self) -> H2Protocol:
        """Raises OSError, NotTrustedError among them, or TimeoutError."""
        peer, connection = f"{self._host}:{self._port}", None
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = cast(ClientConnection, await super()._create_connection())
                await connection.ready
                if connection.connection.is_closing():  # before anybody could use it, and grpclib would not see that
                    raise ConnectionResetError("it hung up at once")
        except BaseException as error:
            if connection is not None:
                connection.abort()
            if isinstance(error, AuthenticationError):
                complaints.warn(peer, f"not spoken to: {error}")
            raise
        complaints.reset(peer)
        return connection
