"""A small fuzzer that does not measure coverage: it mutates, cuts and splices seeds at random.

Exceptions, slow inputs and excessive memory use are findings. `tests.fuzz.run` can run the same targets under atheris
(libFuzzer).
"""

import random
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from tests.fuzz.targets import TARGETS, Target

SLOW_S = 0.1  # limit of this thread's CPU time for one input
TRACED_EVERY = 50  # one run in this many traces its allocations, because a traced run takes several times as long
SPARE_BYTES = 2 << 20  # allowance for caches and buffers that do not depend on the input
INTERESTING = (
    b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x10\x00\x00", b"\xc0",
    b"\xc1", b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"9" * 400, b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b'"',
    b"\\ud800", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n\n", b"\x00" * 64, b"../", b"%s", b"$", b"(((", b"]" * 50,
)  # fmt: skip


class Finding(AssertionError):
    """An input that broke a target. The constructor saves the input to a file so that it can be run again."""

    def __init__(self, name: str, data: bytes, what: str) -> None:
        file = Path(tempfile.gettempdir()) / f"baton-{name}-{blake2b(data, digest_size=4).hexdigest()}.input"
        file.write_bytes(data)
        super().__init__(f"{name}: {what}; repeat with: python -m tests.fuzz.run --target {name} --input {file}")


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """Yield the seeds, then an endless sequence of their mutations."""
    yield from target.seeds
    draw = random.Random(seed)
    while True:
        data = bytearray(draw.choice(target.seeds))
        for _ in range(draw.choice((1, 1, 2, 4, 16))):
            _mutate(data, target, draw)
        yield bytes(data[: 1 << 16])


def _mutate(data: bytearray, target: Target, draw: random.Random) -> None:
    at = draw.randrange(len(data) + 1)
    to = min(len(data), at + draw.choice((1, 1, 2, 4, 8, 64)))
    match draw.randrange(7):
        case 0 if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        case 1 if at < len(data):
            data[at] = draw.randrange(256)
        case 2:
            data[at:to] = draw.choice(INTERESTING)
        case 3:
            data[at:at] = draw.choice(INTERESTING)
        case 4:
            del data[at:to]
        case 5:
            data[at:at] = data[at:to] * draw.choice((1, 2, 100))
        case _:
            other = draw.choice(target.seeds)
            data[at:] = other[draw.randrange(len(other) + 1) :]


def run_one(name: str, data: bytes, *, trace: bool) -> None:
    """Run one input. Raises Finding if the input breaks the target."""
    target = TARGETS[name]
    peak = 0
    began = time.thread_time()
    try:
        if trace:
            peak = _peak_bytes(target, data)
        else:
            target.fuzzed(data)
    except Exception as error:
        raise Finding(name, data, f"{type(error).__name__}: {error}"[:300]) from error
    took_s = time.thread_time() - began
    allowed = SPARE_BYTES + target.bytes_per_byte * len(data)
    # Measure twice, because the first run may fill a cache or import a module.
    if peak > allowed and (again := _peak_bytes(target, data)) > allowed:
        raise Finding(name, data, f"{again} bytes for {len(data)}")
    if took_s > SLOW_S and not trace and _is_slow(target, data):
        raise Finding(name, data, f"{took_s:.3f} s")


def _peak_bytes(target: Target, data: bytes) -> int:
    """Return the peak allocation in bytes."""
    tracemalloc.start()
    try:
        target.fuzzed(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _is_slow(target: Target, data: bytes) -> bool:
    """Return whether the input is slow every time, and not only because of a cold cache or a garbage collection."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        target.fuzzed(data)
        times.append(time.thread_time() - began)
    return min(times) > SLOW_S


def fuzz(name: str, runs: int, seed: int) -> None:
    """Run a target with `runs` inputs. Raises Finding if an input breaks the target."""
    target = TARGETS[name]
    target.fuzzed(target.seeds[0])  # imports the modules that the target needs
    for number, data in zip(range(runs), inputs(target, seed), strict=False):
        run_one(name, data, trace=number % TRACED_EVERY == 0)
