"""One run of a simulated cluster with its faults, and the invariants that hold during the run and at its end.

`simulate(seed)` does one run. The same seed gives the same run, bit for bit: `Result.fingerprint` covers each callback
and each line of the log.
"""

import asyncio
import gc
import logging
import traceback
import zlib
from collections import Counter
from contextlib import nullcontext
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any

from scheduler.drafters import Speculation
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from shared.failpoints import FailpointError
from tests.simulation.channel import Exchange
from tests.simulation.checks import at_the_end, left_behind, unbalanced
from tests.simulation.client import Client
from tests.simulation.engine import PlanGuesses, SimEngine, ledger_error
from tests.simulation.faults import RESTART_S, Faults
from tests.simulation.hosts import Host, NodeHost, RouterHost
from tests.simulation.loop import CURRENT, EPOCH_S, WORLD, Process, SimLoop
from tests.simulation.mutations import MUTATIONS
from tests.simulation.network import Network
from tests.simulation.patches import simulated, without_teardown_errors
from tests.simulation.redis import FakeRedis
from tests.simulation.scenario import Scenario, draw

MAX_CALLBACKS = 600_000
MAX_VIOLATIONS = 20
START_S = 10.0
ANSWER_S = 100.0  # time limit from the last fault until each request has an answer
REST_S = 100.0  # time limit from the last answer until no resource is held for a request
END_S = 30.0
OPERATORS = {"_set_role"}  # tasks that belong to an operator, not to the router


@dataclass(slots=True)
class Result:
    seed: int
    violations: list[str]
    reached: Counter[str]
    fingerprint: str
    lines: list[str]
    virtual_s: float
    callbacks: int


class World:
    """The state of one run: its hosts, network, clients and faults, and the violations found so far."""

    def __init__(self, scenario: Scenario, *, keeps_log: bool) -> None:
        self.scenario = scenario
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self.checksum = 0
        self._keeps_log = keeps_log
        self.context = Context()
        self.context.run(CURRENT.set, WORLD)
        self.random = Random(f"world {scenario.seed}")
        self.loop = SimLoop(Random(f"turns {scenario.seed}"), self._uncaught)
        self.network = self.loop.network = Network(self.loop)
        weather = Random(f"weather {scenario.seed}")
        self.exchange = Exchange(self.network, weather, scenario.kv_faults, scenario.row_s, self.reached, self.violate)
        self.redis = FakeRedis()
        self.faults = Faults(self)
        self.router = RouterHost(self, "router")
        self.nodes = [NodeHost(self, f"prefill-{index}", "prefill") for index in range(scenario.num_prefill)]
        self.nodes += [NodeHost(self, f"decode-{index}", "decode") for index in range(scenario.num_decode)]
        self.hosts: list[Host] = [self.router, *self.nodes]
        self.dead_tasks: list[Any] = []  # kept alive, because the destruction of a task runs its finally blocks
        self.clients = [Client(self, plan) for plan in scenario.plans]
        self.is_ending = self.is_over = False
        self.hangs = any(fault.kind == "hang" for fault in scenario.faults)

    # ---- one run ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        for host in self.hosts:
            host.start()
        await self._within(START_S, self._missing, "is not connected")
        running = [asyncio.ensure_future(client.run()) for client in self.clients]
        await self.faults.run()
        self.faults.heal()
        self.note("all faults end")
        await asyncio.gather(*running)
        await self._within(ANSWER_S, lambda: [c.plan.id for c in self.clients if not c.outcome], "has no answer")
        await asyncio.sleep(0.1)  # let the clients that cancel disconnect
        await self._within(REST_S, lambda: unbalanced(self), "is still held")
        await self._within(START_S, self._missing, "is not connected again")
        for text in at_the_end(self):
            self.violate(text)
        gc.collect()  # makes asyncio report exceptions that were never retrieved
        if self.violations:
            return
        self.is_ending = True
        for host in (*self.nodes, self.router):
            if host.is_up:
                host.drain()
        await self._within(END_S, lambda: [host.name for host in self.hosts if host.is_up], "does not end")
        for text in left_behind(self):
            self.violate(text)

    def _missing(self) -> list[str]:
        """Return the nodes whose current process the router does not know."""
        fleet = self.router.fleet
        seen = {info.incarnation_id for info, _, alive in fleet.nodes() if alive} if fleet is not None else set()
        return [host.name for host in self.nodes if host.incarnation_id not in seen]

    async def _within(self, limit_s: float, missing: Any, what: str) -> None:
        until = self.loop.now + limit_s
        while (left := missing()) and not self.violations:
            if self.loop.now > until:
                self.violate(f"after {limit_s:.0f} s {left} {what}")
            await asyncio.sleep(0.1)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        if self.is_over:
            return
        line = f"{self.loop.now - EPOCH_S:11.6f} {text}"
        self.checksum = zlib.crc32(line.encode(), self.checksum)
        if self._keeps_log:
            self.lines.append(line)

    def violate(self, text: str) -> None:
        self.note(f"VIOLATION {text}")
        if len(self.violations) < MAX_VIOLATIONS and not self.is_over:
            self.violations.append(text)

    def reached(self, what: str) -> None:
        self.counts[what] += 1

    def log(self, record: logging.LogRecord) -> None:
        """Handle a warning or an error that the simulated system logs."""
        process = CURRENT.get()
        if not process.alive:
            return
        self.note(f"{process} {record.levelname} {record.getMessage()}")
        self.reached(f"log: {record.msg}")
        if str(record.msg).startswith("request %s is retried"):
            self._moves(str(record.args[0] if record.args else ""))
        if record.levelno >= logging.ERROR and not self._is_injected(record):
            error = record.exc_info[1] if record.exc_info else None
            self.violate(f"{process} logged an error: {record.getMessage()}" + (f": {error!r}" if error else ""))
            self.note("".join(traceback.format_exception(error)) if error is not None else "")

    def _moves(self, attempt: str) -> None:
        identity, sample, _ = attempt.split(".")
        client = next(client for client in self.clients if client.plan.id == identity)
        self.reached("state: moved in decode" if client.has_received(int(sample)) else "state: moved before a token")

    def _is_injected(self, record: logging.LogRecord) -> bool:
        if record.exc_info is None:
            return self.faults.fired_raise or (
                self.hangs and str(record.msg).startswith(("stuck", "the engine failed"))
            )
        return _comes_from(record.exc_info[1], FailpointError)

    def _uncaught(self, process: Process, text: str, error: BaseException | None) -> None:
        if process.alive and not _comes_from(error, FailpointError):
            self.violate(f"{process}: {text}: {error!r}")
            self.note("".join(traceback.format_exception(error)) if error is not None else "")

    def engine_made(self, engine: SimEngine, scheduler: Scheduler) -> None:
        host = self.host_of(engine.process)
        host.engine, host.scheduler = engine, scheduler
        if num_guesses := self.scenario.num_guesses:
            rows = [plan.row for plan in self.scenario.plans]
            scheduler.speculation = Speculation(PlanGuesses(rows, self.scenario.seed), num_guesses)

    def audit(self, process: Process, scheduler: Scheduler) -> None:
        """Check the blocks after an iteration of an engine."""
        if process.alive and (wrong := ledger_error(scheduler)):
            self.violate(f"{process}: {wrong}")
        ledger, node = scheduler.ledger(), self.host_of(process).node if process.alive else None
        for state, is_reached in (
            ("quarantined", ledger.quarantined),
            ("reserved", ledger.reserved),
            ("preempted", scheduler.counters.preemptions),
            ("guesses accepted", scheduler.counters.accepted_tokens),
            ("guesses rejected", scheduler.counters.draft_tokens - scheduler.counters.accepted_tokens),
            ("prefix hit", scheduler.counters.cache_hits),
            ("rows found corrupt", node is not None and node.stats().rows_corrupt),
            ("a moved request found its blocks", any(map(_is_resumed, scheduler.running))),
        ):
            if is_reached:
                self.reached(f"state: {state}")

    # ---- ends of processes -------------------------------------------------------------------------------------------

    def host_of(self, process: Process) -> Any:
        return next(host for host in self.hosts if host.process is process)

    def died(self, host: Host, *, silent: bool = False) -> None:
        """End a process with its memory, its connections and its clients."""
        process = host.process
        self.note(f"{host.name} dies")
        self.dead_tasks += self._tasks_of(process)
        process.alive = False
        process.ready.clear()
        if not self.is_ending and sum(not other.is_up for other in self.nodes) > 1:
            self.reached("state: two nodes down")
        host.is_silent = silent
        self.network.died(process, silent=silent)
        self.exchange.died(process, silent=silent)
        for client in self.clients:
            if client.started_in is process and not client.outcome:
                client.outcome = "lost"
                self.reached("client: lost")

    def exited(self, process: Process, status: int) -> None:
        """Handle a call of `os._exit`, which a process makes after its engine fails."""
        self.note(f"{process} exits with {status}")
        self.reached(f"exit {status}")
        if not self.faults.fired_raise and not self.hangs:
            self.violate(f"{process} exited with {status}")
        self.faults.kill(self.host_of(process))

    def _tasks_of(self, process: Process) -> list[Any]:
        tasks: list[Any] = list(asyncio.all_tasks(self.loop))
        return sorted((task for task in tasks if task.process is process), key=lambda task: task.serial)

    def ended(self, host: Host) -> None:
        """Handle an orderly exit."""
        if not host.is_up:
            return
        names = [task.get_coro().__qualname__ for task in self._tasks_of(host.process) if task is not host.task]
        host.left = [name for name in names if name not in OPERATORS]
        self.reached("exited in order")
        self.died(host)
        if not self.is_ending:
            self.loop.call_later(self.random.choice(RESTART_S), self.faults._restart, host)


def simulate(seed: int, mutation: str = "", *, keeps_log: bool = False) -> Result:
    """Run one seed, with the named mutation if there is one."""
    with MUTATIONS[mutation][1]() if mutation else nullcontext(), without_teardown_errors():
        return _run(seed, keeps_log)


def _run(seed: int, keeps_log: bool) -> Result:
    """Run one seed. The world is local to this function, so that it is destroyed inside `without_teardown_errors`."""
    world = World(draw(seed), keeps_log=keeps_log)
    with simulated(world):
        world.note(str(world.scenario))
        try:
            world.loop.run(world.run(), MAX_CALLBACKS)
        except Exception as error:  # noqa: BLE001 - a broken run is a violation like any other
            world.violate(f"the simulation failed: {error!r}")
        fingerprint = f"{world.loop.fingerprint & (2**64 - 1):016x}-{world.checksum:08x}"
        result = Result(
            seed,
            list(world.violations),
            world.counts,
            fingerprint,
            world.lines,
            world.loop.now - EPOCH_S,
            world.loop.num_callbacks,
        )
        world.is_over = True
        world.loop.close()
    return result


def _is_resumed(request: Request) -> bool:
    return request.num_cached > 0 and not request.id.endswith(".0")


def _comes_from(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
