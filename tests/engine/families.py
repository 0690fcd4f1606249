"""Tiny random models of transformers: one or several for each family."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    SmolLM3Config,
)

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 1.5, 2.0, 4.0],
    "short_factor": [1.0, 1.0, 1.2, 1.5],
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 2 / 3,
}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GLM_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 20,
}  # fmt: skip
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
LINEAR_ATTENTION = {
    "num_key_value_heads": 2, "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 3,
}  # fmt: skip
SHARED_MOE = QWEN_MOE | {"shared_expert_intermediate_size": 28}
GRANITE4 = {
    "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_d_conv": 3,
    "mamba_chunk_size": 16, "shared_intermediate_size": 20, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 2.5,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4),
    "llama, grouped, tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "llama, one kv head, head_dim 20": LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=20),
    "llama, biases": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=20, rope_parameters=LLAMA3),
    "llama, linear rope": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=LINEAR),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=None),
    "mistral, window 7": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7),
    "mistral, window 1": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=1),
    "ministral3": Ministral3Config(**SIZES, num_key_value_heads=2, head_dim=16, rope_parameters=MINISTRAL),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen2, windows": Qwen2Config(
        **SIZES, num_key_value_heads=1, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=20),
    "qwen3, tied, bias": Qwen3Config(
        **SIZES, num_key_value_heads=4, head_dim=8, attention_bias=True, tie_word_embeddings=True
    ),
    "llama, yarn": LlamaConfig(**SIZES, num_key_value_heads=2, rope_parameters=YARN),
    "smollm3": SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, num_key_value_heads=2, pad_token_id=0),
    "phi3, window": Phi3Config(**SIZES, num_key_value_heads=2, sliding_window=9, pad_token_id=0),
    "granite": GraniteConfig(
        **SIZES,
        num_key_value_heads=2,
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
    ),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    "qwen2 moe": Qwen2MoeConfig(
        **SIZES, **QWEN_MOE, num_key_value_heads=2, shared_expert_intermediate_size=28, mlp_only_layers=[1]
    ),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, **QWEN_MOE, num_key_value_heads=2, head_dim=16, norm_topk_prob=True),
    "glm4 moe": Glm4MoeConfig(**SIZES, **GLM_MOE, num_key_value_heads=2, head_dim=16, use_qk_norm=True),
    "deepseek v2": DeepseekV2Config(
        **SIZES,
        **LATENT,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek v2 lite": DeepseekV2Config(**SIZES, **LATENT | {"q_lora_rank": None}, first_k_dense_replace=1),
    "deepseek v3": DeepseekV3Config(
        **SIZES, **LATENT, first_k_dense_replace=1, n_group=4, topk_group=2, rope_parameters=DEEPSEEK_YARN
    ),
    "deepseek, no query rank, biases": DeepseekV3Config(
        **SIZES,
        **LATENT | {"q_lora_rank": None, "kv_lora_rank": 34},
        first_k_dense_replace=3,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        attention_bias=True,
    ),
    "glm4 moe lite": Glm4MoeLiteConfig(**SIZES, **LATENT | {"kv_lora_rank": 18}),
    "mistral4": Mistral4Config(
        **SIZES, **LATENT, rope_parameters=MINISTRAL | {"partial_rotary_factor": 8 / 18, "type": "yarn"}
    ),
    "gpt oss": GptOssConfig(
        **SIZES | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
    ),
    "gemma2": Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **GEMMA4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=5.0,
    ),
    "gemma4 moe": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        **GEMMA4 | {"head_dim": 12, "global_head_dim": 24},
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=20,
    ),
    "qwen3 next": Qwen3NextConfig(**SIZES, **LINEAR_ATTENTION, **SHARED_MOE, decoder_sparse_step=2),
    "qwen3.5": Qwen3_5TextConfig(**SIZES, **LINEAR_ATTENTION, tie_word_embeddings=True),
    "qwen3.5 moe": Qwen3_5MoeTextConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"}, **LINEAR_ATTENTION, **SHARED_MOE
    ),
    "granite 4": GraniteMoeHybridConfig(**SIZES, **GRANITE4, num_local_experts=4, num_experts_per_tok=2),
    "granite 4, dense, rope": GraniteMoeHybridConfig(
        **SIZES, **GRANITE4 | {"mamba_proj_bias": True}, num_local_experts=0, position_embedding_type="rope"
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=6,
    ),
}

TEXT = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
GEMMA4_VISION = VISION | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4}
QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "window_size": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
MULTIMODAL: dict[str, PretrainedConfig] = {
    "gemma3": Gemma3Config(
        # The soft cap of scores has no effect in transformers.
        text_config=TEXT | {"sliding_window": 6, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0},
        vision_config=VISION,
        mm_tokens_per_image=4,
    ),
    "gemma4": Gemma4Config(
        text_config=TEXT | GEMMA4 | {"num_hidden_layers": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        vision_config=GEMMA4_VISION,
        audio_config=None,
    ),
    "mistral3": Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
        tie_word_embeddings=False,
    ),
    "mistral3, ministral": Mistral3Config(
        text_config=TEXT | {"model_type": "ministral3", "rope_parameters": MINISTRAL},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 16},
    ),
    "qwen2.5 vl": Qwen2_5_VLConfig(
        text_config=SIZES
        | {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": MROPE | {"mrope_section": [1, 2, 3]}},
        vision_config={name: value for name, value in QWEN_VISION.items() if name != "num_position_embeddings"},
    ),
    "qwen3 vl": Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        vision_config=QWEN_VISION,
    ),
}


def kind_of(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds or loads the model of a config."""
    if isinstance(config, Mistral4Config):  # AutoModelForCausalLM does not support it
        return transformers.Mistral4ForCausalLM
    return (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )


def reference(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model. Its norms and biases are random too, because the usual values of 1 and 0 would hide
    errors."""
    torch.manual_seed(7)
    kind = kind_of(config)
    made = kind.from_config(config, attn_implementation="eager") if hasattr(kind, "from_config") else kind(config)
    model = made.eval()
    for name, parameter in model.named_parameters():
        scale = 0.8 if "conv1d" in name else 0.15 if parameter.ndim > 1 else 0.3
        parameter.data = torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "e_score_correction_bias")):
            buffer.copy_(torch.rand_like(buffer) * 0.3 + 0.8)
    return model.to(dtype)


def save(config: PretrainedConfig, where: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    reference(config, dtype).save_pretrained(where, **options)
    return kind_of(config).from_pretrained(where, dtype=torch.float32, attn_implementation="eager").eval()
