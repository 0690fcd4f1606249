"""RPC servers and clients against strangers: malformed calls, floods, and peers without the cluster's certificate."""

import asyncio
import logging
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
from grpclib.const import Status
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from cluster.secret import write_secret
from shared.lifecycle import wait_until
from shared.logs import peer_log
from shared.rpc import connection as grpc_connection
from shared.rpc import tls
from shared.rpc.codec import encode
from shared.rpc.connection import SERVER_ANSWER_S, bounded_timeout
from shared.rpc.messages import Ack, NodeUpdate, RouterCommand, StopRequest
from shared.rpc.methods import ATTACH, STOP, PeerError, RpcServer, connect, unary
from shared.rpc.tls import ClusterIdentity

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", STOP.path),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc+msgpack"),
]
WAIT_S = 20.0


class Served:
    """A server, what it was told, and how many connections it holds."""

    def __init__(self, identity: ClusterIdentity | None = None, answer_s: float = SERVER_ANSWER_S) -> None:
        self.heard: list[StopRequest] = []
        self.server = RpcServer({STOP: unary(self._stop), ATTACH: self._attach}, identity, answer_s)
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
        return self.server.num_connections

    async def works(self, identity: ClusterIdentity | None = None) -> None:
        channel = connect(self.address, identity)
        try:
            assert await STOP.call(channel, StopRequest(b"well"), WAIT_S) == Ack("heard")
        finally:
            channel.close()


@asynccontextmanager
async def serving(identity: ClusterIdentity | None = None, answer_s: float = SERVER_ANSWER_S) -> AsyncIterator[Served]:
    served = Served(identity, answer_s)
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
    peer_log.reset("127.0.0.1")
    peer_log.reset("an RPC client")
    yield
    lines = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert not [record for record in lines if record.exc_info]
    assert len(lines) <= 1, [record.getMessage() for record in lines]


def message(data: bytes, length: int | None = None, compressed: int = 0) -> bytes:
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


def frame(kind: int, flags: int = 0, stream: int = 0, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


GOOD = message(encode(StopRequest(b"ticket")))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> ClusterIdentity:
    return identity_in(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> ClusterIdentity:
    return identity_in(tmp_path_factory.mktemp("theirs"))


def identity_in(directory: Path) -> ClusterIdentity:
    write_secret(directory / "secret")
    return tls.read_identity(str(directory / "secret"))


REFUSED = "refused without a certificate of this cluster"


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
    assert bounded_timeout("99999999999H") == "3600S"
    assert bounded_timeout("3599S") == "3599S"


async def test_a_call_that_never_sends_its_message_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.rpc.methods.MESSAGE_S", 0.1)
    async with serving() as served, raw(served) as client:
        client.call(1, GOOD[:-1], end=False)
        assert await client.status() is Status.DEADLINE_EXCEEDED


async def test_calls_that_are_cancelled_leave_nothing_whenever_that_is() -> None:
    begun = ended = 0

    async def wait(stream: Any) -> None:
        nonlocal begun, ended
        begun += 1
        try:
            await stream.recv_message()
            await stream.send_message(Ack("heard"))
        finally:
            ended += 1

    server = RpcServer({STOP: wait})
    served = Served()
    served.port = await server.start("127.0.0.1", 0)
    async with raw(served) as client:
        for stream in range(1, 101, 2):
            client.http.send_headers(stream, HEADERS, end_stream=False)
            if stream % 3 == 0:
                client.transport.write(client.http.data_to_send())
                assert await wait_until(lambda: begun > ended, WAIT_S)
            client.http.reset_stream(stream)
            client.transport.write(client.http.data_to_send())  # else both arrive at once
        for stream in range(101, 301, 2):  # as many as may be open, so none of the others is still counted
            client.call(stream, GOOD[:-1], end=False)
        assert await wait_until(lambda: begun - ended == 100, WAIT_S)
    await server.close()


# Connections


GARBAGE = {
    "nothing": b"",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "half a TLS greeting": bytes.fromhex("1603010200010001fc0303") + bytes(100),
    "half a preface": PREFACE[:10],
    "a preface and silence": PREFACE,
    "a frame of 16 MiB": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x00",
    "data for no stream": PREFACE + frame(4) + frame(0, 0, 7, b"data"),
    "zeros": bytes(10_000),
}


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "secret"])
@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE)
async def test_who_says_nothing_or_nonsense_is_hung_up_on(
    words: bytes, is_open: bool, ours: ClusterIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grpc_connection.HANDSHAKE_S <= 5
    monkeypatch.setattr(grpc_connection, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(grpc_connection, "PING_S", 0.1)
    identity = None if is_open else ours
    async with serving(identity, answer_s=0.2) as served:
        async with raw(served, http=False) as client:
            client.transport.write(words)
            await client.end()
        assert await wait_until(lambda: not served.num_open, WAIT_S)
        await served.works(identity)
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
    monkeypatch.setattr(grpc_connection, "FRAMES_AT_ONCE", 300)
    monkeypatch.setattr(grpc_connection, "FRAMES_PER_S", 0)
    async with serving() as served, raw(served) as client:
        client.transport.write(flood * 400)
        await client.end()
        assert client.ended_with == error
        await served.works()


async def test_empty_data_is_neither_the_end_of_a_message_nor_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "FRAMES_AT_ONCE", 300)
    monkeypatch.setattr(grpc_connection, "FRAMES_PER_S", 0)
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
    monkeypatch.setattr(grpc_connection, "FRAMES_PER_S", 0)
    monkeypatch.setattr(grpc_connection, "FRAMES_AT_ONCE", 2_000)
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


# The certificate


async def test_who_proves_nothing_is_in_nobodys_way(ours: ClusterIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "MAX_CONNECTIONS_PER_ADDRESS", 2)
    monkeypatch.setattr(grpc_connection, "HANDSHAKE_S", 60.0)
    async with serving(ours) as served, AsyncExitStack() as cleanup:
        for number in range(20):
            stranger = await cleanup.enter_async_context(raw(served, http=False))
            stranger.transport.write(GARBAGE["half a TLS greeting"] if number % 2 else b"")
        channel = connect(served.address, ours)
        cleanup.callback(channel.close)
        stream = await cleanup.enter_async_context(ATTACH.open(channel))
        await stream.send_message(RouterCommand("router"))
        assert await stream.recv_message() == NodeUpdate()
        await served.works(ours)
        assert served.num_open <= 2


async def test_who_has_the_certificate_is_served_on_calls_and_streams(ours: ClusterIdentity) -> None:
    async with serving(ours) as served:
        await served.works(ours)
        channel = connect(served.address, ours)
        async with ATTACH.open(channel) as stream:
            for _ in range(3):
                await stream.send_message(RouterCommand("router"))
                assert await stream.recv_message() == NodeUpdate()
        channel.close()


async def test_who_has_another_certificate_is_neither_calls_nor_is_called_and_is_logged_once(
    ours: ClusterIdentity, theirs: ClusterIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ours) as served:
        peer_log.reset(served.address)
        for _ in range(5):
            channel = connect(served.address, theirs)
            with pytest.raises(PeerError, match="its certificate is of another cluster; give all"):
                await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
            channel.close()
        assert await wait_until(lambda: not served.num_open, WAIT_S)
        assert served.heard == []
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == [f"{served.address}: not connected: its certificate is of another cluster"]


async def test_a_client_that_trusts_the_server_but_is_not_trusted_gets_nothing(
    ours: ClusterIdentity, theirs: ClusterIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    """With TLS 1.3 it believes itself connected, and may have sent its call, before the server refuses it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    careless = replace(theirs, client_context=context)
    async with serving(ours) as served:
        for _ in range(5):
            channel = connect(served.address, careless)
            with pytest.raises(PeerError):
                await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
            channel.close()
        assert await wait_until(lambda: not served.num_open, WAIT_S)
        assert served.heard == []
        await served.works(ours)
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert REFUSED in refusals[0]


async def test_plain_http_is_hung_up_on(ours: ClusterIdentity) -> None:
    async with serving(ours) as served:
        channel = connect(served.address)
        with pytest.raises(PeerError):
            await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
        channel.close()
        assert served.heard == []
        await served.works(ours)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", ""),
        (frame(4) + frame(8, 0, 0, struct.pack(">I", 1)), "no TLS .*: it has no secret"),
        (bytes(1000), "no TLS"),
    ],
    ids=["hangs up", "plain HTTP/2", "zeros"],
)
async def test_a_false_server_never_sees_what_it_is_called_for(
    ours: ClusterIdentity, answer: bytes, complaint: str
) -> None:
    said, ended = b"", asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal said
        said += await reader.read(65_536)
        writer.write(answer)
        with suppress(ConnectionError):
            while answer and (data := await reader.read(65_536)):
                said += data
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        channel = connect(address, ours)
        with pytest.raises(PeerError, match=complaint or None):
            await STOP.call(channel, StopRequest(b"the prompt"), WAIT_S)
        channel.close()
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
    assert said.startswith(b"\x16\x03\x01"), "a TLS greeting"
    assert b"the prompt" not in said


async def test_a_server_with_another_certificate_never_sees_what_it_is_called_for(
    ours: ClusterIdentity, theirs: ClusterIdentity
) -> None:
    """Even if it accepts anybody."""
    theirs.server_context.verify_mode = ssl.CERT_NONE
    async with serving(theirs) as served:
        channel = connect(served.address, ours)
        with pytest.raises(PeerError, match="its certificate is of another cluster"):
            await STOP.call(channel, StopRequest(b"the prompt"), WAIT_S)
        channel.close()
        assert served.heard == []
    theirs.server_context.verify_mode = ssl.CERT_REQUIRED


async def test_a_server_that_never_proves_itself_is_given_up(
    ours: ClusterIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        channel = connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", ours)
        with pytest.raises(PeerError):
            await STOP.call(channel, StopRequest(b"ticket"), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
        channel.close()


async def test_bytes_may_come_in_any_pieces(ours: ClusterIdentity) -> None:
    """As the first call in the segment that ends the handshake, or byte by byte."""
    ended = asyncio.Event()
    async with serving(ours) as served:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", served.port)

            async def forth() -> None:
                while data := await reader.read(65_536):
                    for byte in data:
                        back.write(bytes([byte]))
                        await asyncio.sleep(0)
                back.close()

            forwarding = asyncio.create_task(forth())
            with suppress(ConnectionError):
                while data := await there.read(65_536):
                    writer.write(data)
            writer.close()
            await forwarding
            back.close()
            ended.set()

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with server:
            channel = connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", ours)
            assert await STOP.call(channel, StopRequest(b"ticket"), WAIT_S) == Ack("heard")
            channel.close()
            async with asyncio.timeout(WAIT_S):
                await ended.wait()
