"""The values of keys that a config.json omits, compared with transformers' configuration classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.models.families import FAMILIES, read_model_config
from engine.models.rope import inverse_frequencies

# Keys that Baton requires in every config.json, or that keep Gemma 4 within what Baton supports.
REQUIRED: dict[str, Any] = {
    "hidden_size": 8192, "intermediate_size": 52, "num_hidden_layers": 8, "num_attention_heads": 64, "vocab_size": 97,
    "max_position_embeddings": 8192, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
    "num_experts_per_tok": 2, "shared_intermediate_size": 20, "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1}
GIVEN: dict[str, dict[str, Any]] = {
    "Ministral3ForCausalLM": {"rope_parameters": ROPE, "sliding_window": None},
    "Mistral4ForCausalLM": {"rope_parameters": ROPE},
    "GptOssForCausalLM": {"rope_parameters": ROPE},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "num_hidden_layers": 30},
    "Phi3ForCausalLM": {
        "rope_scaling": {"rope_type": "longrope", "long_factor": [1.5] * 64, "short_factor": [1.0] * 64}
    },
    "Glm4MoeForCausalLM": {"num_nextn_predict_layers": 1},
    "DeepseekV3ForCausalLM": {"num_nextn_predict_layers": 1},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 4},
}
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2_5_VLTextConfig": ("qwen2_5_vl_text", {"use_sliding_window": True, "num_hidden_layers": 82}),
    "Qwen3VLTextConfig": ("qwen3_vl_text", {}),
    "Gemma3TextConfig": ("gemma3_text", {}),
}


def read(directory: Path, values: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_keys_that_a_file_omits_have_the_defaults_of_transformers(architecture: str, tmp_path: Path) -> None:
    given = {"architectures": [architecture], **REQUIRED, **GIVEN.get(architecture, {})}
    whole = getattr(transformers, architecture).config_class(**json.loads(json.dumps(given)))
    whole.save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    assert read(tmp_path, given) == expected


@pytest.mark.parametrize("name", TEXT)
def test_a_text_decoder_has_the_defaults_of_its_own_class(name: str, tmp_path: Path) -> None:
    kind, more = TEXT[name]
    whole = getattr(transformers, name)(**REQUIRED | more).to_dict()
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}}
    expected = read(tmp_path, outer | {"text_config": json.loads(json.dumps(whole, default=str))})
    assert read(tmp_path, outer | {"text_config": {"model_type": kind, **REQUIRED, **more}}) == expected


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("GptOssForCausalLM", "rope_parameters"),
        ("Mistral4ForCausalLM", "rope_parameters"),
        ("DeepseekV2ForCausalLM", "num_experts_per_tok"),
    ],
)
def test_a_file_that_omits_a_key_without_a_usable_default_is_refused(
    architecture: str, missing: str, tmp_path: Path
) -> None:
    given = {"architectures": [architecture], **REQUIRED}
    given.pop(missing, None)
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        read(tmp_path, given)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_an_original_length_outside_the_rope_parameters_has_priority(kind: str, tmp_path: Path) -> None:
    rope = ROPE | {"rope_type": kind, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = REQUIRED | {"rope_scaling": rope, "original_max_position_embeddings": 256}
    [found] = read(tmp_path, {"architectures": ["LlamaForCausalLM"], **more}).ropes
    expected, _ = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**json.loads(json.dumps(more))), torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(found, 128), expected)
