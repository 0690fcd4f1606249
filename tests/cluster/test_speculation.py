"""Test that clusters give the same answers with and without speculative decoding, in both modes, and count guesses."""

import json
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from tests.cluster.harness import DEMO, DEMO_VOCABULARY, Cluster, cluster, copy_tokenizer, wait_for
from tests.engine.build import thinned
from tests.engine.draft_files import write_eagle, write_mtp
from tests.engine.families import CONFIGS, SIZES

VERSE = "And the LORD said unto Moses, Speak unto the children of Israel. "
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "n": 2},
    {"temperature": 0.8, "seed": 7, "top_p": 0.95, "n": 3, "logprobs": 0},
    {"temperature": 0.3, "seed": 8, "frequency_penalty": 0.2, "repetition_penalty": 1.05},
    {"temperature": 0, "presence_penalty": 0.3, "logit_bias": {"300": 2.5}, "min_tokens": 40},
    {"temperature": 0, "stop": ["Israel. And", "children of"]},
    {"temperature": 0.5, "seed": 9, "stop": ["and "], "include_stop_str_in_output": True},
    {
        "temperature": 0.4,
        "seed": 10,
        "structured_outputs": {"regex": "(And the LORD said unto Moses, ){3}[A-Z][a-z ]{9}"},
    },
    {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 30},
]


def nearly(value: Any) -> Any:
    """Return an object that equals any answer that differs from `value` only by the rounding of its logprobs."""
    if isinstance(value, dict):
        return {key: nearly(one) for key, one in value.items()}
    if isinstance(value, list):
        return [nearly(one) for one in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def answer(running: Cluster, number: int, way: dict[str, Any], **more: Any) -> Any:
    prompt = VERSE * 8 + f"Chapter {number}. And the LORD"
    body = {"model": "model", "prompt": prompt, "max_tokens": 90, "return_token_ids": True, **way, **more}
    return running.post("/v1/completions", body)["choices"]


DRAFTERS = {
    "lookup": ({"speculative_config": "ngram"}, (0.05, 0.99)),
    "itself": ({"speculative_config": json.dumps({"model": str(DEMO)})}, (0.95, 1)),
    "mtp": ({"speculative_config": "deepseek_mtp"}, (0.05, 0.99)),
    "eagle3": ({}, (0.05, 0.99)),  # the directory comes from the fixture `models`
}


@pytest.fixture(scope="module", name="models")
def models_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with draft layers that are often right."""
    mtp, eagle = (tmp_path_factory.mktemp(name) / "model" for name in ("mtp", "eagle"))
    config = deepcopy(CONFIGS["deepseek v3"])
    config.vocab_size, config.max_position_embeddings = DEMO_VOCABULARY, 1024
    write_mtp(config, mtp, agrees=True)
    sizes = SIZES | {"vocab_size": DEMO_VOCABULARY, "max_position_embeddings": 1024, "num_hidden_layers": 5}
    write_eagle(Qwen3Config(**sizes, head_dim=16, num_key_value_heads=2), eagle, agrees=True)
    for directory in (mtp, eagle):
        copy_tokenizer(directory)
    return {"mtp": mtp, "eagle3": eagle}


@pytest.mark.parametrize(
    ("drafter", "prefill"),
    [
        # The next test runs "mtp" with a handoff.
        pytest.param(*case, marks=() if case in {("lookup", 1), ("eagle3", 0)} else pytest.mark.exhaustive)
        for case in product(DRAFTERS, (1, 0))
    ],
)
def test_answers_are_the_same_with_and_without_guesses(drafter: str, prefill: int, models: dict[str, Path]) -> None:
    config, (least, most) = DRAFTERS[drafter]
    settings = {"runner": "torch", "max_num_batched_tokens": 96, "model": models.get(drafter, DEMO), **config}
    if drafter == "eagle3":
        settings["speculative_config"] = json.dumps({"method": drafter, "model": str(models[drafter] / "eagle")})
    mode = "disaggregated" if prefill else "colocated"
    with cluster(prefill, 1, mode=mode, **settings) as running, ThreadPoolExecutor(8) as pool:
        asked = [(number, way) for number in range(2) for way in WAYS]
        plain = nearly(list(pool.map(lambda one: answer(running, *one, speculative=False), asked)))
        before = running.settled()
        assert "spec_decode_num_drafts_total{" in running.metrics()
        assert counted(running, "draft_tokens") == 0
        for _ in range(10):  # the number of guesses depends on measured step times: on a busy machine, there are few
            assert list(pool.map(lambda one: answer(running, *one), asked)) == plain
            if counted(running, "accepted_tokens") > 5:
                break
        after = running.settled()
        assert counted(running, "accepted_tokens") > 5
        is_right = counted(running, "accepted_tokens") / counted(running, "draft_tokens")
        # The drafter does not know which tokens a grammar forbids.
        assert least < is_right <= most
        assert (after["handoffs"] > before["handoffs"]) == bool(prefill)
        node = next(node for node in running.status()["nodes"] if node["role"] == "decode")
        assert node["blocks"]["free"] + node["blocks"]["cached"] == node["blocks"]["total"]
        steps = running.get(f"/v1/steps?node={node['id']}&limit=1000")["steps"]
        assert sum(step[19] for step in steps) > 0


@pytest.mark.parametrize("drafter", thinned(["mtp", "itself"], 2))
def test_answers_are_the_same_after_the_death_of_a_decode_node(drafter: str, models: dict[str, Path]) -> None:
    settings = {"runner": "torch", "model": models.get(drafter, DEMO), **DRAFTERS[drafter][0]}
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7}]
    with cluster(1, 2, **settings) as running, ThreadPoolExecutor(6) as pool:
        asked = [(number, way | {"max_tokens": 400, "ignore_eos": True}) for number in range(3) for way in ways]
        plain = nearly(list(pool.map(lambda one: answer(running, *one, speculative=False), asked)))
        waiting = [pool.submit(answer, running, *one) for one in asked]
        wait_for(lambda: counted(running, "accepted_tokens") > 20, "guesses are right")
        running.processes["decode-0"].kill()
        assert [one.result() for one in waiting] == plain
        assert running.settled()["requests"]["moved"] > 0


def counted(running: Cluster, name: str) -> float:
    return running.metric_sums().get(f"vllm:spec_decode_num_{name}_total", 0.0)
