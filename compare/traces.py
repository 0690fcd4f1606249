"""Traces of public and own formats, read into rows: what each request asks for, before any token is drawn.

A row's prompt is a chain of pieces. Pieces of one key have the same tokens wherever they occur, so shared prefixes
are shared for real; the empty key is the request's own.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from compare.outcome import Slo
from shared.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for
OWN_FIELDS = {"t", "prompt", "prompt_len", "prefix_id", "prefix_len", "max_tokens", "session", "slo"}


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `prompt`, where the trace gives its tokens, is in place of the pieces."""

    pieces: tuple[tuple[str, int], ...]  # (key, tokens)
    max_tokens: int
    at_s: float | None = None  # None: the trace has lengths only
    session: str = ""
    slo: Slo | None = None
    prompt: tuple[int, ...] | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) if self.prompt is not None else sum(length for _, length in self.pieces)


Encode = Callable[[str], list[int]]
Fields = Mapping[str, Any]


def read_trace(path: Path, form: str = "auto", encode: Encode | None = None) -> list[Row]:
    """Rows in the order of their times, from 0 at the trace's beginning.

    Requests without a prompt or without an answer (BurstGPT's failures) are left out. `encode` makes tokens of a
    prompt that is text. Raises ConfigError: the file, the line and what is wrong with it.
    """
    rows: list[Row] = []
    number = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            form = detect_form(path) if form == "auto" else form
            if form not in FORMS:
                raise ConfigError(f"{form} is no format of a trace: give one of auto, {', '.join(FORMS)}")
            lines: Iterable[Any] = csv.DictReader(file) if form in CSV else file
            for number, line in enumerate(lines, 2 if form in CSV else 1):  # noqa: B007 - told in errors
                rows += _rows_of(line, form, encode)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except KeyError as error:
        raise ConfigError(f"{path}, line {number}: there is no {error}, which the format {form} has") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}, line {number}, read as {form}: {str(error)[:300]}") from None
    if not rows:
        raise ConfigError(f"{path}: no request in it")
    if len({row.at_s is None for row in rows}) > 1:
        raise ConfigError(f"{path}: some of its requests have a time and some have none")
    if rows[0].at_s is None:
        return rows
    rows.sort(key=lambda row: row.at_s or 0.0)
    begin = (rows[0].at_s or 0.0) if form in {"azure", "burstgpt"} else 0.0  # these tell the time of day
    return [replace(row, at_s=(row.at_s or 0.0) - begin) for row in rows]


def detect_form(path: Path) -> str:
    """By the first line. Raises ConfigError for one that no format begins with, OSError, UnicodeDecodeError."""
    with path.open(encoding="utf-8-sig") as file:
        first = file.readline(1 << 20)
    signs = {"ContextTokens": "azure", "Request tokens": "burstgpt", "num_prefill_tokens": "lengths"}
    signs |= {'"input_length"': "mooncake", '"t"': "own"}
    form = next((form for sign, form in signs.items() if sign in first), None)
    if form is None:
        raise ConfigError(f"{path}: its first line begins no trace that is known; force a format: {', '.join(FORMS)}")
    return form


def _rows_of(line: Any, form: str, encode: Encode | None) -> list[Row]:
    """The line's request; none where it is blank, or has no prompt or no answer."""
    if isinstance(line, str) and not line.strip():
        return []
    row = FORMS[form](_object(line) if isinstance(line, str) else line, encode)
    return [row] if row.prompt_len and row.max_tokens else []


def _object(line: str) -> Fields:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("is no JSON object")
    return fields


def _azure(fields: Fields, _: Encode | None) -> Row:
    """Azure LLM inference traces 2023 and 2024 (Patel et al., Splitwise)."""
    at = datetime.fromisoformat(fields["TIMESTAMP"])
    at_s = (at - datetime(1970, 1, 1, tzinfo=at.tzinfo)).total_seconds()
    return Row((("", _count(fields["ContextTokens"])),), _count(fields["GeneratedTokens"]), at_s)


def _burstgpt(fields: Fields, _: Encode | None) -> Row:
    """BurstGPT (Wang et al.): seconds, and no tokens where a request failed."""
    pieces = (("", _count(fields["Request tokens"])),)
    return Row(pieces, _count(fields["Response tokens"]), _seconds(fields["Timestamp"]))


def _lengths(fields: Fields, _: Encode | None) -> Row:
    """Vidur's and Etalon's processed traces: lengths, sometimes with times."""
    at_s = _seconds(fields["arrived_at"]) if fields.get("arrived_at") else None
    return Row((("", _count(fields["num_prefill_tokens"])),), _count(fields["num_decode_tokens"]), at_s)


def _mooncake(fields: Fields, _: Encode | None) -> Row:
    """Mooncake (Qin et al.): milliseconds, and a chain of hashes that tells which prompts begin alike."""
    length, ids = _count(fields["input_length"]), fields["hash_ids"]
    if len(ids) != -(-length // MOONCAKE_BLOCK):
        raise ValueError(f"{len(ids)} hash_ids for {length} tokens; one stands for {MOONCAKE_BLOCK}")
    starts = range(0, length, MOONCAKE_BLOCK)
    pieces = ((f"hash {int(key)}", min(MOONCAKE_BLOCK, length - start)) for key, start in zip(ids, starts, strict=True))
    return Row(tuple(pieces), _count(fields["output_length"]), _seconds(fields["timestamp"]) / 1000)


def _own(fields: Fields, encode: Encode | None) -> Row:
    """{t, prompt | prompt_len [, prefix_id, prefix_len], max_tokens [, session, slo]}; t in seconds."""
    if unknown := sorted(set(fields) - OWN_FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(OWN_FIELDS))}")
    rest = Row(
        (), _count(fields["max_tokens"]), _seconds(fields["t"]), str(fields.get("session", "")), _slo(fields.get("slo"))
    )
    if "prompt" in fields:
        prompt = fields["prompt"]
        if isinstance(prompt, str):
            if encode is None:
                raise ValueError("prompt is text and nothing here can make tokens of it: give token ids or prompt_len")
            prompt = encode(prompt)
        return replace(rest, prompt=tuple(_count(token) for token in prompt))
    length, prefix = _count(fields["prompt_len"]), _count(fields.get("prefix_len", 0))
    if prefix > length or (prefix and "prefix_id" not in fields):
        raise ValueError("prefix_len needs a prefix_id, and may not be over prompt_len")
    shared = ((f"prefix {fields['prefix_id']}", prefix),) if prefix else ()
    return replace(rest, pieces=(*shared, ("", length - prefix)))


def _slo(limits: Any) -> Slo | None:
    if limits is not None and (not isinstance(limits, dict) or set(limits) - {"ttft_ms", "tbt_ms", "tbt_of"}):
        raise ValueError(f"slo is {limits!r}; it may have ttft_ms, tbt_ms and tbt_of")
    return Slo(**limits) if limits else None


def _count(value: object) -> int:
    number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else -1
    if not 0 <= number < 2**31:
        raise ValueError(f"{value!r} is no number of tokens")
    return number


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < 1e10:
        raise ValueError(f"{value!r} is no time")
    return seconds


FORMS: dict[str, Callable[[Fields, Encode | None], Row]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "lengths": _lengths,
    "mooncake": _mooncake,
    "own": _own,
}
CSV = frozenset({"azure", "burstgpt", "lengths"})
