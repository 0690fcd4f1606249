"""int8 weights in panels, one scale an output channel, and activations rounded to 8 bits while they are multiplied,
each row by a scale of its own (W8A8): exact integer products, on CPUs with an instruction for them (AVX-512 VNNI)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.linear.int8 import rounded_weights
from engine.linear.numba_products import INT8
from engine.linear.numba_rounding import LEVELS, ZERO_POINT, rounded
from engine.linear.panels import in_columns, in_panels, multiplied
from engine.vectors import LANES

IN_STEP = 4  # weights of a column that the instruction multiplies at once


@dataclass(slots=True)
class Int8PanelLinear:
    """`panels` [panels, in / 4, PANEL, 4] int8; `columns` [panels, 3, PANEL]: what sums begin with, as activations are
    unsigned (the bits of int32), the scales, and the bias."""

    panels: Tensor
    columns: Tensor
    width: int  # of the result

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        count, depth = rows.shape
        levels, scales = torch.empty(count, -(-depth // LANES) * LANES, dtype=torch.uint8), torch.empty(count)
        rounded(
            count * depth,
            count,
            depth,
            rows.data_ptr(),
            rows.stride(0) * 4,
            levels.data_ptr(),
            levels.stride(0),
            scales.data_ptr(),
        )
        return multiplied(INT8, levels, self.panels, self.columns, self.width, scales)


class Int8Panels:
    """A row's product does not depend, to the bit, on the rows beside it."""

    name = "int8"

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> Int8PanelLinear:
        """Raises ValueError when a weight is not finite."""
        levels, scales = rounded_weights(weight.float(), LEVELS)
        begin = (levels.sum(1, dtype=torch.int32) * -ZERO_POINT).view(torch.float32)
        offsets = torch.zeros(len(weight)) if bias is None else bias.float()
        columns = torch.stack([in_columns(values) for values in (begin, scales, offsets)], dim=1)
        return Int8PanelLinear(in_panels(levels, IN_STEP), columns, len(weight))
