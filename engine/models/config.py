"""Reads the architecture and the end tokens of a model before memory is allocated. A model's own code is never run."""

from collections.abc import Iterable
from pathlib import Path

from shared.config_reader import ConfigReader
from shared.model_files import read_object


def check_architecture(keys: ConfigReader, supported: Iterable[str]) -> str:
    """Return the architecture's name. Raise ValueError if it is not in `supported`.

    The code that `auto_map` names is never run: a supported architecture does not need it.
    """
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
        if "auto_map" in keys.values:
            keys.refuse("auto_map", "code that comes with a model is never run, and its architecture is not supported")
        keys.refuse("architectures", f"it must be one of {', '.join(supported)}")
    return str(names[0])


def eos_token_ids(keys: ConfigReader, directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens in config.json and in generation_config.json.

    Both files are read, because chat models have an end-of-turn token only in generation_config.json.
    """
    ids = keys.token_ids("eos_token_id", vocab_size)
    file = directory / "generation_config.json"
    if file.exists():
        ids += ConfigReader(read_object(file), file).token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))
