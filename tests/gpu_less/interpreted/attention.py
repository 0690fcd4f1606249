from dataclasses import replace
from itertools import product

import pytest
import torch

from engine.attention import AttentionLayer, TorchAttention
from engine.cuda.attention import TritonAttention
from tests.engine.build import thinned
from tests.gpu_less.contract import FLOAT8, TOLERANCE, batch_of, check_attention, fill, pool_of

CPU = torch.device("cpu")
NUM_BLOCKS = 400
MIXED = [(39, 40), (0, 37), (15, 16), (28, 33), (-1, 0), (13, 77), (0, 1)]
SHORT = [(39, 40), (0, 6), (15, 16), (28, 33), (-1, 0), (13, 17), (0, 1)]
SPANS = [[(99, 100), (-1, 0), (0, 1), (64, 65)], [(199, 202), (60, 68)]]
# (block size, GQA group, head_dim, window), with unusual values of each
SHAPES = [(16, 1, 64, 0), (64, 3, 20, 0), (1, 4, 16, 0), (4, 2, 32, 13), (128, 7, 16, 30), (20, 1, 80, 1)]


@pytest.mark.parametrize(
    ("dtype", "shape"), thinned(product([torch.float32, torch.float16, torch.bfloat16], SHAPES), 5)
)
def test_mixed_batches_in_any_order(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    page, group, head_dim, window = shape
    pool = pool_of(2, head_dim, page, dtype, NUM_BLOCKS, CPU)
    check_attention(
        TritonAttention(pool), pool, batch_of(MIXED, page, NUM_BLOCKS, CPU), 2 * group, dtype, window, pad=2
    )


@pytest.mark.parametrize(
    ("dtype", "window", "spans"), thinned(product([torch.float32, torch.float16], [0, 70], SPANS), 7)
)
def test_decodes_are_split_and_merged(dtype: torch.dtype, window: int, spans: list[tuple[int, int]]) -> None:
    pool = pool_of(2, 16, 16, dtype, NUM_BLOCKS, CPU)
    backend, batch = TritonAttention(pool, split_tokens=16), batch_of(spans, 16, NUM_BLOCKS, CPU)
    assert backend.splits(2 * len(spans), 100) > 1
    check_attention(backend, pool, batch, 6, dtype, window)


@pytest.mark.parametrize("span", [(99, 100), (94, 100)])
def test_blocks_before_the_window_are_not_read(span: tuple[int, int]) -> None:
    """A block before the window may already belong to another request, and may contain NaN."""
    pool, batch = pool_of(2, 16, 16, torch.float16, NUM_BLOCKS, CPU), batch_of([span], 16, NUM_BLOCKS, CPU)
    q = torch.ones(span[1] - span[0], 4, 16, dtype=torch.float16)
    fill(pool, batch, 1)
    pool.tensor[batch.block_table[0, : (span[0] + 1 - 8) // 16].long()] = torch.nan
    assert TritonAttention(pool).plan(batch).attend(AttentionLayer(1, 8), q).isfinite().all()


def test_a_pool_of_16_bits_serves_float32_queries() -> None:
    pool = pool_of(2, 32, 16, torch.float16, NUM_BLOCKS, CPU)
    check_attention(TritonAttention(pool), pool, batch_of(MIXED, 16, NUM_BLOCKS, CPU), 4, torch.float32)


@pytest.mark.parametrize("dtype", thinned([torch.float32, torch.bfloat16], 2))
def test_a_pool_of_float8(dtype: torch.dtype) -> None:
    pool = pool_of(2, 32, 16, FLOAT8, NUM_BLOCKS, CPU, scales=(0.25, 3.0))
    for spans in (SHORT, SPANS[0]):
        backend = TritonAttention(pool, split_tokens=32)
        check_attention(backend, pool, batch_of(spans, 16, NUM_BLOCKS, CPU), 4, dtype)


def test_a_group_wider_than_a_tile_of_float32() -> None:
    pool = pool_of(1, 16, 16, torch.float32, NUM_BLOCKS, CPU)
    for spans in ([(0, 9), (4, 5)], [(3, 6), (4, 5)]):
        check_attention(TritonAttention(pool), pool, batch_of(spans, 16, NUM_BLOCKS, CPU), 40, torch.float32)


def test_a_replay_reads_the_current_content_of_the_batch() -> None:
    """As with a CUDA graph, the plan is made once, from upper bounds instead of the actual lengths."""
    pool = pool_of(2, 16, 16, torch.float32, NUM_BLOCKS, CPU)
    backend, batch = TritonAttention(pool, split_tokens=32), batch_of([(9, 10), (79, 80)], 16, NUM_BLOCKS, CPU)
    plan = backend.plan(replace(batch, starts=[99, 99], kv_lens=[100, 100]))

    class Planned:
        name = "planned"

        def plan(self, _: object) -> object:
            return plan

    check_attention(Planned(), pool, batch, 4, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "heads", "sizes"), thinned([(torch.bfloat16, 6, (32, 10)), (torch.float32, 20, (24, 8))], 2)
)
def test_latents(dtype: torch.dtype, heads: int, sizes: tuple[int, int]) -> None:
    pool = pool_of(1, sum(sizes) // 2, 16, dtype, NUM_BLOCKS, CPU)
    generator = torch.Generator().manual_seed(1)
    for spans in (SHORT, [(99, 100), (64, 65)], [(70, 73), (31, 33)]):
        batch = batch_of(spans, 16, NUM_BLOCKS, CPU)
        pool.tensor.fill_(torch.nan)
        for row, end in zip(batch.block_table, batch.kv_lens, strict=True):
            for at in range(end):
                pool.tensor[row[at // 16], :, :, at % 16].normal_(generator=generator)
        q = torch.randn(len(batch.positions), heads, sum(sizes), generator=generator).to(dtype)
        layer = AttentionLayer(1, latent=sizes[0])
        real = batch.slots >= 0
        found = TritonAttention(pool, split_tokens=16).plan(batch).attend(layer, q)[real].float()
        wanted = TorchAttention(pool).plan(batch).attend(layer, q)[real].float()
        torch.testing.assert_close(found, wanted, atol=20 * TOLERANCE[dtype], rtol=20 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "sinks"),
    thinned([(torch.float32, 0, 5.0, True), (torch.float32, 13, 0.0, True), (torch.bfloat16, 13, 2.0, False)], 2),
)
def test_soft_caps_and_sinks(dtype: torch.dtype, window: int, softcap: float, sinks: bool) -> None:
    given = torch.linspace(-3.0, 4.0, 6) if sinks else None
    for spans in (SHORT, [(99, 100), (64, 65)]):
        pool = pool_of(2, 16, 16, dtype, NUM_BLOCKS, CPU)
        backend, batch = TritonAttention(pool, split_tokens=32), batch_of(spans, 16, NUM_BLOCKS, CPU)
        check_attention(backend, pool, batch, 6, dtype, window, softcap=softcap, sinks=given)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads"), thinned([(torch.float32, 16, 4), (torch.bfloat16, 160, 20)], 2)
)
def test_heads_of_twice_the_size(dtype: torch.dtype, head_dim: int, heads: int) -> None:
    """If heads have the large size 320, several programs work on one key head."""
    pool = pool_of(4, head_dim, 16, dtype, NUM_BLOCKS, CPU)
    pool.tensor.normal_(generator=torch.Generator().manual_seed(2))
    batch = batch_of([(39, 40), (0, 11), (7, 9)], 16, NUM_BLOCKS, CPU)
    plan, known = TritonAttention(pool, split_tokens=16).plan(batch), TorchAttention(pool).plan(batch)
    for layer, width in ((AttentionLayer(1, wide=2), 2 * head_dim), (AttentionLayer(0), head_dim)):
        q = torch.randn(len(batch.positions), heads, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        found, wanted = plan.attend(layer, q).float(), known.attend(layer, q).float()
        torch.testing.assert_close(found, wanted, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def test_the_contract_detects_a_missing_key() -> None:
    pool = pool_of(2, 16, 16, torch.float32, NUM_BLOCKS, CPU)
    batch = batch_of([(39, 40), (0, 20)], 16, NUM_BLOCKS, CPU)
    backend = TritonAttention(pool)

    class Short:
        name = "short"

        def plan(self, given: object) -> object:
            return backend.plan(replace(batch, kv_len=batch.kv_len - 1))

    with pytest.raises(AssertionError):
        check_attention(Short(), pool, batch, 4, torch.float32)


def test_heads_larger_than_any_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim of 288"):
        TritonAttention(pool_of(2, 288, 16, torch.float32, 2, CPU))
