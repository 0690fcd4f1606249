"""Test that several nodes encode an image only once, and that a node encodes an image itself if another node fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.media import ImageEncoder, ImageFeatures, PromptImage
from node import image_encoding
from node.image_encoding import ImageEncoding
from shared.lifecycle import TaskGroup, wait_until
from shared.rpc.messages import EncodeReply, EncodeRequest, Media, NodeInfo
from shared.rpc.methods import ENCODE, RpcServer, unary

WIDTH = 8
INFO = NodeInfo("prefill-0", "boot", "prefill", "", "m", "print", 4, 64, 100, 512, 8)
IMAGE = Media(3, 40, 50, bytes(range(16)), 4, 3, bytes(36))


class CountingEncoder(ImageEncoder):
    """An encoder whose features depend only on the image's digest. It waits until the event `gate` is set."""

    shape = 2, WIDTH

    def __init__(self) -> None:
        self.num_encoded = self.num_cached = 0
        self.gate, self.cache = threading.Event(), dict[bytes, ImageFeatures]()
        self.has_begun = False
        self.gate.set()

    def features(self, image: Media) -> ImageFeatures:
        self.has_begun = True
        assert self.gate.wait(60)
        if image.digest not in self.cache:
            self.num_encoded += 1
            self.keep(image, features_of(image))
        return self.cache[image.digest]

    def kept(self, image: Media) -> ImageFeatures | None:
        return self.cache.get(image.digest)

    def keep(self, image: Media, features: ImageFeatures) -> ImageFeatures:
        return self.cache.setdefault(image.digest, features)


def features_of(image: Media) -> ImageFeatures:
    generator = torch.Generator().manual_seed(sum(image.digest))
    embeddings, deep = torch.randn(2, image.rows * image.columns, WIDTH, generator=generator)
    return ImageFeatures(embeddings, (deep,))


class Peer:
    """A node that encodes images, and answers `ENCODE` calls with the function `serve`."""

    def __init__(self, call_s: float) -> None:
        self.encoder, self.tasks = CountingEncoder(), TaskGroup()
        self.state: Any = type("State", (), {"info": INFO})
        self.encoding = ImageEncoding(self.state, self.encoder, self.tasks, call_s)
        self.serve: Callable[[EncodeRequest], Any] = self.encoding.serve
        self.address = ""

    async def _serve(self, request: EncodeRequest) -> EncodeReply:
        reply: EncodeReply = await self.serve(request)
        return reply

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Peer"]:
        self.server = RpcServer({ENCODE: unary(self._serve)})
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"
        self.state.info = replace(self.state.info, address=self.address)
        try:
            yield self
        finally:
            self.encoder.gate.set()
            await self.tasks.close()
            await self.server.close()

    async def get(self, image: Media) -> None:
        """Get the features of an image in the same way as for a request, and check them."""
        prompt = PromptImage(image)
        await self.encoding.start([prompt])
        assert prompt.features is not None
        expected = features_of(image)
        assert torch.equal(prompt.features.embeddings, expected.embeddings)
        assert torch.equal(prompt.features.deep[0], expected.deep[0])


@asynccontextmanager
async def peers(count: int, call_s: float = 60) -> AsyncIterator[list[Peer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Peer(call_s).running()) for _ in range(count)]


@pytest.mark.parametrize("part_bytes", [image_encoding.PART_BYTES, 1000], ids=["one part", "many parts"])
async def test_nodes_encode_an_image_once_together(part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_encoding, "PART_BYTES", part_bytes)
    monkeypatch.setattr(image_encoding, "WAIT_S", 0.05)
    async with peers(3) as nodes:
        first = nodes[0]
        image = replace(IMAGE, encoder=first.address)
        first.encoder.gate.clear()
        waiting = [asyncio.ensure_future(node.get(image)) for node in nodes for _ in range(4)]
        assert not await wait_until(lambda: any(each.done() for each in waiting), 0.3), "replies without features"
        first.encoder.gate.set()
        await asyncio.gather(*waiting)
        assert [node.encoder.num_encoded for node in nodes] == [1, 0, 0]
        first.serve = unexpected
        await asyncio.gather(*(node.get(image) for node in nodes))


async def unexpected(_: EncodeRequest) -> EncodeReply:
    raise AssertionError("features that a node keeps are not fetched")


async def frozen(_: EncodeRequest) -> EncodeReply:
    await asyncio.sleep(60)
    return EncodeReply()


async def short(_: EncodeRequest) -> EncodeReply:
    return EncodeReply("", 5, [bytes(4 * 5 * WIDTH), bytes(4 * 5 * WIDTH - 4)])


async def without_deep(_: EncodeRequest) -> EncodeReply:
    return EncodeReply("", 5, [bytes(4 * 5 * WIDTH)])


async def wide(_: EncodeRequest) -> EncodeReply:
    return EncodeReply("", 5, [bytes(8 * 5 * WIDTH)] * 2)


async def never_ready(_: EncodeRequest) -> EncodeReply:
    return EncodeReply()


async def refusing(_: EncodeRequest) -> EncodeReply:
    return EncodeReply("no more fit")


@pytest.mark.parametrize("serve", [unexpected, frozen, short, without_deep, wide, never_ready, refusing])
async def test_a_node_encodes_an_image_itself_if_the_other_node_fails(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoding, "FETCH_S", 0.5)
    async with peers(2, call_s=1 if serve is frozen else 60) as (bad, node):
        bad.serve = serve
        await node.get(replace(IMAGE, encoder=bad.address))
        assert node.encoder.num_encoded == 1


async def test_a_node_encodes_an_image_itself_if_the_other_node_dies_meanwhile() -> None:
    async with peers(2) as (dying, node):
        dying.encoder.gate.clear()
        waiting = asyncio.ensure_future(node.get(replace(IMAGE, encoder=dying.address)))
        assert await wait_until(lambda: dying.encoder.has_begun, 10)
        await dying.server.close()
        await waiting
        assert node.encoder.num_encoded == 1


async def test_images_of_cancelled_requests_are_neither_encoded_nor_fetched() -> None:
    images = [replace(IMAGE, digest=bytes([number]) * 16) for number in range(20)]
    async with peers(2) as (node, other):
        node.encoder.gate.clear()
        waiting = [node.encoding.start([PromptImage(image)]) for image in images]
        fetching = other.encoding.start([PromptImage(replace(IMAGE, encoder=node.address))])
        assert await wait_until(lambda: node.encoder.has_begun and image_encoding_threads() == 1, 60)
        await asyncio.sleep(0.1)
        assert image_encoding_threads() == 1, "images are encoded one after another"
        for task in (*waiting[:-1], fetching):
            task.cancel()
        node.encoder.gate.set()
        await waiting[-1]
        assert other.encoder.num_encoded == other.encoding.num_fetched == 0
        assert node.encoder.num_encoded <= 3, "the image that had begun, the last one, and the one for the other node"


def image_encoding_threads() -> int:
    return sum(thread.name.startswith("vision") for thread in threading.enumerate())


async def test_nodes_that_name_each_other_do_not_wait_for_each_other() -> None:
    async with peers(2) as (one, other):
        await asyncio.gather(
            one.get(replace(IMAGE, encoder=other.address)), other.get(replace(IMAGE, encoder=one.address))
        )


async def test_a_node_refuses_what_it_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    request = EncodeRequest(INFO.fingerprint, IMAGE)
    async with peers(1) as (node,):
        for bad, text in (
            (replace(request, fingerprint="other"), "different models"),
            (replace(request, first=2000), "first is 2000"),
            (replace(request, first=-1), "first is -1"),
            (replace(request, image=replace(IMAGE, pixels=b"")), "no longer kept"),
            (replace(request, image=replace(IMAGE, pixels=bytes(35))), "media.pixels"),
            (replace(request, image=replace(IMAGE, digest=b"")), "media.digest"),
        ):
            assert text in (await node.encoding.serve(bad)).error
        monkeypatch.setattr(image_encoding, "MAX_FOR_PEERS", 0)
        assert "too many" in (await node.encoding.serve(request)).error
        assert node.encoder.num_encoded == 0
