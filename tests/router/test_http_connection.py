"""Test when an `HttpConnection` writes a response, and how responses end when the router shuts down."""

import asyncio
import gc
import json
import weakref
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from router.http.connection import UNSENT_BYTES, HttpConnection
from router.text.tokenizer import Tokenizer
from tests.router.scripted import MODEL, ScriptedDispatcher, app_of


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


async def writes_of(app: Any) -> list[bytes]:
    """Return what each call wrote while a connection served one request of `app`. The connection then closes."""
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    config.load()
    state = dict[str, Any]()
    connection, transport = HttpConnection(config, ServerState(), state), RecordingTransport()
    state["connection"] = weakref.proxy(connection)
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(30):
        while not transport.is_closed:  # noqa: ASYNC110 - there is no event to await
            await asyncio.sleep(0.001)
    connection.connection_lost(None)
    return transport.writes


def responding(*pieces: bytes | None) -> Any:
    """Return an app that sends these pieces, with a pause for each None."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        for piece in pieces:
            if piece is None:
                await asyncio.sleep(0.01)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def test_pieces_that_are_sent_together_are_written_together() -> None:
    together, apart = await writes_of(responding(b"one", b"two", None, b"three"))
    assert together.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n")
    assert apart == b"5\r\nthree\r\n0\r\n\r\n", "also what was sent just before the connection closed"


async def test_a_client_that_closes_its_side_gets_its_response() -> None:
    """Some health checks send a request and close their side of the connection at once."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        connection = scope["state"]["connection"]
        connection.eof_received()
        connection.transport.close()  # as the event loop does

    assert (await writes_of(app))[0].endswith(b"\r\n\r\nok")


async def test_a_long_response_is_not_collected() -> None:
    pieces = [bytes([number]) * UNSENT_BYTES for number in range(8)]
    writes = await writes_of(responding(*pieces))
    assert max(map(len, writes)) < 2 * UNSENT_BYTES
    assert all(piece in b"".join(writes) for piece in pieces)


async def test_a_closed_connection_is_freed_without_a_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        await writes_of(responding(b"one"))
        await asyncio.sleep(0.01)
        assert not any(type(each) is HttpConnection for each in gc.get_objects())
    finally:
        gc.enable()


async def test_a_request_that_a_drain_does_not_wait_for_ends_with_an_error(byte_level: Tokenizer) -> None:
    """When the time for a drain has passed, uvicorn cancels the tasks of all requests."""
    dispatcher = ScriptedDispatcher(lambda *_: [5, 6, 2])
    dispatcher.hangs_after = 0
    app, sent = app_of(dispatcher, byte_level, MODEL), list[dict[str, Any]]()
    body = [{"type": "http.request", "body": b'{"prompt":"x"}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"}
    task = asyncio.create_task(app(scope, receive, send))
    await dispatcher.hanging.acquire()
    task.cancel()
    await task
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "shutting_down"
    assert dispatcher.answers[0].closed == 1
