"""Weights as plain tensors, multiplied by torch: cuBLAS on CUDA, and the reference implementation on CPUs."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, dtype
from torch.nn.functional import embedding, linear

from engine.linear.interface import Lookup


@dataclass(slots=True)
class PlainLinear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def lookup(self) -> Lookup:
        return partial(embedding, weight=self.weight)


class Plain:
    def __init__(self, held_in: dtype) -> None:
        self.name = f"{held_in}".removeprefix("torch.")
        self._held_in = held_in

    def make(self, weight: Tensor, bias: Tensor | None) -> PlainLinear:
        return PlainLinear(weight.to(self._held_in), None if bias is None else bias.to(self._held_in))
