"""Which format weights are held in: the one asked for, as fast as this machine can multiply it."""

import torch
from torch import Tensor

from engine.linear.fbgemm import has_fbgemm
from engine.linear.half import Half
from engine.linear.int8 import Int8
from engine.linear.interface import Linear, LinearFormat
from engine.linear.packed import Packed
from engine.linear.plain import Plain

SIXTEEN_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def linear_on_cpu(weight_dtype: str, quantization: str, fbgemm: bool | None = None) -> LinearFormat:
    """`fbgemm`: whether torch has it here (None: as it is). Raises ValueError when the two settings contradict each
    other, or this CPU cannot do what is asked."""
    fbgemm = has_fbgemm() if fbgemm is None else fbgemm
    if quantization != "none" and weight_dtype != "auto":
        raise ValueError(f"--weight-dtype {weight_dtype}: with --quantization {quantization} weights have 8 bits")
    if (quantization == "int8" or weight_dtype in SIXTEEN_BITS) and not fbgemm:
        asked = "--quantization int8" if quantization == "int8" else f"--weight-dtype {weight_dtype}"
        raise ValueError(f"{asked}: needs an x86 CPU with AVX2 (torch has no FBGEMM here); leave it out")
    if quantization == "int8":
        return Int8()
    if weight_dtype in SIXTEEN_BITS:
        return Half(SIXTEEN_BITS[weight_dtype])
    if not fbgemm or not torch._C._has_mkldnn:  # other CPUs have other kernels, not measured
        return Plain(torch.float32)
    return AsStored(Packed()) if weight_dtype == "auto" else Packed()


class AsStored:
    """Weights that a checkpoint has in 16 bits stay so: the same numbers in half the memory, read in half the time.
    Others are float32. `name` is that of the last matrix made: a checkpoint seldom mixes them."""

    def __init__(self, floats: LinearFormat) -> None:
        self.name = floats.name
        self._floats = floats
        self._halves = {dtype: Half(dtype) for dtype in SIXTEEN_BITS.values()}

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        chosen = self._halves.get(weight.dtype, self._floats)
        self.name = chosen.name
        return chosen.make(weight, bias)
