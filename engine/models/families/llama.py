"""Llama, Mistral, Qwen 2, Qwen 3 and models that differ from them in a few settings. All are dense, with gated MLPs."""

from dataclasses import replace

from engine.models.families import common
from engine.models.families.common import FULL, SLIDING
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig
from shared.config_reader import ConfigReader

QWEN3_HEAD_DIM = 128  # transformers' default `head_dim` for any hidden size


def llama(keys: ConfigReader) -> ModelConfig:
    attention = common.attention(keys, biased=keys.flag("attention_bias"))
    return uniform(keys, attention, common.mlp(keys, bias=keys.flag("mlp_bias")))


def mistral(keys: ConfigReader) -> ModelConfig:
    # If the key is missing, transformers' default of 4096 applies. A value of null means no window.
    unlimited = "sliding_window" in keys.values and keys.values["sliding_window"] is None
    window = 0 if unlimited else keys.size("sliding_window", 4096)
    kinds = common.layer_kinds(keys, lambda index: SLIDING)  # Ministral 8B has layers without a window
    return dense(keys, common.attention(keys), kinds, window)


def ministral3(keys: ConfigReader) -> ModelConfig:
    """Read Ministral 3. Queries are scaled according to their position."""
    given = keys.nested("rope_parameters")
    attention = common.attention(
        keys, 128, window=0 if keys.values.get("sliding_window") is None else keys.size("sliding_window"),
        temperature=given.positive("llama_4_scaling_beta"),
        temperature_tokens=common.original_length(keys, given),
    )  # fmt: skip
    return uniform(keys, attention, common.mlp(keys))


def qwen2(keys: ConfigReader) -> ModelConfig:
    return dense(keys, common.attention(keys, qkv_bias=True), *qwen_windows(keys))


def qwen3(keys: ConfigReader) -> ModelConfig:
    attention = common.attention(keys, QWEN3_HEAD_DIM, qk_norm=True, biased=keys.flag("attention_bias"))
    return dense(keys, attention, *qwen_windows(keys))


def qwen_windows(keys: ConfigReader) -> tuple[list[str], int]:
    """Return the kind of each layer, and the window. Layers from `max_window_layers` on have a window, if the model
    uses windows."""
    if not keys.flag("use_sliding_window"):
        return [FULL] * keys.size("num_hidden_layers"), 0
    full = common.layer_count(keys, "max_window_layers", 28)
    kinds = common.layer_kinds(keys, lambda index: SLIDING if index >= full else FULL)
    return kinds, keys.size("sliding_window", 4096)


def smollm3(keys: ConfigReader) -> ModelConfig:
    """Read SmolLM 3. Some layers (by default, every fourth) do not rotate queries and keys."""
    layers, rotated = keys.size("num_hidden_layers"), keys.values.get("no_rope_layers")
    if rotated is None:
        interval = keys.size("no_rope_layer_interval", 4)
        rotated = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(one not in (0, 1) for one in rotated):
        keys.refuse("no_rope_layers", f"it must have an entry of 0 or 1 for each of the {layers} layers")
    keys.require("use_sliding_window", False, False)
    attention = common.attention(keys, biased=keys.flag("attention_bias"), default_theta=2_000_000.0)
    mlp = common.mlp(keys, bias=keys.flag("mlp_bias"))
    specs = [LayerSpec(attention if one else replace(attention, rope=None), mlp) for one in rotated[:layers]]
    return common.model(keys, specs, tie_word_embeddings=keys.flag("tie_word_embeddings", True))


def phi3(keys: ConfigReader) -> ModelConfig:
    """Read Phi-3, Phi-4 or Phi-4-mini."""
    window = 0 if keys.values.get("sliding_window") is None else keys.size("sliding_window")
    return uniform(keys, common.attention(keys, window=window, default_share=1.0), common.mlp(keys))


def granite(keys: ConfigReader) -> ModelConfig:
    """Read Granite. Embeddings, scores, outputs and logits are multiplied by constants."""
    attention = common.attention(keys, biased=keys.flag("attention_bias"))
    scale = keys.positive("attention_multiplier", 1.0) * attention.head_dim**0.5
    return replace(
        uniform(keys, replace(attention, query_scale=scale), common.mlp(keys, bias=keys.flag("mlp_bias"))),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logit_scale=1 / keys.positive("logits_scaling", 1.0),
    )


def uniform(keys: ConfigReader, attention: AttentionSpec, mlp: MlpSpec) -> ModelConfig:
    """Return a model whose layers are all equal."""
    return common.model(keys, [LayerSpec(attention, mlp)] * keys.size("num_hidden_layers"))


def dense(keys: ConfigReader, attention: AttentionSpec, kinds: list[str], window: int) -> ModelConfig:
    """Return a model whose layers differ only in their windows."""
    return common.model(keys, [LayerSpec(one, common.mlp(keys)) for one in common.windowed(attention, kinds, window)])
