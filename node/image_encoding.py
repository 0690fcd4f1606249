"""Gets the features of images: encodes images on this node, or fetches the features from the node that encodes them.

All routers name the same node for an image (see `router.nodes.placement`). The image is therefore encoded once, even if
several nodes compute prompts with it.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from engine.media import ImageEncoder, ImageFeatures, PromptImage, features_from_bytes, joined, part_of
from node.stats import NodeState
from node.validation import check_media
from shared.lifecycle import TaskGroup
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import EncodeReply, EncodeRequest, Media
from shared.rpc.methods import ENCODE, PeerError

log = logging.getLogger("baton.node")
WAIT_S = 1.0  # a reply takes at most about this long; if the image is not encoded by then, the reply has no features
CALL_S = 5.0  # a node that does not reply within this time is frozen or gone
PART_BYTES = 4 << 20  # maximum size of the features in one reply, so that a reply does not delay tokens
MAX_FOR_PEERS = 64  # maximum number of images that a node encodes at once for other nodes


class ImageEncoding:
    """The encoding of images for the requests of this node, and for other nodes.

    Used on the event loop. `tasks` runs this object's tasks. Each image is encoded on its own thread, which then ends.
    The thread's OpenMP threads end, too; otherwise, they would slow down the engine's OpenMP threads.
    """

    def __init__(self, state: NodeState, encoder: ImageEncoder, tasks: TaskGroup, call_s: float = CALL_S) -> None:
        self._state, self._encoder, self._tasks, self._call_s = state, encoder, tasks, call_s
        self.num_fetched = 0  # images whose features came from another node
        self._encoding: dict[bytes, asyncio.Future[ImageFeatures]] = {}  # the images that are encoded here, by digest
        self._fetching: dict[bytes, asyncio.Task[ImageFeatures]] = {}

    def start(self, images: Sequence[PromptImage]) -> asyncio.Task[None]:
        """Start and return a task that sets the features of the images. The task raises ValueError if the pixels of
        an image do not fit its grid."""
        return self._tasks.start(self._set_features(images))

    async def _set_features(self, images: Sequence[PromptImage]) -> None:
        for image in images:
            image.features = await self._features(image.media)

    async def _features(self, image: Media) -> ImageFeatures:
        if image.encoder in {"", self._state.info.address} or self._encoder.kept(image) is not None:
            return await asyncio.shield(self._encode(image))
        fetching = self._fetching.get(image.digest)
        if fetching is None:
            fetching = self._fetching[image.digest] = self._tasks.start(self._fetch(image))
            fetching.add_done_callback(lambda _: self._fetching.pop(image.digest))
        return await asyncio.shield(fetching) or await asyncio.shield(self._encode(image))

    def _encode(self, image: Media) -> "asyncio.Future[ImageFeatures]":
        """Start to encode the image on a thread, unless this has begun already. Return a future for the features."""
        encoding = self._encoding.get(image.digest)
        if encoding is None:
            thread = ThreadPoolExecutor(1, "vision")
            encoding = asyncio.get_running_loop().run_in_executor(thread, self._encoder.features, image)
            thread.shutdown(wait=False)
            self._encoding[image.digest] = encoding
            encoding.add_done_callback(lambda _: self._encoding.pop(image.digest))
        return encoding

    async def _fetch(self, image: Media) -> ImageFeatures | None:
        """Fetch the features from the node that encodes the image, and keep them. Return None if this is not
        possible."""
        num_tokens, first, parts = image.rows * image.columns, 0, []
        request = EncodeRequest(self._state.info.fingerprint, replace(image, encoder=""))
        channel = RpcChannel(image.encoder)
        try:
            while first < num_tokens:
                reply = await ENCODE.call(channel, request, self._call_s)
                if reply.error:
                    raise PeerError(reply.error)
                if reply.count:
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
        await asyncio.wait((encoding,), timeout=WAIT_S)
        return encoding.result() if encoding.done() else None
