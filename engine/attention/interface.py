"""What a model asks of attention: store this step's K and V, and attend over everything stored before."""

from typing import Protocol

from torch import Tensor

from engine.batch import Batch


class AttentionPlan(Protocol):
    """One step's attention, the same for every layer."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Writes `k` and `v` into the pool at the batch's slots, then attends.

        q [T, heads, head_dim]; k and v [T, kv_heads, head_dim], all after rotation. A query sees the positions of
        its own slice's context up to itself, and of these only the last `window` when that is not 0. Scores are
        scaled by head_dim ** -0.5. Returns [T, heads, head_dim] in q's dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Holds the pool. A backend may refuse a layout or a dtype at construction, with ValueError."""

    name: str

    def plan(self, batch: Batch) -> AttentionPlan:
        """What is worth computing once a step (splits, tables, masks), from the batch's host copies."""
        ...
