"""The decoder of the Llama family; models differ only in their config and weights."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.attention import AttentionPlan
from engine.batch import Batch
from engine.kernels import StepKernels
from engine.linear import Linear, LinearFormat, Lookup, Plain
from engine.models.config import ModelConfig
from engine.weights import Checkpoint

MLP_ROWS = 512  # rows computed at once on a CPU: larger pieces are not faster, and need more memory


@dataclass(slots=True)
class DecoderLayer:
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
    """A model: its configuration, embedding, layers and head.

    The runner owns it and calls it on one thread at a time; it holds no state besides the weights. `dtype` is the
    dtype of activations, independent of how weights are stored. `embed` maps tokens, int64 [T], to their vectors.
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

    def linears(self) -> list[Linear]:
        """Return all weight matrices, in the order in which a pass uses them."""
        inner = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*inner, self.head]

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kernels: StepKernels, attention: AttentionPlan, last: AttentionPlan | None = None
    ) -> Tensor:
        """Store the KV of all T tokens and return the hidden state of the batch's logit rows, [R, hidden_size].

        `last` is the attention plan of `Batch.drawing`. With it, the last layer skips attention for other rows.
        """
        hidden = self.embed(batch.tokens).to(self.dtype)
        normed = kernels.norm(hidden, self.layers[0].attention_norm)
        for index, layer in enumerate(self.layers):
            is_last = index + 1 == len(self.layers)
            if is_last and last is not None:
                attended = self._attend(index, layer, normed, kernels, last, batch.logit_rows)
            else:
                attended = self._attend(index, layer, normed, kernels, attention)
                attended = attended[batch.logit_rows] if is_last else attended
            hidden = (
                hidden[batch.logit_rows] if is_last else hidden
            )  # only these rows are needed after the last layer's KV is stored
            hidden, normed = kernels.add_norm(hidden, layer.output(attended), layer.mlp_norm)
            following = self.norm if is_last else self.layers[index + 1].attention_norm
            hidden, normed = kernels.add_norm(hidden, self._mlp(layer, normed, kernels), following)
        return normed

    @staticmethod
    def _attend(
        index: int,
        layer: DecoderLayer,
        rows: Tensor,
        kernels: StepKernels,
        attention: AttentionPlan,
        asked: Tensor | None = None,
    ) -> Tensor:
        """Return [T, num_heads * head_dim]. If `asked` is given, return only these rows, as planned in `attention`."""
        q = kernels.rotate_and_store(index, layer.qkv(rows), layer.q_norm, layer.k_norm)
        return attention.attend(index, q if asked is None else q[asked], layer.window).flatten(1)

    def _mlp(self, layer: DecoderLayer, rows: Tensor, kernels: StepKernels) -> Tensor:
        """Return the MLP's output for `rows` [T, hidden_size]; may overwrite them."""
        if len(rows) <= MLP_ROWS or self.device.type != "cpu":
            return layer.down(kernels.silu_mul(layer.gate_up(rows)))
        for some in torch.split(rows, MLP_ROWS):
            some.copy_(layer.down(kernels.silu_mul(layer.gate_up(some))))
        return rows

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, vocab_size], of rows that `forward` returned."""
        return self.head(hidden).float()


class TensorSource(Protocol):
    """A source of weights, such as `engine.weights.Checkpoint`. Each tensor is taken once."""

    def take(self, name: str, *shape: int) -> Tensor: ...

    def skip(self, name: str) -> None: ...

    def finish(self) -> None: ...


def load_model(path: Path, dtype: torch.dtype, device: torch.device, linear: LinearFormat | None = None) -> Decoder:
    """Load a Hugging Face directory onto `device`.

    `dtype` is the dtype of activations. `linear` is the format of weight matrices, by default plain tensors in `dtype`.
    Raises ValueError, naming the key or the tensor, if config.json or a weight file is invalid.
    """
    config = ModelConfig.from_directory(path)
    return assemble(Checkpoint(path, device), config, dtype, linear or Plain(dtype))


def assemble(checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, linear: LinearFormat) -> Decoder:
    """Build a decoder from `checkpoint`. It must have exactly the model's tensors, with the names of Hugging Face."""
    embed, head = _load_vocabulary(
        checkpoint, config, linear
    )  # first, so that a tied matrix is freed before the rest is loaded
    layers = [_load_layer(checkpoint, config, index, dtype, linear) for index in range(config.num_layers)]
    norm = checkpoint.take("model.norm.weight", config.hidden_size).to(dtype)
    checkpoint.finish()
    return Decoder(config, embed, layers, norm, head)


def _load_vocabulary(checkpoint: TensorSource, config: ModelConfig, linear: LinearFormat) -> tuple[Lookup, Linear]:
    """Return the embedding and the head."""
    shape = config.vocab_size, config.hidden_size
    embedded = checkpoint.take("model.embed_tokens.weight", *shape)
    if config.tie_word_embeddings:
        checkpoint.skip("lm_head.weight")  # some files contain the tied tensor twice
        head = linear.make(embedded, None)
        return head.lookup() or partial(embedding, weight=embedded), head
    return partial(embedding, weight=embedded), linear.make(checkpoint.take("lm_head.weight", *shape), None)


def _load_layer(
    checkpoint: TensorSource, config: ModelConfig, index: int, dtype: torch.dtype, linear: LinearFormat
) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def fused(parts: list[tuple[str, int]], width: int, bias: bool) -> Linear:
        names = [f"{prefix}.{name}" for name, _ in parts]
        weights = [checkpoint.take(f"{name}.weight", out, width) for name, (_, out) in zip(names, parts, strict=True)]
        biases = [checkpoint.take(f"{name}.bias", out) for name, (_, out) in zip(names, parts, strict=True) if bias]
        return linear.make(_joined(weights), _joined(biases) if bias else None)

    def norm(name: str, width: int) -> Tensor:
        return checkpoint.take(f"{prefix}.{name}.weight", width).to(dtype)

    checkpoint.skip(f"{prefix}.self_attn.rotary_emb.inv_freq")  # written by old versions of transformers
    qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    return DecoderLayer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=fused(qkv, hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        output=fused([("self_attn.o_proj", hidden)], queries, config.output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=fused([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=fused([("mlp.down_proj", hidden)], inner, config.mlp_bias),
        window=config.windows[index],
    )


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
