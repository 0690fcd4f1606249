"""The memory of a KV pool as channels see it, and access to the bytes of its rows for channels that use sockets."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray


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
