"""Which format weights are held in: the one asked for, as fast as this machine can multiply it."""

import torch

from engine.linear.interface import LinearFormat
from engine.linear.plain import Plain


def linear_on_cpu(weight_dtype: str, quantization: str) -> LinearFormat:
    """Raises ValueError when the two contradict each other."""
    if quantization != "none" and weight_dtype != "auto":
        raise ValueError(f"--weight-dtype {weight_dtype}: with --quantization {quantization} weights have 8 bits")
    return Plain(torch.float32)
