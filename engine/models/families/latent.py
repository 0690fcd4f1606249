"""Models with latent attention: DeepSeek V2, V3 and R1, GLM-4.7-Flash, Mistral Small 4."""

import math
from dataclasses import replace

from engine.models.families import common
from engine.models.families.experts import sigmoid_moe
from engine.models.spec import LatentSpec, ModelConfig, Rope
from shared.config_reader import ConfigReader

NO_INDEX = "models that choose tokens by an index (DeepSeek V3.2, GLM-5) are not supported"


def deepseek_v2(keys: ConfigReader) -> ModelConfig:
    dense = common.layer_count(keys, "first_k_dense_replace", 0)
    keys.require("moe_layer_freq", 1, 1)
    keys.require("scoring_func", "softmax", "softmax")
    keys.size("num_experts_per_tok")  # has no default
    keys.require("norm_topk_prob", False, False)  # its order with scaling differs between implementations
    moe = replace(sigmoid_moe(keys, 64), score="softmax", corrects=False, renormalizes=False, group_scores=1)
    method = keys.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        keys.refuse("topk_method", "supported are greedy and group_limited_greedy")
    if method == "greedy":
        moe = replace(moe, groups=1, top_groups=1)
    return common.sparse_model(keys, latent(keys, 1536, 512, 128, 128), moe, lambda index: index >= dense)


def deepseek_v3(keys: ConfigReader) -> ModelConfig:
    dense = common.layer_count(keys, "first_k_dense_replace", 3)
    keys.require("moe_layer_freq", 1, 1)
    keys.require("topk_method", "noaux_tc", "noaux_tc")
    keys.require("scoring_func", "sigmoid", "sigmoid")
    return common.sparse_model(
        keys, latent(keys, 1536, 512, 128, 128), sigmoid_moe(keys, 256), lambda index: index >= dense
    )


def glm4_moe_lite(keys: ConfigReader) -> ModelConfig:
    dense = common.layer_count(keys, "first_k_dense_replace", 1)
    kinds = keys.values.get("mlp_layer_types")
    layers = keys.size("num_hidden_layers")
    known = isinstance(kinds, list) and len(kinds) == layers and all(kind in ("dense", "sparse") for kind in kinds)
    if kinds is not None and not known:
        keys.refuse("mlp_layer_types", f"it must have dense or sparse for each of the {layers} layers")
    return common.sparse_model(
        keys, latent(keys, 768, 512, 192, 256), sigmoid_moe(keys, 64, 4),
        lambda index: index >= dense if kinds is None else kinds[index] == "sparse",
    )  # fmt: skip


def mistral4(keys: ConfigReader) -> ModelConfig:
    keys.require("first_k_dense_replace", 0, 0)
    common.require_rope(keys)
    moe = replace(sigmoid_moe(keys, 128, 4), score="softmax", corrects=False)
    return common.sparse_model(keys, latent(keys, 1024, 256, 64, 128), moe, lambda index: True)


def latent(keys: ConfigReader, q_rank: int, kv_rank: int, nope_dim: int, value_dim: int) -> LatentSpec:
    """Return the latent attention of all layers. `q_rank` to `value_dim` are the defaults for missing keys."""
    if "index_topk" in keys.values:
        keys.refuse("index_topk", NO_INDEX)
    has_rank = keys.values.get("q_lora_rank", q_rank) is not None
    kv_rank, rope_dim = keys.size("kv_lora_rank", kv_rank), keys.size("qk_rope_head_dim", 64)
    for key, size in (("kv_lora_rank", kv_rank), ("qk_rope_head_dim", rope_dim)):
        if size % 2:
            keys.refuse(key, "it must be even")
    nope_dim = keys.size("qk_nope_head_dim", nope_dim)
    given = common.rope_values(keys)
    theta = given.positive("rope_theta", keys.positive("rope_theta", 10_000.0))
    spec = LatentSpec(
        keys.size("num_attention_heads"), keys.size("q_lora_rank", q_rank) if has_rank else 0, kv_rank, nope_dim,
        rope_dim, keys.size("v_head_dim", value_dim), common.scaled(Rope(theta), keys, given, rope_dim),
        interleaved=keys.flag("rope_interleave", True), bias=keys.flag("attention_bias"),
    )  # fmt: skip
    # Attention divides scores by the root of `spec.width`, but these models divide them by the root of a query's size.
    scale = math.sqrt(spec.width / (nope_dim + rope_dim))
    if spec.rope is not None and spec.rope.kind != "default" and given.values.get("mscale_all_dim"):
        scale *= (0.1 * given.positive("mscale_all_dim") * math.log(max(1.0, spec.rope.factor)) + 1.0) ** 2
    if given.values.get("llama_4_scaling_beta"):
        spec = replace(
            spec, temperature=given.positive("llama_4_scaling_beta"),
            temperature_tokens=common.original_length(keys, given),
        )  # fmt: skip
    return replace(spec, query_scale=scale)
