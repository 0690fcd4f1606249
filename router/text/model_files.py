"""Reads a model's context length, vocabulary size and stop tokens from its configuration files."""

from pathlib import Path
from typing import Any

from router.dispatch.requests import ModelCard
from shared.errors import ConfigError
from shared.model_files import read_limits, read_object, text_values


def read_model(directory: Path, name: str, max_model_len: int, created: int) -> ModelCard:
    """Return the model's card. If `max_model_len` is 0, the card has the model's own maximum length. Raises ConfigError
    if a file is invalid."""
    config = text_values(read_object(directory / "config.json"))
    positions, vocab_size = read_limits(directory)
    return ModelCard(
        name,
        min(positions, max_model_len) if max_model_len else positions,
        vocab_size,
        _stop_ids(directory, config, vocab_size),
        created,
    )


def _stop_ids(directory: Path, config: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the stop tokens of generation_config.json and of config.json. After fine-tuning for chat, only one of the
    files may have the token that ends a turn."""
    generation = directory / "generation_config.json"
    found = [read_object(generation).get("eos_token_id") if generation.exists() else None, config.get("eos_token_id")]
    ids = [each for some in found if some is not None for each in (some if isinstance(some, list) else [some])]
    if not all(type(identity) is int and 0 <= identity < vocab_size for identity in ids):
        raise ConfigError(f"{directory}: eos_token_id must be a token id below {vocab_size}, or a list of such ids")
    return frozenset(ids)
