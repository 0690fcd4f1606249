"""Builds a decoder from the tensors of a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.attention import AttentionLayer
from engine.formats.forms import Weight, dense, joined, rows_of
from engine.formats.reader import UNUSED, QuantizedReader
from engine.formats.scheme import read_scheme
from engine.linear import Linear, LinearFormat, Lookup, Plain
from engine.models.decoder import AttentionDecoderLayer, Decoder, DecoderLayer, RecurrentDecoderLayer
from engine.models.draft_head import EagleDecoder, HeadDecoder, PairWeights
from engine.models.draft_layers import MtpNames, mtp_layer, mtp_names, read_eagle
from engine.models.experts import Experts, ExpertsAlongside
from engine.models.families import FAMILIES, read_model_config
from engine.models.latent import HeadProducts, LatentProducts
from engine.models.mlp import Mlp
from engine.models.recurrent import inner_rows, recurrent_weights
from engine.models.spec import (
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
    RecurrentSpec,
    SsmSpec,
    unit_sizes,
)
from engine.models.weight_map import LLAMA, ExpertNames, WeightMap
from engine.weights import GGUF, Checkpoint, weight_files

if TYPE_CHECKING:
    from engine.formats.gguf import GgufCheckpoint  # imports take 0.1 s

Take = Callable[..., Tensor]  # called once per tensor, with its name and shape


def load_model(path: Path, dtype: torch.dtype, device: torch.device, linear: LinearFormat | None = None) -> Decoder:
    """Load a model from a Hugging Face directory onto `device`.

    `dtype` is the dtype of activations. `linear` is the format of weight matrices, by default plain tensors in `dtype`.
    Raises ValueError, with the name of the key or the tensor, if config.json or a weight file is invalid.
    """
    config = read_model_config(path)
    names, file = FAMILIES[config.architecture].weights, weight_files(path)[0]
    if file.suffix == GGUF:
        from engine.formats.gguf import GgufCheckpoint

        source = GgufCheckpoint(file, config, device)
        names = replace(names, norms_are_offsets=False)
        model = assemble(source.take, source.config, dtype, linear or Plain(dtype), names, source)
        source.finish()
        return model
    scheme, checkpoint = read_scheme(path), Checkpoint(path, device)
    if config.tie_word_embeddings and not checkpoint.is_copy("lm_head.weight", "model.embed_tokens.weight"):
        # Some configs state that the head is tied to the embedding (transformers' default), although a head is stored.
        config = replace(config, tie_word_embeddings=False)
    if checkpoint.is_headless and not config.tie_word_embeddings:  # a head is required, but no request uses it
        config = replace(config, tie_word_embeddings=True, has_head=False)
    reader = None if scheme is None else QuantizedReader(checkpoint, scheme)
    names = _stored_names(names, checkpoint, "model.layers.")
    model = assemble(checkpoint.take, config, dtype, linear or Plain(dtype), names, reader)
    # Some files also contain a copy of a tied matrix, or rotary frequencies from old versions of transformers.
    copies = ("lm_head.weight",) if config.tie_word_embeddings else ()
    suffixes = ("self_attn.rotary_emb.inv_freq", *(() if scheme is None else UNUSED))
    drafter = range(config.num_layers, config.num_layers + config.drafter_layers)
    unused = (f"model.layers.{index}." for index in drafter)
    checkpoint.finish(copies, suffixes, (*unused, *names.unused))
    return model


def _stored_names(names: WeightMap, checkpoint: Checkpoint, prefix: str) -> WeightMap:
    """Return `names`, adapted to the checkpoint: in one family (such as Qwen3.5), some checkpoints store a layer's
    experts in one tensor, and others store them separately."""
    if names.experts.each != ExpertNames().each or not checkpoint.has(prefix, ".mlp.experts.gate_up_proj"):
        return names
    return replace(names, experts=replace(names.experts, each="mlp.experts", gate_up=("gate_up_proj",), fused=True))


def load_mtp(path: Path, model: Decoder, linear: LinearFormat | None = None) -> HeadDecoder:
    """Load the first MTP layer of the checkpoint of `model`, onto the model's device.

    Raises ValueError, with the name of the tensor, if a tensor is missing or invalid.
    """
    names = mtp_names(model.config)
    if names is None:
        raise ValueError(f"{path}: {model.config.architecture} has no MTP layer")
    scheme, checkpoint = read_scheme(path), Checkpoint(path, model.device)
    reader = None if scheme is None else QuantizedReader(checkpoint, scheme)
    weights = _stored_names(FAMILIES[model.config.architecture].weights, checkpoint, names.layer)
    return assemble_mtp(checkpoint.take, model, linear or Plain(model.dtype), names, weights, reader)


def assemble_mtp(
    take: Take, model: Decoder, linear: LinearFormat, names: MtpNames, weights: WeightMap | None = None,
    reader: QuantizedReader | None = None,
) -> HeadDecoder:  # fmt: skip
    """Build an MTP layer from tensors that `take` returns. `weights` are by default the names of the model's family."""
    weights = weights or FAMILIES[model.config.architecture].weights
    config = model.config
    loader = _Loader(take, replace(config, layers=(mtp_layer(config),)), model.dtype, linear, weights, reader)
    pair = PairWeights(
        loader.norm(names.embedding_norm, config.hidden_size),
        loader.norm(names.hidden_norm, config.hidden_size),
        loader.matrix([names.joined], [config.hidden_size], 2 * config.hidden_size, False),
    )
    layer = loader.layer(0, mtp_layer(config), names.layer)
    assert isinstance(layer, AttentionDecoderLayer)
    norm = loader.norm(names.norm, config.hidden_size)
    return HeadDecoder(replace(loader.config, draft_layers=0), model.embed, layer, norm, model.head, pair)


def load_eagle(path: Path, model: Decoder, linear: LinearFormat | None = None) -> EagleDecoder:
    """Load an EAGLE-3 checkpoint for `model`, onto the model's device.

    Raises ValueError, with the name of the key or the tensor, if the checkpoint is invalid or belongs to another model.
    """
    eagle, checkpoint = read_eagle(path, model.config), Checkpoint(path, model.device)
    config = replace(
        model.config, layers=(eagle.layer,), hidden_size=eagle.hidden_size, rms_norm_eps=eagle.rms_norm_eps,
        draft_layers=0, embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0, logit_softcap=0.0,
    )  # fmt: skip
    size, count = eagle.hidden_size, eagle.vocab_size
    root = "model." if checkpoint.is_headless else ""  # the prefix that `Checkpoint` adds to the names
    loader = _Loader(checkpoint.take, config, model.dtype, linear or Plain(model.dtype), LLAMA, None)
    prefix = f"{root}midlayer."
    if checkpoint.dtype_of(f"{prefix}hidden_norm.weight") is None:
        prefix = f"{root}layers.0."
    embed, own = model.embed, f"{root}embed_tokens.weight"
    if checkpoint.dtype_of(own) is not None:
        embed = partial(embedding, weight=checkpoint.take(own, config.vocab_size, size))
    elif size != model.config.hidden_size:
        raise ValueError(f"{path} has no tensor embed_tokens.weight: download it again")
    states = loader.matrix([f"{root}fc"], [size], len(eagle.captured) * model.config.hidden_size, False)
    layer = loader.layer(0, eagle.layer, prefix, 2 * size)
    assert isinstance(layer, AttentionDecoderLayer)
    pair = PairWeights(layer.attention_norm, loader.norm(f"{prefix}hidden_norm", size), states)
    norm, head = loader.norm(f"{root}norm", size), loader.matrix([f"{root}lm_head"], [count], size, False)
    targets = torch.arange(count, device=model.device)
    if checkpoint.dtype_of(f"{root}d2t") is not None or count != config.vocab_size:
        targets += checkpoint.codes(f"{root}d2t", torch.int64, count)
        if not 0 <= int(targets.min()) <= int(targets.max()) < config.vocab_size:
            checkpoint.refuse("d2t", f"names tokens outside of the vocabulary of {config.vocab_size}")
    checkpoint.finish((f"{root}t2d",), ())
    return EagleDecoder(config, embed, layer, norm, head, pair, eagle, targets)


def assemble(
    take: Take,
    config: ModelConfig,
    dtype: torch.dtype,
    linear: LinearFormat,
    names: WeightMap = LLAMA,
    reader: "QuantizedReader | GgufCheckpoint | None" = None,
) -> Decoder:
    """Build a decoder from the tensors that `take` returns. `dtype` is the dtype of activations.

    If `reader` is given, the matrices of the layers and of the output head come from it instead of from `take`.
    """
    loader = _Loader(take, config, dtype, linear, names, reader)
    embed, head = loader.vocabulary()  # first, so that the stored form of a tied matrix is freed before the layers load
    layers = [loader.layer(index, spec) for index, spec in enumerate(config.layers)]
    return Decoder(config, embed, layers, loader.norm("model.norm", config.hidden_size), head)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Builds the parts of one decoder. `take` is called in the order in which a pass uses the tensors."""

    take: Take
    config: ModelConfig
    dtype: torch.dtype
    linear: LinearFormat
    names: WeightMap
    reader: "QuantizedReader | GgufCheckpoint | None"

    def vocabulary(self) -> tuple[Lookup, Linear]:
        """Return the embedding and the output head."""
        shape = self.config.vocab_size, self.config.hidden_size
        embedded = self.take("model.embed_tokens.weight", *shape)
        if self.config.tie_word_embeddings:
            head = self.linear.make(embedded, None)
            return head.lookup() or partial(embedding, weight=embedded), head
        return partial(embedding, weight=embedded), self.made(self.read("lm_head", *shape), None)

    def layer(self, index: int, spec: LayerSpec, prefix: str = "", num_inputs: int = 0) -> DecoderLayer:
        """Return a layer whose tensors have this prefix. Attention has `num_inputs` inputs, by default hidden_size."""
        prefix, names, hidden = prefix or f"model.layers.{index}.", self.names, self.config.hidden_size
        attention, mlp = spec.mixer, spec.mlp
        before = [layer.mixer for layer in self.config.layers[:index]]
        if isinstance(attention, RecurrentSpec):
            first = sum(len(unit_sizes(one)) for one in before if isinstance(one, RecurrentSpec))
            return self.recurrent_layer(prefix, attention, mlp, first)
        place = sum(isinstance(one, AttentionSpec | LatentSpec) for one in before)
        if isinstance(attention, LatentSpec):
            return self.latent_layer(prefix, place, attention, mlp)
        width, heads = attention.head_dim, rotated_first(attention)

        def head_norm(name: str) -> Tensor | None:
            return self.norm(f"{prefix}self_attn.{name}", width)[heads] if attention.qk_norm else None

        def post_norm(name: str) -> Tensor | None:
            return self.norm(prefix + name, hidden) if spec.post_norms else None

        sinks = self.take(f"{prefix}self_attn.sinks", attention.heads).float() if attention.sinks else None
        qkv, gate = self.qkv(prefix, attention, num_inputs or hidden)
        return AttentionDecoderLayer(
            attention=AttentionLayer(
                place, attention.window, attention.softcap, sinks,
                wide=attention.kv_heads if width != self.config.head_dim else 0,
            ),
            attention_norm=self.norm(prefix + names.attention_norm, hidden),
            qkv=qkv,
            gate=gate,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            spec=attention,
            output=self.matrix([prefix + names.output], [hidden], attention.heads * width, attention.output_bias),
            post_attention_norm=post_norm(names.post_attention_norm),
            mlp_norm=self.norm(prefix + names.mlp_norm, hidden),
            mlp=self.feed(prefix, mlp),
            post_mlp_norm=post_norm(names.post_mlp_norm),
            alongside=self.alongside(prefix, spec.alongside) if spec.alongside is not None else None,
            scale=float(self.take(f"{prefix}layer_scalar", 1)) if spec.scaled else 1.0,
        )  # fmt: skip

    def recurrent_layer(
        self, prefix: str, spec: RecurrentSpec, mlp: MlpSpec | MoeSpec, first: int
    ) -> RecurrentDecoderLayer:
        own, hidden = f"{prefix}{self.names.recurrent}.", self.config.hidden_size
        biased = isinstance(spec, SsmSpec) and spec.bias
        rows = inner_rows(spec, self.names.projections)
        names = [own + name for name in self.names.projections]
        weight, bias = self.parts(names, rows.sizes, hidden, biased)
        inputs, steps = (
            self.made(rows_of(weight, which), None if bias is None else bias[which])
            for which in (rows.inputs, rows.steps)
        )
        return RecurrentDecoderLayer(
            recurrent=recurrent_weights(self.take, own, spec, first),
            inputs=inputs,
            steps=steps,
            attention_norm=self.norm(prefix + self.names.attention_norm, hidden),
            output=self.matrix([f"{own}out_proj"], [hidden], spec.inner, biased),
            post_attention_norm=None,
            mlp_norm=self.norm(prefix + self.names.mlp_norm, hidden),
            mlp=self.feed(prefix, mlp),
            post_mlp_norm=None,
        )

    def alongside(self, prefix: str, spec: MoeSpec) -> ExpertsAlongside:
        def norm(name: str) -> Tensor:
            return self.norm(f"{prefix}{name}", self.config.hidden_size)

        experts, before = self.experts(prefix, spec), norm("pre_feedforward_layernorm_2")
        return ExpertsAlongside(
            experts, torch.ones_like(before), before, norm("post_feedforward_layernorm_2"),
            norm("post_feedforward_layernorm_1"),
        )  # fmt: skip

    def latent_layer(self, prefix: str, index: int, spec: LatentSpec, mlp: MlpSpec | MoeSpec) -> AttentionDecoderLayer:
        hidden = self.config.hidden_size
        own, heads, query = f"{prefix}self_attn.", spec.heads, spec.nope_dim + spec.rope_dim
        turned = torch.arange(spec.rope_dim)
        turned = turned.view(-1, 2).T.flatten() if spec.interleaved else turned
        order = torch.cat((torch.arange(spec.nope_dim), spec.nope_dim + turned))
        order = (torch.arange(heads)[:, None] * query + order).flatten()
        down = [f"{own}kv_a_proj_with_mqa"], [spec.width]
        if spec.q_rank:
            down = [f"{own}q_a_proj", *down[0]], [spec.q_rank, spec.width]
        stored = torch.cat((torch.arange(spec.q_rank + spec.kv_rank), spec.q_rank + spec.kv_rank + turned))
        name = "q_b_proj" if spec.q_rank else "q_proj"
        return AttentionDecoderLayer(
            attention=AttentionLayer(index, latent=spec.kv_rank),
            attention_norm=self.norm(f"{prefix}input_layernorm", hidden),
            qkv=self.matrix(*down, hidden, spec.bias, stored),
            q_norm=self.norm(f"{own}q_a_layernorm", spec.q_rank) if spec.q_rank else None,
            k_norm=self.norm(f"{own}kv_a_layernorm", spec.kv_rank),
            spec=spec,
            latent=self.latent(
                own, spec, self.matrix([own + name], [heads * query], spec.q_rank or hidden, False, order)
            ),
            output=self.matrix([f"{own}o_proj"], [hidden], heads * spec.value_dim, spec.bias),
            post_attention_norm=None,
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm", hidden),
            mlp=self.feed(prefix, mlp),
            post_mlp_norm=None,
        )

    def latent(self, prefix: str, spec: LatentSpec, queries: Linear) -> LatentProducts:
        rows = spec.nope_dim + spec.value_dim
        stored = dense(self.read(f"{prefix}kv_b_proj", spec.heads * rows, spec.kv_rank))
        both = stored.view(spec.heads, rows, -1)
        keys, values = torch.split(both, [spec.nope_dim, spec.value_dim], dim=1)
        return LatentProducts(spec, queries, self.by_head(keys.transpose(1, 2)), self.by_head(values))

    def by_head(self, weights: Tensor) -> HeadProducts:
        if weights.device.type != "cpu":
            return HeadProducts([], weights.to(self.dtype).contiguous())
        return HeadProducts([self.linear.make(weight.contiguous(), None) for weight in weights], None)

    def feed(self, prefix: str, spec: MlpSpec | MoeSpec) -> Mlp | Experts:
        return self.experts(prefix, spec) if isinstance(spec, MoeSpec) else self.mlp(f"{prefix}{self.names.mlp}.", spec)

    def qkv(self, prefix: str, spec: AttentionSpec, width: int) -> tuple[Linear, Linear | None]:
        """Return the matrix of queries, keys and values, and the matrix of the gate, if there is one.

        The dimensions of each query and key are in the order that `rotated_first` returns.
        """
        made = qkv_rows(spec, self.names.qkv)
        names = [prefix + name for name in made.names]
        weight, bias = self.parts(names, made.sizes, width, spec.qkv_bias)
        if made.order is None:
            return self.made(weight, bias), None
        chosen = self.made(rows_of(weight, made.order), None if bias is None else bias[made.order])
        if made.gates is None:
            return chosen, None
        return chosen, self.made(rows_of(weight, made.gates), None if bias is None else bias[made.gates])

    def mlp(self, prefix: str, spec: MlpSpec, gate_up: tuple[str, ...] = (), down: str = "") -> Mlp:
        parts = gate_up or self.names.gate_up
        sizes = [2 * spec.inner // len(parts)] * len(parts)
        hidden = self.config.hidden_size
        return Mlp(
            self.matrix([prefix + name for name in parts], sizes, hidden, spec.bias),
            self.matrix([prefix + (down or self.names.down)], [hidden], spec.inner, spec.bias),
            spec.activation,
        )

    def experts(self, prefix: str, spec: MoeSpec) -> Experts:
        names, hidden = self.names.experts, self.config.hidden_size
        router = dense(self.read(prefix + names.router, spec.num_experts, hidden)).float()
        if names.router_scale:
            router *= self.take(prefix + names.router_scale, hidden).float() * hidden**-0.5
        bias = self.take(f"{prefix}{names.router}.bias", spec.num_experts) if spec.router_bias else None
        factors = torch.full((spec.num_experts,), spec.scale, device=router.device)
        if spec.scales_experts:
            factors *= self.take(prefix + names.scales, spec.num_experts).float()
        correction = self.take(prefix + names.correction, spec.num_experts).float() if spec.corrects else None
        if names.stacked:
            each = self.stacked(prefix + names.each, spec)
        elif names.fused:
            each = self.fused(f"{prefix}{names.each}.", spec)
        else:
            each = [
                self.mlp(prefix + names.each.format(number) + ".", spec.expert, names.gate_up, names.down)
                for number in range(spec.num_experts)
            ]
        shared = self.mlp(f"{prefix}{names.shared}.", spec.shared) if spec.shared is not None else None
        gate = self.matrix([prefix + names.shared_gate], [1], hidden, False) if spec.gates_shared else None
        gate_up, down = (self.linear.of_experts(some) for some in ([m.gate_up for m in each], [m.down for m in each]))
        return Experts(spec, self.linear.make_exact(router, bias), correction, factors, gate_up, down, shared, gate)

    def stacked(self, prefix: str, spec: MoeSpec) -> list[Mlp]:
        count, inner, hidden = spec.num_experts, spec.expert.inner, self.config.hidden_size
        gate_up = self.read_stacked(f"{prefix}.gate_up_proj", count, hidden, 2 * inner)
        gate_up_bias = self.take(f"{prefix}.gate_up_proj_bias", count, 2 * inner)
        down = self.read_stacked(f"{prefix}.down_proj", count, inner, hidden)
        down_bias = self.take(f"{prefix}.down_proj_bias", count, hidden)
        order = torch.cat((torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)))
        return [
            Mlp(
                self.made(rows_of(gate_up[index], order), gate_up_bias[index][order]),
                self.made(down[index], down_bias[index]),
                spec.expert.activation,
            )
            for index in range(count)
        ]

    def fused(self, prefix: str, spec: MoeSpec) -> list[Mlp]:
        count, inner, hidden = spec.num_experts, spec.expert.inner, self.config.hidden_size
        names = self.names.experts
        gate_up = self.read_fused(f"{prefix}{names.gate_up[0]}", count, 2 * inner, hidden)
        down = self.read_fused(f"{prefix}{names.down}", count, hidden, inner)
        return [
            Mlp(self.linear.make(one, None), self.linear.make(other, None), spec.expert.activation)
            for one, other in zip(gate_up, down, strict=True)
        ]

    def matrix(self, names: list[str], sizes: list[int], width: int, bias: bool, order: Tensor | None = None) -> Linear:
        """Return the matrix [sum of sizes, width] of the named parts, with its outputs in the given order."""
        weights, biases = self.parts(names, sizes, width, bias)
        if order is not None:
            weights, biases = rows_of(weights, order), None if biases is None else biases[order]
        return self.made(weights, biases)

    def parts(self, names: list[str], sizes: list[int], width: int, bias: bool) -> tuple[Weight, Tensor | None]:
        """Return the matrix [sum of sizes, width] of the named parts, and its bias if it has one."""
        weights = joined([self.read(name, size, width) for name, size in zip(names, sizes, strict=True)])
        if not bias:
            return weights, None
        return weights, torch.cat([self.take(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)])

    def read(self, name: str, out: int, width: int) -> Weight:
        """Return the matrix [out, width] of a module, in the form in which the checkpoint stores it."""
        return self.take(f"{name}.weight", out, width) if self.reader is None else self.reader.matrix(name, out, width)

    def read_stacked(self, name: str, count: int, width: int, out: int) -> list[Weight]:
        """Return the experts' matrices [out, width] from one tensor [count, width, out]."""
        if self.reader is not None:
            return self.reader.stacked(name, count, width, out)
        return [one.T.contiguous() for one in self.take(name, count, width, out)]

    def read_fused(self, name: str, count: int, out: int, width: int) -> list[Tensor]:
        """Return the experts' matrices [out, width] from one tensor [count, out, width]."""
        if isinstance(self.reader, QuantizedReader):
            return self.reader.fused(name, count, out, width)
        return list(self.take(name, count, out, width))

    def made(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Convert a matrix to the format in which it is multiplied."""
        return (
            self.linear.make(weight, bias) if isinstance(weight, Tensor) else self.linear.make_quantized(weight, bias)
        )

    def norm(self, name: str, width: int) -> Tensor:
        weight = self.take(f"{name}.weight", width)
        return weight.float().add(1).to(self.dtype) if self.names.norms_are_offsets else weight.to(self.dtype)


def rotated_first(spec: AttentionSpec) -> Tensor:
    """Return an order of a head's dimensions in which dimension i is rotated with dimension i + head_dim / 2.

    In a checkpoint, the rotated dimensions come first, and dimension i is rotated with i + dims / 2 (see `Rope.dims`).
    """
    dims = spec.head_dim if spec.rope is None else spec.rope.dims or spec.head_dim
    half, rest = dims // 2, (spec.head_dim - dims) // 2
    every = torch.arange(spec.head_dim)
    return torch.cat((every[:half], every[dims : dims + rest], every[half:dims], every[dims + rest :]))


@dataclass(frozen=True, slots=True)
class QkvRows:
    """The parts in which a checkpoint stores the matrix of queries, keys and values, and the rows of these parts that
    are used."""

    names: tuple[str, ...]
    sizes: list[int]
    order: Tensor | None  # rows of queries, keys and values, in the order of `rotated_first`; None: all rows, as stored
    gates: Tensor | None  # rows of the gate, if there is one


def qkv_rows(spec: AttentionSpec, names: tuple[str, ...]) -> QkvRows:
    sizes = [count * spec.head_dim for count in (spec.heads, spec.kv_heads, spec.kv_heads)]
    sizes = sizes if len(names) > 1 else [sum(sizes)]
    if spec.values_are_keys:
        sizes, names = sizes[:2], names[:2]
    order, gates, starts = None, None, torch.arange(spec.heads + spec.kv_heads) * spec.head_dim
    if spec.gated:  # the rows of a head's gate follow those of its query
        sizes[0] *= 2
        starts[: spec.heads] *= 2
        starts[spec.heads :] += spec.heads * spec.head_dim
        gates = torch.arange(sizes[0]).view(spec.heads, 2, -1)[:, 1].flatten()
    if spec.gated or (spec.rope is not None and spec.rope.dims):
        heads = starts[:, None] + rotated_first(spec)
        values = torch.arange(spec.kv_heads * spec.head_dim) + starts[-1] + spec.head_dim
        order = torch.cat((heads.flatten(), values))
    return QkvRows(names, sizes, order, gates)
