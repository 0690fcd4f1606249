"""Runners without a model, for tests and emulation. Their tokens show whether the right KV is in the right place.

The KV of a position has 32 bytes: a sum over all tokens up to this position. Each token adds pseudorandom numbers that
depend on the token and its position. A chunk is computed at once, from the KV of the position before the chunk.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.emulation import Emulation
from engine.options import HASH_LANES
from engine.runner import Runner, SliceOutput
from scheduler.request import Slice, Step, cdiv

log = logging.getLogger("baton.emulated")
LANES = HASH_LANES  # 64-bit integers per token: 32 bytes, as in a KVLayout with 1 layer, 1 head, head_dim 4, float32
# If the host delays the start of a pass by at most this time, the pass still counts as started when the previous one
# ended. This emulates a device whose next step is already queued.
ABSORBED_S = 0.002

Lanes = NDArray[np.uint64]


class HashRunner(Runner):
    """A substitute for `TorchRunner`. `rows` is the KV pool, uint8 [num_blocks, at least block_tokens * 32].

    The next token is a hash of all KV of the request, read back from the pool. It is therefore
    wrong if any block is stale, incomplete, misplaced or from another request. Sampling parameters are ignored, and
    there are no logprobs.
    """

    def __init__(self, rows: NDArray[np.uint8], block_tokens: int, vocab_size: int) -> None:
        used = block_tokens * LANES * 8
        self._kv: Lanes = rows[:, :used].view(np.uint64).reshape(len(rows), block_tokens, LANES)
        self._vocab_size = vocab_size

    def run(self, step: Step) -> list[SliceOutput]:
        return [self.run_slice(slice_, slice_.request.tables[0]) for slice_ in step.slices]

    def run_slice(self, slice_: Slice, blocks: list[int]) -> SliceOutput:
        """Compute a slice, with its KV in `blocks`."""
        request, row, size = slice_.request, np.asarray(blocks), self._kv.shape[1]
        positions, before = np.arange(slice_.start, slice_.end), slice_.start - 1
        state: Lanes = self._kv[row[before // size], before % size] if before >= 0 else _root(request.salt)
        states = state + _sums(request.tokens[slice_.start : slice_.end], slice_.start)
        self._kv[row[positions // size], positions % size] = states
        if not slice_.samples:
            return SliceOutput()
        return SliceOutput(self._hashed(row[: cdiv(slice_.end, size)], slice_.end) % self._vocab_size)

    def _hashed(self, row: NDArray[Any], end: int) -> int:
        """Return a hash of the KV of positions [0, end), read back from the blocks in `row`."""
        return _digest(hashlib.blake2b(self._kv[row].reshape(-1, LANES)[:end].tobytes(), digest_size=8))


class EmulatedRunner(HashRunner):
    """A runner with the step times of an emulated device. A token depends on the KV of only the last position.

    `overruns` counts passes that ended late because this machine is too slow for the emulated device.
    """

    def __init__(
        self,
        rows: NDArray[np.uint8],
        block_tokens: int,
        vocab_size: int,
        emulation: Emulation,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(rows, block_tokens, vocab_size)
        self._cost, self._clock, self._sleep = emulation.cost, clock, sleep
        self._pass_ends = float("-inf")
        self.overruns = 0

    def run(self, step: Step) -> list[SliceOutput]:
        started = self._clock()
        outputs = super().run(step)
        begins = self._pass_ends if started - self._pass_ends <= ABSORBED_S else started
        self._pass_ends = begins + self._cost.seconds(step.work)
        rest_s = self._pass_ends - self._clock()
        if rest_s > 0:
            self._sleep(rest_s)
        elif rest_s < -ABSORBED_S:
            self._overrun(-rest_s)
        return outputs

    def _overrun(self, late_s: float) -> None:
        self.overruns += 1
        if self.overruns.bit_count() == 1:  # log at 1, 2, 4, 8, ... overruns
            log.warning(
                "%d passes ended late, the last one by %.1f ms: this machine is too slow for the emulated device",
                self.overruns,
                late_s * 1000,
            )

    def _hashed(self, row: NDArray[Any], end: int) -> int:
        return int(_mixed(self._kv[row[-1], (end - 1) % self._kv.shape[1]])[0])


def expected_tokens(
    prompt: Iterable[int], num_tokens: int, vocab_size: int, salt: bytes = b"", emulated: bool = False
) -> list[int]:
    """Return the tokens that a `HashRunner` (or `EmulatedRunner` if `emulated`) must generate after `prompt`."""
    pending, state, position, read = list(prompt), _root(salt), 0, hashlib.blake2b(digest_size=8)
    generated: list[int] = []
    while len(generated) < num_tokens:
        states = state + _sums(pending, position)
        state, position = states[-1], position + len(pending)
        read.update(states.tobytes())
        pending = [(int(_mixed(state)[0]) if emulated else _digest(read)) % vocab_size]
        generated += pending
    return generated


def _digest(read: "hashlib.blake2b") -> int:
    return int.from_bytes(read.digest(), "little")


def _root(salt: bytes) -> Lanes:
    return np.frombuffer(hashlib.blake2b(salt, digest_size=8 * LANES).digest(), np.uint64)


def _sums(tokens: list[int], start: int) -> Lanes:
    """Return cumulative sums (modulo 2**64) of each token's pseudorandom numbers, uint64 [tokens, LANES]."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    places = (positions << np.uint64(32)) | np.asarray(tokens, np.uint64)
    keys = np.add.outer(places * np.uint64(LANES), np.arange(LANES, dtype=np.uint64))
    return np.cumsum(_mixed(keys), axis=0, dtype=np.uint64)


def _mixed(keys: Lanes) -> Lanes:
    """Hash each key with splitmix64 (Steele, Lea and Flood 2014)."""
    mixed = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
