"""Host memory that a peer process can map: a sealed memfd, used as a matrix of bytes with one KV block per row."""

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
    """`num_rows` rows of `row_bytes` zero bytes in a memfd, which the kernel frees when the last process unmaps it.

    `rows` is uint8 [num_rows, row_bytes]. The constructor touches every page, because the first touch of a page takes
    20 times as long as a copy into it. Raises ValueError for a size below one, and OSError (ENOMEM) if the machine or
    the control group has too little memory.
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
        """The memfd. Raises ValueError after `close`, since its number may then belong to another file."""
        if self._fd is None:
            raise ValueError("the KV memory is closed")
        return self._fd

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        return InPlaceStaging(self.rows)

    def close(self) -> None:
        """Release the memory. Idempotent. The mapping remains until the last view of `rows` is deleted."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self.rows = np.empty((0, 0), np.uint8)

    @staticmethod
    def _allocate(fd: int, size: int) -> Rows:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)  # fails here if memory is short; a later touch would be a SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        flat = np.frombuffer(mmap.mmap(fd, size), np.uint8)  # the array owns the mapping
        flat[:: mmap.PAGESIZE] = 0
        return flat

    @staticmethod
    def _check_available(size: int) -> None:
        """Raise OSError if memory is short. Otherwise, the kernel would kill the process without a message."""
        available = _available_bytes()
        if size > available:
            text = (
                f"cannot allocate {size / 2**20:,.0f} MiB of KV memory: {available / 2**20:,.0f} MiB are "
                "available; lower --num-blocks or --kv-cache-memory"
            )
            raise OSError(errno.ENOMEM, text)


def _available_bytes() -> int:
    """Return the memory available without swapping, or the limit of the control group if that is less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return available if text == "max" else min(available, int(text))
