"""Traffic: requests with their times, prompts and lengths, drawn once per seed and the same for every arm.

A trace's own times are taken as they are, or not at all: they are never stretched to a rate.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compare.outcome import Slo
from compare.presets import NAMES, preset_rows, source_of
from compare.traces import Encode, Row, read_trace
from shared.errors import ConfigError

TIMES, LENGTHS = 1, 2  # what a stream of random numbers is for


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it is due, in seconds from the run's start, and what it asks for."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    session: str = ""
    slo: Slo | None = None  # its own, in place of the run's


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals in the order of their times. `notes` is the "traffic" part of a report."""

    name: str
    arrivals: tuple[Arrival, ...]
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """What to draw traffic from. Without a rate a trace's own times hold.

    `burstiness` is the shape of gamma-distributed gaps: 1 is Poisson, less comes in bursts. `too_long` says what to do
    with requests over `max_model_len` tokens (0: any length): "error", "cut" the prompt at its end, or "drop".
    """

    source: str  # a preset's name, or a trace's path
    form: str = "auto"
    rate: float | None = None  # requests per second
    burstiness: float = 1.0
    num_requests: int | None = None
    start_s: float = 0.0  # of the trace's own times
    duration_s: float | None = None
    scale_tokens: float = 1.0
    too_long: str = "error"
    max_model_len: int = 0


class Vocabulary:
    """Ids that prompts may be drawn from: all below `size` but the excluded ones, the model's special tokens."""

    def __init__(self, size: int, excluded: Collection[int] = ()) -> None:
        ids = [token for token in range(size) if token not in frozenset(excluded)]
        if not ids:
            raise ConfigError(f"a vocabulary of {size} tokens has none left that a prompt may hold")
        self._ids = np.array(ids, dtype=object)  # one object for each id, however many prompts hold it

    def draw(self, seed: int, key: str, count: int) -> list[int]:
        """The first `count` tokens of the endless text that seed and key stand for."""
        digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
        picked: list[int] = self._ids[(random.random(count) * len(self._ids)).astype(np.int64)].tolist()
        return picked


def draw_traffic(
    plan: TrafficPlan,
    seed: int,
    vocabulary: Vocabulary,
    encode: Encode | None = None,
    trace: Sequence[Row] | None = None,
) -> Traffic:
    """The traffic of a seed, the same at every call. `trace`: of the plan's source, where it has been read already.

    Raises ConfigError: what is wrong, and the flag to change.
    """
    rows, laps = _rows(plan, seed, lambda: trace or read_trace(Path(plan.source), plan.form, encode))
    rows = [_scaled(row, plan.scale_tokens) for row in rows]
    kept, cut = _fitted(rows, plan)
    own = [row for row in kept if row is not None]
    if not own:
        raise ConfigError(
            f"{plan.source}: no request is left to send; widen --start and --duration, or leave --too-long drop out"
        )
    arrivals = tuple(_arrival(row, index, seed, vocabulary) for index, row in enumerate(kept) if row is not None)
    notes = _notes(arrivals, plan) | {"cut": cut, "refused": len(kept) - len(own), "laps": laps}
    return Traffic(_name(plan), arrivals, notes)


def _name(plan: TrafficPlan) -> str:
    return plan.source if plan.source in NAMES else Path(plan.source).stem


# ---- which requests, and when --------------------------------------------------------------------------------------


def _rows(plan: TrafficPlan, seed: int, read: Callable[[], Sequence[Row]]) -> tuple[list[Row], int]:
    """Rows with their times, and how often a trace was gone through to have enough of them."""
    for name, value in (("--rate", plan.rate), ("--burstiness", plan.burstiness), ("--duration", plan.duration_s)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} {value}: must be over 0")
    if plan.source in NAMES:
        at_s = _times(plan, seed, None)
        random = np.random.default_rng([seed, LENGTHS])
        drawn = preset_rows(plan.source, len(at_s), random)
        return [replace(row, at_s=at) for row, at in zip(drawn, at_s, strict=True)], 1
    trace = read()
    if plan.rate is None:
        return _own_times(plan, trace), 1
    at_s = _times(plan, seed, len(trace))
    first = int(np.random.default_rng([seed, LENGTHS]).integers(len(trace)))  # so that seeds differ in lengths too
    rows = [_lap(trace[(first + index) % len(trace)], index // len(trace), at) for index, at in enumerate(at_s)]
    return rows, -(-len(rows) // len(trace))


def _own_times(plan: TrafficPlan, trace: Sequence[Row]) -> list[Row]:
    if trace[0].at_s is None:
        raise ConfigError(f"{plan.source} has lengths and no times: give --rate")
    until = plan.start_s + plan.duration_s if plan.duration_s is not None else float("inf")
    inside = [row for row in trace if plan.start_s <= (row.at_s or 0.0) < until][: plan.num_requests]
    return [replace(row, at_s=(row.at_s or 0.0) - plan.start_s) for row in inside]


def _lap(row: Row, lap: int, at_s: float) -> Row:
    """The row again: with other tokens than the lap before, whose prompts may still be cached."""
    pieces = tuple((key and f"lap {lap} {key}", length) for key, length in row.pieces)
    return replace(row, at_s=at_s, pieces=pieces)


def _times(plan: TrafficPlan, seed: int, most: int | None) -> list[float]:
    """Seconds, with gamma-distributed gaps. One seed's times at two rates are the same up to the unit of time."""
    if plan.rate is None:
        raise ConfigError(f"{plan.source} has no times of its own: give --rate")
    count = plan.num_requests
    if count is None:
        if plan.duration_s is None and most is None:
            raise ConfigError(f"{plan.source} has no end of its own: give --duration")
        count = most if plan.duration_s is None else None
    random = np.random.default_rng([seed, TIMES])
    at_s: list[float] = []
    now = 0.0
    while count is None or len(at_s) < count:
        now += float(random.gamma(plan.burstiness, 1 / plan.burstiness)) / plan.rate
        if plan.duration_s is not None and now >= plan.duration_s:
            break
        at_s.append(now)
    return at_s


# ---- how long ------------------------------------------------------------------------------------------------------


def _scaled(row: Row, scale: float) -> Row:
    """Both lengths times `scale`, at least 1; borders between pieces are scaled, so shared prefixes stay shared."""
    if not 0 < scale < float("inf"):
        raise ConfigError(f"--scale-tokens {scale}: must be over 0")
    if scale == 1:
        return row
    if row.prompt is not None:
        raise ConfigError("the trace gives its prompts' tokens, which --scale-tokens cannot change: leave it out")
    pieces, end, done = [], 0, 0
    for key, length in row.pieces:
        end += length
        pieces.append((key, round(end * scale) - done))
        done = round(end * scale)
    if not done:
        pieces = [(row.pieces[-1][0], 1)]
    return replace(row, pieces=tuple(pieces), max_tokens=max(1, round(row.max_tokens * scale)))


def _fitted(rows: Sequence[Row], plan: TrafficPlan) -> tuple[list[Row | None], int]:
    """Rows within the context, None for one that is left out; and the number of those that were cut."""
    limit = plan.max_model_len
    long = [row for row in rows if limit and row.prompt_len + row.max_tokens > limit]
    if long and plan.too_long == "error":
        worst = max(row.prompt_len + row.max_tokens for row in long)
        fits = limit / worst * plan.scale_tokens
        raise ConfigError(
            f"{len(long)} of {len(rows)} requests are over the {limit} tokens that the model takes (the longest has"
            f" {worst}): give --scale-tokens {fits:.2g} or less, or --too-long cut or drop"
        )
    if plan.too_long == "drop":
        return [None if limit and row.prompt_len + row.max_tokens > limit else row for row in rows], 0
    over = {id(row) for row in long}
    return [_cut(row, limit) if id(row) in over else row for row in rows], len(long)


def _cut(row: Row, limit: int) -> Row:
    max_tokens = min(row.max_tokens, max(1, limit // 2))
    left = limit - max_tokens
    if row.prompt is not None:
        return replace(row, prompt=row.prompt[:left], max_tokens=max_tokens)
    pieces = []
    for key, length in row.pieces:
        pieces.append((key, min(length, left)))
        left -= pieces[-1][1]
    return replace(row, pieces=tuple(pieces), max_tokens=max_tokens)


# ---- tokens --------------------------------------------------------------------------------------------------------


def _arrival(row: Row, index: int, seed: int, vocabulary: Vocabulary) -> Arrival:
    prompt = row.prompt
    if prompt is None:
        tokens: list[int] = []
        for key, length in row.pieces:
            tokens += vocabulary.draw(seed, key or f"request {index}", length)
        prompt = tuple(tokens)
    return Arrival(row.at_s or 0.0, prompt, row.max_tokens, row.session, row.slo)


def _notes(arrivals: Sequence[Arrival], plan: TrafficPlan) -> dict[str, Any]:
    def spread(lengths: list[int]) -> dict[str, float]:
        return {
            "mean": float(np.mean(lengths)),
            "p50": float(np.median(lengths)),
            "p99": float(np.percentile(lengths, 99)),
        }

    last = arrivals[-1].at_s
    return {
        "name": _name(plan),
        "source": source_of(plan.source) if plan.source in NAMES else plan.source,
        "num_requests": len(arrivals),
        "rate": plan.rate if plan.rate is not None else len(arrivals) / (plan.duration_s or last or 1.0),
        "duration_s": plan.duration_s or last,
        "scale_tokens": plan.scale_tokens,
        "prompt_tokens": spread([len(arrival.prompt) for arrival in arrivals]),
        "output_tokens": spread([arrival.max_tokens for arrival in arrivals]),
    }
