"""int8 weights in panels, one scale an output channel, and activations rounded to 8 bits while they are multiplied,
each row by a scale of its own (W8A8): exact integer products, on CPUs with an instruction for them (AVX-512 VNNI)."""

import torch
from torch import Tensor

from engine.cpu.matmul_kernels import INT8
from engine.cpu.panels import PanelLinear, in_columns, in_panels
from engine.linear.int8 import LEVELS, ZERO_POINT, rounded_weights

IN_STEP = 4  # weights of a column that the instruction multiplies at once


class Int8Panels:
    """A row's product does not depend, to the bit, on the rows beside it."""

    name = "int8"

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Raises ValueError when a weight is not finite."""
        levels, scales = rounded_weights(weight.float(), LEVELS)
        begin = (levels.sum(1, dtype=torch.int32) * -ZERO_POINT).view(torch.float32)  # as activations are unsigned
        offsets = torch.zeros(len(weight)) if bias is None else bias.float()
        columns = torch.stack([in_columns(values) for values in (begin, scales, offsets)], dim=1)
        width, depth = weight.shape
        return PanelLinear(INT8, depth, width, in_panels(levels, IN_STEP), columns)
