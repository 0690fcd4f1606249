"""Errors while a node starts. Each is converted to one line with the stage, the cause and the setting to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Parts of the messages of torch's CPU allocator, cuBLAS, torch's CUDA errors and the driver when memory is short.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "OUT_OF_MEMORY")
MAX_LENGTH = 400


@contextmanager
def stage(doing: str, if_too_large: str, otherwise: str = "") -> Iterator[None]:
    """Convert exceptions of torch, numpy, Triton and the driver inside the block to ValueError with one line.

    `doing` is the stage, with sizes. `if_too_large` is the fix if memory is short, and `otherwise` the fix for other
    errors. ValueError and OSError pass, since they are already one line, except if the driver has too little memory.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        too_large = is_out_of_memory(error)
        if isinstance(error, OSError) and (not too_large or error.errno is not None):
            raise
        fix = if_too_large if too_large else otherwise
        raise ValueError(f"{doing}: {cause(error)}" + (f": {fix}" if fix else "")) from error


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in OUT_OF_MEMORY)


def cause(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, without torch's advice on its allocator."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = (
        text[max(0, text.find("DefaultCPUAllocator")) :]
        .partition(" Of the allocated memory")[0]
        .removesuffix(".")[:MAX_LENGTH]
    )
    kind = type(error).__name__.removeprefix("_")
    return f"{text} ({kind})" if text else kind
