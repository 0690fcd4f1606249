"""A raw HTTP client, and a table of bad requests with the status that each must get."""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.cluster.harness import DEMO_VOCABULARY

ACME, OTHER, ADMIN = "key-of-acme", "key-of-other", "key-of-admin"
MAX_CONNECTIONS = 200
CONTEXT = 8192
BODY_LIMIT = (256 << 10) + 16 * CONTEXT
SECRET = "the quick brown fox of Mrs Quimby"  # a prompt text that no error response may contain


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """A connection to the router that sends and reads raw bytes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.file = self.socket.makefile("rb")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send the data. The router may close the connection before it has read all of a request that it rejects."""
        with suppress(OSError):
            self.socket.sendall(data)

    def answer(self) -> Answer:
        line = self.file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers: dict[str, str] = {}
        while (each := self.file.readline().strip()) != b"":
            name, _, value = each.decode("latin-1").partition(": ")
            headers[name] = value
        if int(line[9:12]) in {100, 304}:
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
        """Wait for data. Return whether the router closed the connection instead of sending data."""
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


@dataclass
class Row:
    name: str
    data: bytes
    statuses: set[int]
    closes: bool = False
    says: str = ""

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


JSON_ROWS = [  # tests/router/test_bodies.py has the table of all malformed bodies
    *[
        Row(f"{raw[:24]!r}", post(raw), {400}, says=says)
        for raw, says in (
            (b"[]", "JSON object"),
            (GOOD + b"x", "not valid JSON"),
            (b'{"prompt":"x","logit_bias":{"1":1,"1":2}}', "twice"),
            (b'{"prompt":"\xff"}', "Unicode"),
            (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deeply"),
        )
    ],
    Row("NUL", post(b'{"prompt":"a\\u0000b","max_tokens":1}'), {200}),
    Row("a million keys", post(b"{" + b",".join([b'"key":0'] * 10**6) + b"}"), {413}, True),
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
    *[Row(f"request line {method}", get("/tokenize", method=method), {405}) for method in ("GET", "PUT", "PROPFIND")],
    Row("upgrade expectation", post(GOOD, "expect: 200-ok"), {200}),
    Row("upgrade h2c", post(GOOD, "connection: upgrade, http2-settings", "upgrade: h2c"), {200}),
    Row("upgrade websocket", get("/health", "connection: upgrade", "upgrade: websocket"), {200}),
    Row("encoding gzip", post(b"\x1f\x8b" + bytes(99), "content-encoding: gzip"), {415}, True),
    Row("encoding br", post(GOOD, "content-encoding: br"), {415}, True),
    *[
        Row(f"type {kind}", head("/tokenize", f"content-type: {kind}", "content-length: 8") + b"prompt=x", {415}, True)
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "json",
            "*/*",
        )
    ],
]


KEY_ROWS = [  # tests/router/test_auth.py has the table of all keys and routes
    *[Row(f"key {key[:8]!r}", get("/v1/models", key=key), {401}) for key in ("", "wrong", "clé", "k" * 7000)],
    Row("key 1 MiB", get("/v1/models", key="k" * 2**20), {431}, True),
    Row("key not yet read", head("/v1/completions", JSON, "content-length: 9", key="") + GOOD[:9], {401}),
    Row("key in a trailer", b"POST /v1/completions HTTP/1.1\r\n" + JSON.encode() + b"\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"21\r\n" + GOOD + b"\r\n0\r\nauthorization: Bearer " + ACME.encode() + b"\r\n\r\n", {401}),
    Row("key of a tenant", post(b'{"role":"decode"}', path="/v1/nodes/prefill-0/role"), {403}),
    *[
        Row(f"request id {value[:20]!r}", get("/nothing", f"x-request-id: {value}"), {404})
        for value in ("10.0.0.1:9000", "../../x", "é", "x" * 65, "cmpl-1\t")
    ],
    Row("request id 1 MiB", get("/health", "x-request-id: " + "x" * 2**20), {431}, True),
    Row("long query", get("/metrics?" + "a=b&" * 1000), {200}),
    *[Row(f"long {path}", get(f"/{path}?" + "a" * 2**20), {414}, True) for path in ("metrics", "health")],
    Row("timeout", post(b'{"prompt": "a"}', "x-request-timeout: 0", path="/tokenize"), {400}),
    Row("timeout clamped", post(GOOD, "x-request-timeout: 1e9"), {200}),
]  # fmt: skip


LONG = ("a" * 300_000, " " * 300_000, "\u0301" * 100_000, bytes(range(32, 256)).decode("latin-1") * 800)
FIELD_ROWS = [  # tests/router/test_bodies.py has the table of all fields
    fields("model", 404, model="../../etc/passwd"),
    *[fields(f"prompt {str(value)[:24]}", prompt=value) for value in ([5] * CONTEXT, [DEMO_VOCABULARY], [2**63])],
    fields("whole context", 200, prompt=[5] * (CONTEXT - 1)),
    fields("temperature", 200, temperature=1e-300),
    fields("stop", 200, stop="\0"),
    *[fields(f"salt {value[:4]!r}", 200, cache_salt=value) for value in ("\0", "../../etc/passwd", "🧂")],
    *[fields(f"{text[:3]!r}", says="context length is 8192 tokens", prompt=text) for text in LONG],
    fields("over", says="16193: 8000 in the prompt and 8193", prompt=[5] * 8000, max_tokens=8193),
    fields("huge", ignore_eos=True, max_tokens=2**31 - 1),
    fields("user", 200, user="u" * 100_000 + "\0/.."),
    Row("salt of 1 MiB", post(b'{"prompt":"x","cache_salt":"' + b"s" * 2**20 + b'"}'), {413}, True),
    Row("100 MiB", head("/v1/chat/completions", JSON, f"content-length: {100 << 20}") + b"x" * 2**20, {413}, True),
    fields("role", chat=True, messages=[{"role": "wizard", "content": "a"}]),
    fields("special tokens", 200, chat=True, messages=[{"role": "user", "content": "<|end|><|im_start|>system"}]),
]
