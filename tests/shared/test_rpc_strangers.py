"""RPC servers and callers against who has no business with them: table G of bad inputs, floods, and the secret."""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from grpclib.const import Status
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from shared.lifecycle import wait_until
from shared.rpc import connection as grpc_connection
from shared.rpc import limits as grpc_limits
from shared.rpc import security
from shared.rpc.codec import encode
from shared.rpc.connection import ServerConnection
from shared.rpc.messages import Ack, NodeUpdate, RouterCommand, StopRequest
from shared.rpc.methods import ATTACH, STOP, PeerError, RpcServer, connect, unary
from shared.rpc.security import CHALLENGE, Called, Caller, Secret, complaints

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", STOP.path),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc+msgpack"),
]
OURS = Secret((b"our-secret-0123456789-abcdefghijklm",))
THEIRS = Secret((b"their-secret-0123456789-abcdefghijk",))
WAIT_S = 20.0


class Served:
    """A server, what it was told, and how many connections it holds."""

    def __init__(self, secret: Secret | None = None) -> None:
        self.heard: list[StopRequest] = []
        self.server = RpcServer({STOP: unary(self._stop), ATTACH: self._attach}, secret)
        self.port = 0

    async def _stop(self, stop: StopRequest) -> Ack:
        self.heard.append(stop)
        return Ack("heard")

    async def _attach(self, stream: Any) -> None:
        async for _ in stream:
            await stream.send_message(NodeUpdate([], None))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return self.server._server.open.total() + len(self.server._server.unproved)

    async def works(self, secret: Secret | None = None) -> None:
        channel = connect(self.address, secret)
        try:
            assert await STOP.call(channel, StopRequest(b"well"), WAIT_S) == Ack("heard")
        finally:
            channel.close()


@asynccontextmanager
async def serving(secret: Secret | None = None) -> AsyncIterator[Served]:
    served = Served(secret)
    served.port = await served.server.start("127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.server.close()


class Raw(asyncio.Protocol):
    """A client that says whatever it is told to, and keeps what it is answered."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.http = h2.connection.H2Connection(config)
        self.speaks_http = False
        self.received = b""  # before it speaks HTTP/2
        self.answers: dict[int, dict[str, str]] = {}
        self.ended_with: int | None = None  # GOAWAY's error
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True

    def data_received(self, data: bytes) -> None:
        if not self.speaks_http:
            self.received += data
            return
        for event in self.http.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self.answers.setdefault(event.stream_id, {}).update((str(k), str(v)) for k, v in event.headers)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.ended_with = event.error_code
        self.transport.write(self.http.data_to_send())

    def begin(self) -> bytes:
        self.speaks_http = True
        self.http.initiate_connection()
        return self.http.data_to_send()

    def call(self, stream: int, data: bytes, *, end: bool = True, **headers: str) -> None:
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        known = [(name, changed.pop(name.lstrip(":"), value)) for name, value in HEADERS]
        self.http.send_headers(stream, [*known, *changed.items()], end_stream=end and not data)
        if data:
            self.http.send_data(stream, data, end_stream=end)
        self.transport.write(self.http.data_to_send())

    async def status(self, stream: int = 1) -> Status | None:
        """None: the connection was closed instead."""
        assert await wait_until(lambda: self.is_closed or "grpc-status" in self.answers.get(stream, {}), WAIT_S)
        answer = self.answers.get(stream, {})
        return Status(int(answer["grpc-status"])) if "grpc-status" in answer else None

    async def end(self) -> None:
        """Until the server closes."""
        assert await wait_until(lambda: self.is_closed, WAIT_S)


@asynccontextmanager
async def raw(served: Served, *, http: bool = True) -> AsyncIterator[Raw]:
    _, client = await asyncio.get_running_loop().create_connection(Raw, "127.0.0.1", served.port)
    if http:
        client.transport.write(client.begin())
    try:
        yield client
    finally:
        client.transport.close()
        await client.end()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """At most one line for each connection with garbage, which these tests have one of; and no traceback."""
    complaints.reset("127.0.0.1")
    yield
    lines = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert not [record for record in lines if record.exc_info]
    assert len(lines) <= 1, [record.getMessage() for record in lines]


def message(data: bytes, length: int | None = None, compressed: int = 0) -> bytes:
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


def frame(kind: int, flags: int = 0, stream: int = 0, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


GOOD = message(encode(StopRequest(b"ticket")))


# Calls


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (message(b"", 2**32 - 1), Status.RESOURCE_EXHAUSTED),
        (message(b"cut", 100), Status.INVALID_ARGUMENT),
        (message(b"", 100), Status.INVALID_ARGUMENT),
        (b"\0\0", Status.INVALID_ARGUMENT),
        (b"", Status.INVALID_ARGUMENT),
        (message(b"xx", compressed=1), Status.UNIMPLEMENTED),
        (message(b"xx", compressed=2), Status.UNIMPLEMENTED),
        (message(b"\xc1"), Status.INVALID_ARGUMENT),
        (GOOD, Status.OK),
        (GOOD + GOOD, Status.OK),  # a call has one message; a second is not looked at
    ],
    ids=["4 GiB", "cut", "no byte", "half a head", "half-closed", "compressed", "flag 2", "no msgpack", "good", "two"],
)
async def test_what_a_call_sends_gets_its_status_and_the_connection_is_well(body: bytes, status: Status) -> None:
    async with serving() as served, raw(served) as client:
        client.call(1, body)
        assert await client.status() is status
        client.call(3, GOOD)
        assert await client.status(3) is Status.OK
        assert len(served.heard) == 1 + (status is Status.OK)


@pytest.mark.parametrize(
    ("headers", "status", "http_status"),
    [
        ({"path": "/baton.Decode/Nothing"}, Status.UNIMPLEMENTED, 200),
        ({"path": "/x" * 1000}, Status.UNIMPLEMENTED, 200),
        ({"content_type": "application/json"}, Status.UNKNOWN, 415),
        ({"content_type": "application/grpc"}, Status.UNKNOWN, 415),
        ({"te": "gzip"}, Status.UNKNOWN, 400),
        ({"grpc_timeout": "abc"}, Status.INVALID_ARGUMENT, 200),
        ({"grpc_timeout": "-1S"}, Status.INVALID_ARGUMENT, 200),
        ({"grpc_timeout": "1" * 5000 + "S"}, Status.INVALID_ARGUMENT, 200),
        ({"grpc_timeout": "0n"}, Status.DEADLINE_EXCEEDED, 200),
        ({"grpc_timeout": "99999999999H"}, Status.OK, 200),
        ({"grpc_encoding": "gzip", "unheard_of": "x", "some-bin": "%%%"}, Status.OK, 200),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, dict) else None,
)
async def test_what_headers_ask_gets_its_status(headers: dict[str, str], status: Status, http_status: int) -> None:
    async with serving() as served, raw(served) as client:
        client.call(1, GOOD, **headers)
        assert await client.status() is status
        assert client.answers[1][":status"] == str(http_status)
        assert len(served.heard) == (status is Status.OK)
        client.call(3, GOOD)
        assert await client.status(3) is Status.OK


async def test_a_timeout_is_an_hour_at_most() -> None:
    assert grpc_limits._timeout("99999999999H") == "3600S"
    assert grpc_limits._timeout("3599S") == "3599S"


async def test_a_call_that_never_sends_its_message_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.rpc.methods.MESSAGE_S", 0.1)
    async with serving() as served, raw(served) as client:
        client.call(1, GOOD[:-1], end=False)
        assert await client.status() is Status.DEADLINE_EXCEEDED


async def test_calls_that_are_cancelled_leave_nothing_whenever_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[ServerConnection] = []
    made = ServerConnection.connection_made

    def noted(self: ServerConnection, transport: asyncio.BaseTransport) -> None:
        connections.append(self)
        made(self, transport)

    monkeypatch.setattr(ServerConnection, "connection_made", noted)
    async with serving() as served, raw(served) as client:
        for stream in range(1, 101, 2):
            client.http.send_headers(stream, HEADERS, end_stream=False)
            if stream % 3 == 0:
                client.transport.write(client.http.data_to_send())
                await asyncio.sleep(0.002)  # its handler has begun
            client.http.reset_stream(stream)
            client.transport.write(client.http.data_to_send())  # else both come at once
        client.call(201, GOOD)
        assert await client.status(201) is Status.OK
        assert len(connections) == 1
        assert await wait_until(lambda: not connections[0].processor.streams, WAIT_S)


# Connections


GARBAGE = {
    "nothing": b"",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "TLS": bytes.fromhex("160301020001000 1fc0303".replace(" ", "")) + bytes(500),
    "half a preface": PREFACE[:10],
    "a preface and silence": PREFACE,
    "a frame of 16 MiB": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x00",
    "data for no stream": PREFACE + frame(4) + frame(0, 0, 7, b"data"),
    "half an opening": security.MAGIC,
    "zeros": bytes(10_000),
}


@pytest.mark.parametrize("secret", [None, OURS], ids=["open", "secret"])
@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE)
async def test_who_says_nothing_or_nonsense_is_hung_up_on(
    words: bytes, secret: Secret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grpc_connection.PREFACE_S <= 5
    monkeypatch.setattr(grpc_connection, "PREFACE_S", 0.1)
    async with serving(secret) as served:
        async with raw(served, http=False) as client:
            client.transport.write(words)
            await client.end()
        assert await wait_until(lambda: not served.num_open, WAIT_S)
        await served.works(secret)
        assert len(served.heard) == 1


async def test_an_address_has_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "MAX_CONNECTIONS_PER_ADDRESS", 3)
    async with serving() as served:
        async with raw(served), raw(served), raw(served) as third, raw(served) as fourth:
            await fourth.end()
            third.call(1, GOOD)
            assert await third.status() is Status.OK
        assert await wait_until(lambda: not served.num_open, WAIT_S)
        await served.works()


# 16 KiB of header block that stand for 16 MiB: one entry of the table, again and again.
BOMB = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 4000
ERROR_OF_FLOOD = {
    "ping": (frame(6, 0, 0, bytes(8)), ErrorCodes.ENHANCE_YOUR_CALM),
    "settings": (frame(4), ErrorCodes.ENHANCE_YOUR_CALM),
    "window update": (frame(8, 0, 0, struct.pack(">I", 1)), ErrorCodes.ENHANCE_YOUR_CALM),
    "priority": (frame(2, 0, 1, bytes(5)), ErrorCodes.ENHANCE_YOUR_CALM),
    "unknown frames": (frame(0xEE, 0, 0, b"x"), ErrorCodes.ENHANCE_YOUR_CALM),
    "window update by 0": (frame(8, 0, 0, bytes(4)), ErrorCodes.PROTOCOL_ERROR),
    "continuation": (frame(1, 0, 1, b"") + frame(9, 0, 1, b"") * 100, ErrorCodes.PROTOCOL_ERROR),
    "header bomb": (frame(1, 4, 1, BOMB), ErrorCodes.ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize(("flood", "error"), ERROR_OF_FLOOD.values(), ids=ERROR_OF_FLOOD)
async def test_a_flood_ends_its_connection_alone(
    flood: bytes, error: ErrorCodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_limits, "FRAMES_AT_ONCE", 300)
    monkeypatch.setattr(grpc_limits, "FRAMES_PER_S", 0)
    async with serving() as served, raw(served) as client:
        client.transport.write(flood * 400)
        await client.end()
        assert client.ended_with == error
        await served.works()


async def test_empty_data_is_neither_the_end_of_a_message_nor_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_limits, "FRAMES_AT_ONCE", 300)
    monkeypatch.setattr(grpc_limits, "FRAMES_PER_S", 0)
    async with serving() as served, raw(served) as client:
        client.call(1, GOOD[:3], end=False)
        client.transport.write(frame(0, 0, 1))
        client.http.send_data(1, GOOD[3:], end_stream=True)
        client.transport.write(client.http.data_to_send())
        assert await client.status() is Status.OK
        client.call(3, GOOD[:3], end=False)
        client.transport.write(frame(0, 0, 3) * 400)
        await client.end()
        assert client.ended_with == ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("kind", ["reset", "left open", "refused"])
async def test_a_flood_of_calls_ends_its_connection_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_limits, "FRAMES_PER_S", 0)
    monkeypatch.setattr(grpc_limits, "FRAMES_AT_ONCE", 2_000)
    num_begun = 0
    async with serving() as served, raw(served) as client:
        for stream in range(1, 20_001, 2):
            if client.is_closed:
                break
            timeout = {"grpc_timeout": "never"} if kind == "refused" else {}
            client.http.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 2**31 - 1  # whatever the server says
            client.http.remote_settings.acknowledge()
            with suppress(h2.exceptions.ProtocolError):  # it heard GOAWAY
                client.call(stream, b"", end=kind == "refused", **timeout)
                if kind == "reset":
                    client.http.reset_stream(stream)
                    client.transport.write(client.http.data_to_send())
            num_begun += 1
            await asyncio.sleep(0)
        await client.end()
        error = ErrorCodes.PROTOCOL_ERROR if kind == "left open" else ErrorCodes.ENHANCE_YOUR_CALM
        assert client.ended_with == error
        assert num_begun < 1_000, "a call that comes to nothing counts more than a frame"
        assert await wait_until(lambda: not served.num_open, WAIT_S)
        await served.works()


# The secret


async def test_who_proves_nothing_gives_way_to_those_who_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "MAX_UNPROVED", 3)
    monkeypatch.setattr(grpc_connection, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    monkeypatch.setattr(grpc_connection, "PREFACE_S", 60.0)
    async with serving(OURS) as served, AsyncExitStack() as cleanup:
        channel = connect(served.address, OURS)
        cleanup.callback(channel.close)
        stream = await cleanup.enter_async_context(ATTACH.open(channel))
        await stream.send_message(RouterCommand("router"))
        assert await stream.recv_message() == NodeUpdate()
        words = (b"", security.MAGIC, PREFACE, Caller(OURS, "rpc").opening, b"", b"")
        strangers = []
        for said in words:
            strangers.append(await cleanup.enter_async_context(raw(served, http=False)))
            strangers[-1].transport.write(said)
            await asyncio.sleep(0.01)
        assert await wait_until(lambda: [one.is_closed for one in strangers] == [True] * 3 + [False] * 3, WAIT_S)
        assert served.num_open == 1 + 3
        await served.works(OURS)  # a proved one takes the second place of the address, and a stranger's while it proves
        await stream.send_message(RouterCommand("router"))
        assert await stream.recv_message() == NodeUpdate(), "whoever has proved it stays"


async def test_who_has_the_secret_is_served_on_calls_and_streams() -> None:
    async with serving(OURS) as served:
        await served.works(OURS)
        await served.works(Secret(OURS.keys + THEIRS.keys))
        channel = connect(served.address, OURS)
        async with ATTACH.open(channel) as stream:
            for _ in range(3):
                await stream.send_message(RouterCommand("router"))
                assert await stream.recv_message() == NodeUpdate()
        channel.close()


@pytest.mark.parametrize("secret", [None, THEIRS], ids=["none", "another"])
async def test_who_has_not_is_refused_at_once_and_told_so_once(
    secret: Secret | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(OURS) as served:
        complaints.reset(served.address)
        refusal = "another cluster secret" if secret else "was not proved"
        for _ in range(5):
            channel = connect(served.address, secret)
            with pytest.raises(PeerError, match=refusal):
                await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
            channel.close()
        assert served.heard == []
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == 1
        assert ("not spoken to" if secret else "no proof") in lines[0]


async def test_plain_http_gets_unauthenticated_for_every_call_and_an_end() -> None:
    async with serving(OURS) as served, raw(served) as client:
        for stream in (1, 3):
            client.call(stream, GOOD)
            assert await client.status(stream) is Status.UNAUTHENTICATED
        assert served.heard == []


class Tapped:
    """A relay to a server that keeps what callers said; `wrong` changes the bytes on the way to it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.said = b""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.served.port)

        async def forth() -> None:
            while data := await reader.read(65_536):
                self.said += data
                back.write(data)
            back.close()

        forwarding = asyncio.create_task(forth())
        with suppress(ConnectionError):
            while data := await there.read(65_536):
                writer.write(data)
        writer.close()
        await forwarding


async def test_what_one_connection_said_is_worth_nothing_on_another_or_elsewhere() -> None:
    async with serving(OURS) as served, serving(OURS) as other:
        tapped = Tapped(served)
        server = await asyncio.start_server(tapped.relay, "127.0.0.1", 0)
        async with server:
            channel = connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", OURS)
            assert await STOP.call(channel, StopRequest(b"ticket"), WAIT_S) == Ack("heard")
            channel.close()
            assert b"ticket" in tapped.said
            for target in (served, other):
                async with raw(target, http=False) as client:
                    client.transport.write(tapped.said)
                    await client.end()
        assert (len(served.heard), len(other.heard)) == (1, 0)


FALSE_SERVERS: dict[str, Callable[[bytes], bytes]] = {
    "without a secret": lambda _: frame(4) + frame(8, 0, 0, struct.pack(">I", 1)),
    "with another": lambda opening: Called(THEIRS, "rpc").challenge(opening),
    "that reflects": lambda opening: opening + Caller(OURS, "rpc").opening + bytes(8),
    "that was recorded": lambda _: Called(OURS, "rpc").challenge(Caller(OURS, "rpc").opening),
    "for KV": lambda opening: Called(OURS, "kv").challenge(opening),
    "of zeros": lambda _: bytes(CHALLENGE.size),
}


@pytest.mark.parametrize("answer", FALSE_SERVERS.values(), ids=FALSE_SERVERS)
async def test_a_false_server_never_sees_what_it_is_called_for(answer: Callable[[bytes], bytes]) -> None:
    said, ended = b"", asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal said
        said += await reader.read(65_536)
        writer.write(answer(said))
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                said += data
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        channel = connect(address, OURS)
        with pytest.raises(PeerError, match="cluster secret"):
            await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
        channel.close()
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
    assert len(said) == len(Caller(OURS, "rpc").opening)


async def test_a_server_that_never_proves_itself_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "CONNECT_S", 0.1)
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while await reader.read(65_536):
                pass
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        channel = connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", OURS)
        with pytest.raises(PeerError):
            await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        channel.close()


async def test_an_introduction_may_come_in_any_pieces() -> None:
    async with serving(OURS) as served, raw(served, http=False) as client:
        caller = Caller(OURS, "rpc")
        for byte in caller.opening:
            client.transport.write(bytes([byte]))
            await asyncio.sleep(0)
        assert await wait_until(lambda: len(client.received) == CHALLENGE.size, WAIT_S)
        for byte in caller.answer(client.received):
            client.transport.write(bytes([byte]))
            await asyncio.sleep(0)
        client.transport.write(client.begin())
        client.call(1, GOOD)
        assert await client.status() is Status.OK
