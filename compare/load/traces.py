"""Reads traces in public formats and in Baton's own format. A row describes one request, before its tokens are drawn.

A row's prompt is a list of pieces. Pieces with the same key have the same tokens in all prompts, so prompts can share
prefixes. The tokens of a piece with an empty key are not shared.
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from compare.load.outcome import LatencySlo
from shared.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens per hash id
OWN_FIELDS = {"t", "prompt", "prompt_len", "prefix_id", "prefix_len", "max_tokens", "session", "slo"}
SIGNS = {"ContextTokens": "azure", "Request tokens": "burstgpt", '"input_length"': "mooncake", '"t"': "own"}
CSV = frozenset({"azure", "burstgpt"})
Encode = Callable[[str], list[int]]
Fields = Mapping[str, Any]
NO_SLO = LatencySlo()
MOST_IDS = 2**31  # upper limit of the number of token ids if the model's vocabulary is unknown


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. If the trace contains the prompt's tokens, `prompt` has them and `pieces` is empty."""

    pieces: tuple[tuple[str, int], ...]  # (key, number of tokens)
    max_tokens: int
    at_s: float = 0.0
    slo: LatencySlo | None = None
    prompt: tuple[int, ...] | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) if self.prompt is not None else sum(length for _, length in self.pieces)


def read_trace(
    path: Path, form: str = "auto", encode: Encode | None = None, *, slo: LatencySlo = NO_SLO, vocab_size: int = 0
) -> list[TraceRow]:
    """Return the rows in the order of their times, which are seconds since the start of the trace.

    Requests with an empty prompt or an empty answer, such as failed requests in BurstGPT, are left out. `encode`
    tokenizes prompts that are text. `slo` supplies the limits that are missing in the SLO of a row. `vocab_size` is the
    size of the model's vocabulary (0: unknown). Raises ConfigError, which names the file, the line and the problem.
    """
    rows: list[TraceRow] = []
    number = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            form = detect_form(path) if form == "auto" else form
            if form not in FORMS:
                raise ConfigError(f"--trace-format {form}: must be auto, {', '.join(FORMS)}")
            lines: Iterable[Any] = csv.DictReader(file) if form in CSV else file
            for number, line in enumerate(lines, 2 if form in CSV else 1):  # noqa: B007 - used in errors
                if not isinstance(line, str) or line.strip():
                    row = FORMS[form](
                        _object(line) if isinstance(line, str) else line, encode, slo, vocab_size or MOST_IDS
                    )
                    rows += [row] if row.prompt_len and row.max_tokens else []
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except KeyError as error:
        raise ConfigError(f"{path}, line {number}: field {error} of the format {form} is missing") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}, line {number}, read as {form}: {str(error)[:300]}") from None
    if not rows:
        raise ConfigError(f"{path}: contains no request")
    rows.sort(key=lambda row: row.at_s)
    begin_s = rows[0].at_s if form in CSV else 0.0  # times in the CSV formats need not start at 0
    return [replace(row, at_s=row.at_s - begin_s) for row in rows]


def detect_form(path: Path) -> str:
    """Return the format, as detected from the file's first line. Raises ConfigError if the format is unknown; raises
    OSError or UnicodeDecodeError if the file cannot be read."""
    with path.open(encoding="utf-8-sig") as file:
        first = file.readline(1 << 20)
    if form := next((form for sign, form in SIGNS.items() if sign in first), None):
        return form
    raise ConfigError(f"{path}: its first line matches no known format; give --trace-format: {', '.join(FORMS)}")


def _object(line: str) -> Fields:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("the line is not a JSON object")
    return fields


def _azure(fields: Fields, *_: object) -> TraceRow:
    """Parse a row of the Azure LLM inference traces 2023 and 2024 (Patel et al., Splitwise)."""
    at = datetime.fromisoformat(fields["TIMESTAMP"])
    at_s = (at - datetime(1970, 1, 1, tzinfo=at.tzinfo)).total_seconds()
    return TraceRow((("", _count(fields, "ContextTokens")),), _count(fields, "GeneratedTokens"), at_s)


def _burstgpt(fields: Fields, *_: object) -> TraceRow:
    """Parse a row of BurstGPT (Wang et al.). Times are in seconds, and a failed request has 0 response tokens."""
    pieces = (("", _count(fields, "Request tokens")),)
    return TraceRow(pieces, _count(fields, "Response tokens"), _seconds(fields["Timestamp"]))


def _mooncake(fields: Fields, *_: object) -> TraceRow:
    """Parse a row of Mooncake (Qin et al.). Times are in milliseconds. Blocks with equal ids have equal tokens."""
    length, ids = _count(fields, "input_length"), fields["hash_ids"]
    if len(ids) != -(-length // MOONCAKE_BLOCK):
        raise ValueError(f"{len(ids)} hash_ids for {length} tokens; each id stands for {MOONCAKE_BLOCK} tokens")
    starts = range(0, length, MOONCAKE_BLOCK)
    pieces = ((f"hash {int(key)}", min(MOONCAKE_BLOCK, length - start)) for key, start in zip(ids, starts, strict=True))
    return TraceRow(tuple(pieces), _count(fields, "output_length"), _seconds(fields["timestamp"]) / 1000)


def _own(fields: Fields, encode: Encode | None, slo: LatencySlo, num_ids: int) -> TraceRow:
    """Parse a row of our own format: {t, prompt | prompt_len [, prefix_id, prefix_len], max_tokens [, session, slo]}.

    `t` is the request's time in seconds.
    """
    if unknown := sorted(set(fields) - OWN_FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}; the known fields are {', '.join(sorted(OWN_FIELDS))}")
    limits = fields.get("slo")
    if limits is not None and (not isinstance(limits, dict) or set(limits) - {"ttft_ms", "tbt_ms", "tbt_of"}):
        raise ValueError(f"slo is {limits!r}; it may have ttft_ms, tbt_ms and tbt_of")
    own = replace(slo, **limits) if limits else None
    row = TraceRow((), _count(fields, "max_tokens"), _seconds(fields["t"]), own)
    if "prompt" in fields:
        prompt = fields["prompt"]
        if isinstance(prompt, str):
            if encode is None:
                raise ValueError("prompt is text, but there is no tokenizer: give token ids or prompt_len")
            prompt = encode(prompt)
        if invalid := [token for token in prompt if type(token) is not int or not 0 <= token < num_ids]:
            raise ValueError(
                f"prompt has {invalid[0]!r}; give token ids of the model, which are from 0 to {num_ids - 1}"
            )
        return replace(row, prompt=tuple(prompt))
    length, prefix = _count(fields, "prompt_len"), _count({"prefix_len": 0, **fields}, "prefix_len")
    if prefix > length or (prefix and "prefix_id" not in fields):
        raise ValueError("prefix_len needs a prefix_id, and must not exceed prompt_len")
    shared = ((f"prefix {fields['prefix_id']}", prefix),) if prefix else ()
    return replace(row, pieces=(*shared, ("", length - prefix)))


def _count(fields: Fields, name: str) -> int:
    value = fields[name]
    with suppress(ValueError):
        number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else -1
        if 0 <= number < 2**31:
            return number
    raise ValueError(f"{name} is {value!r}, which is not a number of tokens")


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < 1e10:
        raise ValueError(f"{value!r} is not a time")
    return seconds


FORMS: dict[str, Callable[[Fields, Encode | None, LatencySlo, int], TraceRow]] = {
    "azure": _azure, "burstgpt": _burstgpt, "mooncake": _mooncake, "own": _own
}  # fmt: skip
