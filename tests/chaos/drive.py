"""Run one row of the matrix: a cluster of real processes with clients, faults and a supervisor.

The supervisor restarts processes that exit. At the end, the answers are checked, and no node may hold a block.
"""

import contextlib
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shared.clock import now_ns
from tests.chaos import features
from tests.chaos.evidence import Fault, Gap, at_rest, detection_s, fired, gap_of
from tests.chaos.proxy import NONE, Harm, Proxy, Relays
from tests.chaos.traffic import Ask, Load, Outcome, ask, failures, hash_answers
from tests.cluster.harness import Cluster, cluster, free_port, state_of, wait_for
from tests.cluster.kinds import model_of

CLIENTS = 8
POLL_S = 0.02
FAULTS_S = 120.0  # time limit for all faults of a row of the fault matrix
PROXY_HOST = "127.0.0.9"  # address that a node behind relays advertises
SignalTimes = tuple[tuple[float, int], ...]  # pairs of a pause in seconds and the signal sent after it
KINDS: dict[str, SignalTimes] = {
    "SIGKILL": ((0.0, signal.SIGKILL),),
    "SIGTERM": ((0.0, signal.SIGTERM),),
    "frozen 1 s": ((0.0, signal.SIGSTOP), (1.0, signal.SIGCONT)),
    "frozen 4 s": ((0.0, signal.SIGSTOP), (4.0, signal.SIGCONT)),
}


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals to one process, starting `at_s` seconds after the load began."""

    name: str
    at_s: float
    signals: SignalTimes


@dataclass(frozen=True, slots=True)
class Link:
    """A fault on the link to one node. It starts `at_s` seconds after the load began and lasts `for_s` seconds."""

    name: str
    kind: str  # "kv" or "rpc"
    at_s: float
    harm: Harm
    for_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the matrix: one kind of fault. `lives` has, by process name, the failpoints of each start."""

    name: str
    what: str
    lives: Mapping[str, Sequence[str]] = field(default_factory=dict)
    script: Sequence[Signals | Link] = ()
    thaw_s: float = 1.0  # time after which the supervisor continues a stopped process
    channel: str = "shm"
    prefill: int = 2
    decode: int = 2
    kind: str = ""  # kind of model and requests, as for `drive`
    may_lose: int = 0  # maximum number of requests that may fail: their router died, or they caused the fault
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """The result of a row."""

    row: Row
    outcomes: list[Outcome]
    faults: list[Fault]
    restarts: list[tuple[str, int]]  # name and exit status of each process that exited, in order of time
    status: dict[str, Any]
    detected_s: float | None  # as `detection_s` returns it
    gap: Gap | None  # of the request that waited longest for a token
    unbalanced: list[str]  # one line per node that still holds blocks
    harms: Counter[str]  # number of faults that the relays injected, by kind
    shares_pool: bool  # the prefill nodes compute in the pool of the decode node

    @property
    def num_lost(self) -> int:
        return sum(bool(outcome.lost) for outcome in self.outcomes)

    @property
    def num_unequal(self) -> int:
        return sum(outcome.is_unequal for outcome in self.outcomes)

    def complaints(self) -> list[str]:
        """Return one line per problem. A process that exited without an injected fault is a problem."""
        harmed = {fault.name for fault in self.faults}
        if self.shares_pool and any(name.startswith("decode") for name in harmed):
            harmed |= {name for name, _ in self.restarts if name.startswith("prefill")}  # they exit with that node
        died_alone = [f"{name} ended with status {status}" for name, status in self.restarts if name not in harmed]
        return failures(self.outcomes) + self.unbalanced + died_alone

    @property
    def is_good(self) -> bool:
        return len(self.complaints()) == self.num_lost <= self.row.may_lose


class Supervisor:
    """A thread that restarts processes that exit, as `baton up` does, and continues stopped processes."""

    def __init__(self, running: Cluster, lives: Mapping[str, Iterator[str]], thaw_s: float) -> None:
        self.restarts: list[tuple[str, int]] = []
        self._running = running
        self._lives = lives
        self._thaw_s = thaw_s
        self._stopped: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor")

    def __enter__(self) -> "Supervisor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            for name, process in list(self._running.processes.items()):
                status = process.poll()
                if status is not None:
                    self.restarts.append((name, status))
                    start_life(self._running, name, self._lives)
                elif state_of(process.pid) == "stopped":
                    since = self._stopped.setdefault(process.pid, time.monotonic())
                    if time.monotonic() - since > self._thaw_s:
                        process.send_signal(signal.SIGCONT)
                        del self._stopped[process.pid]


def all_back(running: Cluster) -> bool:
    """Return whether every process runs and the router is connected to every node."""
    try:
        alive = {node["id"] for node in running.status()["nodes"] if node["alive"]}
    except OSError:
        return False
    return all(
        process.poll() is None and (name in alive or name in running.urls)
        for name, process in list(running.processes.items())
    )


def start_life(running: Cluster, name: str, lives: Mapping[str, Iterator[str]]) -> None:
    running.own[name] = running.own.get(name, {}) | armed(next(lives.get(name, iter(())), ""))
    running.start(name)


def armed(failpoint: str) -> dict[str, object]:
    return {"failpoint": failpoint, "allow_failpoints": bool(failpoint)}


class FaultThread:
    """A context manager whose thread injects faults. `plan` yields tuples: pause in seconds, node name, one of KINDS.

    Only one node is faulty at a time, so that the others can serve. `counts` has the number of faults by node and kind.
    """

    def __init__(self, running: Cluster, plan: Iterator[tuple[float, str, str]]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._running, self._plan = running, plan
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._harm, name="faults")

    def __enter__(self) -> "FaultThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _harm(self) -> None:
        for pause_s, name, kind in self._plan:
            if self._over.wait(pause_s):
                return
            while not all_back(self._running):
                if self._over.wait(0.1):
                    return
            self.counts[name, kind] += 1
            send_signals(self._running.processes[name], KINDS[kind])


def send_signals(process: "subprocess.Popen[bytes]", signals: SignalTimes) -> None:
    for pause_s, number in signals:
        time.sleep(pause_s)
        process.send_signal(number)  # this has no effect on a process that has exited


# ---- a row, from start to end ---------------------------------------------------------------------------------------


def drive(row: Row, requests: int, channel: str = "", kind: str = "") -> Report:
    """Run the row. Raises AssertionError if a planned fault does not happen or a node does not come back.

    `kind` is one of `tests.cluster.kinds.KINDS`, or `features.KIND`. The default is the row's kind. If that is also
    empty, the nodes run the hash model with one group of layers.
    """
    lives = {name: iter(failpoints) for name, failpoints in row.lives.items()}
    own = {name: armed(next(life)) for name, life in lives.items()}
    with Relays() as relays, contextlib.ExitStack() as cleanup:
        proxies = {
            name: _proxied(relays, own, name) for name in {act.name for act in row.script if isinstance(act, Link)}
        }
        channel = channel or row.channel
        decode = 1 if channel == "pool" else row.decode  # only one decode node per device can share its pool
        settings = {"kv_channel": channel, "heartbeat_s": 0.5, "log_format": "json"} | row.settings
        asks, answers = ask, hash_answers
        if kind := kind or row.kind:
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
            more, asks, answers = _traffic_of(kind, directory)
            settings |= more
        running = cleanup.enter_context(cluster(row.prefill, decode, own=own, **settings))
        with Supervisor(running, lives, row.thaw_s) as supervisor:
            with Load([running.url], running.model, CLIENTS, requests, asks=asks, answers=answers) as load:
                try:
                    faults = _play(row.script, running, proxies)
                    wanted = sum(len(text.split(",")) for texts in row.lives.values() for text in texts if text)
                    wait_for(lambda: len(fired(running)) >= wanted, f"{wanted} failpoints of {row.name}", FAULTS_S)
                    wait_for(lambda: all_back(running), f"all nodes back after {row.name}", FAULTS_S)
                except AssertionError as error:
                    tails = "\n".join(f"{name}: {running.log(name)[-1500:]}" for name in running.processes)
                    raise AssertionError(f"{error}\n{running.status()['nodes']}\n{tails}") from None
            status, unbalanced = at_rest(running)
        if kind == features.KIND:
            features.check_use(running)
        faults += fired(running)
        slowest = max(
            (outcome for outcome in load.outcomes if outcome.id), key=lambda outcome: outcome.gap_s, default=None
        )
        harms = sum((proxy.harms for pair in proxies.values() for proxy in pair.values()), Counter[str]())
        gap = gap_of(running, slowest, faults) if slowest else None
        detected_s = detection_s(running, faults)
        return Report(
            row, load.outcomes, faults, supervisor.restarts, status, detected_s, gap, unbalanced, harms,
            channel == "pool",
        )  # fmt: skip


def _traffic_of(
    kind: str, directory: Path
) -> tuple[dict[str, object], Callable[[int], Ask], Callable[[Outcome], list[list[int]]]]:
    """Write a model of this kind. Return settings, and the functions that make requests and their expected answers."""
    if kind == features.KIND:
        settings, expected = features.scene()
        return settings, features.feature_ask, lambda outcome: expected[outcome.ask.index]
    model, groups = model_of(kind, directory)
    return {"model": model}, ask, partial(hash_answers, groups=groups)


def _proxied(relays: Relays, own: dict[str, dict[str, object]], name: str) -> dict[str, Proxy]:
    """Create the relays of a node and make the node advertise the address of the relays."""
    (rpc_port, rpc), (kv_port, kv) = _relay(relays), _relay(relays)
    own[name] = own.get(name, {}) | {"port": rpc_port, "kv_port": kv_port, "advertise": PROXY_HOST}
    return {"rpc": rpc, "kv": kv}


def _relay(relays: Relays) -> tuple[int, Proxy]:
    """Start a relay on a port that is free at both addresses (relay and node). Return the port and the relay."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError):
            return port, relays.between(PROXY_HOST, port)


def _play(
    script: Sequence[Signals | Link], running: Cluster, proxies: Mapping[str, Mapping[str, Proxy]]
) -> list[Fault]:
    """Inject the faults of the script at their times, and return the faults."""
    faults: list[Fault] = []
    began = time.monotonic()
    for act in sorted(script, key=lambda act: act.at_s):
        time.sleep(max(0.0, began + act.at_s - time.monotonic()))
        faults.append(Fault(act.name, type(act).__name__, now_ns()))
        if isinstance(act, Signals):
            send_signals(running.processes[act.name], act.signals)
        else:
            _disturb(proxies[act.name][act.kind], act)
    return faults


def _disturb(proxy: Proxy, link: Link) -> None:
    """Disturb a link for `link.for_s` seconds, and then until each kind of damage has happened at least once."""
    proxy.harm = link.harm
    time.sleep(link.for_s)
    wait_for(lambda: proxy.harms.keys() >= link.harm.damage, f"damage by {link}", FAULTS_S)
    proxy.harm = NONE
