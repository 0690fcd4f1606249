"""Settings of glibc's heap for tensors, so that large blocks are reused instead of mapped again each time.

glibc maps each block of 32 MiB or more separately, and unmaps it when it is freed. Each step with a long chunk then
touches new pages, which takes half the time of a large 8-bit product. Threads other than the main one have their own
heaps, whose pieces of 64 MiB are also unmapped. Therefore all threads share the main heap.
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
    """Make all threads share one heap. Call it before starting threads."""
    _set(M_ARENA_MAX, 1)


def map_large_blocks() -> None:
    """Map every large block separately, for loading weights.

    By default, glibc takes blocks of up to 32 MiB from the heap after one was freed. Temporary copies then leave holes
    between the weights: up to 0.6 GB for 2 GB of weights.
    """
    _set(M_MMAP_THRESHOLD, 1 << 20)


def keep_large_blocks() -> None:
    """From now on, take large blocks from the heap, and keep freed ones. glibc before 2.35 limits them to 32 MiB."""
    if any(_set(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)):
        _set(M_TRIM_THRESHOLD, LARGEST)


def empty(*shape: int) -> Tensor:
    """Return an uninitialized float32 tensor, aligned to a cache line, for temporary results of a layer.

    torch requests aligned memory. For this, glibc needs a hole as large as the tensor plus the alignment, so it never
    reuses the hole that the previous layer's tensor left. The heap would grow to twice the memory of a step.
    """
    size = 4 * math.prod(shape)
    memory = np.empty(size + LINE, np.uint8)
    skipped = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[skipped : skipped + size].view(np.float32).reshape(shape))


def _set(option: int, value: int) -> bool:
    """Change a setting of glibc. Return whether this succeeded; other C libraries do not have these settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))


def give_back() -> None:
    """Return freed memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
