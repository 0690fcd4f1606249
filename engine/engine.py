"""The engine: one thread that owns the scheduler and the device. Everyone else posts a command.

The loop is: take commands, decide a step, run it, tell what it did. It knows no router, no peer and no channel.

A turn lasts from the end of the turn before (or, when the loop had waited, from where it went on) until its step was
told: what a client sees between two tokens. That is what the step-time model is fitted to; a record splits it into
the pass and the rest.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from engine.records import Ran
from engine.runner import Output, Runner
from scheduler.fit import CostFit
from scheduler.request import Request, Step
from scheduler.scheduler import Event, Scheduler
from shared.clock import now_ns

log = logging.getLogger("baton.engine")
Command = Callable[[Scheduler], object]
FAILED_STEPS_TO_DIE = 3  # steps in a row in which every slice fails also alone: the device is gone
IDLE_S = 1.0


class Tell(Protocol):
    """Whom the engine tells, on its own thread: the state at each turn, for which landings room was found, what a
    step will do and what it did, how long that took, how the engine died."""

    def turn(self, scheduler: Scheduler) -> None: ...

    def landings(self, requests: list[Request]) -> None: ...

    def scheduled(self, step: Step) -> None: ...

    def step(self, step: Step, events: list[Event], outputs: list[Output]) -> None: ...

    def ran(self, ran: Ran) -> None: ...

    def died(self, error: BaseException) -> None: ...


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, tell: Tell) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tell = tell
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._failed_steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._fit = CostFit()
        self._turn_began_ns = now_ns()
        self.last_turn = time.monotonic()  # of the loop: a busy engine whose turn is long ago is stuck

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the loop after the step under way. Blocks."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def post(self, command: Command) -> None:
        """Runs `command` with the scheduler, between two steps. From any thread; the order is kept."""
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
        except BaseException as error:
            log.exception("the engine died")
            self._tell.died(error)
            raise

    def _take_commands(self) -> bool:
        """Waits for a command when there is nothing to run. False: stop."""
        self.last_turn = time.monotonic()
        wait = waited = not self._scheduler.has_work
        while True:
            self._tell.turn(self._scheduler)
            try:
                command = self._inbox.get(timeout=IDLE_S) if wait else self._inbox.get_nowait()
            except queue.Empty:
                self.last_turn = time.monotonic()
                if wait:
                    continue
                if waited:
                    self._turn_began_ns = now_ns()
                return True
            if command is None:
                return False
            command(self._scheduler)
            wait = wait and not self._scheduler.has_work

    def _turn(self) -> None:
        step = self._scheduler.schedule()
        if step.landings:
            self._tell.landings(step.landings)
        if not step.slices:
            self._wait_for_room(step)
            return
        self._tell.scheduled(step)
        began_ns = now_ns()
        outputs = self._run_step(step)
        pass_ns = now_ns() - began_ns
        tokens = [output.token for output in outputs]
        events = self._scheduler.update(step, tokens, [bool(output.error) for output in outputs])
        self._tell.step(step, events, outputs)
        self._ran(step, began_ns, pass_ns)

    def _ran(self, step: Step, began_ns: int, pass_ns: int) -> None:
        ended_ns = now_ns()
        turn_ns, self._turn_began_ns = ended_ns - self._turn_began_ns, ended_ns
        self._fit.observe(step.work, turn_ns / 1e9)
        self._scheduler.cost = self._fit.model()
        self._tell.ran(Ran(step, began_ns, pass_ns, turn_ns - pass_ns))

    def _wait_for_room(self, step: Step) -> None:
        """Whoever waits, waits for blocks that a landing or leaving request holds: a command will say so."""
        if step.landings or not self._scheduler.has_work:
            return
        try:
            command = self._inbox.get(timeout=IDLE_S)
        except queue.Empty:
            return
        finally:
            self._turn_began_ns = now_ns()
        if command is None:
            self._inbox.put(None)
        else:
            command(self._scheduler)

    def _run_step(self, step: Step) -> list[Output]:
        """A step, and when it raises, each of its slices alone, so that only the culprit fails."""
        try:
            outputs = self._runner.run(step)
        except Exception:
            log.exception("step %d failed; its slices run one by one", step.number)
            outputs = [self._run_alone(step, index) for index in range(len(step.slices))]
            if all(output.error == "internal" for output in outputs):
                self._failed_steps += 1
                if self._failed_steps >= FAILED_STEPS_TO_DIE:
                    raise RuntimeError(f"{self._failed_steps} steps in a row failed whole") from None
                return outputs
        self._failed_steps = 0
        return outputs

    def _run_alone(self, step: Step, index: int) -> Output:
        piece = step.slices[index]
        try:
            return self._runner.run(Step(step.number, [piece], []))[0]
        except Exception:
            log.exception("request %s failed", piece.request.id)
            return Output(error="internal")
