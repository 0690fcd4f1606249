"""Test that whole clusters give the tokens of transformers for every family, and for models without one.

Requests run at once, so that they share steps, find prefixes in the cache and, in the small pool, are preempted.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import GPTNeoXConfig, PretrainedConfig

from engine.models.families import read_model_config
from engine.models.kv_places import kv_places
from engine.options import BuildOptions, cpu_layout
from scheduler.geometry import Geometry
from tests.cluster.harness import DEMO, DEMO_VOCABULARY, cluster
from tests.engine.build import thinned
from tests.engine.families import CONFIGS, MULTIMODAL, SIZES, save

LONGEST, COUNT = 120, 40
ODD = {"mistral, window 1"}  # a window that no model has
NAMES = [name for name in CONFIGS if name not in ODD]
KINDS: dict[str, PretrainedConfig] = {
    **{name: CONFIGS[name] for name in ("qwen3 moe", "gpt oss", "deepseek v3", "qwen3 next", "granite 4")},
    "gemma4 of text and images": MULTIMODAL["gemma4"],
    "gpt neox, through transformers": GPTNeoXConfig(**SIZES),
}
Way = tuple[int, str, int, int]  # prefill nodes, channel, tokens of a step, rows of the KV pool


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 120 tokens, some with a common beginning."""
    stem = [Random(0).randrange(3, DEMO_VOCABULARY) for _ in range(64)]
    lengths = (1, 17, 40, LONGEST)
    own = [[Random(length).randrange(3, DEMO_VOCABULARY) for _ in range(length)] for length in lengths]
    return [*own, *([*stem, *tokens[:9]] for tokens in own)]


def written(config: PretrainedConfig, directory: Path) -> list[list[int]]:
    """Write a random model with the vocabulary of the demo model's tokenizer. Return its answers to the prompts."""
    config = deepcopy(config)
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config.get_text_config(), key):
            setattr(config.get_text_config(), key, DEMO_VOCABULARY)
    reference = save(config, directory)
    reference.generation_config.eos_token_id = None
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, directory)
    with torch.inference_mode():
        return [
            reference.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in prompts()
        ]


def check(directory: Path, expected: list[list[int]], ways: list[Way]) -> None:
    for prefill, channel, budget, num_blocks in ways:
        settings = {
            "model": directory, "runner": "torch", "kv_channel": channel, "max_num_batched_tokens": budget,
            "num_blocks": num_blocks,
        }  # fmt: skip
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(len(expected)) as pool:
            for _ in range(2):  # the second time, prefixes are in the cache
                found = list(pool.map(lambda prompt: running.complete(prompt, COUNT), prompts()))
                assert found == expected, f"{channel}, budget {budget}, {num_blocks} rows"
            assert (running.settled()["handoffs"] > 0) == (prefill > 0)


@pytest.mark.parametrize("name", thinned(NAMES, 1000))
def test_a_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    expected = written(CONFIGS[name], tmp_path)
    sizes = read_model_config(tmp_path)
    groups = kv_places(sizes, cpu_layout(BuildOptions(str(tmp_path), num_blocks=2), sizes).block_bytes).groups
    small = 2 + int(2.5 * Geometry(16, groups).rows_for(LONGEST + COUNT, 64))
    ways = [
        (1, "shm", 7, 4096),
        (1, "tcp", 64, 4096),
        (1, "pool", 64, 4096),
        (0, "auto", 512, 4096),
        (0, "auto", 64, small),
    ]
    check(tmp_path, expected, ways)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_each_kind_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    check(tmp_path, written(KINDS[name], tmp_path), [(1, "shm", 48, 4096), (0, "auto", 48, 4096)])
