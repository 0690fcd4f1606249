"""Requests with speculative decoding, grammars, images or LoRA adapters, for a tiny model with real arithmetic.

The expected answers are those of a single node without faults, drafts and handoffs. Other tests compare such answers
with those of transformers and peft.
"""

import atexit
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.chaos.traffic import Ask, Outcome, run
from tests.cluster.harness import Cluster, cluster, prompt_of
from tests.engine import image_models
from tests.engine.families import save
from tests.engine.lora_files import save_adapter

KIND = "features"
MODEL = "qwen3 vl"
ADAPTERS = ("sql", "poems")
NUM_REQUESTS = 30  # distinct requests, which the clients repeat
BUDGET = 24  # tokens per step, so that most prompts have many chunks
VERSE = "And the LORD said unto Moses, Speak unto the children of Israel. "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 9}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
PATTERN = {"structured_outputs": {"regex": "(And the LORD said unto Moses, ){4}[A-Z][a-z ]{9}"}}


@lru_cache(maxsize=1)
def scene() -> tuple[dict[str, object], list[list[list[int]]]]:
    """Write a model of text and images, and two adapters. They are removed when this process ends. Return the settings
    of a cluster that serves the model and the adapters, and the expected answers."""
    directory = Path(tempfile.mkdtemp(prefix="baton-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    settings = prepare(directory)
    return settings, expected_answers(settings)


def prepare(directory: Path) -> dict[str, object]:
    """Write the models. Return the settings."""
    model = directory / "model"
    config = deepcopy(image_models.CONFIGS[MODEL])
    config.text_config.max_position_embeddings = 4096
    reference = save(config, model)
    image_models.write_files(MODEL, model)
    for seed, name in enumerate(ADAPTERS):
        save_adapter(deepcopy(reference), directory / name, seed)
    return {
        "model": model, "runner": "torch", "num_blocks": 600, "max_num_batched_tokens": BUDGET,
        "lora_modules": ",".join(f"{name}={directory / name}" for name in ADAPTERS), "speculative_config": "ngram",
    }  # fmt: skip


@lru_cache(maxsize=NUM_REQUESTS)
def _feature_ask(number: int) -> Ask:
    """Return a request of one of six kinds: each feature alone, images with an adapter, and all together."""
    sampled = {"temperature": 0.7, "ignore_eos": False}
    match number % 6:
        case 0:  # the guesses of prompt lookup are often right, because the prompt repeats itself
            return Ask(number, tuple(prompt_of(number, 10) * 30), 120)
        case 1:
            return Ask(number, tuple(prompt_of(number, 60)), 160, n=2, fields=sampled | FORM)
        case 2:
            return _with_images(number, 60, [(60, 18), (30, 30)])
        case 3:
            return Ask(number, tuple(prompt_of(number, 150)), 60, n=2, temperature=0.7, fields={"model": "sql"})
        case 4:
            return _with_images(number, 40, [(40, 24)], model="poems")
    return _with_images(number, 90, [(40, 24)], model="poems", **sampled, **PATTERN)


def feature_ask(index: int) -> Ask:
    """Return request number `index`. Every third request has its own cache salt, so its prefix is in no node's cache,
    and the router may choose a restarted node. All other requests go to the node that has their images and prompts."""
    ask = _feature_ask(index % NUM_REQUESTS)
    return replace(ask, fields={**ask.fields, "cache_salt": str(index)}) if index % 3 == 0 else ask


def _with_images(number: int, max_tokens: int, sizes: list[tuple[int, int]], **fields: Any) -> Ask:
    # All requests of one kind have the same first picture, so nodes find it among the pictures already encoded.
    pictures = [image_models.picture(place * number, *size) for place, size in enumerate(sizes)]
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image_models.data_url(picture)}} for picture in pictures
    ]
    content.insert(1, {"type": "text", "text": f"Chapter {number}. {VERSE * 4}"})
    fields |= {"messages": [{"role": "user", "content": content}]}
    return Ask(number, (), max_tokens, is_chat=True, fields=fields)


def expected_answers(settings: dict[str, object]) -> list[list[list[int]]]:
    """Return the tokens of each sample of each request, from one node without faults, drafts and handoffs."""
    settings = settings | {"speculative_config": ""}
    with cluster(0, 1, mode="colocated", **settings) as running, ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda number: _answered(running, number), range(NUM_REQUESTS)))
    return [[outcome.tokens[index] for index in range(outcome.ask.n)] for outcome in outcomes]


def _answered(running: Cluster, number: int) -> Outcome:
    outcome = run(running.url, running.model, Outcome(feature_ask(number)))
    assert not outcome.lost, outcome.lost
    return outcome


def check_use(running: Cluster) -> None:
    """Assert that the running nodes have encoded images, and that some of their guessed tokens were right."""
    assert sum(node["images_encoded"] for node in running.status()["nodes"]) > 0, "no image was encoded"
    seen = running.metric_sums()
    accepted, guessed = (seen[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("accepted", "draft"))
    assert 0 < accepted < guessed, f"{accepted:g} of {guessed:g} guesses were right"
