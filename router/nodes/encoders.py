"""Chooses the node that encodes each image, so that all nodes of the cluster use the same image features."""

from collections.abc import Sequence

from router.nodes.connection import NodeConnection
from shared.rpc.messages import Media

MAX_IMAGES = 20_000  # number of images whose node is remembered


class EncoderIndex:
    """The node that encodes each image: the first one that computed a prompt with the image.

    The pool owns the index, and records the images that nodes report, because another router may have chosen the node.
    Nodes with different fingerprints have different features. To limit memory, the images that were recorded first are
    forgotten.
    """

    def __init__(self, max_images: int = MAX_IMAGES) -> None:
        self._max_images = max_images
        self._encoders: dict[tuple[str, bytes], NodeConnection] = {}  # by fingerprint and digest

    def at(self, fingerprint: str, digest: bytes) -> NodeConnection | None:
        """Return the node that encodes the image, or None if no ready node does."""
        node = self._encoders.get((fingerprint, digest))
        return node if node is not None and node.is_ready else None

    def record(self, node: NodeConnection, digests: Sequence[bytes]) -> None:
        """Record that the node encodes these images, unless other ready nodes do so."""
        for digest in digests:
            if self.at(node.info.fingerprint, digest) is None:
                self._encoders[node.info.fingerprint, digest] = node
        while len(self._encoders) > self._max_images:
            del self._encoders[next(iter(self._encoders))]

    def address(self, node: NodeConnection, image: Media) -> str:
        """Return the address of the node that encodes the image for a request on `node`, or "" if that is `node`
        itself."""
        self.record(node, [image.digest])
        encoder = self.at(node.info.fingerprint, image.digest)
        return "" if encoder is None or encoder is node else encoder.info.address
