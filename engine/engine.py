"""The engine: one thread that owns the scheduler and the device.

The loop takes commands, decides a step, launches it, and reports its results. A step computes a slice (some tokens) of
each of several requests. If the runner can run ahead, the loop launches the next step before it processes the results
of the previous step. The device then never waits for the host (SGLang's overlapped scheduling, vLLM's async
scheduling). If a request ends in the previous step, the result of the request's slice in the next step is discarded.

An iteration of the loop begins at the end of the previous iteration or, if there was no work, when work arrives. It
ends when the results of its step have been reported. A client waits for the duration of an iteration between two tokens
of its request. The step-time model predicts this duration.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from engine.runner import PendingStep, Runner, SliceOutput, leads
from engine.speculation import expanded, verified
from engine.step_time_fit import CostFit, StepDeadline, StepTiming
from scheduler.request import Request, RequestState, Slice, Step
from scheduler.scheduler import Scheduler, StepOutput
from shared import failpoints
from shared.clock import now_ns

log = logging.getLogger("baton.engine")
Command = Callable[[Scheduler], object]
INTERNAL = "internal"
IDLE_S = 1.0
STUCK_S = 5.0


class EngineListener(Protocol):
    """Receives the engine's reports. The engine calls all methods on its thread, so they must not block."""

    def on_turn(self, scheduler: Scheduler) -> None:
        """Called before the engine looks for commands: at the start of each iteration, and regularly while idle."""

    def on_receiving(self, requests: list[Request]) -> None:
        """Called when blocks have been reserved for the KV that these requests receive from another node."""

    def on_scheduled(self, step: Step) -> None:
        """Called when a step has been decided, before it is launched."""

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        """Called when a step has ended. `events` are the scheduler's. `outputs` are the runner's, one per slice."""

    def on_timing(self, timing: StepTiming) -> None:
        """Called when the iteration of a step has ended."""

    def on_failure(self, error: BaseException) -> None:
        """Called when the engine has failed, before its thread ends."""


@dataclass(slots=True)
class InFlightStep:
    """A launched step whose results have not been processed yet.

    `pending` is None if the launch of this step failed, or if the previous step failed.
    """

    step: Step
    pending: PendingStep | None
    launched_ns: int
    leads: bool  # the next step may be launched before the results of this step are processed


class Engine:
    """Runs the scheduler's steps on the runner's device, on a separate thread.

    The node creates, starts and stops the engine. The node uses the scheduler only through commands that it passes to
    `post`. `post`, `is_running`, `progress` and `allowed_s` may be used from any thread. The engine's thread owns the
    scheduler and the runner, and makes all calls to the listener.

    Commands run between two steps, in the order in which they were posted. If a step fails, its slices run again one by
    one, and a request ends only if its slice fails again. Before the engine reports such a failure, it checks that
    the device still works. If the device does not work, or if any other error occurs, the engine calls `on_failure` and
    its thread ends.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, listener: EngineListener, stuck_s: float = STUCK_S
    ) -> None:
        """`stuck_s` is the shortest deadline of the watchdog; see `StepDeadline.least_s`."""
        self._scheduler = scheduler
        self._runner = runner
        self._listener = listener
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._fit = CostFit()
        self._flight: InFlightStep | None = None  # between iterations, set only if the runner runs ahead
        self._turn_began_ns = self._pass_ended_ns = now_ns()
        self._deadline = StepDeadline(stuck_s)
        self._idle_s = min(IDLE_S, stuck_s / 4)  # short enough that an idle engine does not seem stuck
        self._is_audited = True  # whether the scheduler's ledger of blocks was checked after the last command
        self.progress = 0  # increases in every iteration of the loop, and at least once a second while idle
        self.allowed_s = stuck_s  # seconds in which `progress` must change; otherwise the watchdog acts

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop after the current step. Blocks for up to `timeout_s` seconds."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        """Return whether the engine's thread runs. It may still run after `stop` has timed out."""
        return self._thread.is_alive()

    def post(self, command: Command) -> None:
        """Queue `command`. The engine calls it with the scheduler, between two steps. Thread-safe."""
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
            self._finish_in_flight()
        except BaseException as error:
            log.exception("the engine failed")
            self._listener.on_failure(error)
            raise

    def _take_commands(self) -> bool:
        """Run the queued commands. If there is no work, wait for a command. Return False if the loop must stop."""
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
        """Check the ledger of blocks if a command has run since the last check. A check of a large pool takes long."""
        if not self._is_audited:
            self._is_audited = True
            self._scheduler.audit()

    def _turn(self) -> None:
        """Decide and launch a step, and process the results of at most one step."""
        before = self._flight
        if before is not None and not before.leads:
            self._finish_in_flight()
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
            self._finish_in_flight()

    def _finish_in_flight(self) -> None:
        """Wait for the step in flight, if there is one, and process its results."""
        if (flight := self._flight) is not None:
            self._flight = None
            self._finish(flight)

    def _launch(self, step: Step, before: InFlightStep | None) -> InFlightStep:
        self._listener.on_scheduled(step)
        deadline = self._deadline.seconds
        self.allowed_s = max(deadline(step), deadline(before.step) if before is not None else 0.0)
        failpoints.reach("engine.step")
        began_ns = now_ns()
        try:
            _pass_slices(step.slices)
            pending = self._runner.launch(expanded(step), before.step if before is not None else None)
        except Exception:
            log.exception("step %d failed", step.number)
            return InFlightStep(step, None, began_ns, leads=False)
        return InFlightStep(step, pending, began_ns, self._runner.ahead and leads(step))

    def _finish(self, flight: InFlightStep) -> None:
        step, outputs = flight.step, self._outputs(flight)
        ended_ns = now_ns()
        # The device begins this step only after it has ended the previous step.
        began_ns, self._pass_ended_ns = max(flight.launched_ns, self._pass_ended_ns), ended_ns
        tokens = [output.tokens for output in outputs]
        events = self._scheduler.update(step, tokens, [bool(output.error) for output in outputs])
        self._listener.on_step(step, events, outputs)
        if not any(output.error for output in outputs):  # errors may have made the step shorter than usual
            self._deadline.observe(step.work.tokens, (ended_ns - began_ns) / 1e9)
        self._ran(step, began_ns, ended_ns - began_ns)

    def _ran(self, step: Step, began_ns: int, pass_ns: int) -> None:
        ended_ns = now_ns()
        turn_ns, self._turn_began_ns = ended_ns - self._turn_began_ns, ended_ns
        self._fit.observe(step.work, turn_ns / 1e9 - step.drafting_s)
        self._scheduler.cost = self._fit.model()
        self._listener.on_timing(StepTiming(step, began_ns, pass_ns, max(0, turn_ns - pass_ns)))

    def _wait_for_room(self, step: Step) -> None:
        """If requests wait for free blocks, wait for the next command and run it, because a command may free blocks."""
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
        """Return the outputs of a step. If the step failed, run each slice alone, so that only faulty requests fail."""
        if flight.pending is not None:
            try:
                outputs = flight.pending()
            except Exception:
                log.exception("step %d failed; its slices run one by one", flight.step.number)
            else:
                return verified(flight.step.slices, outputs)
        self._discard_next()
        return self._run_each(flight.step)

    def _discard_next(self) -> None:
        """Discard the results of the step that was launched after the step that has just failed.

        The later step read KV that the failed step did not store. The later step will therefore run again.
        """
        if (behind := self._flight) is None:
            return
        if behind.pending is not None:
            with suppress(Exception):
                behind.pending()
        behind.pending, behind.leads = None, False

    def _run_each(self, step: Step) -> list[SliceOutput]:
        live = [_is_live(slice_) for slice_ in step.slices]
        outputs = [
            self._run_alone(step, slice_) if lives else SliceOutput()
            for slice_, lives in zip(step.slices, live, strict=True)
        ]
        if any(output.error == INTERNAL for output in outputs):
            self._check_device()
        return outputs

    def _check_device(self) -> None:
        """Raise RuntimeError if a warm-up step fails too: the device is then the cause, and not the requests.

        Only small steps run, because the other requests and the watchdog wait for them. The error ends the engine
        before any request is reported as failed, so all requests are retried on other nodes.
        """
        self.progress += 1
        try:
            self._runner.check()
        except Exception as error:
            raise RuntimeError("the device fails even in a warm-up step") from error

    def _run_alone(self, step: Step, slice_: Slice) -> SliceOutput:
        self.progress += 1
        try:
            _pass_slices([slice_])
            alone = expanded(Step(step.number, [slice_], [], work=step.work))
            return verified([slice_], self._runner.run(alone))[0]
        except Exception:
            log.exception("request %s failed", slice_.request.id)
            return SliceOutput(error=INTERNAL)


def _pass_slices(slices: list[Slice]) -> None:
    if failpoints.armed():
        for slice_ in slices:
            failpoints.reach("engine.slice", slice_.request.id)


def _is_live(slice_: Slice) -> bool:
    """Return whether the request has neither ended nor been preempted since the slice was scheduled."""
    return slice_.request.state is RequestState.RUNNING and slice_.epoch == slice_.request.epoch
