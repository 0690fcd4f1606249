"""Checksums of KV rows, which detect rows that were damaged or swapped during the transfer."""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

CHECKSUM_BYTES = 8


def checksums(rows: NDArray[np.uint8], indices: Sequence[int]) -> bytes:
    """Return the xxh3-64 of each of `rows[indices]`, 8 bytes little-endian each, in the order of `indices`.

    `rows` is uint8 [num_rows, row_bytes], with contiguous rows. Raises IndexError for an index out of range.
    """
    return b"".join(xxhash.xxh3_64_intdigest(rows[index]).to_bytes(CHECKSUM_BYTES, "little") for index in indices)
