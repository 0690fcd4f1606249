"""What the engine tells, on its thread: put into words for routers and sides, and handed over to the event loop.

What is one request's own is done for it alone: when that raises, it fails, and nobody else.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from engine.engine import INTERNAL, Tell
from engine.records import Ran, Recorder, Seen
from engine.runner import Output
from scheduler.request import Request, Step
from scheduler.scheduler import Event, Scheduler
from shared import failpoints
from shared.clock import now_ns
from shared.messages import Delta, pack_ids

log = logging.getLogger("baton.node")


@dataclass(slots=True)
class Progress:
    """Of one request that leaves: how many tokens have KV, and its first token once it is sampled."""

    request: Request
    num_computed: int
    first_token: int | None
    finish: str | None


class Hearer(Protocol):
    """Who hears it, on the event loop."""

    def landing(self, request: Request) -> None: ...

    def admitted(self, identity: str) -> None: ...

    def told(self, deltas: list[Delta], progress: list[Progress], told_ns: int) -> None: ...

    def give_up(self, identity: str, reason: str, retry: bool) -> None: ...

    def ended(self, error: BaseException) -> None: ...


class Teller(Tell):
    """All but `seen` and `breach`, which anybody may read, is the engine's thread's."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder, hearer: Hearer) -> None:
        self.seen = Seen(scheduler.ledger())  # written as a whole
        self.breach = ""  # of the block ledger, once it was logged
        self._scheduler = scheduler
        self._recorder = recorder
        self._hearer = hearer
        self._post = asyncio.get_running_loop().call_soon_threadsafe
        self._returning: list[tuple[Request, asyncio.Future[None]]] = []
        self._scored: dict[str, tuple[Request, int]] = {}  # prompt positions whose logprobs were told

    def end(self, scheduler: Scheduler, request: Request, done: "asyncio.Future[None]") -> None:
        """Ends a request; `done` once no step that was launched computes it."""
        scheduler.abort(request)
        self._returning.append((request, done))

    def turn(self, scheduler: Scheduler) -> None:
        for request, done in self._returning:
            if not request.num_in_flight:
                self._post(_finish, done)
        self._returning = [entry for entry in self._returning if entry[0].num_in_flight]
        if self._scored:
            here = scheduler.requests
            self._scored = {key: entry for key, entry in self._scored.items() if here.get(key) is entry[0]}
        running = len(scheduler.running) + scheduler.num_landing
        self.seen = Seen(scheduler.ledger(), running, scheduler.num_waiting)
        if scheduler.breach and not self.breach:
            self.breach = scheduler.breach
            log.error("the block ledger is broken, no more is taken; start this node anew: %s", self.breach)
        self._recorder.turned(self.seen)

    def landings(self, requests: list[Request]) -> None:
        for request in requests:
            self._post(self._hearer.landing, request)

    def scheduled(self, step: Step) -> None:
        for request in self._recorder.scheduled(step, self._scheduler):
            if request.leaves:
                self._post(self._hearer.admitted, request.id)

    def step(self, step: Step, events: list[Event], outputs: list[Output]) -> None:
        deltas: list[Delta] = []
        progress: list[Progress] = []
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
                    self._cut_told(step.slices[event.slice_index].start, request, output)
                if event.token is not None or event.finish is not None or output.prompt_logprobs:
                    deltas.append(delta_of(event, output))
                if request.leaves:
                    progress.append(Progress(request, request.num_computed, event.token, event.finish))
            except Exception:
                log.exception("request %s failed", request.id)
                self._post(self._hearer.give_up, request.id, INTERNAL, False)
        self._post(self._hearer.told, deltas, progress, told_ns)

    def ran(self, ran: Ran) -> None:
        self._recorder.ran(ran)

    def died(self, error: BaseException) -> None:
        self._post(self._hearer.ended, error)

    def _cut_told(self, start: int, request: Request, output: Output) -> None:
        """A preempted request computes its prompt again; each position's logprob is told once."""
        whose, told = self._scored.get(request.id, (request, 0))
        told = told if whose is request else 0
        self._scored[request.id] = (request, max(told, start + len(output.prompt_logprobs)))
        del output.prompt_logprobs[: max(0, told - start)]


def delta_of(event: Event, output: Output) -> Delta:
    request = event.request
    position = request.num_generated - (event.token is not None)
    return Delta(
        request.id,
        position,
        pack_ids([event.token]) if event.token is not None else b"",
        finish=event.finish if event.finish not in {None, "error"} else "",
        error=output.error or (INTERNAL if event.finish == "error" else ""),
        cached_tokens=request.num_cached,
        logprobs=[output.logprobs] if output.logprobs is not None else [],
        prompt_logprobs=output.prompt_logprobs,
    )


def _pass_told(event: Event) -> None:
    request = event.request
    if request.leaves:
        failpoints.reach("prefill.after_chunk", request.id)
    elif event.token is not None:
        failpoints.reach("decode.token", request.id)
        if event.finish is not None:
            failpoints.reach("decode.ended", request.id)


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.done():  # nobody waits any more
        done.set_result(None)
