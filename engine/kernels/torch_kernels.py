"""The reference kernels in plain torch. They run everywhere, and are what the others are tested against."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from engine.batch import Batch
from engine.kv_pool import KVPool
from engine.models.config import ModelConfig
from engine.models.rope import angles, inverse_frequencies, rotate


class TorchKernels:
    name = "torch"

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(pool.tensor.device)

    def begin(self, batch: Batch) -> "TorchStep":
        return TorchStep(self, batch)


class TorchStep:
    def __init__(self, kernels: TorchKernels, batch: Batch) -> None:
        self._config = kernels.config
        self._pool = kernels.pool.tensor
        self._rotation = angles(batch.positions, kernels.frequencies)
        size = kernels.pool.layout.block_tokens
        slots = batch.slots.clamp(min=0)  # padding goes where nobody reads: into the dummy block, which is number 0
        self._blocks = slots // size
        self._offsets = slots % size

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._config.rms_norm_eps)

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + update
        return hidden, self.norm(hidden, weight)

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.tensor_split((config.num_heads, config.num_heads + config.num_kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.norm(q, q_norm), self.norm(k, k_norm)
        cosine, sine = (part.to(qkv.dtype) for part in self._rotation)
        # K and V go in as one write: index_put is the slow part of a small step.
        both = torch.stack((rotate(k, cosine, sine), v), dim=2)
        self._pool[:, :, layer][self._blocks, :, self._offsets] = both.to(self._pool.dtype)
        return rotate(q, cosine, sine)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
