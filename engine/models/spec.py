"""The description of a decoder as data: what each layer computes, without its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding (Su et al. 2021). Some fields apply to only some kinds.

    `kind` is "default", "linear", "llama3", "yarn" (Peng et al. 2023), "longrope" (Ding et al. 2024) or "proportional"
    (Gemma 4). With "proportional", the whole head is divided into pairs, and only the first `pairs` of them rotate.
    With the other kinds, only the first `dims` dimensions of a head rotate, or all of them if `dims` is 0. Cosines and
    sines are multiplied by `magnitude`. With "longrope", frequencies are divided by `factors` [dims / 2].

    If there are `sections`, tokens have a temporal, a vertical and a horizontal position (M-RoPE, Wang et al. 2024).
    `sections` are the numbers of pairs that these three positions rotate. The pairs of an axis are adjacent. If
    `interleaved` is true, the axes alternate instead until no vertical or horizontal pairs are left (Qwen3-VL).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    magnitude: float = 1.0
    factors: tuple[float, ...] = ()
    dims: int = 0
    pairs: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    If `rope` is None, queries and keys are not rotated. A query attends to the last `window` tokens, or to all tokens
    if `window` is 0. Queries are multiplied by `query_scale`, in addition to head_dim ** -0.5. If `softcap` is not 0,
    scores become softcap * tanh(score / softcap). With `sinks`, each head's softmax has one more term in its
    denominator. If `temperature` is not 0, a query at position p is also multiplied by
    1 + temperature * log(1 + p // temperature_tokens), which sharpens attention in long contexts (Llama 4). If
    `norms_values`, values are divided by their root mean square. If `values_are_keys`, values derive from the output
    of the key projection (Gemma 4). If `gated`, outputs are multiplied by the sigmoid of a gate, which the query
    projection also produces (Qwen3-Next).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = Rope()
    window: int = 0
    query_scale: float = 1.0
    temperature: float = 0.0
    temperature_tokens: int = 1
    softcap: float = 0.0
    sinks: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    norms_values: bool = False
    values_are_keys: bool = False
    gated: bool = False

    @property
    def rotated(self) -> int:
        """Return how many dimensions of a head get an angle."""
        return self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention of one layer (DeepSeek-V2).

    The pool holds one vector per token. It consists of a latent of `kv_rank` dimensions, from which the keys and values
    of all heads derive, and of a rotated key of `rope_dim` dimensions for all heads. A head's query has `nope_dim`
    unrotated dimensions and `rope_dim` rotated dimensions. Queries derive from a vector of `q_rank` dimensions, or from
    the hidden state if `q_rank` is 0. Latents are never expanded to keys and values: the matrix for keys is applied to
    the queries instead, and the matrix for values to the outputs of attention. If `interleaved`, the checkpoint rotates
    dimension 2i with dimension 2i + 1. For other fields see `AttentionSpec`."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope | None = Rope()
    query_scale: float = 1.0
    temperature: float = 0.0
    temperature_tokens: int = 1
    interleaved: bool = True
    bias: bool = False

    @property
    def width(self) -> int:
        """Return the number of dimensions of a token's vector in the pool."""
        return self.kv_rank + self.rope_dim

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Return half the width: a token's vector takes the place of a key and a value of this size."""
        return self.width // 2

    @property
    def rotated(self) -> int:
        """Return how many dimensions of a head are rotated."""
        return self.rope_dim


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent layer: a short causal convolution over `conv` tokens, followed by a recurrence.

    A query or key head serves value_heads / key_heads consecutive value heads. The recurrent state of a value head is
    a matrix [key_dim, value_dim].
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The number of heads and the size of a head, for each input of the recurrence, in the order of the
        convolution's channels."""
        raise NotImplementedError

    @property
    def columns(self) -> tuple[int, int, int]:
        """The first channel of the queries, of the keys and of the values."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """The number of channels of the convolution."""
        return sum(heads * size for heads, size in self.parts)

    @property
    def inner(self) -> int:
        """The size of the layer's result for a token, before the output projection."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaSpec(RecurrentSpec):
    """A gated delta rule (Yang et al. 2024) of one layer. The inputs of the recurrence are queries, keys and values."""

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        return (self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)

    @property
    def columns(self) -> tuple[int, int, int]:
        keys = self.key_heads * self.key_dim
        return 0, keys, 2 * keys


@dataclass(frozen=True, slots=True)
class SsmSpec(RecurrentSpec):
    """A selective state space (Mamba-2, Dao and Gu 2024) of one layer.

    A group's vector C takes the place of a query, and the group's vector B takes the place of a key. C and B have
    `key_dim` dimensions (the state's size). The inputs x of a head take the place of the head's value. The
    convolution's channels are in the order x, B, C. The projections have biases if `bias` is true, and the convolution
    has a bias if `conv_bias` is true.
    """

    conv_bias: bool = True
    bias: bool = False

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        return (self.value_heads, self.value_dim), (self.key_heads, self.key_dim), (self.key_heads, self.key_dim)

    @property
    def columns(self) -> tuple[int, int, int]:
        return self.inner + self.key_heads * self.key_dim, self.inner, 0


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A gated MLP: down(activation(gate) * up)."""

    inner: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017): each token uses the `top_k` experts with the best scores.

    `score` maps the router's logits to scores. If `corrects`, a bias is added to the scores when experts are chosen,
    but not to the weights of the chosen experts. With several `groups`, the choice is limited to the `top_groups` best
    groups. A group is rated by the sum of its `group_scores` best scores (DeepSeek). If `scores_chosen`, scores are
    computed only from the logits of the chosen experts.

    The weights of the chosen experts are divided by their sum if `renormalizes`, and multiplied by `scale`. The
    `shared` expert takes every token, and is gated if `gates_shared`. If `scales_experts`, the weight of each expert is
    also multiplied by a number that the checkpoint has for this expert (Gemma 4)."""

    num_experts: int
    top_k: int
    expert: MlpSpec
    score: Literal["softmax", "sigmoid"] = "softmax"
    scores_chosen: bool = False
    renormalizes: bool = True
    scale: float = 1.0
    corrects: bool = False
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
    router_bias: bool = False
    shared: MlpSpec | None = None
    gates_shared: bool = False
    scales_experts: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. With `post_norms`, the outputs of attention and MLP are normed before they are added (Gemma).

    The experts `alongside`, if given, take the same hidden states as the MLP, and have their own norms. If `scaled`,
    the layer's result is multiplied by a number (Gemma 4).
    """

    mixer: AttentionSpec | LatentSpec | RecurrentSpec
    mlp: MlpSpec | MoeSpec
    post_norms: bool = False
    alongside: MoeSpec | None = None
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder.

    Layers share a KV layout with `num_kv_heads` heads of size `head_dim`. Some layers may have heads of twice this
    size, but at most half as many. Each of these heads takes the space of two heads of the layout.

    Embeddings are multiplied by `embedding_scale`, outputs of attention and MLP by `residual_scale`, and logits by
    `logit_scale`. If `logit_softcap` is not 0, logits become logit_softcap * tanh(logit / logit_softcap).
    The checkpoint may have `drafter_layers` additional layers, which predict further tokens (MTP). The pool has room
    for the KV of the model's layers and of a draft head with `draft_layers` layers.
    If transformers' own module runs the model, `transformers` is the version of transformers, and `layers` describes
    only the sizes of attention. Otherwise, it is empty.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    drafter_layers: int = 0
    draft_layers: int = 0
    transformers: str = ""
    has_head: bool = True  # whether the checkpoint has an output head; embedding models may have none
    units: tuple[int, ...] = ()  # sizes of additional units of a state (see `state_units`)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AttentionSpec | LatentSpec, ...]:
        """The attention of the layers that keep KV, in order. Other layers have a recurrent state."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec | LatentSpec))

    @property
    def num_kv_layers(self) -> int:
        return len(self.attention) + self.draft_layers

    @property
    def num_heads(self) -> int:
        return self.attention[0].heads

    @property
    def num_kv_heads(self) -> int:
        return max(spec.kv_heads for spec in self.attention)

    @property
    def head_dim(self) -> int:
        return min(spec.head_dim for spec in self.attention)

    @property
    def ropes(self) -> list[Rope | None]:
        """The distinct rotary embeddings of the layers, in order of use."""
        return list(dict.fromkeys(spec.rope for spec in self.attention))


def unit_sizes(spec: RecurrentSpec) -> tuple[int, ...]:
    """Return the sizes of the units of one layer's state, in float32 elements.

    First come the inputs of the convolution: each head of each part has a unit with its last `conv` - 1 inputs,
    [conv - 1, size], the oldest first. Then comes the recurrent matrix of each value head, [key_dim, value_dim].
    """
    inputs = [(spec.conv - 1) * size for heads, size in spec.parts for _ in range(heads)]
    return (*inputs, *[spec.key_dim * spec.value_dim] * spec.value_heads)


def state_units(config: ModelConfig) -> tuple[int, ...]:
    """Return the sizes of the units of a request's state, in float32 elements, layer by layer (see `unit_sizes`)."""
    recurrent = (layer.mixer for layer in config.layers if isinstance(layer.mixer, RecurrentSpec))
    return (*(size for spec in recurrent for size in unit_sizes(spec)), *config.units)


def unit_places(units: Sequence[int], row_size: int) -> list[tuple[int, int]]:
    """Return the row of each unit and the unit's offset in that row. A row has `row_size` elements.

    Units are placed in order, and no unit extends over two rows.
    Raises ValueError if a unit is larger than a row.
    """
    places: list[tuple[int, int]] = []
    row = offset = 0
    for size in units:
        if size > row_size:
            raise ValueError(
                f"a part of the model's recurrent state has {size} numbers, but must fit into a row of the KV pool, "
                f"which holds {row_size}: increase --block-size"
            )
        if offset + size > row_size:
            row, offset = row + 1, 0
        places.append((row, offset))
        offset += size
    return places
