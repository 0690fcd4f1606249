"""Test attention and kernels on a CPU, both of numba and of the torch reference, against results in float64."""

import importlib.util
from itertools import product
from random import Random
from typing import Any

import pytest
import torch

from engine.attention import AttentionLayer
from engine.cpu.selection import attention_on_cpu, kernels_on_cpu
from engine.kernels import TorchKernels
from tests.engine.build import thinned, threads
from tests.gpu_less.contract import (
    ROUTERS,
    batch_of,
    check_attention,
    check_norms,
    check_order,
    check_rotation,
    check_router,
    config_of,
    fill,
    padded,
    pool_of,
    random,
)

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from engine.cpu.attention import NumbaAttention
from engine.cpu.attention_items import AttentionWork
from engine.cpu.jit import kernel
from engine.cpu.simd import FLOAT32, LANES, exponential, load_some, store_some, two_to_the

__all__ = ["threads"]  # a fixture
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = ["torch", "numba"]


def spans(rng: Random) -> list[tuple[int, int]]:
    """Return spans of decodes, first chunks and later chunks, in random order."""
    found = [(end - 1, end) for end in rng.sample(range(1, 200), 3)]
    found += [(0, rng.randrange(1, 90))]
    found += [(start, start + rng.randrange(1, 70)) for start in rng.sample(range(1, 150), 2)]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize(("name", "dtype", "head_dim"), thinned(product(BACKENDS, DTYPES, [16, 20, 64, 128]), 5))
def test_attention_equals_its_definition(name: str, dtype: torch.dtype, head_dim: int) -> None:
    rng = Random(head_dim)
    for block_tokens in (1, 4, 16, 64):
        for group in (1, 3, 7, 12):
            kv_heads, window = rng.choice([1, 2]), rng.choice([0, 0, 1, 7, 100])
            batch = batch_of(spans(rng), block_tokens, 1300 // block_tokens + 7, CPU)
            pool = pool_of(kv_heads, head_dim, block_tokens, dtype, 1300 // block_tokens + 7, CPU)
            check_attention(attention_on_cpu(name, pool), pool, batch, kv_heads * group, torch.float32, window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("group", [28, 150])
def test_many_heads_may_share_a_key(name: str, group: int) -> None:
    """A group of 150 heads exceeds MAX_ROWS. With a group of 28 heads, the kernel pads some rows of scores, because
    their size would otherwise be a power of 2."""
    batch, pool = batch_of([(0, 130), (200, 201), (77, 80)], 16, 40, CPU), pool_of(2, 16, 16, torch.float32, 40, CPU)
    check_attention(attention_on_cpu(name, pool), pool, batch, 2 * group, torch.float32, 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 900])
def test_few_long_contexts_are_divided_and_merged(dtype: torch.dtype, window: int, threads: int) -> None:
    batch = batch_of([(1499, 1500), (0, 40), (2000, 2011)], 16, 300, CPU)
    pool = pool_of(1, 64, 16, dtype, 300, CPU)
    work = AttentionWork(batch, 1, 3, window, threads)
    assert bool(work.num_merged) == (threads > 1)
    check_attention(NumbaAttention(pool), pool, batch, 3, torch.float32, window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (0.0, True), (2.0, True)])
def test_scores_are_capped_and_sinks_take_a_share(name: str, softcap: float, sinks: bool) -> None:
    """The batch has two decodes, a long chunk and a short one. Threads share the longest contexts."""
    batch = batch_of([(1499, 1500), (0, 90), (2000, 2011), (3, 4)], 16, 300, CPU)
    pool = pool_of(1, 64, 16, torch.float32, 300, CPU)
    values = random((6,), torch.float32, CPU, 7) + 3 if sinks else None
    for window in (0, 100):
        check_attention(
            attention_on_cpu(name, pool), pool, batch, 6, torch.float32, window, softcap=softcap, sinks=values
        )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("broken", [1, 2])
def test_a_broken_context_spoils_only_its_own_request(name: str, broken: int) -> None:
    batch = batch_of([(59, 60), (10, 50), (79, 80), (0, 30)], 16, 20, CPU)
    pool = pool_of(2, 64, 16, torch.float32, 20, CPU)
    fill(pool, batch, 0)
    pool.tensor[batch.block_table[broken, 0], :, 0, 3] = torch.nan
    out = attention_on_cpu(name, pool).plan(batch).attend(AttentionLayer(0), random((72, 6, 64), torch.float32, CPU, 0))
    spoilt = torch.zeros(72, dtype=torch.bool)
    spoilt[slice(1, 41) if broken == 1 else 41] = True
    assert out[~spoilt].isfinite().all()
    assert out[spoilt].isnan().all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("width", [64, 52, 768])
def test_norms_activations_and_sums_equal_their_definitions(name: str, width: int) -> None:
    pool = pool_of(2, 16, 4, torch.float32, 9, CPU)
    config, batch = config_of(width, 4, 2, 16), batch_of([(0, 5)], 4, 9, CPU)
    kernels = TorchKernels(config, pool) if name == "torch" else kernels_on_cpu(config, pool)
    assert kernels.name == name
    check_norms(kernels, batch, width, torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "norms"), thinned(product(BACKENDS, DTYPES, [16, 20, 64, 128], [False, True]), 7)
)
def test_rotation_stores_kv_only_in_the_slots_of_the_batch(
    name: str, dtype: torch.dtype, head_dim: int, norms: bool
) -> None:
    for block_tokens in (1, 4, 64):
        batch = batch_of([(0, 1), (0, 9), (0, 30)], block_tokens, 60, CPU)
        if name == "numba":  # the torch kernels store padding in the dummy block
            batch = padded(batch, 3)
        pool = pool_of(2, head_dim, block_tokens, dtype, 60, CPU)
        config = config_of(64, 6, 2, head_dim)
        kernels = TorchKernels(config, pool) if name == "torch" else kernels_on_cpu(config, pool)
        check_rotation(kernels, config, pool, batch, torch.float32, norms)


@kernel
def exponentials(values: Any) -> None:
    source, target, count, code = values[0], values[1], values[2], values[3]
    for at in range(0, count, LANES):
        x = exponential(load_some(source + 4 * at, count - at, FLOAT32))
        store_some(x, target + (4 if code == FLOAT32 else 2) * at, count - at, code)


@kernel
def powers_of_two(values: Any) -> None:
    source, target, count = values[0], values[1], values[2]
    for at in range(0, count, LANES):
        store_some(two_to_the(load_some(source + 4 * at, count - at, FLOAT32)), target + 4 * at, count - at, FLOAT32)


def computed(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty_like(x, dtype=dtype)
    exponentials(0, x.data_ptr(), out.data_ptr(), len(x), DTYPES.index(dtype))
    return out


def test_the_exponential_is_accurate_and_propagates_nan() -> None:
    x = torch.linspace(-87, 88, 100_003)
    expected = x.double().exp()
    assert ((computed(x).double() - expected) / expected).abs().max() < 2e-7
    edges = computed(torch.tensor([-torch.inf, -1e30, -88.0, torch.nan, 0.0]))
    assert edges[:3].tolist() == [0.0, 0.0, 0.0]
    assert edges[3].isnan()
    assert edges[4] == 1.0
    # Every bit pattern of NaN gives NaN, including the pattern in which all bits are 1.
    assert (
        computed(torch.tensor([-1, 0x7FC00001, 0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32))
        .isnan()
        .all()
    )


def test_a_power_of_two_is_accurate_and_propagates_nan() -> None:
    x = torch.cat((torch.linspace(-126, 0, 100_003), torch.tensor([-torch.inf, -1e30, -127.0, torch.nan, -8.0])))
    out = torch.empty_like(x)
    powers_of_two(0, x.data_ptr(), out.data_ptr(), len(x))
    expected = x[:-5].double().exp2()
    assert ((out[:-5].double() - expected) / expected).abs().max() < 2e-7
    assert out[-5:].nan_to_num(5.0).tolist() == [0.0, 0.0, 0.0, 5.0, 2**-8]


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bit_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    x = torch.cat((torch.linspace(-9, 9, 4099), torch.tensor([torch.nan, -torch.inf])))
    assert torch.equal(computed(x, dtype).isnan(), x.isnan())
    assert torch.equal(computed(x, dtype)[:-2], computed(x)[:-2].to(dtype))


def test_the_number_of_threads_may_grow_between_plan_and_attention() -> None:
    batch = batch_of([(0, 90), (10, 50), (79, 80)], 16, 20, CPU)
    pool = pool_of(2, 64, 16, torch.float32, 20, CPU)
    fill(pool, batch, 1)
    torch.set_num_threads(1)
    plan, q = NumbaAttention(pool).plan(batch), random((131, 6, 64), torch.float32, CPU, 0)
    expected = plan.attend(AttentionLayer(1), q)
    torch.set_num_threads(4)
    torch.testing.assert_close(plan.attend(AttentionLayer(1), q), expected, rtol=0, atol=1e-6)


def test_the_named_backend_runs() -> None:
    pool = pool_of(2, 16, 4, torch.float32, 9, CPU)
    assert [attention_on_cpu(name, pool).name for name in ("auto", "numba", "torch")] == ["numba", "numba", "torch"]
    batch = batch_of([(0, 2)], 4, 9, CPU)
    with pytest.raises(ValueError, match=r"computes in float32"):
        attention_on_cpu("numba", pool).plan(batch).attend(
            AttentionLayer(0), torch.zeros(2, 4, 16, dtype=torch.bfloat16)
        )


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_by_the_reference(name: str) -> None:
    pool = pool_of(1, 16, 4, torch.float32, 8, CPU)
    step = kernels_on_cpu(config_of(16, 2, 1, 16), pool).begin(batch_of([(0, 1)], 4, 8, CPU))
    check_router(step, ROUTERS[name], CPU, tokens=300)
    spec = ROUTERS[name]
    weights, chosen = step.route(spec, torch.full((2, spec.num_experts), torch.nan), None, torch.ones(spec.num_experts))
    assert bool(weights.isnan().all())
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < spec.num_experts
    for count in (1, 7, 1000):
        check_order(step, count, CPU)
