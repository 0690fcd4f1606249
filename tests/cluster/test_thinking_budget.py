"""Test that reasoning ends after its budget of tokens in both modes, with guesses, grammars and several samples, and
after the death of a node."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.cluster.harness import DEMO, DEMO_VOCABULARY, Cluster, cluster

THINK, END = DEMO_VOCABULARY, DEMO_VOCABULARY + 1  # the tokens <think> and </think>
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"n": 3, "logprobs": True},
    {"n": 2, "structured_outputs": {"choice": ["Moses", "Aaron"]}},
    {"temperature": 0, "structured_outputs": {"regex": "[a-z]{9}"}},
    {"temperature": 0.5, "frequency_penalty": 0.3, "min_tokens": 60},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, whose chat template begins the reasoning."""
    directory = tmp_path_factory.mktemp("thinking") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "vocab_size": END + 1}
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, bos_token_id=0, eos_token_id=1)).save_pretrained(
        directory
    )
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", name="both")
def both_modes(model: Path) -> Iterator[list[Cluster]]:
    """A disaggregated cluster that guesses tokens, and a co-located cluster that does not."""
    settings: dict[str, Any] = {"runner": "torch", "model": model}
    with cluster(1, 2, speculative_config="ngram", **settings) as guessing, cluster(0, 1, **settings) as colocated:
        yield [guessing, colocated]


def body_of(number: int, way: dict[str, Any], budget: int) -> dict[str, Any]:
    """Return a chat in which the model does not end the reasoning itself."""
    messages = [{"role": "user", "content": "Speak unto the children of Israel. " * (1 + number)}]
    fields = {"messages": messages, "thinking_token_budget": budget, "max_tokens": 60, "bad_words": ["</think>"]}
    fields |= {"seed": number, "ignore_eos": "structured_outputs" not in way, "return_token_ids": True}
    return fields | way


def ask(running: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = running.post("/v1/chat/completions", body)
    prompt = answer["prompt_token_ids"]
    in_prompt = len(prompt) - 1 - prompt.index(THINK)
    assert in_prompt > 0, "the reasoning begins in the prompt"
    for choice in answer["choices"]:
        late = choice["token_ids"].index(END) - max(0, body["thinking_token_budget"] - in_prompt)
        # A grammar allows the end only where the text has no incomplete character.
        assert 0 <= late < 16 if "structured_outputs" in body else late == 0
        assert choice["token_ids"].count(END) == 1
        if (constraint := body.get("structured_outputs", {})).get("choice"):
            assert choice["message"]["content"] in constraint["choice"]
        elif constraint:
            assert re.fullmatch(constraint["regex"], choice["message"]["content"])
    return [{"tokens": choice["token_ids"], "message": choice["message"]} for choice in answer["choices"]]


def test_reasoning_ends_after_its_budget_in_both_modes(both: list[Cluster]) -> None:
    cases = zip(WAYS * 3, [0, 2, 25] * 5, strict=True)
    bodies = [body_of(number, way, budget) for number, (way, budget) in enumerate(cases)]
    with ThreadPoolExecutor(8) as pool:
        guessed, plain = (list(pool.map(lambda body, where=running: ask(where, body), bodies)) for running in both)
    assert guessed == plain
    assert [running.settled()["handoffs"] > 0 for running in both] == [True, False]
    assert both[0].metric_sums()["vllm:spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.exhaustive
def test_a_budget_holds_after_the_death_of_a_decode_node(both: list[Cluster]) -> None:
    """This test ends a node of the first cluster, so it is the last test of this file."""
    guessing, colocated = both
    ways: list[dict[str, Any]] = [{"temperature": 0}, {}, {"structured_outputs": {"regex": "[a-z]{200}"}}]
    bodies = [body_of(number, way | {"max_tokens": 500}, 250) for number, way in enumerate(ways * 2)]
    expected = [ask(colocated, body)[0]["tokens"] for body in bodies]
    with guessing.answering("/v1/chat/completions", bodies, expected, least=6):
        guessing.send_signal("decode-0", signal.SIGKILL)
    assert guessing.status()["requests"]["moved"] > 0
