"""Recurrent layers on a CPU: the arguments of the numba kernels."""

from functools import cache

import torch
from torch import Tensor

from engine.batch import Batch
from engine.cpu import recurrence_kernels as numba_kernels
from engine.cpu.malloc import empty
from engine.kv_pool import KVPool
from engine.models.spec import DeltaSpec
from engine.recurrence import RecurrentLayer, places_of, starts_of

EXPONENTIAL = 8  # cost of an exponential, relative to a multiplication


def recur(
    pool: KVPool, batch: Batch, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor, epsilon_at: int
) -> Tensor:
    """Implement `StepKernels.recur`. `epsilon_at` is the address of the norms' epsilon."""
    assert {(one.dtype, one.stride(1)) for one in (inputs, gate, steps)} == {(torch.float32, 1)}
    spec, rows = layer.spec, len(inputs)
    is_delta = isinstance(spec, DeltaSpec)
    places, save_at = places_of(pool, batch)
    given = [pool.tensor.data_ptr(), *(one.data_ptr() for one in (*places, save_at)), places.shape[2], layer.first_unit]
    cu_q, threads = starts_of(batch).contiguous(), torch.get_num_threads()
    count = len(cu_q) - 1
    zeros = _zeros((spec.conv - 1) * max(size for _, size in spec.parts))
    sizes, out = empty(rows, 2, spec.value_heads), empty(rows, spec.inner)
    numba_kernels.step_sizes(
        4 * EXPONENTIAL * sizes.numel(), rows, spec.value_heads, steps.data_ptr(), steps.stride(0),
        layer.rates.data_ptr(), layer.step_bias.data_ptr(), sizes.data_ptr(), int(is_delta),
    )  # fmt: skip
    convolved = count, cu_q.data_ptr(), inputs.data_ptr(), inputs.stride(0)
    gated = gate.data_ptr(), gate.stride(0)
    shared, tile = spec.value_heads // spec.key_heads, numba_kernels.TILE
    if is_delta:
        assert layer.conv_bias is None
        states = shared * -(-spec.value_dim // tile) * tile * spec.key_dim
        scratch = empty(threads, states + numba_kernels.PIECE * (2 * spec.key_dim + shared * spec.value_dim))
        numba_kernels.delta(
            4 * out.numel() * spec.key_dim, *convolved, *gated, spec.channels, spec.conv, layer.conv.data_ptr(),
            sizes.data_ptr(), spec.key_heads, shared, spec.key_dim, spec.value_dim, out.data_ptr(),
            layer.norm.data_ptr(), epsilon_at, *given, zeros.data_ptr(), scratch.data_ptr(), 4 * scratch.shape[1],
        )  # fmt: skip
        return out
    table, mixed = _units(layer), empty(rows, spec.channels)
    numba_kernels.convolve(
        (spec.conv + EXPONENTIAL) * mixed.numel(), *convolved, mixed.data_ptr(), spec.channels, spec.conv,
        layer.conv.data_ptr(), _address(layer.conv_bias), *given, len(table), table.data_ptr(), zeros.data_ptr(),
    )  # fmt: skip
    tiles = empty(threads, spec.key_dim, tile)
    numba_kernels.recur(
        4 * out.numel() * spec.key_dim, count, cu_q.data_ptr(), mixed.data_ptr(), spec.channels, sizes.data_ptr(),
        spec.value_heads, shared, spec.key_dim, spec.value_dim, *spec.columns, out.data_ptr(), *given[:-1],
        layer.first_unit + layer.num_inputs, layer.skip.data_ptr(), tiles.data_ptr(),
    )  # fmt: skip
    numba_kernels.gated_norm(
        EXPONENTIAL * out.numel(), out.data_ptr(), rows, spec.inner, *gated, layer.norm.data_ptr(), layer.group,
        epsilon_at,
    )  # fmt: skip
    return out


def sigmoid_gated(rows: Tensor, gate: Tensor) -> Tensor:
    """Return rows * sigmoid(gate), in the memory of `rows` if it is contiguous."""
    rows, gate = rows.contiguous(), gate.contiguous()
    assert rows.dtype == gate.dtype == torch.float32
    numba_kernels.sigmoid_mul(EXPONENTIAL * rows.numel(), *rows.shape, rows.data_ptr(), gate.data_ptr())
    return rows


@cache
def _zeros(count: int) -> Tensor:
    return torch.zeros(count)


def _units(layer: RecurrentLayer) -> Tensor:
    """Return each convolution head's first column and number of columns, int64 [heads, 2]."""
    sizes = [size for heads, size in layer.spec.parts for _ in range(heads)]
    return torch.tensor([(sum(sizes[:unit]), size) for unit, size in enumerate(sizes)])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
