"""float32 weights laid out once, at load, in the order that oneDNN's kernels read them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# What oneDNN lays the weights out for. Measured on AVX2 and AVX-512: the layout for 1 row is two to three times slower
# at 2 to 32 rows, those for 32 to 2,048 rows are the same, as fast for 1 row, and faster than MKL's at any number.
ASSUMED_ROWS = 32


@dataclass(slots=True)
class PackedLinear:
    weight: Tensor  # opaque
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product


class Packed:
    """A row's product does not depend on the rows beside it, to the bit, where it was tried (x86)."""

    name = "float32 packed"

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.float(), ASSUMED_ROWS)
        return PackedLinear(packed, None if bias is None else bias.float())
