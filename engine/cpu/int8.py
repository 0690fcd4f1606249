"""int8 weights with a scale per output channel, multiplied by activations rounded to 8 bits (W8A8).

FBGEMM, a library in torch, computes the products. This format is for CPUs that lack the instructions for
`engine.cpu.panels.Int8Panels`. Each row of activations has its own scale. With one scale for all rows, as in
torch's `linear_dynamic`, a row with large values (often the first token) would reduce the precision of the others, and
a row's result would depend on the other rows.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.linear import Linear, LinearFormat, Plain

ENGINE = "fbgemm"
LEVELS = 127  # largest value to which weights and activations are rounded
LEVELS_OF_7_BITS = 63
ZERO_POINT = 128  # added to rounded activations, because they are multiplied as unsigned bytes
SMALLEST = 1e-30  # replaces a smaller maximum of a row or channel, to avoid division by 0


def has_fbgemm() -> bool:
    return ENGINE in torch.backends.quantized.supported_engines


@contextmanager
def packed_by_fbgemm() -> Iterator[None]:
    """Select FBGEMM as torch's quantized engine, and restore the setting of the process afterwards.

    Also suppresses torch's deprecation warning for quantized tensors, because FBGEMM packs only such tensors.
    """
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor.*are deprecated", UserWarning)
            yield
    finally:
        torch.backends.quantized.engine = before


@dataclass(slots=True)
class Int8Linear(Linear):
    packed: Any  # weights packed by FBGEMM, with the scales of output channels
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=SMALLEST)
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / largest, 1 / LEVELS, ZERO_POINT, self.packed
        )
        product.mul_(largest)
        return product if self.bias is None else product.add_(self.bias)


class Int8(LinearFormat):
    """The format of int8 weights for FBGEMM. A row's result may depend on the other rows, but only in its last bit.

    `levels` is the largest rounded weight that this CPU multiplies exactly.
    """

    name = "int8"

    def __init__(self) -> None:
        self.levels = LEVELS if _is_exact() else LEVELS_OF_7_BITS

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        """Round and pack `weight`. Raises ValueError if a weight is not finite."""
        return _packed(weight.float(), self.levels, None if bias is None else bias.float())

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Plain(torch.float32).make(weight, bias)


def rounded_weights(weight: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return the rounded weights, int8 [out, in], and the scale of each output channel, float32 [out].

    Raises ValueError if a weight is not finite.
    """
    scales = weight.abs().amax(1).clamp_(min=SMALLEST).div_(levels)
    if not bool(scales.isfinite().all()):
        raise ValueError("--quantization int8: a weight is NaN or infinite; use another checkpoint")
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def _packed(weight: Tensor, levels: int, bias: Tensor | None) -> Int8Linear:
    rounded, scales = rounded_weights(weight, levels)
    zero_points = torch.zeros(len(weight), dtype=torch.int64)
    with packed_by_fbgemm():
        tensor = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zero_points, 0)
        return Int8Linear(torch.ops.quantized.linear_prepack(tensor, None), bias)


@torch.inference_mode()
def _is_exact() -> bool:
    """Return whether this CPU multiplies the largest rounded weights and activations exactly.

    Without VNNI, a CPU adds two products in a 16-bit integer, which saturates if the sum is too large. Weights of 7
    bits avoid saturation. Activations keep 8 bits, because they have outliers.
    """
    product = _packed(torch.ones(64, 64), LEVELS, None)(torch.ones(1, 64))
    return torch.allclose(product, torch.full_like(product, 64.0))
