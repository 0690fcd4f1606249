"""The KV memory of a GPU over a double of the driver: a host with no GPU runs all of it but the GPU's own part."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.memory import DeviceMemory, _weights
from engine.kv_pool import KVPool
from shared.kv.layout import KVLayout
from shared.kv_gpu.cuda_driver import CudaError, CudaRegion
from tests.shared.fake_cuda import gpu

CPU = torch.device("cpu")


def memory(num_rows: int = 6, row_bytes: int = 1024, kind: str = "vmm") -> DeviceMemory:
    return DeviceMemory(CPU, num_rows, row_bytes, CudaRegion.allocate(gpu(kind=kind), num_rows * row_bytes))


def test_a_pool_sees_what_the_driver_copies_into_its_memory() -> None:
    layout = KVLayout(4, 2, 3, 8, 16, "bfloat16")
    ours = memory(layout.num_blocks, layout.block_bytes)
    pool = KVPool(layout, ours)
    assert not pool.tensor.any()
    staging = ours.staging()
    (room,) = staging.room([2])
    room[:] = np.full(layout.block_bytes // 2, 0x3F80, np.uint16).tobytes()  # 1 as bfloat16
    staging.write([2])
    assert (pool.tensor[2] == 1).all()
    assert not pool.tensor[[0, 1, 3]].any()
    pool.tensor[3] = pool.tensor[2]
    assert bytes(staging.read([3])[0]) == bytes(staging.read([2])[0]) != bytes(staging.read([1])[0])
    staging.close()
    del pool
    for _ in range(2):
        ours.close()


@given(
    rows=st.lists(st.integers(0, 5), max_size=9),
    word=st.integers(0, 127),
    bit=st.integers(0, 63),
    seed=st.integers(0, 99),
)
def test_checksums_are_of_each_row_in_order_and_show_any_bit(rows: list[int], word: int, bit: int, seed: int) -> None:
    ours = memory()
    ours.rows[:] = torch.randint(
        0, 256, ours.rows.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    assert ours.checksums(rows) == b"".join(ours.checksums([row]) for row in rows)
    words = ours.rows.view(torch.int64).tolist()
    weights = _weights(128, CPU).tolist()
    expected = sum(number * weight for number, weight in zip(words[3], weights, strict=True)) % 2**64
    assert ours.checksums([3]) == expected.to_bytes(8, "little")
    before = ours.checksums([3])
    ours.rows.view(torch.int64)[3, word] ^= 1 << bit if bit < 63 else -(2**63)
    assert ours.checksums([3]) != before
    ours.close()


def test_rows_that_changed_places_have_other_checksums() -> None:
    ours = memory()
    ours.rows[:] = torch.arange(6, dtype=torch.uint8)[:, None]
    assert len({ours.checksums([row]) for row in range(6)}) == 6
    assert len(set(_weights(4096, CPU).tolist())) == 4096
    assert (_weights(4096, CPU) % 2 != 0).all()
    ours.rows[4, :8], ours.rows[4, 8:16] = 1, 2
    ours.rows[5, :8], ours.rows[5, 8:16] = 2, 1
    ours.rows[4:, 16:] = 0
    assert ours.checksums([4]) != ours.checksums([5])
    ours.close()


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(0, 8), (8, 0), (3, 12)])
def test_memory_of_no_size_or_of_no_whole_words_is_refused(num_rows: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="choose another --block-size"):
        DeviceMemory(CPU, num_rows, row_bytes)


def test_memory_that_the_gpu_does_not_have_is_refused_by_the_drivers_name_of_it() -> None:
    for kind, call in (("vmm", "cuMemCreate"), ("legacy", "cuMemAlloc_v2")):
        with pytest.raises(CudaError, match=f"{call} failed: CUDA_ERROR_OUT_OF_MEMORY"):
            memory(2**20, 2**20, kind)
