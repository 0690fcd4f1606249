"""Test the server of the health port: its answers, and that no input makes it exceed its limits."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import pytest

from shared.health import MAX_CONNECTIONS, TIMEOUT_S, HealthServer

LARGE = 64 << 20
PAGES = {
    "/large": lambda: (HTTPStatus.OK, "a" * LARGE),
    "/health": lambda: (HTTPStatus.OK, "ok\n"),
    "/ready": lambda: (HTTPStatus.SERVICE_UNAVAILABLE, "draining\n"),
    "/metrics": lambda: (HTTPStatus.OK, "ä_total 1\n" * 20_000),
}


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    server = HealthServer(PAGES)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close()


async def send(port: int, data: bytes) -> bytes:
    """Send the data and return all that the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def get(path: str, headers: str = "Host: x\r\nAccept: */*\r\n") -> bytes:
    return f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/health"), 200),
        (get("/health?verbose=1"), 200),
        (b"GET /health HTTP/1.0\n\n", 200),
        (get("/ready"), 503),
        (get("/metrics"), 200),
        (get("/"), 404),
        (get("/health/"), 404),
        (get("//health"), 404),
        (get("/health", "") .replace(b"GET", b"POST"), 404),
        (b"\r\n\r\n", 404),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 404),
        (bytes(range(256)) + b"\n\n", 404),
        (b"GET /" + b"a" * 1100 + b" HTTP/1.1\r\n\r\n", 414),
        (b"\xff" * 5000, 414),
        (get("/health", "A: " + "b" * 1100 + "\r\n"), 431),
        (get("/health", "A: b\r\n" * 100), 431),
        (b"GET /health HTTP/1.1\r\nHost: x", 0),
        (b"", 0),
    ],
)  # fmt: skip
async def test_each_request_gets_its_status_or_is_closed_after_a_while(request_: bytes, status: int) -> None:
    async with served() as port:
        answer = b""
        with suppress(ConnectionResetError):  # the server does not read all of a request that is too long
            answer = await send(port, request_)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()) if status else answer == b""
        if status == 200 and b"/metrics" in request_:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert f"Content-Length: {len(body)}".encode() in head
            assert body.decode() == PAGES["/metrics"]()[1]


async def test_idle_and_slow_connections_do_not_keep_a_probe_out() -> None:
    async with served() as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * MAX_CONNECTIONS)]
        for number, (_, writer) in enumerate(idle):
            writer.write(b"GET /hea"[: number % 9])
        began = asyncio.get_running_loop().time()
        assert (await send(port, get("/health"))).startswith(b"HTTP/1.1 200")
        assert asyncio.get_running_loop().time() - began < 1.9, "the probe did not wait until the others were closed"
        async with asyncio.timeout(30):
            for reader, writer in idle:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
                writer.close()


async def test_random_bytes_end_no_more_than_their_connection() -> None:
    rng = random.Random(0)
    async with served() as port:
        for _ in range(200):
            with suppress(ConnectionResetError):
                answer = await send(port, rng.randbytes(rng.randrange(2000)) + b"\n\n")
                assert answer[:12] in {b"HTTP/1.1 404", b"HTTP/1.1 414", b"HTTP/1.1 431"}
        assert (await send(port, get("/health"))).startswith(b"HTTP/1.1 200")


async def test_a_peer_that_does_not_read_is_disconnected() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()
        writer.write(get("/large"))
        await asyncio.sleep(TIMEOUT_S + 0.5)
        writer.transport.resume_reading()
        received = b""
        with suppress(ConnectionResetError):
            async with asyncio.timeout(30):
                received = await reader.read()
        assert len(received) < LARGE
        writer.close()
