"""Checksums of KV rows, so that a row that was damaged or swapped on its way is never attended to."""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

CHECKSUM_BYTES = 8


def checksums(rows: NDArray[np.uint8], indices: Sequence[int]) -> bytes:
    """xxh3-64 of each of `rows[indices]`, 8 bytes little-endian each, in the order of `indices`.

    `rows` is uint8 [num_rows, row_bytes], each row contiguous. Raises IndexError for an index outside of it.
    """
    return b"".join(xxhash.xxh3_64_intdigest(rows[index]).to_bytes(CHECKSUM_BYTES, "little") for index in indices)
