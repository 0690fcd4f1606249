"""Convert one of our checkpoints to a GGUF file, so that llama.cpp uses the same weights.

python -m benchmarks.peers.gguf_file MODEL_DIRECTORY TYPE OUT.gguf      (TYPE: F32, F16, BF16 or Q8_0)
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

TYPES = ("F32", "F16", "BF16", "Q8_0")
Array = np.ndarray[Any, np.dtype[np.float32]]
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
    "rope_freq_base": "rope_theta",
    "rope_dimension_count": "head_dim",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
}


def write(model: Path, kind: str, out: Path) -> None:
    """Convert a float32 checkpoint of Llama, Qwen2 or Qwen3 MoE.

    Norms, biases and the routers of experts stay float32, as in llama.cpp's conversion.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = config["model_type"].replace("_", "")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    # For Llama, llama.cpp applies rotary embeddings to pairs of adjacent rows. For the other architectures, it applies
    # them to rows i and i + d/2, which is the order of the checkpoint.
    rotated = {"q_proj": heads, "k_proj": kv_heads} if architecture == "llama" else {}
    target = gguf.GGMLQuantizationType[kind]
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(out, architecture)
    for field, key in FIELDS.items():
        if key in config:
            getattr(writer, f"add_{field}")(config[key])
    writer.add_tokenizer_model("none")  # no tokenizer, because inputs and outputs are token ids
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"])
    for name, weight in _with_experts_in_one(load_file(model / "model.safetensors")).items():
        paired = rotated.get(name.split(".")[-2], 0)
        to = target if weight.ndim > 1 and not name.endswith("mlp.gate.weight") else gguf.GGMLQuantizationType.F32
        values = gguf.quantize(_interleaved(weight, paired) if paired else weight, to)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        writer.add_tensor(stored_name, values, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_experts_in_one(weights: dict[str, Array]) -> dict[str, Array]:
    """Return the weights, with the matrices of a layer's experts stacked into one array per projection."""
    found: dict[str, Array] = {}
    stacks: dict[str, list[Array]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            stacks.setdefault(f"{layer}.experts.{rest.split('.', 1)[1]}", []).append(weights[name])
        else:
            found[name] = weights[name]
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def _interleaved(weight: Array, heads: int) -> Array:
    """Make the two rows of each rotary pair (i, i + d/2) adjacent."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in TYPES:
        sys.exit(__doc__)
    write(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
