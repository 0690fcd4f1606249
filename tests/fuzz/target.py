"""Fuzz targets: parsers of untrusted bytes that raise only for a finding."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Fuzzed = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """`seeds` are inputs to mutate. `bytes_per_byte` limits the peak memory per byte of input: a byte of JSON may become
    a Python object, and the size of the text is bounded elsewhere."""

    fuzzed: Fuzzed
    seeds: tuple[bytes, ...]
    bytes_per_byte: int


TARGETS: dict[str, Target] = {}


def target(*seeds: bytes, bytes_per_byte: int = 64) -> Callable[[Fuzzed], Fuzzed]:
    def register(fuzzed: Fuzzed) -> Fuzzed:
        TARGETS[fuzzed.__name__] = Target(fuzzed, seeds, bytes_per_byte)
        return fuzzed

    return register


@cache
def scratch() -> Path:
    """Return a temporary directory of this process, in memory if possible."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def one_line(error: Exception, secret: str = "\n") -> None:
    """Check that an error for operators is one short line without the secret."""
    text = str(error)
    assert secret not in text, text
    assert "\n" not in text, text
    assert 0 < len(text) < 1500, len(text)


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()
