"""The recording of one run of the load generator: an outcome for every request that was due, and facts of the run.

Times are seconds since the run's start on the client's monotonic clock. Nothing is judged here.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

TIMEOUT = "timeout"  # the error of a request that timed out
TBT_OF = ("p99", "max", "mean")
SCHEMA = "baton.outcomes/1"
HEAD = ("started_unix_ns",)
TAIL = ("counted", "loop_lag_p99_s", "cpu_s", "problems")


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Latency limits of a good request, in milliseconds; 0 is no limit.

    `tbt_of` is the figure of one request's gaps between tokens that must keep `tbt_ms`: their 99th percentile ("p99"),
    the longest ("max") or the mean ("mean", which is TPOT). Raises ValueError for an invalid limit.
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
    """One request as the client saw it. It finished if `finish` is set and `error` is empty; otherwise it is a miss.

    `token_s` has one time per token; tokens of one read share it. `tokens` are their ids, empty if the endpoint does
    not return ids.
    """

    index: int  # position among the run's arrivals
    id: str  # the router's id of the request, "" before the first event
    scheduled_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""  # TIMEOUT, or one line
    prompt_tokens: int = 0
    max_tokens: int = 0
    ended_s: float | None = None  # when the client received the end of the answer, or gave up
    slo: LatencySlo | None = None  # the request's own, in place of the run's

    @property
    def finished(self) -> bool:
        return bool(self.finish) and not self.error


@dataclass(slots=True)
class LoadRecording:
    """A run as the client saw it. `problems` are the reasons not to use it; empty if it is valid."""

    started_unix_ns: int = 0  # Unix time of the run's second 0, to match the router's records
    outcomes: list[Outcome] = field(default_factory=list)
    counted: str = "ids"  # how tokens were counted: "ids", "logprobs", "usage" or "events"
    loop_lag_p99_s: float = 0.0  # of the client's event loop
    cpu_s: float = 0.0  # CPU time of the client
    problems: list[str] = field(default_factory=list)


OUTCOME_FIELDS = tuple(each.name for each in fields(Outcome))


def outcome_line(outcome: Outcome) -> str:
    line = {name: getattr(outcome, name) for name in OUTCOME_FIELDS}  # asdict would copy every token during the run
    return json.dumps(line | {"slo": outcome.slo and asdict(outcome.slo)}, separators=(",", ":")) + "\n"


def run_line(recording: LoadRecording, names: Sequence[str]) -> str:
    """Return the first line of an outcomes file, with the facts HEAD, or the last one, with TAIL."""
    facts = {name: getattr(recording, name) for name in names}
    return json.dumps(({"schema": SCHEMA} if names is HEAD else {}) | facts) + "\n"


def load_recording(path: Path) -> LoadRecording:
    """Read an outcomes file, which may be truncated. Raises ValueError if it is not one."""
    recording = LoadRecording()
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line: dict[str, Any] = json.loads(text)
            except ValueError:
                recording.problems.append(f"{path.name} breaks off in line {number}")
                break
            if number == 1 and line.get("schema") != SCHEMA:
                raise ValueError(f"{path}: not a file of {SCHEMA}")
            if "index" in line:
                slo = line.pop("slo", None)
                recording.outcomes.append(Outcome(**line, slo=LatencySlo(**slo) if slo else None))
            else:
                for name in HEAD if number == 1 else TAIL:
                    setattr(recording, name, line[name])
    recording.outcomes.sort(key=lambda outcome: outcome.index)
    return recording
