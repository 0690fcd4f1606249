import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import httpx
import openai
import pytest

from dashboard.history import RequestHistory
from dashboard.routes import Dashboard
from router.http.asgi import ANONYMOUS
from router.http.bodies import CompletionBody
from router.http.generation import GenerationService
from router.http.responses import ResponseFormatter, dump, dump_in_parts, prompt_logprobs
from router.metrics.request_metrics import RequestMetrics
from router.observer import RouterObserver
from router.text.tokenizer import Tokenizer
from shared.clock import now_ns
from shared.errors import RequestError, UnavailableError
from tests.router.bad_requests import post
from tests.router.scripted import EOS, MODEL, ScriptedDispatcher, app_of, serving


@pytest.fixture
def dispatcher(byte_level) -> ScriptedDispatcher:
    """Return a dispatcher that answers every prompt with TEXT. The number i comes before the text of sample i > 0."""
    text = byte_level.encode("Once upon 🦊 time there was")
    return ScriptedDispatcher(lambda _, i: [*(byte_level.encode(str(i)) if i else []), *text, EOS])


TEXT = "Once upon 🦊 time there was"


@pytest.fixture
async def client(dispatcher, byte_level) -> AsyncIterator[httpx.AsyncClient]:
    app = app_of(dispatcher, byte_level, MODEL, max_concurrent_requests=4)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


def events_of(response: httpx.Response) -> list[dict]:
    """Check that the stream is valid UTF-8 and ends with [DONE], and return its events."""
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
    two = await client.post("/v1/completions", json={"model": "tiny", "prompt": "abc", "n": 2})
    assert two.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer["usage"] == {
        "prompt_tokens": len(byte_level.encode("abc")),
        "completion_tokens": tokens,
        "total_tokens": len(byte_level.encode("abc")) + tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["object"] == "text_completion"
    assert dispatcher.answers[0].closed == 1


async def test_many_samples_are_several_requests(client, dispatcher):
    body = {"prompt": ["ab", "c"], "n": 20, "max_tokens": 99}
    few, many = [(await client.post("/v1/completions", json=body | {"n": n})).json() for n in (1, 20)]
    assert [choice["index"] for choice in many["choices"]] == list(range(40))
    assert many["usage"]["prompt_tokens"] == few["usage"]["prompt_tokens"]
    assert [(answers.request.n, answers.request.first_sample) for answers in dispatcher.answers[2:]] == [
        (8, 0), (8, 8), (4, 16), (8, 0), (8, 8), (4, 16),
    ]  # fmt: skip
    assert dispatcher.answers[2].request.id == dispatcher.answers[3].request.id


@pytest.mark.parametrize("tokens_per_piece", [1, 3])
@pytest.mark.parametrize("stop", [None, "there", [" ti", "time"], ["zzz"], "🦊"])
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_a_stream_equals_the_whole_answer(client, dispatcher, kind, stop, tokens_per_piece):
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
        text = choice["text"] if kind == "completions" else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert sorted(texts) == list(range(6 if kind == "completions" else 3))
    for choice in whole["choices"]:
        text = choice["text"] if kind == "completions" else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == (texts[choice["index"]], finishes[choice["index"]])
        if stop is None:
            number = choice["index"] % 3
            assert text == (str(number) if number else "") + TEXT


async def test_a_chat_stream_begins_with_the_role_and_ends_with_a_separate_finish(client):
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


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
@pytest.mark.parametrize("tokens_per_piece", [1, 3])
async def test_the_events_of_a_stream_have_as_many_tokens_as_requested(client, dispatcher, kind, tokens_per_piece):
    dispatcher.tokens_per_piece = tokens_per_piece
    prompt = {"prompt": "a"} if kind == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = prompt | {"n": 2, "max_tokens": 99, "logprobs": 1, "stream": True, "return_token_ids": True}
    body |= {} if kind == "completions" else {"logprobs": True}
    found = []
    for interval in (1, 4, 1024):
        events = events_of(await client.post(f"/v1/{kind}", json=body | {"stream_interval": interval}))
        choices = [event["choices"][0] for event in events]
        choices = [[one for one in choices if one["index"] == index] for index in (0, 1)]
        texts = [
            "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in each) for each in choices
        ]
        tables = [[one["logprobs"] for one in each if one["logprobs"]] for each in choices]
        key = "tokens" if kind == "completions" else "content"
        found.append((texts, [[row for table in each for row in table[key]] for each in tables]))
        for each, table in zip(choices, tables, strict=True):
            sizes = [len(one["token_ids"]) for one in each if one.get("token_ids")]
            assert sizes == [len(one[key]) for one in table]
            assert sizes[0] == tokens_per_piece
            assert all(interval <= size < interval + tokens_per_piece for size in sizes[1:-1])
            assert len(sizes) == 2 or interval < 1024
    assert found[1:] == found[:1] * 2


async def test_a_stop_token_ends_the_choice_and_adds_no_text(client, byte_level):
    token = byte_level.encode(TEXT)[3]
    body = {"prompt": "a", "stop_token_ids": [token], "max_tokens": 99}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == byte_level.decode(byte_level.encode(TEXT)[:3])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    (choice,) = (await client.post("/v1/completions", json=body | {"include_stop_str_in_output": True})).json()[
        "choices"
    ]
    assert choice["text"] == byte_level.decode(byte_level.encode(TEXT)[:4])


async def test_an_emoji_cut_by_max_tokens_is_replaced_at_the_end(client, byte_level):
    ids = byte_level.encode(TEXT)
    cut = next(i for i in range(len(ids)) if byte_level.decode(ids[:i]).endswith("\N{REPLACEMENT CHARACTER}"))
    body = {"prompt": "a", "max_tokens": cut, "stream": True}
    texts = [event["choices"][0]["text"] for event in events_of(await client.post("/v1/completions", json=body))]
    assert "".join(texts) == byte_level.decode(ids[:cut])
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts[:-1])


@pytest.mark.parametrize("fields", [{"echo": True, "stream": True}, {"echo": True}, {}])
async def test_logprobs_of_long_texts_are_formatted_on_a_thread(client, monkeypatch, fields):
    threads, logprobs = [], ResponseFormatter._logprobs

    def recorded(*args, **kwargs):
        threads.append(threading.current_thread())
        return logprobs(*args, **kwargs)

    monkeypatch.setattr(ResponseFormatter, "_logprobs", recorded)
    assert (await client.post("/v1/completions", json={"prompt": "a b", "logprobs": 2} | fields)).status_code == 200
    assert threads[0] is not threading.main_thread()


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


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_without_an_answer_scores_the_prompt(client, byte_level, stream):
    body = {"prompt": ["ab", "cde"], "max_tokens": 0, "logprobs": 1, "echo": True, "return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await client.post("/v1/completions", json=body | options)
    answers = events_of(response) if stream else [response.json()]
    choices = {choice["index"]: choice for answer in answers for choice in answer["choices"]}
    assert [choices[index]["text"] for index in (0, 1)] == ["ab", "cde"]
    assert [choice["finish_reason"] for choice in choices.values()] == ["length", "length"]
    assert not any(choice["token_ids"] for choice in choices.values())
    for index, text in enumerate(["ab", "cde"]):
        table, ids = choices[index]["logprobs"], byte_level.encode(text)
        assert table["tokens"] == [byte_level.token_text(token) for token in ids]
        assert table["token_logprobs"] == [None, *[-0.5] * (len(ids) - 1)]
        assert len(table["text_offset"]) == len(ids)
    assert answers[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_text_offsets_count_the_characters_of_the_returned_text(dispatcher, byte_level, fallback, stream):
    async def offsets(tokenizer: Tokenizer, prompt: Any, ids: list[int], **fields: Any) -> tuple[list[int], str]:
        dispatcher.script = lambda _, __: [*ids, EOS]
        body = {"prompt": prompt, "max_tokens": 99, "logprobs": 0, "stream": stream} | fields
        transport = httpx.ASGITransport(app=app_of(dispatcher, tokenizer, MODEL))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            response = await client.post("/v1/completions", json=body)
        choices = [answer["choices"][0] for answer in (events_of(response) if stream else [response.json()])]
        found = [at for choice in choices for at in (choice["logprobs"] or {"text_offset": []})["text_offset"]]
        return found, "".join(choice["text"] for choice in choices)

    names = dict(zip(map(byte_level.vocabulary.bytes_of, range(330)), range(330), strict=True))
    fox, a, b = [names[bytes([byte])] for byte in "🦊".encode()], names[b"a"], names[b"b"]
    cut = fox[:2]
    assert await offsets(byte_level, "x", [*cut, a, *fox, b]) == ([0, 0, 1, 2, 2, 2, 2, 3, 4], "\ufffda🦊b")
    assert await offsets(byte_level, "x", [*cut, *cut, fox[2], b]) == ([0, 0, 1, 1, 1, 2, 3], "\ufffd\ufffdb")
    # The echo of a cut character ends with the prompt. A text is echoed as it was sent, with its special tokens.
    assert await offsets(byte_level, [a, *cut], [fox[2], b], echo=True) == ([0, 1, 1, 2, 3, 4], "a\ufffd\ufffdb")
    text = "a<|im_end|>b"
    assert await offsets(byte_level, text, [a], echo=True) == ([0, 1, 11, 12, 13], text + "a")
    assert await offsets(byte_level, "abb", [a], echo=True, truncate_prompt_tokens=1) == ([2, 3, 4], "abba")
    f_a, byte = fallback.encode("a", False)[0], 3
    for skip in (False, True):  # <s> precedes the text but is not echoed
        fields = {"echo": True, "skip_special_tokens": skip}
        assert await offsets(fallback, "a", [f_a], **fields) == ([0, 0, 1, 3], "a a")
    ids = [f_a, byte + 0xF0, byte + 0x9F, f_a, byte + 0xC3, byte + 0xA9, f_a]
    assert await offsets(fallback, "a", ids) == ([0, 2, 2, 4, 6, 6, 7, 9], " a\ufffd\ufffd aé a")


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


async def test_logprobs_name_tokens_by_their_ids_on_request(client, byte_level):
    as_ids = {"return_tokens_as_token_ids": True}
    body = {"prompt": "a b", "max_tokens": 9, "logprobs": 2, "echo": True, "return_token_ids": True}
    (plain,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    (choice,) = (await client.post("/v1/completions", json=body | as_ids)).json()["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert choice["logprobs"]["top_logprobs"][1] == {f"token_id:{ids[1] + i}": -0.5 - i for i in range(2)}
    assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "stream": True}
    plain, named = (
        [
            entry
            for event in events_of(each)
            for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        for each in [await client.post("/v1/chat/completions", json=body | more) for more in ({}, as_ids)]
    )
    ids = [*byte_level.encode(TEXT), EOS]
    assert [entry["token"] for entry in named] == [f"token_id:{token}" for token in ids]
    assert [[one["token"] for one in entry["top_logprobs"]] for entry in named] == [
        [f"token_id:{token}", f"token_id:{token + 1}"] for token in ids
    ]
    assert [entry["bytes"] for entry in named] == [entry["bytes"] for entry in plain]


async def test_prompt_logprobs_are_vllms(client, byte_level):
    body = {"prompt": "a b", "prompt_logprobs": 1}
    (choice,) = (await client.post("/v1/completions", json=body)).json()["choices"]
    ids = byte_level.encode("a b")
    expected = {"logprob": -0.5, "rank": 1, "decoded_token": byte_level.token_text(ids[1])}
    assert choice["prompt_logprobs"][:2] == [None, {str(ids[1]): expected}]
    assert len(choice["prompt_logprobs"]) == len(ids)
    assert choice["text"].startswith("Once")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_logprobs_of_a_prompt_are_formatted_on_a_thread(client, monkeypatch, path):
    threads: list[str] = []

    def formatted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prompt_logprobs(*args)

    monkeypatch.setattr("router.http.responses.prompt_logprobs", formatted)
    body = {"prompt": "a b", "messages": [{"role": "user", "content": "a b"}], "prompt_logprobs": 1}
    del body["prompt" if "chat" in path else "messages"]
    assert (await client.post(path, json=body)).status_code == 200
    assert threads
    assert "MainThread" not in threads


@pytest.mark.parametrize("size", [0, 1, 63, 512, 513, 1000, 1024])
def test_an_answer_that_is_encoded_in_parts_is_the_same_json(size):
    row = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": 'é"\u2028'}}
    rows = [None, *[row] * size][:size]
    for value in ({"id": "x", "prompt_logprobs": rows}, {"choices": [{"text": "a", "logprobs": {"tokens": rows}}] * 2}):
        assert dump_in_parts(value) == dump(value)


async def test_missing_prompt_logprobs_are_an_error(client, dispatcher):
    dispatcher.num_prompt_logprobs = 1
    body = {"prompt": "a b c d", "prompt_logprobs": 1, "max_tokens": 1}
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "no_prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_on_request(client, byte_level, stream):
    body = {"prompt": "a b", "max_tokens": 99, "return_token_ids": True, "stream": stream}
    response = await client.post("/v1/completions", json=body)
    choices = [answer["choices"][0] for answer in (events_of(response) if stream else [response.json()])]
    assert choices[0]["prompt_token_ids"] == byte_level.encode("a b")
    assert [token for choice in choices for token in choice["token_ids"]] == [*byte_level.encode(TEXT), EOS]


async def test_chat_returns_prompt_logprobs_and_token_ids_once(client, byte_level):
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
    assert (await client.post("/v1/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": TEXT}
    chat = (await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
    text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert chat["token_strs"] is None
    assert (await client.post("/detokenize", json={"tokens": [330]})).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/detokenize", {"tokens": [1, 2]}, "decode"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "token_name"),
    ],
)
async def test_many_tokens_do_not_occupy_the_event_loop(client, path, body, name, monkeypatch):
    threads, own = set(), getattr(Tokenizer, name)

    def recorded(self, *args, **kwargs):
        threads.add(threading.current_thread())
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, name, recorded)
    assert (await client.post(path, json=body)).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_health_status_and_models(client, dispatcher):
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).json() == {"ready": True}
    assert (await client.get("/ready?role=decode")).json() == {"ready": True}
    dispatcher.empty_pool = "prefill"
    assert (await client.get("/ready?role=prefill")).status_code == 503
    assert error_of(await client.get("/ready?role=both"))["param"] == "role"
    dispatcher.is_ready = False
    assert (await client.get("/ready")).status_code == 503
    status = (await client.get("/v1/status")).json()
    assert status["latency"]["ttft_ms"]["n"] == 0
    assert (status["router"]["id"], status["router"]["max_model_len"]) == ("router-1", 200)
    assert 0 < status["router"]["started_ms"] / 1000 <= time.time()
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"], card["created"]) == ("tiny", 200, 7)
    assert (await client.get("/v1/models/tiny")).json() == card
    assert (await client.get("/v1/models/")).json()["data"] == [card]
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_probes_and_the_version_are_vllms(client, dispatcher):
    assert [(await client.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]
    assert set((await client.get("/version")).json()) == {"version"}
    assert (await client.get("/load")).json() == {"server_load": 0}
    dispatcher.hangs_after = 0
    waiting = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
    await dispatcher.hanging.acquire()
    assert (await client.get("/load")).json() == {"server_load": 1}
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_name_is_unknown_only_when_the_adapters_are_known(client, dispatcher):
    dispatcher.new_adapters = {"poems": "digest"}
    for name, status in (("verses", 404), ("poems", 200)):
        assert (await client.post("/v1/completions", json={"model": name, "prompt": "x"})).status_code == status
    dispatcher.known_adapters, dispatcher.new_adapters = {}, {"poems": "digest"}
    assert (await client.post("/v1/completions", json={"model": "poems", "prompt": "x"})).status_code == 200
    for path in ("/v1/models/", "/ready?model="):
        dispatcher.known_adapters, dispatcher.new_adapters = {}, {"songs": "digest"}
        assert [(await client.get(path + name)).status_code for name in ("songs", "verses")] == [200, 404]
        message = error_of(await client.get(path + "verses"))["message"]
        assert message == "The model `verses` does not exist; served: `tiny`, `songs`."


async def test_a_request_never_uses_the_base_model_instead_of_an_unloaded_adapter(dispatcher, byte_level):
    service = GenerationService(dispatcher, byte_level, MODEL, RouterObserver(), RequestMetrics("tiny"))
    body = CompletionBody(model="poems", prompt="x")
    dispatcher.known_adapters = {"poems": "digest"}
    (request,) = await service.build(body, "r", ANONYMOUS)
    assert request.adapter == "digest"
    dispatcher.known_adapters = {}  # it is unloaded after the body was validated
    with pytest.raises(RequestError, match="unloaded"):
        await service.build(body, "r", ANONYMOUS)


async def test_an_unknown_path_or_method_is_an_error_that_names_what_exists(client):
    response = await client.post("/v1/audio/speech", json={})
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (404, "unknown_url", "not_found_error")
    assert error["message"].startswith("POST /v1/audio/speech does not exist; this server has /v1/completions, ")
    assert error["message"].endswith("/docs.")
    assert len(error_of(await client.get("/" + "x" * 5000))["message"]) < 300
    response = await client.get("/v1/chat/completions")
    error = error_of(response)
    assert (response.status_code, response.headers["allow"], error["code"]) == (405, "POST", "method_not_supported")
    assert error["message"] == "/v1/chat/completions does not support GET; use POST."
    assert (await client.put("/ping")).json()["error"]["message"].endswith("use GET or HEAD or POST.")


async def test_a_path_with_a_trailing_slash_is_redirected(client):
    response = await client.post("/v1/completions/?a=b", json={"prompt": "x"}, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (307, "/v1/completions?a=b")
    assert (await client.post("//v1/completions/", json={})).status_code == 404


async def test_the_documentation_is_a_page_without_scripts_or_other_resources(client):
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert not {"<script", "<link", "<img", "style"} & set(re.findall("<script|<link|<img|style", page.text))
    assert set(re.findall('(?:href|src)="([^#"][^"]*)"', page.text)) == {"openapi.json"}
    document = (await client.get("/openapi.json")).json()
    for path in document["paths"]:
        assert path in page.text
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in page.text
        assert all(f"<code>{field}</code>" in page.text for field in schema["properties"])


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
    assert 'vllm:prompt_tokens_total{model_name="tiny"} 3.0' in text


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("stream", [False, True])
async def test_unavailable_before_the_first_token_is_a_503(client, dispatcher, stream):
    dispatcher.fails_after = 0
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert error_of(response)["type"] == "service_unavailable_error"
    dispatcher.refuses = UnavailableError("no node")
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 503


async def test_each_sample_of_a_refused_request_counts_as_rejected_and_as_an_error(client, dispatcher):
    dispatcher.refuses = UnavailableError("no node")
    await client.post("/v1/completions", json={"prompt": ["x", "y"], "n": 2})
    text = (await client.get("/metrics")).text
    assert 'baton_requests_rejected_total{model_name="tiny"} 4.0' in text
    assert 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 4.0' in text


async def test_an_error_in_mid_stream_is_the_last_event(client, dispatcher):
    dispatcher.fails_after = 3
    response = await client.post("/v1/completions", json={"prompt": ["x", "y"], "stream": True})
    lines = response.text.split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the node is gone"
    assert "[DONE]" not in response.text
    assert [answers.closed for answers in dispatcher.answers] == [1, 1]


async def test_an_unexpected_error_is_a_500_without_details(client, dispatcher, caplog):
    dispatcher.refuses = RuntimeError("the secret of /etc/keys")
    response = await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "label-7"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
    assert "label-7" in caplog.text


async def test_requests_beyond_the_limit_are_rejected_with_a_retry_time(client, dispatcher):
    dispatcher.hangs_after = 0
    waiting = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"})) for _ in range(4)]
    for _ in waiting:
        await dispatcher.hanging.acquire()
    response = await client.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert error_of(response)["type"] == "rate_limit_error"
    assert dispatcher.num_refused == 1
    text = (await client.get("/metrics")).text
    assert 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 1.0' in text
    assert 'baton_requests_rejected_total{model_name="tiny"} 1.0' in text
    assert (await client.get("/health")).status_code == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    dispatcher.hangs_after = None
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert [answers.closed for answers in dispatcher.answers] == [1] * 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_does_not_count_after_its_response(dispatcher, byte_level, stream):
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    app = app_of(dispatcher, byte_level, MODEL, max_concurrent_requests=1)
    async with serving(app) as (_, port), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(body) * 3 + post(body, "connection: close"))  # each request begins as soon as possible
        assert (await reader.read()).count(b"HTTP/1.1 200") == 4
        writer.close()


async def test_openais_client_works(dispatcher, byte_level):
    async with (
        serving(app_of(dispatcher, byte_level, MODEL)) as (_, port),
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
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


doomed: ContextVar[bool] = ContextVar("doomed", default=False)


class Failing:
    """A proxy of `inner`. If `doomed` is set in the context, the method `method` fails from its call number `at` on."""

    def __init__(self, inner: object, method: str, at: int) -> None:
        self.inner, self.method, self.at, self.num_calls = inner, method, at, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name == self.method and doomed.get():
            self.num_calls += 1
            if self.num_calls >= self.at:
                raise RuntimeError("the secret of /etc/keys")
        return found


def choices_of(response: httpx.Response) -> list[str]:
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response) if is_stream else [response.json()]
    return sorted(json.dumps(event["choices"]) for event in events)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("method", ["accepted", "output", "ended", "detokenizer", "token_text", "admit"])
async def test_a_bug_fails_its_own_request_alone(dispatcher, byte_level, method, at, stream):
    """Other requests get their usual answer, and every stream of both requests is closed."""
    parts = [Failing(part, method, at) for part in (dispatcher, byte_level, RouterObserver())]
    app = app_of(parts[0], parts[1], MODEL, observer=parts[2], max_concurrent_requests=2)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "logprobs": 1, "echo": True, "stream": stream}
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

        async def ask(is_doomed: bool) -> httpx.Response:
            doomed.set(is_doomed)
            return await client.post("/v1/completions", json=body)

        usual = choices_of(await asyncio.create_task(ask(False)))
        failed, other = await asyncio.gather(ask(True), ask(False))
    assert choices_of(other) == usual
    assert "secret" not in failed.text
    if any(part.num_calls >= at for part in parts):
        last = failed.text if failed.status_code == 500 else failed.text.split("\n\n")[-2].removeprefix("data: ")
        assert json.loads(last)["error"]["type"] == "server_error"
    else:
        assert choices_of(failed) == usual
    assert all(answers.closed for answers in dispatcher.answers)


@pytest.mark.parametrize(("stream", "hangs_after"), [(False, 0), (True, 0), (True, 4)])
async def test_a_disconnect_ends_the_work(dispatcher, byte_level, stream, hangs_after):
    dispatcher.hangs_after = hangs_after
    body = json.dumps({"prompt": ["x", "y"], "stream": stream}).encode()
    async with serving(app_of(dispatcher, byte_level, MODEL)) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(body))
        for _ in range(2):
            await dispatcher.hanging.acquire()
        writer.close()
        async with asyncio.timeout(20):
            for answers in dispatcher.answers:
                await answers.gone.wait()
        assert len(dispatcher.answers) == 2


async def test_a_request_is_recorded_from_its_first_byte_to_its_last(dispatcher, byte_level):
    """The recorded time includes reading the request body and writing the response."""
    records = RequestHistory()
    app = app_of(dispatcher, byte_level, MODEL, observer=records)
    at: dict[str, float] = {"arrived": now_ns() / 1e6}

    async def receive() -> dict[str, Any]:
        if "body_sent" in at:
            await asyncio.sleep(3600)  # the client stays connected
        await asyncio.sleep(0.02)
        at["body_sent"] = now_ns() / 1e6
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
    assert at["arrived"] <= summary["accepted_ms"] < at["body_sent"]
    assert summary["first_token_ms"] >= at["first"]
    assert summary["ended_ms"] >= at["last"]


async def test_a_router_without_the_dashboard_has_none_of_its_routes_metrics_or_fields(dispatcher, byte_level):
    app = app_of(dispatcher, byte_level, MODEL)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for path in ("/", "/events", "/trace", "/v1/requests", "/v1/steps"):
            assert (await client.get(path)).status_code == 404
        assert not Dashboard.queries.keys() & (await client.get("/openapi.json")).json()["paths"].keys()
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert "vllm:request_queue_time" not in (await client.get("/metrics")).text
        status = (await client.get("/v1/status")).json()
        assert "summary" not in status
        totals = status["totals"]
        assert [totals[name] for name in ("queued", "running", "finished", "refused", "failed")] == [6, 3, 1, 0, 0]
