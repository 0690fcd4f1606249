"""A mixture of experts. A token's result does not depend on the other tokens of the step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import StepKernels
from engine.linear import ExpertLinear, Linear
from engine.models.mlp import Mlp
from engine.models.spec import MoeSpec


@dataclass(slots=True)
class Experts:
    spec: MoeSpec
    router: Linear  # float32 [num_experts, hidden_size]
    correction: Tensor | None  # float32 [num_experts]: added to the scores for the choice only
    gate_up: ExpertLinear
    down: ExpertLinear
    shared: Mlp | None
    shared_gate: Linear | None
    scales: Tensor | None = None  # float32 [num_experts]

    def __call__(self, rows: Tensor, kernels: StepKernels, routed: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, in the shape of `rows` [T, hidden_size].

        The router multiplies `routed`, by default `rows`.
        """
        if not len(rows):
            return rows
        weights, chosen = self.route(rows if routed is None else routed)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # sorted by expert
        counts = flat.new_zeros(self.spec.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        products = self.gate_up(rows[order // self.spec.top_k], counts)
        outputs = self.down(kernels.gated(products, self.spec.expert.activation), counts)
        total = kernels.combine(outputs, order.argsort().view_as(chosen), weights)
        return total if self.shared is None else total + self._shared(self.shared, rows, kernels)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and the numbers, int64, of each row's experts, both [T, top_k], best first."""
        spec = self.spec
        logits = self.router(rows.float())
        if spec.scores_chosen:
            values, chosen = _best(logits, spec.top_k)
            return values.softmax(-1), chosen
        scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
        candidates = scores if self.correction is None else scores + self.correction
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
        weights = weights * spec.scale
        return weights if self.scales is None else weights * self.scales[chosen], chosen

    def _shared(self, shared: Mlp, rows: Tensor, kernels: StepKernels) -> Tensor:
        gate = None if self.shared_gate is None else self.shared_gate(rows).sigmoid()  # first: `shared` overwrites rows
        output = shared(rows, kernels)
        return output if gate is None else output * gate


@dataclass(slots=True)
class ExpertsAlongside:
    """Experts that take the same hidden states as the MLP, each with norms of its own (Gemma 4)."""

    experts: Experts
    router_norm: Tensor
    norm: Tensor
    post_norm: Tensor
    post_mlp_norm: Tensor

    def __call__(self, hidden: Tensor, from_mlp: Tensor, kernels: StepKernels) -> Tensor:
        """Return the sum of the normed outputs of the MLP, `from_mlp`, and of the experts for the `hidden` states."""
        output = self.experts(kernels.norm(hidden, self.norm), kernels, kernels.norm(hidden, self.router_norm))
        return kernels.norm(from_mlp, self.post_mlp_norm) + kernels.norm(output, self.post_norm)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row and their indices; among equal scores, the lowest index comes first."""
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], indices[:, :count]
