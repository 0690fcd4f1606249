"""The memory of a KV pool: its interface for channels, the checksums of rows, and host memory that peers can map."""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

Rows = NDArray[np.uint8]

CHECKSUM_BYTES = 8
# A process maps the memory of another process only if the size of that memory is sealed. Access to a mapping of a
# truncated file raises SIGBUS, which Python cannot catch. F_SEAL_SEAL keeps a peer from adding a seal against writes.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Staging(Protocol):
    """Host buffers for the rows that socket channels send and receive. A buffer is valid until the next call."""

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        """Return buffers with the bytes of these rows."""

    def room(self, rows: Sequence[int]) -> list[memoryview]:
        """Return one buffer for each row. The caller fills the buffers."""

    def write(self, rows: Sequence[int]) -> None:
        """Copy the buffers from `room(rows)` into the rows, and wait until the copy is complete."""

    def close(self) -> None: ...


class KVMemory(Protocol):
    """The rows of a KV pool, on the host or on a GPU: `num_rows` rows of `row_bytes` bytes each.

    `sums` names the checksum algorithm. Checksums of rows in two memories can be compared only if both use the same
    algorithm."""

    sums: ClassVar[str]

    @property
    def num_rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def checksums(self, rows: Sequence[int]) -> bytes:
        """Return the checksums of the rows, 8 bytes each."""

    def staging(self) -> Staging:
        """Return a new Staging. The same thread must create, use and close it."""


def checksums(rows: Rows, indices: Sequence[int]) -> bytes:
    """Return the xxh3-64 checksums of the rows at `indices`, in this order, each as 8 little-endian bytes.

    `rows` is a uint8 array [num_rows, row_bytes] whose rows are contiguous. Raises IndexError if an index is too large.
    """
    return b"".join(xxhash.xxh3_64_intdigest(rows[index]).to_bytes(CHECKSUM_BYTES, "little") for index in indices)


class InPlaceStaging:
    """A Staging for rows in host memory. Its buffers are the rows themselves, so it copies nothing."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        return [self._rows[row].data for row in rows]

    room = read

    def write(self, rows: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


class HostMemory:
    """`num_rows` rows of `row_bytes` zero bytes in a memfd, which the kernel frees when the last process unmaps it.

    `rows` is a uint8 array [num_rows, row_bytes]. The constructor touches every page, because the first touch of a page
    takes 20 times as long as a later copy. Raises ValueError if a size is below one. Raises OSError (ENOMEM) if the
    machine or the control group has too little memory, since the kernel would later kill the process without a message.
    """

    sums: ClassVar[str] = "xxh3"

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        if num_rows < 1 or row_bytes < 1:
            raise ValueError(f"KV memory of {num_rows} rows of {row_bytes} bytes: both must be at least 1")
        size, available = num_rows * row_bytes, available_bytes()
        text = f"cannot allocate {size / 2**20:,.0f} MiB of KV memory: %s; lower --num-blocks or --kv-cache-memory"
        if size > available:
            raise OSError(errno.ENOMEM, text % f"{available / 2**20:,.0f} MiB are available")
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._fd: int | None = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # If memory is short, this call fails. Without it, the first access to a page would raise SIGBUS.
            os.posix_fallocate(self._fd, 0, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            flat = np.frombuffer(mmap.mmap(self._fd, size), np.uint8)  # the array owns the mapping
        except OSError as error:
            self.close()
            raise OSError(error.errno, text % error.strerror) from error
        flat[:: mmap.PAGESIZE] = 0
        self.rows: Rows = flat.reshape(num_rows, row_bytes)

    @property
    def fd(self) -> int:
        """The memfd. Raises ValueError after `close`, since the descriptor's number may then belong to another file."""
        if self._fd is None:
            raise ValueError("the KV memory is closed")
        return self._fd

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        return InPlaceStaging(self.rows)

    def close(self) -> None:
        """Release the memory, which stays mapped until the last view of `rows` is deleted. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self.rows = np.empty((0, 0), np.uint8)


def available_bytes() -> int:
    """Return the memory available without swapping, or the limit of the control group if that is less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return available if text == "max" else min(available, int(text))
