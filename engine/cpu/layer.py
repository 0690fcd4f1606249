"""The element-wise work of a layer on a CPU, done by numba kernels that read each row once."""

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.cpu import layer_kernels as numba_kernels
from engine.cpu import routing, routing_kernels
from engine.cpu.malloc import empty
from engine.cpu.recurrence import recur, sigmoid_gated
from engine.cpu.simd import CODES
from engine.kernels import CommonStep, Kernels
from engine.kv_pool import KVPool
from engine.models.spec import Activation, ModelConfig
from engine.recurrence import RecurrentLayer

ACTIVATION_WORK = 8  # cost of an activation relative to a multiplication; an activation needs an exponential


class NumbaKernels(Kernels):
    """The numba kernels for one model and KV pool. Activations and norms must be float32."""

    name = "numba"

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        super().__init__(config, pool)
        layout = pool.layout
        self.epsilon = np.array([config.rms_norm_eps], np.float32)
        strides = (layout.block_bytes, layout.layers * layout.layer_bytes, layout.block_tokens)
        self.epsilon_at = self.epsilon.ctypes.data
        self.pool_shape = (*strides, CODES[layout.dtype], self.epsilon_at)

    def begin(self, batch: Batch) -> "NumbaStep":
        return NumbaStep(self, batch)


class NumbaStep(CommonStep):
    """The element-wise kernels of one step on a CPU.

    `NumbaKernels.begin` creates this object for one batch. The decoder uses it on the engine's thread and drops it
    after the step. It owns the batch's rotary angles, and writes KV directly into the pool.
    """

    route = staticmethod(routing.route)
    by_expert = staticmethod(routing.by_expert)
    sigmoid_gated = staticmethod(sigmoid_gated)
    _kernels: NumbaKernels

    def __init__(self, kernels: NumbaKernels, batch: Batch) -> None:
        super().__init__(kernels, batch)
        self.slots = [slots.contiguous() for slots in batch.all_slots]
        self._pool = kernels.pool.tensor.data_ptr()

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        rows = _checked(rows)
        normed = empty(*rows.shape)
        size = rows.shape[-1]
        numba_kernels.norm(
            2 * rows.numel(), rows.numel() // size, size, self._kernels.epsilon_at,
            rows.data_ptr(), weight.data_ptr(), normed.data_ptr(),
        )  # fmt: skip
        return normed

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden, update = _checked(hidden), _checked(update)
        normed = empty(*hidden.shape)
        numba_kernels.add_norm(
            3 * hidden.numel(), len(hidden), hidden.shape[1], self._kernels.epsilon_at,
            hidden.data_ptr(), update.data_ptr(), weight.data_ptr(), normed.data_ptr(),
        )  # fmt: skip
        return hidden, normed

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        kernels, config, qkv = self._kernels, self._kernels.config, _checked(qkv)
        if kernels.norms_values[layer]:
            return self._rotate_and_store_normed(layer, qkv, q_norm, k_norm)
        q = empty(len(qkv), config.num_heads, config.head_dim)
        cosine, sine = self._angles(layer)
        numba_kernels.rotate_and_store(
            2 * qkv.numel(), len(qkv), qkv.data_ptr(), q.data_ptr(),
            cosine.data_ptr(), sine.data_ptr(), self._slots(layer).data_ptr(),
            config.num_heads, config.num_kv_heads, config.head_dim,
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
            self._pool + self.pool.places.places[layer] * self.pool.layout.layer_bytes, *kernels.pool_shape,
        )  # fmt: skip
        return q

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = _checked(gate_up)
        rows, size = len(gate_up), gate_up.shape[1] // 2
        product = empty(rows, size)
        numba_kernels.gated(
            ACTIVATION_WORK * product.numel(), rows, size, gate_up.data_ptr(), product.data_ptr(),
            numba_kernels.ACTIVATIONS.index(activation),
        )  # fmt: skip
        return product

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        outputs, places, weights = _checked(outputs), places.contiguous(), _checked(weights)
        (rows, top_k), size = places.shape, outputs.shape[1]
        combined = empty(rows, size)
        routing_kernels.combine(
            outputs.numel(), rows, top_k, size, outputs.data_ptr(), places.data_ptr(), weights.data_ptr(),
            combined.data_ptr(),
        )  # fmt: skip
        return combined

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        return recur(self.pool, self._batch, layer, inputs, gate, steps, self._kernels.epsilon_at)


def _checked(rows: Tensor) -> Tensor:
    """Return `rows` as a contiguous tensor. Check the dtype, because the kernels get only an address."""
    assert rows.dtype == torch.float32, f"the numba kernels compute in float32, but the activations are {rows.dtype}"
    return rows.contiguous()
