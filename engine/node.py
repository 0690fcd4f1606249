"""What both kinds of node are: an engine, a standing stream to every router, a place in the registry.

A router's commands go to the engine; what its steps do goes back, one message a step and router. A router whose
stream ends takes its requests with it. What a prefill or a decode node does beyond that hangs on `on_leaving` and
`on_landings`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.engine import Engine, Tell
from engine.outbox import Outbox
from engine.records import Ran, Recorder, Seen
from engine.runner import Output, Runner
from scheduler.request import Request, State, Step
from scheduler.role import Role
from scheduler.scheduler import Event, Scheduler
from shared.clock import now_ns
from shared.logs import fields
from shared.messages import Command, Delta, Load, NodeInfo, Submit, pack_ids, unpack_ids
from shared.serve import Tasks, until

log = logging.getLogger("baton.node")
MAX_OUTBOX = 100_000  # deltas that a router may leave unread before it counts as gone
STUCK_S = 30.0  # an engine that has work and makes no turn for so long
FLUSH_S = 0.1  # between two tellings of what was recorded


@dataclass(slots=True)
class Progress:
    """Of one request that leaves: how many tokens have KV, and its first token once it is sampled."""

    request: Request
    num_computed: int
    first_token: int | None
    finish: str | None


@dataclass(slots=True)
class Ticker:
    """Counts of the handoffs, for `Load`, and how long pushes take."""

    handoffs: int = 0
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)
    channel_fallbacks: int = 0
    transfer: list[float] = field(default_factory=list)  # as in `Load`


class Node(Tell):
    def __init__(
        self,
        info: NodeInfo,
        role: Role,
        scheduler: Scheduler,
        runner: Runner,
        heartbeat_s: float,
        vocab_size: int,
        share_prefixes: bool = True,
        in_place: bool = False,
    ) -> None:
        """`in_place`: handoffs of this node move nothing, as one of the two computes in the pool of the other."""
        self.info = info
        self.role = role
        self.ticker = Ticker()
        self.recorder = Recorder()
        self.tasks = Tasks()
        self.engine = Engine(scheduler, runner, self)
        self._runner = runner  # the engine's: only a count is read here
        self.on_leaving: Callable[[Submit, Request], None] | None = None
        self.on_admitted: Callable[[list[str]], None] = lambda _: None
        self.on_progress: Callable[[list[Progress]], None] = lambda _: None
        self.on_landings: Callable[[list[Request]], None] = lambda _: None
        self.on_abort: Callable[[str], bool] = lambda _: False  # True: the request's blocks are being seen to
        self.died_with: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._scheduler = scheduler  # the engine's: only numbers are read here
        self._heartbeat_s = heartbeat_s
        self._share_prefixes = share_prefixes
        self.in_place = in_place
        self._returning: list[tuple[Request, asyncio.Future[None]]] = []  # the engine's thread's
        self._vocab_size = vocab_size
        self._scored: dict[str, int] = {}  # prompt positions whose logprobs were told; the engine's thread writes it
        self._outboxes: dict[str, Outbox] = {}
        self._router_of: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._seen = Seen(scheduler.ledger())  # written by the engine's thread as a whole
        self._dropped = 0  # records that a router, or no router, was told

    # ---- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.engine.start()
        self.tasks.start(self._beat())
        self.tasks.start(self._flush())

    async def drain(self, timeout_s: float) -> None:
        """Takes no new request, and waits for those that are here."""
        self.info = replace(self.info, state="draining")
        await until(lambda: not self._router_of, timeout_s)

    async def close(self) -> None:
        await self.tasks.close()
        await asyncio.to_thread(self.engine.stop)

    # ---- the standing stream --------------------------------------------------------------------------------

    async def attach(self, stream: Any) -> None:
        """Serves `ATTACH`: commands in, reports out, until either side ends."""
        hello: Command | None = await stream.recv_message()
        if hello is None:
            return
        router, outbox = hello.router, Outbox(load=self.load())
        outbox.wake.set()
        if (before := self._outboxes.get(router)) is not None:
            self._orphan(before)
        self._outboxes[router] = outbox
        writer = self.tasks.start(outbox.write(stream))
        try:
            async for command in stream:
                for identity in command.aborts:
                    self.abort(identity)
                for submit in command.submits:
                    self._submit(router, submit)
        finally:
            writer.cancel()
            self._orphan(outbox)  # finds its requests by the outbox, so it goes first
            if self._outboxes.get(router) is outbox:
                del self._outboxes[router]

    def _orphan(self, outbox: Outbox) -> None:
        for identity in list(outbox.requests):
            self.abort(identity)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            load = self.load()
            for outbox in self._outboxes.values():
                outbox.load = load
                outbox.wake.set()

    async def _flush(self) -> None:
        """Every router is told everything: whose a request is shows in its id."""
        while True:
            await asyncio.sleep(FLUSH_S)
            steps, events = self.recorder.take()
            if not steps and not events:
                continue
            if not self._outboxes:
                self._dropped += len(steps) + len(events)
            for outbox in self._outboxes.values():
                self._dropped += outbox.record(steps, events)

    # ---- requests -------------------------------------------------------------------------------------------

    def _submit(self, router: str, submit: Submit) -> None:
        try:
            if self.info.state != "ready":
                raise ValueError("this node is draining")
            leaves = self.role.ends_at == "first_token" and submit.decode_node != ""
            if self.info.pool_of and not leaves:
                raise ValueError("this node has no KV pool of its own")
            request = self.take(router, submit, leaves=leaves)
        except ValueError as error:
            retry = self.info.state != "ready" or bool(self.info.pool_of)
            self.send(router, Delta(submit.id, error=str(error), retry=retry))
            return
        if leaves and self.on_leaving is not None:
            self.on_leaving(submit, request)

    def take(self, router: str, submit: Submit, *, leaves: bool = False, lands: bool = False) -> Request:
        """Gives a request to the engine; one that is to be computed in another node's blocks waits for `enter`. Raises
        ValueError when it is malformed or its router is not attached."""
        log.debug("took request", extra=fields(request=submit.id, traceparent=submit.traceparent))
        outbox = self._outboxes.get(router)
        if outbox is None:
            raise ValueError("its router is not attached here")
        tokens = unpack_ids(submit.tokens)
        if not 0 < submit.num_prompt <= len(tokens) <= self.info.max_model_len or submit.max_tokens <= 0:
            raise ValueError(
                f"{len(tokens)} tokens, num_prompt {submit.num_prompt} and max_tokens {submit.max_tokens}: "
                f"must be positive, and at most {self.info.max_model_len} tokens"
            )
        if max(tokens) >= self._vocab_size:
            raise ValueError(f"token id {max(tokens)} is beyond the vocabulary of {self._vocab_size}")
        if submit.id in self._router_of:
            raise ValueError(f"request {submit.id} is already here")
        request = Request(
            submit.id,
            tokens,
            submit.num_prompt,
            submit.max_tokens,
            min_tokens=submit.min_tokens,
            stop_tokens=frozenset(unpack_ids(submit.stop_tokens)),
            salt=submit.salt
            if submit.share_prefix and self._share_prefixes
            else submit.salt + b"\0" + submit.id.encode(),
            priority=submit.priority,
            lands=lands,
            leaves=leaves,
            in_place=self.in_place and (lands or leaves),
            every_logit=submit.sampling.prompt_logprobs is not None,
            payload=submit.sampling,
        )
        outbox.requests[request.id] = request
        self._router_of[request.id] = router
        if not request.is_guest:
            self.enter(request)
        return request

    def enter(self, request: Request) -> None:
        """Gives a request that was taken to the engine."""
        taken_ns = now_ns()
        self.engine.post(lambda scheduler: self._add(scheduler, request, taken_ns))

    def returned(self, request: Request) -> "asyncio.Future[None]":
        """Ends the request here. Done once no step that was launched computes it: its blocks may be used again."""
        done: asyncio.Future[None] = self._loop.create_future()

        def end(scheduler: Scheduler) -> None:
            scheduler.abort(request)
            self._returning.append((request, done))

        self.engine.post(end)
        return done

    def _add(self, scheduler: Scheduler, request: Request, taken_ns: int) -> None:
        try:
            scheduler.add(request)
            self.recorder.added(request, taken_ns)
        except ValueError as error:
            self.recorder.event(request.id, "queued", taken_ns, count=len(request.tokens))
            self._loop.call_soon_threadsafe(self.give_up, request.id, str(error), False)

    def abort(self, identity: str, reason: str = "aborted") -> None:
        """Ends a request in whatever state; unknown ones are over already."""
        at_ns = now_ns()
        request = self._drop(identity)
        if request is None:
            return
        if self.on_abort(identity):
            self.recorder.event(identity, "ended", at_ns, reason=reason)
        else:  # told by the engine, which may be about to tell that it is queued
            self.engine.post(lambda scheduler: self._aborted(scheduler, request, reason, at_ns))

    def _aborted(self, scheduler: Scheduler, request: Request, reason: str, at_ns: int) -> None:
        scheduler.abort(request)
        self.recorder.event(request.id, "ended", at_ns, reason=reason)

    def give_up(self, identity: str, reason: str, retry: bool) -> None:
        """Tells the router that this node will not finish a request, and drops it."""
        self.send(self._router_of.get(identity, ""), Delta(identity, error=reason, retry=retry))
        self.abort(identity, reason)

    def give_up_all(self, reason: str) -> int:
        """Whoever is still here goes on elsewhere. Returns how many."""
        left = list(self._router_of)
        for identity in left:
            self.give_up(identity, reason, retry=True)
        return len(left)

    def forget(self, identity: str, reason: str, at_ns: int | None = None) -> Request | None:
        """It is over here, since `at_ns` or now."""
        if identity in self._router_of:
            self.recorder.event(identity, "ended", at_ns, reason=reason)
        return self._drop(identity)

    def _drop(self, identity: str) -> Request | None:
        """Every way to end leads through here, and finds the request once."""
        self._scored.pop(identity, None)
        router = self._router_of.pop(identity, None)
        outbox = self._outboxes.get(router) if router is not None else None
        return outbox.requests.pop(identity, None) if outbox is not None else None

    def has(self, identity: str) -> bool:
        return identity in self._router_of

    def send(self, router: str, *deltas: Delta) -> None:
        outbox = self._outboxes.get(router)
        if outbox is None:
            return
        outbox.deltas.extend(deltas)
        outbox.wake.set()
        if len(outbox.deltas) > MAX_OUTBOX:
            log.error("router %s reads nothing: dropped with its requests", router)
            self._orphan(outbox)
            self._outboxes.pop(router, None)

    def send_for(self, identity: str, delta: Delta) -> None:
        self.send(self._router_of.get(identity, ""), delta)

    # ---- what the engine tells, on its thread ------------------------------------------------------------------

    def turn(self, scheduler: Scheduler) -> None:
        for request, done in self._returning:
            if not request.num_in_flight:
                self._loop.call_soon_threadsafe(_finish, done)
        self._returning = [entry for entry in self._returning if entry[0].num_in_flight]
        running = len(scheduler.running) + scheduler.num_landing
        self._seen = Seen(scheduler.ledger(), running, scheduler.num_waiting)
        self.recorder.turned(self._seen)

    def landings(self, requests: list[Request]) -> None:
        self._loop.call_soon_threadsafe(self.on_landings, requests)

    def scheduled(self, step: Step) -> None:
        admitted = [request.id for request in self.recorder.scheduled(step, self._scheduler) if request.leaves]
        if admitted:
            self._loop.call_soon_threadsafe(self.on_admitted, admitted)

    def step(self, step: Step, events: list[Event], outputs: list[Output]) -> None:
        deltas: list[Delta] = []
        progress: list[Progress] = []
        told_ns = now_ns()
        self.recorder.stepped(events, told_ns)
        for event in events:
            request, output = event.request, outputs[event.slice_index]
            if request.leaves:
                progress.append(Progress(request, request.num_computed, event.token, event.finish))
            if output.prompt_logprobs:
                self._cut_told(step.slices[event.slice_index].start, request.id, output)
            if event.token is not None or event.finish is not None or output.prompt_logprobs:
                deltas.append(_delta(event, output))
        self._loop.call_soon_threadsafe(self._told, deltas, progress, told_ns)

    def ran(self, ran: Ran) -> None:
        self.recorder.ran(ran)

    def _cut_told(self, start: int, identity: str, output: Output) -> None:
        """A preempted request computes its prompt again; each position's logprob is told once."""
        told = self._scored.get(identity, 0)
        self._scored[identity] = max(told, start + len(output.prompt_logprobs))
        del output.prompt_logprobs[: max(0, told - start)]

    def died(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._end_with, error)

    def _end_with(self, error: BaseException) -> None:
        if not self.died_with.done():
            self.died_with.set_result(error)

    def _told(self, deltas: list[Delta], progress: list[Progress], told_ns: int) -> None:
        for delta in deltas:
            router = self._router_of.get(delta.id)
            if router is None:
                continue
            self.send(router, delta)
            if delta.finish or delta.error:
                self.forget(delta.id, delta.finish or delta.error, told_ns)
        if progress:
            self.on_progress(progress)

    # ---- state ------------------------------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        return self._scheduler.has_work and time.monotonic() - self.engine.last_turn > STUCK_S

    def load(self) -> Load:
        seen, counters, ticker = self._seen, self._scheduler.counters, self.ticker
        ledger = seen.ledger
        rows = tuple(self._scheduler.requests.values())
        return Load(
            "stuck" if self.is_stuck else self.info.state,
            seen.running,
            seen.waiting,
            sum(len(row.tokens) for row in rows if row.state is State.WAITING and not row.lands),
            ledger.free,
            ledger.cached,
            ledger.owned,
            ledger.reserved,
            ledger.quarantined,
            ledger.total,
            counters.steps,
            counters.prompt_tokens,
            counters.generated_tokens,
            counters.cache_queries,
            counters.cache_hits,
            counters.preemptions,
            ticker.handoffs,
            ticker.handoffs_failed,
            ticker.blocks_moved,
            ticker.bytes_moved,
            dict(ticker.channels),
            ticker.channel_fallbacks,
            cost.packed() if (cost := self._scheduler.cost) is not None else [],
            list(ticker.transfer),
            self._dropped + self.recorder.dropped,
            overruns=self._runner.overruns,
        )


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.done():  # nobody waits any more
        done.set_result(None)


def _delta(event: Event, output: Output) -> Delta:
    request = event.request
    position = request.num_generated - (event.token is not None)
    return Delta(
        request.id,
        position,
        pack_ids([event.token]) if event.token is not None else b"",
        finish=event.finish if event.finish not in {None, "error"} else "",
        error=output.error,
        cached_tokens=request.num_cached,
        logprobs=[output.logprobs] if output.logprobs is not None else [],
        prompt_logprobs=output.prompt_logprobs,
    )
