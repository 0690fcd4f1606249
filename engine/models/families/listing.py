"""A list of the models that Baton serves, for users: published names, and the parts of each family's layers."""

from engine.models.spec import AttentionSpec, LatentSpec, ModelConfig, MoeSpec, RecurrentSpec

WINDOWS, EXPERTS, LATENT, RECURRENT = "sliding windows", "experts", "latent attention", "recurrent layers"
SINKS, SOFTCAP = "sinks", "soft cap"
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "LlamaForCausalLM": ("Llama 2 and 3", ()),
    "MistralForCausalLM": ("Mistral, Mistral Small 3 (text)", (WINDOWS,)),
    "Ministral3ForCausalLM": ("Ministral 3 (text)", ()),
    "MixtralForCausalLM": ("Mixtral", (EXPERTS,)),
    "Mistral4ForCausalLM": ("Mistral Small 4 (text; 16-bit weights or FP8)", (EXPERTS, LATENT)),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5, Qwen2.5-VL", (WINDOWS,)),
    "Qwen2MoeForCausalLM": ("Qwen2-MoE", (EXPERTS,)),
    "Qwen3ForCausalLM": ("Qwen3, Qwen3-VL", ()),
    "Qwen3MoeForCausalLM": ("Qwen3-MoE", (EXPERTS,)),
    "Qwen3NextForCausalLM": ("Qwen3-Next", (EXPERTS, RECURRENT)),
    "Qwen3_5ForCausalLM": ("Qwen3.5", (RECURRENT,)),
    "Qwen3_5MoeForCausalLM": ("Qwen3.5-MoE", (EXPERTS, RECURRENT)),
    "Gemma2ForCausalLM": ("Gemma 2", (WINDOWS, SOFTCAP)),
    "Gemma3ForCausalLM": ("Gemma 3", (WINDOWS,)),
    "Gemma4ForCausalLM": ("Gemma 4 (text; not E2B and E4B)", (EXPERTS, WINDOWS)),
    "GptOssForCausalLM": ("gpt-oss", (EXPERTS, SINKS, WINDOWS)),
    "Glm4MoeForCausalLM": ("GLM-4.5 to 4.7", (EXPERTS,)),
    "Glm4MoeLiteForCausalLM": ("GLM-4.7-Flash", (EXPERTS, LATENT)),
    "DeepseekV2ForCausalLM": ("DeepSeek V2", (EXPERTS, LATENT)),
    "DeepseekV3ForCausalLM": ("DeepSeek V3 and R1", (EXPERTS, LATENT)),
    "Phi3ForCausalLM": ("Phi-3 and 4", (WINDOWS,)),
    "SmolLM3ForCausalLM": ("SmolLM3", ()),
    "GraniteForCausalLM": ("Granite (dense)", ()),
    "GraniteMoeHybridForCausalLM": ("Granite 4 (hybrid)", (EXPERTS, RECURRENT)),
}


def parts_of(config: ModelConfig) -> tuple[str, ...]:
    """Return the sorted names of the parts of a model's layers, except plain attention and MLPs."""
    found: set[str] = set()
    for layer in config.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec):
            named = ((WINDOWS, mixer.window), (SINKS, mixer.sinks), (SOFTCAP, mixer.softcap))
            found.update(name for name, given in named if given)
        found.update(
            name for name, kind in ((LATENT, LatentSpec), (RECURRENT, RecurrentSpec)) if isinstance(mixer, kind)
        )
        if isinstance(layer.mlp, MoeSpec) or layer.alongside is not None:
            found.add(EXPERTS)
    return tuple(sorted(found))
