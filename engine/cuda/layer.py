"""The element-wise work of a layer on a GPU. Each Triton kernel replaces 3 to 10 kernel launches by torch."""

import torch
import triton
from torch import Tensor

from engine.batch import Batch
from engine.cuda import layer_kernels as triton_rows
from engine.kernels import Kernels, combine, gated, rotate_and_store_latent, rotate_and_store_normed
from engine.models.spec import Activation
from engine.recurrence import RecurrentLayer, recur

SILU_BLOCK = 1024
ELEMENTS_PER_WARP = 256  # fewer would leave lanes idle; more would not fit into registers


class TritonKernels(Kernels):
    name = "triton"

    def begin(self, batch: Batch) -> "TritonStep":
        """Return the step's kernels. Nothing is computed from the batch here, so a graph can replay them."""
        return TritonStep(self, batch)


class TritonStep:
    """The element-wise kernels of one step on a GPU.

    `TritonKernels.begin` creates this object for one batch, and the decoder uses it on the engine's thread. It writes
    KV directly into the pool. Recurrent layers run the reference, one token after another.
    """

    def __init__(self, kernels: TritonKernels, batch: Batch) -> None:
        self._kernels = kernels
        self._batch = batch
        self._slots = batch.all_slots

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        return self._norm(flat, flat, weight, adds=False).view(rows.shape)

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, self._norm(hidden, update, weight, adds=True)

    def _norm(self, rows: Tensor, update: Tensor, weight: Tensor, adds: bool) -> Tensor:
        width = rows.shape[1]
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        block = triton.next_power_of_2(width)
        if len(rows):
            triton_rows.norm_rows[(len(rows),)](
                rows, update, weight, out, self._kernels.config.rms_norm_eps, rows.stride(0), update.stride(0),
                WIDTH=width, BLOCK=block, ADDS=adds, num_warps=_warps(block, 4),
            )  # fmt: skip
        return out

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """Return the queries as a view of `qkv`, where they are rotated in place."""
        kernels, batch, config = self._kernels, self._batch, self._kernels.config
        rotation = kernels.rotations[kernels.rotation_of[layer]]
        slots = self._slots[kernels.pool.places.tables[layer]]
        if kernels.norms_values[layer]:
            angles = rotation.angles(batch.positions)
            return rotate_and_store_normed(kernels, slots, angles, layer, qkv, q_norm, k_norm)
        keys, values = kernels.pool.layer(layer)
        group = config.num_heads // config.num_kv_heads
        block_g, block_h = triton.next_power_of_2(group), triton.next_power_of_2(config.head_dim // 2)
        normed = q_norm is not None and k_norm is not None
        if len(qkv):
            triton_rows.rotate_and_store[(len(qkv), config.num_kv_heads)](
                qkv, q_norm if normed else qkv, k_norm if normed else qkv, keys, values,
                batch.positions, slots, rotation.frequencies, rotation.magnitudes, config.rms_norm_eps,
                qkv.stride(0), keys.stride(0), keys.stride(1), keys.stride(2),
                GROUP=group, PAGE=kernels.pool.layout.block_tokens, HEAD_DIM=config.head_dim,
                BLOCK_G=block_g, BLOCK_H=block_h, NORMED=normed, num_warps=_warps(block_g * block_h, 1),
            )  # fmt: skip
        return qkv[:, : config.num_heads * config.head_dim].view(len(qkv), config.num_heads, config.head_dim)

    def rotate_and_store_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        kernels, batch = self._kernels, self._batch
        angles = kernels.rotations[kernels.rotation_of[layer]].angles(batch.positions)
        slots = self._slots[kernels.pool.places.tables[layer]]
        return rotate_and_store_latent(kernels.pool, slots, angles, layer, q, latent)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation != "silu":
            return gated(gate_up, activation)
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty((len(gate_up), width))
        if len(gate_up):
            triton_rows.silu_mul[(len(gate_up), triton.cdiv(width, SILU_BLOCK))](
                gate_up, out, gate_up.stride(0), width, BLOCK=SILU_BLOCK, num_warps=4
            )
        return out

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return combine(outputs, places, weights)

    def sigmoid_gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        return rows * gate.sigmoid()

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        kernels = self._kernels
        return recur(kernels.pool.floats, self._batch, layer, inputs, gate, steps, kernels.config.rms_norm_eps)


def _warps(elements: int, least: int) -> int:
    return int(min(16, max(least, triton.next_power_of_2(elements // ELEMENTS_PER_WARP))))
