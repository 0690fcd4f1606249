"""Runners without a model, for tests and emulation. Their tokens show whether the right KV is in the right place.

The KV of a position is a sum over all tokens up to this position, in 32 bytes. Each token adds pseudorandom numbers
that depend on the token and its position. A chunk is computed at once, from the KV of the position before the chunk.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.emulation import Emulation
from engine.options import HASH_LANES
from engine.runner import Runner, SliceOutput
from scheduler.geometry import UNIFORM, Group
from scheduler.request import Slice, Step, cdiv

log = logging.getLogger("baton.emulated")
LANES = HASH_LANES  # 64-bit integers per token: 32 bytes, like a KVLayout of 1 layer, 1 head, head_dim 4 and float32
# A pass that begins within this many seconds after the end of the previous pass is treated as if it began at that end.
# This emulates a device whose next step is already queued.
ABSORBED_S = 0.002

Lanes = NDArray[np.uint64]


class HashRunner(Runner):
    """A substitute for `TorchRunner`. `rows` is the KV pool, uint8 [num_blocks, at least block_tokens * 32].

    The next token is a hash of all KV of the request, read back from the pool. The token is therefore wrong if any
    block is stale, incomplete, misplaced or from another request. Sampling parameters are ignored, and there are no
    logprobs.

    With several groups, each row of a block has the KV of the block's tokens, and each row of a state has the sum over
    all tokens. Each row is XORed with its own constant. A group's window limits the positions that are read.
    """

    def __init__(
        self, rows: NDArray[np.uint8], block_tokens: int, vocab_size: int, groups: tuple[Group, ...] = UNIFORM
    ) -> None:
        used = block_tokens * LANES * 8
        self._kv: Lanes = rows[:, :used].view(np.uint64).reshape(len(rows), block_tokens, LANES)
        self._vocab_size = vocab_size
        self._groups = groups

    def run(self, step: Step) -> list[SliceOutput]:
        return [self.run_slice(slice_, slice_.request.tables) for slice_ in step.slices]

    def run_slice(self, slice_: Slice, tables: Sequence[Sequence[int]]) -> SliceOutput:
        """Compute a slice, with its KV in the rows of `tables` (see `Request`)."""
        if self._groups != UNIFORM:
            return self._run_in_groups(slice_, tables)
        request, row, size = slice_.request, np.asarray(tables[0]), self._kv.shape[1]
        positions, before = np.arange(slice_.start, slice_.end), slice_.start - 1
        state: Lanes = self._kv[row[before // size], before % size] if before >= 0 else _root(request.salt)
        states = state + _sums(slice_.tokens[slice_.start : slice_.end], slice_.start)
        self._kv[row[positions // size], positions % size] = states
        if not slice_.samples:
            return SliceOutput()
        return SliceOutput([self._hashed(row[: cdiv(slice_.end, size)], slice_.end) % self._vocab_size])

    def _run_in_groups(self, slice_: Slice, tables: Sequence[Sequence[int]]) -> SliceOutput:
        size, start, end = self._kv.shape[1], slice_.start, slice_.end
        columns = [
            (group, np.asarray(table)[row :: group.rows])
            for group, table in zip(self._groups, tables, strict=False)  # a group of states has no table
            for row in range(group.rows)
        ]

        def kv_of(number: int, positions: NDArray[Any]) -> Lanes:
            blocks = columns[number][1]
            kv: Lanes = self._kv[blocks[positions // size], positions % size] ^ _key(number)
            return kv

        def state_of(rows: Sequence[int]) -> list[Lanes]:
            return [self._kv[row, 0] ^ _key(len(columns) + number) for number, row in enumerate(rows)]

        every, use = range(len(columns)), slice_.state
        copies = [_root(slice_.request.salt)]
        if start and use is not None:
            copies = state_of(use.read or ())
        elif start:
            copies = [kv_of(number, np.array([start - 1]))[0] for number in every]
        # If the copies differ, at least one of them is wrong. In that case, make all later tokens wrong too.
        before = copies[0] if all((copy == copies[0]).all() for copy in copies) else _mixed(np.sum(copies, axis=0))
        states = before + _sums(slice_.tokens[start:end], start)
        positions = np.arange(start, end)
        for number, (_, blocks) in enumerate(columns):
            self._kv[blocks[positions // size], positions % size] = states ^ _key(number)
        if use is not None:
            saved = [(use.save, use.save_at - start)] if use.save else []
            for rows, count in ((use.write, len(states)), *saved):
                for number, row in enumerate(rows):
                    self._kv[row, 0] = states[count - 1] ^ _key(len(columns) + number)
        if not slice_.samples:
            return SliceOutput()
        seen = [kv_of(number, np.arange(group.first_seen(end - 1), end)) for number, (group, _) in enumerate(columns)]
        return SliceOutput([_digest_of(seen, state_of(use.write) if use is not None else []) % self._vocab_size])

    def _hashed(self, row: NDArray[Any], end: int) -> int:
        """Return a hash of the KV of positions [0, end), read back from the blocks in `row`."""
        return _digest(hashlib.blake2b(self._kv[row].reshape(-1, LANES)[:end].tobytes(), digest_size=8))


class EmulatedRunner(HashRunner):
    """A runner with the step times of an emulated device. A token depends only on the KV of the last position.

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
    prompt: Iterable[int],
    num_tokens: int,
    vocab_size: int,
    salt: bytes = b"",
    emulated: bool = False,
    groups: tuple[Group, ...] = UNIFORM,
) -> list[int]:
    """Return the tokens that a `HashRunner` (or `EmulatedRunner` if `emulated`) must generate after `prompt`."""
    if groups != UNIFORM:
        return _expected_in_groups(list(prompt), num_tokens, vocab_size, salt, groups)
    pending, state, position, read = list(prompt), _root(salt), 0, hashlib.blake2b(digest_size=8)
    generated: list[int] = []
    while len(generated) < num_tokens:
        states = state + _sums(pending, position)
        state, position = states[-1], position + len(pending)
        read.update(states.tobytes())
        pending = [(int(_mixed(state)[0]) if emulated else _digest(read)) % vocab_size]
        generated += pending
    return generated


def _expected_in_groups(
    tokens: list[int], num_tokens: int, vocab_size: int, salt: bytes, groups: tuple[Group, ...]
) -> list[int]:
    num_prompt, states = len(tokens), np.zeros((0, LANES), np.uint64)
    while len(tokens) < num_prompt + num_tokens:
        end, start = len(tokens), len(states)
        before = states[-1] if start else _root(salt)
        states = np.concatenate((states, before + _sums(tokens[start:], start)))
        kept = [group for group in groups if group.kind != "state" for _ in range(group.rows)]
        num_states = sum(group.rows for group in groups if group.kind == "state")
        seen = [states[group.first_seen(end - 1) :] for group in kept]
        tokens.append(_digest_of(seen, [states[-1]] * num_states) % vocab_size)
    return tokens[num_prompt:]


def _digest_of(seen: list[Lanes], state: list[Lanes]) -> int:
    """Return a hash of the KV that a token sees in each row of a block, and of the rows of the state."""
    read = hashlib.blake2b(digest_size=8)
    for lanes in (*seen, *state):
        read.update(lanes.tobytes())
    return _digest(read)


def _key(number: int) -> Lanes:
    """Return the constant that is XORed with the KV in a row, [LANES]."""
    return _mixed(np.arange(number * LANES, (number + 1) * LANES, dtype=np.uint64))


def _digest(read: "hashlib.blake2b") -> int:
    return int.from_bytes(read.digest(), "little")


def _root(salt: bytes) -> Lanes:
    return np.frombuffer(hashlib.blake2b(salt, digest_size=8 * LANES).digest(), np.uint64)


def _sums(tokens: list[int], start: int) -> Lanes:
    """Return cumulative sums (modulo 2**64) of the tokens' pseudorandom numbers, uint64 [tokens, LANES]."""
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
