"""What became of one run of a load generator: an outcome for every request that was due, and marks on the run.

Times are seconds since the run's start on the client's monotonic clock. Nothing is judged here.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

TIMEOUT = "timeout"  # the error of a request that was given up
TBT_OF = ("p99", "max", "mean")
SCHEMA = "baton.outcomes/1"
TAIL = ("counted", "loop_lag_p99_s", "cpu_s", "problems")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps to, in milliseconds; 0: no limit.

    `tbt_of` says what of one request's gaps between tokens is held against `tbt_ms`: their 99th percentile ("p99"),
    the longest ("max") or the mean ("mean", which is TPOT). Raises ValueError for what is no such limit.
    """

    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    tbt_of: str = "p99"

    def __post_init__(self) -> None:
        for name, limit in (("ttft_ms", self.ttft_ms), ("tbt_ms", self.tbt_ms)):
            if not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
                raise ValueError(f"slo: {name} is {limit!r}; it must be milliseconds, or 0 for no limit")
        if self.tbt_of not in TBT_OF:
            raise ValueError(f"slo: tbt_of is {self.tbt_of!r}; it must be {', '.join(TBT_OF[:-1])} or {TBT_OF[-1]}")


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
    error: str = ""  # TIMEOUT, or what went wrong, in one line
    prompt_tokens: int = 0
    max_tokens: int = 0
    ended_s: float | None = None  # when the client had the last of it, or gave up
    slo: Slo | None = None  # its own, in place of the run's

    @property
    def finished(self) -> bool:
        return bool(self.finish) and not self.error


OUTCOME_FIELDS = tuple(each.name for each in fields(Outcome))


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
    told = {name: getattr(outcome, name) for name in OUTCOME_FIELDS}  # asdict would copy every token, in mid-run
    return json.dumps(told | {"slo": outcome.slo and asdict(outcome.slo)}, separators=(",", ":")) + "\n"


def tail_line(recording: Recording) -> str:
    """Last line of an outcomes file: what is known of the run as a whole."""
    return json.dumps({name: getattr(recording, name) for name in TAIL}) + "\n"


def load_recording(path: Path) -> Recording:
    """What an outcomes file holds, also one that breaks off in the middle. Raises ValueError if it is none."""
    recording = Recording()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                told: dict[str, Any] = json.loads(line)
            except ValueError:
                recording.problems.append(f"{path.name} breaks off in line {number}")
                break
            if number == 1:
                if told.get("schema") != SCHEMA:
                    raise ValueError(f"{path}: not a file of {SCHEMA}")
                recording.started_unix_ns = told["started_unix_ns"]
            elif "index" in told:
                slo = told.pop("slo", None)
                recording.outcomes.append(Outcome(**told, slo=Slo(**slo) if slo else None))
            else:
                for name in TAIL:
                    setattr(recording, name, told[name])
    recording.outcomes.sort(key=lambda outcome: outcome.index)
    return recording
