"""Reads a model's JSON files and checks their values before memory is allocated. Code of a model is never run."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shared.model_files import read_object

MAX_SIZE = 2**31 - 1
T = TypeVar("T")


class ConfigReader:
    """Gives access to a JSON object. For invalid values, methods raise ValueError with the file, key and fix."""

    def __init__(self, values: dict[str, Any], file: Path, prefix: str = "") -> None:
        self.values = values
        self._file = file
        self._prefix = prefix

    def refuse(self, key: str, fix: str) -> NoReturn:
        value = repr(self.values[key])[:60] if key in self.values else "missing"
        raise ValueError(f"{self._file}: {self._prefix}{key} is {value}: {fix}")

    def _read(self, key: str, default: T | None, fits: Callable[[Any], bool], fix: str) -> Any:
        """Return the key's value, or `default` if it is missing or null. If `default` is None, it is required."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not fits(value):
            self.refuse(key, fix)
        return value

    def size(self, key: str, default: int | None = None) -> int:
        fix = f"it must be an integer from 1 to {MAX_SIZE}"
        return int(self._read(key, default, lambda value: type(value) is int and 0 < value <= MAX_SIZE, fix))

    def positive(self, key: str, default: float | None = None) -> float:
        def fits(value: Any) -> bool:
            return type(value) in {int, float} and 0 < value < 1e30

        return float(self._read(key, default, fits, "it must be a positive finite number"))

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._read(key, default, lambda value: type(value) is bool, "it must be true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._read(key, default, lambda value: type(value) is str, "it must be a string"))

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == count and all(type(one) in {int, float} for one in value)

        return tuple(map(float, self._read(key, None, fits, f"it must be a list of {count} numbers")))

    def require(self, key: str, supported: Any, default: Any) -> None:
        """Refuse the model unless the value of `key`, by default `default`, is `supported`."""
        value = self.values.get(key)
        if (default if value is None else value) != supported:
            self.refuse(key, f"only {json.dumps(supported)} is supported")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids under a key. Its value is an id or a list of ids; there are no ids if it is missing or
        null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            self.refuse(key, f"it must be a token id below vocab_size ({vocab_size}), or a list of such ids")
        return tuple(ids)

    def nested(self, key: str) -> "ConfigReader":
        """Return a reader of the object under `key`, or of an empty object if the key is missing."""
        values = self._read(key, {}, lambda value: isinstance(value, dict), "it must be an object")
        return ConfigReader(values, self._file, f"{self._prefix}{key}.")


def check_architecture(keys: ConfigReader, supported: Iterable[str]) -> str:
    """Return the architecture's name. Refuse a model that is not `supported`.

    The code that `auto_map` names is never run: a supported architecture does not need it.
    """
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in supported:
        if "auto_map" in keys.values:
            keys.refuse("auto_map", "code that comes with a model is never run, and its architecture is not supported")
        keys.refuse("architectures", f"it must be one of {', '.join(supported)}")
    return str(names[0])


def eos_token_ids(keys: ConfigReader, directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids in both files, because chat models have an end-of-turn token only in generation_config.json."""
    ids = keys.token_ids("eos_token_id", vocab_size)
    file = directory / "generation_config.json"
    if file.exists():
        ids += ConfigReader(read_object(file), file).token_ids("eos_token_id", vocab_size)
    return tuple(dict.fromkeys(ids))
