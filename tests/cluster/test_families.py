"""Test that whole clusters give the tokens of transformers for every family with an implementation of its own.

Requests run at once, so that they share steps, find prefixes in the cache and, in the small pool, are preempted.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
import torch

from engine.models.families import read_model_config
from engine.models.kv_places import kv_places
from engine.options import BuildOptions, cpu_layout
from scheduler.geometry import Geometry
from tests.cluster.harness import DEMO, DEMO_VOCABULARY, cluster
from tests.engine.build import thinned
from tests.engine.families import CONFIGS, save

LONGEST, COUNT = 120, 40
ODD = {"mistral, window 1"}  # a window that no model has
NAMES = [name for name in CONFIGS if name not in ODD]


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 120 tokens, some with a common beginning."""
    stem = [Random(0).randrange(3, DEMO_VOCABULARY) for _ in range(64)]
    lengths = (1, 17, 40, LONGEST)
    own = [[Random(length).randrange(3, DEMO_VOCABULARY) for _ in range(length)] for length in lengths]
    return [*own, *([*stem, *tokens[:9]] for tokens in own)]


@pytest.mark.parametrize("name", thinned(NAMES, 1000))
def test_a_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    config = deepcopy(CONFIGS[name])
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config, key):
            setattr(config, key, DEMO_VOCABULARY)
    reference = save(config, tmp_path)
    reference.generation_config.eos_token_id = None
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, tmp_path)
    given = prompts()
    with torch.inference_mode():
        expected = [
            reference.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in given
        ]
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
    for prefill, channel, budget, num_blocks in ways:
        settings = {
            "model": tmp_path, "runner": "torch", "kv_channel": channel, "max_num_batched_tokens": budget,
            "num_blocks": num_blocks,
        }  # fmt: skip
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(len(given)) as pool:
            for _ in range(2):  # the second time, prefixes are in the cache
                found = list(pool.map(lambda prompt: running.complete(prompt, COUNT, ignore_eos=True), given))
                assert found == expected, f"{channel}, budget {budget}, {num_blocks} rows"
            status = running.settled()
            assert (status["handoffs"] > 0) == (prefill > 0)
