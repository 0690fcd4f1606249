"""The parts of config.json that families share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.models.spec import Activation, AttentionSpec, LatentSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, Rope
from shared.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def model(keys: ConfigReader, layers: Sequence[LayerSpec], **more: Any) -> ModelConfig:
    """Return the configuration of a model with these layers. `more` are other fields of ModelConfig.

    The result has no end tokens. The caller adds them, because generation_config.json may have more of them.
    """
    vocab_size = keys.size("vocab_size")
    defaults: dict[str, Any] = {
        "rms_norm_eps": keys.positive("rms_norm_eps", 1e-6),
        "tie_word_embeddings": keys.flag("tie_word_embeddings"),
    }
    if keys.values.get("num_nextn_predict_layers"):
        defaults["drafter_layers"] = keys.size("num_nextn_predict_layers")
    return ModelConfig(
        architecture=str(keys.values["architectures"][0]),
        hidden_size=keys.size("hidden_size"),
        vocab_size=vocab_size,
        layers=tuple(layers),
        max_position_embeddings=keys.size("max_position_embeddings"),
        bos_token_id=next(iter(keys.token_ids("bos_token_id", vocab_size)), None),
        **(defaults | more),
    )


def attention(
    keys: ConfigReader,
    default_head_dim: int = 0,
    *,
    biased: bool = False,
    default_theta: float = 10_000.0,
    default_share: float | None = None,
    **more: Any,
) -> AttentionSpec:
    """Return the attention of all layers. `more` are fields of AttentionSpec.

    By default, head_dim is `default_head_dim` or, if this is 0, hidden_size / heads. If `biased`, all products of
    attention have biases. If `more` has no `rope`, the rotary embedding is read from the config.
    """
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", heads)
    if heads % kv_heads:
        keys.refuse("num_key_value_heads", f"num_attention_heads ({heads}) must be a multiple of it")
    if keys.values.get("head_dim") is None and not default_head_dim and hidden % heads:
        keys.refuse("num_attention_heads", f"hidden_size ({hidden}) must be a multiple of it, unless head_dim is given")
    head_dim = keys.size("head_dim", default_head_dim or max(1, hidden // heads))
    if head_dim % 2:
        keys.refuse("head_dim", "it must be even, for rotary embedding")
    if "rope" not in more:
        more["rope"] = rope(keys, head_dim, default_theta, default_share)
    return AttentionSpec(heads, kv_heads, head_dim, **({"qkv_bias": biased, "output_bias": biased} | more))


def mlp(keys: ConfigReader, size: str = "intermediate_size", activation: str = "hidden_act", **more: Any) -> MlpSpec:
    return MlpSpec(keys.size(size), activation_of(keys, activation), **more)


def activation_of(keys: ConfigReader, key: str, default: str = "silu") -> Activation:
    name = keys.text(key, default)
    if name not in ACTIVATIONS:
        keys.refuse(key, f"supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def layer_count(keys: ConfigReader, key: str, default: int) -> int:
    """Return the value of `key`: how many of the first layers differ from the other layers. It may be 0."""
    count = keys.values.get(key, default)
    if type(count) is not int or count < 0:
        keys.refuse(key, "it must be 0 or a positive integer")
    return count


def layer_kinds(
    keys: ConfigReader, default: Callable[[int], str], supported: Sequence[str] = (FULL, SLIDING)
) -> list[str]:
    """Return the kind of each layer: its entry in `layer_types` or, if the key is missing, `default(index)`."""
    layers, kinds = keys.size("num_hidden_layers"), keys.values.get("layer_types")
    if kinds is None:
        return [default(index) for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        keys.refuse("layer_types", f"it must have one entry for each of the {layers} layers")
    if any(kind not in supported for kind in kinds):
        keys.refuse("layer_types", f"supported are {' and '.join(supported)}")
    return list(map(str, kinds))


def sparse_model(
    keys: ConfigReader, mixer: AttentionSpec | LatentSpec, moe: MoeSpec, is_sparse: Callable[[int], bool]
) -> ModelConfig:
    """Return a model whose layers have the experts `moe` if `is_sparse(index)`, and an MLP otherwise."""
    layers = range(keys.size("num_hidden_layers"))
    return model(keys, [LayerSpec(mixer, moe if is_sparse(index) else mlp(keys)) for index in layers])


def windowed(attention: AttentionSpec, kinds: Sequence[str], window: int) -> list[AttentionSpec]:
    """Return the attention of each layer. Layers of the kind SLIDING see the last `window` tokens."""
    return [replace(attention, window=window) if kind == SLIDING else attention for kind in kinds]


def rope_values(keys: ConfigReader) -> ConfigReader:
    """Return `rope_parameters` (written by transformers 5) or `rope_scaling` (older versions).

    Raises ValueError if `rope_scaling` has an entry that `rope_parameters` lacks: the user may have added it by hand.
    """
    parameters, scaling = keys.values.get("rope_parameters"), keys.values.get("rope_scaling")
    if isinstance(parameters, dict) and isinstance(scaling, dict):
        of_full = parameters.get("full_attention", parameters)
        if not isinstance(of_full, dict) or not scaling.items() <= of_full.items():
            keys.refuse(
                "rope_scaling", "it differs from rope_parameters; change rope_parameters and remove rope_scaling"
            )
    return keys.nested("rope_scaling" if parameters is None else "rope_parameters")


def rope(
    keys: ConfigReader, head_dim: int, default_theta: float = 10_000.0, default_share: float | None = None
) -> Rope:
    """Read `rope_parameters` (written by transformers 5), or `rope_theta` and `rope_scaling` (older versions).

    If `default_share` is None, the family rotates whole heads. Otherwise, this share of a head's dimensions rotates
    by default.
    """
    given = rope_values(keys)
    share = given.positive("partial_rotary_factor", keys.positive("partial_rotary_factor", default_share or 1.0))
    dims = int(head_dim * share)
    if share != 1 and (default_share is None or share > 1 or dims % 2 or dims == 0):
        where = given if "partial_rotary_factor" in given.values else keys
        why = "it must be 1.0, because this family rotates whole heads"
        why = why if default_share is None else "it must be at most 1.0 and give an even number of dimensions"
        where.refuse("partial_rotary_factor", why)
    theta = given.positive("rope_theta", keys.positive("rope_theta", default_theta))
    sections: tuple[int, ...] = ()
    if "mrope_section" in given.values:
        sections = tuple(map(int, given.numbers("mrope_section", 3)))
        if sum(sections) != dims // 2 or min(sections) < 0:
            given.refuse("mrope_section", f"its sum must be {dims // 2}, the number of pairs that are rotated")
    interleaved = given.flag("mrope_interleaved") and bool(sections)
    made = Rope(theta, dims=0 if dims == head_dim else dims, sections=sections, interleaved=interleaved)
    return scaled(made, keys, given, dims)


def original_length(keys: ConfigReader, given: ConfigReader, default: int | None = None) -> int:
    """Return the context length before scaling. As in transformers, a value at the top level of the config has priority
    over a value in `given`, the config's object for the rotary embedding."""
    key = "original_max_position_embeddings"
    return (given if keys.values.get(key) is None else keys).size(key, default)


def require_rope(keys: ConfigReader) -> None:
    """Refuse a config that does not describe the rotary embedding. The readers of families call this
    function if transformers' default for the family is a scaled embedding."""
    if not rope_values(keys).values:
        keys.refuse("rope_parameters", "this family requires it")


def scaled(rope: Rope, keys: ConfigReader, given: ConfigReader, dims: int) -> Rope:
    """Return `rope`, scaled for long contexts as `given` describes."""
    key = "rope_type" if "rope_type" in given.values else "type"
    kind = given.text(key, "default")
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, kind=kind, factor=given.positive("factor"))
    if kind == "llama3":
        low, high = given.positive("low_freq_factor"), given.positive("high_freq_factor")
        if low >= high:
            given.refuse("high_freq_factor", f"it must be above low_freq_factor ({low})")
        original = original_length(keys, given)
        return replace(rope, kind=kind, factor=given.positive("factor"), low_freq_factor=low, high_freq_factor=high,
                       original_max_position_embeddings=original)  # fmt: skip
    longest = keys.size("max_position_embeddings")
    original = original_length(keys, given, longest)
    rope = replace(rope, kind=kind, original_max_position_embeddings=original)
    if kind == "yarn":
        return _yarn(rope, given, given.positive("factor", longest / original))
    if kind != "longrope":
        given.refuse(key, "supported are default, linear, llama3, yarn and longrope")
    factor = given.positive("factor", longest / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    long, short = (given.numbers(name, dims // 2) for name in ("long_factor", "short_factor"))
    # All requests use the same factors, because the length of one request must not change the output of another.
    return replace(
        rope, factors=long if longest > original else short,
        magnitude=given.positive("attention_factor", magnitude),
    )  # fmt: skip


def _yarn(rope: Rope, given: ConfigReader, factor: float) -> Rope:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = magnitude(1.0)
    if given.values.get("mscale") and given.values.get("mscale_all_dim"):
        default = magnitude(given.positive("mscale")) / magnitude(given.positive("mscale_all_dim"))
    return replace(
        rope,
        factor=factor,
        beta_fast=given.positive("beta_fast", 32.0),
        beta_slow=given.positive("beta_slow", 1.0),
        truncates=given.flag("truncate", True),
        magnitude=given.positive("attention_factor", default),
    )
