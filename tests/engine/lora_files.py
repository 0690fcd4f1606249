"""Random LoRA adapters, written by peft."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(model: Any, directory: Path, seed: int, modules: tuple[str, ...] = EVERY, **config: Any) -> Any:
    """Write an adapter of `model` with random values to `directory`, and return the adapted model of peft.

    `model` itself must not be used afterwards, because peft changes it.
    """
    torch.manual_seed(seed)
    given = {"r": 4, "lora_alpha": 12, "init_lora_weights": False, "target_modules": list(modules)} | config
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given))
    adapted.save_pretrained(str(directory))
    return adapted.eval()
