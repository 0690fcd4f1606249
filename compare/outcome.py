"""What became of one run of a load generator: an outcome for every request that was due, and marks on the run.

Times are seconds since the run's start on the client's monotonic clock. Nothing is judged here.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "baton.outcomes/1"
TAIL = ("counted", "loop_lag_p99_s", "cpu_s", "problems")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps to, in milliseconds; 0: no limit.

    `tbt_of` says what of one request's gaps between tokens is held against `tbt_ms`: their 99th percentile ("p99"),
    the longest ("max") or the mean ("mean", which is TPOT).
    """

    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    tbt_of: str = "p99"


@dataclass(slots=True)
class Outcome:
    """One request at the client. It finished if `finish` is set and `error` is empty; otherwise it is a miss.

    `token_s` has one time for each token, so tokens that came in one piece have the same. `tokens` are their ids,
    empty where the endpoint tells none.
    """

    index: int  # place among the run's arrivals
    id: str  # the router's name for it, "" before the first event
    scheduled_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""  # "timeout", or what went wrong, in one line
    prompt_tokens: int = 0
    max_tokens: int = 0
    ended_s: float | None = None  # when the client had the last of it, or gave up
    slo: Slo | None = None  # its own, in place of the run's

    @property
    def finished(self) -> bool:
        return bool(self.finish) and not self.error


@dataclass(slots=True)
class Recording:
    """A run as the client saw it. `problems` say why it must not be used; empty: nothing is wrong with it."""

    started_unix_ns: int = 0  # Unix time of the run's second 0, to match the router's records
    outcomes: list[Outcome] = field(default_factory=list)
    counted: str = "ids"  # how tokens were counted: "ids", "logprobs", "usage" or "events"
    loop_lag_p99_s: float = 0.0  # of the client's event loop
    cpu_s: float = 0.0  # processor time of the client
    problems: list[str] = field(default_factory=list)


def head_line(started_unix_ns: int) -> str:
    """First line of an outcomes file."""
    return json.dumps({"schema": SCHEMA, "started_unix_ns": started_unix_ns}) + "\n"


def outcome_line(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome), separators=(",", ":")) + "\n"


def tail_line(recording: Recording) -> str:
    """Last line of an outcomes file: what is known of the run as a whole."""
    marks = asdict(recording)
    return json.dumps({name: marks[name] for name in TAIL}) + "\n"


def load_recording(path: Path) -> Recording:
    """What an outcomes file holds, also one that breaks off in the middle. Raises ValueError if it is none."""
    recording = Recording()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                fields: dict[str, Any] = json.loads(line)
            except ValueError:
                recording.problems.append(f"{path.name} breaks off in line {number}")
                break
            if number == 1:
                if fields.get("schema") != SCHEMA:
                    raise ValueError(f"{path}: not a file of {SCHEMA}")
                recording.started_unix_ns = fields["started_unix_ns"]
            elif "index" in fields:
                slo = fields.pop("slo", None)
                recording.outcomes.append(Outcome(**fields, slo=Slo(**slo) if slo else None))
            else:
                for name in TAIL:
                    setattr(recording, name, fields[name])
    recording.outcomes.sort(key=lambda outcome: outcome.index)
    return recording
