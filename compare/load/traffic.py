"""Traffic: requests with their times, prompts and lengths. Every arm gets the same traffic for the same seed.

Requests come from a trace or from a preset. A preset has log-normal distributions that were fitted to the lengths of a
public trace. If a rate is given, the times are random. A trace's own times are never scaled to a rate.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from compare.load.outcome import LatencySlo
from compare.load.traces import TraceRow
from compare.options import DEFAULT_PRESET, CompareOptions
from shared.errors import ConfigError

TIMES, LENGTHS = 1, 2  # seeds of two streams of random numbers
MOST_REQUESTS = 1_000_000  # maximum number of requests of a period, because all are drawn before it begins
OPEN_SESSIONS = 64  # maximum number of sessions that can be continued; a new session replaces the oldest one


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A log-normal distribution of numbers of tokens, clipped to the 1st and 99th percentile of its source."""

    mu: float
    sigma: float
    low: int
    high: int

    def draw(self, random: np.random.Generator) -> int:
        return int(np.clip(round(random.lognormal(self.mu, self.sigma)), self.low, self.high))


@dataclass(frozen=True, slots=True)
class Preset:
    """Distributions of the lengths of prompts and answers. `continues` is the share of requests that continue a
    session. The prompt of such a request is the session so far, which nodes may have cached, and then a new part. The
    length of the new part is drawn from `added`."""

    prompt: LengthDistribution
    answer: LengthDistribution
    source: str
    continues: float = 0.0
    added: LengthDistribution = LengthDistribution(0.0, 0.0, 1, 1)


_CHAT, _CODE = (f"Azure LLM inference trace 2023, {what}" for what in ("conversation", "code"))
PRESETS = {
    "chat": Preset(LengthDistribution(6.713, 0.967, 40, 4122), LengthDistribution(5.041, 0.908, 16, 612), _CHAT),
    "code": Preset(LengthDistribution(6.998, 1.344, 18, 7436), LengthDistribution(2.775, 0.838, 6, 247), _CODE),
    "rag-long": Preset(
        LengthDistribution(7.693, 0.805, 57, 3932),
        LengthDistribution(5.201, 0.815, 34, 3415),
        "arXiv summarization, as processed by Vidur",
    ),
    "agentic": Preset(
        LengthDistribution(8.733, 1.214, 1024, 94239),
        LengthDistribution(5.359, 1.360, 3, 1056),
        "Mooncake conversation trace, its first 900 s",
        continues=0.305,
        added=LengthDistribution(7.508, 1.167, 512, 33894),
    ),
}
MIX = {"chat": 0.5, "code": 0.25, "rag-long": 0.25}
PRESET_NAMES = (*PRESETS, "mix")
PRESET_RATE = 4.0  # requests per second; with the demo model, this rate keeps two cores busy without overloading them
PRESET_SCALE = 0.5  # factor for a preset's lengths, because the traces are traffic of larger models


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the traffic. `at_s` is its scheduled time in seconds since the run's start."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    slo: LatencySlo | None = None  # overrides the SLO of the run


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals in order of time. `notes` becomes the "traffic" part of a report."""

    arrivals: tuple[Arrival, ...]
    notes: dict[str, Any] = field(default_factory=dict)


class PromptVocabulary:
    """The token ids that prompts may contain: all below `size` except `excluded`, the ids of special tokens."""

    def __init__(self, size: int, excluded: Collection[int] = ()) -> None:
        ids = [token for token in range(size) if token not in frozenset(excluded)]
        if not ids:
            raise ConfigError(f"the model's vocabulary has {size} tokens, all special: prompts need other tokens")
        self._ids = np.array(ids, dtype=object)  # one Python object per id, shared by all prompts

    def draw(self, seed: int, key: str, count: int) -> list[int]:
        """Return the first `count` tokens of the pseudo-random sequence for this seed and key."""
        digest = hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=16).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
        drawn: list[int] = self._ids[(random.random(count) * len(self._ids)).astype(np.int64)].tolist()
        return drawn


class TrafficSource:
    """Draws the traffic of a session from its options. `limit` is the model's maximum context (0: no limit).

    Without --rate, a preset uses PRESET_RATE, and a trace uses its own times or, with --find-capacity, its mean rate.
    """

    def __init__(
        self, options: CompareOptions, vocabulary: PromptVocabulary, trace: Sequence[TraceRow], limit: int = 0
    ) -> None:
        self._options = options
        self._vocabulary = vocabulary
        self._trace = trace
        self._limit = limit
        self._preset = "" if options.trace else options.preset or DEFAULT_PRESET
        self._rate = PRESET_RATE if options.rate is None and self._preset else options.rate
        if options.find_capacity and trace:  # a search draws the times, so a trace may be shorter than the periods
            self._rate = len(trace) / max(options.duration, trace[-1].at_s - trace[0].at_s)
        self._scale = (
            options.scale_tokens if options.scale_tokens is not None else PRESET_SCALE if self._preset else 1.0
        )

    def draw(self, seed: int, rate: float | None = None) -> Traffic:
        """Return the traffic of a seed. Every call returns the same traffic. `rate` overrides the rate of the options.

        If a trace's own times are used, successive seeds get successive parts of the trace. If the traffic cannot be
        drawn, raises ConfigError, which names the flag to change.
        """
        options, rate = self._options, self._rate if rate is None else rate
        flags = ("--rate", rate), ("--burstiness", options.burstiness), ("--duration", options.duration)
        for name, value in (*flags, ("--scale-tokens", self._scale)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} {value}: must be over 0")
        if rate is not None and rate * options.duration > MOST_REQUESTS:
            raise ConfigError(
                f"{rate:g} requests/s for {options.duration:g} s: a period has at most {MOST_REQUESTS} requests; give a"
                " lower --rate or a shorter --duration"
            )
        fitted, num_cut, laps = self.rows(seed, rate)
        kept = [(index, row) for index, row in enumerate(fitted) if row is not None]
        arrivals = tuple(_arrival(row, index, seed, self._vocabulary) for index, row in kept)
        source = self._preset or str(options.trace)
        if not arrivals:
            raise ConfigError(
                f"{source}: no request is left to send for seed {seed}; change --start, --duration or --seeds, give "
                "--rate, or omit --too-long drop"
            )
        notes = {
            "name": self._preset or Path(source).stem,
            "source": _source_of(self._preset) if self._preset else source,
            "num_requests": len(arrivals),
            "rate": rate if rate is not None else len(arrivals) / options.duration,
            "duration_s": options.duration,
            "scale_tokens": self._scale,
            "prompt_tokens": spread([len(arrival.prompt) for arrival in arrivals]),
            "output_tokens": spread([arrival.max_tokens for arrival in arrivals]),
            "cut": num_cut,
            "refused": len(fitted) - len(arrivals),
            "laps": laps,
        }
        return Traffic(arrivals, notes)

    def check_trace(self) -> None:
        """With --too-long error, raise ConfigError if any row of the trace exceeds the model's context."""
        self._fitted([scaled(row, self._scale, self._scale) for row in self._trace])

    def rows(self, seed: int, rate: float | None = None) -> tuple[list[TraceRow | None], int, int]:
        """Return the rows of a seed with their times (None for a dropped row), the number of rows that were shortened,
        and the number of passes over the trace."""
        rows, laps = self._rows(seed, rate)
        return *self._fitted([scaled(row, self._scale, self._scale) for row in rows]), laps

    def _rows(self, seed: int, rate: float | None) -> tuple[list[TraceRow], int]:
        """Return the rows with their times, and the number of passes over the trace."""
        trace, duration_s = self._trace, self._options.duration
        if rate is None:
            since = self._options.start + (seed - 1) * duration_s
            return [replace(row, at_s=row.at_s - since) for row in trace if since <= row.at_s < since + duration_s], 1
        at_s = self._times(seed, rate)
        random = np.random.default_rng([seed, LENGTHS])
        if self._preset:
            rows = _preset_rows(self._preset, len(at_s), random)
            return [replace(row, at_s=at) for row, at in zip(rows, at_s, strict=True)], 1
        first = int(random.integers(len(trace)))  # start at a random row, so that lengths also differ between seeds
        rows = [_lap(trace[(first + index) % len(trace)], index // len(trace), at) for index, at in enumerate(at_s)]
        return rows, -(-len(rows) // len(trace))

    def _times(self, seed: int, rate: float) -> list[float]:
        """Return times with gamma-distributed gaps. A shape of 1 is a Poisson process; a lower shape is burstier.

        For one seed, the times at two rates differ only by a factor.
        """
        random, shape = np.random.default_rng([seed, TIMES]), self._options.burstiness
        gaps = iter(lambda: float(random.gamma(shape, 1 / shape)) / rate, None)
        return list(takewhile(lambda at: at < self._options.duration, accumulate(gaps)))

    def _fitted(self, rows: Sequence[TraceRow]) -> tuple[list[TraceRow | None], int]:
        """Return the rows, and the number of rows that were shortened. A row that does not fit the context is shortened
        with --too-long cut, and replaced by None with --too-long drop. With --too-long error, raise ConfigError."""
        limit, too_long = self._limit, self._options.too_long
        is_over = [bool(limit) and row.prompt_len + row.max_tokens > limit for row in rows]
        if any(is_over) and too_long == "error":
            worst = max(row.prompt_len + row.max_tokens for row in rows)
            raise ConfigError(
                f"{sum(is_over)} of {len(rows)} requests exceed the model's {limit} tokens (the longest has {worst}):"
                f" give --scale-tokens {limit / worst * self._scale:.2g} or less, or --too-long cut or drop"
            )
        cut = partial(_cut, limit=limit) if too_long == "cut" else lambda _: None
        fitted = [cut(row) if over else row for row, over in zip(rows, is_over, strict=True)]
        return fitted, sum(is_over) * (too_long == "cut")


def spread(lengths: Sequence[int]) -> dict[str, float]:
    p50, p99 = np.percentile(lengths, (50, 99))
    return {"mean": float(np.mean(lengths)), "p50": float(p50), "p99": float(p99)}


def _source_of(preset: str) -> str:
    if preset == "mix":
        return "; ".join(f"{share:.0%} {part}: {PRESETS[part].source}" for part, share in MIX.items())
    return PRESETS[preset].source


def _preset_rows(name: str, count: int, random: np.random.Generator) -> list[TraceRow]:
    """Return `count` rows without times. If `name` is "mix", each row comes from one of the presets in MIX."""
    if name == "mix":
        # Draw the presets from a separate stream of random numbers, so that the first requests are equal at every rate.
        parts = random.spawn(1)[0].choice(list(MIX), size=count, p=list(MIX.values()))
        return [_preset_row(PRESETS[part], [], random, index) for index, part in enumerate(parts)]
    sessions: list[TraceRow] = []
    return [_preset_row(PRESETS[name], sessions, random, index) for index in range(count)]


def _preset_row(preset: Preset, sessions: list[TraceRow], random: np.random.Generator, index: int) -> TraceRow:
    answer = preset.answer.draw(random)
    if not preset.continues:
        return TraceRow((("", preset.prompt.draw(random)),), answer)
    if sessions and random.random() < preset.continues:
        before = sessions.pop(int(random.integers(len(sessions))))
        answered = (f"answer {index}", before.max_tokens)  # random tokens, because the real answer is not known yet
        row = TraceRow((*before.pieces, answered, (f"turn {index}", preset.added.draw(random))), answer)
    else:
        row = TraceRow(((f"turn {index}", preset.prompt.draw(random)),), answer)
    sessions.append(row)
    del sessions[:-OPEN_SESSIONS]
    return row


def _lap(row: TraceRow, lap: int, at_s: float) -> TraceRow:
    """Return the row with other tokens in each pass (lap) over the trace, because earlier prompts may be cached."""
    pieces = tuple((key and f"lap {lap} {key}", length) for key, length in row.pieces)
    return replace(row, at_s=at_s, pieces=pieces)


def scaled(row: TraceRow, prompt: float, answer: float) -> TraceRow:
    """Return the row with the lengths of its prompt and answer multiplied by these factors, but at least 1 token each.
    Shared prefixes stay shared, because the end positions of all pieces are scaled alike."""
    if prompt == answer == 1:
        return row
    if row.prompt is not None:
        raise ConfigError("--scale-tokens cannot change a trace that contains the prompts' tokens: omit it")
    pieces, end, done = [], 0, 0
    for key, length in row.pieces:
        end += length
        pieces.append((key, round(end * prompt) - done))
        done = round(end * prompt)
    if not done:
        pieces = [(row.pieces[-1][0], 1)]
    return replace(row, pieces=tuple(pieces), max_tokens=max(1, round(row.max_tokens * answer)))


def _cut(row: TraceRow, limit: int) -> TraceRow:
    max_tokens = min(row.max_tokens, max(1, limit // 2))
    left = limit - max_tokens
    if row.prompt is not None:
        return replace(row, prompt=row.prompt[:left], max_tokens=max_tokens)
    pieces = []
    for key, length in row.pieces:
        pieces.append((key, min(length, left)))
        left -= pieces[-1][1]
    return replace(row, pieces=tuple(pieces), max_tokens=max_tokens)


def _arrival(row: TraceRow, index: int, seed: int, vocabulary: PromptVocabulary) -> Arrival:
    prompt = row.prompt
    if prompt is None:
        pieces = (vocabulary.draw(seed, key or f"request {index}", length) for key, length in row.pieces)
        prompt = tuple(token for piece in pieces for token in piece)
    return Arrival(row.at_s, prompt, row.max_tokens, row.slo)
