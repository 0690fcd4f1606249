"""Access to the bytes of rows in host memory, for channels that use sockets: in place, or through copies of a GPU."""

import ctypes
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.kv_gpu.cuda_driver import CudaRegion, CudaStream


class Staging(Protocol):
    """Host buffers for rows. Used by one thread; what a call returns is valid until the next call."""

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        """Return the bytes of these rows."""
        ...

    def room(self, rows: Sequence[int]) -> list[memoryview]:
        """Return buffers to be filled with bytes for these rows."""
        ...

    def write(self, rows: Sequence[int]) -> None:
        """Copy what was put into `room(rows)` to the rows, and wait until it is there."""
        ...

    def close(self) -> None: ...


class KVMemory(Protocol):
    """The rows of a KV pool, on the host or on a GPU: `num_rows` of `row_bytes` each.

    `sums` names the checksum. Two memories must use the same one to compare rows.
    """

    sums: ClassVar[str]

    @property
    def num_rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def checksums(self, rows: Sequence[int]) -> bytes:
        """Return the checksums of the rows, 8 bytes each."""
        ...

    def staging(self) -> Staging:
        """Return a new staging. The thread that uses it must create and close it."""
        ...


class InPlaceStaging:
    """The staging of rows in host memory, which copies nothing."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self._rows = rows

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        return [self._rows[row].data for row in rows]

    room = read

    def write(self, rows: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


class PinnedStaging:
    """Page-locked memory for copies from and to a GPU. It grows to the largest number of rows of any call.

    Rows must be fully computed before they are read. Callers push only rows of steps that have ended.
    """

    def __init__(self, region: CudaRegion, row_bytes: int) -> None:
        self._region = region
        self._row_bytes = row_bytes
        self._stream = CudaStream(region.gpu)
        self._address = ctypes.c_void_p()
        self._num_rows = 0

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        views = self.room(rows)
        for host, row in zip(self._addresses(), rows, strict=False):
            self._stream.to_host(host, self._region.address + row * self._row_bytes, self._row_bytes)
        self._stream.wait()
        return views

    def room(self, rows: Sequence[int]) -> list[memoryview]:
        if len(rows) > self._num_rows:
            self._grow(len(rows))
        one = ctypes.c_ubyte * self._row_bytes
        hosts = zip(self._addresses(), rows, strict=False)
        return [memoryview(one.from_address(host)).cast("B") for host, _ in hosts]

    def write(self, rows: Sequence[int]) -> None:
        for host, row in zip(self._addresses(), rows, strict=False):
            self._stream.from_host(self._region.address + row * self._row_bytes, host, self._row_bytes)
        self._stream.wait()

    def close(self) -> None:
        self._grow(0)
        self._stream.close()

    def _addresses(self) -> range:
        first = self._address.value or 0
        return range(first, first + self._num_rows * self._row_bytes, self._row_bytes)

    def _grow(self, num_rows: int) -> None:
        driver = self._region.gpu.use()
        if self._address:
            driver.call("cuMemFreeHost", self._address)
        self._address, self._num_rows = ctypes.c_void_p(), num_rows
        if num_rows:
            driver.call("cuMemHostAlloc", ctypes.byref(self._address), num_rows * self._row_bytes, 0)
