"""Weight matrices: the interface, and an implementation with plain tensors that torch multiplies."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from engine.formats.forms import QuantizedWeight

Lookup = Callable[[Tensor], Tensor]  # maps indices of outputs, int64 [R], to their weights, [R, in]


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply `rows` [T, in] by the matrix, and add the bias if any. Return [T, out] in the dtype of `rows`."""

    def lookup(self) -> Lookup | None:
        """Return a function that looks up rows of weights for a tied embedding, or None if the weights are rounded."""
        return None


class ExpertLinear(Protocol):
    """The matrices of a layer's experts, all of one shape."""

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply each of `rows` [N, in] by its expert's matrix and add the bias, if any. Return [N, out].

        Rows are sorted by expert. `counts`, int64 [num_experts], is the number of rows of each expert.
        """


class LinearFormat(Protocol):
    """A way to store and multiply weights. `name` is shown to users, for example "float32 packed".

    Unless a format overrides the methods, it makes quantized matrices dense, and multiplies experts one after another.
    """

    name: str

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Convert `weight` [out, in], in the checkpoint's dtype, and `bias` [out]. May keep references to both."""

    def make_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        """Convert a quantized matrix. Keep its form if this format supports it. Otherwise, make the matrix dense."""
        return self.make(weight.dense(), bias)

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Convert a matrix without rounding it. This method is used for LoRA updates and for routers in float32.
        Rounding a router could change the choice of experts."""

    def of_experts(self, each: list[Linear]) -> ExpertLinear:
        """Combine the matrices of a layer's experts, each of which was made by this format."""
        return SeparateExperts(each)


@dataclass(slots=True)
class SeparateExperts:
    """The matrices of a layer's experts, which are multiplied one after another."""

    each: list[Linear]

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = torch.split(rows, counts.tolist())
        return torch.cat([linear(part) for linear, part in zip(self.each, parts, strict=True) if len(part)])


@dataclass(slots=True)
class PlainLinear(Linear):
    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def lookup(self) -> Lookup:
        return partial(embedding, weight=self.weight)


class Plain(LinearFormat):
    def __init__(self, held_in: torch.dtype) -> None:
        self.name = f"{held_in}".removeprefix("torch.")
        self._held_in = held_in

    def make(self, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        return PlainLinear(weight.to(self._held_in), None if bias is None else bias.to(self._held_in))

    def make_exact(self, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        return PlainLinear(weight, None if bias is None else bias.float())
