"""Run one or many seeds, in this process or on several cores, with or without a mutation."""

import gc
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache
from multiprocessing import get_context

from tests.simulation.mutations import MUTATIONS
from tests.simulation.world import Result, simulate


@cache
def _settled() -> None:
    """Exclude the objects of imported libraries from later garbage collections."""
    gc.collect()
    gc.freeze()


def run_one(seed: int, mutation: str = "", *, keeps_log: bool = False) -> Result:
    _settled()
    with MUTATIONS[mutation]() if mutation else nullcontext():
        return simulate(seed, keeps_log=keeps_log)


def results(seeds: Iterable[int], mutation: str = "", jobs: int | None = None) -> Iterator[Result]:
    """Yield results in the order of the seeds. `jobs`: number of processes; None: one per core."""
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield from (run_one(seed, mutation) for seed in seeds)
        return
    seeds = list(seeds)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_one, seeds, [mutation] * len(seeds), chunksize=4)
