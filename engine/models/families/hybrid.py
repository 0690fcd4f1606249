"""Models in which most layers have a recurrent state: Qwen3-Next, Qwen3.5 and Granite 4."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.models.families import common
from engine.models.families.common import FULL
from engine.models.families.experts import choice_of, is_sparse
from engine.models.spec import DeltaSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, SsmSpec
from shared.config_reader import ConfigReader

LINEAR = "linear_attention"
GRANITE_KINDS = {"mamba": LINEAR, "attention": FULL}


def qwen3_next(keys: ConfigReader) -> ModelConfig:
    sparse = is_sparse(keys)
    moe = replace(qwen_moe(keys, 512, 10), renormalizes=keys.flag("norm_topk_prob", True))
    layers = range(keys.size("num_hidden_layers"))
    return delta_model(keys, [moe if sparse(index) else common.mlp(keys) for index in layers])


def qwen3_5(keys: ConfigReader) -> ModelConfig:
    return delta_model(keys, [common.mlp(keys)] * keys.size("num_hidden_layers"))


def qwen3_5_moe(keys: ConfigReader) -> ModelConfig:
    return delta_model(keys, [qwen_moe(keys, 256, 8)] * keys.size("num_hidden_layers"))


def qwen_moe(keys: ConfigReader, num_experts: int, top_k: int) -> MoeSpec:
    shared = common.mlp(keys, "shared_expert_intermediate_size")
    expert = common.mlp(keys, "moe_intermediate_size")
    return MoeSpec(*choice_of(keys, "num_experts", num_experts, top_k), expert, shared=shared, gates_shared=True)


def delta_model(keys: ConfigReader, feeds: Sequence[MlpSpec | MoeSpec]) -> ModelConfig:
    """Return a model like Qwen3-Next. `feeds` has the MLP or the experts of each layer."""
    biased = keys.flag("attention_bias")
    attention = common.attention(keys, 256, default_share=0.25, qk_norm=True, biased=biased, gated=True)
    delta = DeltaSpec(
        keys.size("linear_num_key_heads", 16), keys.size("linear_num_value_heads", 32),
        keys.size("linear_key_head_dim", 128), keys.size("linear_value_head_dim", 128),
        keys.size("linear_conv_kernel_dim", 4),
    )  # fmt: skip
    if delta.value_heads % delta.key_heads:
        keys.refuse("linear_num_key_heads", f"linear_num_value_heads ({delta.value_heads}) must be a multiple of it")
    interval = keys.size("full_attention_interval", 4)
    kinds = common.layer_kinds(keys, lambda index: LINEAR if (index + 1) % interval else FULL, (FULL, LINEAR))
    check_kinds(keys, kinds)
    mixers = [attention if kind == FULL else delta for kind in kinds]
    return common.model(keys, [LayerSpec(mixer, feed) for mixer, feed in zip(mixers, feeds, strict=True)])


def granite_hybrid(keys: ConfigReader) -> ModelConfig:
    """Read Granite 4. Most layers have a state space, and the others have attention. Either all layers of a model have
    experts and a shared expert, or all layers have only the shared expert."""
    unrotated: dict[str, Any] = {} if keys.values.get("position_embedding_type") == "rope" else {"rope": None}
    attention = common.attention(keys, biased=keys.flag("attention_bias"), **unrotated)
    scale = keys.positive("attention_multiplier", 1.0) * attention.head_dim**0.5
    inner = keys.size("mamba_expand", 2) * keys.size("hidden_size")
    heads = keys.size("mamba_n_heads", 128)
    given = keys.values.get("mamba_d_head")
    size = inner // heads if given in (None, "auto") else keys.size("mamba_d_head")
    groups = keys.size("mamba_n_groups", 1)
    if heads * size != inner or heads % groups:
        keys.refuse("mamba_n_heads", f"it must divide {inner} and be a multiple of mamba_n_groups ({groups})")
    limit = keys.values.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or limit[:1] != [0] or "inf" not in str(limit[1:]).lower()):
        keys.refuse("time_step_limit", "only [0, Infinity] is supported")
    state = SsmSpec(
        groups, heads, keys.size("mamba_d_state", 256), size, keys.size("mamba_d_conv", 4),
        keys.flag("mamba_conv_bias", True), keys.flag("mamba_proj_bias"),
    )  # fmt: skip
    kinds = common.layer_kinds(keys, lambda index: LINEAR, (FULL, LINEAR, *GRANITE_KINDS))
    kinds = [GRANITE_KINDS.get(kind, kind) for kind in kinds]
    check_kinds(keys, kinds)
    shared = common.mlp(keys, "shared_intermediate_size")
    feed: MlpSpec | MoeSpec = shared
    if keys.values.get("num_local_experts") != 0:
        chosen = choice_of(keys, "num_local_experts", 8, 2)
        feed = MoeSpec(*chosen, common.mlp(keys), scores_chosen=True, renormalizes=False, shared=shared)
    attention = replace(attention, query_scale=scale)
    return replace(
        common.model(keys, [LayerSpec(attention if kind == FULL else state, feed) for kind in kinds]),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logit_scale=1 / keys.positive("logits_scaling", 1.0),
    )


def check_kinds(keys: ConfigReader, kinds: Sequence[str]) -> None:
    if FULL not in kinds:
        keys.refuse("layer_types", "at least one layer must have full attention")
    if LINEAR in kinds:  # transformers also applies this activation to the convolution
        keys.require("hidden_act", "silu", "silu")
