"""The element-wise work of a decoder layer, apart from products and attention: the interface, and a torch reference."""

from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu

from engine.batch import Batch
from engine.kv_pool import KVPool
from engine.models.rope import Rotation, rotate
from engine.models.spec import Activation, AttentionSpec, ModelConfig, MoeSpec
from engine.recurrence import RecurrentLayer, recur
from engine.routing import by_expert, route

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class StepKernels(Protocol):
    """The kernels for one step. They are created from its batch, so that rotations and slots are computed once."""

    pool: KVPool

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

    def route(self, spec: MoeSpec, logits: Tensor, correction: Tensor | None, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and the indices, int64, of each token's experts, both [T, top_k], best first.

        `logits` are the router's logits, float32 [T, num_experts]. `correction` is added to the scores for the choice
        only, and `factors` multiply the weights; both are float32 [num_experts]. Among experts with equal scores, the
        lowest index comes first.
        """

    def by_expert(self, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the order of rows by expert: `sources`, int64 [T * top_k], the token of each row; `places`, int64
        [T, top_k], the row of each choice; and the number of rows of each expert, int64 [num_experts].

        `chosen` is int64 [T, top_k].
        """

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [T, n], added in the order of its choice.

        The outputs of token t are the rows places[t] of `outputs` [T * top_k, n]. `places` is int64 [T, top_k], and
        `weights` is float32 [T, top_k].
        """

    def sigmoid_gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        """Return rows * sigmoid(gate), [T, n]."""

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        """Return the result of a recurrent layer before its output projection, [T, spec.inner].

        `inputs` [T, spec.channels], `gate` [T, spec.inner] and `steps` are projections of the hidden states. For a
        state space, a row of `steps` has the step size of each value head. For the delta rule, the logits of the heads'
        update strengths precede the step sizes. States are read and written as `Batch.states` says.
        """


class Kernels:
    """A set of kernels for one model and KV pool. `name` is shown to users.

    `captures_states` is true if a CUDA graph may contain recurrent layers.
    """

    name: ClassVar[str]
    captures_states: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        kinds = list(dict.fromkeys((spec.rope, spec.rotated) for spec in config.attention))
        self.rotations = [Rotation.of(*kind, pool.tensor.device) for kind in kinds]
        self.rotation_of = [kinds.index((spec.rope, spec.rotated)) for spec in config.attention]
        self.norms_values = [isinstance(spec, AttentionSpec) and spec.norms_values for spec in config.attention]

    def begin(self, batch: Batch) -> StepKernels:
        raise NotImplementedError


class TorchKernels(Kernels):
    """The reference implementation in plain torch. Runs on every device."""

    name = "torch"

    def begin(self, batch: Batch) -> "TorchStep":
        return TorchStep(self, batch)


class TorchRouting:
    """The choice of experts in plain torch."""

    route = staticmethod(route)
    by_expert = staticmethod(by_expert)


class TorchStep(TorchRouting):
    """The element-wise work of one step in plain torch.

    `TorchKernels.begin` creates this object for one batch, and the decoder uses it on the engine's thread. It owns the
    batch's rotary angles, and writes KV into the pool.
    """

    def __init__(self, kernels: TorchKernels, batch: Batch) -> None:
        self._config = kernels.config
        self._kernels = kernels
        self._batch = batch
        self.pool = kernels.pool
        self._slots = batch.all_slots
        self._pool = kernels.pool.tensor
        angles = [rotation.angles(batch.positions, batch.on_axes) for rotation in kernels.rotations]
        self._angles = [angles[number] for number in kernels.rotation_of]
        size = kernels.pool.layout.block_tokens
        # The KV of padding goes to block 0, the dummy block, which is never read.
        self._targets = [(slots.clamp(min=0) // size, slots.clamp(min=0) % size) for slots in self._slots]

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._config.rms_norm_eps)

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + update
        return hidden, self.norm(hidden, weight)

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        config = self._config
        if self._kernels.norms_values[layer]:
            angles = self._angles[layer]
            slots = self._slots[self._kernels.pool.places.tables[layer]]
            return rotate_and_store_normed(self._kernels, slots, angles, layer, qkv, q_norm, k_norm)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.tensor_split((config.num_heads, config.num_heads + config.num_kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.norm(q, q_norm), self.norm(k, k_norm)
        cosine, sine = (part.to(qkv.dtype) for part in self._angles[layer])
        # Store K and V with one `index_put`, because this operation takes most of the time of a small step.
        both = torch.stack((rotate(k, cosine, sine), v), dim=2)
        places = self._kernels.pool.places
        blocks, offsets = self._targets[places.tables[layer]]
        self._pool[:, :, places.places[layer]][blocks, :, offsets] = self._kernels.pool.stored(layer, both)
        return rotate(q, cosine, sine)

    def rotate_and_store_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        slots = self._slots[self._kernels.pool.places.tables[layer]]
        return rotate_and_store_latent(self._kernels.pool, slots, self._angles[layer], layer, q, latent)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated(gate_up, activation)

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return combine(outputs, places, weights)

    def sigmoid_gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        return rows * gate.sigmoid()

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        return recur(self._kernels.pool, self._batch, layer, inputs, gate, steps, self._config.rms_norm_eps)


def rotate_and_store_normed(
    kernels: Kernels,
    slots: Tensor,
    angles: tuple[Tensor, Tensor],
    layer: int,
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> Tensor:
    """Return `StepKernels.rotate_and_store` for a layer that norms values, with heads of the layout's size or twice."""
    spec, layout = kernels.config.attention[layer], kernels.pool.layout
    assert isinstance(spec, AttentionSpec)

    def norm(heads: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(heads, heads.shape[-1:], weight, kernels.config.rms_norm_eps)

    heads = qkv.view(len(qkv), -1, spec.head_dim)
    q, k, v = heads.tensor_split((spec.heads, spec.heads + spec.kv_heads), dim=1)
    values = norm(k if spec.values_are_keys else v, None)
    cosine, sine = (part.to(qkv.dtype) for part in angles)
    keys = rotate(norm(k, k_norm), cosine, sine)
    if spec.head_dim == layout.head_dim:
        rows = torch.stack((keys, values), dim=2)
    else:
        rows = torch.cat((keys, values), dim=1).view(len(qkv), -1, 2, layout.head_dim)
    slots, size = slots.clamp(min=0), layout.block_tokens
    pool, place = kernels.pool, kernels.pool.places.places[layer]
    pool.tensor[:, : rows.shape[1], place][slots // size, :, slots % size] = pool.stored(layer, rows)
    return rotate(norm(q, q_norm), cosine, sine)


def rotate_and_store_latent(
    pool: KVPool, slots: Tensor, angles: tuple[Tensor, Tensor], layer: int, q: Tensor, latent: Tensor
) -> Tensor:
    """Return `StepKernels.rotate_and_store_latent`. A slot of -1 (padding) stands for the dummy block."""
    cosine, sine = (part.to(q.dtype) for part in angles)
    dims, size = 2 * cosine.shape[-1], pool.layout.block_tokens
    key = rotate(latent[:, None, -dims:], cosine, sine)[:, 0]
    rows = torch.cat((latent[:, :-dims], key), dim=-1).view(len(latent), 2, -1)
    slots = slots.clamp(min=0)
    pool.tensor[:, 0, pool.places.places[layer]][slots // size, slots % size] = pool.stored(layer, rows)
    return torch.cat((q[..., :-dims], rotate(q[..., -dims:], cosine, sine)), dim=-1)


def combine(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return `StepKernels.combine`."""
    weighted = outputs[places] * weights[..., None].to(outputs.dtype)
    total = weighted[:, 0]
    for place in range(1, places.shape[1]):
        total = total + weighted[:, place]
    return total


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `StepKernels.gated`. "clamped_swiglu" is the activation of gpt-oss."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * (gate * SWIGLU_ALPHA).sigmoid() * (up + 1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up
