"""Test RPC servers and clients with malformed calls, and with peers that lack the cluster's certificate."""

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
import pytest
from grpclib.const import Status

from cluster.secret import write_secret
from shared.lifecycle import wait_until
from shared.logs import peer_log
from shared.rpc import connection as grpc_connection
from shared.rpc import tls
from shared.rpc.codec import encode
from shared.rpc.messages import Ack, NodeUpdate, RouterCommand, StopRequest
from shared.rpc.methods import ATTACH, STOP, PeerError, RpcServer, is_late, unary
from shared.rpc.tls import ClusterIdentity
from tests.shared.rpc import connected, serving

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
    """A server that records its requests."""

    server: RpcServer
    address: str

    def __init__(self) -> None:
        self.received: list[StopRequest] = []

    async def stop(self, stop: StopRequest) -> Ack:
        self.received.append(stop)
        return Ack("received")

    async def attach(self, stream: Any) -> None:
        async for _ in stream:
            await stream.send_message(NodeUpdate([], None))

    async def works(self, identity: ClusterIdentity | None = None) -> None:
        async with connected(self.address, identity=identity) as channel:
            assert await STOP.call(channel, StopRequest(b"well"), WAIT_S) == Ack("received")


@asynccontextmanager
async def recording(identity: ClusterIdentity | None = None, **options: Any) -> AsyncIterator[Served]:
    served = Served()
    handlers = {STOP: unary(served.stop), ATTACH: served.attach}
    async with serving(handlers, identity=identity, **options) as (served.server, served.address):
        yield served


class Raw(asyncio.Protocol):
    """A client that can send any bytes and records the responses."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.http = h2.connection.H2Connection(config)
        self.speaks_http = False
        self.received = b""  # bytes received before HTTP/2 began
        self.answers: dict[int, dict[str, str]] = {}
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
        """Return the status of a call, or None if the connection was closed instead."""
        assert await wait_until(lambda: self.is_closed or "grpc-status" in self.answers.get(stream, {}), WAIT_S)
        answer = self.answers.get(stream, {})
        return Status(int(answer["grpc-status"])) if "grpc-status" in answer else None

    async def end(self) -> None:
        """Wait until the server closes the connection."""
        assert await wait_until(lambda: self.is_closed, WAIT_S)


@asynccontextmanager
async def raw(address: str, *, http: bool = True) -> AsyncIterator[Raw]:
    _, client = await asyncio.get_running_loop().create_connection(Raw, *address.split(":"))
    if http:
        client.transport.write(client.begin())
    try:
        yield client
    finally:
        client.transport.close()
        await client.end()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that a test logs at most one warning, and no traceback."""
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


GOOD = message(encode(StopRequest(b"reservation")))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> ClusterIdentity:
    return identity_in(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> ClusterIdentity:
    return identity_in(tmp_path_factory.mktemp("theirs"))


def identity_in(directory: Path) -> ClusterIdentity:
    write_secret(directory / "secret")
    return tls.read_identity(str(directory / "secret"))


CALLS: dict[str, tuple[bytes, Status]] = {
    "4 GiB": (message(b"", 2**32 - 1), Status.RESOURCE_EXHAUSTED),
    "cut": (message(b"cut", 100), Status.INVALID_ARGUMENT),
    "half a head": (b"\0\0", Status.INVALID_ARGUMENT),
    "half-closed": (b"", Status.INVALID_ARGUMENT),
    "compressed": (message(b"xx", compressed=1), Status.UNIMPLEMENTED),
    "no msgpack": (message(b"\xc1"), Status.INVALID_ARGUMENT),
    "a field of another type": (message(b"\x92\xc4\x01t\xc3"), Status.INVALID_ARGUMENT),
    "two": (GOOD + GOOD, Status.OK),  # a call has one message, and the server ignores a second one
}


@pytest.mark.parametrize(("body", "status"), CALLS.values(), ids=CALLS)
async def test_a_malformed_call_gets_its_status_and_the_connection_stays_usable(body: bytes, status: Status) -> None:
    async with recording() as served, raw(served.address) as client:
        client.call(1, body)
        assert await client.status() is status
        client.call(3, GOOD)
        assert await client.status(3) is Status.OK
        assert len(served.received) == 1 + (status is Status.OK)


async def test_a_call_whose_deadline_has_passed_fails_alone_and_is_not_logged() -> None:
    async with recording() as served, raw(served.address) as client:
        client.call(1, GOOD, grpc_timeout="0n")
        assert await client.status() is not Status.OK
        client.call(3, GOOD)
        assert await client.status(3) is Status.OK


def test_only_the_log_of_a_late_call_is_dropped() -> None:
    late = TimeoutError("Deadline exceeded")
    for message, error, is_dropped in (
        ("Timeout occurred", late, True),
        ("Timeout occurred", TimeoutError(), False),
        ("Failed to handle cancellation", late, False),
    ):
        record = logging.LogRecord("grpclib.server", 40, "", 1, message, (), (type(error), error, None))
        assert is_late(record) is is_dropped


async def test_cancelled_calls_are_released_even_if_they_never_started() -> None:
    begun = ended = 0

    async def wait(stream: Any) -> None:
        nonlocal begun, ended
        begun += 1
        try:
            await stream.recv_message()
            await stream.send_message(Ack("received"))
        finally:
            ended += 1

    async with serving({STOP: wait}) as (_, address), raw(address) as client:
        for stream in range(1, 101, 2):
            client.http.send_headers(stream, HEADERS, end_stream=False)
            if stream % 3 == 0:
                client.transport.write(client.http.data_to_send())
                assert await wait_until(lambda: begun > ended, WAIT_S)
            client.http.reset_stream(stream)
            client.transport.write(client.http.data_to_send())  # for most streams, this sends the headers and the reset
        for stream in range(101, 301, 2):  # the maximum number of open calls: cancelled calls must not count
            client.call(stream, GOOD[:-1], end=False)
        assert await wait_until(lambda: begun - ended == 100, WAIT_S)


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
async def test_a_client_that_sends_nothing_or_garbage_is_disconnected(
    words: bytes, is_open: bool, ours: ClusterIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tls.HANDSHAKE_S <= 5
    monkeypatch.setattr(tls, "HANDSHAKE_S", 2.0)
    identity = None if is_open else ours
    async with recording(identity, answer_s=1.0) as served:
        with monkeypatch.context() as soon:
            soon.setattr(grpc_connection, "PING_S", 0.1)
            async with raw(served.address, http=False) as client:
                client.transport.write(words)
                await client.end()
            assert await wait_until(lambda: not served.server.connections, WAIT_S)
        await served.works(identity)  # with the usual ping interval, as the machine may be busy
        assert len(served.received) == 1


# The certificate


async def test_unfinished_handshakes_are_bounded_and_do_not_hold_up_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = identity_in(tmp_path)
    monkeypatch.setattr(tls, "MAX_HANDSHAKES", 10)
    monkeypatch.setattr(tls, "HANDSHAKE_S", 60.0)
    async with recording(ours) as served, AsyncExitStack() as cleanup:
        strangers = []
        for number in range(9):
            strangers.append(await cleanup.enter_async_context(raw(served.address, http=False)))
            strangers[-1].transport.write(GARBAGE["half a TLS greeting"] if number % 2 else b"")
        channel = await cleanup.enter_async_context(connected(served.address, identity=ours))
        stream = await cleanup.enter_async_context(ATTACH.open(channel))
        for _ in range(3):
            await stream.send_message(RouterCommand("router"))
            assert await stream.recv_message() == NodeUpdate()
        await served.works(ours)
        for _ in range(3):
            strangers.append(await cleanup.enter_async_context(raw(served.address, http=False)))
        assert await wait_until(lambda: sum(stranger.is_closed for stranger in strangers) == 2, WAIT_S)
        await stream.send_message(RouterCommand("router"))
        assert await stream.recv_message() == NodeUpdate()


@pytest.mark.parametrize("trusts_any_server", [False, True])
async def test_a_client_with_another_certificate_is_refused_and_logged_once(
    ours: ClusterIdentity, theirs: ClusterIdentity, trusts_any_server: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With TLS 1.3, a client that trusts any server may send a call before the server refuses the client."""
    if trusts_any_server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        theirs = replace(theirs, client_context=context)
    async with recording(ours) as served:
        peer_log.reset(served.address)
        for _ in range(5):
            async with connected(served.address, identity=theirs) as channel:
                with pytest.raises(
                    PeerError, match=None if trusts_any_server else "its certificate belongs to another cluster"
                ):
                    await STOP.call(channel, StopRequest(b"reservation"), WAIT_S)
        assert await wait_until(lambda: not served.server.connections, WAIT_S)
        assert served.received == []
        await served.works(ours)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    complaint = "refused without a certificate of this cluster" if trusts_any_server else "not connected"
    assert complaint in line


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (b"", ""),
        (None, "Timeout"),
        (frame(4) + frame(8, 0, 0, struct.pack(">I", 1)), "no TLS .*: it has no secret"),
        (bytes(1000), "no TLS"),
    ],
    ids=["hangs up", "silent", "plain HTTP/2", "zeros"],
)
async def test_a_false_server_receives_no_request(
    ours: ClusterIdentity, answer: bytes | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is None:
        monkeypatch.setattr(grpc_connection, "CONNECT_S", 0.1)
    received, ended = b"", asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received += await reader.read(65_536)
        writer.write(answer or b"")
        with suppress(ConnectionError):
            while answer != b"" and (data := await reader.read(65_536)):
                received += data
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connected(address, identity=ours) as channel:
            with pytest.raises(PeerError, match=complaint or None):
                await STOP.call(channel, StopRequest(b"the prompt"), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await ended.wait()
    assert received.startswith(b"\x16\x03\x01"), "a TLS greeting"
    assert b"the prompt" not in received


async def test_a_server_with_another_certificate_receives_no_request(
    ours: ClusterIdentity, theirs: ClusterIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs.server_context, "verify_mode", ssl.CERT_NONE)
    async with recording(theirs) as served, connected(served.address, identity=ours) as channel:
        with pytest.raises(PeerError, match="its certificate belongs to another cluster"):
            await STOP.call(channel, StopRequest(b"the prompt"), WAIT_S)
        assert served.received == []
