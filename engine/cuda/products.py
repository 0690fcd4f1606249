"""Matrix products on a GPU by Baton's own kernel. The kernel reads the codes of grouped 4-bit weights, and one launch
multiplies rows by the matrices of all experts of a layer.

Experimental: the tile sizes for 4-bit codes are not tuned.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
from torch import Tensor

from engine.cuda.product_kernels import product
from engine.formats.forms import GroupedWeight, QuantizedWeight
from engine.linear import ExpertLinear, Linear, Plain, PlainLinear

LEAST_DEPTH, MOST_DEPTH = 16, 64  # least and greatest number of columns that one step of the kernel multiplies
FEW_ROWS, MANY_ROWS = 16, 64  # number of rows in a tile: FEW_ROWS for decodes, MANY_ROWS for prompts
TILE_COLUMNS = 64


def multiply(
    rows: Tensor,
    weight: Tensor | GroupedWeight,
    table: Tensor,
    bias: Tensor | None,
    counts: Tensor | None = None,
) -> Tensor:
    """Multiply `rows` [N, in] by a matrix [out, in], or by the matrices of experts (see `ExpertLinear`), and add the
    bias.

    If `counts` is given, the first dimension of the tensors in `weight` is the expert. `table` maps a code to a value.
    """
    grouped = weight if isinstance(weight, GroupedWeight) else None
    matrix = weight.codes if isinstance(weight, GroupedWeight) else weight
    count, experts, out, width = len(rows), 0 if counts is None else len(counts), matrix.shape[-2], rows.shape[1]
    zeros, order = (None, None) if grouped is None else (grouped.zeros, grouped.order)
    if counts is None and order is not None:  # reorder once: a gather in each tile would load without coalescing
        rows, order = rows[:, order], None
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    result = torch.empty(count, out, dtype=rows.dtype, device=rows.device)
    if not count:
        return result
    group = 0 if grouped is None else width // grouped.scales.shape[-1]
    exact = rows.dtype == torch.float32  # float32 is computed without tensor cores, in tiles that fit into registers
    tile = FEW_ROWS if exact or count <= FEW_ROWS * max(1, experts) else MANY_ROWS
    columns, depth = (TILE_COLUMNS // 2, LEAST_DEPTH) if exact else (TILE_COLUMNS, gcd(group, MOST_DEPTH))
    tiles = min(count, count // tile + experts) if experts else triton.cdiv(count, tile)
    product[(triton.cdiv(out, columns), tiles)](
        rows, rows.stride(0), matrix, table, table if grouped is None else grouped.scales,
        table if zeros is None else zeros, table if order is None else order, table if bias is None else bias,
        table if counts is None else counts, result, count, out, WIDTH=width, GROUP=group,
        HAS_ZEROS=zeros is not None, HAS_BIAS=bias is not None, ORDERED=order is not None, EXPERTS=experts,
        BLOCK_E=triton.next_power_of_2(experts or 1), BLOCK_M=tile, BLOCK_N=columns, BLOCK_K=depth, num_warps=4,
    )  # fmt: skip
    return result


@dataclass(slots=True)
class TritonGroupedLinear(Linear):
    weight: GroupedWeight
    table: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return multiply(rows, self.weight, self.table, self.bias)


@dataclass(slots=True)
class TritonExperts:
    """The matrices of a layer's experts. One launch multiplies all of them."""

    weight: Tensor | GroupedWeight
    table: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        return multiply(rows, self.weight, self.table, self.bias, counts)


class TritonFormat(Plain):
    """Keeps 4-bit codes if the kernel supports the size of their groups, and makes all other weights plain tensors."""

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        if not isinstance(weight, GroupedWeight) or gcd(weight.group, MOST_DEPTH) < LEAST_DEPTH:
            return super().make_quantized(weight, bias)
        table = torch.tensor(weight.table, device=weight.codes.device)
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        held = GroupedWeight(weight.codes.contiguous(), weight.table, weight.scales.contiguous(), zeros, weight.order)
        return TritonGroupedLinear(held, table, bias)

    def of_experts(self, each: list[Linear]) -> ExpertLinear:
        """Return an `ExpertLinear` that takes one launch, or one per expert if the matrices have different forms."""
        plain = [one for one in each if isinstance(one, PlainLinear)]
        grouped = [one for one in each if isinstance(one, TritonGroupedLinear)]
        weight: Tensor | GroupedWeight
        if len(plain) == len(each):
            weight, table = torch.stack([one.weight for one in plain]), plain[0].weight
        elif len(grouped) == len(each) and len({(one.weight.table, one.weight.group) for one in grouped}) == 1:
            weight, table = _stacked([one.weight for one in grouped]), grouped[0].table
        else:
            return super().of_experts(each)
        biases = [one.bias for one in plain] + [one.bias for one in grouped]
        given = [bias for bias in biases if bias is not None]
        return TritonExperts(weight, table, torch.stack(given) if given else None)


def _stacked(each: list[GroupedWeight]) -> GroupedWeight:
    """Stack the codes, scales, zeros and orders of all experts' matrices. Some matrices may lack zeros or an order."""
    zeros = order = None
    if any(one.zeros is not None for one in each):
        zeros = torch.stack([torch.zeros_like(one.scales) if one.zeros is None else one.zeros for one in each])
    if any(one.order is not None for one in each):
        inputs = torch.arange(each[0].shape[1], device=each[0].codes.device)
        order = torch.stack([inputs if one.order is None else one.order for one in each])
    codes, scales = torch.stack([one.codes for one in each]), torch.stack([one.scales for one in each])
    return GroupedWeight(codes, each[0].table, scales, zeros, order)
