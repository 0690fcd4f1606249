"""Simulate clusters: many seeds on all cores, or one seed with its log. Print which faults and states were reached."""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.checks import WANTED, table
from tests.simulation.mutations import MUTATIONS
from tests.simulation.world import Result, simulate

REPLAY = "python -m tests.simulation --seed {seed} --log"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--log", action="store_true", help="with --seed: print the log of the run")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--mutate", choices=[*MUTATIONS, "all"], default="",
                        help="apply a mutation, and report the first seed that detects it")  # fmt: skip
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.mutate, options.log)
    seeds = range(options.first, options.first + options.seeds)
    # Freeze the objects of imported libraries, so that the garbage collections of each seed do not visit them.
    with ProcessPoolExecutor(options.jobs, initializer=gc.freeze) as pool:
        if options.mutate:
            return _mutate(pool, list(MUTATIONS) if options.mutate == "all" else [options.mutate], seeds)
        return _many(pool, seeds)


def detecting_seed(name: str, seeds: Iterable[int]) -> Result | None:
    """Return the result of the first seed that detects the mutation."""
    return next((result for result in (simulate(seed, name) for seed in seeds) if result.violations), None)


def _replay(seed: int, mutation: str, log: bool) -> int:
    result = simulate(seed, mutation, keeps_log=log)
    print(*result.lines, sep="\n")
    print(f"seed {seed}: {result.callbacks} callbacks, {result.virtual_s:.1f} virtual seconds, {result.fingerprint}")
    for violation in result.violations:
        print(f"VIOLATION: {violation}")
    return 1 if result.violations else 0


def _many(pool: ProcessPoolExecutor, seeds: range) -> int:
    began, reached, bad, virtual_s = time.monotonic(), Counter[str](), 0, 0.0
    for done, result in enumerate(pool.map(simulate, seeds, chunksize=4), 1):
        reached.update(result.reached)
        virtual_s += result.virtual_s
        if result.violations:
            bad += 1
            print(f"seed {result.seed}: {result.violations[0][:400]}\n  replay: {REPLAY.format(seed=result.seed)}")
        if done % 500 == 0:
            print(f"{done} seeds, {bad} bad, {time.monotonic() - began:.0f} s", flush=True)
    text, missing = table(reached)
    print(text)
    took_s = time.monotonic() - began
    print(f"{len(seeds)} seeds, {virtual_s:.0f} virtual seconds in {took_s:.1f} s; {bad} with violations")
    if missing:
        print(f"never reached: {', '.join(missing)}")
    is_thin = len(seeds) >= 200 and len(missing) > 0.05 * len(WANTED)
    return 1 if bad or is_thin else 0


def _mutate(pool: ProcessPoolExecutor, names: list[str], seeds: range) -> int:
    missed = 0
    for name, result in zip(names, pool.map(partial(detecting_seed, seeds=seeds), names), strict=True):
        missed += result is None
        first = f"seed {result.seed}: {result.violations[0][:120]}" if result else "NOT DETECTED"
        print(f"{name:52} {first}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
