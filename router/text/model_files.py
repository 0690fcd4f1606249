"""Reads a model's context length, vocabulary size and stop tokens from its configuration files."""

import json
from pathlib import Path
from typing import Any

from router.dispatch.requests import ModelCard
from shared.errors import ConfigError
from shared.model_files import text_values

MAX_CONFIG_BYTES = 1 << 20
MAX_COUNT = 2**31 - 1
# The maximum length, by its name in most models, GPT-2, DBRX and Kimi Linear.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")


def read_model(directory: Path, name: str, max_model_len: int, created: int) -> ModelCard:
    """Return the model's card, with the model's own limit if `max_model_len` is 0. Raises ConfigError for invalid
    files."""
    config = text_values(read_object(directory / "config.json"))
    positions = _count(config, next((key for key in POSITIONS if key in config), POSITIONS[0]), directory)
    vocab_size = _count(config, "vocab_size", directory)
    return ModelCard(
        name,
        min(positions, max_model_len) if max_model_len else positions,
        vocab_size,
        _stop_ids(directory, config, vocab_size),
        created,
    )


def _stop_ids(directory: Path, config: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the stop tokens of generation_config.json or, if it has none, of config.json."""
    generation = directory / "generation_config.json"
    found = read_object(generation).get("eos_token_id") if generation.exists() else None
    ids = found if found is not None else config.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
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
    """Return the JSON object in a file. Raises ConfigError, naming the file, if the file has no readable JSON
    object."""
    try:
        if file.stat().st_size > limit:
            raise ConfigError(f"{file} is larger than {limit} bytes, so it is not a model's configuration")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; --model must name a Hugging Face model directory") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return value
