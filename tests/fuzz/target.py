"""What a fuzz target is: a reader of bytes from outside, that raises only for a finding."""

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
    """`seeds` are inputs worth changing. `bytes_per_byte`: how much memory each byte of input may take for a moment:
    objects of Python stand for bytes of JSON, where the text itself is bounded."""

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
    """A directory of this process, in memory where there is such a place."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def one_line(error: Exception, secret: str = "\n") -> None:
    """What an operator is told is one line, none too long, and nothing of a secret."""
    text = str(error)
    assert secret not in text, text
    assert "\n" not in text, text
    assert 0 < len(text) < 1500, len(text)


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()
