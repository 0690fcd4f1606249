"""Simulate clusters: many seeds on all cores, or one with its log. Prints which faults and states were reached."""

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.mutations import MUTATIONS
from tests.simulation.seeds import results, run_one
from tests.simulation.sometimes import table

REPLAY = "python -m tests.simulation --seed {seed} --log"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--log", action="store_true", help="with --seed: print the log of the run")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--mutate",
        choices=[*MUTATIONS, "all"],
        default="",
        help="apply a mutation first and report whether it is detected",
    )
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.mutate, options.log)
    if options.mutate:
        names = list(MUTATIONS) if options.mutate == "all" else [options.mutate]
        return _mutate(names, range(options.first, options.first + options.seeds), options.jobs)
    return _many(range(options.first, options.first + options.seeds), options.jobs)


def _replay(seed: int, mutation: str, log: bool) -> int:
    result = run_one(seed, mutation, keeps_log=log)
    print("\n".join(result.lines))
    print(f"seed {seed}: {result.turns} turns, {result.virtual_s:.1f} virtual seconds, {result.fingerprint}")
    for violation in result.violations:
        print(f"VIOLATION: {violation}")
    return 1 if result.violations else 0


def _many(seeds: range, jobs: int) -> int:
    began, reached, bad, virtual_s = time.monotonic(), Counter[str](), 0, 0.0
    for done, result in enumerate(results(seeds, jobs=jobs), 1):
        reached.update(result.reached)
        virtual_s += result.virtual_s
        if result.violations:
            bad += 1
            print(f"seed {result.seed}: {result.violations[0][:400]}\n  replay: {REPLAY.format(seed=result.seed)}")
        if done % 500 == 0:
            print(f"{done} seeds, {bad} bad, {time.monotonic() - began:.0f} s", flush=True)
    text, missing = table(reached)
    print(text)
    print(
        f"{len(seeds)} seeds, {virtual_s:.0f} virtual seconds in {time.monotonic() - began:.1f} s; {bad} with violations"
    )
    if missing:
        print(f"never reached: {', '.join(missing)}")
    return 1 if bad else 0


def _mutate(names: list[str], seeds: range, jobs: int) -> int:
    missed = 0
    for name in names:
        caught = [result for result in results(seeds, name, jobs) if result.violations]
        missed += not caught
        first = f"seed {caught[0].seed}: {caught[0].violations[0][:120]}" if caught else "NOT DETECTED"
        print(f"{name:32} {len(caught):4} of {len(seeds)}  {first}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
