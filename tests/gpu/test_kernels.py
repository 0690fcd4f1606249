"""Test the Triton kernels on a GPU, with the shapes of real models and with bfloat16."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.gpu_less.contract import (
    FLOAT8,
    PLAIN,
    ROUTERS,
    TOLERANCE,
    batch_of,
    check_attention,
    check_norms,
    check_order,
    check_rotation,
    check_router,
    config_of,
    padded,
    pool_of,
)
from tests.gpu_less.draws import FILTERS, expected, logits_of, parameters_of, rows_of

pytest.importorskip("triton", reason="triton is not installed")

from engine.attention import AttentionLayer, TorchAttention
from engine.cuda.attention import TritonAttention
from engine.cuda.draw import draw
from engine.cuda.layer import TritonKernels
from engine.cuda.selection import FLOAT8_CAPABILITY
from engine.models.spec import DeltaSpec, RecurrentSpec, SsmSpec
from tests.engine.recurrent_scene import SPECS
from tests.gpu_less.layers import check_experts, check_recurrence, triton_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # the tests compile every configuration
]
DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_BLOCKS = 3000
HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY
MIXED = [(1999, 2000), (0, 700), (15, 16), (3000, 3033), (-1, 0), (513, 1077), (0, 1), (900, 907)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize(
    ("page", "group", "head_dim"), [(64, 4, 128), (16, 1, 64), (64, 3, 20), (4, 7, 128), (128, 8, 256), (20, 1, 80)]
)
def test_mixed_batches_in_any_order(dtype: torch.dtype, window: int, page: int, group: int, head_dim: int) -> None:
    pool = pool_of(2, head_dim, page, dtype, NUM_BLOCKS, DEVICE)
    batch = batch_of(MIXED, page, NUM_BLOCKS, DEVICE)
    check_attention(TritonAttention(pool), pool, batch, 2 * group, dtype, window, pad=3)


def test_long_chunks_of_many_heads_in_the_largest_tile() -> None:
    """Prompts mainly use the largest tile, which is chosen if it leaves work for every processor of the GPU."""
    pool = pool_of(8, 128, 64, torch.bfloat16, NUM_BLOCKS, DEVICE)
    batch = batch_of([(0, 2048), (1000, 1600)], 64, NUM_BLOCKS, DEVICE)
    check_attention(TritonAttention(pool), pool, batch, 32, torch.bfloat16)


@pytest.mark.parametrize(("dtype", "window"), list(product(DTYPES, [0, 600])))
def test_soft_caps_and_sinks(dtype: torch.dtype, window: int) -> None:
    pool = pool_of(2, 64, 64, dtype, NUM_BLOCKS, DEVICE)
    batch, sinks = batch_of(MIXED, 64, NUM_BLOCKS, DEVICE), torch.linspace(-3.0, 4.0, 16, device=DEVICE)
    check_attention(TritonAttention(pool), pool, batch, 16, dtype, window, softcap=5.0, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_heads_of_twice_the_size(dtype: torch.dtype, head_dim: int) -> None:
    pool = pool_of(4, head_dim, 64, dtype, NUM_BLOCKS, DEVICE)
    pool.tensor.normal_()
    spans = [(1999, 2000), (0, 700), (3000, 3033)]
    batch, layer = batch_of(spans, 64, NUM_BLOCKS, DEVICE), AttentionLayer(1, wide=2)
    q = torch.randn(734, 16, 2 * head_dim, device=DEVICE).to(dtype)
    found, wanted = (backend(pool).plan(batch).attend(layer, q) for backend in (TritonAttention, TorchAttention))
    torch.testing.assert_close(found, wanted, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec",
    # The last two are those of Qwen3.5 9B and Granite 4.
    [*SPECS.values(), DeltaSpec(16, 32, 128, 128, 4), SsmSpec(1, 48, 128, 64, 4)],
)
def test_recurrent_layers(dtype: torch.dtype, spec: RecurrentSpec) -> None:
    steps = [{0: 50, 1: 1, 2: 64}, {0: 49, 2: 300}, {0: 1, 2: 1}]
    check_recurrence(spec, DEVICE, (100, 1, 365), steps, {0: 64, 2: 128}, dtype)


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_by_the_reference(name: str) -> None:
    check_router(triton_step(DEVICE), ROUTERS[name], DEVICE, tokens=300)
    check_router(triton_step(DEVICE), replace(PLAIN, num_experts=256, top_k=8), DEVICE, tokens=300)


@pytest.mark.parametrize("count", [1, 50, 1000, 20_000])
def test_rows_are_sorted_by_expert(count: int) -> None:
    check_order(triton_step(DEVICE), count, DEVICE, 128)


@pytest.mark.parametrize(("kind", "dtype"), list(product(["plain", "codes", "codes, optional parts"], DTYPES)))
def test_experts_are_multiplied_at_once(kind: str, dtype: torch.dtype) -> None:
    check_experts(kind, dtype, DEVICE, ([0, 1, 0, 2, 0], [3, 90, 16, 0, 17], [300, 1, 0, 700, 64]))


@pytest.mark.skipif(not HAS_FLOAT8, reason="the GPU has no float8")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_of_float8(dtype: torch.dtype) -> None:
    pool, config = pool_of(4, 64, 64, FLOAT8, 500, DEVICE, scales=(0.002, 3.0)), config_of(64, 8, 4, 64)
    batch = padded(batch_of([(0, 130), (0, 1), (0, 77)], 64, 500, DEVICE), 5)
    check_rotation(TritonKernels(config, pool), config, pool, batch, dtype, norms=True)
    pool = pool_of(2, 128, 64, FLOAT8, NUM_BLOCKS, DEVICE, scales=(0.25, 3.0))
    check_attention(TritonAttention(pool), pool, batch_of(MIXED, 64, NUM_BLOCKS, DEVICE), 8, dtype)


@pytest.mark.parametrize("held", [torch.float16, torch.bfloat16])
def test_a_pool_of_16_bits_serves_float32_queries(held: torch.dtype) -> None:
    pool = pool_of(2, 128, 64, held, NUM_BLOCKS, DEVICE)
    check_attention(TritonAttention(pool), pool, batch_of(MIXED, 64, NUM_BLOCKS, DEVICE), 8, torch.float32)


def test_a_block_beyond_2_to_the_31_elements_is_found() -> None:
    num_blocks = 2**31 // (64 * 2 * 128 * 8) + 100
    pool = pool_of(8, 128, 64, torch.bfloat16, num_blocks, DEVICE, layers=2)
    batch = batch_of([(0, 130), (499, 500)], 64, 40, DEVICE)
    batch.block_table += torch.where(batch.block_table > 0, num_blocks - 40, 0).to(torch.int32)
    check_attention(TritonAttention(pool), pool, batch, 32, torch.bfloat16)


def test_a_captured_graph_follows_its_batch() -> None:
    pool = pool_of(8, 128, 64, torch.bfloat16, NUM_BLOCKS, DEVICE)
    backend = TritonAttention(pool)
    static = batch_of([(4095, 4096)] * 4, 64, NUM_BLOCKS, DEVICE)
    plan, q, graph = backend.plan(static), torch.randn(4, 32, 128, device=DEVICE).bfloat16(), torch.cuda.CUDAGraph()
    check_attention(backend, pool, static, 32, torch.bfloat16)  # compiles the kernels before the capture
    with torch.cuda.graph(graph):
        out = plan.attend(AttentionLayer(1), q)
    for spans in ([(10, 11), (3000, 3001), (-1, 0), (70, 71)], [(0, 1), (-1, 0), (-1, 0), (-1, 0)]):
        batch = batch_of(spans, 64, NUM_BLOCKS, DEVICE)
        static.kv_len.copy_(batch.kv_len)
        static.block_table.zero_()
        static.block_table[:, : batch.block_table.shape[1]] = batch.block_table

        class Replayed:
            name = "replayed"

            def plan(self, _: object) -> object:
                return self

            def attend(self, layer: AttentionLayer, queries: torch.Tensor) -> torch.Tensor:
                q.copy_(queries)
                graph.replay()
                return out

        check_attention(Replayed(), pool, batch, 32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 896, 4096, 8192])
def test_norms_and_activation(dtype: torch.dtype, width: int) -> None:
    pool = pool_of(1, 16, 4, dtype, 8, DEVICE)
    kernels = TritonKernels(config_of(width, 2, 1, 16), pool)
    check_norms(kernels, batch_of([(0, 3)], 4, 8, DEVICE), width, dtype, DEVICE)


@pytest.mark.parametrize(("dtype", "norms"), list(product(DTYPES, [True, False])))
@pytest.mark.parametrize(("page", "group", "head_dim"), [(64, 4, 128), (16, 7, 64), (1, 3, 20)])
@pytest.mark.parametrize("shift", [0, 120_000])
def test_rotation_and_store(dtype: torch.dtype, norms: bool, page: int, group: int, head_dim: int, shift: int) -> None:
    pool, config = pool_of(4, head_dim, page, dtype, 500, DEVICE), config_of(64, 4 * group, 4, head_dim)
    batch = padded(batch_of([(0, 130), (0, 1), (0, 77)], page, 500, DEVICE), 5)
    batch.positions += shift
    check_rotation(TritonKernels(config, pool), config, pool, batch, dtype, norms)


@pytest.mark.parametrize(("vocab", "scale"), [(97, 0.1), (32_000, 5.0), (151_936, 1.0)])
def test_draws_the_tokens_of_the_cpu(vocab: int, scale: float) -> None:
    logits, rows = logits_of(20 * len(FILTERS), vocab, scale, DEVICE), rows_of(FILTERS * 20, range(20 * len(FILTERS)))
    assert draw(logits, parameters_of(rows, DEVICE)).tolist() == expected(logits, rows)


def test_broken_rows_and_bans_do_not_affect_other_rows() -> None:
    logits = logits_of(5, 50_000, 1.0, DEVICE)
    logits[0, 43_210], logits[1, 3], logits[2, 0] = torch.nan, -torch.inf, torch.inf
    adjusted = logits.clone()
    adjusted[3] = -torch.inf
    adjusted[4, :49_999] = -torch.inf
    for sampling in FILTERS:
        rows = rows_of([sampling] * 5)
        assert draw(logits, parameters_of(rows, DEVICE), adjusted).tolist() == [-1, -1, -1, -2, 49_999]
