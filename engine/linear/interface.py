"""What a decoder asks of a weight matrix, and of the format it is held in."""

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    def __call__(self, rows: Tensor) -> Tensor:
        """[T, in] -> [T, out], in the dtype of `rows`; the bias, where there is one, is added."""
        ...


class LinearFormat(Protocol):
    """How weights are held and multiplied: `name` is shown to users, as in "float32 packed"."""

    name: str

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Takes over `weight` [out, in] as it is in the checkpoint (any dtype), and `bias` [out]."""
        ...
