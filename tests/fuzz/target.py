"""Fuzz targets: functions that parse untrusted bytes. An exception that a target raises is a finding."""

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
    """A function to fuzz. `seeds` are inputs to mutate. `bytes_per_byte` limits the peak memory per byte of input. It
    is large for JSON, where one byte may become a Python object."""

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
    """Return the temporary directory of this process, which is in memory if possible."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def one_line(error: Exception, secret: str = "\n") -> None:
    """Check that an error for operators is one short line that does not contain `secret`."""
    text = str(error)
    assert secret not in text, text
    assert "\n" not in text, text
    assert 0 < len(text) < 1500, len(text)


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()
