"""Settings that make glibc's heap reuse the memory of large tensors instead of mapping new memory each time.

By default, glibc maps each block of 32 MiB or more separately, and unmaps the block when it is freed. Each step with a
long chunk then touches new pages, which takes half as long as a large 8-bit matrix product. Threads other than the main
thread have heaps of 64 MiB pieces, which glibc also unmaps when they are free. Therefore, all threads share one heap.
"""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

M_TRIM_THRESHOLD = -1  # <malloc.h>
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGEST = 2**31 - 1  # the largest int
LINE = 64  # bytes


def share_one() -> None:
    """Make all threads share one heap. Call this function before starting threads."""
    _set(M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Map every large block separately, for loading weights.

    By default, once glibc has unmapped a block of up to 32 MiB, it takes later blocks of up to that size from the heap.
    Temporary copies then leave holes between the weights. These holes take up to 0.6 GB for 2 GB of weights.
    """
    _set(M_MMAP_THRESHOLD, 1 << 20)


def keep_large_blocks() -> None:
    """Make glibc take large blocks from the heap (before 2.35, only up to 32 MiB), and keep freed blocks there."""
    if any(_set(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)):
        _set(M_TRIM_THRESHOLD, LARGEST)


def empty(*shape: int) -> Tensor:
    """Return an uninitialized float32 tensor, aligned to a cache line, for temporary results of a layer.

    `torch.empty` requests aligned memory. glibc takes it only from holes as large as the tensor plus the alignment, so
    glibc would never reuse the hole of the previous layer's tensor. The heap would grow to twice the memory of a step.
    """
    size = 4 * math.prod(shape)
    memory = np.empty(size + LINE, np.uint8)
    skipped = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[skipped : skipped + size].view(np.float32).reshape(shape))


def _set(option: int, value: int) -> bool:
    """Change a setting of glibc. Return False if this failed, or if the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))


def give_back() -> None:
    """Return freed memory to the operating system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
