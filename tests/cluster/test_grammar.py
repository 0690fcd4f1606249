"""Test that answers match their grammar, and are the same in both modes, with several samples, and as a stream."""

import json
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from tests.cluster.harness import DEMO, DEMO_VOCABULARY, Cluster, cluster, completion
from tests.cluster.random_grammars import constraints

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
SETTINGS: dict[str, Any] = {"runner": "torch", "max_num_batched_tokens": 24, "num_blocks": 600}
DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the demo model's tokenizer. It draws each allowed token about equally often."""
    directory = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(DEMO, directory)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "vocab_size": DEMO_VOCABULARY}
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, bos_token_id=0, eos_token_id=1)).save_pretrained(
        directory
    )
    return directory


@pytest.fixture(scope="module", name="both")
def both_modes(model: Path) -> Iterator[list[Cluster]]:
    """A disaggregated and a co-located cluster. Chunks are small, so that most prompts have several chunks."""
    settings = SETTINGS | {"model": model}
    with cluster(1, 1, **settings) as disaggregated, cluster(0, 1, **settings) as colocated:
        yield [disaggregated, colocated]


def ask(running: Cluster, seed: int, **fields: Any) -> tuple[list[str], list[str]]:
    """Return the texts and the finish reasons of two samples."""
    prompt = "And the LORD said unto Moses, Speak unto the children of Israel. " * (1 + seed % 3)
    body = {"prompt": prompt, "max_tokens": 500, "seed": seed, "temperature": 1, "n": 2} | fields
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


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_every_finished_answer_of_random_constraints_is_valid(both: list[Cluster], share: float) -> None:
    chosen = constraints(share)
    with ThreadPoolExecutor(16) as pool:
        first, second = (
            list(
                pool.map(
                    lambda row, where=running: ask(where, row[0], max_tokens=700, **row[1].fields), enumerate(chosen)
                )
            )
            for running in both
        )
    assert first == second
    pairs = [(each, *pair) for each, answers in zip(chosen, first, strict=True) for pair in zip(*answers, strict=True)]
    finished = [(each, text) for each, text, finish in pairs if finish == "stop"]
    assert len(finished) > 0.9 * len(pairs)
    assert not [(each.fields, text) for each, text in finished if not each.check(text)]


def test_an_answer_survives_the_death_of_its_decode_node(both: list[Cluster], model: Path) -> None:
    """The node that takes over feeds the tokens so far to a new matcher."""
    people = {"type": "array", "items": PERSON, "minItems": 2}
    form = {"type": "json_schema", "json_schema": {"name": "people", "schema": people}}
    rows = [
        completion("model", "In the beginning", 300, seed=seed, temperature=1, ignore_eos=False) for seed in range(6)
    ]
    rows = [row | {"response_format": form} for row in rows]
    expected = [both[1].post("/v1/completions", row)["choices"][0]["token_ids"] for row in rows]
    with cluster(1, 2, **SETTINGS | {"model": model}) as running:
        with running.answering("/v1/completions", rows, expected, least=6):
            running.send_signal("decode-0", signal.SIGKILL)
        assert running.status()["requests"]["moved"] > 0


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
