from itertools import product

import pytest
import torch

from engine.cuda.products import TritonFormat, TritonGroupedLinear
from engine.formats.forms import E2M1, INTEGERS, GroupedWeight
from tests.engine.build import thinned
from tests.gpu_less.contract import TOLERANCE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "shape"), thinned(product(DTYPES, [(70, 128, 64, True), (33, 96, 32, False), (5, 48, 16, True)]), 4)
)
def test_a_grouped_product_equals_the_dense_one(dtype: torch.dtype, shape: tuple[int, int, int, bool]) -> None:
    out, width, group, zeros = shape
    generator = torch.Generator().manual_seed(out)
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8, generator=generator)
    scales, offsets = torch.rand(2, out, width // group, generator=generator)
    order = torch.randperm(width, generator=generator) if out == 5 else None
    weight = GroupedWeight(codes, INTEGERS if zeros else E2M1, scales, offsets if zeros else None, order)
    bias = torch.randn(out, generator=generator).to(dtype) if zeros else None
    linear = TritonFormat(dtype).make_quantized(weight, bias)
    assert isinstance(linear, TritonGroupedLinear)
    for count in (1, 3, 20):
        rows = torch.randn(count, width, generator=generator).to(dtype)
        wanted = rows.double() @ weight.dense().double().T + (0 if bias is None else bias.double())
        found = linear(rows).double()
        assert float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max()) <= TOLERANCE[dtype]


def test_a_group_that_the_kernel_does_not_support_becomes_dense() -> None:
    weight = GroupedWeight(torch.zeros(4, 12, dtype=torch.uint8), INTEGERS, torch.ones(4, 3))
    assert not isinstance(TritonFormat(torch.float32).make_quantized(weight, None), TritonGroupedLinear)
