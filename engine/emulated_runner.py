"""A runner with the step times of an emulated device. Its tokens show whether the right KV is in the right place.

The KV of a position is 32 bytes, a running sum over all tokens up to it. It is computed for a whole chunk at once, and
read from the pool only at the last position. A step costs microseconds, and its result depends on every token.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from engine.emulation import Emulation
from engine.runner import Runner, SliceOutput
from scheduler.request import Slice, Step

log = logging.getLogger("baton.emulated")
LANES = 4  # 64-bit integers per position, so 32 bytes
EMULATED_HEAD_DIM = LANES  # K and V of 1 layer, 1 head and float32 then have 32 bytes per token, too
# If the engine's work between two passes, or a late end of a sleep, delays a pass, the next pass is shortened by up to
# this time. This emulates a device whose next step is already queued.
ABSORBED_S = 0.002

Lanes = NDArray[np.uint64]


class EmulatedRunner(Runner):
    """Replaces `TorchRunner`. `rows` is the KV pool, uint8 [num_blocks, block_tokens * 32].

    Sampling parameters are ignored: the KV determines the next token, which has no logprobs. `overruns` counts passes
    that ended late because this machine is too slow for the emulated device.
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
        self._kv: Lanes = rows.view(np.uint64).reshape(len(rows), block_tokens, LANES)
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._cost = emulation.cost
        self._clock = clock
        self._sleep = sleep
        self._pass_ends = float("-inf")
        self.overruns = 0

    def run(self, step: Step) -> list[SliceOutput]:
        started = self._clock()
        outputs = [self._run_slice(slice_) for slice_ in step.slices]
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
        if self.overruns.bit_count() == 1:  # at 1, 2, 4, 8 …
            log.warning(
                "%d passes ended late, the last one by %.1f ms: this machine is too slow for the emulated device",
                self.overruns,
                late_s * 1000,
            )

    def _run_slice(self, slice_: Slice) -> SliceOutput:
        request, size = slice_.request, self._block_tokens
        positions = np.arange(slice_.start, slice_.end)
        blocks = np.asarray(request.blocks)
        before = slice_.start - 1
        state: Lanes = self._kv[blocks[before // size], before % size] if before >= 0 else _root(request.salt)
        states = state + _sums(request.tokens[slice_.start : slice_.end], slice_.start)
        self._kv[blocks[positions // size], positions % size] = states
        return SliceOutput(_token(states[-1], self._vocab_size) if slice_.samples else None)


def expected_tokens(prompt: Iterable[int], num_tokens: int, vocab_size: int, salt: bytes = b"") -> list[int]:
    """Return the tokens that an `EmulatedRunner` must generate after `prompt`, with any nodes and KV channels."""
    pending, state, position = list(prompt), _root(salt), 0
    generated: list[int] = []
    while len(generated) < num_tokens:
        state = state + _sums(pending, position)[-1]
        position += len(pending)
        pending = [_token(state, vocab_size)]
        generated += pending
    return generated


def _root(salt: bytes) -> Lanes:
    return np.frombuffer(hashlib.blake2b(salt, digest_size=8 * LANES).digest(), np.uint64)


def _sums(tokens: list[int], start: int) -> Lanes:
    """Return running sums modulo 2**64 of pseudorandom numbers by token and position, uint64 [tokens, LANES]."""
    ids = np.asarray(tokens, np.uint64)
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    places = (positions << np.uint64(32)) | ids
    keys = np.add.outer(places * np.uint64(LANES), np.arange(LANES, dtype=np.uint64))
    return np.cumsum(_mixed(keys), axis=0, dtype=np.uint64)


def _mixed(keys: Lanes) -> Lanes:
    """Return splitmix64 (Steele, Lea and Flood 2014) of each key."""
    mixed = (keys + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _token(state: Lanes, vocab_size: int) -> int:
    return int(_mixed(state)[0] % np.uint64(vocab_size))
