"""Block hashes: each KV block is identified by a hash of its tokens and of all tokens before it.

The hash of a block covers its own tokens and the hash of the block before it. For the first block, a hash of the salt
replaces the hash of the block before it. Equal hashes therefore mean equal prefixes of one tenant. vLLM's prefix
caching uses the same scheme. BLAKE2b makes it infeasible to construct a collision.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """An image in a sequence of tokens: its tokens from `start` on form a grid of `rows` x `columns`.

    If `is_atomic`, its tokens attend to each other, so one slice must compute all of them. `digest` is equal for equal
    images.
    """

    start: int
    rows: int
    columns: int
    digest: bytes
    is_atomic: bool = False

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


def root_hash(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"baton-kv-root").digest()


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], block_tokens: int, salt: bytes, media: Sequence[MediaSpan] = ()
) -> None:
    """Append to `hashes` the missing hashes of the full blocks of `tokens`.

    If `tokens` is an array("i"), it is read without a copy. The hash of a block with image tokens also covers the
    image's digest and the position of the image's first token.
    """
    first, end = len(hashes) * block_tokens, len(tokens) // block_tokens * block_tokens
    if first >= end:
        return
    ids = memoryview(tokens)[first:end] if isinstance(tokens, array) else memoryview(array("i", tokens[first:end]))
    row, size = ids.cast("B"), ids.itemsize * block_tokens
    parent = hashes[-1] if hashes else root_hash(salt)
    for start, (block,) in enumerate(struct.iter_unpack(f"{size}s", row), first // block_tokens):
        for span in media:
            if span.start < (start + 1) * block_tokens and start * block_tokens < span.end:
                place = span.start.to_bytes(4) + span.digest
                parent = hashlib.blake2b(
                    place, digest_size=DIGEST_BYTES, salt=parent, person=b"baton-kv-media"
                ).digest()
        # The parent is passed as BLAKE2b's salt, which costs nothing. As its key, it would be an additional block.
        parent = hashlib.blake2b(block, digest_size=DIGEST_BYTES, salt=parent).digest()
        hashes.append(parent)


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: bytes, media: Sequence[MediaSpan] = ()) -> list[bytes]:
    """Return the hash of every full block of `tokens`, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_tokens, salt, media)
    return hashes
