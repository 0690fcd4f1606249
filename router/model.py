"""What the router knows of the model without loading it: its name, its context, its vocabulary and its stop tokens."""

import json
from pathlib import Path
from typing import Any

from router.generation import Model
from shared.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20


def read_model(directory: Path, name: str, max_model_len: int, created: int) -> Model:
    """Raises ConfigError naming the file and the key. `max_model_len` 0: the model's own."""
    config = _read(directory / "config.json")
    positions = _count(config, "max_position_embeddings", directory)
    return Model(
        name,
        min(positions, max_model_len) if max_model_len else positions,
        _count(config, "vocab_size", directory),
        _stop_ids(directory, config),
        created,
    )


def _stop_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """Of generation_config.json where there is one, as it is the one that its authors tune."""
    generation = directory / "generation_config.json"
    found = _read(generation).get("eos_token_id") if generation.exists() else None
    ids = found if found is not None else config.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(identity, int) for identity in ids):
        raise ConfigError(f"{directory}: eos_token_id must be a token id or a list of them")
    return frozenset(ids)


def _count(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{directory / 'config.json'}: {key} must be a positive number, not {value!r}")
    return value


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} is over {MAX_CONFIG_BYTES} bytes: not a model's configuration")
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; --model must name a Hugging Face model directory") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return value
