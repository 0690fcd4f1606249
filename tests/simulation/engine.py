"""The engine without its thread: each iteration of its loop is a callback on virtual time, followed by an audit.

Only waiting is simulated. Everything else is the code of the real `Engine`. The audit of the scheduler, which a real
engine runs only now and then, runs after every iteration.
"""

import asyncio
import logging
import queue
from collections import deque
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from engine.engine import Command, Engine, EngineListener
from engine.hash_model import HashRunner
from engine.runner import PendingStep, Runner, SliceOutput
from node.watchdog import TICK_S, Watchdog
from scheduler.drafters import TextDrafter
from scheduler.geometry import UNIFORM, Group
from scheduler.request import Request, RequestState, Slice, Step
from scheduler.scheduler import Scheduler
from tests.simulation.loop import CURRENT

log = logging.getLogger("baton.engine")
IDLE_S = 1.0
MAX_LAST_ITERATIONS = 100
TOKENS_PER_ITERATION = 10  # computing this many tokens takes as long as an iteration without tokens


class Idle(BaseException):
    """Raised to end an iteration of the engine that would wait for a command."""


class Inbox:
    """A queue whose reader never blocks. Instead, `get` raises Idle, which ends the iteration of the engine."""

    def __init__(self, engine: "SimEngine") -> None:
        self._engine = engine
        self._commands: deque[Command | None] = deque()
        self._is_reported = False  # the last blocking call raised queue.Empty
        self.is_last = False  # true while the engine waits for room; an empty queue then raises Idle at once

    def put(self, command: Command | None) -> None:
        self._commands.append(command)
        self._engine.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Command | None:
        """Return the next command. If none is left, blocking calls raise queue.Empty once, then Idle."""
        if self._commands:
            self._is_reported = False
            return self._commands.popleft()
        if block and (self._is_reported or self.is_last):
            raise Idle
        self._is_reported = block
        raise queue.Empty

    def get_nowait(self) -> Command | None:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._commands

    def qsize(self) -> int:
        return len(self._commands)


class SimEngine(Engine):
    """An engine that registers with `world` and reports its audits there. `hangs_until` delays its next iteration."""

    world: Any = None  # set while a simulation runs

    def __init__(
        self, scheduler: Scheduler, runner: Runner, listener: EngineListener, *given: Any, **more: Any
    ) -> None:
        super().__init__(scheduler, runner, listener, *given, **more)
        self.process = CURRENT.get()
        self._inbox: Any = Inbox(self)
        self._loop: Any = asyncio.get_running_loop()
        self._next_call: Any = None
        self._is_idle = self._is_begun = self._is_over = False
        self._steps_before = 0
        self.hangs_until = 0.0
        self.world.engine_made(self, scheduler)

    def start(self) -> None:
        self._is_begun = True
        self._next(0.0)

    def wake(self) -> None:
        if self._is_idle and self._is_begun:
            self._is_idle = False
            self._next_call.cancel()
            self._next(0.0)

    def stop(self, timeout_s: float = 10.0) -> None:
        self._inbox.put(None)
        if self._next_call is not None:
            self._next_call.cancel()
        for _ in range(MAX_LAST_ITERATIONS):
            if self._is_begun and not self._is_over:
                self._iterate()
        assert not self.is_running, "the engine does not stop"

    @property
    def is_running(self) -> bool:
        return self._is_begun and not self._is_over

    def _wait_for_room(self, step: Step) -> None:
        self._inbox.is_last = True
        try:
            super()._wait_for_room(step)
        finally:
            self._inbox.is_last = False

    def _next(self, delay_s: float) -> None:
        delay_s += self.world.scenario.iteration_s * (0.5 + self._loop.random.random())
        self._next_call = self._loop.call_at(max(self._loop.now + delay_s, self.hangs_until), self._iterate)

    def _iterate(self) -> None:
        before = self._scheduler.counters.prompt_tokens + self._scheduler.counters.generated_tokens
        try:
            if not self._take_commands():
                self._finish_in_flight()
                self._is_over = True
                return
            self._turn()
        except Idle:
            self._is_idle = True
            self._next_call = self._loop.call_later(IDLE_S, self._woken)
        except Exception as error:
            log.exception("the engine failed")
            self._is_over = True
            self._listener.on_failure(error)
        else:
            counters = self._scheduler.counters
            done = counters.prompt_tokens + counters.generated_tokens - before
            self._next(self.world.scenario.iteration_s * done / TOKENS_PER_ITERATION)
        self.world.audit(self.process, self._scheduler)
        if num_free := self._scheduler.pool.count_unowned(self._blocks_in_flight()):
            self.world.violate(f"{self.process}: {num_free} blocks are free, but the step in flight uses them")

    def _blocks_in_flight(self) -> list[int]:
        """Return the rows that the step in flight uses. A slice reads all rows that its first token sees."""
        pending, geometry = self._flight.pending if self._flight is not None else None, self._scheduler.geometry
        rows: list[int] = []
        for slice_, tables in pending.slices_and_tables() if isinstance(pending, Launched) else ():
            for table, group in zip(tables, geometry.attention, strict=True):
                rows += table[geometry.first_block(group, slice_.start) * group.rows :]
            if slice_.state is not None:
                rows += [*(slice_.state.read or ()), *slice_.state.write, *slice_.state.save]
        return rows

    def _woken(self) -> None:
        self._is_idle = False
        self._iterate()


class PlanGuesses(TextDrafter):
    """A drafter that knows the answers of the scenario. Each token that it guesses is right with a probability of
    0.8."""

    def __init__(self, rows: Sequence[Sequence[int]], seed: int) -> None:
        """`rows` are prompts with their answers."""
        self._rows, self._random = rows, Random(f"guesses {seed}")

    def propose(self, request: Request, limit: int) -> list[int]:
        known = len(request.tokens)
        following = next((row[known:] for row in self._rows if row[:known] == request.tokens), [])
        return [token if self._random.random() < 0.8 else token ^ 1 for token in following[:limit]]


class SimWatchdog(Watchdog):
    """A watchdog that runs as a callback of its process. In a frozen process, it runs late, as a thread would."""

    _timer: Any = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self.start()
        for one in self._watched:
            if one.is_stuck(TICK_S):
                self._on_stuck(f"{one.name} made no progress for {one.allowed_s():.1f} s")


class SimRunner(HashRunner):
    """The hash model. If `ahead` is set, a step runs only when its result is awaited, but with the block tables that it
    had at its launch."""

    can_run_ahead = True

    def __init__(
        self, rows: Any, block_tokens: int, vocab_size: int, ahead: bool, groups: tuple[Group, ...] = UNIFORM
    ) -> None:
        super().__init__(rows, block_tokens, vocab_size, groups)
        self.ahead = ahead

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        if not self.ahead:
            return super().launch(step, before)
        return Launched(self, step, [[list(table) for table in slice_.request.tables] for slice_ in step.slices])


class Launched:
    """A step in flight."""

    def __init__(self, runner: SimRunner, step: Step, tables: list[list[list[int]]]) -> None:
        self.tables = tables  # one for each slice
        self._runner, self._step = runner, step

    def __call__(self) -> list[SliceOutput]:
        return [self._runner.run_slice(*pair) for pair in self.slices_and_tables()]

    def slices_and_tables(self) -> Iterable[tuple[Slice, list[list[int]]]]:
        return zip(self._step.slices, self.tables, strict=True)


def ledger_error(scheduler: Scheduler) -> str:
    """Return the first difference between the pool's counts and the blocks that requests hold; "" if there is none."""
    reserved = 0
    for request in scheduler.requests.values():
        if request.state is RequestState.WAITING and request.rows and not request.borrows_blocks:
            return f"{request.id} waits but holds blocks"
        if request.state is RequestState.RECEIVING_KV:
            reserved += len(request.reserved)
    if error := scheduler.audit():
        return error
    ledger = scheduler.ledger()
    if ledger.reserved != reserved:
        return f"requests that receive KV hold {reserved} blocks, but the pool reserved others: {ledger}"
    return "" if ledger.balances else f"blocks do not balance: {ledger}"
