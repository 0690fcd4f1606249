"""Block hashes: each KV block is identified by a hash of its tokens and of all tokens before it.

The hash of a block covers its own tokens and the hash of the block before it. For the first block, a hash of the salt
replaces the hash of the block before it. Equal hashes therefore mean equal prefixes of one tenant. vLLM's prefix
caching uses the same scheme. BLAKE2b makes it infeasible to construct a collision.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"baton-kv-root").digest()


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_tokens: int, salt: bytes) -> None:
    """Append to `hashes` the missing hashes of the full blocks of `tokens`. An array("i") is read without a copy."""
    first, end = len(hashes) * block_tokens, len(tokens) // block_tokens * block_tokens
    if first >= end:
        return
    ids = memoryview(tokens)[first:end] if isinstance(tokens, array) else memoryview(array("i", tokens[first:end]))
    row, size = ids.cast("B"), ids.itemsize * block_tokens
    parent = hashes[-1] if hashes else root_hash(salt)
    for (block,) in struct.iter_unpack(f"{size}s", row):
        # The parent is passed as BLAKE2b's salt, which takes no time. As a key, it would be one more block to hash.
        parent = hashlib.blake2b(block, digest_size=DIGEST_BYTES, salt=parent).digest()
        hashes.append(parent)


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """Return the hash of every full block of `tokens`, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_tokens, salt)
    return hashes
