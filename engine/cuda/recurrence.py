"""Recurrent layers on a GPU. A layer takes four launches for all slices of a step."""

import torch
import triton
from torch import Tensor

from engine.batch import Batch
from engine.cuda import recurrence_kernels as triton_states
from engine.kv_pool import KVPool
from engine.models.spec import DeltaSpec
from engine.recurrence import RecurrentLayer, states_of

STAGES = 4  # number of tokens whose inputs a program loads ahead
# How many columns of a recurrent matrix a program keeps in the registers of one warp. With few columns, each token of
# a chunk takes less time. With many columns, a step of decodes reads and writes its states faster.
COLUMNS_OF_CHUNKS, COLUMNS_OF_DECODES = 8, 16
CHUNK = 16  # number of tokens that a program of the convolution computes at once
PROGRAMS = 4  # number of programs that compute the convolution of one head of one slice, if the step has chunks


def recur(
    pool: KVPool, batch: Batch, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor, epsilon: float
) -> Tensor:
    """Compute `StepKernels.recur`. `epsilon` is used in the RMS norm of the results.

    The launches depend only on shapes, so a CUDA graph may contain them. Slices without tokens are padding.
    """
    spec, states, rows, slices = layer.spec, states_of(batch), len(inputs), len(batch.cu_q) - 1
    is_delta, device = isinstance(spec, DeltaSpec), inputs.device
    mixed = torch.empty(rows, spec.channels, dtype=torch.float32, device=device)
    out = torch.empty(rows, spec.inner, dtype=torch.float32, device=device)
    result = torch.empty(rows, spec.inner, dtype=inputs.dtype, device=device)
    if not rows:
        return result
    given = (
        pool.floats, states.rows, states.rows.stride(0), states.save_at, pool.units, pool.units.shape[1],
        pool.layout.block_bytes // 4, states.rows.shape[2], batch.cu_q, spec.channels,
    )  # fmt: skip
    (heads_0, size_0), (heads_1, size_1), (_, size_2) = spec.parts
    decodes = max(batch.counts, default=CHUNK) == 1
    chunk, programs, warps = (1, 1, 1) if decodes else (CHUNK, PROGRAMS, 8)
    columns = COLUMNS_OF_DECODES if decodes else COLUMNS_OF_CHUNKS
    triton_states.convolve[(layer.num_inputs, programs, slices)](
        mixed, inputs, inputs.stride(0), layer.conv, layer.conv if layer.conv_bias is None else layer.conv_bias, *given,
        layer.first_unit, HEADS_0=heads_0, SIZE_0=size_0, HEADS_1=heads_1, SIZE_1=size_1, SIZE_2=size_2,
        CONV=spec.conv, DELTA=is_delta, HAS_BIAS=layer.conv_bias is not None, BLOCK_T=chunk,
        BLOCK_C=triton.next_power_of_2(max(size_0, size_1, size_2)), BLOCK_K=triton.next_power_of_2(spec.conv - 1),
        num_warps=warps,
    )  # fmt: skip
    factors = torch.empty(rows, spec.value_heads, 2, dtype=torch.float32, device=device)
    triton_states.factors[(triton.cdiv(rows * spec.value_heads, 256),)](
        factors, steps, steps.stride(0), layer.rates, layer.step_bias, rows, HEADS=spec.value_heads, DELTA=is_delta,
        BLOCK=256, num_warps=4,
    )  # fmt: skip
    query_at, key_at, value_at = spec.columns
    triton_states.recur[(spec.value_heads, triton.cdiv(spec.value_dim, columns), slices)](
        out, mixed, factors, layer.skip, *given,
        layer.first_unit + layer.num_inputs, HEADS=spec.value_heads, SHARED=spec.value_heads // spec.key_heads,
        KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim, QUERY_AT=query_at, KEY_AT=key_at, VALUE_AT=value_at,
        DELTA=is_delta, BLOCK_K=triton.next_power_of_2(spec.key_dim), BLOCK_V=columns, STAGES=STAGES,
        num_warps=1,
    )  # fmt: skip
    block = triton.next_power_of_2(layer.group)
    triton_states.norm_gated[(rows, spec.inner // layer.group)](
        out, gate, gate.stride(0), layer.norm, result, epsilon, WIDTH=spec.inner, GROUP=layer.group, BLOCK=block,
        GATES_FIRST=not is_delta, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return result
