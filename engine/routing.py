"""Chooses experts and sorts rows by expert, in plain torch."""

import torch
from torch import Tensor

from engine.models.spec import MoeSpec


def route(spec: MoeSpec, logits: Tensor, correction: Tensor | None, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `StepKernels.route`."""
    if spec.scores_chosen:
        values, chosen = _best(logits, spec.top_k)
        return values.softmax(-1) * factors[chosen], chosen
    scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
    candidates = scores if correction is None else scores + correction
    if spec.groups > 1:
        grouped = candidates.view(-1, spec.groups, spec.num_experts // spec.groups)
        group_scores = grouped.topk(min(spec.group_scores, grouped.shape[-1]), dim=-1).values.sum(-1)
        _, kept = _best(group_scores, spec.top_groups)
        outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        candidates = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    _, chosen = _best(candidates, spec.top_k)
    weights = scores.gather(1, chosen)
    if spec.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factors[chosen], chosen


def by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `StepKernels.by_expert`."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return order // chosen.shape[1], order.argsort().view_as(chosen), counts


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row and their indices. Among equal scores, the lowest index comes first."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], indices[:, :count]
