"""Writes models to GGUF files, as llama.cpp's converter does, and headers of malformed files."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from transformers import MixtralForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.formats.gguf import ARCHITECTURES, GROUPED, ROTATES_ADJACENT

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # offsets of the float16 scales in a block

SIZES = {
    "context_length": 128, "embedding_length": 16, "block_count": 2, "feed_forward_length": 32, "attention.head_count": 4,
}  # fmt: skip


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: list[tuple[str, list[int], int, int]], architecture: str) -> bytes:
    """Return a header with metadata of several types. `tensors` has the name, shape, type and offset of each tensor."""
    values = [
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.0),
        text("llama.rope.freq_base") + struct.pack("<If", 6, 10000.0),
        text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-6),
        *(text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in SIZES.items()),
    ]
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values)
    for name, shape, kind, offset in tensors:
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
    return data + bytes(-len(data) % 64)


def convert(
    model: PreTrainedModel, target: Path, kind: str, describe: Callable[[GGUFWriter], None] = lambda writer: None
) -> None:
    """Write the model to the new directory `target`, with matrices of the type `kind`, and give the model the weights
    that the file represents. Types that gguf cannot write get random codes. `describe` writes more metadata."""
    architecture, config = ARCHITECTURES[type(model).__name__], model.config
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    writer = GGUFWriter(target / "model.gguf", architecture)
    _describe(writer, architecture, config)
    describe(writer)
    for name, parameter in model.named_parameters():
        is_transposed = architecture == "gpt-oss" and ".experts." in name and parameter.ndim == 3
        values = (parameter.mT if is_transposed else parameter).detach().contiguous().numpy()
        own = GGMLQuantizationType[kind if values.ndim > 1 and values.shape[-2] > 1 and "_bias" not in name else "F32"]
        data = _encoded(values, own)
        held = torch.from_numpy(dequantize(data, own)).view(values.shape)
        if own not in GROUPED or "embed_tokens" in name:
            held = held if own.name in {"F32", "F16", "BF16"} else held.half().float()
        parameter.data = held.mT.contiguous() if is_transposed else held
        for part, rows in _stored(name, data, architecture, config).items():
            known = _mixtral_name(part) if isinstance(model, MixtralForCausalLM) else part
            stored_name = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert stored_name is not None, known
            writer.add_tensor(stored_name, np.ascontiguousarray(rows), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: GGUFWriter, architecture: str, config: Any) -> None:
    """Write the metadata of the architecture."""
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(0)
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if head_dim is not None and architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in {"llama", "granite", "smollm3"}:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim or config.hidden_size // heads)
    if architecture == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(share * config.hidden_size) // heads)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        if "long_factor" in rope:
            writer.add_rope_scaling_attn_factors(1.19)
            writer.add_tensor("rope_factors_long.weight", np.float32(rope["long_factor"]))
            writer.add_tensor("rope_factors_short.weight", np.float32(rope["short_factor"]))
    if architecture in {"gemma2", "gemma3", "gpt-oss"}:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] == "llama3":
        dims = head_dim or config.hidden_size // heads
        plain = rope["rope_theta"] ** -(np.arange(0, dims, 2, dtype=np.float32) / dims)
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
        writer.add_tensor("rope_freqs.weight", plain / scaled)
    if (experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    inner = config.intermediate_size if architecture == "gpt-oss" else getattr(config, "moe_intermediate_size", None)
    if inner is not None:
        writer.add_expert_feed_forward_length(inner)
    if (shared := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(shared)


def write_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str) -> None:
    """Write a tokenizer with byte-level BPE. `pre` is llama.cpp's name of the rule that splits text into words."""
    added = {index: token.special for index, token in tokenizer.added_tokens_decoder.items()}
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    kinds = {None: TokenType.NORMAL, True: TokenType.CONTROL, False: TokenType.USER_DEFINED}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([kinds[added.get(index)] for _, index in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)


def _mixtral_name(name: str) -> str:
    for new, old in {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        name = name.replace(new, old)
    return name


def _encoded(values: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[Any]:
    """Return the bytes of each row of a quantized type, or floats."""
    if kind.name not in SCALES:
        return quantize(values, kind)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = torch.randint(0, 256, (values.size // block, num_bytes), dtype=torch.uint8).numpy()
    for offset in SCALES[kind.name]:
        scale = 0.0005 * (1 + torch.rand(len(blocks), 1).numpy())
        blocks[:, offset : offset + 2] = scale.astype(np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _stored(name: str, data: NDArray[Any], architecture: str, config: Any) -> dict[str, NDArray[Any]]:
    """Return the tensors in which llama.cpp stores a tensor of Hugging Face's, with the names that gguf knows."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return {name: data + 1}
    if architecture in ROTATES_ADJACENT and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return {name: data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)}
    if name.endswith("shared_expert_gate.weight"):
        return {name: data[0]}
    if name.endswith("sinks"):
        return {f"{name}.weight": data}
    if ".experts." not in name:
        return {name: data}
    stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    if stem.endswith("down_proj"):
        return {f"{stem}.{kind}": data}
    halves = (data[:, 0::2], data[:, 1::2]) if architecture == "gpt-oss" else np.split(data, 2, 1)
    return {f"{stem.replace('gate_up', part)}.{kind}": half for part, half in zip(("gate", "up"), halves, strict=True)}
