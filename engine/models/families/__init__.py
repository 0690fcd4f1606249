"""The families of decoders that run on Baton's own kernels, keyed by the architecture's name in config.json."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.formats.scheme import read_scheme
from engine.models.config import check_architecture, eos_token_ids
from engine.models.families import experts, gemma, hybrid, latent, llama
from engine.models.spec import ModelConfig
from engine.models.weight_map import LLAMA, ExpertNames, WeightMap
from engine.weights import stored_vocabulary
from shared.config_reader import ConfigReader
from shared.model_files import is_multimodal, read_object, text_values


@dataclass(frozen=True, slots=True)
class Family:
    """How to read a family's config.json, and the names of its tensors. `defaults` has transformers' default values
    that differ from Llama's, for keys that the file may omit. A default does not replace a null in the file."""

    read: Callable[[ConfigReader], ModelConfig]
    weights: WeightMap = LLAMA
    defaults: dict[str, Any] = field(default_factory=dict)


GEMMA = WeightMap(
    mlp_norm="pre_feedforward_layernorm", post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm", norms_are_offsets=True,
)  # fmt: skip
MIXTRAL = ExpertNames("block_sparse_moe.experts.{}", router="block_sparse_moe.gate", gate_up=("w1", "w3"), down="w2")
DEEPSEEK2 = ExpertNames(shared="mlp.shared_experts")
GLM = ExpertNames(shared="mlp.shared_experts", correction="mlp.gate.e_score_correction_bias")
MISTRAL4 = ExpertNames(shared="mlp.shared_experts", fused=True, each="mlp.experts", gate_up=("gate_up_proj",))
GPT_OSS = ExpertNames("mlp.experts", router="mlp.router", gate_up=("gate_up_proj",), down="down_proj", stacked=True)
GEMMA4 = ExpertNames(
    "experts",
    router="router.proj",
    gate_up=("gate_up_proj",),
    fused=True,
    router_scale="router.scale",
    scales="router.per_expert_scale",
)
GRANITE4 = ExpertNames(
    "block_sparse_moe", router="block_sparse_moe.router.layer", gate_up=("input_linear.weight",),
    down="output_linear.weight", fused=True, shared="shared_mlp",
)  # fmt: skip
QWEN35 = WeightMap(norms_are_offsets=True, unused=("mtp.",))
KV_HEADS, EPSILON, GELU = "num_key_value_heads", "rms_norm_eps", {"hidden_activation": "gelu_pytorch_tanh"}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.llama),
    "MistralForCausalLM": Family(llama.mistral, defaults={KV_HEADS: 8}),
    "Ministral3ForCausalLM": Family(llama.ministral3, defaults={KV_HEADS: 8, EPSILON: 1e-5}),
    "Qwen2ForCausalLM": Family(llama.qwen2, defaults={KV_HEADS: 32}),
    "Qwen3ForCausalLM": Family(llama.qwen3, defaults={KV_HEADS: 32}),
    "SmolLM3ForCausalLM": Family(llama.smollm3, defaults={KV_HEADS: 4}),
    "Phi3ForCausalLM": Family(
        llama.phi3,
        WeightMap(qkv=("self_attn.qkv_proj",), gate_up=("gate_up_proj",)),
        defaults={EPSILON: 1e-5, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family(llama.granite),
    "MixtralForCausalLM": Family(
        experts.mixtral, WeightMap(experts=MIXTRAL), defaults={KV_HEADS: 8, EPSILON: 1e-5, "rope_theta": 1e6}
    ),
    "Qwen2MoeForCausalLM": Family(experts.qwen2_moe, defaults={KV_HEADS: 16}),
    "Qwen3MoeForCausalLM": Family(experts.qwen3_moe, defaults={KV_HEADS: 4}),
    "Glm4MoeForCausalLM": Family(experts.glm4_moe, WeightMap(experts=GLM), defaults={KV_HEADS: 8, EPSILON: 1e-5}),
    "DeepseekV2ForCausalLM": Family(latent.deepseek_v2, WeightMap(experts=DEEPSEEK2), defaults={"n_shared_experts": 2}),
    "DeepseekV3ForCausalLM": Family(
        latent.deepseek_v3,
        WeightMap(experts=GLM),
        defaults={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    ),
    "Glm4MoeLiteForCausalLM": Family(
        latent.glm4_moe_lite, WeightMap(experts=GLM), defaults={EPSILON: 1e-5, "routed_scaling_factor": 1.8}
    ),
    "Mistral4ForCausalLM": Family(latent.mistral4, WeightMap(experts=MISTRAL4)),
    "GptOssForCausalLM": Family(
        experts.gpt_oss, WeightMap(experts=GPT_OSS), defaults={KV_HEADS: 8, EPSILON: 1e-5, "rope_theta": 150_000.0}
    ),
    "Gemma2ForCausalLM": Family(gemma.gemma2, GEMMA, defaults={KV_HEADS: 4, **GELU}),
    "Gemma3ForCausalLM": Family(gemma.gemma3, GEMMA, defaults={KV_HEADS: 4, **GELU}),
    "Qwen3NextForCausalLM": Family(
        hybrid.qwen3_next, replace(QWEN35, projections=("in_proj_qkvz", "in_proj_ba")), defaults={KV_HEADS: 2}
    ),
    "Qwen3_5ForCausalLM": Family(hybrid.qwen3_5, QWEN35, defaults={KV_HEADS: 4}),
    "Qwen3_5MoeForCausalLM": Family(hybrid.qwen3_5_moe, QWEN35, defaults={KV_HEADS: 2}),
    "GraniteMoeHybridForCausalLM": Family(
        hybrid.granite_hybrid,
        WeightMap(
            gate_up=("input_linear",),
            down="output_linear",
            mlp="shared_mlp",
            recurrent="mamba",
            projections=("in_proj",),
            experts=GRANITE4,
        ),
    ),
    "Gemma4ForCausalLM": Family(
        gemma.gemma4, replace(GEMMA, norms_are_offsets=False, experts=GEMMA4), defaults={KV_HEADS: 4}
    ),
}

# The defaults of text decoders that have their own configuration class in transformers, keyed by `model_type`.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_text": {"num_key_value_heads": 32, "rope_theta": 500_000.0},
    "qwen2_5_vl_text": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
}
TEXT_DEFAULTS["qwen2_5_vl"] = TEXT_DEFAULTS["qwen2_5_vl_text"]

UNSUPPORTED = {
    "DeepseekV32ForCausalLM": latent.NO_INDEX,
    "DeepseekV4ForCausalLM": "models with compressed attention are not supported",
    "GlmMoeDsaForCausalLM": latent.NO_INDEX,
}

# Architectures of models of text and images. `DECODERS` maps the `model_type` of such a model's text decoder to the
# decoder's architecture. This module reads only the configuration of the text decoder.
MULTIMODAL = (
    "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
DECODERS = {
    "gemma3_text": "Gemma3ForCausalLM", "gemma4_text": "Gemma4ForCausalLM", "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen3_vl_text": "Qwen3ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}  # fmt: skip


def read_model_config(directory: Path) -> ModelConfig:
    """Read config.json and the end tokens of generation_config.json. Raises ValueError if a value is invalid."""
    keys = ConfigReader(read_object(directory / "config.json"), directory / "config.json")
    names = keys.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and str(names[0]) in UNSUPPORTED:
        keys.refuse("architectures", UNSUPPORTED[str(names[0])])
    if check_architecture(keys, (*FAMILIES, *MULTIMODAL)) in MULTIMODAL or is_multimodal(keys.values):
        keys = _decoder(keys, directory / "config.json")
    family = FAMILIES[str(keys.values["architectures"][0])]
    keys.values = TEXT_DEFAULTS.get(str(keys.values.get("model_type")), family.defaults) | keys.values
    config = family.read(keys)
    read_scheme(directory)  # raises ValueError if the quantization is not supported
    if (stored := stored_vocabulary(directory)) is not None:
        config = replace(config, vocab_size=min(stored, config.vocab_size))
    return replace(config, eos_token_ids=eos_token_ids(keys, directory, config.vocab_size))


def _decoder(keys: ConfigReader, file: Path) -> ConfigReader:
    """Return a reader for the keys of the text decoder in the config.json of a multimodal model."""
    prefix = "text_config." if isinstance(keys.values.get("text_config"), dict) else ""
    values = dict(text_values(keys.values))
    name = DECODERS.get(str(values.get("model_type")), "")
    if name not in FAMILIES:
        known = [kind for kind, decoder in DECODERS.items() if decoder in FAMILIES]
        ConfigReader(values, file, prefix).refuse("model_type", f"supported are {', '.join(known)}")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(given := values.get(key), dict):
            given = {name: "default" if value == "mrope" else value for name, value in given.items()}
            # As in transformers' code: Qwen2.5-VL never interleaves the sections of M-RoPE, and later models always do.
            values[key] = given | {"mrope_interleaved": not str(values.get("model_type")).startswith("qwen2_5_vl")}
    return ConfigReader(values | {"architectures": [name]}, file, prefix)
