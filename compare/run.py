"""Runs a comparison: reaches the arms, checks that they are alike, gives each its turns, and keeps what came of it.

It measures nothing itself (`compare.period` and the load generator do) and judges nothing (`compare.result` does).
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from compare.arms import Arm
from compare.capacity import Search
from compare.client import Spec
from compare.drive import drive
from compare.endpoint import Document, Endpoint, Unreachable
from compare.experiment import Experiment, Findings, Places, Told, keep_requests, splits_of, trace_name
from compare.measures import inside, misses
from compare.outcome import Recording, load_recording
from compare.period import Period, Watch
from compare.preflight import different_answers, facts_of, greedy_answers, parity
from compare.same_work import different_tokens, work_told
from compare.schedule import Turn, turns
from compare.steady import measured_window
from compare.traffic import Traffic
from shared.errors import ConfigError

TRACE_SLACK_S = 5.0
TIMELINES, TIMELINES_OF_OTHERS = 40, 5  # of the seed that is drawn, and of every other
ATTEMPTS = 3
SPARE = 3  # one spare seed for so many; those with an invalid period stay in the report, and out of the figures
SHOWN_FACTS = ("num_blocks", "block_tokens", "block_bytes", "cpus", "threads", "policy")


class Gone(Exception):
    """An arm cannot be measured any more; the message says which and why."""


async def run(experiment: Experiment, places: Places, told: Told) -> Findings:
    """Leaves no process behind. After SIGINT, SIGTERM or SIGHUP, or an arm's end, it returns what there is, marked.

    Raises ConfigError, Unreachable and OSError for what stops it before anything is measured.
    """
    findings = Findings(list(experiment.everyone))
    course = Course(experiment, places, told, findings)
    work = asyncio.create_task(course.run())
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        findings.problems.append("interrupted: the figures are of what was measured until then")
    except Gone as error:
        findings.problems.append(str(error))
    except OSError as error:
        if not findings.periods:
            raise
        findings.problems.append(f"cannot keep what was measured: {error.strerror or error}")
    finally:
        await places.end()
        for number in numbers:
            loop.remove_signal_handler(number)
    groups = _by_traffic(findings.periods)
    findings.compared, findings.different = _compare_tokens(groups)
    others = {arm.name for arm in experiment.arms}  # the copy of a stack is asked in other words
    same = [{name: own for name, own in group.items() if name in others} for group in groups.values()]
    problem, note = work_told(same)
    findings.problems += [problem] if problem else []
    findings.notes += [note] if note else []
    return findings


class Course:
    """One run under way."""

    def __init__(self, experiment: Experiment, places: Places, told: Told, findings: Findings) -> None:
        self._experiment = experiment
        self._places = places
        self._told = told
        self._findings = findings
        self._started_ns = time.time_ns()
        self._one_at_a_time = asyncio.Lock()  # handed on in order, so that searches take turns

    async def run(self) -> None:
        await self._preflight()
        if self._findings.problems:
            return
        if self._experiment.finds_capacity:
            await self._search_all()
            return
        await self._take_all()

    # ---- before ---------------------------------------------------------------------------------------------------

    async def _preflight(self) -> None:
        """Parity, then equal greedy answers, which also warm the arms up."""
        experiment, findings = self._experiment, self._findings
        facts: dict[str, dict[str, str]] = {}
        answers = {}
        for number, arm in enumerate(experiment.everyone):
            self._told.say(f"asking {arm.url}" if arm.url else f"starting {arm.name}")
            endpoint = await self._places.up(arm.name)
            status = await endpoint.status() if endpoint.is_baton else None
            facts[arm.name] = facts_of(endpoint, status)
            findings.arms[number] = _as_met(arm, status)
            if experiment.send == "ids":
                answers[arm.name] = await greedy_answers(endpoint, experiment.prompts, salt="preflight")
        findings.parity = parity(experiment.everyone, facts, experiment.treatment)
        findings.problems += findings.parity.problems
        for name, own in facts.items():
            self._told.say(f"{name}: " + ", ".join(f"{fact} {own[fact]}" for fact in SHOWN_FACTS if fact in own))
        if not findings.problems and answers:
            findings.problems += [f"not comparable: {line}" for line in different_answers(answers)]

    # ---- the turns ------------------------------------------------------------------------------------------------

    async def _take_all(self) -> None:
        """Every seed in every arm; then, in place of seeds that have an invalid period, others."""
        names = [arm.name for arm in self._experiment.everyone]
        num_valid, last = 0, self._experiment.seeds[-1]
        for number, seed in enumerate([*self._experiment.seeds, *range(last + 1, last + 1 + self._num_spare)]):
            if num_valid == len(self._experiment.seeds):
                return
            try:
                self._experiment.traffic(seed, None)
            except ConfigError:  # the trace is over
                return
            problems = [(await self._take(turn)).problems for turn in turns(names, seed, number)]
            num_valid += not any(problems)

    @property
    def _num_spare(self) -> int:
        return -(-len(self._experiment.seeds) // SPARE)

    async def _search_all(self) -> None:
        """All arms at once, taking turns; when one cannot go on, the others end too."""
        searches = [asyncio.ensure_future(self._search(arm.name)) for arm in self._experiment.everyone]
        try:
            await asyncio.gather(*searches)
        finally:
            for search in searches:
                search.cancel()
            await asyncio.wait(searches)

    async def _search(self, arm: str) -> None:
        experiment = self._experiment
        assert experiment.first_rate is not None
        search = Search(
            partial(self._attainment, arm),
            experiment.attainment,
            max_runs=experiment.max_turns,
            min_seeds=len(experiment.seeds),
        )
        self._findings.points[arm] = search.points
        self._findings.capacities[arm] = await search.run(experiment.first_rate)

    async def _attainment(self, arm: str, rate: float, seed: int) -> float:
        """One period's. Raises Gone without a valid one after ATTEMPTS: a search cannot go on without a figure."""
        for _ in range(ATTEMPTS):
            async with self._one_at_a_time:
                period = await self._take(Turn(arm, seed, len(self._findings.periods), rate))
            if not period.problems:
                break
        else:
            raise Gone(f"{arm} at {rate:.3g} req/s could not be measured: {period.problems[0]}")
        window_s, overloaded = measured_window(period.recording.outcomes)
        population = inside(period.recording.outcomes, window_s)
        good = sum(not misses(outcome, self._experiment.slo) for outcome in population)
        return 0.0 if overloaded else good / len(population)

    async def _take(self, turn: Turn) -> Period:
        experiment = self._experiment
        traffic = experiment.traffic(turn.seed, turn.rate)
        self._told.begin(turn, experiment.max_turns * len(experiment.everyone), len(traffic.arrivals))
        period = Period(turn)
        self._findings.periods.append(period)
        try:
            await self._measure(await self._places.up(turn.arm), traffic, period)
        except Unreachable as error:
            period.problems.append(str(error))
        finally:
            keep_requests(experiment.out / "requests.jsonl", period)
        for problem in period.problems:
            self._told.say(f"  invalid: {problem}")
        if period.problems:
            await self._still_there(turn.arm)
        return period

    async def _still_there(self, arm: str) -> None:
        """Raises Gone."""
        try:
            await (await self._places.up(arm)).meet()
        except Unreachable as error:
            raise Gone(f"{arm} was lost in mid-run: {error}") from None

    async def _measure(self, endpoint: Endpoint, traffic: Traffic, period: Period) -> None:
        experiment, turn = self._experiment, period.turn
        arm = next(arm for arm in experiment.everyone if arm.name == turn.arm)
        watch = Watch(endpoint, splits_of(arm)) if endpoint.is_baton else None
        if watch:
            await watch.begin(period)
        began = time.monotonic()
        try:
            period.recording = await drive(self.spec(endpoint, turn), traffic.arrivals, self._told.progress)
        except asyncio.CancelledError:
            period.recording = _broken_off(experiment.out / "outcomes.jsonl")
            period.problems.append("interrupted")
            raise
        period.problems += period.recording.problems
        if not watch:
            return
        is_drawn = turn.seed == experiment.seeds[0] and not experiment.finds_capacity
        await watch.end(period, experiment.slo, TIMELINES if is_drawn else TIMELINES_OF_OTHERS)
        if is_drawn and not period.problems:
            trace = await endpoint.trace(time.monotonic() - began + TRACE_SLACK_S)
            (experiment.out / trace_name(experiment, turn.arm)).write_bytes(trace)

    def spec(self, endpoint: Endpoint, turn: Turn) -> Spec:
        """What the load generator is told for a turn."""
        out = self._experiment.out
        return Spec(
            endpoint.url,
            endpoint.model,
            str(out / "arrivals.jsonl"),
            str(out / "outcomes.jsonl"),
            self._experiment.slo,
            self._experiment.timeout_s,
            self._experiment.send,
            self._salt(turn) if endpoint.is_baton or self._experiment.send == "text" else "",
            endpoint.api_key,
        )

    def _salt(self, turn: Turn) -> str:
        """Nothing that an earlier period left in a prefix cache is found again. The same for all arms, because as text
        it decides the words; but for the copy of a stack, which is that stack and has seen them."""
        copy = self._experiment.control
        again = turn.arm if copy and copy.url and copy.name == turn.arm else ""
        return f"{self._started_ns} {turn.traffic} {again}"


def _as_met(arm: Arm, status: Document | None) -> Arm:
    """With the numbers of nodes and the policy of a stack that ran already."""
    if not arm.url or status is None:
        return arm
    roles = [node["role"] for node in status["nodes"]]
    policies = {str((node.get("facts") or {}).get("policy")) for node in status["nodes"]}
    settings = {"policy": policies.pop()} if len(policies) == 1 else {}
    return replace(arm, prefill=roles.count("prefill"), decode=roles.count("decode"), settings=settings)


def _broken_off(path: Path) -> Recording:
    with contextlib.suppress(OSError, ValueError):
        return load_recording(path)
    return Recording()


Groups = dict[tuple[int, float | None], dict[str, Recording]]  # by traffic, the recording of each arm


def _by_traffic(periods: Sequence[Period]) -> Groups:
    groups: Groups = {}
    for period in periods:
        groups.setdefault(period.turn.traffic, {})[period.turn.arm] = period.recording
    return groups


def _compare_tokens(groups: Groups) -> tuple[int, list[Document]]:
    """Of all periods under the same traffic."""
    compared, different = 0, []
    for (seed, _), recordings in groups.items():
        count, found = different_tokens(recordings)
        compared += count
        different += [{"seed": seed, **one} for one in found]
    return compared, different
