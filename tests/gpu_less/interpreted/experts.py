import pytest
import torch

from engine.cuda.layer import FEW_CHOICES
from tests.engine.build import CPU, thinned
from tests.gpu_less.contract import ROUTERS, check_order, check_router
from tests.gpu_less.layers import check_experts, triton_step


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_by_the_reference(name: str) -> None:
    check_router(triton_step(CPU), ROUTERS[name], CPU)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
def test_a_broken_token_chooses_experts_that_exist(broken: float) -> None:
    for spec in ROUTERS.values():
        logits = torch.full((2, spec.num_experts), broken)
        logits[1] = torch.arange(spec.num_experts)
        zeros = torch.zeros(spec.num_experts)
        weights, chosen = triton_step(CPU).route(spec, logits, zeros, zeros + 1)
        assert 0 <= int(chosen.min()) <= int(chosen.max()) < spec.num_experts
        assert bool(weights[1].isfinite().all())


@pytest.mark.parametrize("count", [1, 50, FEW_CHOICES // 3 + 1])
def test_rows_are_sorted_by_expert(count: int) -> None:
    check_order(triton_step(CPU), count, CPU)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    thinned(
        [
            ("plain", torch.float32), ("plain", torch.bfloat16), ("codes", torch.float16),
            ("codes, optional parts", torch.float32),
        ],
        2,
    ),
)  # fmt: skip
def test_experts_are_multiplied_at_once(kind: str, dtype: torch.dtype) -> None:
    check_experts(kind, dtype, CPU, ([0, 1, 0, 2, 0], [0, 0, 0, 0, 1], [3, 90, 16, 0, 17]))
