"""Reads a model's context length, vocabulary size and stop tokens from its configuration files."""

from pathlib import Path
from typing import Any

from router.dispatch.requests import ModelCard
from shared.errors import ConfigError
from shared.limits import INT32_MAX
from shared.model_files import read_limits, read_object, text_values

# The sampling parameters that generation_config.json may set, with the smallest and the largest value.
SAMPLING = {"temperature": (0, 2), "top_k": (-1, INT32_MAX), "top_p": (1e-6, 1), "min_p": (0, 1)}
SAMPLING |= {"repetition_penalty": (1e-6, 100)}


def read_model(
    directory: Path, name: str, max_model_len: int, created: int, generation_config: str = "auto"
) -> ModelCard:
    """Return the model's card. If `max_model_len` is 0, the card has the model's own maximum length. Raises ConfigError
    if a file is invalid."""
    config = text_values(read_object(directory / "config.json"))
    positions, vocab_size = read_limits(directory)
    file = directory / "generation_config.json"
    generation = read_object(file) if file.exists() else {}
    return ModelCard(
        name,
        min(positions, max_model_len) if max_model_len else positions,
        vocab_size,
        _stop_ids(directory, config, generation, vocab_size),
        created,
        sampling=_sampling(file, generation) if generation_config == "auto" else {},
    )


def _sampling(file: Path, generation: dict[str, Any]) -> dict[str, float]:
    found = {name: value for name in SAMPLING if (value := generation.get(name)) is not None}
    for name, value in found.items():
        low, high = SAMPLING[name]
        if type(value) not in ((int,) if name == "top_k" else (int, float)) or not low <= value <= high:
            raise ConfigError(f"{file}: {name} is {value!r:.60}: it must be a number from {low} to {high}")
    return found


def _stop_ids(directory: Path, config: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the stop tokens of generation_config.json and of config.json. After fine-tuning for chat, only one of the
    files may have the token that ends a turn."""
    found = [generation.get("eos_token_id"), config.get("eos_token_id")]
    ids = [each for some in found if some is not None for each in (some if isinstance(some, list) else [some])]
    if not all(type(identity) is int and 0 <= identity < vocab_size for identity in ids):
        raise ConfigError(f"{directory}: eos_token_id must be a token id below {vocab_size}, or a list of such ids")
    return frozenset(ids)
