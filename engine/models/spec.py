"""The shape of a decoder as data: what each layer computes, without its weights."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding (Su et al. 2021). Some fields apply to only some kinds.

    `kind` is "default", "linear", "llama3", "yarn" (Peng et al. 2023), "longrope" (Ding et al. 2024) or "proportional"
    (Gemma 4), in which only the first `pairs` of the pairs of a whole head are rotated. Otherwise, only the first
    `dims` dimensions of a head are rotated, or all of them if `dims` is 0. Cosines and sines are multiplied by
    `magnitude`. `factors` [dims / 2] divide the frequencies of longrope.
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


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer.

    Rotation is left out if `rope` is None. A query attends to the last `window` tokens, or to all if it is 0. Queries
    are multiplied by `query_scale`, in addition to head_dim ** -0.5. If `softcap` is not 0, scores become
    softcap * tanh(score / softcap). With `sinks`, the softmax of each head has one more term, which has no value. If
    `temperature` is not 0, a query at position p is also multiplied by 1 + temperature * log(1 + p //
    temperature_tokens), which sharpens attention in long contexts (Llama 4). If `norms_values`, values are divided by
    their root mean square; if `values_are_keys`, they derive from the product of the keys (Gemma 4).
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

    @property
    def rotated(self) -> int:
        """Return the number of dimensions of a head for which angles are computed."""
        return self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention of one layer (DeepSeek-V2).

    The pool holds one vector per token: a latent of `kv_rank` dimensions, from which the keys and values of all heads
    derive, and a rotated key of `rope_dim` dimensions, which all heads share. A head's query has `nope_dim` dimensions
    without rotation and `rope_dim` with it. Queries derive from a vector of `q_rank` dimensions, or from the hidden
    state if it is 0. Queries and outputs, not the stored latents, are multiplied by the weights of keys and values.
    If `interleaved`, the checkpoint rotates dimension 2i with 2i + 1. For other fields see `AttentionSpec`.
    """

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
        """Return the number of dimensions of the part of a head that is rotated."""
        return self.rope_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A gated MLP: down(activation(gate) * up)."""

    inner: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts (Shazeer et al. 2017): each token uses the `top_k` experts with the best scores.

    `score` maps the router's logits to scores. If `corrects`, a bias is added to the scores for the choice only, and
    with several `groups` the choice is limited to the `top_groups` best ones, by the sum of a group's `group_scores`
    best scores (DeepSeek). `scores_chosen`: scores are computed from the logits of the chosen experts alone. The
    weights of the chosen experts are divided by their sum if `renormalizes`, and multiplied by `scale`. The `shared`
    expert takes every token, and is gated if `gates_shared`. If `scales_experts`, the weight of each expert is also
    multiplied by a number of its own (Gemma 4).
    """

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

    The experts `alongside` the MLP have norms of their own. If `scaled`, the layer's result is multiplied by a number
    (Gemma 4).
    """

    mixer: AttentionSpec | LatentSpec
    mlp: MlpSpec | MoeSpec
    post_norms: bool = False
    alongside: MoeSpec | None = None
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder.

    Layers share a KV layout with `num_kv_heads` heads of `head_dim`. Some layers may have heads of twice the size, at
    most half as many: their keys and values take the places of two heads.

    Embeddings are multiplied by `embedding_scale`, outputs of attention and MLP by `residual_scale`, and logits by
    `logit_scale`. If `logit_softcap` is not 0, logits become logit_softcap * tanh(logit / logit_softcap).
    The checkpoint may have `drafter_layers` more layers, which predict further tokens (MTP) and are not loaded.
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

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].mixer.heads

    @property
    def num_kv_heads(self) -> int:
        return max(layer.mixer.kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        return min(layer.mixer.head_dim for layer in self.layers)

    @property
    def ropes(self) -> list[Rope | None]:
        """The distinct rotary embeddings of the layers, in order of use."""
        return list(dict.fromkeys(layer.mixer.rope for layer in self.layers))
