"""The decoder of the Llama family. Its models differ only in their configuration and weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.attention import AttentionPlan
from engine.batch import Batch
from engine.kernels import StepKernels
from engine.linear import Linear, LinearFormat, Lookup, Plain
from engine.models.config import ModelConfig
from engine.weights import Checkpoint

MLP_ROWS = 512  # rows computed at once on a CPU; more rows are not faster and need more memory


@dataclass(slots=True)
class DecoderLayer:
    attention_norm: Tensor
    qkv: Linear  # weights of queries, keys and values of all heads, in one matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear  # both in one matrix
    down: Linear
    window: int


class Decoder:
    """A model: its configuration, embedding, layers and head.

    The runner owns the model and calls it on one thread at a time. Its only state is the weights. `dtype` is the dtype
    of activations, which may differ from that of weights. `embed` maps tokens, int64 [T], to their vectors.
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
        """Return all matrices that a pass multiplies by, in order of use."""
        inner = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*inner, self.head]

    @torch.inference_mode()
    def forward(
        self, batch: Batch, kernels: StepKernels, attention: AttentionPlan, last: AttentionPlan | None = None
    ) -> Tensor:
        """Store the KV of all T tokens, and return the hidden states of the batch's logit rows, [R, hidden_size].

        `last` is the attention plan of `Batch.drawing`. If it is given, the last layer skips attention for other rows.
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
            # After the KV of the last layer is stored, only the logit rows are needed.
            hidden = hidden[batch.logit_rows] if is_last else hidden
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
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return attention, [T, num_heads * head_dim]. `attention` plans all rows, or only `selected` if given."""
        q = kernels.rotate_and_store(index, layer.qkv(rows), layer.q_norm, layer.k_norm)
        return attention.attend(index, q if selected is None else q[selected], layer.window).flatten(1)

    def _mlp(self, layer: DecoderLayer, rows: Tensor, kernels: StepKernels) -> Tensor:
        """Return the MLP's output for `rows` [T, hidden_size]. May overwrite `rows`."""
        if len(rows) <= MLP_ROWS or self.device.type != "cpu":
            return layer.down(kernels.silu_mul(layer.gate_up(rows)))
        for some in torch.split(rows, MLP_ROWS):
            some.copy_(layer.down(kernels.silu_mul(layer.gate_up(some))))
        return rows

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, vocab_size], of rows that `forward` returned."""
        return self.head(hidden).float()


Take = Callable[..., Tensor]  # called once per tensor, with its name and shape


def load_model(path: Path, dtype: torch.dtype, device: torch.device, linear: LinearFormat | None = None) -> Decoder:
    """Load a model from a Hugging Face directory onto `device`.

    `dtype` is the dtype of activations. `linear` is the format of weight matrices, by default plain tensors in `dtype`.
    Raises ValueError, with the name of the key or the tensor, if config.json or a weight file is invalid.
    """
    config, checkpoint = ModelConfig.from_directory(path), Checkpoint(path, device)
    model = assemble(checkpoint.take, config, dtype, linear or Plain(dtype))
    # Some files also contain a copy of a tied matrix, or the frequencies that old versions of transformers stored.
    checkpoint.finish(("lm_head.weight",) if config.tie_word_embeddings else (), "self_attn.rotary_emb.inv_freq")
    return model


def assemble(take: Take, config: ModelConfig, dtype: torch.dtype, linear: LinearFormat) -> Decoder:
    """Build a decoder from the tensors that `take` returns for Hugging Face's names."""
    embed, head = _load_vocabulary(take, config, linear)  # first, so that a tied matrix is freed before the layers load
    layers = [_load_layer(take, config, index, dtype, linear) for index in range(config.num_layers)]
    norm = take("model.norm.weight", config.hidden_size).to(dtype)
    return Decoder(config, embed, layers, norm, head)


def _load_vocabulary(take: Take, config: ModelConfig, linear: LinearFormat) -> tuple[Lookup, Linear]:
    """Return the embedding and the output head."""
    shape = config.vocab_size, config.hidden_size
    embedded = take("model.embed_tokens.weight", *shape)
    if config.tie_word_embeddings:
        head = linear.make(embedded, None)
        return head.lookup() or partial(embedding, weight=embedded), head
    return partial(embedding, weight=embedded), linear.make(take("lm_head.weight", *shape), None)


def _load_layer(take: Take, config: ModelConfig, index: int, dtype: torch.dtype, linear: LinearFormat) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def fused(parts: list[tuple[str, int]], width: int, bias: bool) -> Linear:
        names = [f"{prefix}.{name}" for name, _ in parts]
        weights = [take(f"{name}.weight", out, width) for name, (_, out) in zip(names, parts, strict=True)]
        biases = [take(f"{name}.bias", out) for name, (_, out) in zip(names, parts, strict=True) if bias]
        return linear.make(_joined(weights), _joined(biases) if bias else None)

    def norm(name: str, width: int) -> Tensor:
        return take(f"{prefix}.{name}.weight", width).to(dtype)

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
