"""A mixture of experts. A token's result does not depend on the other tokens of the step."""

from dataclasses import dataclass

from torch import Tensor

from engine.kernels import StepKernels
from engine.linear import ExpertLinear, Linear
from engine.models.mlp import Mlp
from engine.models.spec import MoeSpec


@dataclass(slots=True)
class Experts:
    spec: MoeSpec
    router: Linear  # float32 [num_experts, hidden_size]
    correction: Tensor | None  # float32 [num_experts]: added to scores when experts are chosen, but not to weights
    factors: Tensor  # float32 [num_experts]: the spec's scale, times the expert's own scale if it has one
    gate_up: ExpertLinear
    down: ExpertLinear
    shared: Mlp | None
    shared_gate: Linear | None

    def __call__(self, rows: Tensor, kernels: StepKernels, routed: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, in the shape of `rows` [T, hidden_size].

        `routed` is the input of the router, by default `rows`.
        """
        if not len(rows):
            return rows
        logits = self.router((rows if routed is None else routed).float())
        weights, chosen = kernels.route(self.spec, logits, self.correction, self.factors)
        sources, places, counts = kernels.by_expert(chosen, self.spec.num_experts)
        products = self.gate_up(rows[sources], counts)
        outputs = self.down(kernels.gated(products, self.spec.expert.activation), counts)
        total = kernels.combine(outputs, places, weights)
        return total if self.shared is None else total + self._shared(self.shared, rows, kernels)

    def _shared(self, shared: Mlp, rows: Tensor, kernels: StepKernels) -> Tensor:
        # The gate is computed first, because `shared` may overwrite `rows`.
        gate = None if self.shared_gate is None else self.shared_gate(rows).sigmoid()
        output = shared(rows, kernels)
        return output if gate is None else output * gate


@dataclass(slots=True)
class ExpertsAlongside:
    """Experts that take the same hidden states as the MLP, with separate norms (Gemma 4)."""

    experts: Experts
    router_norm: Tensor
    norm: Tensor
    post_norm: Tensor
    post_mlp_norm: Tensor

    def __call__(self, hidden: Tensor, from_mlp: Tensor, kernels: StepKernels) -> Tensor:
        """Norm the output of the MLP, `from_mlp`, and the output of the experts for `hidden`. Return the sum."""
        output = self.experts(kernels.norm(hidden, self.norm), kernels, kernels.norm(hidden, self.router_norm))
        return kernels.norm(from_mlp, self.post_mlp_norm) + kernels.norm(output, self.post_norm)
