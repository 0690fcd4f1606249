from itertools import product

import pytest
import torch

from engine.cuda.layer import TritonKernels
from tests.engine.build import thinned
from tests.gpu_less.contract import FLOAT8, batch_of, check_norms, check_rotation, config_of, padded, pool_of

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "width"), thinned(product(DTYPES, [64, 100, 1100]), 4))
def test_norms_and_activation(dtype: torch.dtype, width: int) -> None:
    pool = pool_of(1, 16, 4, dtype, 8, CPU)
    kernels = TritonKernels(config_of(width, 2, 1, 16), pool)
    check_norms(kernels, batch_of([(0, 3)], 4, 8, CPU), width, dtype, CPU)


@pytest.mark.parametrize(
    ("dtype", "norms", "shape"), thinned(product(DTYPES, [True, False], [(4, 1, 16), (16, 3, 20), (1, 4, 64)]), 5)
)
def test_rotation_and_store(dtype: torch.dtype, norms: bool, shape: tuple[int, int, int]) -> None:
    page, group, head_dim = shape
    pool, config = pool_of(2, head_dim, page, dtype, 40, CPU), config_of(64, 2 * group, 2, head_dim)
    batch = padded(batch_of([(0, 5), (0, 1), (0, 9)], page, 40, CPU), 2)
    check_rotation(TritonKernels(config, pool), config, pool, batch, dtype, norms)


def test_far_positions_are_rotated_exactly() -> None:
    pool, config = pool_of(1, 16, 4, torch.float32, 40, CPU), config_of(64, 1, 1, 16)
    batch = batch_of([(0, 8)], 4, 40, CPU)
    batch.positions += 120_000
    check_rotation(TritonKernels(config, pool), config, pool, batch, torch.float32, norms=False)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.002, 3.0)])
def test_a_pool_of_float8(scales: tuple[float, float]) -> None:
    """With the scale 0.002, keys exceed the range of float8."""
    for dtype in (torch.float32, torch.bfloat16):
        pool, config = pool_of(2, 16, 4, FLOAT8, 40, CPU, scales=scales), config_of(64, 2, 2, 16)
        batch = padded(batch_of([(0, 5), (0, 1)], 4, 40, CPU), 1)
        check_rotation(TritonKernels(config, pool), config, pool, batch, dtype, norms=True)


def test_a_pool_of_16_bits_under_float32_activations() -> None:
    pool, config = pool_of(2, 16, 4, torch.float16, 40, CPU), config_of(64, 2, 2, 16)
    check_rotation(TritonKernels(config, pool), config, pool, batch_of([(0, 6)], 4, 40, CPU), torch.float32, norms=True)
