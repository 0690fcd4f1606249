"""Host bytes of a pool's rows, for channels that move them through sockets: in place, or on their way to a GPU."""

import ctypes
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.kv_gpu.cuda_driver import CudaRegion, CudaStream


class Staging(Protocol):
    """Of one thread. What a call returns holds until the next one."""

    def read(self, rows: Sequence[int]) -> list[memoryview]:
        """The bytes of these rows."""
        ...

    def room(self, rows: Sequence[int]) -> list[memoryview]:
        """Where bytes for these rows are to be put."""
        ...

    def write(self, rows: Sequence[int]) -> None:
        """What was put into `room(rows)` is in the rows when this returns."""
        ...

    def close(self) -> None: ...


class KVMemory(Protocol):
    """The rows of a KV pool, on the host or on a GPU: `num_rows` of `row_bytes` each.

    `sums`: name of the checksum. Only memories with the same one can tell whether a row arrived whole.
    """

    sums: ClassVar[str]

    @property
    def num_rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def checksums(self, rows: Sequence[int]) -> bytes:
        """8 bytes of each row. Equal rows have equal ones on memories of one kind."""
        ...

    def staging(self) -> Staging:
        """To be made and closed by the thread that uses it."""
        ...


class InPlaceStaging:
    """Rows that are host memory need no staging."""

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
    """Page-locked memory through which rows of a GPU pass, as much as one call ever asked for.

    The rows to read must be computed before: whoever names them was told so after their step had ended.
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
