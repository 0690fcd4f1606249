"""Test that models in GGUF files generate the same tokens as in transformers, and that malformed files are refused."""

import struct
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from engine.foreign.config import choose_config
from engine.formats.forms import dense
from engine.formats.gguf import Entry, read_tensor
from engine.image_support import use_images
from engine.models.load import load_model
from engine.weights import check_finite, fingerprint, stored_dtype, tensor_files
from tests.engine.build import CPU, generate, torch_runner
from tests.engine.gguf_files import convert, header, text
from tests.engine.image_models import CONFIGS, write_files
from tests.engine.quantized_files import change_config

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "max_position_embeddings": 128,
}  # fmt: skip
LARGER = SIZES | {"hidden_size": 256, "intermediate_size": 256}
CHOSEN = SIZES | {"head_dim": 16, "num_experts_per_tok": 2}
WINDOWS = SIZES | {"head_dim": 16, "sliding_window": 8}
LLAMA = LlamaConfig(**SIZES)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("F32", LLAMA),
        ("F16", MixtralConfig(**SIZES, num_local_experts=4)),
        ("BF16", GraniteConfig(**SIZES)),
        ("Q8_0", Qwen3Config(**SIZES, head_dim=16)),
        ("Q4_0", Phi3Config(**SIZES)),
        ("Q4_K", LlamaConfig(**LARGER)),
        ("Q5_K", SmolLM3Config(**LARGER)),
        ("Q6_K", Qwen2Config(**LARGER)),
        ("Q5_0", Gemma2Config(**WINDOWS)),
        ("Q4_1", Gemma3TextConfig(**WINDOWS)),
        ("Q4_0", Qwen3MoeConfig(**CHOSEN, num_experts=4, moe_intermediate_size=32)),
        ("Q8_0", Qwen2MoeConfig(**CHOSEN, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64)),
        ("MXFP4", GptOssConfig(**CHOSEN, num_local_experts=4, sliding_window=8)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_the_tokens_are_those_of_the_values_in_the_file(kind: str, config: PretrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(5)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in reference.parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1)
    convert(reference, tmp_path, kind)
    reference.generation_config.eos_token_id = None
    prompts = [[Random(seed).randrange(96) for _ in range(length)] for seed, length in enumerate((3, 21))]
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist() for prompt in prompts
    ]
    check_finite(tmp_path)
    runner, _, blocks = torch_runner(load_model(tmp_path, torch.float32, CPU))
    found = generate(runner, [blocks.request(prompt, max_tokens=12) for prompt in prompts], 16)
    assert [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)] == expected


def test_4_bit_codes_represent_the_values_of_the_file(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (64, 144), dtype=torch.uint8).numpy()
    data[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    data[:8, 4:16] = 0  # groups of equal values
    data[8:16, 4:8] = 0
    (tmp_path / "file").write_bytes(data.tobytes())
    entry = Entry(GGMLQuantizationType.Q4_K, (8, 2048), 0, data.size)
    found = dense(read_tensor(tmp_path / "file", entry, CPU, codes=True))
    expected = torch.from_numpy(dequantize(data.reshape(8, -1), entry.kind))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    convert(transformers.AutoModelForCausalLM.from_config(LLAMA), tmp_path, "F16")
    return tmp_path


def test_an_output_matrix_of_its_own_is_used_if_the_config_claims_that_there_is_none(directory: Path) -> None:
    hidden = torch.randn(3, 64)
    expected = load_model(directory, torch.float32, CPU).logits(hidden)
    change_config(directory, tie_word_embeddings=True)
    assert torch.equal(load_model(directory, torch.float32, CPU).logits(hidden), expected)


def test_an_unsupported_type_is_refused(directory: Path) -> None:
    (directory / "model.gguf").write_bytes(header([("token_embd.weight", [96, 64], 24, 0)], "llama") + bytes(96 * 64))
    with pytest.raises(ValueError, match=r"model\.gguf: .* of the type I8, which is not supported"):
        load_model(directory, torch.float32, CPU)


def test_the_modules_of_transformers_do_not_run_it(directory: Path) -> None:
    with pytest.raises(ValueError, match="GGUF files run only on Baton's own families; use safetensors"):
        choose_config(directory, "transformers")


def test_the_vocabulary_may_be_smaller_than_that_of_the_config(directory: Path) -> None:
    change_config(directory, vocab_size=100)
    assert load_model(directory, torch.float32, CPU).config.vocab_size == 96


def test_a_model_that_takes_images_serves_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = deepcopy(CONFIGS["gemma3"])
    config.tie_word_embeddings = True
    convert(transformers.AutoModelForCausalLM.from_config(config.text_config), tmp_path, "F16")
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    write_files("gemma3", tmp_path)
    model = load_model(tmp_path, torch.float32, CPU)
    assert use_images(torch_runner(model)[0], tmp_path, model.config, 512) is None
    assert "images are refused" in caplog.text
    assert "only the text model" in caplog.text


ONE = struct.pack("<IQQ", 3, 1, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off or malformed"),
        (b"GGML" + bytes(40), "not a GGUF file of version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "not a GGUF file of version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "cut off or malformed"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 2**62), "cut off or malformed"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 2**62), "cut off or malformed"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99), "cut off or malformed"),
        (b"GGUF" + ONE + struct.pack("<Q", 2**63) + b"a", "cut off or malformed"),
        (b"GGUF" + ONE + text("a") + struct.pack("<I", 5), "'a' has 5 dimensions"),
        (header([("a", [2], 99, 0)], "llama"), "'a' has type 99 of ggml, which is not supported"),
        (header([("a", [2], 0, 0)], "llama"), "'a' is malformed or cut off"),
        (header([("a", [31], 2, 0)], "llama") + bytes(64), "'a' is malformed or cut off"),
        (header([("a", [0], 0, 0)], "llama") + bytes(64), "'a' is malformed or cut off"),
        (header([("a", [2], 0, 0)] * 2, "llama") + bytes(64), "'a' is malformed or cut off"),
        (header([("a", [2], 0, 0)], "llama") + bytes(64), "'token_embd.weight' is missing"),
        (header([], "qwen2"), "general.architecture is 'qwen2', but config.json describes 'llama'"),
    ],
)
def test_a_malformed_file_is_refused(data: bytes, message: str, directory: Path) -> None:
    (directory / "model.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        load_model(directory, torch.float32, CPU)
    assert "model.gguf" in str(error.value)


def test_a_file_is_found_and_recognized(directory: Path) -> None:
    assert stored_dtype(directory) == "bfloat16"
    assert set(tensor_files(directory).values()) == {directory / "model.gguf"}
    before = fingerprint(directory)
    data = (directory / "model.gguf").read_bytes()
    (directory / "model.gguf").write_bytes(data[:-65] + b"\x01" * 65)
    assert fingerprint(directory) != before
    (directory / "other.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="has 2 GGUF files; keep one"):
        load_model(directory, torch.float32, CPU)


def test_a_file_of_another_family_is_refused(directory: Path) -> None:
    rope = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    change_config(directory, architectures=["Ministral3ForCausalLM"], rope_parameters=rope)
    with pytest.raises(ValueError, match=r"GGUF is supported for LlamaForCausalLM, .* use safetensors for Ministral3"):
        load_model(directory, torch.float32, CPU)
