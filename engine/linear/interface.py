"""What a decoder asks of a weight matrix, and of the format it is held in."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Lookup = Callable[[Tensor], Tensor]  # numbers of outputs, int64 [R] -> their weights, [R, in]


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out], in the dtype of `rows`; the bias, where there is one, is added."""
        ...

    def lookup(self) -> Lookup | None:
        """Of the weights as they were given, so that a tied embedding needs no copy beside; None: they were rounded."""
        ...


class LinearFormat(Protocol):
    """How weights are held and multiplied: `name` is shown to users, as in "float32 packed"."""

    name: str

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Takes over `weight` [out, in] as it is in the checkpoint (any dtype), and `bias` [out]."""
        ...
