"""Gemma 2 to 4: layers with windows, norms before and after attention and MLP, and scaled embeddings."""

from dataclasses import replace
from typing import Any

from engine.models.families import common
from engine.models.families.common import FULL, SLIDING
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, Rope
from shared.config_reader import ConfigReader


def gemma2(keys: ConfigReader) -> ModelConfig:
    attention = _attention(keys, softcap=_cap(keys, "attn_logit_softcapping", 50.0))
    kinds = common.layer_kinds(keys, lambda index: FULL if index % 2 else SLIDING)
    window = keys.size("sliding_window", 4096)
    return _model(keys, common.windowed(attention, kinds, window), _cap(keys, "final_logit_softcapping", 30.0))


def gemma3(keys: ConfigReader) -> ModelConfig:
    """Read Gemma 3. Layers with and without windows rotate differently. As in transformers, scores have no soft cap."""
    keys.require("use_bidirectional_attention", False, False)
    pattern = keys.size("sliding_window_pattern", 6)
    kinds = common.layer_kinds(keys, lambda index: SLIDING if (index + 1) % pattern else FULL)
    attention = _attention(keys, rope=None, qk_norm=True)
    ropes = _ropes(keys, attention.head_dim)
    windowed = common.windowed(attention, kinds, keys.size("sliding_window", 4096))
    layers = [replace(one, rope=ropes[kind]) for one, kind in zip(windowed, kinds, strict=True)]
    return _model(keys, layers, _cap(keys, "final_logit_softcapping", 0.0))


def gemma4(keys: ConfigReader) -> ModelConfig:
    """Read Gemma 4. Layers without a window have larger heads. Layers may have experts alongside the MLP."""
    if keys.values.get("hidden_size_per_layer_input", 256):
        keys.refuse("hidden_size_per_layer_input", "Gemma 4 with embeddings per layer (E2B, E4B) is not supported")
    if keys.values.get("num_kv_shared_layers"):
        keys.refuse("num_kv_shared_layers", "Gemma 4 with layers that share KV (E2B, E4B) is not supported")
    if keys.values.get("use_bidirectional_attention") == "all":
        keys.refuse("use_bidirectional_attention", "only causal attention of text is supported")
    biased = keys.flag("attention_bias")
    attention = common.attention(keys, 256, rope=None, qk_norm=True, biased=biased, norms_values=True)
    kinds = common.layer_kinds(keys, lambda index: SLIDING if (index + 1) % 6 else FULL)
    kinds[-1] = FULL  # as in transformers
    kv_heads, head_dim = _global_heads(keys, attention, kinds)
    given = keys.nested("rope_parameters")
    local = common.scaled(Rope(given.nested(SLIDING).positive("rope_theta", 10_000.0)), keys, given.nested(SLIDING),
                          attention.head_dim)  # fmt: skip
    sliding = replace(
        attention, rope=local, window=keys.size("sliding_window", 512), query_scale=attention.head_dim**0.5
    )
    full = replace(
        attention, kv_heads=kv_heads, head_dim=head_dim, rope=_proportional(keys, given.nested(FULL), head_dim),
        query_scale=head_dim**0.5, values_are_keys=keys.flag("attention_k_eq_v"),
    )  # fmt: skip
    activation, moe = common.activation_of(keys, "hidden_activation", "gelu_pytorch_tanh"), None
    if keys.flag("enable_moe_block"):
        expert = MlpSpec(keys.size("moe_intermediate_size"), activation)
        moe = MoeSpec(keys.size("num_experts"), keys.size("top_k_experts"), expert, scales_experts=True)
        if moe.top_k > moe.num_experts:
            keys.refuse("top_k_experts", f"it must be at most num_experts ({moe.num_experts})")
    mlp = MlpSpec(keys.size("intermediate_size"), activation)
    layers = [
        LayerSpec(sliding if kind == SLIDING else full, mlp, post_norms=True, alongside=moe, scaled=True)
        for kind in kinds
    ]
    return common.model(
        keys, layers, tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        embedding_scale=keys.size("hidden_size") ** 0.5, logit_softcap=_cap(keys, "final_logit_softcapping", 0.0),
    )  # fmt: skip


def _global_heads(keys: ConfigReader, attention: AttentionSpec, kinds: list[str]) -> tuple[int, int]:
    """Return the number of KV heads and the head size of layers without a window. transformers writes these values to
    `per_layer_config`, for each layer."""
    default = attention.kv_heads
    if keys.flag("attention_k_eq_v") and keys.values.get("num_global_key_value_heads") is not None:
        default = keys.size("num_global_key_value_heads")
    head_dim = keys.size("global_head_dim", 512)
    listed = keys.nested("per_layer_config")
    found = {
        (part.size("num_key_value_heads", default), part.size("head_dim", head_dim))
        for part in (listed.nested(str(index)) for index, kind in enumerate(kinds) if kind == FULL)
    }
    if len(found) > 1 or set(listed.values) - {str(index) for index, kind in enumerate(kinds) if kind == FULL}:
        keys.refuse("per_layer_config", "all layers of a kind must have equal heads")
    kv_heads, head_dim = found.pop() if found else (attention.kv_heads, attention.head_dim)
    same = (kv_heads, head_dim) == (attention.kv_heads, attention.head_dim)
    if not same and (head_dim != 2 * attention.head_dim or 2 * kv_heads > attention.kv_heads):
        keys.refuse("global_head_dim", "global layers must have heads of twice the size, and at most half as many")
    if attention.heads % kv_heads:
        keys.refuse("num_global_key_value_heads", f"num_attention_heads ({attention.heads}) must be a multiple of it")
    return kv_heads, head_dim


def _proportional(keys: ConfigReader, given: ConfigReader, head_dim: int) -> Rope:
    theta = given.positive("rope_theta", 1_000_000.0)
    if given.text("rope_type", "proportional") != "proportional":
        return common.scaled(Rope(theta), keys, given, head_dim)
    pairs = int(given.positive("partial_rotary_factor", 0.25) * head_dim // 2)
    return Rope(theta, "proportional", factor=given.positive("factor", 1.0), pairs=pairs)


def _ropes(keys: ConfigReader, head_dim: int) -> dict[str, Rope]:
    """Return the rotary embedding of each kind of layer. Transformers 4 wrote the embeddings under other keys."""
    given = common.rope_values(keys)
    if SLIDING not in given.values and FULL not in given.values:
        full = common.rope(keys, head_dim, default_theta=1_000_000.0)
        return {FULL: full, SLIDING: Rope(keys.positive("rope_local_base_freq", 10_000.0))}
    found = {}
    for kind, theta in ((FULL, 1_000_000.0), (SLIDING, 10_000.0)):
        part = given.nested(kind)
        found[kind] = common.scaled(Rope(part.positive("rope_theta", theta)), keys, part, head_dim)
    return found


def _attention(keys: ConfigReader, **more: Any) -> AttentionSpec:
    attention = common.attention(keys, 256, biased=keys.flag("attention_bias"), **more)
    scale = (attention.head_dim / keys.positive("query_pre_attn_scalar", 256)) ** 0.5
    return replace(attention, query_scale=scale)


def _cap(keys: ConfigReader, key: str, default: float) -> float:
    """Return a soft cap, or 0 for no cap. In the file, null means no cap."""
    if key in keys.values:
        return 0.0 if keys.values[key] is None else keys.positive(key)
    return default


def _model(keys: ConfigReader, attention: list[AttentionSpec], softcap: float) -> ModelConfig:
    mlp = common.mlp(keys, activation="hidden_activation")
    return common.model(
        keys, [LayerSpec(one, mlp, post_norms=True) for one in attention],
        tie_word_embeddings=keys.flag("tie_word_embeddings", True), embedding_scale=keys.size("hidden_size") ** 0.5,
        logit_softcap=softcap,
    )  # fmt: skip
