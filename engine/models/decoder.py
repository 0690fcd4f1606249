"""The decoder of the Llama family, once for all of them: a model is its config and its weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from engine.attention.interface import AttentionPlan
from engine.batch import Batch
from engine.models.config import ModelConfig
from engine.models.rope import angles, inverse_frequencies, rotate
from engine.weights import Checkpoint


@dataclass(slots=True)
class Linear:
    """The one place of matrix products: another kernel or another weight format goes in here."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Linear  # queries, keys and values of all heads, fused
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear  # fused
    down: Linear
    window: int


class Decoder:
    def __init__(self, config: ModelConfig, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Linear) -> None:
        self.config = config
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(embedding.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, plan: AttentionPlan) -> Tensor:
        """Stores the KV of all T tokens; returns the hidden state of the batch's logit rows, [R, hidden_size]."""
        hidden = embedding(batch.tokens, self._embedding)
        rotation = angles(batch.positions, self._frequencies, self.dtype)
        for index, layer in enumerate(self._layers):
            normed = self._normed(hidden, layer.attention_norm)
            attended = self._attend(index, layer, normed, rotation, plan)
            if layer is self._layers[-1]:  # the KV is stored: only rows that are asked for go on
                hidden, attended = hidden[batch.logit_rows], attended[batch.logit_rows]
            hidden = hidden + layer.output(attended)
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(silu(gate) * up)
        return self._normed(hidden, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab_size] of rows that `forward` returned."""
        return self._head(hidden).float()

    def _attend(
        self, index: int, layer: Layer, rows: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan
    ) -> Tensor:
        config = self.config
        heads = layer.qkv(rows).view(len(rows), -1, config.head_dim)
        q, k, v = heads.tensor_split((config.num_heads, config.num_heads + config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        attended = plan.run(index, rotate(q, *rotation), rotate(k, *rotation), v, layer.window)
        return attended.reshape(len(rows), -1)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self.config.rms_norm_eps)


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Reads a Hugging Face directory. On a CPU the weights become float32 whatever `dtype`: torch's 16-bit products
    there run at a tenth of the speed. Raises ValueError naming what is wrong with config.json or a tensor."""
    config = ModelConfig.from_directory(path)
    checkpoint = Checkpoint(path, torch.float32 if device.type == "cpu" else dtype, device)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedded = checkpoint.take("model.embed_tokens.weight", vocab, hidden)
    layers = [_load_layer(checkpoint, config, index) for index in range(config.num_layers)]
    norm = checkpoint.take("model.norm.weight", hidden)
    if config.tie_word_embeddings:
        checkpoint.skip("lm_head.weight")  # some files hold the tied tensor twice
        head = Linear(embedded)
    else:
        head = Linear(checkpoint.take("lm_head.weight", vocab, hidden))
    checkpoint.finish()
    return Decoder(config, embedded, layers, norm, head)


def _load_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def fused(parts: list[tuple[str, int]], width: int, bias: bool) -> Linear:
        names = [f"{prefix}.{name}" for name, _ in parts]
        weights = [checkpoint.take(f"{name}.weight", out, width) for name, (_, out) in zip(names, parts, strict=True)]
        biases = [checkpoint.take(f"{name}.bias", out) for name, (_, out) in zip(names, parts, strict=True) if bias]
        return Linear(_joined(weights), _joined(biases) if bias else None)

    checkpoint.skip(f"{prefix}.self_attn.rotary_emb.inv_freq")  # written by old versions of transformers
    qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    return Layer(
        attention_norm=checkpoint.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=fused(qkv, hidden, config.qkv_bias),
        q_norm=checkpoint.take(f"{prefix}.self_attn.q_norm.weight", head_dim) if config.qk_norm else None,
        k_norm=checkpoint.take(f"{prefix}.self_attn.k_norm.weight", head_dim) if config.qk_norm else None,
        output=fused([("self_attn.o_proj", hidden)], queries, config.output_bias),
        mlp_norm=checkpoint.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=fused([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=fused([("mlp.down_proj", hidden)], inner, config.mlp_bias),
        window=config.windows[index],
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
