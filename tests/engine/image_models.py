"""Tiny random models of text and images, with a tokenizer, a chat template, an image processor and an oracle."""

import base64
import io
import json
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Gemma3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from shared.model_files import DEMO_MODEL as DEMO
from tests.engine.families import MROPE, QWEN_VISION, SIZES, TEXT, VISION, save

WORDS = 2048  # vocabulary size of the demo model's tokenizer; the ids of the special tokens follow
IMAGE, START, END, TURN = WORDS, WORDS + 1, WORDS + 2, WORDS + 3
VOCABULARY = {"vocab_size": WORDS + 8}
IDS = {"image_token_id": IMAGE, "video_token_id": WORDS + 4, "vision_start_token_id": START, "vision_end_token_id": END}
QWEN_NAMES = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|turn|>"]
GEMMA_NAMES = ["<image_soft_token>", "<start_of_image>", "<end_of_image>", "<|turn|>"]
PATCH = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "depth": 2}
DEEP = {"num_hidden_layers": 3}
HYBRID = {
    "head_dim": 32, "num_hidden_layers": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2.5 vl": Qwen2_5_VLConfig(
        text_config=SIZES | DEEP | VOCABULARY
        | {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": MROPE | {"mrope_section": [1, 2, 3]}},
        vision_config={k: v for k, v in (QWEN_VISION | PATCH).items() if k != "num_position_embeddings"},
        tie_word_embeddings=False, **IDS,
    ),
    "qwen3 vl": Qwen3VLConfig(
        text_config=TEXT | DEEP | VOCABULARY
        | {"rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        vision_config=QWEN_VISION | PATCH | {"deepstack_visual_indexes": [0, 1]}, tie_word_embeddings=False, **IDS,
    ),
    "qwen3.5": Qwen3_5Config(
        text_config=TEXT | VOCABULARY | HYBRID,
        vision_config=QWEN_VISION | PATCH, tie_word_embeddings=False, **IDS,
    ),
    "qwen3.5 moe": Qwen3_5MoeConfig(
        text_config={key: value for key, value in TEXT.items() if key != "intermediate_size"} | VOCABULARY | HYBRID
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        vision_config=QWEN_VISION | PATCH, tie_word_embeddings=False, **IDS,
    ),
    "gemma3": Gemma3Config(
        text_config=TEXT | VOCABULARY | {"sliding_window": 6, "query_pre_attn_scalar": 12, "num_hidden_layers": 6},
        vision_config=VISION, mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def is_qwen(name: str) -> bool:
    return name.startswith("qwen")


def write(name: str, directory: Path) -> Any:
    """Write a model's files, and return transformers' model, which has no end token."""
    reference = save(deepcopy(CONFIGS[name]), directory)
    reference.generation_config.eos_token_id = None
    write_files(name, directory)
    return reference


def write_files(name: str, directory: Path) -> None:
    """Write all files of a model except its weights."""
    if not (directory / "config.json").exists():
        CONFIGS[name].save_pretrained(directory)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    names = QWEN_NAMES if is_qwen(name) else GEMMA_NAMES
    tokenizer["added_tokens"] += [
        {"id": WORDS + index, "content": content, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, content in enumerate(names)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text("{}")
    marker = "<|vision_start|><|image_pad|><|vision_end|>" if is_qwen(name) else "<start_of_image>"
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", marker))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor(name).to_dict()))


def processor(name: str) -> Any:
    if is_qwen(name):
        size = {"shortest_edge": 64, "longest_edge": 1600}
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})


def picture(seed: int, width: int, height: int) -> np.ndarray[Any, Any]:
    """Return a random RGB image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def data_url(image: np.ndarray[Any, Any], kind: str = "PNG", **options: Any) -> str:
    """Return a data URL that contains the image as a file of the type `kind`."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def answer(reference: Any, name: str, tokens: list[int], images: list[np.ndarray[Any, Any]], count: int) -> list[int]:
    """Return the tokens that transformers generates for a prompt that contains the tokens of each image."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
    kinds = (inputs["input_ids"] == IMAGE).long()
    if images:
        found = processor(name)(images, return_tensors="pt")
        inputs["pixel_values"] = found["pixel_values"]
        if is_qwen(name):
            inputs["image_grid_thw"] = found["image_grid_thw"]
    inputs["mm_token_type_ids" if is_qwen(name) else "token_type_ids"] = kinds
    with torch.inference_mode():
        return list(reference.generate(**inputs, max_new_tokens=count, do_sample=False)[0, len(tokens) :].tolist())


def words(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, WORDS) for _ in range(count)]
