"""The search for the best candidate: successive halving (Jamieson and Talwalkar, 2016) with paired seeds.

First, all candidates serve the same requests at the same rate, and the better ones stay. Then the capacity of each
finalist is measured. The best candidate of each mode, co-located and disaggregated, always stays, because the plan
compares the modes.
"""

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from compare.load.outcome import LatencySlo
from compare.planning.candidates import Run, Simulations, miss_counts, prepare
from compare.planning.options import PlanOptions
from compare.stats.capacity import CapacityEstimate, CapacityPoint, CapacitySearch

FINALISTS = 3
MOST_STEPS = 12  # maximum number of changes of the rate in one round
WIDENING = 1.1  # factor of the rate while the capacity of a finalist is bracketed
STEP = 1.15  # factor between the rates at which all seeds are measured
VARIED_RATES = (0.5, 0.7, 1.0, 1.4, 2.0)  # factors of the capacity, to find the answer under other SLOs
SPLIT = "disaggregated"


class Round(NamedTuple):
    """One round of halving. Its runs have `requests` requests each, and `seeds` seeds. `kept` candidates stay, and
    `factor` is the factor by which the rate is changed."""

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


class PlanSearch:
    """Simulates in several processes. Used as a context manager, on one event loop.

    `answer_s` is the duration of an answer: runs last a multiple of it, because the load becomes steady only after that
    time. `say` gets a line for each round. `scores` has the last score of each candidate.
    """

    def __init__(self, options: PlanOptions, slo: LatencySlo, answer_s: float, say: Callable[[str], None]) -> None:
        self.scores: dict[str, Score] = {}
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

    async def causes(self, arm: str, rate: float) -> dict[str, int]:
        """Return why requests of an arm miss the SLO at a rate."""
        count = math.ceil(max(self._options.requests // 2, 6 * rate * self._answer_s))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _causes, arm, rate, count, self.slo)

    async def _halve(self, arms: Sequence[str], rate: float, size: Round) -> float:
        """Score all arms. While enough arms meet the SLO, raise the rate for them; while none does, lower it.
        Return the last rate."""
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

    async def _search(self, arm: str, rate: float, size: Round) -> Measured:
        runs: dict[tuple[float, int], Run] = {}

        async def measure(rate: float, seed: int) -> float:
            runs[rate, seed] = await self._run(arm, rate, seed, size.count(rate))
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

    async def _run(self, arm: str, rate: float, seed: int, count: int) -> Run:
        return await asyncio.get_running_loop().run_in_executor(self._pool, _run, arm, rate, seed, count)


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
    global _simulations  # noqa: PLW0603 - a pool passes no objects to its functions
    _simulations = prepare(options)


def _run(arm: str, rate: float, seed: int, count: int) -> Run:
    assert _simulations is not None
    return _simulations.run(arm, rate, seed, count)


def _causes(arm: str, rate: float, count: int, slo: LatencySlo) -> dict[str, int]:
    assert _simulations is not None
    return miss_counts(_simulations, arm, rate, count, slo)
