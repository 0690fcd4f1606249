"""Gemma 2 and 3: layers with windows, norms before and after attention and MLP, and scaled embeddings."""

from dataclasses import replace

from engine.models.config import ConfigReader
from engine.models.families import common
from engine.models.families.common import FULL, SLIDING
from engine.models.spec import AttentionSpec, LayerSpec, ModelConfig, Rope


def gemma2(keys: ConfigReader) -> ModelConfig:
    attention = _attention(keys, rope=None)
    attention = replace(attention, rope=common.rope(keys, attention.head_dim))
    attention = replace(attention, softcap=_cap(keys, "attn_logit_softcapping", 50.0))
    kinds = common.layer_kinds(keys, lambda index: FULL if index % 2 else SLIDING)
    window = keys.size("sliding_window", 4096)
    return _model(keys, common.windowed(attention, kinds, window), _cap(keys, "final_logit_softcapping", 30.0))


def gemma3(keys: ConfigReader) -> ModelConfig:
    """Gemma 3: layers with a window have a rotary embedding of their own."""
    keys.require("use_bidirectional_attention", False, False)
    pattern = keys.size("sliding_window_pattern", 6)
    kinds = common.layer_kinds(keys, lambda index: SLIDING if (index + 1) % pattern else FULL)
    attention = _attention(keys, rope=None, qk_norm=True)
    attention = replace(attention, softcap=_cap(keys, "attn_logit_softcapping", 0.0))
    ropes = _ropes(keys, attention.head_dim)
    windowed = common.windowed(attention, kinds, keys.size("sliding_window", 4096))
    layers = [replace(one, rope=ropes[kind]) for one, kind in zip(windowed, kinds, strict=True)]
    return _model(keys, layers, _cap(keys, "final_logit_softcapping", 0.0))


def _ropes(keys: ConfigReader, head_dim: int) -> dict[str, Rope]:
    """Return the rotary embedding by kind of layer; transformers 4 wrote it in other keys."""
    given = keys.nested("rope_parameters")
    if SLIDING not in given.values and FULL not in given.values:
        full = common.rope(keys, head_dim, default_theta=1_000_000.0)
        return {FULL: full, SLIDING: Rope(keys.positive("rope_local_base_freq", 10_000.0))}
    found = {}
    for kind, theta in ((FULL, 1_000_000.0), (SLIDING, 10_000.0)):
        part = given.nested(kind)
        found[kind] = common.scaled(Rope(part.positive("rope_theta", theta)), keys, part, head_dim)
    return found


def _attention(keys: ConfigReader, **more: object) -> AttentionSpec:
    bias = keys.flag("attention_bias")
    attention = common.attention(keys, 256, qkv_bias=bias, output_bias=bias, **more)
    scale = (attention.head_dim / keys.positive("query_pre_attn_scalar", 256)) ** 0.5
    return replace(attention, query_scale=scale)


def _cap(keys: ConfigReader, key: str, default: float) -> float:
    """Return a soft cap; 0 means none, which the file may state as null."""
    if key in keys.values:
        return 0.0 if keys.values[key] is None else keys.positive(key)
    return default


def _model(keys: ConfigReader, attention: list[AttentionSpec], softcap: float) -> ModelConfig:
    mlp = common.mlp(keys, activation="hidden_activation" if "hidden_activation" in keys.values else "hidden_act")
    return common.model(
        keys, [LayerSpec(one, mlp, post_norms=True) for one in attention],
        tie_word_embeddings=keys.flag("tie_word_embeddings", True), embedding_scale=keys.size("hidden_size") ** 0.5,
        logit_softcap=softcap,
    )  # fmt: skip
