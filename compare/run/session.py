"""Runs a session: starts the arms, checks that they are equivalent, runs their trials, and collects `Findings`.

The load generator measures the requests, and `compare.report` evaluates the findings.
"""

import asyncio
import itertools
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compare.arms import Arm
from compare.endpoint import STEPS, SUMMARIES, Document, Endpoint, EndpointError, alive_nodes, is_external
from compare.load.client import LoadSpec
from compare.load.outcome import LatencySlo, LoadRecording, Outcome
from compare.load.traffic import Traffic
from compare.run import equivalence
from compare.run.deployments import Deployments
from compare.run.engines import EngineMeter, check_moved
from compare.run.equivalence import ParityCheck
from compare.stats.capacity import MAX_SEEDS, CapacityEstimate, CapacityPoint, CapacitySearch
from compare.stats.measures import misses, slo_excess, steady_attainment
from shared.errors import ConfigError

TRACE_SLACK_S = 5.0
TIMELINES, TIMELINES_OF_OTHERS = 40, 5  # number to fetch for a period that the report may show, and for another period
ATTEMPTS = 3
MIN_PAIRED_SHARE = 0.75  # a verdict requires that at least this share of the seeds has valid periods in every arm
SEEDS_PER_SPARE = 3  # there is one spare seed for this many seeds; it replaces a seed that has an invalid period
COOL_DOWN_S = 60.0
SLACK_MS = 1000.0  # steps are fetched from this long before the start of the run
COUNTED = ("handoffs", "blocks_moved", "bytes_moved", "handoffs_failed", "preemptions", "records_dropped")
SHOWN_FACTS = ("num_blocks", "block_tokens", "block_bytes", "cpus", "threads", "policy")
START_S = 6.0  # estimated time to start one process of an arm on a busy machine
BETWEEN_S = 3.0  # estimated time for the last answers of a period, the cool-down, and fetching the records
REPORT_S = 10.0


class Trial(NamedTuple):
    """One run of one arm with the traffic of one seed. `position` is its index among all trials of the session.

    In a search for a capacity, `rate` replaces the rate of the traffic, and `attempt` is the number
    of earlier attempts, which were invalid.
    """

    arm: str
    seed: int
    position: int
    rate: float | None = None
    attempt: int = 0

    @property
    def traffic(self) -> tuple[int, float | None]:
        """A key that is equal for all trials under the same traffic."""
        return self.seed, self.rate


def trials_of(arms: Sequence[str], seed: int, number: int) -> list[Trial]:
    """Return the trials of the `number`-th seed. The order of arms alternates, so drift affects all arms equally."""
    order = arms if number % 2 == 0 else arms[::-1]
    return [Trial(arm, seed, number * len(arms) + place) for place, arm in enumerate(order)]


@dataclass(slots=True)
class Period:
    """The measurements of one trial. The arm is idle before and after the trial. A period with problems is not used."""

    trial: Trial
    recording: LoadRecording = field(default_factory=LoadRecording)
    summaries: dict[str, Document] = field(default_factory=dict)  # the router's summaries, by request id
    steps: dict[str, list[Document]] = field(default_factory=dict)  # steps by node, oldest first
    costs: dict[str, list[float]] = field(default_factory=dict)  # packed step-time model of each node
    timelines: dict[str, Document] = field(default_factory=dict)  # timelines of the worst requests, by request id
    counts: dict[str, int] | None = None  # increases of the nodes' counters; None if not available
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # limitations; the figures are still valid


@dataclass(frozen=True, slots=True)
class Experiment:
    """The arms to compare, and how to compare them."""

    arms: tuple[Arm, ...]  # the first arm is the baseline
    control: Arm | None  # a copy of the first arm
    traffic: Callable[[int, float | None], Traffic]  # traffic by seed and rate; None: the rate of the options
    seeds: tuple[int, ...]
    slo: LatencySlo
    attainment: float
    first_rate: float | None  # rate at which the search for capacities starts; None: no search
    prompts: tuple[tuple[int, ...], ...]  # prompts of the preflight, whose greedy answers are compared
    treatment: tuple[str, ...]  # facts that may differ between arms
    send: str  # "ids" or "text"
    timeout_s: float
    out: Path
    first_rates: Mapping[str, float] = field(default_factory=dict)  # start rates that replace `first_rate`, by arm
    widening: float = 2.0  # factor between successive rates while a search brackets the capacity
    lowest_rate: float = 0.0  # a search does not look for capacities below this rate
    device: str = ""  # "emulated NAME" or "simulated NAME"; "" for real devices
    engines: EngineMeter | None = None  # vLLM servers that all arms share

    @property
    def all_arms(self) -> tuple[Arm, ...]:
        return self.arms + ((self.control,) if self.control else ())

    @property
    def finds_capacity(self) -> bool:
        return self.first_rate is not None

    @property
    def max_trials(self) -> int:
        """The maximum number of trials of one arm. A search may use 12 trials to bracket the rate, and three trials per
        seed after that."""
        return 12 + 3 * len(self.seeds) if self.finds_capacity else len(self.seeds)

    @property
    def num_spare(self) -> int:
        return -(-len(self.seeds) // SEEDS_PER_SPARE)

    @property
    def least_pairs(self) -> int:
        """The minimum number of seeds that must have a valid period in every arm for a verdict."""
        return math.ceil(MIN_PAIRED_SHARE * len(self.seeds))

    def plan(self, duration_s: float, *, keeps_all: bool, slowdown: float = 1.0) -> str:
        """Return a line with the session's size and likely duration. With `keeps_all`, each arm is started once.

        Everything but the traffic takes `slowdown` times as long as on an idle machine.
        """
        num_arms, num_trials = len(self.all_arms), self.max_trials
        starts = num_arms * (1 if keeps_all else 1 + num_trials) * (1 + max(arm.devices for arm in self.all_arms))
        trial_s = num_arms * (duration_s + slowdown * BETWEEN_S)
        total_s = num_trials * trial_s + slowdown * (starts * START_S + REPORT_S)
        spare = f", up to {span(self.num_spare * trial_s)} more if periods are invalid"
        return f"{self.size(duration_s)}, about {span(total_s)} in total{'' if self.finds_capacity else spare}"

    def size(self, duration_s: float) -> str:
        most = "at most " if self.finds_capacity else ""
        return f"plan: {len(self.all_arms)} arms x {most}{self.max_trials} periods x {duration_s:g} s of traffic"


@dataclass(slots=True)
class Findings:
    """The result of a session, which may be incomplete. `problems` are the reasons why there is no verdict."""

    arms: list[Arm] = field(default_factory=list)  # running stacks have their actual numbers of nodes
    parity: ParityCheck = field(default_factory=lambda: ParityCheck(False, []))
    periods: list[Period] = field(default_factory=list)
    points: dict[str, list[CapacityPoint]] = field(default_factory=dict)  # attainment at each measured rate, by arm
    compared: int = 0  # number of requests whose answers were compared between arms
    different: list[Document] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # caveats that do not prevent a verdict
    capacities: dict[str, CapacityEstimate] = field(default_factory=dict)  # by arm, from complete searches only
    predicted: dict[int, list[Outcome]] = field(default_factory=dict)  # simulated outcomes, by the trial's position


def main_problem(periods: Iterable[Period]) -> str:
    """Return the most frequent reason why periods are invalid. At least one period must be invalid."""
    return Counter(period.problems[0] for period in periods if period.problems).most_common(1)[0][0]


def span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def trace_name(experiment: Experiment, arm: str) -> str:
    """Return the name of an arm's trace file."""
    number = [each.name for each in experiment.all_arms].index(arm)
    return f"trace-{number + 1}.json" if number else "trace.json"


def keep_requests(path: Path, period: Period) -> None:
    """Append the period's outcomes, each with the router's summary. Raises OSError, for example if the disk is full."""
    head = period.trial._asdict() | {"valid": not period.problems}
    with path.open("a", encoding="utf-8") as file:
        for outcome in period.recording.outcomes:
            line = {**head, **asdict(outcome), "router": period.summaries.get(outcome.id)}
            file.write(json.dumps(line, separators=(",", ":"), default=list) + "\n")  # times are lists or arrays


# ---- the session ---------------------------------------------------------------------------------------------------


class ArmLostError(Exception):
    """An arm cannot be measured any more. The message names the arm and the reason."""


async def run_session(experiment: Experiment, deployments: Deployments, say: Callable[[str], None]) -> Findings:
    """Run a session and end all its processes. If a signal arrives or an arm is lost, the findings are incomplete, and
    `Findings.problems` says so. Raises ConfigError, EndpointError or OSError if the session cannot start."""
    findings = Findings(list(experiment.all_arms))
    session = asyncio.create_task(Session(experiment, deployments, say, findings).run())
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, session.cancel)
    try:
        await session
    except asyncio.CancelledError:
        findings.problems.append("interrupted: the figures cover only the measurements before that")
    except ArmLostError as error:
        findings.problems.append(str(error))
    except OSError as error:
        if not findings.periods:
            raise
        findings.problems.append(f"cannot write the measurements: {error.strerror or error}")
    finally:
        await deployments.end()
        for number in numbers:
            loop.remove_signal_handler(number)
    _check_equal_work(experiment, findings)
    return findings


class Session:
    """A running session, on the caller's event loop. It owns `findings` until `run` returns.

    It runs one trial at a time. It adds every period to the findings and to requests.jsonl, even if the period is
    invalid or interrupted. `run` raises ArmLostError if an arm cannot be measured any more.
    """

    def __init__(
        self, experiment: Experiment, deployments: Deployments, say: Callable[[str], None], findings: Findings
    ) -> None:
        self._experiment = experiment
        self._deployments = deployments
        self._say = say
        self._findings = findings
        self._started_ns = time.time_ns()
        self._began = time.monotonic()  # start of the first trial
        # The report shows the first seed that is valid in every arm. Until it is found, keep traces and more timelines.
        self._is_drawn = False
        self._one_at_a_time = asyncio.Lock()  # a fair lock, so that the searches alternate

    async def run(self) -> None:
        await self._preflight()
        if self._findings.problems:
            return
        self._began = time.monotonic()
        if self._experiment.finds_capacity:
            await self._search_all()
        else:
            await self._run_seeds()

    async def _preflight(self) -> None:
        """Compare the arms' facts, such as the model, and their greedy answers, which also warm the arms up."""
        experiment, findings = self._experiment, self._findings
        if experiment.engines is not None:
            await experiment.engines.read()  # raises if a server does not answer; an arm would wait for that server
        facts: dict[str, dict[str, str]] = {}
        answers = {}
        for number, arm in enumerate(experiment.all_arms):
            self._say(f"asking {arm.url}" if arm.url else f"starting {arm.name}")
            endpoint = await self._deployments.up(arm.name)
            status = await endpoint.status() if endpoint.is_baton else None
            facts[arm.name] = equivalence.facts_of(endpoint, status)
            findings.arms[number] = _as_found(arm, status)
            if experiment.send == "ids":
                answers[arm.name] = await self._greedy_answers(arm, endpoint)
        findings.parity = equivalence.check_parity(experiment.all_arms, facts, experiment.treatment)
        findings.problems += findings.parity.problems
        shown = [", ".join(f"{fact} {own[fact]}" for fact in SHOWN_FACTS if fact in own) for own in facts.values()]
        for text in dict.fromkeys(shown):
            self._say(f"{', '.join(name for name, own in zip(facts, shown, strict=True) if own == text)}: {text}")
        if experiment.engines:
            findings.notes.append("vLLM servers report no steps, so there is no strip and no node is shown as busy")
        if not findings.problems and answers:
            findings.problems += [f"not comparable: {line}" for line in equivalence.different_answers(answers)]

    async def _greedy_answers(self, arm: Arm, endpoint: Endpoint) -> list[list[int]]:
        """Return an arm's answers to the prompts. On vLLM servers, add a problem if KV did not move as required."""
        if (meter := self._experiment.engines) is None:
            # All arms get the same salt, because the answers of emulated nodes depend on it.
            return await equivalence.greedy_answers(endpoint, self._experiment.prompts, salt="preflight")
        salt = f"{self._started_ns} preflight {arm.name}"
        await endpoint.until_idle(COOL_DOWN_S)  # nodes that have just started send requests to their servers
        before = await meter.read()
        answers = await equivalence.greedy_answers(endpoint, self._experiment.prompts, salt)
        moved = check_moved(before, await meter.read(), arm.prefill, len(answers), splits=splits_of(arm))
        self._findings.problems += [f"{arm.name}: {problem}" for problem in moved]
        return answers

    async def _run_seeds(self) -> None:
        """Run every seed in every arm. For each seed with an invalid period, run a spare seed, up to a limit.

        Stop early if all periods of the first seed are invalid, or if too few seeds are left for a verdict.
        """
        experiment, seeds, num_valid = self._experiment, self._experiment.seeds, 0
        names = [arm.name for arm in experiment.all_arms]
        planned = [*seeds, *range(seeds[-1] + 1, seeds[-1] + 1 + experiment.num_spare)]
        for number, seed in enumerate(planned):
            if num_valid == len(seeds):
                return
            try:
                self._experiment.traffic(seed, None)
            except ConfigError:  # the trace is exhausted
                return
            self._is_drawn = num_valid == 0
            problems = [(await self._run_trial(trial)).problems for trial in trials_of(names, seed, number)]
            num_valid += not any(problems)
            is_hopeless = num_valid + len(planned) - number - 1 < experiment.least_pairs
            if is_hopeless or (number == 0 and all(problems)):
                had = f"{num_valid} of {number + 1} seeds so far had a valid period in every arm, too few for a verdict"
                self._findings.problems.append(f"stopped early: {had}: {main_problem(self._findings.periods)}")
                return

    async def _search_all(self) -> None:
        """Search the capacities of all arms, one trial at a time. If one search fails, cancel the others."""
        searches = [asyncio.ensure_future(self._search(arm.name)) for arm in self._experiment.all_arms]
        try:
            await asyncio.gather(*searches)
        finally:
            for search in searches:
                search.cancel()
            await asyncio.wait(searches)

    async def _search(self, arm: str) -> None:
        experiment, measure = self._experiment, partial(self._attainment, arm)
        assert experiment.first_rate is not None
        most, least = experiment.max_trials, len(experiment.seeds)
        search = CapacitySearch(
            measure, experiment.attainment, max_runs=most, min_seeds=least, max_seeds=max(MAX_SEEDS, least),
            widening=experiment.widening, lowest=experiment.lowest_rate,
        )  # fmt: skip
        self._findings.points[arm] = search.points
        self._findings.capacities[arm] = await search.run(experiment.first_rates.get(arm, experiment.first_rate))

    async def _attainment(self, arm: str, rate: float, seed: int) -> float:
        """Repeat a trial until it is valid, and return its attainment. Raises ArmLostError if ATTEMPTS trials in a row
        are invalid, or if there is no traffic at this rate."""
        try:
            self._experiment.traffic(seed, rate)
        except ConfigError as error:
            raise ArmLostError(f"{arm} at {rate:.3g} req/s could not be measured: {error}") from None
        for attempt in range(ATTEMPTS):
            async with self._one_at_a_time:
                period = await self._run_trial(Trial(arm, seed, len(self._findings.periods), rate, attempt))
            if not period.problems:
                break
        else:
            raise ArmLostError(f"{arm} at {rate:.3g} req/s could not be measured: {period.problems[0]}")
        return steady_attainment(period.recording.outcomes, self._experiment.slo)

    async def _run_trial(self, trial: Trial) -> Period:
        experiment = self._experiment
        traffic = experiment.traffic(trial.seed, trial.rate)
        self._announce(trial, len(traffic.arrivals))
        period = Period(trial)
        self._findings.periods.append(period)
        try:
            await self._measure(await self._deployments.up(trial.arm), traffic, period)
        except EndpointError as error:
            period.problems.append(str(error))
        finally:
            keep_requests(experiment.out / "requests.jsonl", period)
        good = sum(not misses(outcome, experiment.slo) for outcome in period.recording.outcomes)
        shown = [f"invalid: {problem}" for problem in period.problems]
        for line in shown or [f"{good} of {len(traffic.arrivals)} requests met the SLO, including the warm-up"]:
            self._say(f"    {line}")
        if period.problems:
            await self._check_alive(trial.arm)
        return period

    def _announce(self, trial: Trial, num_requests: int) -> None:
        """Report which trial begins, and how long the remaining trials will take, as estimated from the trials so
        far."""
        experiment, done = self._experiment, trial.position
        total = experiment.max_trials * len(experiment.all_arms)
        place, seed, left = f"{done + 1}/{total}", f"seed {trial.seed}", ""
        if experiment.finds_capacity:
            place, seed = f"{done + 1} of at most {total}:", f"{seed}, {trial.rate:.3g} requests/s"
        elif done >= total:
            place, seed = "replacement:", f"{seed}, in place of an invalid one"
        elif done:
            left = f", about {span((time.monotonic() - self._began) / done * (total - done))} left"
        self._say(f"{place} {trial.arm}, {seed}: {num_requests} requests{left}")

    async def _check_alive(self, arm: str) -> None:
        try:
            await (await self._deployments.up(arm)).connect()
        except EndpointError as error:
            raise ArmLostError(f"{arm} was lost during the session: {error}") from None

    async def _measure(self, endpoint: Endpoint, traffic: Traffic, period: Period) -> None:
        experiment, trial = self._experiment, period.trial
        arm = next(arm for arm in experiment.all_arms if arm.name == trial.arm)
        before = await _idle_status(endpoint, period) if endpoint.is_baton else None
        counters = await experiment.engines.read() if experiment.engines else []
        began = time.monotonic()
        try:
            await self._deployments.drive(self.spec(endpoint, trial, traffic), period.recording)
        except asyncio.CancelledError:
            period.problems.append("interrupted")
            raise
        period.problems += period.recording.problems
        if before is None:
            return
        try:
            await add_records(period, endpoint, before, splits=splits_of(arm))
            if experiment.engines:
                after, handoffs = await experiment.engines.read(), (period.counts or {}).get("handoffs", 0)
                period.problems += check_moved(counters, after, arm.prefill, handoffs, splits=splits_of(arm))
            await add_timelines(period, endpoint, experiment.slo, TIMELINES if self._is_drawn else TIMELINES_OF_OTHERS)
        except EndpointError as error:
            period.problems.append(f"the router or a server was lost: {error}")
        if self._is_drawn and not period.problems:
            trace = await endpoint.trace(time.monotonic() - began + TRACE_SLACK_S)
            (experiment.out / trace_name(experiment, trial.arm)).write_bytes(trace)

    def spec(self, endpoint: Endpoint, trial: Trial, traffic: Traffic) -> LoadSpec:
        """Return the load generator's input for a trial."""
        experiment = self._experiment
        return LoadSpec(
            url=endpoint.url,
            model=endpoint.model,
            arrivals=traffic.arrivals,
            slo=experiment.slo,
            timeout_s=experiment.timeout_s,
            send=experiment.send,
            salt=self._salt(trial) if endpoint.is_baton or experiment.send == "text" else "",
            api_key=endpoint.api_key,
        )

    def _salt(self, trial: Trial) -> str:
        """Return a salt that no earlier trial of the same stack used, so that no prefix cache has the trial's prompts.

        In general, all arms get the same salt, because it decides the words of prompts that are sent as text. Arms that
        share a stack or servers get different salts: the control of a running stack, and arms over vLLM servers.
        """
        control = self._experiment.control
        is_shared = self._experiment.engines or (control and control.url and control.name == trial.arm)
        again = trial.arm if is_shared else ""
        return f"{self._started_ns} {trial.traffic} {trial.attempt} {again}"


def _as_found(arm: Arm, status: Document | None) -> Arm:
    """Return the arm. For a running stack, fill in its numbers of nodes and its policy."""
    if not arm.url or status is None:
        return arm
    nodes = alive_nodes(status)
    roles = [node["role"] for node in nodes]
    policies = {str((node.get("facts") or {}).get("policy")) for node in nodes}
    settings = {"policy": policies.pop()} if len(policies) == 1 else {}
    return replace(arm, prefill=roles.count("prefill"), decode=roles.count("decode"), settings=settings)


def _check_equal_work(experiment: Experiment, findings: Findings) -> None:
    """Compare tokens and work between arms under the same traffic, and add the results to the findings."""
    # Recordings by traffic and attempt, then by arm. An attempt's salt determines the tokens of emulated nodes.
    groups: dict[tuple[int, float | None, int], dict[str, LoadRecording]] = {}
    for period in findings.periods:
        groups.setdefault((*period.trial.traffic, period.trial.attempt), {})[period.trial.arm] = period.recording
    for (seed, *_), recordings in groups.items():
        count, different = equivalence.different_tokens(recordings)
        findings.compared += count
        findings.different += [{"seed": seed, **row} for row in different]
    names = {arm.name for arm in experiment.arms}  # without the control, whose prompts may consist of other words
    same = [{name: own for name, own in group.items() if name in names} for group in groups.values()]
    problem, note = equivalence.work_differences(same)
    findings.problems += [problem] if problem else []
    findings.notes += [note] if note else []


# ---- the router's records of a period ------------------------------------------------------------------------------


def splits_of(arm: Arm) -> bool | None:
    """Return True if the arm hands off every prompt, False if it hands off none, and None if that is unknown."""
    if arm.url:
        return None
    if not arm.prefill:
        return False
    return {"always": True, "never": False}.get(arm.settings["disaggregate"])


def check_counts(before: Document, after: Document, *, splits: bool | None) -> tuple[dict[str, int], list[str]]:
    """Return the increases of the nodes' counters between two statuses, and the problems that they show.

    The bytes of KV that moved must match the number of blocks that moved. `splits` is the result of `splits_of`.
    """
    was, now = ({node["id"]: node for node in alive_nodes(status)} for status in (before, after))
    problems = [f"node {name} was lost" for name in was.keys() - now.keys()]
    problems += [f"node {name} joined during the run" for name in now.keys() - was.keys()]
    counts = dict.fromkeys(COUNTED, 0)
    expected_bytes = 0
    for name in sorted(was.keys() & now.keys()):
        if now[name]["steps"] < was[name]["steps"]:
            problems.append(f"node {name} was restarted during the run")
            continue
        own = {count: now[name].get(count, 0) - was[name].get(count, 0) for count in COUNTED}
        own_bytes = own["blocks_moved"] * now[name]["block_bytes"]
        expected_bytes += own["bytes_moved"] if is_external(now[name]) else own_bytes
        counts = {count: counts[count] + own[count] for count in COUNTED}
    if counts["bytes_moved"] != expected_bytes:
        problems.append(f"{counts['bytes_moved']} bytes of KV were moved, but the moved blocks hold {expected_bytes}")
    shared_pool = {"pool"} == {channel for node in now.values() for channel in node.get("channels", {}).values()}
    # Handoffs in a shared pool move no bytes. For vLLM servers, `check_moved` checks the bytes.
    is_counted = shared_pool or any(map(is_external, now.values()))
    if splits and not (counts["handoffs"] and (counts["bytes_moved"] or is_counted)):
        problems.append("disaggregated, but no KV was handed off")
    if splits is False and counts["handoffs"]:
        problems.append(f"co-located, but {counts['handoffs']} requests were handed off")
    retried = after["requests"].get("moved", 0) - before["requests"].get("moved", 0)
    if retried:
        problems.append(f"{retried} attempts failed and were retried on another node")
    return counts, problems


async def _idle_status(endpoint: Endpoint, period: Period) -> Document:
    """Wait until the arm is idle, and return its status. On a timeout, record a problem. Raises EndpointError."""
    if not await endpoint.until_idle(COOL_DOWN_S):
        when = "after the last answer" if period.recording.outcomes else "after the previous period"
        period.problems.append(f"the arm was not idle {COOL_DOWN_S:g} s {when}")
    return await endpoint.status()


async def add_records(period: Period, endpoint: Endpoint, before: Document, *, splits: bool | None) -> None:
    """Add the router's records to a period. `before` is the status before the period. Raises EndpointError."""
    status = await _idle_status(endpoint, period)
    period.counts, problems = check_counts(before, status, splits=splits)
    period.problems += problems
    own = {outcome.id for outcome in period.recording.outcomes if outcome.id}
    period.summaries = {row["id"]: row for row in await endpoint.requests() if row["id"] in own}
    if lost := len(own) - len(period.summaries):
        period.notes.append(
            f"the router kept no record of {lost} of {len(own)} requests (it keeps {SUMMARIES} at most), so"
            " phases, transfers and causes omit them; give a shorter --duration"
        )
    since_ms = max(0.0, period.recording.started_unix_ns / 1e6 - SLACK_MS)
    for node in itertools.filterfalse(is_external, alive_nodes(status)):  # vLLM servers report no steps
        period.steps[node["id"]] = steps = await endpoint.steps(node["id"], since_ms)
        if len(steps) >= STEPS:
            period.notes.append(
                f"the router kept only the latest {STEPS} steps of {node['id']}, so the strip and the busy shares omit"
                " the first steps; give a shorter --duration"
            )
        period.costs[node["id"]] = node.get("cost") or []


async def add_timelines(period: Period, endpoint: Endpoint, slo: LatencySlo, count: int) -> None:
    """Add the timelines of the `count` requests that exceed the SLO most. Raises EndpointError."""
    known = [outcome for outcome in period.recording.outcomes if outcome.id in period.summaries]
    known.sort(key=lambda outcome: slo_excess(outcome, slo), reverse=True)
    for outcome in known[:count]:
        period.timelines[outcome.id] = await endpoint.timeline(outcome.id)
