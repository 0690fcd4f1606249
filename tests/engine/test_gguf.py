"""Test that models in GGUF files generate the same tokens as in transformers, and that malformed files are refused."""

import struct
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from engine.models.load import load_model
from engine.weights import check_finite, fingerprint, stored_dtype, tensor_files
from shared.model_files import resolve
from tests.engine.build import CPU, generate, torch_runner
from tests.engine.gguf_files import convert, header, text
from tests.engine.quantized_files import change_config

SIZES = {
    "vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1,
    "eos_token_id": None, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, hidden_size=64, intermediate_size=96)
LARGER = LlamaConfig(**SIZES, hidden_size=256, intermediate_size=256)
QWEN3 = Qwen3Config(**SIZES, hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.mark.parametrize(
    ("kind", "config", "architecture"),
    [
        ("F32", LLAMA, "llama"),
        ("F16", LLAMA, "llama"),
        ("BF16", QWEN3, "qwen3"),
        ("Q4_0", LLAMA, "llama"),
        ("Q8_0", QWEN3, "qwen3"),
        ("Q4_K", LARGER, "llama"),
        ("Q6_K", LARGER, "llama"),
    ],
)
def test_the_tokens_are_those_of_the_values_in_the_file(
    kind: str, config: PretrainedConfig, architecture: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "dense", tmp_path / "gguf"
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 + (parameter.ndim == 1)
    model.save_pretrained(source)
    convert(source, target, kind, architecture)
    reference = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    prompts = [[Random(seed).randrange(96) for _ in range(length)] for seed, length in enumerate((3, 21))]
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist() for prompt in prompts
    ]
    check_finite(target)
    runner, _, blocks = torch_runner(load_model(target, torch.float32, CPU))
    found = generate(runner, [blocks.request(prompt, max_tokens=12) for prompt in prompts], 16)
    assert [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)] == expected


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    transformers.AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "gguf", "F16", "llama")
    return tmp_path / "gguf"


def test_an_output_matrix_of_its_own_is_used_if_the_config_claims_that_there_is_none(directory: Path) -> None:
    hidden = torch.randn(3, 64)
    expected = load_model(directory, torch.float32, CPU).logits(hidden)
    change_config(directory, tie_word_embeddings=True)
    assert torch.equal(load_model(directory, torch.float32, CPU).logits(hidden), expected)


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
        (header([("a", [2], 10, 0)], "llama"), "'a' has type 10 of ggml; supported are F32, F16"),
        (header([("a", [2], 0, 0)], "llama"), "'a' is malformed or cut off"),
        (header([("a", [31], 2, 0)], "llama") + bytes(64), "'a' is malformed or cut off"),
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
    with pytest.raises(ValueError, match=r"is a file; use its directory, with .* tokenizer\.json in it"):
        resolve(str(directory / "model.gguf"))
    (directory / "other.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="has 2 GGUF files; keep one"):
        load_model(directory, torch.float32, CPU)


def test_a_file_of_another_family_is_refused(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "SmolLM3ForCausalLM"))
    with pytest.raises(ValueError, match=r"GGUF is supported for LlamaForCausalLM, .* use safetensors for SmolLM3"):
        load_model(directory, torch.float32, CPU)
