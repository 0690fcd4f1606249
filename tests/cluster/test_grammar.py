"""Test that answers match their grammar, and are the same in both modes, with several samples, and as a stream."""

import json
import re
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.cluster.harness import Cluster, cluster

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "c c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"


@pytest.fixture(scope="module", name="both")
def both_modes() -> Iterator[list[Cluster]]:
    """A disaggregated and a co-located cluster of the demo model. Chunks are small, so that prompts have several."""
    settings: dict[str, Any] = {"runner": "torch", "max_num_batched_tokens": 24, "num_blocks": 600}
    with cluster(1, 1, **settings) as disaggregated, cluster(0, 1, **settings) as colocated:
        yield [disaggregated, colocated]


def ask(running: Cluster, seed: int, **fields: Any) -> tuple[list[str], list[str]]:
    """Return the texts and the finish reasons of two samples."""
    prompt = "And the LORD said unto Moses, Speak unto the children of Israel. " * (1 + seed % 3)
    body = {"prompt": prompt, "max_tokens": 500, "seed": seed, "temperature": 1, "n": 2, **fields}
    choices = running.post("/v1/completions", body)["choices"]
    return [choice["text"] for choice in choices], [choice["finish_reason"] for choice in choices]


def test_answers_match_and_are_the_same_in_both_modes(both: list[Cluster]) -> None:
    constraints: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
        {"structured_outputs": {"regex": DATE}},
        {"structured_outputs": {"choice": ["Moses", "Aaron", "the people"]}, "ignore_eos": True},
        {"structured_outputs": {"grammar": 'root ::= ("le" | "la")+ "!"'}, "min_tokens": 3},
        {},
    ]
    rows = [(seed, fields) for seed in range(4) for fields in constraints]
    with ThreadPoolExecutor(16) as pool:
        disaggregated, colocated = (
            list(pool.map(lambda row, where=running: ask(where, row[0], **row[1]), rows)) for running in both
        )
    assert disaggregated == colocated
    assert [running.settled()["handoffs"] > 0 for running in both] == [True, False]
    for (_, fields), (texts, finishes) in zip(rows, colocated, strict=True):
        for text, finish in zip(texts, finishes, strict=True):
            check(text, finish, fields)
    for running in both:
        running.idle()


def check(text: str, finish: str, fields: dict[str, Any]) -> None:
    structured = fields.get("structured_outputs", {})
    if "response_format" in fields:
        assert finish == "stop"
        person = json.loads(text)
        assert 0 < len(person["name"]) <= 12
        assert 0 <= person["age"] <= 130
        assert {*person["tags"]} <= {"a", "bb", "c c"}
        assert len(person["tags"]) <= 3
    elif "regex" in structured:
        assert re.fullmatch(DATE, text)
    elif "choice" in structured:
        assert (text in structured["choice"], finish) == (True, "stop")
    elif "grammar" in structured:
        assert re.fullmatch("(le|la)+!" if finish == "stop" else "(le|la)+.?", text)


def test_a_stream_of_chat_is_the_answer_of_the_openai_client(both: list[Cluster]) -> None:
    client = openai.OpenAI(base_url=both[0].url + "/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "model", "seed": 3, "messages": [{"role": "user", "content": "Speak."}]}
    options["response_format"] = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
    with client:
        plain = client.chat.completions.create(**options).choices[0].message.content
        chunks = client.chat.completions.create(**options, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain
    assert json.loads(str(plain)).keys() == PERSON["properties"].keys()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "`not`"),
        ({"structured_outputs": {"grammar": "start: <|nothing|>"}}, "unknown special token"),
        ({"structured_outputs": {"grammar": "start: <[2048]>"}}, "No token is allowed"),
    ],
)
def test_a_bad_grammar_is_a_bad_request_and_no_node_ends(both: list[Cluster], fields: Any, says: str) -> None:
    for running in both:
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(running, 1, **fields)
        assert raised.value.code == 400
        assert says in json.load(raised.value)["error"]["message"]
        running.idle()
