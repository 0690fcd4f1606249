"""Test that clusters give the same tokens as transformers for requests with images, and encode each image once."""

import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from shared.images import read_image_rules
from tests.cluster.harness import Cluster, cluster
from tests.engine.image_models import CONFIGS, GEMMA_NAMES, QWEN_NAMES, answer, data_url, is_qwen, picture, write

COUNT = 48
STORY = "Tell me of the king, of his sons and of the battle that they lost in the north. " * 2
# Texts and image sizes of user messages. The first and the last message have the same text but different images.
CASES: list[list[str | tuple[int, int]]] = [
    [(40, 24), STORY],
    ["What is in ", (60, 18), " and in ", (30, 30), STORY],
    ["No image. " + STORY],
    [(40, 24), STORY],
]


def pictures(number: int) -> list[np.ndarray[Any, Any]]:
    sizes = [part for part in CASES[number] if not isinstance(part, str)]
    return [picture(10 * number + place, *size) for place, size in enumerate(sizes)]


def message(number: int) -> dict[str, Any]:
    images = iter(pictures(number))
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else
        {"type": "image_url", "image_url": {"url": data_url(next(images))}}
        for part in CASES[number]
    ]  # fmt: skip
    return {"role": "user", "content": content}


def prompt_of(name: str, directory: Path, number: int) -> list[int]:
    """Return the prompt's tokens as transformers' processors make them: they replace images by placeholders, and then
    tokenize the text."""
    rules = read_image_rules(directory)
    assert rules is not None
    token, start, end, _ = QWEN_NAMES if is_qwen(name) else GEMMA_NAMES
    text, images = "<|turn|>user\n", iter(pictures(number))
    for part in CASES[number]:
        if isinstance(part, str):
            text += part
            continue
        high, wide, _ = next(images).shape
        rows, columns = rules.grid(*rules.size(wide, high))
        whole = f"{start}{token * (rows * columns)}{end}"
        text += whole if is_qwen(name) else f"\n\n{whole}\n\n"
    text += "<|turn|>assistant\n"  # Jinja removes the newline after a block
    return list(
        tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )


def asked(running: Cluster, number: int, **fields: Any) -> list[list[int]]:
    """Return the tokens of the prompt, and of each answer."""
    body = {"messages": [message(number)], "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    found = running.post("/v1/chat/completions", body | {"return_token_ids": True} | fields)
    return [found["prompt_token_ids"], *(choice["token_ids"] for choice in found["choices"])]


def expected_of(name: str, directory: Path, count: int = COUNT) -> list[list[list[int]]]:
    reference = write(name, directory)
    prompts = [prompt_of(name, directory, number) for number in range(len(CASES))]
    return [[prompt, answer(reference, name, prompt, pictures(number), count)] for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "name", [name if name == "qwen3 vl" else pytest.param(name, marks=pytest.mark.exhaustive) for name in CONFIGS]
)
def test_answers_to_images_are_those_of_transformers_in_both_modes(name: str, tmp_path: Path) -> None:
    expected = expected_of(name, tmp_path)
    assert expected[0][1] != expected[-1][1], "the image has no influence"
    for prefill, channel, budget, num_blocks in (
        (1, "shm", 7, 4096),
        (1, "tcp", 64, 4096),
        (0, "auto", 512, 4096),
        (0, "auto", 64, 0),
    ):
        settings = {
            "model": tmp_path,
            "runner": "torch",
            "kv_channel": channel,
            "max_num_batched_tokens": budget,
            "num_blocks": num_blocks or (24 if name.endswith("vl") else 4096),
        }
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(len(CASES)) as pool:
            for _ in range(2):  # the second time, prefixes are in the cache
                assert list(pool.map(lambda number: asked(running, number), range(len(CASES)))) == expected
            status = running.settled()
            encoded = {node["id"]: node["images_encoded"] for node in status["nodes"]}
            assert sum(encoded.values()) == sum(len(pictures(number)) for number in range(len(CASES)))
            if prefill:
                assert status["handoffs"] > 0
                assert encoded["decode-0"] == 0
                prompt, answers = expected[1]
                assert asked(running, 1, n=3) == [prompt, answers, answers, answers]
                assert running.settled()["nodes"][0]["images_encoded"] in encoded.values()
            if num_blocks == 0 and name.endswith("vl"):  # if requests arrive too far apart, none is preempted
                for _ in range(100):
                    if preempted := sum(node["preemptions"] for node in running.status()["nodes"]):
                        break
                    assert list(pool.map(lambda number: asked(running, number), range(len(CASES)))) == expected
                assert preempted


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", ["prefill-0", "decode-0"])
def test_a_request_with_an_image_survives_the_death_of_a_node(killed: str, tmp_path: Path) -> None:
    expected = expected_of("qwen3 vl", tmp_path)
    point = {"decode-0": "decode.token:9@*", "prefill-0": "prefill.after_chunk:3@*"}[killed]
    own = {killed: {"failpoint": f"{point}=kill", "allow_failpoints": True}}
    settings = {"model": tmp_path, "runner": "torch", "max_num_batched_tokens": 16, "num_blocks": 4096}
    with cluster(2, 2, own=own, heartbeat_s=0.5, **settings) as running, ThreadPoolExecutor(len(CASES)) as pool:
        assert list(pool.map(lambda number: asked(running, number), range(len(CASES)))) == expected
        assert running.processes[killed].wait(60) != 0, "the node was not killed"
        requests = running.settled()["requests"]
        assert requests["moved"] > 0
        assert requests["failed"] == 0


@pytest.mark.parametrize("prefill", [2, 0], ids=["disaggregated", "co-located"])
def test_a_cluster_encodes_an_image_once(prefill: int, tmp_path: Path) -> None:
    """Two routers get each new image at the same time, in many prompts. The prompts share no prefix, so that both nodes
    of a role compute prompts with each image."""
    write("qwen3 vl", tmp_path)
    images = [{"type": "image_url", "image_url": {"url": data_url(picture(seed, 40, 24))}} for seed in range(6)]

    def ask(number: int) -> int:
        image, router = images[number // 12], ("router", "router-1")[number % 2]
        content = [{"type": "text", "text": f"{number} {'Tell me. ' * (number % 36)}"}, image]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
        return int(running.post("/v1/chat/completions", body, router=router)["usage"]["completion_tokens"])

    with (
        cluster(prefill, 2, model=tmp_path, runner="torch", routers=2, names=True, node_timeout_s=30) as running,
        ThreadPoolExecutor(36) as pool,
    ):
        assert list(pool.map(ask, range(72))) == [2] * 72
        nodes = running.settled()["nodes"]
        assert sum(node["images_encoded"] for node in nodes) == len(images)
        assert sum(node["images_fetched"] for node in nodes) > 0
        assert sorted(node["prompt_tokens"] for node in nodes)[-2] > 0, "two nodes computed prompts"


@pytest.mark.exhaustive
def test_a_decode_node_that_preempts_requests_encodes_no_image(tmp_path: Path) -> None:
    """The node, which has no pixels, recomputes the tokens after the images, or returns the request to the router."""
    expected = expected_of("qwen2.5 vl", tmp_path, 150)
    own = {"decode-0": {"num_blocks": 24}}
    with cluster(1, 1, own=own, model=tmp_path, runner="torch") as running, ThreadPoolExecutor(len(CASES)) as pool:
        found = pool.map(lambda number: asked(running, number, max_tokens=150), range(len(CASES)))
        assert list(found) == expected
        status = running.settled()
        (decode,) = (node for node in status["nodes"] if node["id"] == "decode-0")
        assert decode["preemptions"] > 0
        assert decode["images_encoded"] == 0
        assert status["requests"]["failed"] == 0


def test_a_model_of_text_alone_refuses_images() -> None:
    with cluster(0, 1) as running, pytest.raises(urllib.error.HTTPError, match="400") as refused:
        asked(running, 0)
    assert b"messages[0].content[0].image_url.url" in refused.value.read()
