"""Test how a router reads images: it refuses bad images, and computes the same pixels and tokens as transformers."""

import asyncio
import base64
import io
import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from router.dispatch.requests import ModelCard
from router.http.anthropic import MessagesBody
from router.http.anthropic import named_parameters as of_anthropic
from router.http.bodies import ChatBody, parse_body, validated
from router.http.parsing import build_requests
from router.http.response_bodies import ResponsesBody
from router.http.responses_api import named_parameters as of_responses
from router.text.images import ImageLimits, ImageReader
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError
from shared.fair_threads import FairThreads
from shared.images import ImageRules, read_image_rules
from shared.rpc.messages import Media
from tests.engine.image_models import CONFIGS, IMAGE, is_qwen, picture, processor, write_files

MODEL = ModelCard("m", 4096, 2056, frozenset())
WHERE = "messages[0].content[1].image_url.url"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return as_url(file.getvalue())


def as_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png_header(width: int, height: int) -> bytes:
    """Return a small PNG file. Its header states these dimensions, which may be larger than the image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


GOOD = encoded(Image.fromarray(picture(1, 40, 24)))
ANIMATED = encoded(
    Image.fromarray(picture(1, 9, 9)), "WEBP", save_all=True, append_images=[Image.fromarray(picture(2, 9, 9))]
)
BAD_IMAGES = {
    "http": ("http://169.254.169.254/latest/meta-data", "messages[0].content", "data:image/"),
    "https": ("https://example.com/cat.png", "messages[0].content", "nothing is fetched"),
    "file": ("file:///etc/passwd", "messages[0].content", "data:image/"),
    "no image": ("data:text/html;base64,AAAA", "messages[0].content", "data:image/"),
    "empty": ("", "messages[0].content", "data:image/"),
    "not base64": ("data:image/png,abc", WHERE, ";base64,"),
    "bad base64": ("data:image/png;base64,a*b=", WHERE, "not valid base64"),
    "no data": ("data:image/png;base64,", WHERE, "send one of the formats PNG, JPEG, WEBP"),
    "text": (as_url(b"<svg></svg>" * 99), WHERE, "send one of the formats"),
    "gif": (encoded(Image.fromarray(picture(1, 9, 9)), "GIF"), WHERE, "send one of the formats"),
    "truncated": (GOOD[:402], WHERE, "damaged"),
    "corrupt": (as_url(base64.b64decode(GOOD.partition(",")[2])[:60] + bytes(400)), WHERE, "damaged"),
    "a bomb": (as_url(png_header(60_000, 60_000)), WHERE, "at most 50,000,000 are allowed; send a smaller image"),
    "shorter than it claims": (as_url(png_header(4_000, 4_000)), WHERE, "damaged"),
    "animated": (ANIMATED, WHERE, "send one frame"),
    "too long": (encoded(Image.new("RGB", (1, 900))), WHERE, "at most 200 times"),
}


@pytest.fixture(scope="module", name="qwen")
def qwen_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ImageReader]:
    return loaded("qwen3 vl", tmp_path_factory.mktemp("qwen"))


def loaded(name: str, directory: Path) -> tuple[Tokenizer, ImageReader]:
    write_files(name, directory)
    rules = read_image_rules(directory)
    assert rules is not None
    return Tokenizer.load(directory), ImageReader(rules)


def content(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]}


async def request_of(given: tuple[Tokenizer, ImageReader | None], fields: dict[str, Any]) -> Any:
    body = parse_body(ChatBody, json.dumps({"model": "m"} | fields).encode(), ["m"])
    (request,) = await build_requests(body, MODEL, given[0], "id", images=given[1])
    return request


@pytest.mark.parametrize("name", BAD_IMAGES)
async def test_a_bad_image_is_refused_with_the_parameter_and_the_fix(name: str, qwen) -> None:
    url, param, fix = BAD_IMAGES[name]
    with pytest.raises(RequestError) as refused:
        await request_of(qwen, content(url))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert fix in refused.value.message
    assert (await request_of(qwen, content(GOOD))).media, "the reader works on"


@pytest.mark.parametrize(
    ("fields", "param", "fix"),
    [
        (content(*[GOOD] * 17), "messages", "at most 16"),
        (content(GOOD) | {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "omit it"),
        (content(GOOD) | {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message", "images"),
        (content(GOOD) | {"min_tokens": 4090}, "min_tokens", "context"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": GOOD}]}]}, "messages[0].content", "url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages[0].content", "texts"),
    ],
)  # fmt: skip
async def test_bad_requests_with_images_are_refused(fields, param: str, fix: str, qwen) -> None:
    with pytest.raises(RequestError) as refused:
        await request_of(qwen, fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert fix in refused.value.message


@pytest.mark.parametrize(
    ("limits", "fix"),
    [(ImageLimits(count=1), "at most 1 are"), (ImageLimits(count=0), "at most 0 are"), (ImageLimits(pixels=959), "at most 959 are")],
)  # fmt: skip
async def test_the_limits_of_images_are_those_of_the_settings(limits: ImageLimits, fix: str, qwen) -> None:
    tokenizer, reader = qwen
    with pytest.raises(RequestError, match=fix):
        await request_of((tokenizer, ImageReader(reader.rules, limits)), content(GOOD, GOOD))
    await request_of((tokenizer, ImageReader(reader.rules, ImageLimits(2, 960))), content(GOOD, GOOD))


async def test_images_with_too_many_pixels_for_a_message_are_refused(tmp_path: Path, qwen) -> None:
    rules = ImageRules("gemma3", IMAGE, IMAGE, IMAGE, 2, 1.0, (0.0,) * 3, (1.0,) * 3, width=3000, height=3000, tokens=4)
    with pytest.raises(RequestError, match="Send fewer or smaller images"):
        await request_of((qwen[0], ImageReader(rules)), content(GOOD, GOOD))


async def test_a_model_of_text_alone_refuses_images(qwen) -> None:
    with pytest.raises(RequestError, match="takes no images") as refused:
        await request_of((qwen[0], None), content(GOOD))
    assert refused.value.param == WHERE


async def test_the_name_of_an_image_token_in_a_text_is_text(qwen) -> None:
    fields = content(GOOD)
    fields["messages"][0]["content"][0]["text"] = "<|image_pad|><|vision_start|>"
    request = await request_of(qwen, fields)
    (image,) = request.media
    assert request.prompt.count(IMAGE) == image.rows * image.columns
    assert (
        request.prompt[image.offset : image.offset + image.rows * image.columns] == [IMAGE] * image.rows * image.columns
    )


@pytest.mark.parametrize("name", CONFIGS)
async def test_pixels_are_those_of_the_processor_of_transformers(name: str, tmp_path: Path) -> None:
    _, reader = loaded(name, tmp_path)
    oracle = processor(name)
    for seed, (width, height) in enumerate([(40, 24), (3, 70), (33, 33), (120, 90), (5, 5)]):
        image = picture(seed, width, height)
        (found,) = await reader.read([("x", encoded(Image.fromarray(image)))])
        pixels = np.frombuffer(found.pixels, np.uint8).reshape(found.height, found.width, 3)
        ours = oracle([pixels], do_resize=False, return_tensors="np", input_data_format="channels_last")
        theirs = oracle([image], return_tensors="np", input_data_format="channels_last")
        assert np.array_equal(ours["pixel_values"], theirs["pixel_values"])
        if is_qwen(name):
            assert theirs["image_grid_thw"].tolist() == [[1, 2 * found.rows, 2 * found.columns]]


async def test_the_images_of_a_request_take_a_turn_each(qwen, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, release, order = qwen[1], threading.Event(), list[str]()

    def read(_: str, url: str) -> Media:
        order.append(url)
        return Media(0, 1, 1, b"", 1, 1)

    monkeypatch.setattr(reader, "_read", read)
    monkeypatch.setattr(reader, "threads", FairThreads(1, "images"))
    reader.threads.submit("", release.wait, 60)
    requests = [
        asyncio.create_task(reader.read([("x", url)] * 9, tenant)) for tenant, url in (("a", "many"), ("b", "one"))
    ]
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*requests)
    assert order[:4] in (["many", "one"] * 2, ["one", "many"] * 2)


async def test_transparent_and_rotated_images(qwen) -> None:
    image = Image.fromarray(picture(3, 40, 24))
    clear = image.convert("RGBA")
    clear.putalpha(0)
    (white,) = await qwen[1].read([("x", encoded(clear))])
    assert set(white.pixels) == {255}
    turned = Image.Exif()
    turned[0x0112] = 6
    (rotated,) = await qwen[1].read([("x", encoded(image, "WEBP", lossless=True, exif=turned))])
    (expected,) = await qwen[1].read([("x", encoded(image.rotate(-90, expand=True)))])
    assert rotated == expected


async def test_grey_images_with_16_bits_are_not_clipped(qwen) -> None:
    image = picture(3, 40, 24)[..., 0]
    (found,) = await qwen[1].read([("x", encoded(Image.fromarray(image.astype(np.uint16) * 256)))])
    (expected,) = await qwen[1].read([("x", encoded(Image.fromarray(image)))])
    assert found == expected


def responses_chat(url: str, role: str = "user") -> ChatBody:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    body = {"model": "m", "input": [{"role": role, "content": parts}]}
    return parse_body(ResponsesBody, json.dumps(body).encode(), ["m"]).to_chat([])


def anthropic_chat(url: str, role: str = "user") -> ChatBody:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    content = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": role, "content": content}]}
    return validated(ChatBody, parse_body(MessagesBody, json.dumps(body).encode(), ["m"]).chat_fields())


def test_images_in_the_result_of_a_call_follow_it_in_a_message_of_the_user() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1 page"}, image]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
    ]
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": messages}).encode()
    chat = validated(ChatBody, parse_body(MessagesBody, body, ["m"]).chat_fields())
    assert [message.plain()["content"] for message in chat.messages[2:]] == [
        "1 page",
        [{"type": "image"}, {"type": "text", "text": "b"}],
    ]


@pytest.mark.parametrize(
    ("chat", "named", "param"), [(responses_chat, of_responses, "input"), (anthropic_chat, of_anthropic, "messages")]
)
async def test_other_apis_take_the_same_images(chat, named, param: str, qwen) -> None:
    expected = await request_of(qwen, content(GOOD))
    (request,) = await build_requests(chat(GOOD), MODEL, qwen[0], "id", images=qwen[1])
    assert (request.prompt, request.media) == (expected.prompt, expected.media)
    with named(), pytest.raises(RequestError) as refused, named():
        await build_requests(chat(as_url(b"x")), MODEL, qwen[0], "id", images=qwen[1])
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"An image of `{param}` is not an image: send one of the formats")
    for url, role in (("http://example.com/a.png", "user"), (GOOD, "assistant")):
        with pytest.raises(RequestError) as refused:
            chat(url, role)
        assert refused.value.status == 400
        assert param in refused.value.param
