"""The types of a comparison: the experiment, its trials, and the findings of a session."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from compare.arms import Arm
from compare.endpoint import Document
from compare.load.outcome import LatencySlo, LoadRecording
from compare.load.traffic import Traffic
from compare.run.equivalence import ParityCheck
from compare.stats.capacity import CapacityEstimate, CapacityPoint

START_S = 6.0  # to start one process of an arm on a busy machine
BETWEEN_S = 3.0  # after each period, for the last answers, the cool-down, and fetching the records
REPORT_S = 10.0


class Trial(NamedTuple):
    """One arm under one seed's traffic. `position` is its index among all trials of the session.

    In a search for a capacity, `rate` replaces the rate of the traffic.
    """

    arm: str
    seed: int
    position: int
    rate: float | None = None

    @property
    def traffic(self) -> tuple[int, float | None]:
        """A key that is equal for all trials under the same traffic."""
        return self.seed, self.rate


def trials_of(arms: Sequence[str], seed: int, number: int) -> list[Trial]:
    """Return the trials of the `number`-th seed. The order of arms alternates (ABBA), so drift affects all arms."""
    order = arms if number % 2 == 0 else arms[::-1]
    return [Trial(arm, seed, number * len(arms) + place) for place, arm in enumerate(order)]


@dataclass(slots=True)
class Period:
    """The measurements of one trial, before and after which the arm is idle. `problems` make its figures unusable."""

    trial: Trial
    recording: LoadRecording = field(default_factory=LoadRecording)
    summaries: dict[str, Document] = field(default_factory=dict)  # the router's summaries, by request id
    steps: dict[str, list[Document]] = field(default_factory=dict)  # by node, oldest first
    costs: dict[str, list[float]] = field(default_factory=dict)  # packed step-time model of each node
    timelines: dict[str, Document] = field(default_factory=dict)  # of the worst requests, by request id
    counts: dict[str, int] | None = None  # increases of the nodes' counters; None if not available
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # limitations of figures that are still valid


@dataclass(frozen=True, slots=True)
class Experiment:
    """The arms to compare, and how to compare them."""

    arms: tuple[Arm, ...]  # the first is the baseline
    control: Arm | None  # a copy of the first
    traffic: Callable[[int, float | None], Traffic]  # arguments: the seed, and a rate, or None for the plan's rate
    seeds: tuple[int, ...]
    slo: LatencySlo
    attainment: float
    first_rate: float | None  # where a search for capacities starts; None: no search
    prompts: tuple[tuple[int, ...], ...]  # for the greedy answers of the preflight
    treatment: tuple[str, ...]  # facts that may differ
    send: str  # "ids" or "text"
    timeout_s: float
    out: Path

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        return self.arms + ((self.control,) if self.control else ())

    @property
    def finds_capacity(self) -> bool:
        return self.first_rate is not None

    @property
    def max_trials(self) -> int:
        """The maximum number of trials of one arm. A search uses up to 12 to bracket the rate, and three per seed."""
        return 12 + 3 * len(self.seeds) if self.finds_capacity else len(self.seeds)

    def plan(self, duration_s: float, *, keeps_all: bool) -> str:
        """Return a line with the session's size and duration. With `keeps_all`, each arm is started only once."""
        num_arms, num_trials = len(self.all_arms), self.max_trials
        starts = num_arms * (1 if keeps_all else 1 + num_trials) * (1 + max(arm.devices for arm in self.all_arms))
        total_s = num_arms * num_trials * (duration_s + BETWEEN_S) + starts * START_S + REPORT_S
        periods = f"{num_arms} arms x {num_trials} periods x {duration_s:g} s of traffic"
        return f"plan: {periods}, about {total_s / 60:.0f} min in total"


@dataclass(slots=True)
class Findings:
    """The result of a session, which may be incomplete. `problems` are the reasons why there is no verdict."""

    arms: list[Arm] = field(default_factory=list)  # for running stacks, with their actual numbers of nodes
    parity: ParityCheck = field(default_factory=lambda: ParityCheck(False, []))
    periods: list[Period] = field(default_factory=list)
    points: dict[str, list[CapacityPoint]] = field(default_factory=dict)  # attainment at each measured rate, by arm
    compared: int = 0  # requests whose answers were compared between arms
    different: list[Document] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # caveats that do not prevent a verdict
    capacities: dict[str, CapacityEstimate] = field(default_factory=dict)  # only of arms whose search completed


def trace_name(experiment: Experiment, arm: str) -> str:
    """Return the name of an arm's trace file."""
    number = [each.name for each in experiment.all_arms].index(arm)
    return f"trace-{number + 1}.json" if number else "trace.json"


def keep_requests(path: Path, period: Period) -> None:
    """Append the period's outcomes, each with the router's summary. Raises OSError, for example if the disk is full."""
    head: Mapping[str, object] = period.trial._asdict() | {"valid": not period.problems}
    with path.open("a", encoding="utf-8") as file:
        for outcome in period.recording.outcomes:
            line = {**head, **asdict(outcome), "router": period.summaries.get(outcome.id)}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
