"""Block hashes: the name of a block is a hash of its tokens and of everything before it.

Chained over (parent hash, block tokens) from a root that folds in the salt, so equal hashes mean equal content
of the whole prefix within one tenant (the scheme of vLLM's prefix caching; BLAKE2b, so nobody can forge one).
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"baton-kv-root").digest()


def child_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=DIGEST_BYTES, key=parent).digest()


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_tokens: int, salt: bytes) -> None:
    """Appends to `hashes` those of the full blocks of `tokens` that it lacks."""
    for index in range(len(hashes), len(tokens) // block_tokens):
        parent = hashes[-1] if hashes else root_hash(salt)
        hashes.append(child_hash(parent, tokens[index * block_tokens : (index + 1) * block_tokens]))


def block_hashes(tokens: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """Of every full block of `tokens`, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_tokens, salt)
    return hashes
