"""Derives config.json from the metadata of a GGUF file, so that the original model's config.json is not needed.

The metadata of llama.cpp omits what its code knows about an architecture, such as the layers that have a window. These
values are in transformers' defaults or in `fixed_values`. Metadata that this module does not know are refused, because
a model that ignores them could give wrong answers.
"""

from pathlib import Path
from typing import Any

import torch

from engine.formats.forms import dense
from engine.formats.gguf import ARCHITECTURES, Entry, decimal, read_header, read_tensor
from engine.models.rope import inverse_frequencies
from engine.models.spec import Rope
from shared.config_reader import ConfigReader

KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
# Used below, or derived by transformers from other values.
OTHER_KEYS = {
    "attention.value_length", "vocab_size", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
WINDOWED = {"gemma2", "gemma3", "gpt-oss", "phi3"}  # llama.cpp computes the others without windows
GEMMA_27B = {("gemma2", 46), ("gemma3", 62)}  # architectures and numbers of layers
MODEL_TYPES = {"gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}


REQUIRED = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
}  # fmt: skip
ORIGINAL = "use a directory with the file and the original model's config.json and tokenizer.json"


def config_of(file: Path) -> dict[str, Any]:
    """Return the values of config.json, without end tokens. Raises ValueError if the architecture is not supported, or
    if metadata are missing, malformed or unknown."""
    metadata, entries = read_header(file)
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES.values():
        known = ", ".join(sorted(set(ARCHITECTURES.values())))
        raise ValueError(f"{file}: general.architecture is {name[:40]!r}: supported are {known}")
    if metadata.get("split.count", 1) != 1:
        raise ValueError(f"{file}: it is one of several parts; merge them with `llama-gguf-split --merge`")
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    arrays = {key for key, value in own.items() if value is None}  # such as a value for each layer
    if unknown := arrays | (own.keys() - KEYS - OTHER_KEYS):
        raise ValueError(f"{file}: the key {f'{name}.{min(unknown)}'[:80]!r} is not supported: {ORIGINAL}")
    if missing := REQUIRED - own.keys():
        raise ValueError(f"{file}: {name}.{min(missing)} is missing: {ORIGINAL}")
    if "token_embd.weight" not in entries:
        raise ValueError(f"{file}: the tensor token_embd.weight is missing; the file must hold the whole model")
    keys = ConfigReader({KEYS[key]: value for key, value in own.items() if key in KEYS}, file, f"{name}: ")
    heads, config = keys.size("num_attention_heads"), keys.values
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", keys.size("hidden_size") // heads)
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["vocab_size"] = entries["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in entries
    config |= fixed_values(name, keys, entries)
    rope = ConfigReader(own, file, f"{name}.")
    config["rope_parameters"] = rope_parameters(file, name, rope, keys.size("head_dim"), entries)
    return config


def fixed_values(name: str, keys: ConfigReader, entries: dict[str, Entry]) -> dict[str, Any]:
    """Return the values that follow from the architecture `name` and from the tensors."""
    found: dict[str, Any] = {
        "architectures": [next(one for one, own in ARCHITECTURES.items() if own == name)],
        "model_type": MODEL_TYPES.get(name, name),
        "attention_bias": "blk.0.attn_output.bias" in entries,
        "mlp_bias": "blk.0.ffn_up.bias" in entries,
    }
    if "num_experts" in keys.values:
        found |= {"num_local_experts": keys.size("num_experts"), "norm_topk_prob": name == "qwen3moe"}
        if name == "llama":
            found |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    if (gates := entries.get("blk.0.ffn_gate_exps.weight")) and len(gates.shape) > 1:
        found["intermediate_size" if name in {"llama", "gpt-oss"} else "moe_intermediate_size"] = gates.shape[1]
    if shared := entries.get("blk.0.ffn_gate_shexp.weight"):
        found["shared_expert_intermediate_size"] = shared.shape[0]
    if name.startswith("gemma"):
        is_27b = (name, keys.size("num_hidden_layers")) in GEMMA_27B
        by_width = keys.size("hidden_size") // keys.size("num_attention_heads")
        found["query_pre_attn_scalar"] = by_width if is_27b else keys.size("head_dim")
    if name not in WINDOWED or not keys.values.get("sliding_window"):
        found["sliding_window"] = None
    return found


def rope_parameters(
    file: Path, name: str, own: ConfigReader, head_dim: int, entries: dict[str, Entry]
) -> dict[str, Any]:
    """Return transformers' description of the rotary embedding. `own` has the metadata of the architecture."""

    def floats(tensor: str) -> list[float]:
        return [decimal(one) for one in dense(read_tensor(file, entries[tensor], torch.device("cpu"))).flatten()]

    default = "linear" if "rope.scaling.factor" in own.values else "none"  # as in llama.cpp
    dims, kind = own.size("rope.dimension_count", head_dim), own.text("rope.scaling.type", default)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": own.positive("rope.freq_base", 10_000.0)}
    if dims != head_dim:
        if name != "phi3":
            own.refuse("rope.dimension_count", f"heads have {head_dim} dimensions, and all of them must rotate")
        found["partial_rotary_factor"] = dims / head_dim
    if name != "phi3":  # in files of Phi, the factor follows from other parameters
        own.require("rope.scaling.attn_factor", 1, 1)
    if kind in {"linear", "yarn"}:
        found |= {"rope_type": kind, "factor": own.positive("rope.scaling.factor")}
    if kind == "yarn":
        found |= {beta: own.positive(f"rope.scaling.yarn_{beta}", default) for beta, default in YARN.items()}
        found["truncate"] = name != "gpt-oss"
    if {"rope_factors_long.weight", "rope_factors_short.weight"} <= entries.keys():
        long, short = floats("rope_factors_long.weight"), floats("rope_factors_short.weight")
        found |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    elif kind not in {"none", "linear", "yarn"}:
        own.refuse("rope.scaling.type", ORIGINAL)
    if "rope_freqs.weight" in entries:
        found |= _llama3(file, floats("rope_freqs.weight"), found["rope_theta"])
    if name != "gemma3":
        return found
    local = {"rope_type": "default", "rope_theta": own.positive("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": found, "sliding_attention": local}


def _llama3(file: Path, factors: list[float], theta: float) -> dict[str, Any]:
    """Return the parameters that give these factors. All models of Llama 3 have the parameters LLAMA3, but the factor
    of the slowest frequencies differs."""
    parameters = {"factor": round(max(factors), 3), **LLAMA3}
    plain = inverse_frequencies(Rope(theta), 2 * len(factors))
    expected = plain / inverse_frequencies(Rope(theta, "llama3", **parameters), 2 * len(factors))
    if not torch.allclose(torch.tensor(factors), expected, rtol=1e-3):
        raise ValueError(f"{file}: the factors in rope_freqs.weight are not those of Llama 3: {ORIGINAL}")
    return {"rope_type": "llama3", **parameters}
