"""FBGEMM as it comes with torch on x86: whether it is here, and how to pack weights for it without a warning."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ENGINE = "fbgemm"


def has_fbgemm() -> bool:
    return ENGINE in torch.backends.quantized.supported_engines


@contextmanager
def packed_by_fbgemm() -> Iterator[None]:
    """torch packs for the engine that is set for the whole process; and it warns that quantized tensors will go, which
    FBGEMM's packing takes as its argument. Restores the engine."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor.*are deprecated", UserWarning)
            yield
    finally:
        torch.backends.quantized.engine = before
