"""An `HttpConnection` collects what a response sends at the same time, and writes it with a single system call."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from router.http.connection import UNSENT_BYTES, HttpConnection


class RecordingTransport(asyncio.Transport):
    """A transport that records what each call of `write` wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


async def writes_of(*pieces: bytes | None) -> list[bytes]:
    """Return what each call wrote for a response of these pieces, with a pause for each None. The connection closes
    after the response."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for piece in pieces:
            if piece is None:
                await asyncio.sleep(0.01)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    config.load()
    connection, transport = HttpConnection(config, ServerState(), {}), RecordingTransport()
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(30):
        while not transport.is_closed:  # noqa: ASYNC110 - there is no event to await
            await asyncio.sleep(0.001)
    connection.connection_lost(None)
    return transport.writes


async def test_pieces_that_are_sent_together_are_written_together() -> None:
    together, apart = await writes_of(b"one", b"two", None, b"three")
    assert together.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n")
    assert apart == b"5\r\nthree\r\n0\r\n\r\n", "also what was sent just before the connection closed"


async def test_a_long_response_is_not_collected() -> None:
    pieces = [bytes([number]) * UNSENT_BYTES for number in range(8)]
    writes = await writes_of(*pieces)
    assert max(map(len, writes)) < 2 * UNSENT_BYTES
    assert all(piece in b"".join(writes) for piece in pieces)
