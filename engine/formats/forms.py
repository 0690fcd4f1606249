"""The forms in which quantized weight matrices are held in memory, and their conversion to dense matrices."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

INTEGERS = tuple(float(code) for code in range(-8, 8))
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


@dataclass(slots=True)
class GroupedWeight:
    """A matrix [out, in] of 4-bit codes. A weight is scale * (table[code] - zero point). Each row has a scale and a
    zero point for each group of adjacent columns.

    `codes` is uint8 [out, in / 2], with the code of the even column in the low bits. `scales` and `zeros` are float32
    [out, groups]. If `zeros` is None, all zero points are 0. If `order` (int64 [in]) is given, column i multiplies
    input order[i]. Otherwise, it multiplies input i."""

    codes: Tensor
    table: tuple[float, ...]
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), 2 * self.codes.shape[1]

    @property
    def group(self) -> int:
        """The number of columns in a group."""
        return self.shape[1] // self.scales.shape[1]

    def rows(self, which: Tensor) -> Self:
        """Return a matrix with the rows (outputs) at the indices `which`, in this order."""
        zeros = None if self.zeros is None else self.zeros[which]
        return type(self)(self.codes[which], self.table, self.scales[which], zeros, self.order)

    def dense(self) -> Tensor:
        """Return the weights, float32 [out, in]."""
        low, high = self.codes & 15, self.codes >> 4
        codes = torch.stack((low, high), -1).flatten(1).int()
        weights = torch.tensor(self.table, device=codes.device)[codes].view(len(codes), -1, self.group)
        if self.zeros is not None:
            weights = weights - self.zeros[..., None]
        weights = (weights * self.scales[..., None]).flatten(1)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order, weights)


@dataclass(slots=True)
class ChannelWeight:
    """An int8 matrix [out, in] with a scale per output, float32 [out]. Activations are rounded to 8 bits too (W8A8)."""

    levels: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.levels), self.levels.shape[1]

    def rows(self, which: Tensor) -> Self:
        return type(self)(self.levels[which], self.scales[which])

    def dense(self) -> Tensor:
        return self.levels.float() * self.scales[:, None]


QuantizedWeight = GroupedWeight | ChannelWeight
Weight = Tensor | QuantizedWeight


def dense(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dense()


def rows_of(weight: Weight, which: Tensor) -> Weight:
    return weight[which] if isinstance(weight, Tensor) else weight.rows(which)


def packed(codes: Tensor) -> Tensor:
    """Pack codes below 16, uint8 [out, in], into uint8 [out, in / 2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def joined(parts: list[Weight]) -> Weight:
    """Concatenate matrices along their outputs. The result is dense if forms, tables, group sizes or orders differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(isinstance(one, ChannelWeight) for one in parts):
        several = [one for one in parts if isinstance(one, ChannelWeight)]
        return ChannelWeight(torch.cat([one.levels for one in several]), torch.cat([one.scales for one in several]))
    grouped = [one for one in parts if isinstance(one, GroupedWeight)]
    if not isinstance(first, GroupedWeight) or len(grouped) < len(parts) or any(not _alike(first, o) for o in grouped):
        floats = [dense(one) for one in parts]
        same = len({one.dtype for one in floats}) == 1
        return torch.cat(floats if same else [one.float() for one in floats])
    zeros = None
    if any(one.zeros is not None for one in grouped):
        zeros = torch.cat([torch.zeros_like(one.scales) if one.zeros is None else one.zeros for one in grouped])
    codes, scales = torch.cat([one.codes for one in grouped]), torch.cat([one.scales for one in grouped])
    return GroupedWeight(codes, first.table, scales, zeros, first.order)


def _alike(one: GroupedWeight, other: GroupedWeight) -> bool:
    if one.order is None or other.order is None:
        same_order = one.order is other.order
    else:
        same_order = torch.equal(one.order, other.order)
    return same_order and (one.table, one.group) == (other.table, other.group)
