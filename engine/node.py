"""What both kinds of node are: an engine, a standing stream to every router, a place in the registry.

A router's commands go to the engine; what its steps do goes back, one message a step and router. A router whose
stream ends takes its requests with it. What a prefill or a decode node does beyond that hangs on `on_leaving` and
`on_landing`. What is one request's own is done for it alone: when that raises, it fails ("internal"), and nobody else.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.bounds import check_submit
from engine.engine import INTERNAL, STUCK_S, Engine, Tell
from engine.outbox import Outbox
from engine.records import Ran, Recorder, Seen
from engine.runner import Output, Runner
from scheduler.request import Request, State, Step
from scheduler.role import Role
from scheduler.scheduler import Event, Scheduler
from shared import failpoints
from shared.clock import now_ns
from shared.logs import fields
from shared.messages import Command, Delta, Load, NodeInfo, Submit, pack_ids, unpack_ids
from shared.serve import Tasks, until

log = logging.getLogger("baton.node")
MAX_OUTBOX = 100_000  # deltas that a router may leave unread before it counts as gone
MAX_ROUTERS = 64
MAX_REQUESTS = 8192  # here at once; more had better wait at their routers
MAX_TOKENS = 1 << 23  # of all requests here, as they came: with 36 bytes each, 300 MB …
MAX_POOLS = 16  # … or as many as fit that many pools
FLUSH_S = 0.1  # between two tellings of what was recorded
LAST_WORDS_S = 0.2  # for a node that ends


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
    rows_corrupt: int = 0


class BusyError(ValueError):
    """This node does not take the request now; another one may."""


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
        stuck_s: float = STUCK_S,
    ) -> None:
        """`in_place`: handoffs of this node move nothing, as one of the two computes in the pool of the other.
        `stuck_s`: see `engine.watchdog.Patience`."""
        self.info = info
        self.role = role
        self.ticker = Ticker()
        self.recorder = Recorder()
        self.tasks = Tasks()
        self.engine = Engine(scheduler, runner, self, stuck_s)
        self.is_stuck = False
        self.beats = 0  # of the event loop: another number at each heartbeat
        self._runner = runner  # the engine's: only a count is read here
        self.on_leaving: Callable[[Submit, Request], None] | None = None
        self.on_admitted: Callable[[str], None] = lambda _: None
        self.on_progress: Callable[[Progress], None] = lambda _: None
        self.on_landing: Callable[[Request], None] = lambda _: None
        self.on_abort: Callable[[str], bool] = lambda _: False  # True: the request's blocks are being seen to
        self.died_with: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._scheduler = scheduler  # the engine's: only numbers are read here
        self._heartbeat_s = heartbeat_s
        self._share_prefixes = share_prefixes
        self.in_place = in_place
        self._returning: list[tuple[Request, asyncio.Future[None]]] = []  # the engine's thread's
        self.vocab_size = vocab_size
        self._scored: dict[str, int] = {}  # prompt positions whose logprobs were told; the engine's thread writes it
        self._outboxes: dict[str, Outbox] = {}
        self._router_of: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # tokens of each request here, as it came, and their sum
        self._num_tokens = 0
        self._max_tokens = max(MAX_TOKENS, MAX_POOLS * info.num_blocks * info.block_tokens)
        self._breach = ""  # of the block ledger, once it was logged
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

    async def tell_all(self) -> None:
        """Waits a moment for the last words to be on their way."""
        await until(lambda: not any(outbox.deltas for outbox in self._outboxes.values()), LAST_WORDS_S)

    async def close(self) -> None:
        await self.tasks.close()
        await asyncio.to_thread(self.engine.stop)

    # ---- the standing stream --------------------------------------------------------------------------------

    async def attach(self, stream: Any) -> None:
        """Serves `ATTACH`: commands in, reports out, until either side ends."""
        hello: Command | None = await stream.recv_message()
        if hello is None or (len(self._outboxes) >= MAX_ROUTERS and hello.router not in self._outboxes):
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
                    if self._router_of.get(identity) == router:
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
            self.beats += 1
            self._tell_load()

    def _tell_load(self) -> None:
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
            leaves = self.role.ends_at == "first_token" and submit.decode_node != ""
            if self.info.pool_of and not leaves:
                raise BusyError("this node has no KV pool of its own")
            request = self.take(router, submit, leaves=leaves)
        except ValueError as error:
            self.send(router, Delta(submit.id, error=str(error), retry=isinstance(error, BusyError)))
            return
        except Exception:
            log.exception("request %s could not be taken", submit.id)
            self.send(router, Delta(submit.id, error=INTERNAL))
            return
        if leaves and self.on_leaving is not None:
            self._guard(request.id, self.on_leaving, submit, request)

    def _guard(self, identity: str, do: Callable[..., object], *given: object) -> None:
        """Does what concerns one request."""
        try:
            do(*given)
        except Exception:
            log.exception("request %s failed", identity)
            self.give_up(identity, INTERNAL, retry=False)

    def post_for(self, request: Request, command: Callable[[Scheduler], object]) -> None:
        """Runs on the engine's thread what concerns one request."""

        def guarded(scheduler: Scheduler) -> None:
            try:
                command(scheduler)
            except Exception:
                log.exception("request %s failed", request.id)
                self._loop.call_soon_threadsafe(self.give_up, request.id, INTERNAL, False)

        self.engine.post(guarded)

    def take(self, router: str, submit: Submit, *, leaves: bool = False, lands: bool = False) -> Request:
        """Gives a request to the engine; one that is to be computed in another node's blocks waits for `enter`. Raises
        ValueError when it is malformed or its router is not attached, BusyError when another node may take it."""
        log.debug("took request", extra=fields(request=submit.id, traceparent=submit.traceparent))
        outbox = self._outboxes.get(router)
        if outbox is None:
            raise ValueError("its router is not attached here")
        if self.refusal:
            raise BusyError(self.refusal)
        tokens = check_submit(submit, self.info.max_model_len, self.vocab_size)
        if submit.id in self._router_of:
            raise ValueError(f"request {submit.id} is already here")
        if len(self._router_of) >= MAX_REQUESTS or self._num_tokens + len(tokens) > self._max_tokens:
            raise BusyError(f"this node has {len(self._router_of)} requests of {self._num_tokens} tokens: no more fit")
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
        self._sizes[request.id] = len(tokens)
        self._num_tokens += len(tokens)
        try:
            failpoints.reach("node.taken", request.id)
            if not request.is_guest:
                self.enter(request)
        except BaseException:
            self._drop(request.id)
            raise
        return request

    def enter(self, request: Request) -> None:
        """Gives a request that was taken to the engine."""
        taken_ns = now_ns()
        self.post_for(request, lambda scheduler: self._add(scheduler, request, taken_ns))

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
        is_safe = True
        try:
            is_seen_to = self.on_abort(identity)
        except Exception:
            log.exception("request %s did not end as it should", identity)
            is_seen_to = is_safe = False  # its blocks may be written yet: better never used again than too early
        if is_seen_to:
            self.recorder.event(identity, "ended", at_ns, reason=reason)
        else:  # told by the engine, which may be about to tell that it is queued
            self.engine.post(lambda scheduler: self._aborted(scheduler, request, reason, at_ns, is_safe))

    def _aborted(self, scheduler: Scheduler, request: Request, reason: str, at_ns: int, is_safe: bool) -> None:
        scheduler.abort(request, writer_stopped=is_safe)
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
        self._num_tokens -= self._sizes.pop(identity, 0)
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
        if scheduler.breach and not self._breach:
            self._breach = scheduler.breach
            log.error("the block ledger is broken, no more is taken; start this node anew: %s", self._breach)
        self.recorder.turned(self._seen)

    def landings(self, requests: list[Request]) -> None:
        for request in requests:
            self._loop.call_soon_threadsafe(self._guard, request.id, self.on_landing, request)

    def scheduled(self, step: Step) -> None:
        for request in self.recorder.scheduled(step, self._scheduler):
            if request.leaves:
                self._loop.call_soon_threadsafe(self._guard, request.id, self.on_admitted, request.id)

    def step(self, step: Step, events: list[Event], outputs: list[Output]) -> None:
        deltas: list[Delta] = []
        progress: list[Progress] = []
        told_ns = now_ns()
        self.recorder.stepped(events, told_ns)
        armed = failpoints.armed()
        for event in events:
            request, output = event.request, outputs[event.slice_index]
            try:
                if armed:
                    _pass_told(event)
                if event.fault is not None:
                    raise event.fault
                if output.prompt_logprobs:
                    self._cut_told(step.slices[event.slice_index].start, request.id, output)
                if event.token is not None or event.finish is not None or output.prompt_logprobs:
                    deltas.append(_delta(event, output))
                if request.leaves:
                    progress.append(Progress(request, request.num_computed, event.token, event.finish))
            except Exception:
                log.exception("request %s failed", request.id)
                self._loop.call_soon_threadsafe(self.give_up, request.id, INTERNAL, False)
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

    def stuck(self, why: str) -> None:
        """From any thread: nothing more is to be hoped for. The routers hear of it, then it counts as dead."""
        self._loop.call_soon_threadsafe(self._tell_stuck, why)

    def _tell_stuck(self, why: str) -> None:
        self.is_stuck = True
        self._tell_load()
        self._loop.call_later(LAST_WORDS_S, self._end_with, RuntimeError(why))

    def _told(self, deltas: list[Delta], progress: list[Progress], told_ns: int) -> None:
        for delta in deltas:
            self._guard(delta.id, self._tell, delta, told_ns)
        for row in progress:
            self._guard(row.request.id, self.on_progress, row)

    def _tell(self, delta: Delta, told_ns: int) -> None:
        router = self._router_of.get(delta.id)
        if router is None:
            return
        self.send(router, delta)
        if delta.finish or delta.error:
            self.forget(delta.id, delta.finish or delta.error, told_ns)

    # ---- state ------------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> str:
        """Why nothing new is taken; "" when it is."""
        if self.info.state != "ready":
            return "this node is draining"
        if self.is_stuck:
            return "this node is stuck"
        return f"this node's block ledger is broken: {self._breach}" if self._breach else ""

    def load(self) -> Load:
        seen, counters, ticker = self._seen, self._scheduler.counters, self.ticker
        ledger = seen.ledger
        rows = tuple(self._scheduler.requests.values())
        return Load(
            "stuck" if self.is_stuck else "breached" if self._breach else self.info.state,
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
            rows_corrupt=ticker.rows_corrupt,
            breach=self._breach,
            boot=self.info.boot,
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


def _delta(event: Event, output: Output) -> Delta:
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
