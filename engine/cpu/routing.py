"""The choice of experts by numba kernels, for models that do not divide their experts into groups."""

import torch
from torch import Tensor

from engine.cpu import routing_kernels as kernels
from engine.cpu.malloc import empty
from engine.models.spec import MoeSpec
from engine.routing import route as routed_by_torch

WORK = 16  # cost of scoring and comparing one expert, relative to a multiplication


def route(spec: MoeSpec, logits: Tensor, correction: Tensor | None, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `StepKernels.route`."""
    if spec.groups > 1:
        return routed_by_torch(spec, logits, correction, factors)
    count, experts, top_k = len(logits), spec.num_experts, spec.top_k
    weights, chosen = empty(count, top_k), torch.empty(count, top_k, dtype=torch.int64)
    memory, logits = empty(count, 2 * experts), logits.contiguous()
    kernels.route(
        WORK * count * experts, count, experts, top_k, logits.data_ptr(), 4 * experts, memory.data_ptr(),
        *choice(spec, correction, factors), weights.data_ptr(), chosen.data_ptr(),
    )  # fmt: skip
    return weights, chosen


def by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `StepKernels.by_expert`."""
    (count, top_k), chosen = chosen.shape, chosen.contiguous()
    sources, places = torch.empty(count * top_k, dtype=torch.int64), torch.empty_like(chosen)
    counts = torch.empty(num_experts, dtype=torch.int64)
    kernels.sort_by_expert(
        0, count, num_experts, top_k, chosen.data_ptr(), sources.data_ptr(), places.data_ptr(), counts.data_ptr()
    )
    return sources, places, counts


def choice(spec: MoeSpec, correction: Tensor | None, factors: Tensor) -> tuple[int, int, int, int]:
    """Return four arguments of the kernel `route`: the correction, the factors that multiply weights, the kind of
    scores, and whether weights are divided by their sum."""
    alone = spec.scores_chosen
    kind = kernels.CHOSEN if alone else kernels.SIGMOID if spec.score == "sigmoid" else kernels.SOFTMAX
    added = 0 if correction is None or alone else correction.data_ptr()
    return added, factors.data_ptr(), kind, int(spec.renormalizes and not alone)
