"""The interfaces of a weight matrix and of the format in which weights are stored."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Lookup = Callable[[Tensor], Tensor]  # indices of outputs, int64 [R] -> their weights, [R, in]


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """Return the product, [T, in] -> [T, out] in the dtype of `rows`, plus the bias if there is one."""
        ...

    def lookup(self) -> Lookup | None:
        """Return a lookup of the original weights, so a tied embedding needs no copy; None if they were rounded."""
        ...


class LinearFormat(Protocol):
    """How weights are stored and multiplied. `name` is shown to users, for example "float32 packed"."""

    name: str

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Convert `weight` [out, in], in the checkpoint's dtype, and `bias` [out]. May keep references to both."""
        ...
