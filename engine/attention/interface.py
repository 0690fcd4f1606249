"""What a model asks of attention: attend over everything stored before, this step's keys and values included."""

from typing import Protocol

from torch import Tensor

from engine.batch import Batch


class AttentionPlan(Protocol):
    """One step's attention, the same for every layer."""

    def attend(self, layer: int, q: Tensor, window: int) -> Tensor:
        """q [T, heads, head_dim], after rotation; the step's K and V of this layer are in the pool already.

        A query sees the positions of its own slice's context up to itself, and of these only the last `window` when
        that is not 0. Scores are scaled by head_dim ** -0.5. Returns [T, heads, head_dim] in q's dtype.
        """
        ...


class AttentionBackend(Protocol):
    """Holds the pool. A backend may refuse a layout or a dtype at construction, with ValueError."""

    name: str

    def plan(self, batch: Batch) -> AttentionPlan:
        """What is worth computing once a step (splits, tables, masks), from the batch's host copies."""
        ...
