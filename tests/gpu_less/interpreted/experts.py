from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.cuda.layer import FEW_CHOICES, TritonKernels
from engine.cuda.products import TritonExperts, TritonFormat
from engine.formats.forms import INTEGERS, GroupedWeight
from engine.linear import Linear
from engine.models.spec import MlpSpec, MoeSpec
from engine.routing import by_expert, route
from tests.engine.build import CPU
from tests.gpu_less.contract import TOLERANCE, batch_of, config_of, pool_of

PLAIN = MoeSpec(10, 3, MlpSpec(8))
SPECS = {
    "softmax": PLAIN,
    "of the chosen": replace(PLAIN, scores_chosen=True),
    "softmax, not renormalized, one expert": replace(PLAIN, top_k=1, renormalizes=False, scale=2.5),
    "sigmoid, groups, correction": replace(
        PLAIN, num_experts=12, score="sigmoid", corrects=True, groups=4, top_groups=2, scale=1.5
    ),
    "groups by their best": replace(PLAIN, num_experts=12, groups=3, top_groups=1, group_scores=1),
    "scaled": replace(PLAIN, scales_experts=True),
}


def kernels() -> TritonKernels:
    return TritonKernels(config_of(16, 2, 1, 16), pool_of(1, 16, 4, torch.float32, 8, CPU))


@pytest.mark.parametrize("name", SPECS)
def test_experts_are_chosen_as_by_the_reference(name: str) -> None:
    spec, random = SPECS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(9, spec.num_experts, generator=random)
    logits[1] = 0.5  # equal scores
    logits[2, 4:7] = 3.0
    given = [
        torch.randn(spec.num_experts, generator=random) if wanted else None
        for wanted in (spec.corrects, spec.scales_experts)
    ]
    weights, chosen = kernels().begin(batch_of([(0, 9)], 4, 8, CPU)).route(spec, logits, *given)
    wanted, theirs = route(spec, logits, *given)
    assert torch.equal(chosen, theirs)
    torch.testing.assert_close(weights, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
def test_a_broken_token_chooses_experts_that_exist(broken: float) -> None:
    for spec in SPECS.values():
        logits = torch.full((2, spec.num_experts), broken)
        logits[1] = torch.arange(spec.num_experts)
        step = kernels().begin(batch_of([(0, 2)], 4, 8, CPU))
        zeros = torch.zeros(spec.num_experts)
        weights, chosen = step.route(spec, logits, zeros, zeros + 1)
        assert 0 <= int(chosen.min()) <= int(chosen.max()) < spec.num_experts
        assert bool(weights[1].isfinite().all())


@pytest.mark.parametrize("count", [1, 50, FEW_CHOICES // 3 + 1])
def test_rows_are_sorted_by_expert(count: int) -> None:
    chosen = torch.randint(0, 9, (count, 3), generator=torch.Generator().manual_seed(count))
    found = kernels().begin(batch_of([(0, 1)], 4, 8, CPU)).by_expert(chosen, 10)
    for one, other in zip(found, by_expert(chosen, 10), strict=True):
        assert torch.equal(one, other)


def expert(kind: str, number: int, dtype: torch.dtype) -> tuple[Linear, Tensor, Tensor]:
    """Return an expert, its values, float64, and its bias."""
    random = torch.Generator().manual_seed(number)
    out, width = 21, 64
    bias, form = torch.randn(out, generator=random).to(dtype), TritonFormat(dtype)
    if kind == "plain":
        weight = torch.randn(out, 40, generator=random).to(dtype)
        return form.make(weight, bias), weight.double(), bias
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=random)
    scales, zeros = torch.rand(2, out, width // 32, generator=random)
    order = torch.randperm(width, generator=random)
    optional = "optional" in kind  # a part that is missing for some of the experts
    some = optional and number % 2 == 0
    held = GroupedWeight(codes, INTEGERS, scales, zeros if some else None, order if some else None)
    return form.make_quantized(held, bias), held.dense().double(), bias


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("plain", torch.float32), ("plain", torch.bfloat16), ("codes", torch.float16), ("codes, optional", torch.float32)],
)
def test_experts_are_multiplied_at_once(kind: str, dtype: torch.dtype) -> None:
    each = [expert(kind, number, dtype) for number in range(5)]
    together = TritonFormat(dtype).of_experts([linear for linear, _, _ in each])
    assert isinstance(together, TritonExperts)
    for counts in ([0, 1, 0, 2, 0], [0, 0, 0, 0, 1], [3, 90, 16, 0, 17]):
        rows = torch.randn(sum(counts), each[0][1].shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        found = together(rows, torch.tensor(counts)).double()
        parts = [
            part.double() @ weight.T + bias.double()
            for part, (_, weight, bias) in zip(rows.split(counts), each, strict=True)
        ]
        wanted = torch.cat(parts)
        assert float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) <= TOLERANCE[dtype]
