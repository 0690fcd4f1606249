"""Grouped 4-bit weights on a GPU: products read the codes."""

from dataclasses import dataclass
from math import gcd

import torch
import triton
from torch import Tensor

from engine.cuda.grouped_kernels import grouped_product
from engine.formats.forms import GroupedWeight, QuantizedWeight
from engine.linear import Linear, Plain

LEAST_DEPTH, MOST_DEPTH = 16, 64  # inputs that one step of the kernel multiplies
FEW_ROWS, MANY_ROWS = 16, 64  # rows of a tile, for decodes and for prompts
TILE_COLUMNS = 64


@dataclass(slots=True)
class TritonGroupedLinear:
    weight: GroupedWeight
    table: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        weight, (out, width) = self.weight, self.weight.shape
        rows = rows if weight.order is None else rows[:, weight.order]
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        result = torch.empty(len(rows), out, dtype=rows.dtype, device=rows.device)
        exact = rows.dtype == torch.float32  # computed without tensor cores, in tiles that fit into the registers
        tile = FEW_ROWS if exact or len(rows) <= FEW_ROWS else MANY_ROWS
        columns, depth = (TILE_COLUMNS // 2, LEAST_DEPTH) if exact else (TILE_COLUMNS, gcd(weight.group, MOST_DEPTH))
        if len(rows):
            grouped_product[(triton.cdiv(out, columns), triton.cdiv(len(rows), tile))](
                rows, rows.stride(0), weight.codes, self.table, weight.scales,
                weight.scales if weight.zeros is None else weight.zeros, self.table if self.bias is None else self.bias,
                result, len(rows), out, WIDTH=width, GROUP=weight.group, HAS_ZEROS=weight.zeros is not None,
                HAS_BIAS=self.bias is not None, BLOCK_M=tile, BLOCK_N=columns,
                BLOCK_K=depth, num_warps=4,
            )  # fmt: skip
        return result

    def lookup(self) -> None:
        return None


class PlainOrGrouped(Plain):
    """The format of plain tensors, and of 4-bit codes if the kernel supports the size of their groups."""

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if not isinstance(weight, GroupedWeight) or gcd(weight.group, MOST_DEPTH) < LEAST_DEPTH:
            return super().make_quantized(weight, bias)
        table = torch.tensor(weight.table, device=weight.codes.device)
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        held = GroupedWeight(weight.codes.contiguous(), weight.table, weight.scales.contiguous(), zeros, weight.order)
        return TritonGroupedLinear(held, table, bias)
