from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention import TorchAttention
from engine.kernels import TorchKernels
from engine.kv_pool import KVPool
from engine.options import blocks_for
from shared.kv.layout import KVLayout
from shared.kv.memory import HostMemory
from tests.engine.build import CPU
from tests.gpu_less.contract import FLOAT8, batch_of, check_attention, check_rotation, config_of, pool_of

LAYOUT = KVLayout(num_blocks=5, kv_heads=2, layers=3, block_tokens=4, head_dim=6, dtype="float32")


def test_the_pool_is_a_view_of_its_memory_and_layers_are_views_of_the_pool() -> None:
    memory = HostMemory(LAYOUT.num_blocks, LAYOUT.block_bytes)
    pool = KVPool(LAYOUT, memory)
    k, v = pool.layer(1)
    assert k.shape == v.shape == (5, 2, 4, 6)
    k[3, 1, 2, 4], v[3, 1, 2, 4] = 7.0, 8.0
    row = memory.rows[3].view(np.float32).reshape(LAYOUT.shape[1:])
    assert (row[1, 1, 2, :, 4] == [7.0, 8.0]).all()
    assert np.count_nonzero(memory.rows.view(np.float32)) == 2
    memory.rows[2] = 255  # as if a peer wrote NaN
    assert pool.tensor[2].isnan().all()
    assert not pool.tensor[3].isnan().any()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1)])
def test_sizes_and_dtypes(dtype: str, size: int) -> None:
    layout = KVLayout(3, 2, 3, 4, 6, dtype)
    assert layout.block_bytes == 2 * 3 * 4 * 2 * 6 * size
    pool = KVPool(layout, HostMemory(3, layout.block_bytes))
    assert pool.tensor.dtype == getattr(torch, dtype)
    assert tuple(pool.tensor.shape) == layout.shape


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.002, 3.0)])
def test_keys_and_values_in_float8(scales: tuple[float, float]) -> None:
    """Keys and values are divided by their scales and then limited to the range of float8. With the scale 0.002, keys
    exceed this range."""
    for dtype in (torch.float32, torch.bfloat16):
        pool = pool_of(2, 16, 4, FLOAT8, 40, CPU, scales=scales)
        batch, config = batch_of([(0, 5), (0, 1)], 4, 40, CPU), config_of(64, 2, 2, 16)
        check_rotation(TorchKernels(config, pool), config, pool, batch, dtype, norms=True)
        check_attention(TorchAttention(pool), pool, batch_of([(9, 10), (0, 7)], 4, 40, CPU), 4, dtype)
    assert pool.stored(1, torch.tensor([[torch.nan], [1e9]])).float()[0].isnan()
    assert "float8" in pool.layout.describe()


@pytest.mark.parametrize("window", [0, 20])
def test_the_reference_computes_few_scores_at_once(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk follows a longer context. Because of the soft cap, the scores are a tensor on a CPU too."""
    computed: set[int] = set()

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._softmax.default and args[0].dtype == torch.float32:
                computed.add(args[0].numel())
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("engine.attention.MAX_SCORES", 1000)
    pool = pool_of(2, 16, 4, torch.float32, 40, CPU)
    with Notes():  # type: ignore[no-untyped-call]
        batch = batch_of([(30, 49)], 4, 40, CPU)
        check_attention(TorchAttention(pool), pool, batch, 4, torch.float32, window, softcap=2.0)
    assert 0 < max(computed) <= 1000


def test_the_description_of_a_layout_omits_only_the_number_of_blocks() -> None:
    assert LAYOUT.describe() == KVLayout(9, 2, 3, 4, 6, "float32").describe()
    others = [(4, 3, 4, 6, "float32"), (2, 4, 4, 6, "float32"), (2, 3, 8, 6, "float32"), (2, 3, 4, 8, "float32")]
    texts = {KVLayout(5, *rest).describe() for rest in [*others, (2, 3, 4, 6, "bfloat16")]}
    assert len(texts | {LAYOUT.describe()}) == 6


def test_blocks_for_counts_whole_blocks_and_refuses_fewer_than_two() -> None:
    one = KVLayout(1, 2, 3, 4, 6, "float32")
    assert blocks_for(10 * one.block_bytes - 1, one) == 9
    assert blocks_for(2 * one.block_bytes, one) == 2
    with pytest.raises(ValueError, match=rf"{one.block_bytes} bytes .*which take {2 * one.block_bytes} bytes"):
        blocks_for(2 * one.block_bytes - 1, one)


def test_memory_of_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout needs"):
        KVPool(LAYOUT, HostMemory(LAYOUT.num_blocks, LAYOUT.block_bytes + 4))


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1, 1, "float32"), (1, -1, 1, 1, 1, "float32"), (1, 1, 1, 1, 1, "int3")])
def test_invalid_layouts_are_refused(sizes: tuple[int, int, int, int, int, str]) -> None:
    with pytest.raises(ValueError, match="KV"):
        KVLayout(*sizes)
