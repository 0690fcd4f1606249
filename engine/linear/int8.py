"""int8 weights, one scale an output channel, and activations rounded to 8 bits while they are multiplied (W8A8).

Each row of activations has a scale of its own: torch's `linear_dynamic` takes one for all of them, with which a single
large row (a model's first token is often one) costs all others their precision, and a row's result depends on its
neighbours. The exact integer product is FBGEMM's; oneDNN's for many rows, where it was measured to be faster.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.linear.fbgemm import packed_by_fbgemm

LEVELS = 127  # of a weight, and of an activation, on each side of 0
LEVELS_OF_7_BITS = 63
ZERO_POINT = 128  # activations are multiplied as unsigned bytes
SMALLEST = 1e-30  # of a row's largest value: a row of zeros is not divided by 0
WIDE_ROWS = 128  # from here on oneDNN's product may be the faster one
TRIAL_ROWS, TRIALS, GAIN = 256, 5, 0.95


@dataclass(slots=True)
class Int8Linear:
    packed: Any  # FBGEMM's, with the scales of output channels
    bias: Tensor | None
    uses_onednn: bool
    wide: tuple[Tensor, Tensor, Tensor] | None = None  # as oneDNN reads it: made when first needed, at warm-up

    def __call__(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=SMALLEST)
        multiply = _by_onednn if self.uses_onednn and len(rows) >= WIDE_ROWS else _by_fbgemm
        product = multiply(self, rows / largest).mul_(largest)
        return product if self.bias is None else product.add_(self.bias)


Product = Callable[[Int8Linear, Tensor], Tensor]  # of rows within -1 to 1, which it may spoil


def _by_fbgemm(linear: Int8Linear, unit_rows: Tensor) -> Tensor:
    product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        unit_rows, 1 / LEVELS, ZERO_POINT, linear.packed
    )
    return product


def _by_onednn(linear: Int8Linear, unit_rows: Tensor) -> Tensor:
    if linear.wide is None:
        linear.wide = _packed_for_onednn(linear.packed)
    rounded = unit_rows.mul_(LEVELS).add_(ZERO_POINT + 0.5).to(torch.uint8)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rounded, 1 / LEVELS, ZERO_POINT, *linear.wide, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _packed_for_onednn(packed: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A second copy of the weights."""
    with packed_by_fbgemm():
        weight = torch.ops.quantized.linear_unpack(packed)[0]
        scales, zero_points = weight.q_per_channel_scales().float(), weight.q_per_channel_zero_points()
        return torch.ops.onednn.qlinear_prepack(weight.int_repr(), None), scales, zero_points


class Int8:
    """A row's product does not depend on the rows beside it, except that two libraries round their last bit apart.

    `levels` of a weight on each side of 0 are as many as this CPU multiplies exactly. `uses_onednn` for many rows:
    None until the first matrix was timed."""

    name = "int8"

    def __init__(self, uses_onednn: bool | None = None) -> None:
        self.levels = LEVELS if _is_exact(_by_fbgemm) else LEVELS_OF_7_BITS
        onednn_is_exact = self.levels == LEVELS_OF_7_BITS or _is_exact(_by_onednn)
        self.uses_onednn = uses_onednn if onednn_is_exact else False

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        """Raises ValueError when a weight is not finite."""
        linear = _rounded(weight.float(), self.levels)
        if self.uses_onednn is None:
            self.uses_onednn = _onednn_is_faster(linear, weight.shape[1])
        linear.bias = None if bias is None else bias.float()
        linear.uses_onednn = self.uses_onednn
        return linear


def _rounded(weight: Tensor, levels: int) -> Int8Linear:
    scales = weight.abs().amax(1).clamp_(min=SMALLEST).div_(levels)
    if not bool(scales.isfinite().all()):
        raise ValueError("--quantization int8: a weight is not finite; mend the checkpoint")
    levels_of = (weight / scales[:, None]).round_().to(torch.int8)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    with packed_by_fbgemm():
        tensor = torch._make_per_channel_quantized_tensor(levels_of, scales.double(), zero_points, 0)
        return Int8Linear(torch.ops.quantized.linear_prepack(tensor, None), None, False)


@torch.inference_mode()
def _is_exact(multiply: Product) -> bool:
    """Instructions before VNNI add two products in 16 bits and saturate: seen by the largest values there are. Weights
    of 7 bits cannot reach that; activations, which have the outliers, keep their 8."""
    product = multiply(_rounded(torch.ones(64, 64), LEVELS), torch.ones(1, 64))
    return torch.allclose(product, torch.full_like(product, 64.0))


def _onednn_is_faster(linear: Int8Linear, width: int) -> bool:
    """Of the two exact products, timed in turns."""
    rows = torch.ones(TRIAL_ROWS, width)
    fbgemm_s = onednn_s = float("inf")
    for _ in range(1 + TRIALS):
        fbgemm_s = min(fbgemm_s, _seconds(_by_fbgemm, linear, rows))
        onednn_s = min(onednn_s, _seconds(_by_onednn, linear, rows))
    linear.wide = None
    return onednn_s < GAIN * fbgemm_s


def _seconds(multiply: Product, linear: Int8Linear, rows: Tensor) -> float:
    own_rows, start = rows.clone(), time.perf_counter()
    multiply(linear, own_rows)
    return time.perf_counter() - start
