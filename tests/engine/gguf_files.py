"""Writes models to GGUF files, as llama.cpp's converter does, and headers of malformed files."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from transformers import MixtralForCausalLM, PreTrainedModel

from engine.formats.gguf import ARCHITECTURES, GROUPED, ROTATES_ADJACENT

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # offsets of the float16 scales in a block


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
    ]
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values)
    for name, shape, kind, offset in tensors:
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
    return data + bytes(-len(data) % 64)


def convert(model: PreTrainedModel, target: Path, kind: str) -> None:
    """Write the model to the new directory `target`, with matrices of the type `kind`, and give the model the weights
    that the file represents. Types that gguf cannot write get random codes."""
    architecture, config = ARCHITECTURES[type(model).__name__], model.config
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    writer = GGUFWriter(target / "model.gguf", architecture)
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
