"""The engine: one thread that owns the scheduler and the device. Everyone else posts a command.

The loop is: take commands, decide a step, launch it, tell what it did. It knows no router, no peer and no channel.
With a runner that runs ahead it decides and launches the next step first, so that the device never waits for the
host; a request that turns out to have ended is in that step in vain (the overlapped scheduling of SGLang, vLLM's
async scheduling).

Only the device's own failure ends it: a request that fails alone ends alone, once the device has proved itself.

A turn lasts from the end of the turn before (or, when the loop had waited, from where it went on) until its step was
told: what a client sees between two tokens. That is what the step-time model is fitted to; a record splits it into
the pass and the rest.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.runner import PendingStep, Runner, SliceOutput, leads
from engine.step_deadline import StepDeadline
from engine.step_time_fit import CostFit
from scheduler.request import Request, RequestState, Slice, Step
from scheduler.scheduler import Scheduler, StepOutput
from shared import failpoints
from shared.clock import now_ns

log = logging.getLogger("baton.engine")
Command = Callable[[Scheduler], object]
INTERNAL = "internal"
IDLE_S = 1.0
STUCK_S = 5.0


class StepTiming(NamedTuple):
    """A step that was run: when its pass began, how long that took, and the rest of its turn of the engine's loop."""

    step: Step
    start_ns: int
    device_ns: int
    host_ns: int


class EngineListener(Protocol):
    """Whom the engine tells, on its own thread: the state at each turn, for which landings room was found, what a
    step will do and what it did, how long that took, how the engine died."""

    def on_turn(self, scheduler: Scheduler) -> None: ...

    def on_receiving(self, requests: list[Request]) -> None: ...

    def on_scheduled(self, step: Step) -> None: ...

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None: ...

    def on_ran(self, ran: StepTiming) -> None: ...

    def on_failure(self, error: BaseException) -> None: ...


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and not told yet. `pending` None: it failed to start, or failed with the one before."""

    step: Step
    pending: PendingStep | None
    launched_ns: int
    leads: bool  # the next step may be decided and launched before this one is told


class Engine:
    def __init__(self, scheduler: Scheduler, runner: Runner, tell: EngineListener, stuck_s: float = STUCK_S) -> None:
        """`stuck_s`: see `node.watchdog.StepDeadline`."""
        self._scheduler = scheduler
        self._runner = runner
        self._listener = tell
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._fit = CostFit()
        self._flight: InFlightStep | None = None  # between two turns, only with a runner that runs ahead
        self._turn_began_ns = self._pass_ended_ns = now_ns()
        self._patience = StepDeadline(stuck_s)
        self._idle_s = min(IDLE_S, stuck_s / 4)  # an idle engine must not look like a stuck one
        self._is_audited = True  # nobody came since the blocks were last looked at one by one
        self.progress = 0  # another number at every turn of the loop, at least once a second where nothing runs
        self.allowed_s = stuck_s  # that it may stay the same: as long as the step under way may take

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the loop after the step under way. Blocks."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        """A step may be under way, also after a `stop` that waited too long for it."""
        return self._thread.is_alive()

    def post(self, command: Command) -> None:
        """Runs `command` with the scheduler, between two steps. From any thread; the order is kept."""
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
            self._land()
        except BaseException as error:
            log.exception("the engine died")
            self._listener.on_failure(error)
            raise

    def _take_commands(self) -> bool:
        """Waits for a command when there is nothing to run. False: stop."""
        wait = waited = not self._scheduler.has_work and self._flight is None
        while True:
            self.progress += 1
            self._listener.on_turn(self._scheduler)
            try:
                command = self._inbox.get(timeout=self._idle_s) if wait else self._inbox.get_nowait()
            except queue.Empty:
                if wait:
                    self._audit()
                    continue
                if waited:
                    self._turn_began_ns = now_ns()
                return True
            if command is None:
                return False
            self._is_audited = False
            command(self._scheduler)
            wait = wait and not self._scheduler.has_work

    def _audit(self) -> None:
        """Once after commands came, when there is nothing to run: with many blocks it takes as long as a step."""
        if not self._is_audited:
            self._is_audited = True
            self._scheduler.audit()

    def _turn(self) -> None:
        """Tells of one step at most."""
        before = self._flight
        if before is not None and not before.leads:
            self._land()
            return
        step = self._scheduler.schedule()
        if step.receiving:
            self._listener.on_receiving(step.receiving)
        self._flight = self._launch(step, before) if step.slices else None
        if before is not None:
            self._finish(before)
        elif self._flight is None:
            self._wait_for_room(step)
        elif not self._flight.leads:
            self._land()

    def _land(self) -> None:
        """Nothing is in flight any more."""
        if (flight := self._flight) is not None:
            self._flight = None
            self._finish(flight)

    def _launch(self, step: Step, before: InFlightStep | None) -> InFlightStep:
        self._listener.on_scheduled(step)
        patience = self._patience.seconds
        self.allowed_s = max(patience(step), patience(before.step) if before is not None else 0.0)
        failpoints.reach("engine.step")
        began_ns = now_ns()
        try:
            _pass_slices(step.slices)
            pending = self._runner.launch(step, before.step if before is not None else None)
        except Exception:
            log.exception("step %d failed", step.number)
            return InFlightStep(step, None, began_ns, leads=False)
        return InFlightStep(step, pending, began_ns, self._runner.ahead and leads(step))

    def _finish(self, flight: InFlightStep) -> None:
        step, outputs = flight.step, self._outputs(flight)
        ended_ns = now_ns()
        # The device begins a step when it is done with the one before.
        began_ns, self._pass_ended_ns = max(flight.launched_ns, self._pass_ended_ns), ended_ns
        tokens = [output.token for output in outputs]
        events = self._scheduler.update(step, tokens, [bool(output.error) for output in outputs])
        self._listener.on_step(step, events, outputs)
        if not any(output.error for output in outputs):  # what failed may have taken no time
            self._patience.observe(step.work.tokens, (ended_ns - began_ns) / 1e9)
        self._ran(step, began_ns, ended_ns - began_ns)

    def _ran(self, step: Step, began_ns: int, pass_ns: int) -> None:
        ended_ns = now_ns()
        turn_ns, self._turn_began_ns = ended_ns - self._turn_began_ns, ended_ns
        self._fit.observe(step.work, turn_ns / 1e9)
        self._scheduler.cost = self._fit.model()
        self._listener.on_ran(StepTiming(step, began_ns, pass_ns, max(0, turn_ns - pass_ns)))

    def _wait_for_room(self, step: Step) -> None:
        """Whoever waits, waits for blocks that a landing or leaving request holds: a command will say so."""
        if step.receiving or not self._scheduler.has_work:
            return
        try:
            command = self._inbox.get(timeout=self._idle_s)
        except queue.Empty:
            return
        finally:
            self._turn_began_ns = now_ns()
        if command is None:
            self._inbox.put(None)
        else:
            command(self._scheduler)

    def _outputs(self, flight: InFlightStep) -> list[SliceOutput]:
        """Of a step, and when it raised, of each of its slices alone, so that only the culprit fails."""
        if flight.pending is not None:
            try:
                outputs = flight.pending.wait()
            except Exception:
                log.exception("step %d failed; its slices run one by one", flight.step.number)
            else:
                return outputs
        self._call_back()
        return self._run_each(flight.step)

    def _call_back(self) -> None:
        """The step behind a failed one read what that did not write: it ends, and is run again in its turn."""
        if (behind := self._flight) is None:
            return
        if behind.pending is not None:
            with suppress(Exception):
                behind.pending.wait()
        behind.pending, behind.leads = None, False

    def _run_each(self, step: Step) -> list[SliceOutput]:
        live = [_is_live(piece) for piece in step.slices]
        outputs = [
            self._run_alone(step, piece) if lives else SliceOutput()
            for piece, lives in zip(step.slices, live, strict=True)
        ]
        if any(output.error == INTERNAL for output in outputs):
            self._prove_device()
        return outputs

    def _prove_device(self) -> None:
        """Whoever failed alone is at fault itself, or the device is. Then it is the engine's death, before anybody is
        told to have failed: all go on elsewhere."""
        self.progress += 1
        try:
            self._runner.warm_up()
        except Exception as error:
            raise RuntimeError("the device fails with any work") from error

    def _run_alone(self, step: Step, piece: Slice) -> SliceOutput:
        self.progress += 1
        try:
            _pass_slices([piece])
            return self._runner.run(Step(step.number, [piece], []))[0]
        except Exception:
            log.exception("request %s failed", piece.request.id)
            return SliceOutput(error=INTERNAL)


def _pass_slices(slices: list[Slice]) -> None:
    if failpoints.armed():
        for piece in slices:
            failpoints.reach("engine.slice", piece.request.id)


def _is_live(piece: Slice) -> bool:
    """It still has its tokens and blocks: neither ended nor preempted since it was decided."""
    return piece.request.state is RequestState.RUNNING and piece.epoch == piece.request.epoch
