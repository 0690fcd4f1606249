"""Runs seeds, one or many, here or on several cores, with the system whole or broken."""

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
    """What the libraries made is left out of every collection after this."""
    gc.collect()
    gc.freeze()


def run_one(seed: int, mutation: str = "", *, keeps_log: bool = False) -> Result:
    _settled()
    with MUTATIONS[mutation]() if mutation else nullcontext():
        return simulate(seed, keeps_log=keeps_log)


def results(seeds: Iterable[int], mutation: str = "", jobs: int | None = None) -> Iterator[Result]:
    """In the order of the seeds. `jobs`: processes; None: one a core."""
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield from (run_one(seed, mutation) for seed in seeds)
        return
    seeds = list(seeds)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_one, seeds, [mutation] * len(seeds), chunksize=4)
