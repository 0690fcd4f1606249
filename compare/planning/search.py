"""The search for the best candidate: successive halving (Jamieson and Talwalkar, 2016) with paired seeds.

First, all candidates serve the same requests at the same rate, and the better ones stay. Then the capacity of each
finalist is measured. The best candidate of each mode, co-located and disaggregated, always stays, because the plan
compares the modes.
"""

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from compare.load.outcome import LatencySlo
from compare.planning.candidates import SAME, Lengths, Run, Simulations, miss_counts, prepare
from compare.planning.options import PlanOptions
from compare.stats.capacity import CapacityEstimate, CapacityPoint, CapacitySearch
from shared.lifecycle import set_parent_death_signal

FINALISTS = 3
MOST_STEPS = 12  # maximum number of changes of the rate in one round
WIDENING = 1.1  # factor between successive rates while the search brackets a finalist's capacity
STEP = 1.15  # factor between the rates at which all seeds are measured
VARIED_RATES = (0.5, 0.7, 1.0, 1.4, 2.0)  # rates of the runs to judge by other SLOs, as multiples of the capacity
VARIED_LENGTHS = (0.5, 1.0, 2.0)  # factors of the lengths of prompts and of answers
SPLIT = "disaggregated"


class Round(NamedTuple):
    """One round of halving. Each candidate has one run per seed, with at least `requests` requests. The best `kept`
    candidates stay. When the rate changes, it is multiplied or divided by `factor`."""

    requests: int
    seconds: float  # minimum seconds of traffic
    seeds: int
    kept: int
    factor: float

    def count(self, rate: float) -> int:
        return max(self.requests, math.ceil(rate * self.seconds))


class Score(NamedTuple):
    """The result of a candidate in its last round. A greater score is better."""

    rate: float
    attainment: float


@dataclass(slots=True)
class Measured:
    """The measurements of a finalist: its capacity, the attainment at each rate, and the runs."""

    arm: str
    capacity: CapacityEstimate
    points: list[CapacityPoint] = field(default_factory=list)
    runs: dict[tuple[float, int], Run] = field(default_factory=dict)

    @property
    def is_split(self) -> bool:
        return self.arm.startswith(SPLIT)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The results of a search. The last two fields describe the best finalist of each mode: `varied` has runs at rates
    around its capacity, and `lengths` has its capacities with other lengths of prompts and answers."""

    scores: Mapping[str, Score]  # the last score of each candidate
    points: Mapping[str, Sequence[CapacityPoint]]  # the mean attainment of each candidate at each rate
    found: Sequence[Measured]  # the finalists, best first
    causes: Mapping[str, Mapping[str, int]]  # each finalist's misses by cause, at the capacity of the best finalist
    varied: Mapping[str, Mapping[tuple[float, int], Run]]  # runs by arm, rate and seed
    lengths: Mapping[Lengths, Mapping[str, CapacityEstimate]]  # capacities by lengths and arm


class PlanSearch:
    """Searches with simulations in several processes. Use it as a context manager, on one event loop.

    `answer_s` is the duration of an answer. Runs last a multiple of `answer_s`, because the load becomes steady only
    when the first answers have ended. `say` gets a line for each round. `scores` has the last score of each candidate,
    and `points` has its mean attainment at each rate.
    """

    def __init__(self, options: PlanOptions, slo: LatencySlo, answer_s: float, say: Callable[[str], None]) -> None:
        self.scores: dict[str, Score] = {}
        self.points: dict[str, list[CapacityPoint]] = defaultdict(list)
        self.slo, self._options, self._answer_s, self._say = slo, options, answer_s, say
        workers = options.workers or len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(workers, initializer=_begin, initargs=(options,))

    def __enter__(self) -> "PlanSearch":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def best(self, arms: Sequence[str], rate: float) -> list[Measured]:
        """Return the finalists, best first. `rate` is an estimate of the best capacity, in requests/s."""
        least, answer_s = self._options.requests, self._answer_s
        third = max(FINALISTS, -(-len(arms) // 3))
        for size in (
            Round(max(100, least // 4), 6 * answer_s, 1, third, 1.3),
            Round(max(100, least // 2), 8 * answer_s, 2, FINALISTS, 1.1),
        ):
            rate = await self._halve(arms, rate, size)
            arms = kept(sorted(arms, key=self.scores.__getitem__, reverse=True), size.kept)
        size = Round(least, 12 * answer_s, self._options.seeds, FINALISTS, WIDENING)
        self._say(f"capacities of {', '.join(arms)}: {size.seeds} seeds")
        found = await asyncio.gather(*(self._search(arm, self.scores[arm].rate, size) for arm in arms))
        return sorted(found, key=lambda one: -one.capacity.rate)

    async def varied(self, arm: str, rate: float) -> dict[tuple[float, int], Run]:
        """Return runs of an arm at rates around its capacity."""
        size = Round(self._options.requests // 2, 8 * self._answer_s, 2, 1, 1.0)
        keys = [(rate * factor, seed) for factor in VARIED_RATES for seed in range(size.seeds)]
        runs = await asyncio.gather(*(self._run(arm, at, seed, size.count(at)) for at, seed in keys))
        return dict(zip(keys, runs, strict=True))

    async def by_lengths(
        self, found: Mapping[str, float], simulations: Simulations
    ) -> dict[Lengths, dict[str, CapacityEstimate]]:
        """Return the capacity of each mode with other lengths of prompts and answers, measured with one seed. `found`
        has the capacity of each mode's best candidate. Lengths that exceed a node's memory are left out."""
        if simulations.rows(0)[0].prompt is not None:
            return {}  # the trace has the tokens of its prompts, so their lengths are fixed
        cells = [(prompt, answer) for prompt in VARIED_LENGTHS for answer in VARIED_LENGTHS]
        cells = [each for each in cells if each != SAME and simulations.longest(each) <= simulations.kv_tokens]
        self._say(f"capacities with {len(cells)} other combinations of lengths")
        capacities: dict[Lengths, dict[str, CapacityEstimate]] = {each: {} for each in cells}

        async def search(arm: str, capacity: float, lengths: Lengths) -> None:
            split = simulations.split_for(arm, self.slo, lengths)
            answer_s = simulations.request_s(self.slo, lengths)[2]
            size = Round(self._options.requests // 4, 4 * answer_s, 1, 1, STEP)
            change = simulations.first_rate(split, self.slo, lengths) / simulations.first_rate(arm, self.slo)
            measured = await self._search(split, capacity * change, size, lengths)
            capacities[lengths][split] = measured.capacity

        await asyncio.gather(*(search(*item, each) for item in found.items() for each in cells))
        return capacities

    async def causes(self, arm: str, rate: float) -> dict[str, int]:
        """Return how many requests of an arm miss the SLO at a rate, by main cause."""
        count = math.ceil(max(self._options.requests // 2, 6 * rate * self._answer_s))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _causes, arm, rate, count, self.slo)

    async def _halve(self, arms: Sequence[str], rate: float, size: Round) -> float:
        """Score all arms. While enough arms meet the SLO, continue with these arms at a higher rate. While no arm meets
        the SLO, lower the rate. Return the last rate."""
        has_risen = has_fallen = False
        for _ in range(MOST_STEPS):
            self._say(f"{len(arms)} candidates at {rate:.1f} req/s, {size.seeds} seed{'s' * (size.seeds > 1)}")
            await self._score(arms, rate, size)
            good = [arm for arm in arms if self.scores[arm].attainment >= self._options.attainment]
            if len(good) > size.kept // 2 and not has_fallen:
                arms, rate, has_risen = good, rate * size.factor, True
            elif not good and not has_risen:
                rate, has_fallen = rate / size.factor, True
            else:
                break
        return rate

    async def _score(self, arms: Sequence[str], rate: float, size: Round) -> None:
        keys = [(arm, seed) for arm in arms for seed in range(size.seeds)]
        runs = await asyncio.gather(*(self._run(arm, rate, seed, size.count(rate)) for arm, seed in keys))
        for arm in arms:
            own = [run for (name, _), run in zip(keys, runs, strict=True) if name == arm]
            self.scores[arm] = Score(rate, fmean(run.attainment(self.slo) for run in own))
            self.points[arm].append(CapacityPoint(rate, 0, self.scores[arm].attainment))

    async def _search(self, arm: str, rate: float, size: Round, lengths: Lengths = SAME) -> Measured:
        runs: dict[tuple[float, int], Run] = {}

        async def measure(rate: float, seed: int) -> float:
            runs[rate, seed] = await self._run(arm, rate, seed, size.count(rate), lengths)
            return runs[rate, seed].attainment(self.slo)

        most = MOST_STEPS + 8 * size.seeds
        search = CapacitySearch(
            measure,
            self._options.attainment,
            max_runs=most,
            min_seeds=size.seeds,
            max_seeds=size.seeds,
            widening=size.factor,
            step=STEP,
        )
        return Measured(arm, await search.run(rate), search.points, runs)

    async def _run(self, arm: str, rate: float, seed: int, count: int, lengths: Lengths = SAME) -> Run:
        return await asyncio.get_running_loop().run_in_executor(self._pool, _run, arm, rate, seed, count, lengths)


def kept(arms: Sequence[str], count: int) -> list[str]:
    """Return the first `count` arms, with at least one of each mode."""
    best = list(arms[:count])
    for is_split in (False, True):
        own = [arm for arm in arms if arm.startswith(SPLIT) == is_split]
        if own and own[0] not in best:
            best[-1] = own[0]
    return best


_simulations: Simulations | None = None  # the simulations of this worker process


def _begin(options: PlanOptions) -> None:
    global _simulations  # noqa: PLW0603 - the functions that a pool calls cannot get this object as an argument
    set_parent_death_signal(os.getppid())()  # otherwise, a worker would wait forever after SIGTERM to its parent
    _simulations = prepare(options)


def _run(arm: str, rate: float, seed: int, count: int, lengths: Lengths) -> Run:
    assert _simulations is not None
    return _simulations.run(arm, rate, seed, count, lengths)


def _causes(arm: str, rate: float, count: int, slo: LatencySlo) -> dict[str, int]:
    assert _simulations is not None
    return miss_counts(_simulations, arm, rate, count, slo)
