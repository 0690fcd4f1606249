"""Publishes the engine's results: builds messages on the engine's thread and passes them to the event loop.

An exception in code that serves one request fails only that request.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.engine import INTERNAL, EngineListener
from engine.media import NO_IMAGE
from engine.runner import SliceOutput
from engine.step_time_fit import StepTiming
from node.recorder import SchedulerSnapshot, StepRecorder
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepOutput
from shared import failpoints
from shared.clock import now_ns
from shared.rpc.messages import TokenDelta, pack_ids

log = logging.getLogger("baton.node")


@dataclass(slots=True)
class PrefillProgress:
    """How far a request that sends its KV is after a step. The first `num_computed` tokens have KV."""

    request: Request
    num_computed: int
    first_token: int | None
    finish: str | None


class OutputSubscriber(Protocol):
    """Receives the engine's results on the subscriber's event loop, in the order in which the engine reports them."""

    def on_admitted(self, request: Request) -> None:
        """Handle the first step of a request that sends KV, or the allocation of blocks for a request that receives
        KV."""

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], at_ns: int) -> None: ...
    def on_request_failed(self, request_id: str) -> None: ...
    def on_engine_failed(self, error: BaseException) -> None: ...


class OutputPublisher(EngineListener):
    """Turns the engine's steps into deltas, reports of prefill progress, and records.

    The engine calls the publisher on the engine's thread, which owns the publisher's state. Other threads may read only
    `snapshot` and `ledger_error`, whose values are replaced and never modified.
    """

    def __init__(self, scheduler: Scheduler, recorder: StepRecorder) -> None:
        self.snapshot = SchedulerSnapshot(scheduler.ledger())
        self.ledger_error = ""  # set and logged at most once
        self._scheduler = scheduler
        self._recorder = recorder
        self._post: Callable[..., object]
        self._subscriber: OutputSubscriber
        self._releasing: list[tuple[Request, asyncio.Future[None]]] = []
        # By request id: the request, and the number of its prompt positions whose logprobs were published.
        self._scored: dict[str, tuple[Request, int]] = {}

    def subscribe(self, subscriber: OutputSubscriber) -> None:
        """Deliver results to the subscriber on the running event loop. Must be called once, before the engine
        starts."""
        self._subscriber = subscriber
        self._post = asyncio.get_running_loop().call_soon_threadsafe

    def release(self, scheduler: Scheduler, request: Request, done: "asyncio.Future[None]") -> None:
        """Abort a request, and complete `done` when all launched steps that compute the request have ended."""
        scheduler.abort(request)
        if request.state is not RequestState.DONE:  # it still waits for its grammar or its images
            request.move_to(RequestState.DONE)
        self._releasing.append((request, done))

    def on_turn(self, scheduler: Scheduler) -> None:
        for request, done in self._releasing:
            if not request.num_in_flight:
                self._post(_resolve, done)
        self._releasing = [entry for entry in self._releasing if entry[0].num_in_flight]
        if self._scored:
            active = scheduler.requests
            self._scored = {key: entry for key, entry in self._scored.items() if active.get(key) is entry[0]}
        running = len(scheduler.running) + scheduler.num_receiving
        self.snapshot = SchedulerSnapshot(scheduler.ledger(), running, scheduler.num_waiting)
        if scheduler.ledger_error and not self.ledger_error:
            self.ledger_error = scheduler.ledger_error
            log.error("the block ledger is broken; this node rejects new requests, restart it: %s", self.ledger_error)
        self._recorder.turned(self.snapshot)

    def on_receiving(self, requests: list[Request]) -> None:
        for request in requests:
            self._post(self._subscriber.on_admitted, request)

    def on_scheduled(self, step: Step) -> None:
        for request in self._recorder.scheduled(step, self._scheduler):
            if request.send_kv:
                self._post(self._subscriber.on_admitted, request)

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        deltas: list[TokenDelta] = []
        progress: list[PrefillProgress] = []
        at_ns = now_ns()
        self._recorder.stepped(events, at_ns)
        armed = failpoints.armed()
        for event in events:
            request, output = event.request, outputs[event.slice_index]
            try:
                if armed:
                    _reach_failpoints(event)
                if event.fault is not None:
                    raise event.fault
                if output.prompt_logprobs:
                    self._drop_published(step.slices[event.slice_index].start, request, output)
                if event.tokens or event.finish is not None or output.prompt_logprobs:
                    deltas.append(delta_of(event, output))
                if request.send_kv:
                    first = event.tokens[0] if event.tokens else None
                    progress.append(PrefillProgress(request, request.num_computed, first, event.finish))
            except Exception:
                log.exception("request %s failed", request.id)
                self._post(self._subscriber.on_request_failed, request.id)
        self._post(self._subscriber.on_outputs, deltas, progress, at_ns)

    def on_timing(self, timing: StepTiming) -> None:
        self._recorder.ran(timing)

    def on_failure(self, error: BaseException) -> None:
        self._post(self._subscriber.on_engine_failed, error)

    def _drop_published(self, start: int, request: Request, output: SliceOutput) -> None:
        """Drop prompt logprobs that were already published. A preempted request computes its prompt again, and with it
        the logprobs."""
        seen, published = self._scored.get(request.id, (request, 0))
        published = published if seen is request else 0
        self._scored[request.id] = (request, max(published, start + len(output.prompt_logprobs)))
        del output.prompt_logprobs[: max(0, published - start)]


def delta_of(event: StepOutput, output: SliceOutput) -> TokenDelta:
    request = event.request
    position = request.num_generated - len(event.tokens)
    return TokenDelta(
        request.id,
        position,
        b"" if output.vector else pack_ids(event.tokens),
        finish=event.finish if event.finish not in {None, "error"} else "",
        error=output.error or (INTERNAL if event.finish == "error" else ""),
        cached_tokens=request.num_cached,
        logprobs=output.logprobs[: len(event.tokens)],
        prompt_logprobs=output.prompt_logprobs,
        vector=output.vector,
        retry=output.error == NO_IMAGE,
    )


def _reach_failpoints(event: StepOutput) -> None:
    request = event.request
    if request.send_kv:
        failpoints.reach("prefill.after_chunk", request.id)
    elif event.tokens:
        failpoints.reach("decode.token", request.id)
        if event.finish is not None:
            failpoints.reach("decode.ended", request.id)


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():  # false if the task that waits for `done` was cancelled
        done.set_result(None)
