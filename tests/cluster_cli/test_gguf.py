"""Test that `baton gguf` makes directories that describe models like the directories from which GGUF files were made.

The configurations and the tokenizers were also compared with llama.cpp's logits and tokens.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, trainers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from cluster.gguf import make, make_directory
from engine.formats.gguf_config import config_of
from engine.models.families import read_model_config
from engine.models.load import load_model
from router.text.tokenizer import Tokenizer
from shared.model_files import DEMO_MODEL, read_end_tokens, resolve
from tests.engine.build import CPU
from tests.engine.gguf_files import convert, write_vocabulary

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = SIZES | {"head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = SIZES | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.37, 1.74, 2.11, 2.48, 2.85],
}  # fmt: skip
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR),
        LlamaConfig(**SIZES | {"hidden_size": 512, "max_position_embeddings": 131_072}, rope_parameters=LLAMA3),
        MixtralConfig(**SIZES, num_local_experts=4),
        SmolLM3Config(**SIZES),
        GraniteConfig(
            **SIZES, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
            attention_multiplier=0.0078125,
        ),
        Phi3Config(**SIZES, sliding_window=32),
        Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=LONGROPE),
        Qwen2Config(**SIZES, rope_parameters=YARN),
        Qwen2MoeConfig(**EXPERTS, num_experts=4, shared_expert_intermediate_size=64),
        Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        Qwen3MoeConfig(**EXPERTS, num_experts=4, norm_topk_prob=True),
        Gemma2Config(**GEMMA),
        Gemma3TextConfig(**GEMMA, rope_parameters={"full_attention": LINEAR, "sliding_attention": LOCAL}),
        GptOssConfig(**EXPERTS, num_local_experts=4, sliding_window=8),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_the_metadata_give_the_original_config(config: PretrainedConfig, tmp_path: Path) -> None:
    convert(transformers.AutoModelForCausalLM.from_config(config), tmp_path, "F16")
    expected = read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path / "model.gguf")))
    assert read_model_config(tmp_path) == expected


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its tokenizer."""
    target = tmp_path_factory.mktemp("gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)
    convert(model, target, "Q8_0", lambda writer: write_vocabulary(writer, tokenizer, "gpt-2"))
    return target / "model.gguf"


def test_the_directory_has_the_original_tokenizer(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"  # as in the cache of the Hugging Face hub
    link.symlink_to(os.path.relpath(file, tmp_path))
    assert make(link, tmp_path / "model") == 0
    vocab_size = read_model_config(DEMO_MODEL).vocab_size
    found, expected = (Tokenizer.load(directory, vocab_size) for directory in (tmp_path / "model", DEMO_MODEL))
    for text in ("ROMEO:\n\nI'll 1234  naïve 東京 🙂", "<|end|>", "<|endoftext|>", "  x"):
        tokens = expected.encode(text)
        assert found.encode(text) == tokens
        assert found.decode(tokens) == expected.decode(tokens)
    messages = [{"role": "user", "content": "Speak."}]
    assert found.encode_chat(messages) == expected.encode_chat(messages)
    assert read_end_tokens(tmp_path / "model") == read_end_tokens(DEMO_MODEL)
    assert load_model(tmp_path / "model", torch.float32, CPU).config.num_layers == 4


def test_a_tokenizer_of_llama_3_differs_as_in_llama_cpp(tmp_path: Path) -> None:
    """BOS begins a text, and a word that is a token stays whole. Names of control tokens can have any characters."""
    reference = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)
    renamed = {"<|begin|>": "<｜begin▁of▁text｜>", "<|end|>": "<｜User｜>"}

    def write(writer: GGUFWriter) -> None:
        write_vocabulary(writer, reference, "llama-bpe")
        (metadata,) = writer.kv_data
        del metadata["tokenizer.ggml.add_bos_token"]
        tokens, merges = (metadata[f"tokenizer.ggml.{name}"].value for name in ("tokens", "merges"))
        tokens[:] = [renamed.get(token, token) for token in tokens]
        del merges[20:]

    convert(transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL), tmp_path, "Q8_0", write)
    make_directory(tmp_path / "model.gguf", tmp_path / "model")
    found = Tokenizer.load(tmp_path / "model", len(reference))
    begin, end, word = reference.convert_tokens_to_ids([*renamed, "ROMEO"])
    assert found.encode("ROMEO<｜User｜>ROMEO") == [begin, word, end, word]
    assert found.decode([word, end]) == "ROMEO"
    assert read_end_tokens(tmp_path / "model") == {end}


@pytest.mark.parametrize(("kind", "strips"), [(LlamaConfig, False), (Phi3Config, True)])
def test_a_sentencepiece_vocabulary_adds_a_space_to_each_text(
    kind: type[PretrainedConfig], strips: bool, tmp_path: Path
) -> None:
    reference = LibraryTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    codes = [f"<0x{code:02X}>" for code in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *codes])
    text = (DEMO_MODEL.parents[1] / "README.md").read_text()
    reference.train_from_iterator(text.split("\n"), trainer)
    library = json.loads(reference.to_str())["model"]
    tokens = sorted(library["vocab"], key=library["vocab"].__getitem__)
    ranks = {"".join(merge): rank for rank, merge in enumerate(library["merges"])}
    special = dict.fromkeys(codes, TokenType.BYTE) | {
        "<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL,
    }  # fmt: skip

    def write(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
        writer.add_token_types([special.get(token, TokenType.NORMAL) for token in tokens])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    config = kind(**SIZES | {"vocab_size": len(tokens)})
    convert(transformers.AutoModelForCausalLM.from_config(config), tmp_path, "F16", write)
    make_directory(tmp_path / "model.gguf", tmp_path / "model")
    found = Tokenizer.load(tmp_path / "model", len(tokens))
    for line in ("  two spaces", "A server", "naïve 東京", "one\ntwo"):
        assert found.encode(line) == [1, *reference.encode(line).ids]
        assert found.decode(found.encode(line)) == line
    assert (found.encode("a</s>\nb") == found.encode("a</s>b")) is strips  # as in the original tokenizer of Phi-3
    assert read_end_tokens(tmp_path / "model") == {2}


def changed(**metadata: str | int | list[int]) -> Callable[[GGUFWriter], None]:
    def write(writer: GGUFWriter) -> None:
        add: dict[type, Any] = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        for key, value in metadata.items():
            add[type(value)](key.replace("__", "."), value)

    return write


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"llama__attention__new": 1},
            "the key 'llama.attention.new' is not supported: use a directory with the file and",
        ),
        ({"llama__attention__head_count_kv": [2] * 6}, "the key 'llama.attention.head_count_kv' is not supported"),
        ({"split__count": 2}, "it is one of several parts; merge them with `llama-gguf-split --merge`"),
        ({"llama__rope__scaling__type": "new"}, "llama.rope.scaling.type is 'new': use a directory"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count is 8: heads have 16 dimensions"),
        (
            {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "new", "tokenizer__ggml__tokens": "x"},
            "tokenizer.ggml.pre 'new' is not supported",
        ),
        (
            {"tokenizer__ggml__model": "t5", "tokenizer__ggml__tokens": "x"},
            "tokenizer.ggml.model 't5' is not supported",
        ),
        (
            {"tokenizer__ggml__model": "llama", "tokenizer__ggml__tokens": "x", "tokenizer__ggml__bos_token_id": 99},
            "the tokenizer is not supported (",
        ),
        ({}, "tokenizer.ggml.tokens is missing: use a directory"),
    ],
)
def test_what_is_not_supported_is_refused(
    metadata: dict[str, str | int | list[int]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, head_dim=16))
    convert(model, tmp_path, "F16", changed(**metadata))
    before = set(tmp_path.iterdir())
    assert make(tmp_path / "model.gguf", tmp_path / "model") == 2
    assert message in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_scaling_is_linear_if_the_file_has_only_a_factor(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    convert(model, tmp_path, "F16", changed(llama__rope__scaling__factor=4))
    found = config_of(tmp_path / "model.gguf")["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("linear", 4)


def test_a_directory_that_exists_is_not_changed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make(file, file.parent) == 2
    assert "exists already; name another directory" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"is a file; make a directory from it with: baton gguf .*model\.gguf; or use"):
        resolve(str(file))
