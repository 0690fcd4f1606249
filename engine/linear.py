"""Weight matrices: the interface, and plain tensors multiplied by torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

Lookup = Callable[[Tensor], Tensor]  # indices of outputs, int64 [R] -> their weights, [R, in]


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product, [T, in] -> [T, out] in the dtype of `rows`, plus the bias if there is one."""

    def lookup(self) -> Lookup | None:
        """Return a lookup of the original weights, for a tied embedding. Return None if the weights are rounded."""


class LinearFormat(Protocol):
    """How weights are stored and multiplied. `name` is shown to users, for example "float32 packed"."""

    name: str

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Convert `weight` [out, in], in the checkpoint's dtype, and `bias` [out]. May keep references to both."""


@dataclass(slots=True)
class PlainLinear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def lookup(self) -> Lookup:
        return partial(embedding, weight=self.weight)


class Plain:
    def __init__(self, held_in: torch.dtype) -> None:
        self.name = f"{held_in}".removeprefix("torch.")
        self._held_in = held_in

    def make(self, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        return PlainLinear(weight.to(self._held_in), None if bias is None else bias.to(self._held_in))
