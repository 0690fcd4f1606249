"""Weights in panels, as our own kernels read them, of 32 or 16 bits here; arithmetic is float32."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.cpu.malloc import empty
from engine.cpu.matmul_kernels import INT8, PANEL, product
from engine.cpu.simd import CODES, LANES
from engine.linear.interface import Lookup


class PanelLinear:
    """`panels` [panels, steps, PANEL, ...], the weights as the kernel's `code` has them; `columns` [panels, ..., PANEL]
    float32, the bias and whatever else `code` wants. The result has `width` columns, of a matrix of depth `depth`.
    `is_exact`: a step is one weight, as it was given."""

    def __init__(
        self, code: int, depth: int, width: int, panels: Tensor, columns: Tensor, *, is_exact: bool = False
    ) -> None:
        self.panels, self.columns = panels, columns  # kept, as the kernel gets their addresses
        self.width = width
        self.is_exact = is_exact
        self.padded = len(panels) * PANEL
        steps, column_bytes = panels.shape[1], 4 * columns.stride(0)
        # The last of the kernel's values, and of each row the work and the bytes of scratch memory.
        self.fixed = (code, depth, steps, len(panels), panels.data_ptr(), columns.data_ptr(), column_bytes)
        self.row_work = steps * self.padded
        self.row_scratch = 4 + -(-depth // LANES) * LANES if code == INT8 else 0

    def __call__(self, rows: Tensor) -> Tensor:
        assert rows.dtype == torch.float32, f"panels are multiplied by float32, the activations are {rows.dtype}"
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        count = len(rows)
        result = empty(count, self.padded)
        scratch = torch.empty(count * self.row_scratch, dtype=torch.uint8) if self.row_scratch else result
        product(
            count * self.row_work,
            count,
            rows.data_ptr(),
            4 * rows.stride(0),
            result.data_ptr(),
            4 * self.padded,
            scratch.data_ptr(),
            *self.fixed,
        )
        return result if self.width == self.padded else result[:, : self.width].contiguous()

    def lookup(self) -> Lookup | None:
        rows = self.panels.flatten(2).transpose(1, 2)  # [panels, PANEL, depth]
        return (lambda indices: rows[indices // PANEL, indices % PANEL]) if self.is_exact else None


def in_panels(weight: Tensor, in_step: int) -> Tensor:
    """[out, in] -> [panels, in / in_step, PANEL, in_step], zeros where it ends."""
    out, depth = weight.shape
    missing = (0, -depth % in_step, 0, -out % PANEL)
    padded = pad(weight, missing) if any(missing) else weight  # which would copy it all the same
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
        code, (width, depth) = CODES[f"{self._held_in}".removeprefix("torch.")], weight.shape
        panels, columns = in_panels(held, 1), in_columns(offsets).contiguous()
        is_exact = held.dtype in {weight.dtype, torch.float32}
        return PanelLinear(code, depth, width, panels, columns, is_exact=is_exact)
