"""int8 weights, one scale an output channel, and activations rounded to 8 bits while they are multiplied (W8A8), by
FBGEMM's exact integer product as it comes with torch: for CPUs without the instructions that `int8_panels` needs.

Each row of activations has a scale of its own: torch's `linear_dynamic` takes one for all of them, with which a single
large row (a model's first token is often one) costs all others their precision, and a row's result depends on its
neighbours.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ENGINE = "fbgemm"
LEVELS = 127  # of a weight, and of an activation, on each side of 0
LEVELS_OF_7_BITS = 63
ZERO_POINT = 128  # activations are multiplied as unsigned bytes
SMALLEST = 1e-30  # of a row's largest value, or a channel's: zeros are not divided by 0


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


@dataclass(slots=True)
class Int8Linear:
    packed: Any  # FBGEMM's, with the scales of output channels
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=SMALLEST)
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / largest, 1 / LEVELS, ZERO_POINT, self.packed
        )
        product.mul_(largest)
        return product if self.bias is None else product.add_(self.bias)

    def lookup(self) -> None:
        return None


class Int8:
    """A row's product does not depend on the rows beside it, except that its last bit may be rounded apart.

    `levels` of a weight on each side of 0 are as many as this CPU multiplies exactly."""

    name = "int8"

    def __init__(self) -> None:
        self.levels = LEVELS if _is_exact() else LEVELS_OF_7_BITS

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        """Raises ValueError when a weight is not finite."""
        return _packed(weight.float(), self.levels, None if bias is None else bias.float())


def rounded_weights(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """int8 [out, in], and the scale of each output channel. Raises ValueError when a weight is not finite."""
    scales = weight.abs().amax(1).clamp_(min=SMALLEST).div_(levels)
    if not bool(scales.isfinite().all()):
        raise ValueError("--quantization int8: a weight is not finite; mend the checkpoint")
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _packed(weight: Tensor, levels: int, bias: Tensor | None) -> Int8Linear:
    rounded, scales = rounded_weights(weight, levels)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    with packed_by_fbgemm():
        tensor = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zero_points, 0)
        return Int8Linear(torch.ops.quantized.linear_prepack(tensor, None), bias)


@torch.inference_mode()
def _is_exact() -> bool:
    """Instructions before VNNI add two products in 16 bits and saturate: seen by the largest values there are. Weights
    of 7 bits cannot reach that; activations, which have the outliers, keep their 8."""
    product = _packed(torch.ones(64, 64), LEVELS, None)(torch.ones(1, 64))
    return torch.allclose(product, torch.full_like(product, 64.0))
