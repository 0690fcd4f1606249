"""Check that no process grows under half load with one fault per minute: `python -m tests.chaos soak --minutes 30`.

The soak samples the memory, descriptors and threads of every process every ten seconds. It starts with a warm-up of ten
minutes with a fault every 15 seconds, because allocators keep the memory of the highest peak, and most new peaks come
early. A least-squares fit to the later samples gives one slope per process and resource, and its standard error. Each
start of a process has its own intercept. A process without restarts counts as growing if a slope minus twice its error
exceeds 1 % of its memory per hour, or 10 % of its descriptors or threads per hour. The router keeps a short history
(`tests.chaos.small_memory`), because the growth of a long history would hide a leak.
"""

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from benchmarks.result import Cell, Result, Table
from tests.chaos.census import Count, count_all, count_shared
from tests.chaos.drive import CLIENTS, FaultThread, Supervisor, all_back
from tests.chaos.evidence import at_rest
from tests.chaos.traffic import Load, Outcome, failures
from tests.cluster.harness import Cluster, cluster, wait_for

SAMPLE_S = 10.0
WARM_FAULT_S = 15.0
LIFE_WARM_S = 60.0  # warm-up of a restarted process, whose memory grows until every code path has run once
SHARE = 0.5  # share of the time in which a client has a request in progress
RESOURCES = {
    "memory": attrgetter("rss_mib"), "descriptors": attrgetter("num_descriptors"), "threads": attrgetter("threads")
}  # fmt: skip
SHARE_AN_HOUR = {"memory": 0.01, "descriptors": 0.1, "threads": 0.1}  # maximum growth per hour, as a share
# The first node of each role is only frozen, so its process runs from the start to the end of the soak.
FAULTS = (
    ("decode-1", "SIGKILL"), ("prefill-0", "frozen 1 s"), ("prefill-1", "SIGTERM"), ("decode-0", "frozen 4 s"),
    ("prefill-1", "SIGKILL"), ("decode-0", "frozen 1 s"), ("decode-1", "SIGTERM"), ("prefill-0", "frozen 4 s"),
)  # fmt: skip
FROZEN = {"prefill-0", "decode-0"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of one process at one time."""

    name: str
    at_s: float
    age_s: float  # time since the process was first seen
    count: Count


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes of warm-up, excluded from the slopes")
    parser.add_argument("--fault-every-s", type=float, default=60.0)
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    chosen = parser.parse_args(arguments)
    prefixes = {"router": [sys.executable, "-m", "tests.chaos.small_memory"]}
    with cluster(2, 2, prefixes=prefixes, heartbeat_s=0.5, log_format="json") as running:
        soaked = soak(running, chosen.warm_up * 60, chosen.minutes * 60, chosen.fault_every_s)
    rows = slopes(soaked.samples, chosen.warm_up * 60)
    bad = soaked.problems
    bad += [f"{row[0]} grows: {row[-1]}" for row in rows if row[-1]]
    table = Table(
        "Slopes after the warm-up", ["process", "lives", "samples", "MiB at the end", "MiB per hour", "±", "descriptors per hour",
        "±", "threads per hour", "±", "grows"], rows,
    )  # fmt: skip
    outcomes = soaked.outcomes
    counts = [
        ["requests", len(outcomes)],
        ["lost", sum(bool(outcome.lost) for outcome in outcomes)],
        ["unequal", sum(outcome.is_unequal for outcome in outcomes)],
        ["faults", soaked.num_faults],
        ["processes restarted", soaked.num_restarts],
        ["left behind", "; ".join(bad) or "nothing"],
    ]
    result = Result(
        "soak",
        f"For {chosen.minutes:g} minutes, {CLIENTS} clients send requests half of the time, and a node is killed, ended or "
        f"frozen every {chosen.fault_every_s:g} s. The counts include {chosen.warm_up:g} minutes before that, with a fault "
        f"every {WARM_FAULT_S:g} s. The router's history is short, so that it is full when the slopes begin.",
        [Table("Soak", ["what", "number"], counts), table],
        [[s.name, round(s.at_s), s.count.pid, s.count.rss_mib, s.count.num_descriptors, s.count.threads]
         for s in soaked.samples],
        command=f"make soak MINUTES={chosen.minutes:g}",
    )  # fmt: skip
    print(*(table.markdown() for table in result.tables), sep="\n") if chosen.no_write else result.finish()
    return 1 if bad or failures(outcomes) else 0


@dataclass(slots=True)
class Soaked:
    """The result of a soak."""

    samples: list[Sample]
    outcomes: list[Outcome]
    num_faults: int
    num_restarts: int
    problems: list[str]


def soak(running: Cluster, warm_s: float, seconds: float, fault_every_s: float) -> Soaked:
    """Send requests and inject faults during a warm-up of `warm_s`, and then for `seconds`."""
    began, shared_before = time.monotonic(), count_shared(running)
    samples: list[Sample] = []
    born: dict[int, float] = {}  # process id -> time at which it was first seen

    def plan() -> Iterator[tuple[float, str, str]]:
        for name, kind in itertools.cycle(FAULTS):
            yield WARM_FAULT_S if time.monotonic() - began < warm_s else fault_every_s, name, kind

    with Supervisor(running, {}, thaw_s=60.0) as supervisor:
        with Load([running.url], running.model, CLIENTS, share=SHARE) as load:
            with FaultThread(running, plan()) as faults:
                while (now := time.monotonic() - began) < warm_s + seconds:
                    for name, count in count_all(running).items():
                        samples.append(Sample(name, now, now - born.setdefault(count.pid, now), count))
                    time.sleep(max(0.0, began + now + SAMPLE_S - time.monotonic()))
            wait_for(lambda: all_back(running), "all nodes back")
        _, problems = at_rest(running)
    alone = [f"{name} ended with status {status}" for name, status in supervisor.restarts if name in FROZEN]
    if alone:
        print(*map(running.log, FROZEN), sep="\n")
    more = count_shared(running)["files in /dev/shm"] - shared_before["files in /dev/shm"]
    problems += alone + ([f"{more} more files in /dev/shm"] if more > 0 else [])
    return Soaked(samples, load.outcomes, faults.counts.total(), len(supervisor.restarts), problems)


def slopes(samples: Sequence[Sample], warm_up_s: float) -> list[list[Cell]]:
    """Return a table row for each process. The last cell names the resources that grow."""
    rows: list[list[Cell]] = []
    for name in sorted({sample.name for sample in samples}):
        kept = [s for s in samples if s.name == name and s.at_s >= warm_up_s and s.age_s >= LIFE_WARM_S]
        last = [s.count for s in samples if s.name == name][-1]
        lives = len({s.count.pid for s in kept})
        numbers: list[Cell] = []
        grows = []
        for what, read in RESOURCES.items():
            slope, error = _fit([(s.count.pid, s.at_s / 3600, read(s.count)) for s in kept])
            numbers += [slope, error]
            if lives == 1 and None not in {slope, error} and slope - 2 * error > SHARE_AN_HOUR[what] * read(last):
                grows.append(what)
        rows.append([name, lives, len(kept), last.rss_mib, *numbers, ", ".join(grows)])
    return rows


def _fit(points: list[tuple[int, float, float]]) -> tuple[float | None, float | None]:
    """Fit a line to points (life, x, y) with an intercept per life. Return the slope and its standard error, or (None,
    None) if there are too few points. The error allows for the correlation between successive samples."""
    by_life: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for life, x, y in points:
        by_life[life].append((x, y))
    lives = [np.array(of_life) for of_life in by_life.values() if len(of_life) > 2]
    if not lives:
        return None, None
    x, y = np.concatenate([life - life.mean(axis=0) for life in lives]).T
    spread = float(x @ x)
    slope = float(x @ y) / spread
    freedom = len(x) - len(lives) - 1
    rest = y - slope * x
    correlation = float(rest[1:] @ rest[:-1] / (rest @ rest)) if rest.any() else 0.0  # of successive samples
    correlation = min(0.99, max(0.0, correlation))
    return slope, float(np.sqrt(rest @ rest / max(1, freedom) / spread * (1 + correlation) / (1 - correlation)))
