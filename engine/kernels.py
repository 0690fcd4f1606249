"""Kernels for a decoder layer's work other than matrix products and attention: the interface, and a torch reference."""

from functools import cached_property
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
    """The kernels for one step, created from the step's batch. Rotations and slots are computed once per step."""

    pool: KVPool

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the RMS norm over the last dimension, computed in float32, in the shape and dtype of `rows`."""

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden` + `update`, and the RMS norm of this sum, both [T, hidden_size]. May overwrite `hidden`."""

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """Return the rotated queries, [T, heads, head_dim], and store the rotated keys and the values in the slots.

        May overwrite `qkv` [T, (heads + 2 * kv_heads) * head_dim]. If q_norm and k_norm [head_dim] are given, the RMS
        norm is applied to each head of q and k before rotation (Qwen3). The KV of a token whose slot is -1 is dropped.
        """

    def rotate_and_store_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        """Return the rotated queries of latent attention, and store the latents and the rotated key.

        Only the last rope_dim dimensions of `q` [T, heads, width] and of `latent` [T, width] are rotated.
        """

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [T, n], where gate and up are the halves of `gate_up` [T, 2 * n]."""

    def route(self, spec: MoeSpec, logits: Tensor, correction: Tensor | None, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts. Return their weights (float32) and indices (int64), both [T, top_k], best first.

        `logits` are the router's logits, float32 [T, num_experts]. `correction` is added to the scores only for
        choosing experts. The weights are multiplied by `factors`. `correction` and `factors` are float32 [num_experts].
        Among experts with equal scores, the lowest index comes first.
        """

    def by_expert(self, chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Make one row per entry of `chosen`, int64 [T, top_k] (each token's experts), and sort the rows by expert.

        Return three int64 tensors: the token of each row, [T * top_k]; the row of each entry of `chosen`, [T, top_k];
        and the number of rows of each expert, [num_experts].
        """

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return, for each token, the weighted sum of the outputs of its experts, [T, n].

        The outputs of token t are the rows places[t] of `outputs` [T * top_k, n], and are added in this order. `places`
        is int64 [T, top_k], and `weights` is float32 [T, top_k].
        """

    def sigmoid_gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        """Return rows * sigmoid(gate), [T, n]."""

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        """Return the result of a recurrent layer before its output projection, [T, spec.inner].

        `inputs` [T, spec.channels], `gate` [T, spec.inner] and `steps` are projections of the hidden states. For a
        state space, a row of `steps` has the step size of each value head. For the delta rule, a row has the logits of
        the heads' update strengths, then the step sizes. States are read and written as `Batch.states` specifies.
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


class CommonStep:
    """The part of a step that all sets of kernels compute in the same way, with torch."""

    route = staticmethod(route)
    by_expert = staticmethod(by_expert)

    def __init__(self, kernels: Kernels, batch: Batch) -> None:
        self._kernels, self._batch = kernels, batch
        self.pool = kernels.pool
        self.slots = batch.all_slots

    @cached_property
    def angles(self) -> list[tuple[Tensor, Tensor]]:
        """The batch's cosines and sines for each of `Kernels.rotations`."""
        batch = self._batch
        return [rotation.angles(batch.positions, batch.on_axes) for rotation in self._kernels.rotations]

    def _angles(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.angles[self._kernels.rotation_of[layer]]

    def _slots(self, layer: int) -> Tensor:
        return self.slots[self.pool.places.tables[layer]]

    def _rotate_and_store_normed(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        """Implement `rotate_and_store` for a layer that norms values. A head has once or twice the layout's size."""
        config, layout = self._kernels.config, self.pool.layout
        spec = config.attention[layer]
        assert isinstance(spec, AttentionSpec)

        def norm(heads: Tensor, weight: Tensor | None) -> Tensor:
            return rms_norm(heads, heads.shape[-1:], weight, config.rms_norm_eps)

        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q, k, v = heads.tensor_split((spec.heads, spec.heads + spec.kv_heads), dim=1)
        values = norm(k if spec.values_are_keys else v, None)
        cosine, sine = (part.to(qkv.dtype) for part in self._angles(layer))
        keys = rotate(norm(k, k_norm), cosine, sine)
        if spec.head_dim == layout.head_dim:
            rows = torch.stack((keys, values), dim=2)
        else:
            rows = torch.cat((keys, values), dim=1).view(len(qkv), -1, 2, layout.head_dim)
        slots, size, place = self._slots(layer).clamp(min=0), layout.block_tokens, self.pool.places.places[layer]
        self.pool.tensor[:, : rows.shape[1], place][slots // size, :, slots % size] = self.pool.stored(layer, rows)
        return rotate(norm(q, q_norm), cosine, sine)

    def rotate_and_store_latent(self, layer: int, q: Tensor, latent: Tensor) -> Tensor:
        cosine, sine = (part.to(q.dtype) for part in self._angles(layer))
        dims, size = 2 * cosine.shape[-1], self.pool.layout.block_tokens
        key = rotate(latent[:, None, -dims:], cosine, sine)[:, 0]
        rows = torch.cat((latent[:, :-dims], key), dim=-1).view(len(latent), 2, -1)
        slots = self._slots(layer).clamp(min=0)  # a slot of -1 becomes slot 0, in the dummy block
        place = self.pool.places.places[layer]
        self.pool.tensor[:, 0, place][slots // size, slots % size] = self.pool.stored(layer, rows)
        return torch.cat((q[..., :-dims], rotate(q[..., -dims:], cosine, sine)), dim=-1)


class TorchStep(CommonStep):
    """The element-wise work of one step in plain torch.

    `TorchKernels.begin` creates this object for one batch, and the decoder uses it on the engine's thread. It owns the
    batch's rotary angles, and writes KV into the pool.
    """

    def __init__(self, kernels: TorchKernels, batch: Batch) -> None:
        super().__init__(kernels, batch)
        size = self.pool.layout.block_tokens
        # A token whose slot is -1 stores its KV in block 0, the dummy block, which is never read.
        self._targets = [(slots.clamp(min=0) // size, slots.clamp(min=0) % size) for slots in self.slots]

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self._kernels.config.rms_norm_eps)

    def add_norm(self, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden + update
        return hidden, self.norm(hidden, weight)

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
        config, places = self._kernels.config, self.pool.places
        if self._kernels.norms_values[layer]:
            return self._rotate_and_store_normed(layer, qkv, q_norm, k_norm)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = heads.tensor_split((config.num_heads, config.num_heads + config.num_kv_heads), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = self.norm(q, q_norm), self.norm(k, k_norm)
        cosine, sine = (part.to(qkv.dtype) for part in self._angles(layer))
        # Store K and V with one `index_put`, because this operation takes most of the time of a small step.
        both = torch.stack((rotate(k, cosine, sine), v), dim=2)
        blocks, offsets = self._targets[places.tables[layer]]
        self.pool.tensor[:, :, places.places[layer]][blocks, :, offsets] = self.pool.stored(layer, both)
        return rotate(q, cosine, sine)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "clamped_swiglu":  # gpt-oss
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * (gate * SWIGLU_ALPHA).sigmoid() * (up + 1)
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up

    def combine(self, outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        weighted = outputs[places] * weights[..., None].to(outputs.dtype)
        total = weighted[:, 0]
        for place in range(1, places.shape[1]):
            total = total + weighted[:, place]
        return total

    def sigmoid_gated(self, rows: Tensor, gate: Tensor) -> Tensor:
        return rows * gate.sigmoid()

    def recur(self, layer: RecurrentLayer, inputs: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        return recur(self.pool, self._batch, layer, inputs, gate, steps, self._kernels.config.rms_norm_eps)
