"""Derive tiny configurations of transformers' decoders from the fields of their configuration classes."""

import re
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, WINDOW = 4, 64, 4, 2, 16, 4, 6
# Sizes by patterns of field names. The first match is used. Fields whose default is not a size keep their default.
SIZES: tuple[tuple[str, int], ...] = (
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length", 256),
    (r"(num_|n_)?(hidden_|decoder_|encoder_|text_)*(layers?|blocks)", LAYERS),
    (r"(num_)?(key_value|kv)_heads|num_attention_groups", KV_HEADS),
    (r"(swa_)?(num_)?(key_value|kv)_heads|linear_num_key_heads", KV_HEADS),
    (r"(swa_|linear_)?(num_|n_)?(encoder_|decoder_|attention_|value_)*heads?|index_n_heads", HEADS),
    (r"(shared_|moe_|dense_|expert_|ffn_)*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|.*_intermediate_size", 52),
    (r"dff|dim_ff|d_inner|rotary_dim|hidden_size_per_layer_input|(laurel|gated_norm|adapter|loop_gate)_rank", 8),
    (r"(encoder_|backbone_|attention_|ffn_)?hidden_size|(d_model|n_embd|emb_dim|lru_width|dim|embedding_dim)", HIDDEN),
    (r"word_embed_proj_dim|embedding_size|(input|output)_embedding_size", HIDDEN),
    (r"(global_|swa_|linear_|mamba_)?(attention_)?(key_|value_)?head_dim|kv_channels|d_kv|d_head|dim_head", HEAD_DIM),
    (r"(q|kv|o)_lora_rank", 24),
    (r"(qk_nope|v)_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"index_head_dim", 16),
    (r"(num|n)(_local|_routed)?_experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|n_group|num_shared_experts|n_shared_experts", 2),
    (r"topk_group|zero_expert_num", 1),
    (r"index_topk|index_topk_blocks|index_block_size", 4),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers", 1),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"sliding_window(_size)?|(attention_)?window_size|local_attention", WINDOW),
    (r"query_pre_attn_scalar", 12),
    (r"mamba_(n|num)_heads|(mamba_d_|ssm_)?state(_size)?", 8),
    (r"mamba_d_head", HEAD_DIM),
    (r"mamba_d_ssm", 8 * HEAD_DIM),
    (r"(mamba_)?n_groups", 2),
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PER_LAYER = re.compile(r".*(layer_types?|layers_block_types?|block_types|indexer_types)")


GEMMA4_DRAFTER = {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
# Fields of classes whose sizes depend on each other in special ways.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 97},
    "CohereCompassForCausalLM": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 52, "moe_num_experts": EXPERTS, "moe_top_k": 2, "hidden_size": HIDDEN},
    },
    "DoryForCausalLM": {"num_hidden_layers": 8, "n_input_layers": 2, "n_output_layers": 2, "layer_types": None},
    "Dots3NoteForCausalLM": {"per_layer_config": {}, "head_dim": 24},
    "Gemma3nForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "num_kv_shared_layers": 2,
        "intermediate_size": 52,
    },
    "Gemma4AssistantForCausalLM": GEMMA4_DRAFTER,
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "LongcatFlashForCausalLM": {"head_dim": 8},
    "Mamba2ForCausalLM": {"expand": 1},
    "MiniMaxM3VLForCausalLM": {"layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2)},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_model(architecture: str, vocabulary: int = 97) -> Any:
    """Return a random model with the configuration `tiny`. Its embeddings are large, so that answers do not repeat one
    token."""
    torch.manual_seed(7)
    model = getattr(transformers, architecture)._from_config(tiny(architecture, vocabulary)).eval()
    for name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and name.endswith("weight")
        scale = 0.3 if parameter.ndim == 1 else 1.0 if "emb" in name else 0.15
        parameter.data = torch.randn_like(parameter) * scale + (1.0 if is_scale else 0.0)
    return model


def tiny(architecture: str, vocabulary: int = 97) -> PretrainedConfig:
    """Return a configuration with which a class of transformers has a few thousand weights.

    Raises the errors of transformers' configurations if the derived sizes are not valid together.
    """
    kind: type[PretrainedConfig] = getattr(transformers, architecture).config_class
    config = kind(**sizes(kind, vocabulary, EXCEPTIONS.get(architecture, {})))
    config.architectures = [architecture]
    return config


def sizes(kind: type[PretrainedConfig], vocabulary: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tiny configuration, including the given ones."""
    default = kind(**GEMMA4_DRAFTER if kind is transformers.Gemma4AssistantConfig else {})
    values, found = default.to_dict(), dict[str, Any]()
    for field in fields(kind):
        value = values.get(field.name)
        if isinstance(value, dict) and isinstance(part := getattr(default, field.name), PretrainedConfig):
            found[field.name] = sizes(type(part), vocabulary, given.get(field.name, {}))
        elif (size := tiny_value(field.name, value, "int" in str(field.type), vocabulary)) is not None:
            found[field.name] = size
    if found.get("kv_lora_rank"):  # the latents hold the keys and values of all heads
        found["num_key_value_heads"] = HEADS
    return {name: size for name, size in found.items() if name not in given or isinstance(size, dict)} | {
        name: size for name, size in given.items() if not isinstance(found.get(name), dict)
    }


def tiny_value(name: str, value: Any, is_size: bool, vocabulary: int) -> Any:
    if name in TOKENS:
        return TOKENS[name]
    if name == "is_decoder":
        return True
    if isinstance(value, (list, tuple)) and PER_LAYER.fullmatch(name):
        return some_of_each(list(value))
    if isinstance(value, bool) or not (isinstance(value, int) or (value is None and is_size)):
        return None
    if name.startswith("vocab_size") or name.endswith("vocab_size"):
        return vocabulary
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def some_of_each(values: list[Any]) -> list[Any]:
    """Return `LAYERS` entries of `values`, a list of layer kinds, in the same order. Include every kind if possible."""
    firsts = [values.index(value) for value in dict.fromkeys(values)][:LAYERS]
    others = [index for index in range(len(values)) if index not in firsts][: LAYERS - len(firsts)]
    return [values[index] for index in sorted((*firsts, *others))]
