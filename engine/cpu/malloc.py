"""The C library's heap, tuned for tensors: large ones are taken from memory that is there, not mapped anew each time.

glibc maps a block of 32 MiB and more on its own and gives it back when it is freed, so that every step that computes a
long chunk pays for touching it again: half of the time of a large product in 8 bits. A thread other than the main one,
such as the engine's, has a heap of its own, in pieces of 64 MiB given back likewise: so all share the main one.
"""

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

M_TRIM_THRESHOLD = -1  # <malloc.h>
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGEST = 2**31 - 1  # what an int holds
LINE = 64  # bytes


def share_one() -> bool:
    """For all threads of the process; to be called before there are others. False where the C library is not glibc."""
    return _set(M_ARENA_MAX, 1)


def map_large_blocks() -> bool:
    """While weights are loaded: each large block is mapped on its own. glibc takes those of up to 32 MiB from the heap
    once it has seen one freed, and a copy that is freed between blocks that stay leaves a hole: by chance 0.6 GB of
    holes beside 2 GB of weights. False where the C library is not glibc."""
    return _set(M_MMAP_THRESHOLD, 1 << 20)


def keep_large_blocks() -> bool:
    """For the whole process, from now on. glibc before 2.35 takes no more than 32 MiB. False where the C library is not
    glibc: nothing is changed there."""
    return any(_set(M_MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25)) and _set(M_TRIM_THRESHOLD, LARGEST)


def empty(*shape: int) -> Tensor:
    """float32, with nothing in it, from a line of the cache on: for what a long step makes and frees in each layer.

    torch asks for aligned memory, for which glibc looks for a hole that is larger by the alignment: it never finds the
    one that the same tensor of the layer before has left, and a step's part of the heap grows to twice what it uses.
    """
    size = 4 * math.prod(shape)
    memory = np.empty(size + LINE, np.uint8)
    skipped = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[skipped : skipped + size].view(np.float32).reshape(shape))


def _set(option: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(option, value))


def give_back() -> None:
    """What loading freed goes back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
