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
    """A function to fuzz. `seeds` are inputs to mutate. `bytes_per_byte` limits the peak memory per byte of input. This
    limit is large for JSON, where one byte may become a Python object."""

    fuzzed: Fuzzed
    seeds: tuple[bytes, ...]
    bytes_per_byte: int


TARGETS: dict[str, Target] = {}


def target(
    *seeds: bytes, bytes_per_byte: int = 64, rejects: type[Exception] | tuple[()] = (), secret: str = "\n"
) -> Callable[[Fuzzed], Fuzzed]:
    """Register a target. It may raise `rejects`, with a message of one short line that does not contain `secret`."""

    def register(fuzzed: Fuzzed) -> Fuzzed:
        def checked(data: bytes) -> None:
            try:
                fuzzed(data)
            except rejects as error:
                text = str(error)
                assert secret not in text, text
                assert "\n" not in text, text
                assert 0 < len(text) < 1500, len(text)

        TARGETS[fuzzed.__name__] = Target(checked, seeds, bytes_per_byte)
        return fuzzed

    return register


@cache
def scratch() -> Path:
    """Return the temporary directory of this process, which is in memory if possible."""
    shm = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="baton-fuzz-", dir=shm if shm.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def written(name: str, data: bytes) -> Path:
    """Write `data` to a file in the temporary directory and return its path."""
    file = scratch() / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    return file


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()
