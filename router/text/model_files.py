"""Reads a model's context length, vocabulary size and stop tokens from its configuration files."""

from pathlib import Path
from typing import Any

from router.dispatch.requests import ModelCard
from shared.errors import ConfigError
from shared.limits import INT32_MAX
from shared.model_files import read_end_tokens, read_limits, read_object

# The sampling parameters that generation_config.json may set, with their smallest and largest values.
SAMPLING = {"temperature": (0, 2), "top_k": (-1, INT32_MAX), "top_p": (1e-6, 1), "min_p": (0, 1)}
SAMPLING |= {"repetition_penalty": (1e-6, 100)}


def read_model(
    directory: Path, name: str, max_model_len: int, created: int, generation_config: str = "auto"
) -> ModelCard:
    """Return the model's card. If `max_model_len` is 0, the card has the model's own maximum length. Raises ConfigError
    if a file is invalid."""
    positions, vocab_size = read_limits(directory)
    file = directory / "generation_config.json"
    generation = read_object(file) if file.exists() else {}
    return ModelCard(
        name,
        min(positions, max_model_len) if max_model_len else positions,
        vocab_size,
        read_end_tokens(directory),
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
