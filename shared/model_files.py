"""The files of a model, in a local directory or in a snapshot downloaded from the Hugging Face hub."""

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
OTHER_DEMO_MODELS = ("hybrid", "moe")  # next to DEMO_MODEL; the wheel omits them, because they would triple its size
# Values that Baton requires, but that Gemma 3's files omit from `text_config`, because they are transformers' defaults.
GEMMA3 = {"vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072}
SHARED = ("bos_token_id", "eos_token_id")  # keys that a multimodal model may have outside `text_config`
MAX_CONFIG_BYTES = 1 << 20
MAX_COUNT = 2**31 - 1
# The names of the maximum length in config.json. Most models use the first; GPT-2, DBRX and Kimi Linear use the others.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_multimodal(config: dict[str, Any]) -> bool:
    """Return whether the values of config.json describe a model that has more than a text decoder."""
    return isinstance(config.get("text_config"), dict) or isinstance(config.get("vision_config"), dict)


def text_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of config.json that describe the text decoder: the values of `text_config`, if there is one."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config
    defaults = GEMMA3 if nested.get("model_type") == "gemma3_text" else {}
    shared = {key: config[key] for key in SHARED if nested.get(key) is None and key in config}
    if config.get("tie_word_embeddings") is not None:  # overrides the value in `text_config`, as in transformers
        shared["tie_word_embeddings"] = config["tie_word_embeddings"]
    return defaults | nested | shared


def served_name(model: str, given: str) -> str:
    """Return the model's name in the API: `given`, or if it is empty, the name of the directory or the hub id."""
    return given or (Path(model).resolve().name if Path(model).exists() else model)


def resolve(model: str) -> Path:
    """Return the model's directory.

    `model` is a directory, one of OTHER_DEMO_MODELS, or a hub id (`owner/name`), whose files are downloaded. Raises
    ValueError if there is no such model, or if the download fails.
    """
    try:
        path = Path(model).expanduser()
        if model and path.is_dir():
            return path
    except (OSError, RuntimeError) as error:  # no permission, too long a name, or `~` and an unknown user
        raise ValueError(f"model {model[:100]!r} cannot be read: {getattr(error, 'strerror', error)}") from None
    if model in OTHER_DEMO_MODELS:
        if (directory := DEMO_MODEL.with_name(model)).is_dir():
            return directory
        raise ValueError(
            f"model {model!r} is only in Baton's repository; in a checkout, give the directory demo/{model}"
        )
    if path.suffix == ".gguf" and path.is_file():
        raise ValueError(
            f"model {model!r} is a file; make a directory from it with: baton gguf {model}; or use a directory with "
            "the file and the original model's config.json and tokenizer.json"
        )
    if path.exists() or not HUB_ID.fullmatch(model):
        raise ValueError(f"model {model!r} is neither a directory nor a hub id such as Qwen/Qwen3-0.6B")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"model {model!r} is not a local directory; to download it, run in the repository: pip install '.[hub]'"
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (OSError, ValueError, RuntimeError) as error:  # includes all errors of the hub and the network
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        near = get_close_matches(path.name, (each.name for each in path.parent.glob("*/")), 1)
        hint = f" (did you mean {path.parent / near[0]}?)" if near else ""
        raise ValueError(
            f"model {model!r} is not a local directory{hint}, and downloading it failed: {reason}"
        ) from None


def read_limits(directory: Path) -> tuple[int, int]:
    """Return the model's maximum length and the size of its vocabulary, in tokens. Raises ConfigError if config.json
    is invalid."""
    config = text_values(read_object(directory / "config.json"))
    positions = _count(config, next((key for key in POSITIONS if key in config), POSITIONS[0]), directory)
    return positions, _count(config, "vocab_size", directory)


def read_end_tokens(directory: Path) -> frozenset[int]:
    """Return the end tokens of generation_config.json and of config.json together. After fine-tuning for chat, only one
    of these files may have the token that ends a turn. Raises ConfigError if a file is invalid."""
    file = directory / "generation_config.json"
    generation = read_object(file) if file.exists() else {}
    config, (_, vocab_size) = text_values(read_object(directory / "config.json")), read_limits(directory)
    found = [generation.get("eos_token_id"), config.get("eos_token_id")]
    ids = [each for some in found if some is not None for each in (some if isinstance(some, list) else [some])]
    if not all(type(identity) is int and 0 <= identity < vocab_size for identity in ids):
        raise ConfigError(f"{directory}: eos_token_id must be a token id below {vocab_size}, or a list of such ids")
    return frozenset(ids)


def _count(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= MAX_COUNT:
        shown = repr(value)[:60] if key in config else "missing"
        raise ConfigError(f"{directory / 'config.json'}: {key} is {shown}: it must be from 1 to {MAX_COUNT}")
    return value


def read_object(file: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises ConfigError, which names the file, if the file is missing,
    unreadable, larger than `limit` bytes, or not a JSON object."""
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= limit else b""
    except FileNotFoundError:
        raise ConfigError(f"{file}: missing; a model directory has config.json and *.safetensors") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if size > limit:
        raise ConfigError(f"{file}: larger than {limit} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError also if a number has more than 4,300 digits
        raise ConfigError(f"{file}: not valid JSON ({str(error)[:100]}); download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return value
