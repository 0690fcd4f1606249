"""The element-wise work of a decoder layer, apart from products and attention: the interface, and a torch reference."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from engine.batch import Batch
from engine.kv_pool import KVPool
from engine.models.rope import Rotation, rotate
from engine.models.spec import Activation, ModelConfig

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class StepKernels(Protocol):
    """The kernels for one step. They are created from its batch, so that rotations and slots are computed once."""

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm over the last dimension, computed in float32, in the shape and dtype of `rows`."""

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum `hidden` + `update` and its RMS norm, both [T, hidden_size]. May overwrite `hidden`."""

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """Return the rotated queries, [T, heads, head_dim], and store rotated keys, and values, in the batch's slots.

        May overwrite `qkv` [T, (heads + 2 * kv_heads) * head_dim]. If q_norm and k_norm [head_dim] are given, the RMS
        norm is applied to each head of q and k before rotation (Qwen3). For a slot of -1 (padding), nothing is stored.
        """

    def rotate_and_store_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """Return the rotated queries of latent attention, and store the latents and the rotated key.

        Of `q` [T, heads, width] and `latent` [T, width], the last rope_dim dimensions are rotated.
        """

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [T, n], where gate and up are the halves of `gate_up` [T, 2 * n]."""


class Kernels:
    """A set of kernels for one model and KV pool. `name` is shown to users."""

    name: ClassVar[str]

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        ropes = config.ropes
        rotated = [next(one.attention.rotated for one in config.layers if one.attention.rope == rope) for rope in ropes]
        device = pool.tensor.device
        self.rotations = [Rotation.of(rope, dims, device) for rope, dims in zip(ropes, rotated, strict=True)]
        self.rotation_of = [ropes.index(layer.attention.rope) for layer in config.layers]  # by layer

    def begin(self, batch: Batch) -> StepKernels:
        raise NotImplementedError


class TorchKernels(Kernels):
    """The reference implementation in plain torch. Runs on every device."""

    name = "torch"

    def begin(self, batch: Batch) -> "TorchStep":
        return TorchStep(self, batch)


class TorchStep:
    def __init__(self, kernels: TorchKernels, batch: Batch) -> None:
        self._config = kernels.config
        self._kernels = kernels
        self._slots = batch.slots
        self._pool = kernels.pool.tensor
        angles = [rotation.angles(batch.positions) for rotation in kernels.rotations]
        self._angles = [angles[number] for number in kernels.rotation_of]
        size = kernels.pool.layout.block_tokens
        slots = batch.slots.clamp(min=0)  # the KV of padding goes to block 0, the dummy block, which is never read
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
        cosine, sine = (part.to(qkv.dtype) for part in self._angles[layer])
        # Store K and V with one `index_put`, because this operation takes most of the time of a small step.
        both = torch.stack((rotate(k, cosine, sine), v), dim=2)
        self._pool[:, :, layer][self._blocks, :, self._offsets] = both.to(self._pool.dtype)
        return rotate(q, cosine, sine)

    def rotate_and_store_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        return rotate_and_store_latent(self._kernels.pool, self._slots, self._angles[layer], layer, q, latent)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)


def rotate_and_store_latent(
    pool: KVPool, slots: Tensor, angles: tuple[Tensor, Tensor], layer: int, q: Tensor, latent: Tensor
) -> Tensor:
    """Return `StepKernels.rotate_and_store_latent`. A slot of -1 (padding) stands for the dummy block."""
    cosine, sine = (part.to(q.dtype) for part in angles)
    dims, size = 2 * cosine.shape[-1], pool.layout.block_tokens
    key = rotate(latent[:, None, -dims:], cosine, sine)[:, 0]
    rows = torch.cat((latent[:, :-dims], key), dim=-1).view(len(latent), 2, -1)
    slots = slots.clamp(min=0)
    pool.tensor[:, 0, layer][slots // size, slots % size] = rows.to(pool.tensor.dtype)
    return torch.cat((q[..., :-dims], rotate(q[..., -dims:], cosine, sine)), dim=-1)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `StepKernels.gated`. "clamped_swiglu" is that of gpt-oss."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * (gate * SWIGLU_ALPHA).sigmoid() * (up + 1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
