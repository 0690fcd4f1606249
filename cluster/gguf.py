"""`baton gguf` makes a model directory from a GGUF file: config.json and the tokenizer come from the file's metadata.

The tokenizer is converted by transformers. The end tokens are those that llama.cpp would use.
"""

import json
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from engine.foreign.config import INSTALL
from engine.formats.gguf import Value, read_header
from engine.formats.gguf_config import ORIGINAL, config_of

# Byte-level pre-tokenizers that transformers converts. It would replace others by GPT-2's, without an error.
PRE_TOKENIZERS = {
    "dbrx", "deepseek-r1-qwen", "falcon3", "gpt-2", "gpt-4o", "kormo", "lfm2", "llama-bpe", "llama-v3", "llama3",
    "llama4", "megrez", "pixtral", "qwen2", "qwen35", "smaug-bpe", "tekken",
}  # fmt: skip
DIGITS = {"refact", "smollm", "starcoder"}  # GPT-2's, but numbers are split into digits
# With these pre-tokenizers, llama.cpp encodes a word that is a token as this token, even if the merges do not produce
# it, and adds BOS unless the file says otherwise.
WHOLE_WORDS = {"falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "pixtral", "tekken"}
CONTROL = 3  # type of tokens that are not part of ordinary text
KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}  # Phi-3 removes the space after all other control tokens
ENDS = ("eos", "eot", "eom")  # names of end tokens in the metadata
END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>",
)  # fmt: skip


def make(file: Path, target: Path) -> int:
    """Make the directory `target` from a GGUF file. Return the exit status."""
    try:
        make_directory(file, target)
    except (ValueError, OSError, ImportError) as error:
        print(f"baton gguf: {error}", file=sys.stderr)
        return 2
    print(f"written: {target}; serve it with: baton up --model {target}")
    return 0


def make_directory(file: Path, target: Path) -> None:
    """Make a directory with a hard link to the file, config.json and the files of the tokenizer.

    If this fails, no directory is left. Raises ValueError if the model or its tokenizer is not supported, if `target`
    exists, or if it is on another file system than the file. Raises ImportError without transformers.
    """
    config = config_of(file)
    metadata, _ = read_header(file)
    if target.exists():
        raise ValueError(f"{target} exists already; name another directory")
    made = target.with_name(f"{target.name}.{secrets.token_hex(8)}")
    made.mkdir()
    try:
        try:
            os.link(file.resolve(), made / "model.gguf")  # os.link does not follow a symbolic link
        except OSError as error:
            raise ValueError(f"{target}: no hard link to {file}: {error.strerror}; use its file system") from None
        tokenizer, control = _tokenizer(made, file, metadata)
        tokenizer.save_pretrained(made)
        strips = (config["model_type"], metadata.get("tokenizer.ggml.model")) == ("phi3", "llama")
        added = _correct_added_tokens(made / "tokenizer.json", config["vocab_size"], control, strips)
        config["eos_token_id"] = _end_tokens(metadata, added)
        (made / "config.json").write_text(json.dumps(config, indent=1))
        made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _tokenizer(directory: Path, file: Path, metadata: dict[str, Value]) -> tuple[Any, dict[str, int]]:
    """Return the tokenizer of the file in the directory, as an object of transformers, and its control tokens."""
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(f"{file}: tokenizer.ggml.tokens is missing: {ORIGINAL}")
    model, kind = str(metadata.get("tokenizer.ggml.model")), str(metadata.get("tokenizer.ggml.pre"))
    if model not in {"gpt2", "llama"}:
        raise ValueError(f"{file}: tokenizer.ggml.model {model[:40]!r} is not supported: {ORIGINAL}")
    if model == "gpt2" and kind not in PRE_TOKENIZERS | DIGITS:
        raise ValueError(f"{file}: tokenizer.ggml.pre {kind[:40]!r} is not supported: {ORIGINAL}")
    try:
        from tokenizers import decoders, normalizers, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import get_gguf_tokenizer
    except ImportError as error:
        raise ImportError(f"{error}; {INSTALL}") from None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file="model.gguf")
        _, names, _ = get_gguf_tokenizer(str(directory / "model.gguf"))
    except Exception as error:  # noqa: BLE001 - the file is not trusted, and transformers checks little
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{file}: the tokenizer is not supported ({reason}): {ORIGINAL}") from None
    backend = tokenizer.backend_tokenizer
    if model == "llama" and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        # SentencePiece and llama.cpp add a space to every text. Metaspace does not if the text begins with one.
        rules: list[Any] = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        if metadata.get("tokenizer.ggml.add_space_prefix") is False:
            del rules[0]
            parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
            backend.decoder = decoders.Sequence(list(parts))
        backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(rules), None
    if kind in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    if kind in WHOLE_WORDS:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = metadata.get("tokenizer.ggml.add_bos_token", True)
    typed = enumerate(zip(names["tokens"], names.get("token_type", ()), strict=False))
    return tokenizer, {text: index for index, (text, of_token) in typed if of_token == CONTROL}


def _correct_added_tokens(file: Path, size: int, control: dict[str, int], strips: bool) -> dict[str, int]:
    """Correct the added tokens in tokenizer.json, and return their ids: they are not part of ordinary text.

    Tokens with ids of `size` or more are removed: transformers adds them, but they are not in the GGUF file. Control
    tokens whose names contain characters outside a byte-level vocabulary are added, because transformers omits them.
    """
    values = json.loads(file.read_text())
    vocab, added = values["model"]["vocab"], [token for token in values["added_tokens"] if token["id"] < size]
    names, known = {index: name for name, index in vocab.items()}, {token["id"] for token in added}
    for text, index in control.items():
        if index not in known and index in names:
            vocab[text] = vocab.pop(names[index])
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": index, "content": text, "special": True, **flags})
    for token in added:
        token["rstrip"] |= strips and token["content"] not in KEEP_SPACE
    for token in (values["post_processor"] or {}).get("special_tokens", {}).values():
        token["ids"] = [vocab.get(*pair) for pair in zip(token["tokens"], token["ids"], strict=True)]
    values["added_tokens"] = added
    file.write_text(json.dumps(values, ensure_ascii=False))
    return {token["content"]: token["id"] for token in added}


def _end_tokens(metadata: dict[str, Value], added: dict[str, int]) -> list[int]:
    """Return the tokens that end an answer. `added` has the ids of the tokens that are not part of ordinary text."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    texts = set(END_TEXTS)
    if {"<|return|>", "<|call|>"} <= added.keys():  # in the format of gpt-oss, <|end|> ends only a part of an answer
        texts.remove("<|end|>")
    found = [one for one in named if isinstance(one, int)] + [
        added[one] for one in END_TEXTS if one in texts & added.keys()
    ]
    return list(dict.fromkeys(found))
