"""Weights stored in panels for the numba kernels: in 32 or 16 bits, with float32 arithmetic, or in int8."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.cpu.int8 import LEVELS, ZERO_POINT, rounded_weights
from engine.cpu.malloc import empty
from engine.cpu.matmul_kernels import INT8, PANEL, product
from engine.cpu.simd import CODES, LANES

IN_STEP = 4  # int8 weights per column that one instruction multiplies


class PanelLinear:
    """A matrix stored in panels.

    `panels` [panels, steps, PANEL, ...] holds the weights in the format that `code` denotes. `columns`
    [panels, ..., PANEL], float32, holds the bias and, for INT8, initial sums and scales. The matrix has the shape
    [width, depth]. `is_exact` is true if the weights are not rounded, and each step has one weight per column.
    """

    def __init__(
        self, code: int, depth: int, width: int, panels: Tensor, columns: Tensor, *, is_exact: bool = False
    ) -> None:
        self.panels, self.columns = panels, columns  # references, since the kernel gets only addresses
        self.width = width
        self.is_exact = is_exact
        self.padded = len(panels) * PANEL
        steps, column_bytes = panels.shape[1], 4 * columns.stride(0)
        # The kernel's constant arguments; below, the work and the bytes of scratch memory per row.
        self.fixed = (code, depth, steps, len(panels), panels.data_ptr(), columns.data_ptr(), column_bytes)
        self.row_work = steps * self.padded
        self.row_scratch = 4 + -(-depth // LANES) * LANES if code == INT8 else 0

    def __call__(self, rows: Tensor) -> Tensor:
        assert rows.dtype == torch.float32, f"panels are multiplied by float32, but the activations are {rows.dtype}"
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        count = len(rows)
        result = empty(count, self.padded)
        scratch = torch.empty(count * self.row_scratch, dtype=torch.uint8) if self.row_scratch else result
        product(
            count * self.row_work, count, rows.data_ptr(), 4 * rows.stride(0), result.data_ptr(), 4 * self.padded,
            scratch.data_ptr(), *self.fixed,
        )  # fmt: skip
        return result if self.width == self.padded else result[:, : self.width].contiguous()

    def lookup(self) -> Callable[[Tensor], Tensor] | None:
        rows = self.panels.flatten(2).transpose(1, 2)  # [panels, PANEL, depth]
        return (lambda indices: rows[indices // PANEL, indices % PANEL]) if self.is_exact else None


def in_panels(weight: Tensor, in_step: int) -> Tensor:
    """Return a matrix [out, in] in the shape [panels, in / in_step, PANEL, in_step], padded with zeros."""
    out, depth = weight.shape
    missing = (0, -depth % in_step, 0, -out % PANEL)
    padded = pad(weight, missing) if any(missing) else weight  # `pad` would copy even if nothing is missing
    return padded.view(-1, PANEL, padded.shape[1] // in_step, in_step).transpose(1, 2).contiguous()


def in_columns(values: Tensor) -> Tensor:
    """Return float32 values [out] in the shape [panels, PANEL], padded with zeros."""
    return pad(values, (0, -len(values) % PANEL)).view(-1, PANEL)


class Panels:
    """The format of weights in float32, bfloat16 or float16. A row's product does not depend on the other rows."""

    def __init__(self, held_in: torch.dtype) -> None:
        kind = "packed" if held_in == torch.float32 else "packed (float32 arithmetic)"
        self.name = f"{held_in} {kind}".removeprefix("torch.")
        self._held_in = held_in

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Store `weight` in panels. Raises ValueError if a weight is not finite, or too large for the format."""
        held = weight.to(self._held_in)
        if self._held_in != torch.float32 and not bool(held.isfinite().all()):
            raise ValueError(f"a weight is too large for {self.name}, or not finite; use --weight-dtype float32")
        offsets = torch.zeros(len(weight)) if bias is None else bias.float()
        code, (width, depth) = CODES[f"{self._held_in}".removeprefix("torch.")], weight.shape
        panels, columns = in_panels(held, 1), in_columns(offsets).contiguous()
        is_exact = held.dtype in {weight.dtype, torch.float32}
        return PanelLinear(code, depth, width, panels, columns, is_exact=is_exact)

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        return Panels(torch.float32).make(weight, bias)


class Int8Panels:
    """The format of int8 weights with a scale per output channel, for CPUs with AVX-512 VNNI.

    Activations are rounded to 8 bits with a scale per row (W8A8), and integer products are exact. A row's product does
    not depend on the other rows.
    """

    name = "int8"

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Round `weight` and store it in panels. Raises ValueError if a weight is not finite."""
        levels, scales = rounded_weights(weight.float(), LEVELS)
        begin = (levels.sum(1, dtype=torch.int32) * -ZERO_POINT).view(torch.float32)  # for unsigned activations
        offsets = torch.zeros(len(weight)) if bias is None else bias.float()
        columns = torch.stack([in_columns(values) for values in (begin, scales, offsets)], dim=1)
        width, depth = weight.shape
        return PanelLinear(INT8, depth, width, in_panels(levels, IN_STEP), columns)

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        return Panels(torch.float32).make(weight, bias)
