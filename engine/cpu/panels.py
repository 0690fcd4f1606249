"""Weights in panels (see `engine.cpu.matmul_kernels`): floats of 32 or 16 bits, 4-bit codes, or int8."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.cpu.grouped_kernels import expert_grouped_product, grouped_product
from engine.cpu.int8 import LEVELS, ZERO_POINT, rounded_weights
from engine.cpu.malloc import empty
from engine.cpu.matmul_kernels import INT8, PANEL, expert_product, product
from engine.cpu.simd import CODES, LANES
from engine.formats.forms import ChannelWeight, GroupedWeight, QuantizedWeight
from engine.linear import ExpertLinear, Linear, LinearFormat, SeparateExperts

KERNEL_INPUTS = 16  # in `GroupedPanels`, the number of inputs of a group must be a multiple of this
IN_STEP = 4  # number of int8 weights of each column that one instruction multiplies


class PanelLinear(Linear):
    """A matrix stored in panels.

    `panels` [panels, steps, PANEL, ...] holds the weights in the format that `code` denotes. `columns`
    [panels, ..., PANEL], float32, holds the bias and, for INT8, initial sums and scales. The matrix has the shape
    [width, depth]. `is_exact` is true if no weight was rounded, and each step holds only one weight of each column.
    """

    def __init__(
        self, code: int, depth: int, width: int, panels: Tensor, columns: Tensor, *, is_exact: bool = False
    ) -> None:
        self.kernel, self.expert_kernel = product, expert_product
        self.panels, self.columns = panels, columns  # keeps the memory allocated: the kernel has only addresses
        self.width = width
        self.is_exact = is_exact
        self.padded = len(panels) * PANEL
        steps, column_bytes = panels.shape[1], 4 * columns.stride(0)
        # The kernel's constant arguments. For the experts of a layer, only the two addresses differ.
        self.fixed = (code, depth, steps, len(panels), panels.data_ptr(), columns.data_ptr(), column_bytes)
        self.row_work = steps * self.padded  # elementary operations for each row
        # Bytes of scratch memory for each row.
        self.row_scratch = 4 + -(-depth // LANES) * LANES if code == INT8 else 0

    def __call__(self, rows: Tensor) -> Tensor:
        assert rows.dtype == torch.float32, f"panels are multiplied by float32, but the activations are {rows.dtype}"
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        count = len(rows)
        result = empty(count, self.padded)
        scratch = torch.empty(count * self.row_scratch, dtype=torch.uint8) if self.row_scratch else result
        self.kernel(
            count * self.row_work, count, rows.data_ptr(), 4 * rows.stride(0), result.data_ptr(), 4 * self.padded,
            scratch.data_ptr(), *self.fixed,
        )  # fmt: skip
        return result if self.width == self.padded else result[:, : self.width].contiguous()

    def lookup(self) -> Callable[[Tensor], Tensor] | None:
        rows = self.panels.flatten(2).transpose(1, 2)  # [panels, PANEL, depth]
        return (lambda indices: rows[indices // PANEL, indices % PANEL]) if self.is_exact else None


class GroupedPanels(PanelLinear):
    """A matrix of grouped 4-bit codes in panels (see `engine.cpu.grouped_kernels`), with float32 arithmetic."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        (width, depth), groups = weight.shape, weight.scales.shape[1]
        words = in_panels(weight.codes.contiguous().view(torch.int32), 1).view(-1, groups, weight.group // 8, PANEL)
        heads = [weight.scales] if weight.zeros is None else [weight.scales, weight.zeros]
        parts = [in_panels(one.float(), 1).view(len(words), groups, 1, PANEL).view(torch.int32) for one in heads]
        panels = torch.cat([*parts, words], dim=2).flatten(1, 2)
        columns = in_columns(torch.zeros(width) if bias is None else bias.float()).contiguous()
        super().__init__(0, depth, width, panels, columns)
        self.kernel, self.expert_kernel = grouped_product, expert_grouped_product
        fixed = (groups, words.shape[2], len(parts) - 1, len(panels), panels.data_ptr(), columns.data_ptr())
        self.fixed = (*fixed, _table(weight.table).data_ptr())
        self.row_work = depth * self.padded
        self.row_scratch = 4 * groups if weight.zeros is not None else 0


@cache
def _table(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)


class ExpertPanels:
    """The matrices of a layer's experts in panels, multiplied by one call."""

    def __init__(self, each: list[PanelLinear]) -> None:
        """All matrices in `each` must have the same kernel and the same constant arguments, except for addresses."""
        self._each, self.like = each, each[0]
        self._matrices = torch.tensor([one.fixed[4:6] for one in each])

    def fixed(self, counts_at: int) -> tuple[int, ...]:
        """Return the kernel's arguments that follow the scratch memory. `counts_at` is the address of `counts`."""
        fixed = self.like.fixed
        return (*fixed[:4], self._matrices.data_ptr(), counts_at, fixed[6], len(self._each))

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert rows.dtype == torch.float32, f"panels are multiplied by float32, but the activations are {rows.dtype}"
        like, count = self.like, len(rows)
        rows, counts = rows.contiguous(), counts.contiguous()
        result = empty(count, like.padded)
        scratch = torch.empty(count * like.row_scratch, dtype=torch.uint8) if like.row_scratch else result
        like.expert_kernel(
            count * like.row_work, count, rows.data_ptr(), 4 * rows.stride(0), result.data_ptr(), 4 * like.padded,
            scratch.data_ptr(), *self.fixed(counts.data_ptr()),
        )  # fmt: skip
        return result if like.width == like.padded else result[:, : like.width].contiguous()


def experts_in_panels(each: list[Linear]) -> ExpertLinear:
    """Return a layer that computes all experts in one call, or one expert per call if their formats differ."""
    panels = [one for one in each if isinstance(one, PanelLinear)]
    kinds = {(one.kernel.address, *one.fixed[:4], one.fixed[6]) for one in panels}
    return ExpertPanels(panels) if len(panels) == len(each) and len(kinds) == 1 else SeparateExperts(each)


@dataclass(slots=True)
class ReorderedLinear(Linear):
    """A matrix whose columns are not in the order of the inputs, as after GPTQ with act-order."""

    inner: PanelLinear
    order: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return self.inner(rows[:, self.order])


def grouped_linear(weight: GroupedWeight, bias: Tensor | None) -> PanelLinear | ReorderedLinear:
    """Store 4-bit codes in panels, or float32 weights if the kernel does not support the size of the groups."""
    if weight.group % KERNEL_INPUTS:
        return Panels(torch.float32).make(weight.dense(), bias)
    linear = GroupedPanels(weight, bias)
    return linear if weight.order is None else ReorderedLinear(linear, weight.order)


def in_panels(weight: Tensor, in_step: int) -> Tensor:
    """Return a matrix [out, in] in the shape [panels, in / in_step, PANEL, in_step], padded with zeros."""
    out, depth = weight.shape
    missing = (0, -depth % in_step, 0, -out % PANEL)
    padded = pad(weight, missing) if any(missing) else weight  # `pad` would copy even if nothing is missing
    return padded.view(-1, PANEL, padded.shape[1] // in_step, in_step).transpose(1, 2).contiguous()


def in_columns(values: Tensor) -> Tensor:
    """Return float32 values [out] in the shape [panels, PANEL], padded with zeros."""
    return pad(values, (0, -len(values) % PANEL)).view(-1, PANEL)


class PanelFormat(LinearFormat):
    """A format that stores weights in panels. Matrices made by `make_exact` are kept in float32."""

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        return Panels(torch.float32).make(weight, bias)

    def of_experts(self, each: list[Linear]) -> ExpertLinear:
        return experts_in_panels(each)


class Panels(PanelFormat):
    """The format of weights in float32, bfloat16 or float16. A row's product does not depend on the other rows."""

    def __init__(self, held_in: torch.dtype) -> None:
        kind = "packed" if held_in == torch.float32 else "packed (float32 arithmetic)"
        self.name = f"{held_in} {kind}".removeprefix("torch.")
        self._held_in = held_in

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Store `weight` in panels. Raises ValueError if a weight becomes infinite or NaN in a 16-bit format."""
        held = weight.to(self._held_in)
        if self._held_in != torch.float32 and not bool(held.isfinite().all()):
            raise ValueError(f"a weight is NaN or too large for {self.name}; use --weight-dtype float32")
        offsets = torch.zeros(len(weight)) if bias is None else bias.float()
        code, (width, depth) = CODES[f"{self._held_in}".removeprefix("torch.")], weight.shape
        panels, columns = in_panels(held, 1), in_columns(offsets).contiguous()
        is_exact = held.dtype in {weight.dtype, torch.float32}
        return PanelLinear(code, depth, width, panels, columns, is_exact=is_exact)


class Int8Panels(PanelFormat):
    """The format of int8 weights with a scale per output channel, for CPUs with AVX-512 VNNI.

    Activations are rounded to 8 bits with a scale per row (W8A8), and integer products are exact. A row's product does
    not depend on the other rows.
    """

    name = "int8"

    @torch.inference_mode()
    def make(self, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """Round `weight` and store it in panels. Raises ValueError if a weight is not finite."""
        return self._made(*rounded_weights(weight.float(), LEVELS), bias)

    def _made(self, levels: Tensor, scales: Tensor, bias: Tensor | None) -> PanelLinear:
        begin = (levels.sum(1, dtype=torch.int32) * -ZERO_POINT).view(torch.float32)  # undoes ZERO_POINT
        offsets = torch.zeros(len(levels)) if bias is None else bias.float()
        columns = torch.stack([in_columns(values) for values in (begin, scales, offsets)], dim=1)
        width, depth = levels.shape
        return PanelLinear(INT8, depth, width, in_panels(levels, IN_STEP), columns)

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> PanelLinear:
        """Keep the rounded weights of an int8 matrix, and round the weights of any other matrix."""
        if not isinstance(weight, ChannelWeight):
            return self.make(weight.dense(), bias)
        return self._made(weight.levels, weight.scales, bias)
