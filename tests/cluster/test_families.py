"""Test that whole clusters generate the same tokens as transformers, for models of every family that Baton implements
and for models that it runs through transformers.

Requests run concurrently, so that they share steps, find prefixes in the cache and, in the small pool, are preempted.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import GPTNeoXConfig, PretrainedConfig

from cluster.models import SWEPT
from engine.components import build
from engine.models.families import FAMILIES
from engine.options import BuildOptions
from scheduler.geometry import UNIFORM, Geometry
from tests.cluster.harness import DEMO_VOCABULARY, cluster, copy_tokenizer
from tests.engine.build import thinned
from tests.engine.families import CONFIGS, MULTIMODAL, SIZES, save
from tests.sweep.tiny_configs import tiny_model

LONGEST, COUNT = 120, 40
ENOUGH = 4096  # with this many rows in its KV pool, a node preempts no request
ODD = {"mistral, window 1"}  # no real model has a window of 1
NAMES = [name for name in CONFIGS if name not in ODD]
KINDS: dict[str, PretrainedConfig] = {
    **{name: CONFIGS[name] for name in ("qwen3 moe", "gpt oss", "deepseek v3", "qwen3 next", "granite 4")},
    "gemma4 of text and images": MULTIMODAL["gemma4"],
    "gpt neox, through transformers": GPTNeoXConfig(**SIZES),
}
FOREIGN = [name for name, why in json.loads(SWEPT.read_text())["classes"].items() if not why and name not in FAMILIES]
KILLED = {"prefill-0": "prefill.after_chunk:3@*", "decode-0": "decode.token:330"}
Way = tuple[int, str, int, int]  # prefill nodes, channel, tokens per step, rows of the KV pool


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 120 tokens, some with a common beginning."""
    stem = [Random(0).randrange(3, DEMO_VOCABULARY) for _ in range(64)]
    lengths = (1, 17, 40, LONGEST)
    own = [[Random(length).randrange(3, DEMO_VOCABULARY) for _ in range(length)] for length in lengths]
    return [*own, *([*stem, *tokens[:9]] for tokens in own)]


def written(config: PretrainedConfig, directory: Path) -> list[list[int]]:
    """Write a random model with the vocabulary of the demo model's tokenizer. Return its answers to `prompts()`."""
    config = deepcopy(config)
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(config.get_text_config(), key):
            setattr(config.get_text_config(), key, DEMO_VOCABULARY)
    return answers(save(config, directory), directory)


def written_tiny(name: str, directory: Path) -> list[list[int]]:
    """Do the same as `written` with a tiny model of the transformers class `name`."""
    tiny_model(name, DEMO_VOCABULARY).save_pretrained(directory)
    return answers(
        getattr(transformers, name).from_pretrained(directory, attn_implementation="eager").eval(), directory
    )


def answers(reference: Any, directory: Path) -> list[list[int]]:
    reference.generation_config.eos_token_id = None
    copy_tokenizer(directory)
    with torch.inference_mode():
        return [
            reference.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in prompts()
        ]


def check(
    directory: Path, expected: list[list[int]], ways: list[Way], model_impl: str = "auto", preempts: bool = False
) -> None:
    """Run a cluster in each of the ways, and compare its answers. With `preempts`, check that a small pool preempts
    requests."""
    for prefill, channel, budget, num_blocks in ways:
        settings = {
            "model": directory, "runner": "torch", "kv_channel": channel, "max_num_batched_tokens": budget,
            "num_blocks": num_blocks, "model_impl": model_impl,
        }  # fmt: skip
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(len(expected)) as pool:
            for _ in range(2):  # the second time, prefixes are in the cache
                found = list(pool.map(lambda prompt: running.complete(prompt, COUNT), prompts()))
                assert found == expected, f"{channel}, budget {budget}, {num_blocks} rows"
            status = running.settled()
            assert (status["handoffs"] > 0) == (prefill > 0)
            if preempts and num_blocks < ENOUGH:  # if requests arrive too far apart, none is preempted
                for _ in range(100):
                    if preempted := sum(node["preemptions"] for node in running.status()["nodes"]):
                        break
                    assert list(pool.map(lambda prompt: running.complete(prompt, COUNT), prompts())) == expected
                assert preempted


def every_way(directory: Path, model_impl: str = "auto") -> tuple[list[Way], bool]:
    """Return every `Way` to run the cluster, and whether the small pool of the last `Way` must preempt requests.

    Preemptions are certain only without windows and states: with windows, requests release rows while they run, and
    with states, requests hold most of their rows from the start.
    """
    components = build(BuildOptions(str(directory), model_impl=model_impl, threads=1, num_blocks=ENOUGH))
    geometry = Geometry(components.layout.block_tokens, components.groups)
    in_chunks, in_decodes = (geometry.rows_for(LONGEST + COUNT, chunk) for chunk in (64, 1))
    ways = [
        (1, "shm", 7, ENOUGH),
        (1, "tcp", 64, ENOUGH),
        (1, "pool", 64, ENOUGH),
        (0, "auto", 512, ENOUGH),
        (0, "auto", 64, 2 + max(in_chunks, int(2.5 * in_decodes))),
    ]
    return ways, components.groups == UNIFORM


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_a_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    expected = written(CONFIGS[name], tmp_path)
    ways, preempts = every_way(tmp_path)
    check(tmp_path, expected, ways, preempts=preempts)


@pytest.mark.parametrize("name", thinned(KINDS, 3))
def test_a_model_of_each_kind_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    check(tmp_path, written(KINDS[name], tmp_path), [(1, "shm", 48, ENOUGH), (0, "auto", 48, ENOUGH)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FOREIGN)
def test_a_decoder_without_a_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    expected = written_tiny(name, tmp_path)
    ways, preempts = every_way(tmp_path, "transformers")
    check(tmp_path, expected, ways, "transformers", preempts)


@pytest.mark.parametrize(
    "name", thinned(["qwen3 next", *(name for name in NAMES if name != "qwen3 next"), *FOREIGN], 1000)
)
def test_a_killed_node_of_each_role_changes_no_token(name: str, tmp_path: Path) -> None:
    """The decode node is killed at its 330th token, in the second round or later: the first round has fewer tokens."""
    expected = written(CONFIGS[name], tmp_path) if name in CONFIGS else written_tiny(name, tmp_path)
    own = {node: {"failpoint": f"{site}=kill", "allow_failpoints": True} for node, site in KILLED.items()}
    settings = {"model": tmp_path, "runner": "torch", "max_num_batched_tokens": 16, "num_blocks": ENOUGH}
    with cluster(2, 2, own=own, heartbeat_s=0.5, **settings) as running, ThreadPoolExecutor(len(expected)) as pool:
        for _ in range(4):
            assert list(pool.map(lambda prompt: running.complete(prompt, COUNT), prompts())) == expected
        for killed in KILLED:
            assert running.processes[killed].wait(60) != 0, f"{killed} was not killed"
        requests = running.settled()["requests"]
        assert requests["moved"] > 0
        assert requests["failed"] == 0
