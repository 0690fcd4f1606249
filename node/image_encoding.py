"""Gets the features of images: encodes images on this node, or fetches the features from the node that encodes them.

All routers name the same node for an image (see `router.nodes.placement`). The image is therefore encoded once, even if
several nodes compute prompts with it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from engine.media import ImageEncoder, ImageFeatures, PromptImage, features_from_bytes, joined, part_of
from node.stats import NodeState
from node.validation import check_media
from shared.lifecycle import TaskGroup
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import EncodeReply, EncodeRequest, Media
from shared.rpc.methods import ENCODE, PeerError

log = logging.getLogger("baton.node")
T = TypeVar("T")
WAIT_S = 1.0  # a reply takes at most about this long; if the image is not encoded by then, the reply has no features
CALL_S = 5.0  # a node that does not reply within this time is frozen or gone
FETCH_S = 30.0  # a fetch fails after this many seconds without a part of the features
PAUSE_S = 0.05  # seconds to wait after a reply without features
PART_BYTES = 4 << 20  # maximum size of the features in one reply, so that a reply does not delay tokens
MAX_FOR_PEERS = 64  # maximum number of images that a node encodes at once for other nodes


class ImageEncoding:
    """The encoding of images for the requests of this node, and for other nodes.

    Used on the event loop. `tasks` runs this object's tasks. Images are encoded one after another, each on its own
    thread, which then ends. The thread's OpenMP threads end, too; otherwise, they would slow down the engine's OpenMP
    threads. An image is not encoded or fetched if all requests that wait for it end before its turn.
    """

    def __init__(self, state: NodeState, encoder: ImageEncoder, tasks: TaskGroup, call_s: float = CALL_S) -> None:
        self._state, self._encoder, self._tasks, self._call_s = state, encoder, tasks, call_s
        self.num_fetched = 0  # images whose features came from another node
        self._encoding: dict[bytes, asyncio.Future[ImageFeatures]] = {}  # the images that are encoded here, by digest
        self._queued: dict[bytes, Media] = {}  # the images of `_encoding` that are not being encoded yet
        self._is_encoding = False
        self._fetching: dict[bytes, asyncio.Future[ImageFeatures | None]] = {}
        self._num_waiting = Counter[asyncio.Future[Any]]()  # number of requests that wait for each future

    def start(self, images: Sequence[PromptImage]) -> asyncio.Task[None]:
        """Start and return a task that sets the features of the images. The task raises ValueError if the pixels of
        an image do not fit its grid."""
        return self._tasks.start(self._set_features(images))

    async def _set_features(self, images: Sequence[PromptImage]) -> None:
        for image in images:
            image.features = await self._features(image.media)

    async def _features(self, image: Media) -> ImageFeatures:
        if image.encoder in {"", self._state.info.address} or self._encoder.kept(image) is not None:
            return await self._wait(self._encode(image), image)
        fetching: asyncio.Future[ImageFeatures | None] | None = self._fetching.get(image.digest)
        if fetching is None:
            fetching = self._fetching[image.digest] = self._tasks.start(self._fetch(image))
            fetching.add_done_callback(lambda done: _remove(self._fetching, image.digest, done))
        found = await self._wait(fetching, image)
        return found if found is not None else await self._wait(self._encode(image), image)

    async def _wait(self, future: "asyncio.Future[T]", image: Media) -> T:
        """Wait for a future that several requests share. When the last of these requests stops waiting, cancel the
        future, unless the image is being encoded."""
        self._num_waiting[future] += 1
        try:
            return await asyncio.shield(future)
        finally:
            self._release(future, image)

    def _release(self, future: "asyncio.Future[Any]", image: Media) -> None:
        self._num_waiting[future] -= 1
        if self._num_waiting[future]:
            return
        del self._num_waiting[future]
        if self._encoding.get(image.digest) is not future or self._queued.pop(image.digest, None) is not None:
            for futures in (self._encoding, self._fetching):
                _remove(futures, image.digest, future)
            future.cancel()

    def _encode(self, image: Media) -> "asyncio.Future[ImageFeatures]":
        """Queue the image for a thread, unless it is queued or being encoded. Return a future for the features."""
        encoding = self._encoding.get(image.digest)
        if encoding is None:
            encoding = self._encoding[image.digest] = asyncio.get_running_loop().create_future()
            encoding.add_done_callback(lambda done: _remove(self._encoding, image.digest, done))
            self._queued[image.digest] = image
            if not self._is_encoding:
                self._encode_next()
        return encoding

    def _encode_next(self) -> None:
        self._is_encoding = bool(self._queued)
        if not self._queued:
            return
        image = self._queued.pop(next(iter(self._queued)))
        encoding, thread = self._encoding[image.digest], ThreadPoolExecutor(1, "vision")

        def done(encoded: "asyncio.Future[ImageFeatures]") -> None:
            if (error := encoded.exception()) is None:
                encoding.set_result(encoded.result())
            else:
                encoding.set_exception(error)
                encoding.exception()  # otherwise, asyncio would log the error if no request waits any more
            self._encode_next()

        asyncio.get_running_loop().run_in_executor(thread, self._encoder.features, image).add_done_callback(done)
        thread.shutdown(wait=False)

    async def _fetch(self, image: Media) -> ImageFeatures | None:
        """Fetch the features from the node that encodes the image, and keep them. Return None if this fails."""
        num_tokens, first, parts = image.rows * image.columns, 0, []
        request = EncodeRequest(self._state.info.fingerprint, replace(image, encoder=""))
        channel, deadline = RpcChannel(image.encoder), time.monotonic() + FETCH_S
        try:
            while first < num_tokens:
                reply = await ENCODE.call(channel, request, self._call_s)
                if reply.error:
                    raise PeerError(reply.error)
                if not reply.count:
                    if time.monotonic() > deadline:
                        raise PeerError(f"no features for {FETCH_S:g} s")
                    await asyncio.sleep(PAUSE_S)
                else:
                    deadline = time.monotonic() + FETCH_S
                    part = features_from_bytes(reply.tensors, reply.count, self._encoder.shape)
                    parts.append(part_of(part, 0, num_tokens - first))
                    first += reply.count
                request = replace(request, image=replace(image, pixels=b"", encoder=""), first=first)
            features = await asyncio.to_thread(joined, parts)
            self.num_fetched += 1
            return self._encoder.keep(image, features)
        except (PeerError, ValueError) as error:
            log.warning("%s did not encode an image, so this node encodes it: %s", image.encoder, error)
            return None
        finally:
            channel.close()

    async def serve(self, request: EncodeRequest) -> EncodeReply:
        """Serve `ENCODE`: reply with a part of the image's features, or without features if they are not ready yet."""
        image = replace(request.image, offset=0, encoder="")
        if request.fingerprint != self._state.info.fingerprint:
            return EncodeReply("the nodes run different models")
        try:
            check_media([image], image.rows * image.columns)
            if not 0 <= request.first < image.rows * image.columns:
                raise ValueError(f"first is {request.first}: must be a token of the image")
            features = self._encoder.kept(image) or await self._encoded(image)
        except ValueError as error:
            return EncodeReply(str(error))
        if features is None:
            return EncodeReply()
        num_tensors, hidden_size = self._encoder.shape
        count = max(1, PART_BYTES // (4 * num_tensors * hidden_size))
        part = part_of(features, request.first, request.first + count)
        tensors = await asyncio.to_thread(part.to_bytes)
        return EncodeReply("", len(part.embeddings), tensors)

    async def _encoded(self, image: Media) -> ImageFeatures | None:
        """Encode the image for another node. Return None if this takes longer than WAIT_S seconds; the encoding
        then continues."""
        if image.digest not in self._encoding:
            if not image.pixels:
                raise ValueError("the features are no longer kept")
            if len(self._encoding) >= MAX_FOR_PEERS:
                raise ValueError("too many images are being encoded")
        encoding = self._encode(image)
        self._num_waiting[encoding] += 1
        encoding.add_done_callback(lambda _: self._release(encoding, image))
        await asyncio.wait((encoding,), timeout=WAIT_S)
        return encoding.result() if encoding.done() else None


def _remove(futures: dict[bytes, Any], digest: bytes, future: "asyncio.Future[Any]") -> None:
    if futures.get(digest) is future:
        del futures[digest]
