"""A test model without arithmetic: the KV of a position is a hash of all tokens up to it, and the next token is a hash
of all KV read back.

Any stale, torn, foreign or misplaced block changes the output. Correct output therefore verifies the transport, the
scheduler and the recovery.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.runner import Runner, SliceOutput
from scheduler.request import Request, RequestState, Slice, Step, cdiv

KV_BYTES = 8  # per position and layer, as in a KVLayout with 1 head, head_dim 1 and float32


@dataclass(slots=True)
class HashedPrefix:
    """The running hash of a request's first `end` tokens."""

    request: Request
    end: int
    state: bytes


class HashRunner(Runner):
    """Replaces `TorchRunner`. `rows` is the KV pool, uint8 [num_blocks, row_bytes].

    Sampling parameters are ignored: the KV determines the next token, which has no logprobs. Raises ValueError if the
    rows are too short.
    """

    def __init__(self, rows: NDArray[np.uint8], block_tokens: int, layers: int, vocab_size: int) -> None:
        used = block_tokens * layers * KV_BYTES
        if rows.shape[1] < used:
            raise ValueError(f"rows of {rows.shape[1]} bytes; {block_tokens} tokens x {layers} layers take {used}")
        self._rows = rows[:, :used]
        self._block_tokens = block_tokens
        self._layers = layers
        self._vocab_size = vocab_size
        self._prefixes: dict[str, HashedPrefix] = {}

    def run(self, step: Step) -> list[SliceOutput]:
        self._prefixes = {
            id: kept for id, kept in self._prefixes.items() if kept.request.state is not RequestState.DONE
        }
        return [self._run_slice(slice_) for slice_ in step.slices]

    def _run_slice(self, slice_: Slice) -> SliceOutput:
        self._store(slice_)
        if not slice_.samples:
            return SliceOutput()
        blocks = slice_.request.blocks[: cdiv(slice_.end, self._block_tokens)]
        read = self._rows[blocks].reshape(-1)[: slice_.end * self._layers * KV_BYTES]
        digest = hashlib.blake2b(read.data, digest_size=8).digest()
        return SliceOutput(_token(digest, self._vocab_size))

    def _store(self, slice_: Slice) -> None:
        prefix = self._prefix(slice_)
        kv = bytearray()
        for position in range(slice_.start, slice_.end):
            prefix.state = _next_state(prefix.state, slice_.request.tokens[position])
            kv += _kv_of(prefix.state, position, self._layers)
        prefix.end = slice_.end
        new = np.frombuffer(kv, np.uint8).reshape(slice_.count, -1)
        size = self._block_tokens
        edges = [slice_.start, *range(cdiv(slice_.start + 1, size) * size, slice_.end, size), slice_.end]
        for start, end in pairwise(edges):
            row = self._rows[slice_.request.blocks[start // size]].reshape(size, -1)
            row[start % size : start % size + end - start] = new[start - slice_.start : end - slice_.start]

    def _prefix(self, slice_: Slice) -> HashedPrefix:
        """Return the running hash up to the slice. It was kept after the previous slice, or is computed from tokens."""
        request = slice_.request
        kept = self._prefixes.get(request.id)
        if kept is None or kept.request is not request or kept.end != slice_.start:
            kept = HashedPrefix(request, slice_.start, _state_after(request.tokens[: slice_.start], request.salt))
            self._prefixes[request.id] = kept
        return kept


def expected_tokens(
    prompt: Iterable[int], num_tokens: int, salt: bytes = b"", layers: int = 2, vocab_size: int = 512
) -> list[int]:
    """Return the tokens that a `HashRunner` must generate after `prompt`, computed without a KV pool."""
    state, position, kv = _state_after((), salt), 0, hashlib.blake2b(digest_size=8)
    pending, generated = list(prompt), list[int]()
    while len(generated) < num_tokens:
        for token in pending:
            state = _next_state(state, token)
            kv.update(_kv_of(state, position, layers))
            position += 1
        pending = [_token(kv.digest(), vocab_size)]
        generated += pending
    return generated


def _state_after(tokens: Iterable[int], salt: bytes) -> bytes:
    state = hashlib.blake2b(salt, digest_size=32).digest()
    for token in tokens:
        state = _next_state(state, token)
    return state


def _next_state(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + token.to_bytes(8, "little"), digest_size=32).digest()


def _kv_of(state: bytes, position: int, layers: int) -> bytes:
    """Return 8 bytes per layer, which depend on the position and on all tokens up to it."""
    where = position.to_bytes(8, "little")
    return b"".join(
        hashlib.blake2b(where + layer.to_bytes(8, "little"), digest_size=KV_BYTES, key=state).digest()
        for layer in range(layers)
    )


def _token(digest: bytes, vocab_size: int) -> int:
    return int.from_bytes(digest, "little") % vocab_size
