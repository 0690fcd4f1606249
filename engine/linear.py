"""Weight matrices: the interface, plain tensors multiplied by torch, and the choice of a format for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from engine.cpu import why_not_compiled

SIXTEEN_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Lookup = Callable[[Tensor], Tensor]  # indices of outputs, int64 [R] -> their weights, [R, in]


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product, [T, in] -> [T, out] in the dtype of `rows`, plus the bias if there is one."""

    def lookup(self) -> Lookup | None:
        """Return a lookup of the original weights, so that a tied embedding needs no copy. None if they are rounded."""


class LinearFormat(Protocol):
    """How weights are stored and multiplied. `name` is shown to users, for example "float32 packed"."""

    name: str

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Convert `weight` [out, in], in the checkpoint's dtype, and `bias` [out]. May keep references to both."""


@dataclass(slots=True)
class PlainLinear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def lookup(self) -> Lookup:
        return partial(embedding, weight=self.weight)


class Plain:
    def __init__(self, held_in: torch.dtype) -> None:
        self.name = f"{held_in}".removeprefix("torch.")
        self._held_in = held_in

    def make(self, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        return PlainLinear(weight.to(self._held_in), None if bias is None else bias.to(self._held_in))


def linear_on_cpu(weight_dtype: str, quantization: str) -> LinearFormat:
    """Return the format for `--weight-dtype` and `--quantization`.

    Raises ValueError if the settings contradict each other or this machine does not support them.
    """
    why_not = why_not_compiled()
    if quantization != "none" and weight_dtype != "auto":
        raise ValueError(f"--weight-dtype {weight_dtype}: with --quantization {quantization} weights have 8 bits")
    if quantization == "int8":
        return _int8(why_not)
    if why_not:
        if weight_dtype in SIXTEEN_BITS:
            raise ValueError(f"--weight-dtype {weight_dtype}: needs compiled kernels, which cannot run here: {why_not}")
        return Plain(torch.float32)
    from engine.cpu.panels import Panels

    if weight_dtype in SIXTEEN_BITS:
        return Panels(SIXTEEN_BITS[weight_dtype])
    return AsStored() if weight_dtype == "auto" else Panels(torch.float32)


def _int8(why_not: str) -> LinearFormat:
    if not why_not:
        from engine.cpu.matmul_kernels import HAS_INT8

        if HAS_INT8:
            from engine.cpu.panels import Int8Panels

            return Int8Panels()
    from engine.cpu.int8 import Int8, has_fbgemm

    if not has_fbgemm():
        raise ValueError(
            "--quantization int8: needs an x86 CPU with AVX2 (torch has no FBGEMM on this machine); omit it"
        )
    return Int8()


class AsStored:
    """Keeps 16-bit weights in 16 bits, which halves the memory and the time to read them. Others become float32.

    `name` is the format of the last matrix, since a checkpoint rarely mixes dtypes.
    """

    def __init__(self) -> None:
        from engine.cpu.panels import Panels

        self._formats = {dtype: Panels(dtype) for dtype in (torch.float32, *SIXTEEN_BITS.values())}
        self._floats = self._formats[torch.float32]
        self.name = self._floats.name

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        chosen = self._formats.get(weight.dtype, self._floats)
        self.name = chosen.name
        return chosen.make(weight, bias)
