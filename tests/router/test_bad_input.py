"""Bad inputs over raw sockets to a router process with hash nodes behind it.

Each gets its status in OpenAI's form, no process restarts, and the next request is served, on the same connection if
that stays open.
"""

import asyncio
import json
import re
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
import uvicorn

from cluster.cli import main
from engine.components import HASH_LAYERS
from engine.hash_model import expected_tokens
from router.http.app import build_app
from router.http.connection import MAX_PIPELINED, HttpConnection
from router.http.limits import ConnectionLimits, IdleConnections
from router.http.parsing import cache_namespace
from shared.lifecycle import wait_until
from tests.cluster.harness import DEMO_VOCABULARY, Cluster, cluster
from tests.router.scripted import MODEL, ScriptedDispatcher

ACME, OTHER, ADMIN = "key-of-acme", "key-of-other", "key-of-admin"
MAX_CONNECTIONS = 200
CONTEXT = 8192
BODY_LIMIT = (256 << 10) + 16 * CONTEXT
SECRET = "the quick brown fox of Mrs Quimby"  # in prompts, and in no answer but a good one
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


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection, byte by byte."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send as much as the router reads; it need not read all of a request that it rejects."""
        with suppress(OSError):
            self.socket.sendall(data)

    def answer(self, *, head: bool = False) -> Answer:
        line = self.file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers: dict[str, str] = {}
        while (each := self.file.readline().strip()) != b"":
            name, _, value = each.decode("latin-1").partition(": ")
            headers[name] = value
        if head or int(line[9:12]) in {100, 304}:
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.file.readline(), 16):
                body += self.file.read(size)
                self.file.readline()
            self.file.readline()
        else:
            body = self.file.read(int(headers["content-length"]))
        return Answer(int(line[9:12]), headers, body)

    def is_closed(self) -> bool:
        """Wait until the router closes the connection."""
        try:
            return self.file.read(1) == b""
        except ConnectionError:
            return True


def head(path: str, *headers: str, method: str = "POST", key: str = ACME) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: router", f"authorization: Bearer {key}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


JSON = "content-type: application/json"


def post(raw: bytes, *headers: str, path: str = "/v1/completions", key: str = ACME) -> bytes:
    return head(path, JSON, f"content-length: {len(raw)}", *headers, key=key) + raw


def check_form(answer: Answer, asked: bytes = b"") -> None:
    """Check OpenAI's error form, the request id, and that the text reveals neither internals nor the prompt."""
    assert answer.headers["content-type"].startswith("application/json")
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 300
    assert error["type"].endswith("_error")
    assert [found for found in INTERNALS.findall(answer.body) if found not in asked] == []
    assert SECRET not in answer.body.decode()
    assert answer.headers["x-request-id"]


# ---- the table ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    name: str
    data: bytes
    statuses: set[int]
    closes: bool = False
    says: str = ""
    method: str = "POST"

    def __str__(self) -> str:
        return self.name


def fields(name: str, status: int = 400, says: str = "", chat: bool = False, **given: Any) -> Row:
    prompt = {"messages": [{"role": "user", "content": SECRET}]} if chat else {"prompt": SECRET}
    raw = json.dumps({**prompt, "max_tokens": 1, **given}, ensure_ascii=False, separators=(",", ":"))
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Row(name, post(raw.encode("utf-8", "surrogatepass"), path=path), {status}, says=says)


def chunked(*chunks: bytes, more: str = "") -> bytes:
    return head("/v1/completions", JSON, "transfer-encoding: chunked", *([more] if more else [])) + b"".join(chunks)


def get(path: str, *headers: str, method: str = "GET", key: str = ADMIN) -> bytes:
    return head(path, *headers, method=method, key=key)


GOOD = b'{"prompt":[5,6,7],"max_tokens":2}'
BIG = 2**63
UNKNOWN = ("kv_transfer_params", "remote_host", "bootstrap_room", "block_ids", "do_remote_decode", "remote_engine_id")

JSON_ROWS = [
    Row(f"{kind} {raw[:24]!r}", post(raw), {400}, says="Unicode" if kind == "not Unicode" else "")
    for kind, raws in {
        "not an object": [b"", b"[]", b'"x"', b"null", b"5", b" "],
        "not JSON": [
            GOOD + b"x",
            b"\xef\xbb\xbf" + GOOD,
            b'{"prompt":NaN}',
            b'{"a":-Infinity}',
            b'{"a":1e999}',
            b'{"a":1,}',
        ],
        "duplicate name": [b'{"prompt":"x","prompt":"y"}', b'{"prompt":"x","logit_bias":{"1":1,"1":2}}'],
        "not Unicode": [b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b'{"prompt":"\xed\xa0\x80"}', b'{"\\udfff":1}'],
    }.items()
    for raw in raws
]
JSON_ROWS += [
    Row("5000 digits", post(b'{"prompt":"x","seed":' + b"9" * 5000 + b"}"), {400}),
    Row("depth", post(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), {400}),
    Row("NUL", post(b'{"prompt":"a\\u0000b","max_tokens":1}'), {200}),
    Row("a million unknown keys", post(b"{" + b",".join(b'"%d":0' % i for i in range(10**6)) + b"}"), {413}, True),
    fields("unknown field", says="`temprature`", temprature=1),
]

HTTP_ROWS = [
    Row("body announced", head("/v1/completions", JSON, f"content-length: {10**12}"), {413}, True),
    Row("body by one", post(b" " * (BODY_LIMIT + 1)), {413}, True),
    Row("body chunks over the limit", chunked(*[b"8000\r\n" + b" " * 0x8000 + b"\r\n"] * 20), {413}, True),
    Row("body flood of chunks", chunked(*[b"1\r\n \r\n"] * 50_000), {413}, True),
    Row("chunk size", chunked(b"zz\r\nab\r\n"), {400}, True),
    Row("chunk negative size", chunked(b"-2\r\nab\r\n"), {400}, True),
    Row("chunk huge size", chunked(b"f" * 20 + b"\r\nab\r\n"), {400}, True),
    Row("chunk no CRLF", chunked(b"2\r\nabXX"), {400}, True),
    Row("chunk extension", chunked(b"2;" + b"x" * 2**20 + b"\r\nab\r\n0\r\n\r\n"), {400}, True),
    Row("chunk trailers", chunked(b"2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 100_000), {400}, True),
    Row("framing both", chunked(b"0\r\n\r\n", more="content-length: 5"), {400}, True),
    *[
        Row(f"framing {value}", head("/v1/completions", JSON, f"content-length: {value}") + b"{}", {400}, True)
        for value in ("-2", "+2", "2, 2", "0x2", "2\r\ncontent-length: 2", "2\r\ncontent-length: 3", "9" * 30)
    ],
    Row("framing encoding twice", chunked(b"0\r\n\r\n", more="transfer-encoding: chunked"), {400}, True),
    Row("framing encoding", head("/v1/completions", JSON, "transfer-encoding: gzip") + b"ab", {400}, True),
    Row(
        "framing encodings",
        head("/v1/completions", JSON, "transfer-encoding: gzip, chunked") + b"0\r\n\r\n",
        {415},
        True,
    ),
    Row("header line", get("/health", "a: " + "b" * 2**20), {431}, True),
    Row("header line without an end", b"GET /health HTTP/1.1\r\na: " + b"b" * 2**20, {431}, True),
    Row("header line of 9 KiB", get("/health", "a: " + "b" * 9000), {431}, True),
    Row("header 101 lines", get("/health", *["a: b"] * 99), {431}, True),
    Row("header 100 lines", get("/health", *["a: b"] * 98), {200}),
    Row("header lines", get("/health", *["a: b"] * 10_000), {431}, True),
    Row("header many large", get("/health", *["a: " + "b" * 8000] * 5), {431}, True),
    *[
        Row(f"header {bad!r}", get("/health", bad), {400}, True)
        for bad in ("a: b\r\n c", "a: b\0c", "a: b\rc", "a b: c", ": b", "a : b", "é: a")
    ],
    Row("request line URL", get("/" + "a" * 2**20), {414}, True),
    Row("request line method", get("/health", method="FOO"), {400}, True),
    Row("request line small letters", get("/health", method="get"), {400}, True),
    Row("request line CONNECT", get("evil:443", method="CONNECT"), {405}, True),
    Row("request line HTTP/0.9", b"GET /health\r\n\r\n", {400}, True),
    Row("request line HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}, True),
    Row("request line HTTP/3.0", b"GET /health HTTP/3.0\r\n\r\n", {400}, True),
    Row("request line TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 500, {400}, True),
    Row("request line text", b"hello there\r\n", {400}, True),
    Row("request line absolute form", get("http://evil.example/health"), {200}),
    Row("request line absolute form, wrong", get("http://[::1/health"), {400}, True),
    Row("request line host", get("/nothing", "host: [", "host: \\"), {404}),
    Row("request line OPTIONS *", get("*", method="OPTIONS"), {404}),
    *[
        Row(f"request line {path}", get(path), {404})
        for path in ("//", "//health", "/../etc/passwd", "/page/..%2fapi.py", "/%00", "/v1/models%00", "/page/%2e%2e")
    ],
    *[
        Row(f"request line {m}", get("/v1/completions", method=m), {405})
        for m in ("GET", "PUT", "DELETE", "PATCH", "PROPFIND")
    ],
    Row("upgrade expectation", post(GOOD, "expect: 200-ok"), {200}),
    Row(
        "upgrade h2c", post(GOOD, "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMA"), {200}
    ),
    Row(
        "upgrade websocket", get("/health", "connection: upgrade", "upgrade: websocket", "sec-websocket-key: x"), {200}
    ),
    Row("encoding gzip", post(b"\x1f\x8b" + bytes(99), "content-encoding: gzip"), {415}, True),
    Row("encoding br", post(GOOD, "content-encoding: br"), {415}, True),
    *[
        Row(
            f"content type {kind}",
            head("/v1/completions", f"content-type: {kind}", "content-length: 8") + b"prompt=x",
            {415},
            True,
        )
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "json",
            "*/*",
        )
    ],
]

KEY_ROWS = [
    Row(f"key {key[:8]!r}", get("/v1/models", key=key), {401})
    for key in ("", " ", "wrong", ACME + "x", ADMIN[:-1], "clé", "k" * 7000)
] + [
    Row("key in the query", get(f"/v1/models?api_key={ADMIN}&key={ADMIN}", key=""), {401}),
    Row("key 1 MiB", get("/v1/models", key="k" * 2**20), {431}, True),
    Row("key not yet read", head("/v1/completions", JSON, "content-length: 9", key="") + GOOD[:9], {401}),
    Row("key in a trailer", b"POST /v1/completions HTTP/1.1\r\n" + JSON.encode() + b"\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"21\r\n" + GOOD + b"\r\n0\r\nauthorization: Bearer " + ACME.encode() + b"\r\n\r\n", {401}),
    *[
        Row(f"route {method} {path}", get(path, method=method, key=""), {401}, method=method)
        for path in ("/metrics", "/", "/v1/../metrics", "/v1/status/", "/V1/STATUS", "/events", "/trace", "/nothing", "//")
        for method in ("GET", "HEAD", "OPTIONS")
    ],
    Row("route a tenant's", get("/metrics", key=ACME), {403}),
    Row("route a role", post(b'{"role":"decode"}', path="/v1/nodes/prefill-0/role"), {403}),
    *[
        Row(f"request id {value[:20]!r}", get("/nothing", f"x-request-id: {value}"), {404})
        for value in ("10.0.0.1:9000", "a b", "../../x", "é", "x" * 65, "cmpl-1\t", "{}")
    ],
    Row("request id 1 MiB", get("/health", "x-request-id: " + "x" * 2**20), {431}, True),
    Row("long metrics", get("/metrics?" + "a=b&" * 1000), {200}),
    Row("long URL", get("/metrics?" + "a" * 2**20), {414}, True),
    Row("long health", get("/health?" + "a" * 2**20), {414}, True),
    *[Row(f"timeout {value}", post(GOOD, f"x-request-timeout: {value}"), {400}) for value in ("0", "-1", "abc", "nan")],
    Row("timeout clamped", post(GOOD, "x-request-timeout: 1e9"), {200}),
]  # fmt: skip


def each(param: str, values: tuple[Any, ...], status: int = 400, chat: bool = False) -> list[Row]:
    return [fields(f"{param} {str(value)[:24]}", status, chat=chat, **{param: value}) for value in values]


def content(value: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": value, **more}]}


def image(url: str) -> dict[str, Any]:
    return content([{"type": "image_url", "image_url": {"url": url}}])


FIELD_ROWS = [
    *each("model", ("other", "", "../../etc/passwd", "x" * 10_240, 5), 404),
    *each("max_tokens", (0, -1, 2**31, BIG, 1.5, "16", True)),
    fields("null", 200, max_tokens=None, prompt=[5]),
    fields("over", says="8193: 8000 in the prompt and 193", prompt=[5] * 8000, max_tokens=193),
    *each("prompt", ("", [], [[]], [""], [5, "a"], ["a", [5]][:0], [[[5]]], {}, 5, [5] * CONTEXT, [5] * (CONTEXT + 1))),
    fields("one token", 200, prompt=[5]),
    fields("the whole context", 200, prompt=[5] * (CONTEXT - 1)),
    *each("prompt", ([-1], [DEMO_VOCABULARY], [BIG], [1.0], [True], [[5], [[6]]], ["5", 5])),
    *each("prompt", (["a"] * 10_000, ["a"] * 65, ["a", ""])),
    *each("n", (0, -1, 9, 10**9, "1")),
    fields("best_of", n=2, best_of=1),
    *each("temperature", (-0.1, 2.1, "0", True)),
    *each("temperature", (1e-300, -0.0), 200),
    *each("top_p", (0, 1.1)),
    *each("top_k", (-2, 2**40, 0.5)),
    *each("min_p", (2, -1)),
    *each("presence_penalty", (2.1, -2.1, 1e308)),
    *each("frequency_penalty", (2.1, -2.1, 1e308)),
    *each("repetition_penalty", (0, -1, 1e308)),
    *each("logprobs", (21, -1, True)),
    *each("logit_bias", ({"a": 1}, {"-1": 1}, {str(DEMO_VOCABULARY): 1}, {"1": 101}, {"1": -101}, {"1": None}, [])),
    fields("301 entries", logit_bias={str(i): 1 for i in range(301)}),
    *each("stop", (["a"] * 5, "", "x" * 65, "x" * 1000, [5], {})),
    *each("stop", ("\0", ["ab", "bc"]), 200),
    *each("seed", (-1, 2**64, 1.5, "1")),
    *each("stream", ("yes", 1)),
    fields("options", stream_options={"include_usage": True}),
    *each("cache_salt", ("", "x" * 257, 5)),
    *each("cache_salt", ("\0", "../../etc/passwd", "🧂", "a/b"), 200),
    Row("salt of 1 MiB", post(b'{"prompt":"x","cache_salt":"' + b"s" * 2**20 + b'"}'), {413}, True),
    fields("user", 200, user="u" * 100_000 + "\0/.."),
    fields("min_tokens", min_tokens=2),
    fields("huge", ignore_eos=True, max_tokens=2**31 - 1),
    *each("messages", ([], "hi", ["hi"], [{}], [{"role": "wizard", "content": "a"}]), chat=True),
    *[fields(f"{str(v)[:20]}", chat=True, **content(v)) for v in (None, 5, [], [{"type": "text", "text": 5}])],
    fields("parts", chat=True, **content([{"type": "text", "text": "x"}] * 5000)),
    fields("name", chat=True, **content("x", name="n" * 10_240)),
    *[
        fields(f"{url[:9]}", says="nothing is fetched", chat=True, **image(url))
        for url in ("http://169.254.169.254/latest", "file:///etc/passwd", "data:image/png;base64," + "A" * 9999)
    ],
    Row("100 MiB", head("/v1/chat/completions", JSON, f"content-length: {100 << 20}") + b"x" * 2**20, {413}, True),
    fields("template", says="`chat_template`", chat=True, chat_template="{{ 1 }}"),
    *[
        fields(f"{name}", says=f"`{name}`", chat=True, **{name: value})
        for name, value in {
            "chat_template_kwargs": {"tokenize": True},
            "trust_remote_code": True,
            "guided_regex": "(a+)+b",
            "guided_json": {"$ref": "#"},
            "response_format": {"type": "json_object"},
        }.items()
    ],
    *[fields(f"{name}", says=f"`{name}`", **{name: {"remote_host": "10.0.0.1"}}) for name in UNKNOWN],
    fields("special tokens", 200, chat=True, **content("<|end|><|im_start|>system")),
    *[
        fields(f"{text[:3]!r}", says="context is 8192 tokens", prompt=text)
        for text in ("a" * 300_000, " " * 300_000, "\u0301" * 100_000, bytes(range(32, 256)).decode("latin-1") * 800)
    ],
    fields("functions", says="`functions` is not supported", chat=True, functions=[{"name": "f"}]),
    fields("tools", says="`tools` is not supported", chat=True, tools=[{"type": "function"}]),
    fields("suffix", says="`suffix` is not supported", suffix="x"),
]

took_s: list[float] = []


@pytest.mark.parametrize("row", JSON_ROWS + HTTP_ROWS + KEY_ROWS + FIELD_ROWS, ids=str)
def test_a_bad_input_gets_its_answer_and_the_next_is_served(live: Cluster, row: Row) -> None:
    with Client(live.port) as client:
        began = time.monotonic()
        client.send(row.data)
        answer = client.answer(head=row.method == "HEAD")
        took_s.append(time.monotonic() - began)
        assert answer.status in row.statuses, answer.body
        if answer.status >= 400 and row.method != "HEAD":
            check_form(answer, row.data)
        if row.says:
            assert row.says in json.loads(answer.body)["error"]["message"]
        if row.closes:
            assert answer.headers["connection"] == "close"
            assert client.is_closed()
        else:
            client.send(get("/health"))
            assert client.answer().status == 200


def test_answers_to_bad_input_are_quick(live: Cluster) -> None:
    if len(took_s) < 200:
        pytest.skip("only the whole table says how quick it is")
    assert statistics.median(took_s) < 0.05


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


def test_a_body_is_asked_for_when_it_is_wanted(live: Cluster) -> None:
    with Client(live.port) as client:
        client.send(head("/v1/completions", JSON, f"content-length: {len(GOOD)}", "expect: 100-continue"))
        assert client.answer().status == 100
        client.send(GOOD)
        assert client.answer().status == 200
        client.send(head("/v1/completions", JSON, "content-length: 99", "expect: 100-continue", key="wrong"))
        assert client.answer().status == 401


def test_requests_of_one_label_are_two(live: Cluster) -> None:
    labels, names = [], []
    for _ in range(2):
        with Client(live.port) as client:
            client.send(post(GOOD, "x-request-id: mine"))
            answer = client.answer()
            labels.append(answer.headers["x-request-id"])
            names.append(json.loads(answer.body)["id"])
    assert labels == ["mine", "mine"]
    assert len(set(names)) == 2


def test_idle_connections_are_capped_and_give_way_to_those_that_ask(live: Cluster) -> None:
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


def test_long_texts_leave_the_router_to_others(live: Cluster) -> None:
    raw = json.dumps({"prompt": "ab " * 100_000}).encode()
    waits: list[float] = []

    def ask() -> None:
        with Client(live.port) as client:
            client.send(post(raw))
            assert client.answer().status == 400

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    while any(thread.is_alive() for thread in asking):
        began = time.monotonic()
        assert _is_served(live.port)
        waits.append(time.monotonic() - began)
    assert statistics.median(waits) < 0.5


# ---- tenants (S1) ---------------------------------------------------------------------------------------------------------


def cached(live: Cluster, key: str, prompt: list[int], **more: Any) -> int:
    """Return the number of cached prompt tokens. The answer proves that all KV was of this tenant and salt."""
    salt = cache_namespace({ACME: "acme", OTHER: "other"}[key], more.get("cache_salt"))
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
    with Client(live.port) as client:
        client.send(post(json.dumps(body).encode(), key=key))
        answer = json.loads(client.answer().body)
    assert answer["choices"][0]["token_ids"] == expected_tokens(prompt, 2, salt, HASH_LAYERS, DEMO_VOCABULARY)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("salt", [None, "pepper"])
def test_a_tenant_finds_only_its_own_prompts_in_the_cache(live: Cluster, salt: str | None) -> None:
    """Each miss is paired with a hit of the same prompt, so that a disabled cache fails the test."""
    for number in range(3):
        prompt = [(7 * number + i * (3 if salt else 5)) % 2000 + 5 for i in range(160)]
        more = {"cache_salt": salt} if salt else {}
        assert cached(live, ACME, prompt, **more) == 0
        assert cached(live, OTHER, prompt, **more) == 0, "another's, by content and salt the same"
        assert cached(live, ACME, prompt, **more) >= 128
        assert cached(live, OTHER, prompt, **more) >= 128
        assert cached(live, ACME, prompt, cache_salt="another") == 0


# ---- the command line ---------------------------------------------------------------------------------------------------------


def test_baton_commands_show_the_key(live: Cluster, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    assert main(["status", "--url", live.url]) == 1
    assert "wants an admin's key: give --api-key" in capsys.readouterr().err
    assert main(["status", "--url", live.url, "--api-key", ADMIN]) == 0
    assert "prefill-0" in capsys.readouterr().out
    monkeypatch.setenv("BATON_API_KEY", ADMIN)
    assert main(["top", "--url", live.url]) == 0
    assert main(["role", "prefill-0", "prefill", "--url", live.url]) == 0
    monkeypatch.setenv("BATON_API_KEY", ACME)
    assert main(["top", "--url", live.url]) == 1
    assert main(["role", "prefill-0", "decode", "--url", live.url]) == 1
    assert "the key of an admin" in capsys.readouterr().err


# ---- time, in a server of short patience -----------------------------------------------------------------------------------


@asynccontextmanager
async def impatient(byte_level: Any, **limits: float) -> AsyncIterator[tuple[int, ScriptedDispatcher, uvicorn.Server]]:
    dispatcher = ScriptedDispatcher(lambda _, __: [5, 6, 2])
    app = build_app(dispatcher, byte_level, MODEL, body_timeout_s=0.3)
    times = {"head_s": 0.3, "rest_s": 0.3, "idle_s": 0.6}
    http = partial(HttpConnection, limits=ConnectionLimits(**(times | limits)), waiting=IdleConnections())
    server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_level="warning", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1], dispatcher, server
    finally:
        server.should_exit = True
        await task
        listener.close()


ASKED = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: 14\r\n\r\n".encode() + b'{"prompt":"x"}'
RESET = b"<reset>"


async def ended(port: int, *pieces: bytes, gap_s: float = 0.02) -> bytes:
    """Send the pieces slowly, then nothing, and return what the router sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = bytearray()

    async def read() -> None:
        try:
            while data := await reader.read(1 << 16):
                said.extend(data)
        except ConnectionError:
            said.extend(RESET)

    reading = asyncio.create_task(read())
    for piece in pieces:
        if reading.done():
            break
        writer.write(piece)
        await asyncio.sleep(gap_s)
    await asyncio.wait_for(reading, 60)
    writer.close()
    return bytes(said)


SLOW_HEAD = [bytes([byte]) for byte in b"GET /health HTTP/1.1\r\na: " + b"b" * 5000]
OPEN_HEAD = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: 5000\r\n\r\n".encode()
ENDLESS = OPEN_HEAD.replace(b"content-length: 5000", b"transfer-encoding: chunked")


async def test_a_client_that_sends_slowly_or_nothing_is_disconnected(byte_level: Any) -> None:
    async with impatient(byte_level) as (port, dispatcher, _):
        said = await asyncio.gather(
            ended(port),
            ended(port, b"\r\n" * 3),
            ended(port, *SLOW_HEAD),
            ended(port, OPEN_HEAD, *[b" "] * 5000),
            ended(port, ENDLESS, *[b"1\r\n \r\n"] * 5000),
            ended(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
            ended(port, b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n", *[b" "] * 5000),
            ended(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he"),
        )
        assert dispatcher.answers == []
    nothing, blank, slow_head, slow_body, chunks, idle, rest, second = said
    assert nothing == blank == b""
    for answer in (slow_head, slow_body, chunks):
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
    assert idle.startswith(b"HTTP/1.1 200 ")
    assert rest.startswith(b"HTTP/1.1 405 "), "answered, and its body waited for no longer than that"
    assert [line[9:12] for line in second.split(b"\r\n") if line.startswith(b"HTTP/")] == [b"200", b"408"]


async def test_no_connection_gives_way_that_asks_something(byte_level: Any) -> None:
    async with impatient(byte_level, connections=2, idle_s=60.0) as (port, dispatcher, server):
        dispatcher.hangs_after = 0
        asked = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: {len(GOOD)}\r\n\r\n".encode()
        (_, at_work), (idle, at_rest) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        at_work.write(asked + GOOD)
        await dispatcher.hanging.acquire()
        at_rest.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await idle.readuntil(b"\r\n\r\n")
        _, late = await asyncio.open_connection("127.0.0.1", port)
        late.write(asked + GOOD)
        await dispatcher.hanging.acquire()
        await idle.read()  # to its end
        assert (await ended(port)).startswith(b"HTTP/1.1 503 "), "all others are at work"
        assert len(server.server_state.connections) == 2
        for writer in (at_work, at_rest, late):
            writer.close()


async def test_every_request_on_a_lost_connection_is_cancelled(byte_level: Any) -> None:
    """This includes the request in progress while another one waits behind it."""
    async with impatient(byte_level) as (port, dispatcher, _):
        dispatcher.hangs_after = 1
        raw = b'{"prompt":"x","stream":true}'
        asked = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw
        )
        writer = (await asyncio.open_connection("127.0.0.1", port))[1]
        writer.write(asked + asked)
        await dispatcher.hanging.acquire()
        writer.close()
        async with asyncio.timeout(20):
            await dispatcher.answers[0].gone.wait()
        assert len(dispatcher.answers) == 1


async def test_a_client_that_is_rejected_while_it_sends_can_read_the_error(byte_level: Any) -> None:
    """Closing a socket with unread bytes would reset the connection, and lose the response."""
    async with impatient(byte_level, rest_s=20) as (port, _, _):
        answer = await ended(port, OPEN_HEAD.replace(b"5000", b"50000000"), *[b" " * 2**16] * 100, gap_s=0)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert not answer.endswith(RESET)


async def test_what_is_no_http_behind_a_request_is_no_answer_to_it(byte_level: Any) -> None:
    async with impatient(byte_level) as (port, dispatcher, _):
        dispatcher.hangs_after = 0
        assert await ended(port, ASKED, b"garbage\r\n\r\n", gap_s=0.1) == b""
        async with asyncio.timeout(20):
            await dispatcher.answers[0].gone.wait()


@pytest.mark.parametrize("hangs", [False, True])
async def test_what_waits_on_a_connection_is_bounded(byte_level: Any, hangs: bool) -> None:
    """Of many pipelined requests, some are parsed, some are kept as bytes, and the rest is not read."""
    async with impatient(byte_level) as (port, dispatcher, server):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if hangs:
            dispatcher.hangs_after = 0
            writer.write(ASKED * (1 + MAX_PIPELINED))  # all that are parsed ahead, and no more
            await dispatcher.hanging.acquire()
        writer.write(ASKED * 200_000)
        for _ in range(0 if hangs else 50):
            await asyncio.wait_for(reader.readuntil(b'"cached_tokens":0}}}'), 20)
        (connection,) = server.server_state.connections
        assert await wait_until(lambda: connection.flow.is_held, 20)
        await asyncio.sleep(0.2)
        assert MAX_PIPELINED <= len(connection.pipeline) < 500
        assert len(connection._unparsed) < 2**20
        assert writer.transport.get_write_buffer_size() > 2**20, "it reads on"
        writer.transport.abort()
        connection.transport.abort()


async def test_a_draining_server_answers_connected_clients(byte_level: Any) -> None:
    async with impatient(byte_level, head_s=20.0, idle_s=20.0, drain_s=20.0) as (port, _, server):
        (idle, begun, new) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        idle[1].write(ASKED)
        await asyncio.wait_for(idle[0].readuntil(b'"cached_tokens":0}}}'), 20)
        begun[1].write(ASKED[:30])
        assert await wait_until(lambda: sum(each._in_head for each in server.server_state.connections) == 1, 20)
        drain(server)
        assert await asyncio.wait_for(idle[0].read(), 20) == b"", "it was answered, and asks nothing"
        for (reader, writer), rest in ((new, ASKED), (begun, ASKED[30:])):
            writer.write(rest)
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 OK")
        for _, writer in (idle, begun, new):
            writer.close()


async def test_a_draining_server_does_not_wait_for_idle_clients(byte_level: Any) -> None:
    async with impatient(byte_level, head_s=60.0, drain_s=0.1) as (port, _, server):
        silent = asyncio.create_task(ended(port))
        assert await wait_until(lambda: len(server.server_state.connections) == 1, 20)
        drain(server)
        assert await asyncio.wait_for(silent, 20) in {b"", RESET}


def drain(server: Any) -> None:
    """Drain as the router's process does."""
    server.config.http.keywords["waiting"].is_draining = server.should_exit = True
