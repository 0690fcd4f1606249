"""Models with experts in place of the MLP: Mixtral, Qwen 2 and 3 MoE, GLM-4.5 to 4.7, gpt-oss."""

from collections.abc import Callable
from dataclasses import replace

from engine.models.families import common
from engine.models.families.common import FULL, SLIDING
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec
from shared.config_reader import ConfigReader


def mixtral(keys: ConfigReader) -> ModelConfig:
    window = 0 if keys.values.get("sliding_window") is None else keys.size("sliding_window")
    attention = common.attention(keys, window=window)
    moe = MoeSpec(*choice_of(keys, "num_local_experts", 8, 2), common.mlp(keys))
    return _model(keys, attention, moe, lambda index: True)


def qwen2_moe(keys: ConfigReader) -> ModelConfig:
    attention = common.attention(keys, qkv_bias=keys.flag("qkv_bias", True))
    shared = common.mlp(keys, "shared_expert_intermediate_size")
    moe = replace(_qwen(keys, 60, 4), shared=shared, gates_shared=True)
    return _model(keys, attention, moe, is_sparse(keys))


def qwen3_moe(keys: ConfigReader) -> ModelConfig:
    # Unlike Qwen 3, Qwen 3 MoE derives the size of a head from the hidden size.
    attention = common.attention(keys, qk_norm=True, biased=keys.flag("attention_bias"))
    return _model(keys, attention, _qwen(keys, 128, 8), is_sparse(keys))


def glm4_moe(keys: ConfigReader) -> ModelConfig:
    bias, norm = keys.flag("attention_bias"), keys.flag("use_qk_norm")
    attention = common.attention(keys, default_share=0.5, qk_norm=norm, qkv_bias=bias)
    dense = common.layer_count(keys, "first_k_dense_replace", 1)
    return _model(keys, attention, sigmoid_moe(keys), lambda index: index >= dense)


def gpt_oss(keys: ConfigReader) -> ModelConfig:
    for key, supported in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        keys.require(key, supported, supported)
    common.require_rope(keys)
    attention = common.attention(keys, 64, sinks=True, biased=keys.flag("attention_bias", True))
    kinds = common.layer_kinds(keys, lambda index: FULL if index % 2 else SLIDING)
    expert = MlpSpec(keys.size("intermediate_size"), "clamped_swiglu", bias=True)
    choice = choice_of(keys, "num_local_experts", 128, 4)
    moe = MoeSpec(*choice, expert, scores_chosen=True, renormalizes=False, router_bias=True)
    windowed = common.windowed(attention, kinds, keys.size("sliding_window", 128))
    return common.model(keys, [LayerSpec(one, moe) for one in windowed])


def sigmoid_moe(keys: ConfigReader, num_experts: int = 128, top_k: int = 8) -> MoeSpec:
    """Return the experts of DeepSeek V3 and of models that adopted this design. `num_experts` and `top_k` are the
    defaults for missing keys."""
    num_experts, top_k = choice_of(keys, "n_routed_experts", num_experts, top_k)
    groups, top_groups = keys.size("n_group", 1), keys.size("topk_group", 1)
    if num_experts % groups or top_groups > groups:
        keys.refuse("n_group", f"it must divide n_routed_experts ({num_experts}) and be at least topk_group")
    if top_groups * (num_experts // groups) < top_k:
        keys.refuse("topk_group", f"the groups must have at least num_experts_per_tok ({top_k}) experts")
    expert = common.mlp(keys, "moe_intermediate_size")
    shared = replace(expert, inner=expert.inner * keys.size("n_shared_experts", 1))
    return MoeSpec(
        num_experts, top_k, expert, score="sigmoid", renormalizes=keys.flag("norm_topk_prob", True),
        scale=keys.positive("routed_scaling_factor", 1.0), corrects=True, groups=groups, top_groups=top_groups,
        shared=shared,
    )  # fmt: skip


def _qwen(keys: ConfigReader, num_experts: int, top_k: int) -> MoeSpec:
    expert = common.mlp(keys, "moe_intermediate_size")
    choice = choice_of(keys, "num_experts", num_experts, top_k)
    return MoeSpec(*choice, expert, renormalizes=keys.flag("norm_topk_prob"))


def choice_of(keys: ConfigReader, key: str, num_experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of experts, read from `key`, and the number of experts that a token uses. `num_experts` and
    `top_k` are the defaults for missing keys."""
    key = key if key in keys.values else {"num_experts": "num_local_experts"}.get(key, key)
    found, chosen = keys.size(key, num_experts), keys.size("num_experts_per_tok", top_k)
    if chosen > found:
        keys.refuse("num_experts_per_tok", f"it must be at most {key} ({found})")
    return found, chosen


def is_sparse(keys: ConfigReader) -> Callable[[int], bool]:
    """Return a function that returns whether the layer with a given index has experts."""
    step, dense = keys.size("decoder_sparse_step", 1), keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        keys.refuse("mlp_only_layers", "it must be a list of layers")
    return lambda index: index not in dense and (index + 1) % step == 0


def _model(keys: ConfigReader, attention: AttentionSpec, moe: MoeSpec, is_sparse: Callable[[int], bool]) -> ModelConfig:
    keys.require("use_sliding_window", False, False)
    return common.sparse_model(keys, attention, moe, is_sparse)
