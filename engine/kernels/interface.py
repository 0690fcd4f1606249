"""What a decoder layer does beside matrix products and attention, so that a device can fuse it as suits it."""

from typing import Protocol

from torch import Tensor

from engine.batch import Batch


class StepKernels(Protocol):
    """One step's; made from its batch, so that what depends on positions and slots alone is computed once."""

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, computed in float32. Returns rows' shape and dtype."""
        ...

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden + update, its RMS norm), both [T, hidden_size]; `hidden` may be written over."""
        ...

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """Queries, rotated, [T, heads, head_dim]; keys, rotated, and values go into the pool at the batch's slots.

        `qkv` [T, (heads + 2 * kv_heads) * head_dim] may be written over. With q_norm and k_norm [head_dim], each
        head of q and k is RMS-normed before it is rotated (Qwen3). A slot of -1 (padding) stores nothing.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of [T, 2 * n]: [T, n]."""
        ...


class Kernels(Protocol):
    """Knows the pool, the rotation's frequencies and the model's epsilon."""

    name: str

    def begin(self, batch: Batch) -> StepKernels: ...
