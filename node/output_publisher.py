"""What the engine tells, on its thread: put into words for routers and sides, and handed over to the event loop.

What is one request's own is done for it alone: when that raises, it fails, and nobody else.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from engine.engine import INTERNAL, EngineListener, StepTiming
from engine.runner import SliceOutput
from node.recorder import SchedulerSnapshot, StepRecorder
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepOutput
from shared import failpoints
from shared.clock import now_ns
from shared.rpc.messages import TokenDelta, pack_ids

log = logging.getLogger("baton.node")


@dataclass(slots=True)
class PrefillProgress:
    """Of one request that leaves: how many tokens have KV, and its first token once it is sampled."""

    request: Request
    num_computed: int
    first_token: int | None
    finish: str | None


class OutputListener(Protocol):
    """Who hears it, on the event loop."""

    def on_receiving(self, request: Request) -> None: ...

    def on_admitted(self, identity: str) -> None: ...

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], told_ns: int) -> None: ...

    def fail(self, identity: str, reason: str, retry: bool) -> None: ...

    def on_engine_failed(self, error: BaseException) -> None: ...


class OutputPublisher(EngineListener):
    """All but `seen` and `breach`, which anybody may read, is the engine's thread's."""

    def __init__(self, scheduler: Scheduler, recorder: StepRecorder, hearer: OutputListener) -> None:
        self.snapshot = SchedulerSnapshot(scheduler.ledger())  # written as a whole
        self.ledger_error = ""  # of the block ledger, once it was logged
        self._scheduler = scheduler
        self._recorder = recorder
        self._listener = hearer
        self._post = asyncio.get_running_loop().call_soon_threadsafe
        self._releasing: list[tuple[Request, asyncio.Future[None]]] = []
        self._scored: dict[str, tuple[Request, int]] = {}  # prompt positions whose logprobs were told

    def release(self, scheduler: Scheduler, request: Request, done: "asyncio.Future[None]") -> None:
        """Ends a request; `done` once no step that was launched computes it."""
        scheduler.abort(request)
        self._releasing.append((request, done))

    def on_turn(self, scheduler: Scheduler) -> None:
        for request, done in self._releasing:
            if not request.num_in_flight:
                self._post(_finish, done)
        self._releasing = [entry for entry in self._releasing if entry[0].num_in_flight]
        if self._scored:
            here = scheduler.requests
            self._scored = {key: entry for key, entry in self._scored.items() if here.get(key) is entry[0]}
        running = len(scheduler.running) + scheduler.num_receiving
        self.snapshot = SchedulerSnapshot(scheduler.ledger(), running, scheduler.num_waiting)
        if scheduler.ledger_error and not self.ledger_error:
            self.ledger_error = scheduler.ledger_error
            log.error("the block ledger is broken, no more is taken; start this node anew: %s", self.ledger_error)
        self._recorder.turned(self.snapshot)

    def on_receiving(self, requests: list[Request]) -> None:
        for request in requests:
            self._post(self._listener.on_receiving, request)

    def on_scheduled(self, step: Step) -> None:
        for request in self._recorder.scheduled(step, self._scheduler):
            if request.send_kv:
                self._post(self._listener.on_admitted, request.id)

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        deltas: list[TokenDelta] = []
        progress: list[PrefillProgress] = []
        told_ns = now_ns()
        self._recorder.stepped(events, told_ns)
        armed = failpoints.armed()
        for event in events:
            request, output = event.request, outputs[event.slice_index]
            try:
                if armed:
                    _pass_told(event)
                if event.fault is not None:
                    raise event.fault
                if output.prompt_logprobs:
                    self._drop_published(step.slices[event.slice_index].start, request, output)
                if event.token is not None or event.finish is not None or output.prompt_logprobs:
                    deltas.append(delta_of(event, output))
                if request.send_kv:
                    progress.append(PrefillProgress(request, request.num_computed, event.token, event.finish))
            except Exception:
                log.exception("request %s failed", request.id)
                self._post(self._listener.fail, request.id, INTERNAL, False)
        self._post(self._listener.on_outputs, deltas, progress, told_ns)

    def on_ran(self, ran: StepTiming) -> None:
        self._recorder.ran(ran)

    def on_failure(self, error: BaseException) -> None:
        self._post(self._listener.on_engine_failed, error)

    def _drop_published(self, start: int, request: Request, output: SliceOutput) -> None:
        """A preempted request computes its prompt again; each position's logprob is told once."""
        whose, told = self._scored.get(request.id, (request, 0))
        told = told if whose is request else 0
        self._scored[request.id] = (request, max(told, start + len(output.prompt_logprobs)))
        del output.prompt_logprobs[: max(0, told - start)]


def delta_of(event: StepOutput, output: SliceOutput) -> TokenDelta:
    request = event.request
    position = request.num_generated - (event.token is not None)
    return TokenDelta(
        request.id,
        position,
        pack_ids([event.token]) if event.token is not None else b"",
        finish=event.finish if event.finish not in {None, "error"} else "",
        error=output.error or (INTERNAL if event.finish == "error" else ""),
        cached_tokens=request.num_cached,
        logprobs=[output.logprobs] if output.logprobs is not None else [],
        prompt_logprobs=output.prompt_logprobs,
    )


def _pass_told(event: StepOutput) -> None:
    request = event.request
    if request.send_kv:
        failpoints.reach("prefill.after_chunk", request.id)
    elif event.token is not None:
        failpoints.reach("decode.token", request.id)
        if event.finish is not None:
            failpoints.reach("decode.ended", request.id)


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.done():  # nobody waits any more
        done.set_result(None)
