"""Test that the API gives a real checkpoint's golden tokens in both modes, with several token budgets and channels."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from shared.model_files import OTHER_DEMO_MODELS
from tests.cluster.harness import DATA, DEMO, Cluster, cluster

STORIES = DATA / "stories260K"


def golden_cases() -> list[dict[str, Any]]:
    return list(json.loads((STORIES / "golden_greedy.json").read_text())["cases"])


def ask(running: Cluster, case: dict[str, Any]) -> tuple[list[int], str, str]:
    """Return token ids, text and finish reason. The prompt is sent as text if the case has text, else as token ids."""
    prompt: object = case["prompt"] or case["prompt_token_ids"]
    body = {"model": "stories260K", "prompt": prompt, "max_tokens": 160, "temperature": 0, "return_token_ids": True}
    answer = running.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert answer["usage"]["prompt_tokens"] == len(case["prompt_token_ids"])
    return list(choice["token_ids"]), str(choice["text"]), str(choice["finish_reason"])


@pytest.mark.parametrize(
    ("prefill", "channel", "budget"), [(1, "shm", 7), (1, "tcp", 2048), (1, "pool", 48), (0, "auto", 7)]
)
def test_the_golden_outputs_come_out_exactly(prefill: int, channel: str, budget: int) -> None:
    settings = {"model": STORIES, "runner": "torch", "kv_channel": channel, "max_num_batched_tokens": budget}
    with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(5) as pool:
        cases = golden_cases()
        for case, (tokens, text, finish) in zip(cases, pool.map(lambda case: ask(running, case), cases), strict=True):
            assert tokens == case["completion_token_ids"]
            assert finish == case["finish"]
            assert text == case["completion_text"]
        assert (running.settled()["handoffs"] >= len(cases)) == (prefill > 0)


@pytest.mark.parametrize("name", OTHER_DEMO_MODELS)
def test_the_other_demo_models_give_their_golden_tokens(name: str) -> None:
    """In both modes, a hybrid model and a mixture of experts give the same tokens as transformers."""
    directory = DEMO.with_name(name)
    cases = json.loads((directory / "golden.json").read_text())
    golden = [case["token_ids"] for case in cases]
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(case["prompt"], return_tensors="pt").input_ids for case in cases]
    for prompt, tokens in zip(prompts, golden, strict=True):  # one pass checks each greedy choice
        found = reference(torch.cat([prompt, torch.tensor([tokens])], 1)).logits[0].argmax(-1)
        assert found[prompt.shape[1] - 1 : -1].tolist() == tokens
    for prefill, channel, budget in ((1, "tcp", 64), (0, "auto", 48)):
        settings = {"runner": "torch", "model": name, "kv_channel": channel, "max_num_batched_tokens": budget}
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(len(cases)) as pool:
            for _ in range(2):  # the second round finds prefixes, and a hybrid's saved states, in the cache
                found = pool.map(lambda case: running.complete(case["prompt"], 64, ignore_eos=False), cases)
                assert list(found) == golden
            assert (running.settled()["handoffs"] >= 2 * len(cases)) == (prefill > 0)
