"""Host memory that a peer process may map: a sealed memfd, seen here as a matrix of bytes, one KV block a row."""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shared.kv.checksum import checksums
from shared.kv.staging import InPlaceStaging, Staging

Rows = NDArray[np.uint8]

# A sealed size is what makes it safe to map the memory of another process: a truncated file under a mapping is a
# SIGBUS, which no Python code can catch. F_SEAL_SEAL keeps a peer from adding seals that would stop our own writes.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostMemory:
    """`num_rows` rows of `row_bytes` zero bytes in a memfd; it leaves nothing behind when the process dies.

    `rows` is uint8 [num_rows, row_bytes]. Every page is touched here, since a first touch costs 20 times the copy
    that it would happen in. Raises ValueError for a size below one, OSError (ENOMEM) when the machine or the
    control group has less memory than asked for.
    """

    sums: ClassVar[str] = "xxh3"

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        if num_rows < 1 or row_bytes < 1:
            raise ValueError(f"KV memory of {num_rows} rows of {row_bytes} bytes: both must be at least 1")
        size = num_rows * row_bytes
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._check_available(size)
        self._fd: int | None = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.rows: Rows = self._allocate(self._fd, size).reshape(num_rows, row_bytes)
        except OSError as error:
            self.close()
            text = f"cannot allocate {size / 2**20:,.0f} MiB of KV memory: {error.strerror}"
            raise OSError(error.errno, text) from error

    @property
    def fd(self) -> int:
        """The memfd. Raises ValueError after `close`, since its number may be another file's by then."""
        if self._fd is None:
            raise ValueError("the KV memory is closed")
        return self._fd

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        return InPlaceStaging(self.rows)

    def close(self) -> None:
        """Let go of the memory. Idempotent; the mapping itself ends with the last view of `rows` that others hold."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self.rows = np.empty((0, 0), np.uint8)

    @staticmethod
    def _allocate(fd: int, size: int) -> Rows:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)  # memory that is not there is an error here, and a SIGBUS at the touch
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        flat = np.frombuffer(mmap.mmap(fd, size), np.uint8)  # the array owns the mapping
        flat[:: mmap.PAGESIZE] = 0
        return flat

    @staticmethod
    def _check_available(size: int) -> None:
        """Refuse before the kernel's out-of-memory killer would: it ends the process without a word."""
        available = _available_bytes()
        if size > available:
            text = (
                f"cannot allocate {size / 2**20:,.0f} MiB of KV memory: {available / 2**20:,.0f} MiB are "
                "available; lower --num-blocks or --kv-cache-memory"
            )
            raise OSError(errno.ENOMEM, text)


def _available_bytes() -> int:
    """What the kernel says can be had without swapping, and no more than the control group's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return available if text == "max" else min(available, int(text))
