"""Weights held in 16 bits, arithmetic in float32: half the bytes to read, which is what a step of few rows waits for.

FBGEMM's product widens float16 weights in registers, a tile for many rows, and multiplies and adds in float32. A
bfloat16 weight is a float16 one too once the matrix is scaled by a power of two: 8 significant bits fit into 11, and of
float16's range 32 powers of two below the largest weight are exact. So both dtypes are held, and computed, the same.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linear.fbgemm import packed_by_fbgemm

EXACT = 2.0**-23  # a loss, relative to a row's norm, that is below the rounding of float32 arithmetic
TOP_EXPONENT = 15  # float16 holds what is below 2 ** 16; one to spare
LARGEST_SCALE = 2.0**100  # its inverse times a row must stay a float32


@dataclass(slots=True)
class HalfLinear:
    packed: object  # FBGEMM's, weights and bias
    scale: float  # of rows, a power of two: the inverse of that of the weights

    def __call__(self, rows: Tensor) -> Tensor:
        scaled = rows if self.scale == 1.0 else rows * self.scale
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(scaled, self.packed)
        return product


class Half:
    """Weights are rounded to `held_in`, bfloat16 or float16, and no further (see `_scale`). A row's product does not
    depend on the rows beside it, to the bit, where it was tried (x86)."""

    def __init__(self, held_in: torch.dtype) -> None:
        self.name = f"{held_in} (float32 arithmetic)".removeprefix("torch.")
        self._held_in = held_in

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> HalfLinear:
        """Raises ValueError when a weight is too large for float16, or not finite."""
        held = weight.to(self._held_in).float()
        largest = float(held.abs().max())
        if not math.isfinite(largest):
            raise ValueError(f"a weight is too large for {self.name}, or not finite; use --weight-dtype float32")
        scale = _scale(held, largest)
        with packed_by_fbgemm():
            packed = torch.ops.quantized.linear_prepack_fp16(held * scale, None if bias is None else bias.float())
        return HalfLinear(packed, 1 / scale)


def _scale(weight: Tensor, largest: float) -> float:
    """The power of two that brings a matrix into float16's range; 1 where no row loses by going without.

    Beyond 2 ** -32 of the largest, weights become multiples of 2 ** -40 of it."""
    scale = min(LARGEST_SCALE, 2.0 ** (TOP_EXPONENT - math.frexp(largest)[1]))
    lost = torch.sub(weight, weight.half()).mul_(scale).norm(dim=1)
    return 1.0 if bool((lost <= EXACT * (weight * scale).norm(dim=1)).all()) else scale
