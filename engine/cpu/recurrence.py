"""Recurrent layers on a CPU: the arguments of the numba kernels."""

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cpu import recurrence_kernels as numba_kernels
from engine.cpu.malloc import empty
from engine.kv_pool import KVPool
from engine.models.spec import DeltaSpec
from engine.recurrence import RecurrentLayer, places_of

EXPONENTIAL = 8  # cost of an exponential, relative to a multiplication


def recur(
    pool: KVPool, batch: Batch, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor, epsilon_at: int
) -> Tensor:
    """Return `StepKernels.recur`. `epsilon_at` is the address of the norms' epsilon."""
    assert {(one.dtype, one.stride(1)) for one in (inputs, gate, steps)} == {(torch.float32, 1)}
    spec, rows, count = layer.spec, len(inputs), len(batch.starts)
    is_delta, width = int(isinstance(spec, DeltaSpec)), spec.conv
    places, save_at = places_of(pool, batch)
    given = [pool.tensor.data_ptr(), *(one.data_ptr() for one in (*places, save_at)), places.shape[2]]
    cu_q = batch.cu_q.contiguous()
    table, zeros = _units(layer), torch.zeros((width - 1) * max(size for _, size in spec.parts))
    mixed, sizes, out = empty(rows, spec.channels), empty(rows, spec.value_heads, 2), empty(rows, spec.inner)
    numba_kernels.convolve(
        (width + EXPONENTIAL) * mixed.numel(), count, cu_q.data_ptr(), inputs.data_ptr(), inputs.stride(0),
        mixed.data_ptr(), spec.channels, width, layer.conv.data_ptr(), _address(layer.conv_bias), *given,
        layer.first_unit, len(table), table.data_ptr(), zeros.data_ptr(),
    )  # fmt: skip
    numba_kernels.step_sizes(
        4 * EXPONENTIAL * sizes.numel(), rows, spec.value_heads, steps.data_ptr(), steps.stride(0),
        layer.rates.data_ptr(), layer.step_bias.data_ptr(), sizes.data_ptr(), is_delta,
    )  # fmt: skip
    tiles = empty(torch.get_num_threads(), spec.key_dim, numba_kernels.TILE)
    numba_kernels.recur(
        4 * out.numel() * spec.key_dim, count, cu_q.data_ptr(), mixed.data_ptr(), spec.channels, sizes.data_ptr(),
        spec.value_heads, spec.value_heads // spec.key_heads, spec.key_dim, spec.value_dim, *spec.columns,
        out.data_ptr(), *given, layer.first_unit + layer.num_inputs, layer.skip.data_ptr(), is_delta, tiles.data_ptr(),
    )  # fmt: skip
    numba_kernels.norm_gated(
        EXPONENTIAL * out.numel(), out.data_ptr(), rows, spec.inner, gate.data_ptr(), gate.stride(0),
        layer.norm.data_ptr(), layer.group, epsilon_at, 1 - is_delta,
    )  # fmt: skip
    return out


def sigmoid_gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Return rows * sigmoid(gate), in the memory of `rows` if it is contiguous."""
    rows, gate = rows.contiguous(), gate.contiguous()
    assert rows.dtype == gate.dtype == torch.float32
    numba_kernels.sigmoid_mul(EXPONENTIAL * rows.numel(), *rows.shape, rows.data_ptr(), gate.data_ptr())
    return rows


def _units(layer: RecurrentLayer) -> Tensor:
    """Return the column, size and kind (1: query, 2: key, 0: other) of each head of the convolution."""
    kinds = (1, 2, 0) if isinstance(layer.spec, DeltaSpec) else (0, 0, 0)
    table, column = [], 0
    for (heads, size), kind in zip(layer.spec.parts, kinds, strict=True):
        for _ in range(heads):
            table.append((column, size, kind))
            column += size
    return torch.tensor(table)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
