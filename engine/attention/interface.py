"""The interface of attention over the KV pool, which already holds the keys and values of the current step."""

from typing import Protocol

from torch import Tensor

from engine.batch import Batch


class AttentionPlan(Protocol):
    """The attention of one step, for all layers."""

    def attend(self, layer: int, q: Tensor, window: int) -> Tensor:
        """Return attention for the rotated queries `q`, [T, heads, head_dim], in the same shape and dtype.

        The step's K and V of this layer must be in the pool. A query attends to the positions of its own request up to
        itself; if `window` is not 0, only to the last `window` of them. Scores are scaled by head_dim ** -0.5.
        """
        ...


class AttentionBackend(Protocol):
    """Attention over one KV pool. The constructor raises ValueError for a layout or dtype that it does not support."""

    name: str

    def plan(self, batch: Batch) -> AttentionPlan:
        """Compute what all layers of a step share (splits, tables, masks), from the batch's host copies."""
        ...
