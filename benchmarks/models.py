"""Make checkpoints of the benchmarked shapes with random weights. Speed does not depend on the values of weights."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CACHE = Path.home() / ".cache" / "baton-bench"
TOKENIZER = Path(__file__).resolve().parents[1] / "demo" / "model"
MAX_POSITIONS = 16_384
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10_000.0, "rms_norm_eps": 1e-5}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": LLAMA | _sizes(128, 2, 4, 2, 256, 2048, True),
    "110m": LLAMA | _sizes(768, 12, 12, 4, 2048, 8192, False),
    "0.5b": QWEN2 | _sizes(896, 24, 14, 2, 4864, 151_936, True),
    "1b-moe": QWEN3_MOE | _sizes(1024, 14, 16, 4, 3072, 32_768, False),
}


def checkpoint(shape: str, directory: Path = CACHE) -> Path:
    """Return the path of a float32 checkpoint in `directory`. If it does not exist, make it; 0.5b takes 2 GB, and
    1b-moe takes 5 GB.

    Raises ValueError if the shape is unknown.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape {shape!r}: choose from {', '.join(SHAPES)}")
    path = directory / f"{shape}-float32"
    if path.exists():
        return path
    config = SHAPES[shape]
    directory.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=directory))  # renamed when complete
    save_file(_weights(config), making / "model.safetensors", {"format": "pt"})
    (making / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, making / name)
    try:
        making.rename(path)
    except OSError:  # another process has made it
        shutil.rmtree(making)
    return path


def _weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return weights as transformers initializes them, keyed by their names in Hugging Face's files."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    weights: dict[str, Tensor] = model.state_dict()
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    named: dict[str, Tensor] = {}
    for name, weight in weights.items():
        # Transformers keeps all experts of a layer in one tensor, but files have separate tensors for each expert.
        if name.endswith("experts.gate_up_proj"):
            for number, (gate, up) in enumerate(one.chunk(2) for one in weight):
                named |= {f"{name[:-12]}{number}.gate_proj.weight": gate, f"{name[:-12]}{number}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            named |= {f"{name[:-9]}{number}.down_proj.weight": one for number, one in enumerate(weight)}
        elif name not in tied:
            named[name] = weight
    return {name: weight.clone() for name, weight in named.items()}
