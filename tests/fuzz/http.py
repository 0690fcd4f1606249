"""Fuzz targets: connections, headers and bodies that clients send to the router."""

import asyncio
import json
from contextlib import suppress
from functools import cache
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from uvicorn.server import ServerState

from node.validation import check_submit
from router.http.asgi import check_headers, label_of
from router.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from router.http.connection import HttpConnection
from router.http.parsing import build_requests
from router.text.grammar_check import GrammarChecker
from router.text.model_files import read_model
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.rpc import messages
from shared.rpc.codec import decode, encode
from shared.rpc.messages import SubmitRequest
from shared.trace_context import traceparent_of
from tests.cluster.harness import DEMO
from tests.fuzz.target import as_json, target

PROMPT = {"model": "m", "prompt": "once", "max_tokens": 4, "temperature": 0, "stop": ["x"], "logit_bias": {"5": 1}}
GRAMMARS = GrammarChecker()
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4, "logprobs": True}


def _check_rejection(error: RequestError) -> None:
    assert 400 <= error.status < 500
    assert len(error.message) < 500, "the message must not repeat the input at length"
    json.dumps(error.message)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@target(as_json(PROMPT), as_json(PROMPT | {"prompt": [[1, 2], [3]], "n": 2, "stream": True}), bytes_per_byte=4000)
def completion_bodies(data: bytes) -> None:
    try:
        body = parse_body(CompletionBody, data, ["m"])
        model = read_model(DEMO, "m", 64, 0)
        requests = _loop().run_until_complete(build_requests(body, model, _tokenizer(), "cmpl-1", grammars=GRAMMARS))
    except RequestError as error:
        _check_rejection(error)
        return
    for generation in requests:
        assert 0 < len(generation.prompt) < 64
        assert len(generation.prompt) + generation.max_tokens <= 64
        prompt, stops = (messages.pack_ids(ids) for ids in (generation.prompt, sorted(generation.stop_tokens)))
        submit = SubmitRequest(
            generation.id, "r", prompt, len(generation.prompt), generation.max_tokens, generation.sampling,
            generation.min_tokens, stops,
        )  # fmt: skip
        # A node must accept every request that the router accepts.
        check_submit(decode(encode(submit), SubmitRequest), 64, model.vocab_size)


@target(as_json(CHAT), as_json({"messages": [{"role": "system", "content": "x", "name": "y"}]}), bytes_per_byte=4000)
def chat_bodies(data: bytes) -> None:
    for kind in (ChatBody, TokenizeBody, DetokenizeBody):
        try:
            parse_body(kind, data, ["m"])
        except RequestError as error:
            _check_rejection(error)


@target(b"content-type: application/json\nx-request-id: a-b\ntraceparent: 00-%b-%b-01" % (b"a" * 32, b"b" * 16))
def header_values(data: bytes) -> None:
    pairs = [line.partition(b":") for line in data.split(b"\n")]
    headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
    scope = {"type": "http", "headers": headers, "path": "/"}
    with suppress(RequestError):
        check_headers(Headers(scope=scope), 1000)
    assert label_of(scope).isascii()
    assert "\r" not in traceparent_of(Headers(scope=scope).getlist("traceparent"))


class FakeTransport(asyncio.Transport):
    """A transport that counts the bytes written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)

    def close(self) -> None:
        self.is_open = False

    def is_closing(self) -> bool:
        return not self.is_open

    def pause_reading(self) -> None:
        pass

    resume_reading = write_eof = pause_reading

    def can_write_eof(self) -> bool:
        return True


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@cache
def _http() -> uvicorn.Config:
    config = uvicorn.Config(_echo, log_config=None, access_log=False, lifespan="off", ws="none")
    config.load()
    return config


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@target(
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 2,
    POST + b"content-length: 2\r\n\r\n{}",
    POST + b"transfer-encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\ntrailer: 1\r\n\r\n",
    POST + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    bytes_per_byte=500,
)
def http_requests(data: bytes) -> None:
    """Feed the bytes to a connection in two pieces, then close it."""
    loop = _loop()

    async def serve() -> None:
        transport, state = FakeTransport(), ServerState()
        connection = HttpConnection(_http(), state, {}, loop)
        connection.connection_made(transport)
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            if piece and transport.is_open:
                connection.data_received(piece)
                await asyncio.sleep(0)
        connection.connection_lost(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert transport.num_bytes < 10_000

    loop.run_until_complete(serve())
