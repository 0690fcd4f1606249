"""Test that a model of text and images generates the same tokens as in transformers, however prompts are computed."""

import json
import math
from collections.abc import Sequence
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engine.foreign.vision import VisionEncoder
from engine.media import PromptImage, images_of
from engine.models.load import load_model
from node.output_publisher import delta_of
from scheduler.prefix import MediaSpan
from scheduler.request import Request, Slice
from scheduler.scheduler import StepLimits
from shared.images import ImageRules, read_image_rules
from shared.rpc.messages import Media
from tests.engine.build import CPU, GREEDY, every_backend, once, thinned
from tests.engine.image_models import CONFIGS, END, IMAGE, START, answer, picture, processor, words, write
from tests.engine.nodes import Node, run_together

torch.set_num_threads(1)
# Maximum tokens of a step, number of requests that fit into the pool, and whether requests are handed over
WAYS = [(7, 16, False), (64, 16, True), (512, 16, False), (64, 1.05, False)]
__all__ = ["every_backend"]  # applies to every test here
COUNT = 16
SHAPES = [[(40, 24)], [(17, 61), (30, 30)], [], [(8, 90)], [(40, 24)]]


def resized(image: np.ndarray[Any, Any], rules: ImageRules) -> np.ndarray[Any, Any]:
    """Resize an image as the image processor of transformers does."""
    height, width, _ = image.shape
    wide, high = rules.size(width, height)
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((wide, high), Image.Resampling(rules.resample)))


def prompt(rules: ImageRules, images: Sequence[np.ndarray[Any, Any]], seed: int) -> tuple[list[int], list[Media]]:
    """Return a prompt with images between random words, and the images as a node receives them."""
    tokens, media = words(seed, 9), []
    for number, image in enumerate(images):
        pixels = resized(image, rules)
        high, wide, _ = pixels.shape
        rows, columns = rules.grid(wide, high)
        tokens.append(START)
        digest = blake2b(pixels.tobytes(), digest_size=16).digest()
        media.append(Media(len(tokens), rows, columns, digest, wide, high, pixels.tobytes()))
        tokens += [IMAGE] * (rows * columns) + [END, *words(seed + number, 7)]
    return tokens, media


def request(number: int, rules: ImageRules, encoder: VisionEncoder, tokens: list[int], media: list[Media]) -> Request:
    made = Request(f"r{number}", list(tokens), len(tokens), COUNT, sampling=GREEDY)
    made.media = tuple(MediaSpan(one.offset, one.rows, one.columns, one.digest, rules.is_atomic) for one in media)
    made.images = [PromptImage(one) for one in media]
    for image in made.images:
        image.features = encoder.features(image.media)
    return made


class Scene(NamedTuple):
    """A model, prompts with images, and the tokens that transformers generates for them."""

    name: str
    directory: Path
    rules: ImageRules
    prompts: list[tuple[list[int], list[Media]]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    name, directory = request.param, tmp_path_factory.mktemp("model")
    reference = write(name, directory)
    rules = read_image_rules(directory)
    assert rules is not None
    images = [
        [picture(10 * row + place, *size) for place, size in enumerate(shapes)] for row, shapes in enumerate(SHAPES)
    ]
    images[-1] = [picture(99, 40, 24)]  # the last prompt is the first prompt with another image
    prompts = [prompt(rules, each, 0 if row == len(SHAPES) - 1 else row) for row, each in enumerate(images)]
    assert prompts[0][0] == prompts[-1][0]
    expected = [answer(reference, name, tokens, each, COUNT) for (tokens, _), each in zip(prompts, images, strict=True)]
    assert expected[0] != expected[-1], "the image has no influence"
    return Scene(name, directory, rules, prompts, expected)


@pytest.mark.parametrize(
    ("scene", "way", "every_backend"),
    thinned(product(CONFIGS, WAYS, ("torch", "numba")), 7),
    indirect=["scene", "every_backend"],
)
def test_prompts_with_images_give_the_tokens_of_transformers(scene: Scene, way: tuple[int, float, bool]) -> None:
    name, directory, rules, prompts, expected = scene
    model, encoder = load_model(directory, torch.float32, CPU), VisionEncoder(directory, rules)
    size = 8 if name.startswith("qwen3.5") else 4  # a unit of a state must fit into a row
    longest = max(len(tokens) for tokens, _ in prompts) + COUNT
    budget, room, hands_over = way
    here, there = (Node(model, StepLimits(budget), room, size, longest=longest) for _ in range(2))
    there.runner.use_encoder(encoder)
    if not hands_over:
        here.runner.use_encoder(encoder)
    for _ in range(2):  # the second time, prefixes are in the cache
        rows = [request(number, rules, encoder, *each) for number, each in enumerate(prompts)]
        assert run_together(rows, here, there if hands_over else None) == expected
    if name.endswith("vl"):  # models with windows or states may preempt no request
        assert (here.scheduler.counters.preemptions > 0) == (room < 2)
    assert room < 2 or (there if hands_over else here).scheduler.counters.cache_hits
    assert encoder.num_encoded == sum(map(len, SHAPES))


@once
@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_and_grids_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    rules, oracle = read_image_rules(tmp_path), processor(name)
    assert rules is not None
    sides = np.random.default_rng(0).integers(1, 200, (200, 2)).tolist()
    for width, height in sides:
        image = picture(0, width, height)
        if max(width, height) > 200 * min(width, height):
            continue
        found = oracle([image], return_tensors="np", input_data_format="channels_last")
        wide, high = rules.size(width, height)
        if name == "gemma3":
            assert found["pixel_values"].shape[2:] == (high, wide)
            continue
        rows, columns = rules.grid(wide, high)
        assert found["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]], (width, height)


@once
@pytest.mark.parametrize(
    ("patch", "least", "most"), [(14, 56 * 56, 28 * 28 * 1280), (14, 3136, 12_845_056), (16, 65_536, 16_777_216)]
)
def test_grids_of_published_models_are_those_of_the_processor(patch: int, least: int, most: int) -> None:
    """The cases have the default limits of Qwen2-VL, and the limits of Qwen2.5-VL and Qwen3-VL."""
    rules = ImageRules(
        "qwen3_vl", IMAGE, IMAGE, IMAGE, 3, 1.0, (0.0,) * 3, (1.0,) * 3, patch, 2, 2, min_pixels=least, max_pixels=most
    )
    size = {"shortest_edge": least, "longest_edge": most}
    oracle = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=2, size=size)
    sides = np.exp(np.random.default_rng(1).uniform(0, 9, (200, 2))).astype(int).tolist()
    for width, height in sides:
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(ValueError, match="at most 200 times"):
                rules.size(width, height)
            continue
        rows, columns = rules.grid(*rules.size(width, height))
        assert 4 * rows * columns == oracle.get_number_of_image_patches(height, width), (width, height)


@once
def test_the_image_processor_of_processor_config_has_priority(tmp_path: Path) -> None:
    write("qwen3 vl", tmp_path)
    older = json.loads((tmp_path / "preprocessor_config.json").read_text())
    newer = older | {"size": {"shortest_edge": 2048, "longest_edge": 8192}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": newer}))
    rules, oracle = read_image_rules(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert rules is not None
    assert (rules.min_pixels, rules.max_pixels) == (oracle.size["shortest_edge"], oracle.size["longest_edge"])
    assert rules.max_pixels == 8192
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": newer | {"image_mean": [0, math.nan, 0]}})
    )
    with pytest.raises(ValueError, match=r"image_mean is \[0, nan, 0\]: it must be a list of 3 finite numbers"):
        read_image_rules(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": ["x"]}))
    with pytest.raises(ValueError, match=r"processor_config\.json: image_processor is \['x'\]: it must be an object"):
        read_image_rules(tmp_path)


def test_a_request_whose_image_is_missing_ends_alone(tmp_path: Path) -> None:
    """After this error, the router sends the request again, together with the image."""
    reference = write("qwen3 vl", tmp_path)
    rules = read_image_rules(tmp_path)
    assert rules is not None
    image = picture(1, 40, 24)
    given = prompt(rules, [image], 0)
    model, encoder = load_model(tmp_path, torch.float32, CPU), VisionEncoder(tmp_path, rules)
    node = Node(model, StepLimits(512), 6, 4, longest=64)
    node.runner.use_encoder(encoder)
    missing, whole = (request(number, rules, encoder, *given) for number in range(2))
    missing.images = None  # as on a decode node that preempted the request
    node.scheduler.add(missing)
    node.scheduler.add(whole)
    step = node.scheduler.schedule()
    outputs = node.runner.run(step)
    assert [output.error for output in outputs] == ["no_image", ""]
    failed = [bool(output.error) for output in outputs]
    events = node.scheduler.update(step, [output.tokens for output in outputs], failed)
    deltas = [delta_of(event, outputs[event.slice_index]) for event in events]
    assert [(delta.error, delta.retry) for delta in deltas] == [("no_image", True), ("", False)]
    while node.scheduler.has_work:
        node.step()
    assert whole.tokens[whole.num_prompt :] == answer(reference, "qwen3 vl", given[0], [image], COUNT)
    assert not node.scheduler.audit()


def test_a_token_that_is_computed_again_for_a_draft_head_needs_no_image() -> None:
    made = Request("r", list(range(12)), 12, 4, media=(MediaSpan(2, 2, 3, b""),))
    for num_stored, missing in ((0, {0}), (1, set())):
        assert images_of([Slice(made, 7, 5, True, 0, num_stored=num_stored)], None) == (None, missing)
