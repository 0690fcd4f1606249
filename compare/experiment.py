"""What is compared and how, what a run of it finds, and the files that it leaves."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from compare.arms import Arm
from compare.capacity import Capacity, Point
from compare.endpoint import Document, Endpoint
from compare.outcome import Slo
from compare.period import Period
from compare.preflight import Parity
from compare.schedule import Turn
from compare.traffic import Traffic


class Told(Protocol):
    """Whom the run tells how far it is."""

    def say(self, line: str) -> None: ...
    def begin(self, turn: Turn, num_turns: int, num_requests: int) -> None: ...
    def progress(self, sent: int, finished: int, failed: int) -> None: ...


class Places(Protocol):
    """Where the arms are."""

    async def up(self, name: str) -> Endpoint: ...
    async def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is compared, and how."""

    arms: tuple[Arm, ...]  # the first is what the others are held against
    control: Arm | None  # the first once more
    traffic: Callable[[int, float | None], Traffic]  # of a seed, at its own rate or at one that is looked for
    seeds: tuple[int, ...]
    slo: Slo
    attainment: float
    first_rate: float | None  # where looking for a capacity begins; None: it is not looked for
    prompts: tuple[tuple[int, ...], ...]  # of the preflight
    treatment: tuple[str, ...]  # facts that may differ
    send: str  # "ids" or "text"
    timeout_s: float
    out: Path

    @property
    def everyone(self) -> tuple[Arm, ...]:
        return self.arms + ((self.control,) if self.control else ())

    @property
    def finds_capacity(self) -> bool:
        return self.first_rate is not None

    @property
    def max_turns(self) -> int:
        """Of one arm. A search looks about with a dozen at most, and has three rates for every seed."""
        return 12 + 3 * len(self.seeds) if self.finds_capacity else len(self.seeds)


@dataclass(slots=True)
class Findings:
    """What a run came to, complete or not. `problems`: why there is no verdict; empty: nothing speaks against one."""

    arms: list[Arm] = field(default_factory=list)  # as they were met
    parity: Parity = field(default_factory=lambda: Parity(False, []))
    periods: list[Period] = field(default_factory=list)
    points: dict[str, list[Point]] = field(default_factory=dict)  # attainment at rates, by arm
    compared: int = 0  # requests whose answers were compared between arms
    different: list[Document] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what speaks against no verdict, and has to be known with it
    capacities: dict[str, Capacity] = field(default_factory=dict)  # of the arms whose search came to its end


def splits_of(arm: Arm) -> bool | None:
    """Whether its prompts are handed to a decode node: always, never, or now and then."""
    if arm.url:
        return None
    if not arm.prefill:
        return False
    return {"always": True, "never": False}.get(arm.settings["disaggregate"])


def trace_name(experiment: Experiment, arm: str) -> str:
    """trace.json is the first arm's."""
    number = [each.name for each in experiment.everyone].index(arm)
    return "trace.json" if number == 0 else f"trace-{number + 1}.json"


def keep_requests(path: Path, period: Period) -> None:
    """Appends the period's outcomes, with what the router says of each. Raises OSError, as for a full disk."""
    head: Mapping[str, object] = period.turn._asdict() | {"valid": not period.problems}
    with path.open("a", encoding="utf-8") as file:
        for outcome in period.recording.outcomes:
            line = {**head, **asdict(outcome), "router": period.summaries.get(outcome.id)}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
