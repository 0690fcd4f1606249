"""Test that a real checkpoint gives its golden tokens through the API in both modes, with each budget and channel."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DeepseekV3Config,
    Gemma4Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

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


def test_the_demo_model_answers_the_same_in_both_modes() -> None:
    """The prompt has several chunks. The second round of answers uses the prefix cache."""
    prompt = "And the LORD said unto Moses, Speak unto the children of Israel. " * 20
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}]
    answers: list[list[list[int]]] = []
    for prefill, budget in ((1, 64), (0, 48)):
        settings = {"runner": "torch", "model": DEMO, "max_num_batched_tokens": budget}
        with cluster(prefill, 1, **settings) as running:
            answers += [[running.complete(prompt, 40, **fields) for fields in ways] for _ in range(2)]
    assert answers[1:] == answers[:-1]


SIZES = {
    "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.15,
}  # fmt: skip

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "intermediate_size": 96,
}  # fmt: skip
GEMMA4 = {
    "intermediate_size": 96, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 2048,
}  # fmt: skip
DELTA = {
    "intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
STATE_SPACE = {
    "intermediate_size": 96, "shared_intermediate_size": 96, "num_local_experts": 0, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "patch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**SIZES, intermediate_size=96, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32),
        GptOssConfig(**SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
        DeepseekV3Config(**{name: size for name, size in SIZES.items() if name != "head_dim"} | LATENT),
        Gemma4Config(
            text_config=SIZES | GEMMA4,
            vision_config=VISION,
            audio_config=None,
            tie_word_embeddings=False,
            initializer_range=0.15,
        ),
        GPTNeoXConfig(**SIZES, intermediate_size=96),  # runs through transformers
        Qwen3NextConfig(**SIZES, **DELTA),
        GraniteMoeHybridConfig(**SIZES, **STATE_SPACE),
    ],
    ids=["qwen3 moe", "gpt oss", "deepseek v3", "gemma 4 of text and images", "gpt neox", "qwen3 next", "granite 4"],
)
def test_models_of_several_kinds_give_the_tokens_of_transformers(config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(3)
    several = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
    reference = kind.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    reference.generation_config.eos_token_id = None
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, tmp_path)
    prompts = [[Random(seed).randrange(2, 2048) for _ in range(length)] for seed, length in enumerate((3, 60, 150))]
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist() for prompt in prompts
    ]
    for prefill in (1, 0):
        settings = {"runner": "torch", "model": tmp_path, "max_num_batched_tokens": 48, "disaggregate": "always"}
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(3) as pool:
            found = pool.map(lambda prompt: running.complete(prompt, 24, ignore_eos=True), prompts)
            assert [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)] == expected
