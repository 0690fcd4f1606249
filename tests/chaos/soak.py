"""Check that no process grows under half load with one fault per minute: `python -m tests.chaos soak --minutes 30`.

The soak samples the memory, descriptors and threads of every process every ten seconds. It starts with a warm-up of ten
minutes with a fault every 15 seconds, because allocators keep the memory of the largest peak, and most new peaks come
early. A least-squares fit to the later samples gives one slope per process and resource, and its standard error. Each
start of a process has its own intercept. A process that never restarted grows if a slope minus twice its error exceeds
1 % of its memory per hour, or 10 % of its descriptors or threads per hour. The router keeps a short history
(`tests.chaos.small_memory`), because the growth of a long history would hide a leak.
"""

import argparse
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.result import Cell, Result, Table
from tests.chaos.census import Count, count_all, left_about
from tests.chaos.drive import CLIENTS, Supervisor, all_back
from tests.chaos.evidence import at_rest
from tests.chaos.traffic import Load
from tests.cluster.harness import Cluster, cluster, wait_for

SAMPLE_S = 10.0
WARM_FAULT_S = 15.0
LIFE_WARM_S = 60.0  # the warm-up of a restarted process: its memory grows until every code path has run once
SHARE = 0.5  # share of the time in which a client has a request in progress
SHARE_AN_HOUR = {"memory": 0.01, "descriptors": 0.1, "threads": 0.1}  # growth per hour that is accepted
KILL, TERM = ((0.0, signal.SIGKILL),), ((0.0, signal.SIGTERM),)
# The first node of each role is only frozen, so one process runs from the start to the end.
FAULTS = (
    ("decode-1", "SIGKILL", KILL),
    ("prefill-0", "frozen 1 s", ((0.0, signal.SIGSTOP), (1.0, signal.SIGCONT))),
    ("prefill-1", "SIGTERM", TERM),
    ("decode-0", "frozen 4 s", ((0.0, signal.SIGSTOP), (4.0, signal.SIGCONT))),
    ("prefill-1", "SIGKILL", KILL),
    ("decode-0", "frozen 1 s", ((0.0, signal.SIGSTOP), (1.0, signal.SIGCONT))),
    ("decode-1", "SIGTERM", TERM),
    ("prefill-0", "frozen 4 s", ((0.0, signal.SIGSTOP), (4.0, signal.SIGCONT))),
)


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
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes of warm-up, which the slopes leave out")
    parser.add_argument("--fault-every-s", type=float, default=60.0)
    parser.add_argument("--no-write", action="store_true", help="do not write the results file")
    chosen = parser.parse_args(arguments)
    prefixes = {"router": [sys.executable, "-m", "tests.chaos.small_memory"]}
    with cluster(2, 2, prefixes=prefixes, heartbeat_s=0.5, log_format="json") as running:
        soaked = Soak(running, chosen.warm_up * 60, chosen.minutes * 60, chosen.fault_every_s)
        bad = soaked.run()
        rows = slopes(soaked.samples, chosen.warm_up * 60)
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
        f"{chosen.minutes:g} minutes: {CLIENTS} clients ask half of the time, one fault each {chosen.fault_every_s:g} "
        f"s (kill, end or freeze a node); before them {chosen.warm_up:g} minutes with one each {WARM_FAULT_S:g} s, which "
        "the counts have too. The router's history is short, so that it is full when the slopes begin.",
        [Table("Soak", ["what", "number"], counts), table],
        [[s.name, round(s.at_s), s.count.pid, s.count.rss_mib, s.count.num_descriptors, s.count.threads]
         for s in soaked.samples],
        command=f"make soak MINUTES={chosen.minutes:g}",
    )  # fmt: skip
    print(*(table.markdown() for table in result.tables), sep="\n") if chosen.no_write else result.finish()
    return 1 if bad or any(outcome.lost or outcome.is_unequal for outcome in outcomes) else 0


class Soak:
    def __init__(self, running: Cluster, warm_s: float, seconds: float, fault_every_s: float) -> None:
        self.samples: list[Sample] = []
        self.num_faults = self.num_restarts = 0
        self._running = running
        self._warm_s = warm_s
        self._seconds = warm_s + seconds
        self._every_s = fault_every_s
        self._load = Load(running.url, running.model, CLIENTS, SHARE)
        self.outcomes = self._load.outcomes
        self._began = time.monotonic()
        self._born: dict[int, float] = {}  # process id -> when it was first seen

    def run(self) -> list[str]:
        """Run the soak and return the problems found at its end."""
        about_before = left_about(self._running)
        with Supervisor(self._running, {}, thaw_s=60.0) as supervisor:
            self._load.start()
            try:
                self._harm()
                wait_for(lambda: all_back(self._running), "all nodes back")
            finally:
                self._load.finish(0)
        self.num_restarts = len(supervisor.restarts)
        frozen = {name for name, what, _ in FAULTS if what.startswith("frozen")}
        alone = [f"{name} ended with status {status}" for name, status in supervisor.restarts if name in frozen]
        if alone:
            print(*(self._running.log(name) for name in frozen), sep="\n")
        _, held = at_rest(self._running)
        more = left_about(self._running)["files in /dev/shm"] - about_before["files in /dev/shm"]
        return held + alone + ([f"{more} files in /dev/shm"] if more > 0 else [])

    def _harm(self) -> None:
        next_sample, next_fault = 0.0, WARM_FAULT_S
        while (now := time.monotonic() - self._began) < self._seconds:
            if now >= next_sample:
                self._sample(now)
                next_sample += SAMPLE_S
            if now >= next_fault and all_back(self._running):
                self._fault()
                next_fault = now + (WARM_FAULT_S if now < self._warm_s else self._every_s)
            time.sleep(0.1)

    def _fault(self) -> None:
        name, _, signals = FAULTS[self.num_faults % len(FAULTS)]
        self.num_faults += 1
        process = self._running.processes[name]
        for pause_s, number in signals:
            time.sleep(pause_s)
            process.send_signal(number)

    def _sample(self, now: float) -> None:
        for name, count in count_all(self._running).items():
            born = self._born.setdefault(count.pid, now)
            self.samples.append(Sample(name, now, now - born, count))


def slopes(samples: Sequence[Sample], warm_up_s: float) -> list[list[Cell]]:
    """Return a table row for each process. The last cell names the resources that grow."""
    rows: list[list[Cell]] = []
    for name in sorted({sample.name for sample in samples}):
        kept = [s for s in samples if s.name == name and s.at_s >= warm_up_s and s.age_s >= LIFE_WARM_S]
        fits = [
            _fit([(s.count.pid, s.at_s / 3600, value) for s, value in zip(kept, values, strict=True)])
            for values in (
                [s.count.rss_mib for s in kept],
                [s.count.num_descriptors for s in kept],
                [s.count.threads for s in kept],
            )
        ]
        last = [s.count for s in samples if s.name == name][-1]
        lives = len({s.count.pid for s in kept})
        whole = {"memory": last.rss_mib, "descriptors": last.num_descriptors, "threads": last.threads}
        grows = [
            what
            for (what, size), (slope, error) in zip(whole.items(), fits, strict=True)
            if lives == 1 and slope is not None and error is not None and slope - 2 * error > SHARE_AN_HOUR[what] * size
        ]
        numbers = [number for fit in fits for number in fit]
        rows.append([name, lives, len(kept), last.rss_mib, *numbers, ", ".join(grows)])
    return rows


def _fit(points: list[tuple[int, float, float]]) -> tuple[float | None, float | None]:
    """Fit a line to points (life, x, y) with an intercept per life. Return the slope and its standard error, or None
    twice if there are too few points. The error allows for the correlation between successive samples."""
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
    alike = float(rest[1:] @ rest[:-1] / (rest @ rest)) if rest.any() else 0.0  # correlation of successive samples
    alike = min(0.99, max(0.0, alike))
    return slope, float(np.sqrt(rest @ rest / max(1, freedom) / spread * (1 + alike) / (1 - alike)))
