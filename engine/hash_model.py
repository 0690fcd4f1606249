"""A model without arithmetic: KV is a hash of the past, the next token a hash of all KV that is read back.

It runs wherever a real model does, at the speed of hashing, and any stale, torn, foreign or misplaced block
changes its output; so a right answer proves the transport, the scheduler and the recovery around it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.runner import Runner, SliceOutput
from scheduler.request import Request, RequestState, Slice, Step, cdiv

KV_BYTES = 8  # of one position and layer; a KVLayout of 1 head, head_dim 1 and float32 has the same size


@dataclass(slots=True)
class HashedPrefix:
    """The running hash of a request's first `end` tokens."""

    request: Request
    end: int
    state: bytes


class HashRunner(Runner):
    """Stands in for `TorchRunner`. `rows` is the pool, uint8 [num_blocks, row_bytes].

    Sampling is ignored: there is one next token, and it has no logprobs. Raises ValueError for rows too short.
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
        return [self._run_slice(piece) for piece in step.slices]

    def _run_slice(self, piece: Slice) -> SliceOutput:
        self._store(piece)
        if not piece.samples:
            return SliceOutput()
        blocks = piece.request.blocks[: cdiv(piece.end, self._block_tokens)]
        read = self._rows[blocks].reshape(-1)[: piece.end * self._layers * KV_BYTES]
        digest = hashlib.blake2b(read.data, digest_size=8).digest()
        return SliceOutput(_token(digest, self._vocab_size))

    def _store(self, piece: Slice) -> None:
        prefix = self._prefix(piece)
        kv = bytearray()
        for position in range(piece.start, piece.end):
            prefix.state = _next_state(prefix.state, piece.request.tokens[position])
            kv += _kv_of(prefix.state, position, self._layers)
        prefix.end = piece.end
        new = np.frombuffer(kv, np.uint8).reshape(piece.count, -1)
        size = self._block_tokens
        edges = [piece.start, *range(cdiv(piece.start + 1, size) * size, piece.end, size), piece.end]
        for start, end in pairwise(edges):
            row = self._rows[piece.request.blocks[start // size]].reshape(size, -1)
            row[start % size : start % size + end - start] = new[start - piece.start : end - piece.start]

    def _prefix(self, piece: Slice) -> HashedPrefix:
        """The running hash up to the slice: kept from the slice before, else computed from the tokens."""
        request = piece.request
        kept = self._prefixes.get(request.id)
        if kept is None or kept.request is not request or kept.end != piece.start:
            kept = HashedPrefix(request, piece.start, _state_after(request.tokens[: piece.start], request.salt))
            self._prefixes[request.id] = kept
        return kept


def expected_tokens(
    prompt: Iterable[int], num_tokens: int, salt: bytes = b"", layers: int = 2, vocab_size: int = 512
) -> list[int]:
    """What a `HashRunner` with these `layers` and `vocab_size` must generate after `prompt`: no pool, no blocks."""
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
    """8 bytes a layer, keyed by all tokens up to the position and by the position itself."""
    where = position.to_bytes(8, "little")
    return b"".join(
        hashlib.blake2b(where + layer.to_bytes(8, "little"), digest_size=KV_BYTES, key=state).digest()
        for layer in range(layers)
    )


def _token(digest: bytes, vocab_size: int) -> int:
    return int.from_bytes(digest, "little") % vocab_size
