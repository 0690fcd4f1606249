import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from dashboard.history import RequestHistory
from dashboard.routes import Dashboard
from router.http.app import build_app
from router.http.logprobs import CompletionLogprobs
from router.http.output import OutputProcessor, PromptOutput, RequestOutput
from router.http.responses import ResponseFormatter
from router.metrics.request_metrics import RequestMetrics
from router.observer import RouterObserver
from shared.clock import now_ns
from shared.errors import UnavailableError
from tests.router.scripted import EOS, MODEL, ScriptedDispatcher


@pytest.fixture
def dispatcher(byte_level) -> ScriptedDispatcher:
    """Answers every prompt with the same text, then ends it; sample i>0 says its number first."""
    text = byte_level.encode("Once upon 🦊 time there was")
    return ScriptedDispatcher(lambda _, i: [*(byte_level.encode(str(i)) if i else []), *text, EOS])


TEXT = "Once upon 🦊 time there was"


@pytest.fixture
async def client(dispatcher, byte_level) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(dispatcher, byte_level, MODEL, max_concurrent_requests=4)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


def events_of(response: httpx.Response) -> list[dict]:
    """The stream's events; it must end with [DONE], and every byte of it must be UTF-8."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.content.decode("utf-8", "strict").split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_completion_is_answered_whole(client, dispatcher, byte_level):
    dispatcher.cached_tokens = 2
    answer = (await client.post("/v1/completions", json={"model": "tiny", "prompt": "abc", "max_tokens": 99})).json()
    assert answer["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    tokens = len(byte_level.encode(TEXT)) + 1
    assert answer["usage"] == {
        "prompt_tokens": len(byte_level.encode("abc")),
        "completion_tokens": tokens,
        "total_tokens": len(byte_level.encode("abc")) + tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["object"] == "text_completion"
    assert dispatcher.answers[0].closed == 1


@pytest.mark.parametrize("tokens_per_piece", [1, 3])
@pytest.mark.parametrize("stop", [None, "there", [" ti", "time"], ["zzz"], "🦊"])
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_a_stream_says_what_the_whole_answer_says(client, dispatcher, kind, stop, tokens_per_piece):
    dispatcher.tokens_per_piece = tokens_per_piece
    prompt = {"prompt": ["a", "b"]} if kind == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = prompt | {"n": 3, "max_tokens": 99, "stop": stop}
    whole = (await client.post(f"/v1/{kind}", json=body)).json()
    events = events_of(
        await client.post(f"/v1/{kind}", json=body | {"stream": True, "stream_options": {"include_usage": True}})
    )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for event in events[:-1]:
        assert event["usage"] is None
        (choice,) = event["choices"]
        assert choice["index"] not in finishes
        said = choice["text"] if kind == "completions" else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + said
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert sorted(texts) == list(range(6 if kind == "completions" else 3))
    for choice in whole["choices"]:
        text = choice["text"] if kind == "completions" else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == (texts[choice["index"]], finishes[choice["index"]])
        if stop is None:
            number = choice["index"] % 3
            assert text == (str(number) if number else "") + TEXT


async def test_a_chat_stream_has_a_role_first_and_a_finish_of_its_own(client):
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    events = events_of(await client.post("/v1/chat/completions", json=body))
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert all("usage" not in event for event in events)
    assert all(event["choices"][0]["delta"]["content"] for event in events[1:-1])


async def test_a_stop_string_ends_the_sample_everywhere(client, dispatcher, byte_level):
    body = {"prompt": "a", "stop": ["upon", "there"], "max_tokens": 99}
    answer = (await client.post("/v1/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Once ", "stop", "upon")
    assert dispatcher.answers[0].cancelled == [0]
    assert answer["usage"]["completion_tokens"] < len(dispatcher.script(dispatcher.answers[0].request, 0))
    answer = (await client.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()
    assert answer["choices"][0]["text"] == "Once upon"
    answer = (
        await client.post("/v1/completions", json=body | {"min_tokens": len(byte_level.encode("Once upon"))})
    ).json()
    assert answer["choices"][0]["stop_reason"] == "there"


async def test_a_stop_token_ends_it_and_is_no_text(client, byte_level):
    token = byte_level.encode(TEXT)[3]
    body = {"prompt": "a", "stop_token_ids": [token], "max_tokens": 99}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == byte_level.decode(byte_level.encode(TEXT)[:3])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    (choice,) = (await client.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()[
        "choices"
    ]
    assert choice["text"] == byte_level.decode(byte_level.encode(TEXT)[:4])


async def test_an_emoji_cut_by_max_tokens_is_told_at_the_end_only(client, byte_level):
    ids = byte_level.encode(TEXT)
    cut = next(i for i in range(len(ids)) if byte_level.decode(ids[:i]).endswith("\N{REPLACEMENT CHARACTER}"))
    body = {"prompt": "a", "max_tokens": cut, "stream": True}
    texts = [event["choices"][0]["text"] for event in events_of(await client.post("/v1/completions", json=body))]
    assert "".join(texts) == byte_level.decode(ids[:cut])
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_completions_follow_the_text(client, byte_level, stream):
    body = {"prompt": "a b", "max_tokens": 99, "logprobs": 2, "echo": True, "n": 2, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    texts, tables = {0: "", 1: ""}, {0: {}, 1: {}}
    for answer in events_of(response) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                tables[choice["index"]].setdefault(key, []).extend(values)
    for index, number in ((0, ""), (1, "1")):
        assert texts[index] == "a b" + number + TEXT
        table, ids = tables[index], byte_level.encode("a b") + byte_level.encode(number) + byte_level.encode(TEXT)
        assert len({len(values) for values in table.values()}) == 1
        assert table["tokens"][: len(ids)] == [byte_level.token_text(token) for token in ids]
        assert table["token_logprobs"][:2] == [None, -0.5]
        assert table["top_logprobs"][0] is None
        assert table["top_logprobs"][1] == {byte_level.token_text(ids[1] + i): -0.5 - i for i in range(2)}
        for offset, token in zip(table["text_offset"], table["tokens"], strict=True):
            assert token.startswith(("bytes:", "<")) or texts[index].startswith(token, offset)


async def test_logprobs_of_chat_carry_bytes(client, byte_level):
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3, "max_tokens": 99}
    (choice,) = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == TEXT
    assert [len(entry["top_logprobs"]) for entry in content] == [3] * len(content)
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0
    events = events_of(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    streamed = [e for event in events for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


async def test_prompt_logprobs_are_vllms(client, byte_level):
    body = {"prompt": "a b", "prompt_logprobs": 1}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    ids = byte_level.encode("a b")
    expected = {"logprob": -0.5, "rank": 1, "decoded_token": byte_level.token_text(ids[1])}
    assert choice["prompt_logprobs"][:2] == [None, {str(ids[1]): expected}]
    assert len(choice["prompt_logprobs"]) == len(ids)
    assert choice["text"].startswith("Once")


async def test_prompt_logprobs_that_no_node_sent_are_told_as_such(client, dispatcher):
    dispatcher.num_prompt_logprobs = 1
    body = {"prompt": "a b c d", "prompt_logprobs": 1, "max_tokens": 1}
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "no_prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_told_on_request(client, byte_level, stream):
    body = {"prompt": "a b", "max_tokens": 99, "return_token_ids": True, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    choices = [answer["choices"][0] for answer in (events_of(response) if stream else [response.json()])]
    assert choices[0]["prompt_token_ids"] == byte_level.encode("a b")
    assert [token for choice in choices for token in choice["token_ids"]] == [*byte_level.encode(TEXT), EOS]


async def test_chat_tells_prompt_logprobs_and_token_ids_once(client, byte_level):
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 0, "return_token_ids": True}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    prompt = byte_level.encode_chat(body["messages"])
    assert answer["prompt_token_ids"] == prompt
    assert [row and list(row) for row in answer["prompt_logprobs"]] == [None, *([str(t)] for t in prompt[1:])]
    assert answer["choices"][0]["token_ids"] == [*byte_level.encode(TEXT), EOS]
    del body["prompt_logprobs"]
    events = events_of(await client.post("/v1/chat/completions", json=body | {"stream": True}))
    assert [event.get("prompt_token_ids") for event in events[:2]] == [prompt, None]


async def test_usage_can_come_with_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "max_tokens": 99, "stream": True, "stream_options": options}
    events = events_of(await client.post("/v1/completions", json=body))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[:-1] == list(range(1, len(counts)))
    assert counts[-1] == counts[-2]


async def test_tokenize_and_detokenize_are_inverse(client, byte_level):
    answer = (await client.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})).json()
    assert answer["tokens"] == byte_level.encode(TEXT)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 200)
    assert answer["token_strs"][0] == byte_level.token_name(answer["tokens"][0])
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": TEXT}
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
    text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert chat["token_strs"] is None
    assert (await client.post("/detokenize", json={"tokens": [330]})).status_code == 400


async def test_the_small_routes(client, dispatcher):
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).json() == {"ready": True}
    dispatcher.is_ready = False
    assert (await client.get("/ready")).status_code == 503
    status = (await client.get("/v1/status")).json()
    assert (status["nodes"], status["latency"]["ttft_ms"]["n"]) == ([], 0)
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"], card["created"]) == ("tiny", 200, 7)
    assert (await client.get("/v1/models/tiny")).json() == card
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_metrics_have_vllms_names_and_count_every_sample_once(client, dispatcher):
    await client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 99})
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    dispatcher.fails_after = 2
    await client.post("/v1/completions", json={"prompt": "a"})
    text = (await client.get("/metrics")).text
    for reason, count in {"stop": 2, "length": 1, "error": 1, "abort": 0}.items():
        label = f'{{finished_reason="{reason}",model_name="tiny"}}'
        assert f"vllm:request_success_total{label} {count}.0" in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 4.0' in text
    assert 'vllm:time_to_first_token_seconds_bucket{le="2560.0",model_name="tiny"} 4.0' in text
    assert 'vllm:prompt_tokens_total{model_name="tiny"} 3.0' in text
    assert "vllm:inter_token_latency_seconds_bucket" in text
    assert "vllm:e2e_request_latency_seconds_sum" in text


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        (JSON, b"", 400),
        (JSON, b"[]", 400),
        (JSON, b'{"prompt":"x","prompt":"y"}', 400),
        (JSON, b'{"prompt":"\\ud800"}', 400),
        (JSON, b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}", 413),
        (JSON | {"content-length": "99999999999"}, b"{}", 413),
        (JSON | {"content-encoding": "gzip"}, b"\x1f\x8b", 415),
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/x-www-form-urlencoded"}, b"prompt=x", 415),
        ({}, b'{"prompt":"x"}', 415),
        (JSON, b'{"prompt":"x","model":"y"}', 404),
        (JSON, b'{"prompt":"x","kv_transfer_params":{"remote_host":"h"}}', 400),
    ],
)
async def test_bad_requests_get_openais_error_and_the_next_is_served(client, headers, content, status):
    response = await client.post("/v1/completions", headers=headers, content=content)
    assert (response.status_code, bool(error_of(response)["message"])) == (status, True)
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_a_body_of_many_pieces_is_cut_off_at_the_limit(client):
    sent = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 1000
            yield b"x" * 1000

    response = await client.post("/v1/completions", headers=JSON, content=flood())
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert sent <= (256 << 10) + 16 * 200 + 2000


async def test_a_body_that_never_comes_is_given_up(dispatcher, byte_level):
    app = build_app(dispatcher, byte_level, MODEL, body_timeout_s=0.01)

    async def drip() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(3600)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as client:
        assert (await client.post("/v1/completions", headers=JSON, content=drip())).status_code == 408


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1//completions", 404),
    ],
)
async def test_unknown_paths_and_methods_get_the_same_form(client, method, path, status):
    response = await client.request(method, path)
    assert response.status_code == status
    error_of(response)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trace-1.a_B", True), ("x" * 65, False), ("host:80/x", False), ("a b", False), ("é", False)],
)
async def test_a_request_id_is_a_label_or_replaced(client, dispatcher, given, kept):
    response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": given.encode()})
    assert (response.headers["x-request-id"] == given) is kept
    await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": given.encode()})
    assert dispatcher.answers[0].request.id != dispatcher.answers[1].request.id


@pytest.mark.parametrize("stream", [False, True])
async def test_unavailable_before_the_first_token_is_a_503(client, dispatcher, stream):
    dispatcher.fails_after = 0
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert error_of(response)["type"] == "service_unavailable_error"
    dispatcher.refuses = UnavailableError("no node")
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 503


async def test_unavailable_in_mid_stream_is_one_last_event(client, dispatcher):
    dispatcher.fails_after = 3
    response = await client.post("/v1/completions", json={"prompt": ["x", "y"], "stream": True})
    lines = response.text.split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the node is gone"
    assert "[DONE]" not in response.text
    assert [answers.closed for answers in dispatcher.answers] == [1, 1]


async def test_a_bug_is_a_500_that_tells_nothing(client, dispatcher, caplog):
    dispatcher.refuses = RuntimeError("the secret of /etc/keys")
    response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "label-7"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
    assert "label-7" in caplog.text


@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
async def test_a_long_prompt_is_refused_with_its_length(client, kind):
    body = {
        "text": {"prompt": "\0 " * 20_000},
        "ids": {"prompt": [5] * 60_000},
        "chat": {"messages": [{"role": "user", "content": "z" * 120_000}]},
    }[kind]
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    response = await client.post(
        path, content=json.dumps(body, ensure_ascii=False, separators=(",", ":")), headers=JSON
    )
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"
    assert "context is 200 tokens" in error_of(response)["message"]


async def test_more_requests_than_allowed_are_told_to_come_back(client, dispatcher):
    dispatcher.hangs_after = 0
    waiting = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"})) for _ in range(4)]
    for _ in waiting:
        await dispatcher.hanging.acquire()
    response = await client.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert error_of(response)["type"] == "rate_limit_error"
    assert (await client.get("/health")).status_code == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    dispatcher.hangs_after = None
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert [answers.closed for answers in dispatcher.answers] == [1] * 5


@contextlib.asynccontextmanager
async def served(dispatcher, tokenizer) -> AsyncIterator[str]:
    """The app under uvicorn on loopback."""
    app = build_app(dispatcher, tokenizer, MODEL)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


async def test_openais_own_client_is_content(dispatcher, byte_level):
    async with (
        served(dispatcher, byte_level) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": "a"}]
        chat = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (TEXT, "stop")
        options = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage == chat.usage
        completion = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=99, echo=True)
        assert [choice.text for choice in completion.choices] == ["a" + TEXT, "b" + TEXT]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="tiny", prompt="a", max_tokens=0)
        dispatcher.fails_after = 3
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="the node is gone"):
            _ = [chunk async for chunk in stream]


KINDS = (
    RequestOutput,
    PromptOutput,
    ResponseFormatter,
    OutputProcessor,
    CompletionLogprobs,
    RequestMetrics,
    RouterObserver,
)
HOOKS = [
    (kind, name) for kind in KINDS for name, each in vars(kind).items() if isinstance(each, FunctionType | property)
]
AFTERWARDS = {
    "log_fields",
    "ttft_s",
    "num_cached",
    "num_generated",
}  # also for the access log, after the answer
doomed: ContextVar[bool] = ContextVar("doomed", default=False)
BODY = {"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "logprobs": 1, "echo": True, "prompt_logprobs": None}


def just(response: httpx.Response) -> list[dict]:
    return [response.json()]


def failing(kind: type, name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the hook raise from the `at`-th time on that the doomed request comes by; returns what counts how often it did."""
    original, calls = vars(kind)[name], [0]
    function = original.fget if isinstance(original, property) else original

    def hook(*args: Any, **kwargs: Any) -> Any:
        calls[0] += doomed.get()
        if doomed.get() and calls[0] >= at:
            raise RuntimeError("the secret of /etc/keys")
        return function(*args, **kwargs)

    monkeypatch.setattr(kind, name, property(hook) if isinstance(original, property) else hook)
    return calls


@pytest.mark.parametrize(("kind", "name"), HOOKS, ids=lambda value: getattr(value, "__name__", value))
async def test_a_bug_in_any_hook_fails_its_own_request_alone(dispatcher, byte_level, monkeypatch, caplog, kind, name):
    """Other requests get the same answer, and all work of both requests is ended."""
    caplog.set_level(logging.INFO, "baton.access")
    app = build_app(dispatcher, byte_level, MODEL, max_concurrent_requests=2)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

        async def asked(stream: bool, is_doomed: bool) -> httpx.Response:
            doomed.set(is_doomed)
            return await client.post("/v1/completions", json=BODY | {"stream": stream})

        def told(response: httpx.Response) -> list[Any]:
            is_stream = response.headers["content-type"].startswith("text/event-stream")
            return sorted(json.dumps(event["choices"]) for event in (events_of if is_stream else just)(response))

        for stream in (False, True):
            usual = told(await asyncio.create_task(asked(stream, False)))
            for at in (1, 4):
                with monkeypatch.context() as patched:
                    calls = failing(kind, name, at, patched)
                    failed, other = await asyncio.gather(asked(stream, True), asked(stream, False))
                assert told(other) == usual
                assert "secret" not in failed.text
                assert failed.headers["x-request-id"]
                if failed.status_code == 500:
                    assert error_of(failed)["type"] == "server_error"
                elif "error" in failed.text:
                    last = failed.text.split("\n\n")[-2].removeprefix("data: ")
                    assert json.loads(last)["error"]["type"] == "server_error"
                else:
                    assert told(failed) == usual, "nothing failed, or what comes after the answer"
                    assert calls[0] < at or name in AFTERWARDS, "a bug went unseen"
                assert all(answers.closed for answers in dispatcher.answers)


@pytest.mark.parametrize(("stream", "hangs_after"), [(False, 0), (True, 0), (True, 4)])
async def test_a_client_that_leaves_ends_the_work(dispatcher, byte_level, stream, hangs_after):
    dispatcher.hangs_after = hangs_after
    body = json.dumps({"prompt": ["x", "y"], "stream": stream}).encode()
    async with served(dispatcher, byte_level) as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        lines = [
            "POST /v1/completions HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(body)}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        for _ in range(2):
            await dispatcher.hanging.acquire()
        writer.close()
        async with asyncio.timeout(20):
            for answers in dispatcher.answers:
                await answers.gone.wait()
        assert len(dispatcher.answers) == 2


async def test_a_request_is_recorded_from_its_first_byte_to_its_last(dispatcher, byte_level):
    """Reading the body and writing the answer are the router's time: what it records leaves neither out."""
    records = RequestHistory()
    app = build_app(dispatcher, byte_level, MODEL, observer=records)
    at: dict[str, float] = {"arrived": now_ns() / 1e6}

    async def receive() -> dict[str, Any]:
        if "asked" in at:
            await asyncio.sleep(3600)  # connected
        await asyncio.sleep(0.02)
        at["asked"] = now_ns() / 1e6
        return {"type": "http.request", "body": json.dumps({"prompt": "x", "stream": True}).encode()}

    async def send(message: dict[str, Any]) -> None:
        if b'"text"' in message.get("body", b""):
            await asyncio.sleep(0.005)
            at.setdefault("first", now_ns() / 1e6)
            at["last"] = now_ns() / 1e6

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    (summary,) = records.latest_requests(1)
    assert at["arrived"] <= summary["accepted_ms"] < at["asked"]
    assert summary["first_token_ms"] >= at["first"]
    assert summary["ended_ms"] >= at["last"]


async def test_a_router_without_the_dashboard_has_none_of_its_routes_metrics_or_fields(dispatcher, byte_level):
    app = build_app(dispatcher, byte_level, MODEL)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for path in ("/", "/events", "/trace", "/v1/requests", "/v1/steps"):
            assert (await client.get(path)).status_code == 404
        assert not Dashboard.queries.keys() & (await client.get("/openapi.json")).json()["paths"].keys()
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert "vllm:request_queue_time" not in (await client.get("/metrics")).text
        assert "summary" not in (await client.get("/v1/status")).json()
