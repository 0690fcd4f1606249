"""Checks the values in a model's JSON files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

MAX_SIZE = 2**31 - 1
T = TypeVar("T")


class ConfigReader:
    """Reads a JSON object. If a value is invalid, methods raise ValueError, which names the file, the key and a fix."""

    def __init__(self, values: dict[str, Any], file: Path, prefix: str = "") -> None:
        self.values = values
        self._file = file
        self._prefix = prefix

    def refuse(self, key: str, fix: str) -> NoReturn:
        value = repr(self.values[key])[:60] if key in self.values else "missing"
        raise ValueError(f"{self._file}: {self._prefix}{key} is {value}: {fix}")

    def _read(self, key: str, default: T | None, fits: Callable[[Any], bool], fix: str) -> Any:
        """Return the key's value, or `default` if the value is missing or null. If `default` is None, the value is
        required."""
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

    def numbers(self, key: str, count: int, default: tuple[float, ...] | None = None) -> tuple[float, ...]:
        def fits(value: Any) -> bool:
            if not isinstance(value, list) or len(value) != count:
                return False
            return all(type(one) in {int, float} and abs(one) < 1e30 for one in value)

        return tuple(map(float, self._read(key, default, fits, f"it must be a list of {count} finite numbers")))

    def require(self, key: str, supported: Any, default: Any) -> None:
        """Raise ValueError unless the value of `key` is `supported`. A missing or null value counts as `default`."""
        value = self.values.get(key)
        if (default if value is None else value) != supported:
            self.refuse(key, f"only {json.dumps(supported)} is supported")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids under `key`, whose value is one id or a list of ids. Return () if the value is missing
        or null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            self.refuse(key, f"it must be a token id below vocab_size ({vocab_size}), or a list of such ids")
        return tuple(ids)

    def nested(self, key: str) -> "ConfigReader":
        """Return a reader of the object under `key`, or of an empty object if the key is missing."""
        values = self._read(key, {}, lambda value: isinstance(value, dict), "it must be an object")
        return ConfigReader(values, self._file, f"{self._prefix}{key}.")
