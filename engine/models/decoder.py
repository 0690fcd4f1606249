"""The decoder: one forward pass for all families. Families differ in their configuration and weights."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import AttentionLayer, AttentionPlan
from engine.batch import Batch
from engine.kernels import Kernels, StepKernels
from engine.linear import Linear, Lookup, SeparateExperts
from engine.models.experts import Experts, ExpertsAlongside
from engine.models.latent import LatentProducts
from engine.models.mlp import Mlp
from engine.models.spec import AttentionSpec, LatentSpec, ModelConfig
from engine.recurrence import RecurrentLayer


class LanguageModel(Protocol):
    """A model that a runner calls: Baton's decoder, or a decoder built from transformers' modules."""

    config: ModelConfig

    def forward(
        self, batch: Batch, kernels: StepKernels, attention: AttentionPlan, last: AttentionPlan | None = None
    ) -> Tensor:
        """Store the KV of all tokens, and return the hidden states of the tokens whose logits the batch needs (see
        `Decoder`)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, vocab_size], of rows that `forward` returned."""


@dataclass(slots=True, kw_only=True)
class DecoderLayer:
    attention_norm: Tensor
    output: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp | Experts
    post_mlp_norm: Tensor | None
    alongside: ExpertsAlongside | None = None
    scale: float = 1.0


@dataclass(slots=True, kw_only=True)
class AttentionDecoderLayer(DecoderLayer):
    attention: AttentionLayer
    qkv: Linear  # one matrix, for the queries, keys and values of all heads, or for the latents from which they derive
    q_norm: Tensor | None
    k_norm: Tensor | None
    spec: AttentionSpec | LatentSpec
    latent: LatentProducts | None = None
    gate: Linear | None = None


@dataclass(slots=True, kw_only=True)
class RecurrentDecoderLayer(DecoderLayer):
    recurrent: RecurrentLayer
    inputs: Linear  # one matrix, for the inputs of the convolution and for the gate
    steps: Linear


class Decoder:
    """A model: its configuration, embedding, layers and head.

    The runner owns the model and calls it on one thread at a time. A decoder has no state except its weights. `dtype`
    is the dtype of activations, which may differ from the dtype of weights. `embed` maps tokens, int64 [T], to their
    vectors.
    """

    def __init__(
        self, config: ModelConfig, embed: Lookup, layers: list[DecoderLayer], norm: Tensor, head: Linear
    ) -> None:
        self.config = config
        self.device = norm.device
        self.dtype = norm.dtype
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        # As in transformers, the factor is rounded to the dtype of activations.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=norm.dtype))

    def can_be_captured(self, kernels: Kernels) -> bool:
        """Return whether a CUDA graph can contain the pass. It cannot in two cases.

        First, experts may be multiplied one after another. The kernel launches then depend on the choice of experts.
        Second, the model may have recurrent layers whose kernels cannot be captured.
        """
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        experts += [layer.alongside.experts for layer in self.layers if layer.alongside is not None]
        if any(isinstance(each, SeparateExperts) for one in experts for each in (one.gate_up, one.down)):
            return False
        return kernels.captures_states or all(isinstance(layer, AttentionDecoderLayer) for layer in self.layers)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kernels: StepKernels, attention: AttentionPlan, last: AttentionPlan | None = None
    ) -> Tensor:
        """Store the KV of all T tokens, and return the hidden states of the batch's logit rows, [R, hidden_size].

        `last` is the attention plan of `Batch.drawing`. If it is given, the last layer computes attention only for the
        rows of this plan.
        """
        hidden = self.embedded(batch.tokens)
        hidden = hidden if batch.images is None else batch.images.embed(hidden)
        normed = kernels.norm(hidden, self.layers[0].attention_norm)
        return self.decode(hidden, normed, batch, kernels, attention, last)[1]

    def decode(
        self, hidden: Tensor, normed: Tensor, batch: Batch, kernels: StepKernels, attention: AttentionPlan,
        last: AttentionPlan | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run all layers. For the first layer, `normed` is the input of attention, and `hidden` is the residual.

        Return the hidden states of the batch's logit rows before and after the last norm, [R, hidden_size].
        """
        for index, layer in enumerate(self.layers):
            is_last = index + 1 == len(self.layers)
            if index in batch.captured:
                batch.captured[index] = hidden.clone()  # kernels may overwrite `hidden`
            if is_last and last is not None:
                mixed = self._mix(layer, normed, kernels, last, batch.positions, batch.logit_rows)
            else:
                mixed = self._mix(layer, normed, kernels, attention, batch.positions)
                mixed = mixed[batch.logit_rows] if is_last else mixed
            # After the KV of the last layer is stored, only the logit rows are needed.
            hidden = hidden[batch.logit_rows] if is_last else hidden
            update = self._update(layer.output(mixed), layer.post_attention_norm, kernels)
            hidden, normed = kernels.add_norm(hidden, update, layer.mlp_norm)
            following = self.norm if is_last else self.layers[index + 1].attention_norm
            update = layer.mlp(normed, kernels)
            if layer.alongside is not None:
                update = layer.alongside(hidden, update, kernels)
            update = self._update(update, layer.post_mlp_norm, kernels)
            if layer.scale != 1:
                hidden, update = hidden * layer.scale, update * layer.scale
            update = update if batch.images is None or is_last else batch.images.deepen(update, index)
            hidden, normed = kernels.add_norm(hidden, update, following)
        return hidden, normed

    def _mix(
        self,
        layer: DecoderLayer,
        rows: Tensor,
        kernels: StepKernels,
        attention: AttentionPlan,
        positions: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return the result of attention or recurrence for the rows in `selected` (None: for all rows)."""
        if isinstance(layer, AttentionDecoderLayer):
            return self._attend(layer, rows, kernels, attention, positions, selected)
        assert isinstance(layer, RecurrentDecoderLayer)
        both, channels = layer.inputs(rows), layer.recurrent.spec.channels
        result = kernels.recur(layer.recurrent, both[:, :channels], both[:, channels:], layer.steps(rows))
        return result if selected is None else result[selected]

    @staticmethod
    def _attend(
        layer: AttentionDecoderLayer,
        rows: Tensor,
        kernels: StepKernels,
        attention: AttentionPlan,
        positions: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return the result of attention, [T, num_heads * head_dim], for the rows in `selected` (None: for all rows).
        The plan `attention` must cover the same rows."""
        spec, latent, q = layer.spec, layer.latent, store_kv(layer, rows, kernels)
        if spec.temperature:
            steps = (positions // spec.temperature_tokens).float()
            q = q * (1 + spec.temperature * (1 + steps).log()).to(q.dtype)[:, None, None]
        q = q if selected is None else q[selected]
        attended = attention.attend(layer.attention, q if spec.query_scale == 1 else q * spec.query_scale)
        attended = (attended if latent is None else latent.values(attended)).flatten(1)
        if layer.gate is None:
            return attended
        gate = layer.gate(rows)  # for all rows, because adapters select rows of the whole batch
        return kernels.sigmoid_gated(attended, gate if selected is None else gate[selected])

    def _update(self, output: Tensor, norm: Tensor | None, kernels: StepKernels) -> Tensor:
        """Return the scaled output of attention or of the MLP, which is added to the hidden states."""
        output = output if norm is None else kernels.norm(output, norm)
        return output if self.config.residual_scale == 1 else output * self.config.residual_scale

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the hidden states before the first layer, [T, hidden_size]."""
        hidden = self.embed(tokens).to(self.dtype)
        return hidden if self._embedding_scale == 1 else hidden * self._embedding_scale

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, vocab_size], of rows that `forward` returned."""
        logits, config = self.head(hidden).float(), self.config
        logits = logits if config.logit_scale == 1 else logits * config.logit_scale
        return config.logit_softcap * (logits / config.logit_softcap).tanh() if config.logit_softcap else logits


def store_kv(layer: AttentionDecoderLayer, rows: Tensor, kernels: StepKernels) -> Tensor:
    """Compute a layer's KV and queries from its normed inputs. Store the KV, and return the rotated queries,
    [T, heads, head_dim]."""
    if layer.latent is None:
        return kernels.rotate_and_store(layer.attention.index, layer.qkv(rows), layer.q_norm, layer.k_norm)
    q, stored = layer.latent.derive(rows, layer.qkv(rows), layer.q_norm, layer.k_norm)
    return kernels.rotate_and_store_latent(layer.attention.index, q, stored)
