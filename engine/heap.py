"""The C library's heap, tuned for tensors: large ones are taken from memory that is there, not mapped anew each time.

glibc maps a block of 32 MiB and more on its own and gives it back when it is freed, so that every step that computes a
long chunk pays for touching it again: half of the time of a large product in 8 bits.
"""

import ctypes

M_TRIM_THRESHOLD = -1  # <malloc.h>
M_MMAP_THRESHOLD = -3
LARGEST = 2**31 - 1  # what an int holds


def keep_large_blocks() -> bool:
    """For the whole process, from now on. False where the C library is not glibc: nothing is changed there."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST))


def give_back() -> None:
    """What loading freed goes back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
