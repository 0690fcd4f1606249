"""Weights of 32 or 16 bits in panels, as our own kernels read them; arithmetic is float32."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.linear.numba_products import PANEL, product
from engine.vectors import CODES


@dataclass(slots=True)
class PanelLinear:
    """`panels` [panels, in, PANEL], of the dtype that weights are held in; `columns` [panels, PANEL] the bias."""

    panels: Tensor
    columns: Tensor
    width: int  # of the result

    def __call__(self, rows: Tensor) -> Tensor:
        code = CODES[f"{self.panels.dtype}".removeprefix("torch.")]
        return multiplied(code, rows, self.panels, self.columns, self.width)


def multiplied(
    code: int, rows: Tensor, panels: Tensor, columns: Tensor, out: int, scales: Tensor | None = None
) -> Tensor:
    """[T, out] float32; `rows` as `code` has them, `scales` of them with INT8."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, steps, width = len(rows), panels.shape[1], len(panels) * PANEL
    result = torch.empty(count, width)
    product(
        count * steps * width,
        code,
        count,
        rows.data_ptr(),
        rows.stride(0) * rows.element_size(),
        steps,
        len(panels),
        panels.data_ptr(),
        columns.data_ptr(),
        columns.stride(0) * 4,
        result.data_ptr(),
        width * 4,
        0 if scales is None else scales.data_ptr(),
    )
    return result if out == width else result[:, :out].contiguous()


def in_panels(weight: Tensor, in_step: int) -> Tensor:
    """[out, in] -> [panels, in / in_step, PANEL, in_step], zeros where it ends."""
    out, depth = weight.shape
    padded = pad(weight, (0, -depth % in_step, 0, -out % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // in_step, in_step).transpose(1, 2).contiguous()


def in_columns(values: Tensor) -> Tensor:
    """[out] of floats -> [panels, PANEL]."""
    return pad(values, (0, -len(values) % PANEL)).view(-1, PANEL)


class Panels:
    """Weights rounded to `held_in` (float32, bfloat16 or float16) and no further. A row's product does not depend, to
    the bit, on the rows beside it."""

    def __init__(self, held_in: torch.dtype) -> None:
        kind = "packed" if held_in == torch.float32 else "packed (float32 arithmetic)"
        self.name = f"{held_in} {kind}".removeprefix("torch.")
        self._held_in = held_in

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Raises ValueError when a weight is not finite, or too large for what it is held in."""
        held = weight.to(self._held_in)
        if self._held_in != torch.float32 and not bool(held.isfinite().all()):
            raise ValueError(f"a weight is too large for {self.name}, or not finite; use --weight-dtype float32")
        offsets = torch.zeros(len(weight)) if bias is None else bias.float()
        return PanelLinear(in_panels(held, 1).squeeze(-1), in_columns(offsets).contiguous(), len(weight))
