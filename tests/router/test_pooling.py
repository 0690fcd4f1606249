"""Test how the router reads a model's pooling rule, and which requests for embeddings and scores it refuses."""

import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.dispatch.requests import GenerationRequest, PoolingRule, TokenStream
from router.http import pooling
from router.text.chat_template import ChatTemplate
from router.text.pooling_rule import read_pooling
from router.text.tokenizer import Tokenizer
from shared.errors import ConfigError
from tests.router.conftest import byte_level_tokenizer
from tests.router.scripted import MODEL, ScriptedDispatcher, app_of

EMBEDS, RANKS = PoolingRule("last", normalizes=True), PoolingRule("logits", tokens=(5, 6))
TEMPLATE = "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
ST = "sentence_transformers.models."


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), {}, ChatTemplate(TEMPLATE, {}, []))


@asynccontextmanager
async def serving(rule: PoolingRule, vector: tuple[float, ...] = (3.0, 4.0, 0.0)) -> AsyncIterator[httpx.AsyncClient]:
    dispatcher = ScriptedDispatcher(lambda *_: [])
    dispatcher.vector = struct.pack(f"<{len(vector)}f", *vector)
    app = app_of(dispatcher, tokenizer(), replace(MODEL, pooling=rule))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        yield client


BAD: list[tuple[PoolingRule, str, dict[str, Any], str]] = [
    (PoolingRule(refusal="No."), "/v1/embeddings", {"input": "a"}, "No."),
    (PoolingRule(refusal="No."), "/v1/rerank", {"query": "a", "documents": ["b"]}, "No."),
    (RANKS, "/v1/embeddings", {"input": "a"}, "reranker; use /v1/rerank"),
    (EMBEDS, "/v1/embeddings", {}, "`input`: Field required"),
    (EMBEDS, "/v1/embeddings", {"input": []}, "`input`: must be an input (a string"),
    (EMBEDS, "/v1/embeddings", {"input": ""}, "`input`: must be an input (a string"),
    (EMBEDS, "/v1/embeddings", {"input": [-1]}, "`input`: must be an input (a string"),
    (EMBEDS, "/v1/embeddings", {"input": ["a"] * 2049}, "1 to 2048"),
    (EMBEDS, "/v1/embeddings", {"input": [330]}, "Token ids in `input` must be from 0 to 329"),
    (EMBEDS, "/v1/embeddings", {"input": [1] * 200}, "An input has 200 tokens; at most 199 fit"),
    (EMBEDS, "/v1/embeddings", {"input": "ab" * 10000}, "An input has at least"),
    (EMBEDS, "/v1/embeddings", {"input": "a", "dimensions": 4}, "`dimensions` must be at most 3"),
    (EMBEDS, "/v1/embeddings", {"input": "a", "dimensions": 0}, "`dimensions`"),
    (EMBEDS, "/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "`encoding_format`"),
    (EMBEDS, "/v1/embeddings", {"input": "a", "temperature": 1}, "Unknown parameter: `temperature`"),
    (EMBEDS, "/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "`instruction` is for rerankers"),
    (EMBEDS, "/v1/rerank", {"query": "a", "documents": []}, "`documents`"),
    (EMBEDS, "/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "or, for rerank, objects with `text`"),
    (RANKS, "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "`top_n`"),
    (RANKS, "/v1/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 4}, "shorten the documents"),
    (RANKS, "/v1/rerank", {"query": "a", "documents": ["b " * 300]}, "at most 199 fit"),
    (RANKS, "/v1/rerank", {"query": "ab" * 10000, "documents": ["a"] * 64}, "An input has at least"),
    (EMBEDS, "/v1/score", {"text_1": "a"}, "Give either `text_2` or `documents`."),
    (EMBEDS, "/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "Give either `text_1` or `queries`."),
    (EMBEDS, "/v1/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "as many as `text_2`"),
    (EMBEDS, "/v1/score", {"queries": ["a", "b"], "documents": ["c"]}, "`queries` must have one text"),
    (EMBEDS, "/v1/score", {"text_1": [], "text_2": "b"}, "`text_1` must have 1 to 2048 texts"),
]


@pytest.mark.parametrize(("rule", "path", "body", "complaint"), BAD)
async def test_bad_requests_are_refused_by_name(
    rule: PoolingRule, path: str, body: dict[str, Any], complaint: str
) -> None:
    async with serving(rule) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert complaint in answer.json()["error"]["message"]


async def test_a_node_without_vectors_is_an_error_of_the_server() -> None:
    async with serving(EMBEDS, ()) as client:
        answer = await client.post("/v1/embeddings", json={"input": "a"})
        assert (answer.status_code, answer.json()["error"]["message"][:20]) == (500, "A node returned no v")


async def test_cut_embeddings_are_normalized_and_ranks_are_in_order() -> None:
    async with serving(EMBEDS) as client:
        data = (await client.post("/v1/embeddings", json={"input": ["a", "b"]})).json()["data"]
        assert [one["embedding"] for one in data] == [pytest.approx([0.6, 0.8, 0.0])] * 2
        data = (await client.post("/v1/embeddings", json={"input": [1, 2], "dimensions": 1})).json()["data"]
        assert [one["embedding"] for one in data] == [[1.0]]
        body = {"query": "a", "documents": ["b", "c", "d"], "top_n": 2, "return_documents": False}
        answer = (await client.post("/v2/rerank", json=body)).json()
        assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2
        assert [one["index"] for one in answer["results"]] == [0, 1]
        assert answer["usage"]["total_tokens"] > 3


async def test_documents_are_tokenized_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "PAIRS_AT_ONCE", 2)
    body = {"text_1": "query", "text_2": ["a", "bb", "ccc", "dddd", "eeeee"]}
    async with serving(RANKS, (1.0, 0.0)) as client:
        answer = (await client.post("/v1/score", json=body)).json()
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3, 4]
    assert answer["usage"]["prompt_tokens"] == 5 * len("queryquerydocument") + 15


class CountingDispatcher(ScriptedDispatcher):
    """A dispatcher that counts the requests in progress."""

    num_now = most = 0

    @asynccontextmanager
    async def admit(self, request: GenerationRequest) -> AsyncIterator[list[TokenStream]]:
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        try:
            async with super().admit(request) as streams:
                yield streams
        finally:
            self.num_now -= 1


@pytest.mark.parametrize(("length", "most"), [(10, 64), (2048, 32)])
async def test_many_inputs_do_not_fill_the_queue(length: int, most: int) -> None:
    dispatcher = CountingDispatcher(lambda *_: [])
    dispatcher.vector = struct.pack("<f", 1.0)
    app = app_of(dispatcher, Tokenizer(byte_level_tokenizer(), {}), replace(MODEL, pooling=EMBEDS, max_model_len=4096))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        answer = await client.post("/v1/embeddings", json={"input": [[1] * length] * 100})
        assert len(answer.json()["data"]) == 100
        assert dispatcher.most == most
        assert dispatcher.num_now == 0


def write(directory: Path, modules: list[tuple[str, dict[str, Any]]], **config: Any) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    listed = [{"type": ST + "Transformer", "path": ""}]
    for number, (name, values) in enumerate(modules, 1):
        (directory / str(number)).mkdir()
        (directory / str(number) / "config.json").write_text(json.dumps(values))
        listed.append({"type": ST + name, "path": str(number)})
    (directory / "modules.json").write_text(json.dumps(listed))


LAST = ("Pooling", {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False, "include_prompt": True})


@pytest.mark.parametrize(
    ("modules", "config", "found"),
    [
        ([LAST, ("Normalize", {})], {}, EMBEDS),
        ([("Pooling", {"pooling_mode": "mean"})], {}, PoolingRule("mean")),
        ([("LogitScore", {"true_token_id": 5, "false_token_id": 6})], {}, RANKS),
        ([("LogitScore", {"true_token_id": 5, "false_token_id": None})], {}, PoolingRule("logits", tokens=(5,))),
        ([("Pooling", {"pooling_mode_cls_token": True})], {}, "pools by cls_token"),
        ([("Pooling", {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True})], {}, "lasttoken, max_tokens"),
        ([LAST, ("Dense", {})], {}, "a module of the type Dense"),
        ([LAST], {"is_causal": False}, "bidirectional"),
        ([], {}, "has neither a Pooling"),
    ],
)
def test_the_modules_of_sentence_transformers_decide(
    modules: list[tuple[str, dict[str, Any]]], config: dict[str, Any], found: PoolingRule | str, tmp_path: Path
) -> None:
    write(tmp_path, modules, **config)
    rule = read_pooling(tmp_path, 330)
    if isinstance(found, PoolingRule):
        assert rule == found
    else:
        assert found in rule.refusal
        assert not rule.kind


def test_malformed_files_are_named(tmp_path: Path) -> None:
    assert "no modules.json" in read_pooling(tmp_path, 330).refusal
    write(tmp_path, [("LogitScore", {"true_token_id": 330})])
    with pytest.raises(ConfigError, match=r"1/config\.json: true_token_id and false_token_id must be"):
        read_pooling(tmp_path, 330)
    for bad in ('{"type": 1}', "[1]", '[{"type": 1, "path": ""}]', "x", '[{"type": "a.B", "path": "../x"}]'):
        (tmp_path / "modules.json").write_text(bad)
        with pytest.raises(ConfigError, match=r"modules\.json"):
            read_pooling(tmp_path, 330)
