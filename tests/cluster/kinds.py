"""Models for hash nodes, with the KV groups of a model that has sliding windows or recurrent layers."""

import shutil
from pathlib import Path
from typing import Any

from engine.options import BuildOptions, check_options, groups_of
from scheduler.geometry import Group
from tests.cluster.harness import DEMO, DEMO_VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": DEMO_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1,
    "intermediate_size": 96,
}  # fmt: skip
KINDS = ("windows", "states")


def model_of(kind: str, directory: Path) -> tuple[Path, tuple[Group, ...]]:
    """Write a model directory without weights. Return its path and the groups of the hash model."""
    from transformers import GptOssConfig, Qwen3NextConfig

    config: Any = Qwen3NextConfig(**SIZES) if kind == "states" else GptOssConfig(**SIZES, sliding_window=40)
    config.architectures = ["Qwen3NextForCausalLM" if kind == "states" else "GptOssForCausalLM"]
    path = directory / kind
    shutil.copytree(DEMO, path)
    config.save_pretrained(path)
    options = BuildOptions(str(path), runner="hash")
    return path, groups_of(options, check_options(options)[1], 0)
