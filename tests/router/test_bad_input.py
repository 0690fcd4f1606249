"""Send bad inputs over raw sockets to a router process whose nodes run the hash model.

Each bad request gets the expected status and an error in OpenAI's form. No process restarts. The next request is
served, on the same connection if the router keeps the connection open.
"""

import asyncio
import json
import re
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
import uvicorn

from cluster.cli import main
from engine.hash_model import expected_tokens
from router.http.connection import MAX_PIPELINED, ConnectionLimits, HttpConnection, IdleConnections
from router.http.parsing import cache_namespace
from shared.lifecycle import wait_until
from tests.cluster.harness import DEMO_VOCABULARY, Cluster, cluster
from tests.router.bad_requests import (
    ACME,
    ADMIN,
    FIELD_ROWS,
    GOOD,
    HTTP_ROWS,
    JSON,
    JSON_ROWS,
    KEY_ROWS,
    MAX_CONNECTIONS,
    OTHER,
    SECRET,
    Answer,
    Client,
    Row,
    get,
    head,
    post,
)
from tests.router.scripted import MODEL, ScriptedDispatcher, app_of, serving

INTERNALS = re.compile(
    rb"Traceback|\.py\b|0x[0-9a-f]{6}|/(?:home|work|usr|etc|root|var|proc)/|Error:|Exception|pydantic"
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{name}:{sha256(key.encode()).hexdigest()}" for name, key in (("acme", ACME), ("other", OTHER))]
    file.write_text("\n".join([*lines, f"ops:{sha256(ADMIN.encode()).hexdigest()}:admin"]))
    with cluster(api_keys_file=file, api_key=ADMIN, max_connections=MAX_CONNECTIONS) as running:
        before = {name: process.pid for name, process in running.processes.items()}
        yield running
        for name, process in running.processes.items():
            assert (process.pid, process.poll()) == (before[name], None), f"{name} did not survive"
        running.idle()
        counts = running.status()["requests"]
        assert counts["running"] == counts["failed"] == 0
        for name in running.processes:
            assert not re.search(r"Traceback|bug", running.log(name)), running.log(name)


# ---- one client --------------------------------------------------------------------------------------------------------


def check_form(answer: Answer, request: bytes = b"") -> None:
    """Check that an error has OpenAI's form and a request id, and reveals neither internals nor the prompt."""
    assert answer.headers["content-type"].startswith("application/json")
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 300
    assert error["type"].endswith("_error")
    assert [found for found in INTERNALS.findall(answer.body) if found not in request] == []
    assert SECRET not in answer.body.decode()
    assert answer.headers["x-request-id"]


# ---- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", JSON_ROWS + HTTP_ROWS + KEY_ROWS + FIELD_ROWS, ids=str)
def test_a_bad_input_gets_its_answer_and_the_next_is_served(live: Cluster, row: Row) -> None:
    with Client(live.port) as client:
        client.send(row.data)
        answer = client.answer()
        assert answer.status in row.statuses, answer.body
        if answer.status >= 400:
            check_form(answer, row.data)
        if row.says:
            assert row.says in json.loads(answer.body)["error"]["message"]
        if row.closes:
            assert answer.headers["connection"] == "close"
            assert client.is_closed()
        else:
            client.send(get("/health"))
            assert client.answer().status == 200


# ---- more than one request ----------------------------------------------------------------------------------------------


def test_a_thousand_requests_on_one_connection_are_answered_in_order(live: Cluster) -> None:
    with Client(live.port) as client:
        data = b"".join(get("/v1/models/x", f"x-request-id: number-{number}") for number in range(1000))
        sending = threading.Thread(target=client.send, args=(data,))
        sending.start()
        for number in range(1000):
            answer = client.answer()
            assert (answer.status, answer.headers["x-request-id"]) == (404, f"number-{number}")
        sending.join()
        client.send(post(GOOD) + post(b"[]") + get("/health"))
        assert [client.answer().status for _ in range(3)] == [200, 400, 200]


def test_expect_100_continue(live: Cluster) -> None:
    with Client(live.port) as client:
        client.send(head("/v1/completions", JSON, f"content-length: {len(GOOD)}", "expect: 100-continue"))
        assert client.answer().status == 100
        client.send(GOOD)
        assert client.answer().status == 200
        client.send(head("/v1/completions", JSON, "content-length: 99", "expect: 100-continue", key="wrong"))
        assert client.answer().status == 401


def test_requests_with_the_same_label_have_different_ids(live: Cluster) -> None:
    labels, names = [], []
    for _ in range(2):
        with Client(live.port) as client:
            client.send(post(GOOD, "x-request-id: mine"))
            answer = client.answer()
            labels.append(answer.headers["x-request-id"])
            names.append(json.loads(answer.body)["id"])
    assert labels == ["mine", "mine"]
    assert len(set(names)) == 2


def test_idle_connections_are_closed_for_new_requests(live: Cluster) -> None:
    with Client(live.port) as first:
        first.send(get("/health"))
        assert first.answer().status == 200
        idle = [Client(live.port) for _ in range(MAX_CONNECTIONS + 50)]
        for client in (first, idle[-1]):
            client.send(post(GOOD))
            assert client.answer().status == 200
        assert all(client.is_closed() for client in idle[:50])
        for client in idle:
            client.__exit__()


def _is_served(port: int) -> bool:
    with Client(port) as client:
        client.send(get("/health"))
        return client.answer().status == 200


def test_long_texts_do_not_delay_other_requests(live: Cluster) -> None:
    raw = json.dumps({"prompt": "ab " * 100_000}).encode()
    waits: list[float] = []

    def send_long_text() -> None:
        with Client(live.port) as client:
            client.send(post(raw))
            assert client.answer().status == 400

    threads = [threading.Thread(target=send_long_text) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert _is_served(live.port)
        waits.append(time.monotonic() - began)
    assert statistics.median(waits) < 0.5


# ---- tenants --------------------------------------------------------------------------------------------------------------


def cached(live: Cluster, key: str, prompt: list[int], **more: Any) -> int:
    """Return how many prompt tokens were cached. Check the answer: it is wrong if KV with another salt was used."""
    salt = cache_namespace({ACME: "acme", OTHER: "other"}[key], more.get("cache_salt"))
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    with Client(live.port) as client:
        client.send(post(json.dumps(body).encode(), key=key))
        answer = json.loads(client.answer().body)
    assert answer["choices"][0]["token_ids"] == expected_tokens(prompt, 2, DEMO_VOCABULARY, salt)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("salt", [None, "pepper"])
def test_a_tenant_finds_only_its_own_prompts_in_the_cache(live: Cluster, salt: str | None) -> None:
    """Each miss is followed by a hit of the same prompt, so that the test fails if the cache is disabled."""
    for number in range(3):
        prompt = [(7 * number + i * (3 if salt else 5)) % 2000 + 5 for i in range(160)]
        more = {"cache_salt": salt} if salt else {}
        assert cached(live, ACME, prompt, **more) == 0
        assert cached(live, OTHER, prompt, **more) == 0, "a tenant used the cache of another tenant"
        assert cached(live, ACME, prompt, **more) >= 128
        assert cached(live, OTHER, prompt, **more) >= 128
        assert cached(live, ACME, prompt, cache_salt="another") == 0


# ---- the command line ---------------------------------------------------------------------------------------------------------


def test_baton_commands_send_the_key(live: Cluster, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    assert main(["status", "--url", live.url]) == 1
    assert "give --api-key, or set BATON_API_KEY" in capsys.readouterr().err
    assert main(["status", "--url", live.url, "--api-key", ADMIN]) == 0
    assert "prefill-0" in capsys.readouterr().out
    monkeypatch.setenv("BATON_API_KEY", ADMIN)
    assert main(["top", "--url", live.url]) == 0
    assert main(["role", "prefill-0", "prefill", "--url", live.url]) == 0
    monkeypatch.setenv("BATON_API_KEY", ACME)
    assert main(["top", "--url", live.url]) == 1
    assert main(["role", "prefill-0", "decode", "--url", live.url]) == 1
    assert "the key of an admin" in capsys.readouterr().err


# ---- timeouts ---------------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A server with short timeouts."""

    port: int
    dispatcher: ScriptedDispatcher
    server: uvicorn.Server
    idle: IdleConnections

    def drain(self) -> None:
        """Start to drain, as a router's process does when it shuts down."""
        self.idle.is_draining = self.server.should_exit = True


@asynccontextmanager
async def short_timeouts(byte_level: Any, **limits: float) -> AsyncIterator[Served]:
    dispatcher, idle = ScriptedDispatcher(lambda _, __: [5, 6, 2]), IdleConnections()
    app = app_of(dispatcher, byte_level, MODEL, body_timeout_s=0.3)
    times = {"head_s": 0.3, "rest_s": 0.3, "idle_s": 0.6}
    http = partial(HttpConnection, limits=ConnectionLimits(**(times | limits)), waiting=idle)
    async with serving(app, http=http) as (server, port):
        yield Served(port, dispatcher, server, idle)


REQUEST = post(b'{"prompt":"x"}')
RESET = b"<reset>"


async def ended(port: int, *pieces: bytes, gap_s: float = 0.02) -> bytes:
    """Send the pieces with pauses. Return all bytes that the router sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = bytearray()

    async def read() -> None:
        try:
            while data := await reader.read(1 << 16):
                received.extend(data)
        except ConnectionError:
            received.extend(RESET)

    reading = asyncio.create_task(read())
    for piece in pieces:
        if reading.done():
            break
        writer.write(piece)
        await asyncio.sleep(gap_s)
    await asyncio.wait_for(reading, 60)
    writer.close()
    return bytes(received)


SLOW_HEAD = [bytes([byte]) for byte in b"GET /health HTTP/1.1\r\na: " + b"b" * 5000]
OPEN_HEAD = head("/v1/completions", JSON, "content-length: 5000")
ENDLESS = OPEN_HEAD.replace(b"content-length: 5000", b"transfer-encoding: chunked")


async def test_a_client_that_sends_slowly_or_nothing_is_disconnected(byte_level: Any) -> None:
    async with short_timeouts(byte_level) as served:
        received = await asyncio.gather(
            ended(served.port),
            ended(served.port, b"\r\n" * 3),
            ended(served.port, *SLOW_HEAD),
            ended(served.port, OPEN_HEAD, *[b" "] * 5000),
            ended(served.port, ENDLESS, *[b"1\r\n \r\n"] * 5000),
            ended(served.port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
            ended(served.port, b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n", *[b" "] * 5000),
            ended(served.port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he"),
        )
        assert served.dispatcher.answers == []
    nothing, blank, slow_head, slow_body, chunks, idle, rest, second = received
    assert nothing == blank == b""
    for answer in (slow_head, slow_body, chunks):
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
    assert idle.startswith(b"HTTP/1.1 200 ")
    assert rest.startswith(b"HTTP/1.1 405 "), "answered before its body has arrived"
    assert [line[9:12] for line in second.split(b"\r\n") if line.startswith(b"HTTP/")] == [b"200", b"408"]


async def test_a_connection_with_a_request_is_not_closed_for_another(byte_level: Any) -> None:
    async with short_timeouts(byte_level, connections=2, idle_s=60.0, head_s=60.0) as served:
        served.dispatcher.hangs_after = 0
        (_, at_work), (idle, at_rest) = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        at_work.write(REQUEST)
        await served.dispatcher.hanging.acquire()
        at_rest.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await idle.readuntil(b"\r\n\r\n")
        _, late = await asyncio.open_connection("127.0.0.1", served.port)
        late.write(REQUEST)
        await served.dispatcher.hanging.acquire()
        await idle.read()  # until the router closes the connection
        assert (await ended(served.port)).startswith(b"HTTP/1.1 503 "), "all other connections have requests"
        assert len(served.server.server_state.connections) == 2
        for writer in (at_work, at_rest, late):
            writer.close()


async def test_every_request_on_a_lost_connection_is_cancelled(byte_level: Any) -> None:
    """The request in progress is cancelled even if a pipelined request waits behind it."""
    async with short_timeouts(byte_level) as served:
        served.dispatcher.hangs_after = 1
        request = post(b'{"prompt":"x","stream":true}')
        writer = (await asyncio.open_connection("127.0.0.1", served.port))[1]
        writer.write(request + request)
        await served.dispatcher.hanging.acquire()
        writer.close()
        async with asyncio.timeout(20):
            await served.dispatcher.answers[0].gone.wait()
        assert len(served.dispatcher.answers) == 1


async def test_a_client_that_is_rejected_while_it_sends_can_read_the_error(byte_level: Any) -> None:
    """If the router closed a socket with unread bytes, the client would see a reset and might lose the response."""
    async with short_timeouts(byte_level, rest_s=20) as served:
        answer = await ended(served.port, OPEN_HEAD.replace(b"5000", b"50000000"), *[b" " * 2**16] * 100, gap_s=0)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert not answer.endswith(RESET)


async def test_an_error_is_not_sent_in_place_of_another_response(byte_level: Any) -> None:
    async with short_timeouts(byte_level) as served:
        served.dispatcher.hangs_after = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(REQUEST)
        await served.dispatcher.hanging.acquire()
        writer.write(b"garbage\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        async with asyncio.timeout(20):
            await served.dispatcher.answers[0].gone.wait()


@pytest.mark.parametrize("hangs", [False, True])
async def test_pipelined_requests_are_bounded(byte_level: Any, hangs: bool) -> None:
    """The router parses a few pipelined requests, buffers a few more as bytes, and does not read the rest."""
    async with short_timeouts(byte_level) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        if hangs:
            served.dispatcher.hangs_after = 0
            writer.write(REQUEST * (1 + MAX_PIPELINED))  # 1 in progress; the router parses the others in advance
            await served.dispatcher.hanging.acquire()
        writer.write(REQUEST * 200_000)
        for _ in range(0 if hangs else 50):
            await asyncio.wait_for(reader.readuntil(b'"cached_tokens":0}}}'), 20)
        await asyncio.sleep(0.2)
        assert writer.transport.get_write_buffer_size() > 2**20, "the router did not stop reading"
        writer.transport.abort()
        for connection in list(served.server.server_state.connections):  # the server does not read, so it sees no reset
            connection.transport.abort()


async def test_a_draining_server_answers_connected_clients(byte_level: Any) -> None:
    async with short_timeouts(byte_level, head_s=20.0, idle_s=20.0, drain_s=20.0) as served:
        (idle, begun, new) = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        begun[1].write(REQUEST[:30])  # the router reads this before it answers the request on `idle`
        idle[1].write(REQUEST)
        await asyncio.wait_for(idle[0].readuntil(b'"cached_tokens":0}}}'), 20)
        served.drain()
        assert await asyncio.wait_for(idle[0].read(), 20) == b"", "an idle connection is closed"
        for (reader, writer), rest in ((new, REQUEST), (begun, REQUEST[30:])):
            writer.write(rest)
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 OK")
        for _, writer in (idle, begun, new):
            writer.close()


async def test_a_draining_server_does_not_wait_for_idle_clients(byte_level: Any) -> None:
    async with short_timeouts(byte_level, head_s=60.0, drain_s=0.1) as served:
        silent = asyncio.create_task(ended(served.port))
        assert await wait_until(lambda: len(served.server.server_state.connections) == 1, 20)
        served.drain()
        assert await asyncio.wait_for(silent, 20) in {b"", RESET}
