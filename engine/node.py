"""What both kinds of node are: an engine, a standing stream to every router, a place in the registry.

A router's commands go to the engine; what its steps do goes back. What a prefill or a decode node does beyond that
hangs on the `on_…` hooks. What raises over one request fails that request alone ("internal").
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.bounds import check_submit
from engine.engine import INTERNAL, STUCK_S, Engine
from engine.load import Ticker, load_of
from engine.records import Recorder
from engine.roster import BusyError, Roster
from engine.routers import LAST_WORDS_S, Routers
from engine.runner import Runner
from engine.teller import Progress, Teller
from scheduler.request import Request
from scheduler.role import Role
from scheduler.scheduler import Scheduler
from shared import failpoints
from shared.clock import now_ns
from shared.logs import fields
from shared.messages import Delta, Load, NodeInfo, Submit, unpack_ids
from shared.serve import Tasks, until

log = logging.getLogger("baton.node")


class Node:
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
        self.roster = Roster(info.num_blocks * info.block_tokens)
        self.routers = Routers(self, self.tasks, self.recorder)
        self.teller = Teller(scheduler, self.recorder, self)
        self.engine = Engine(scheduler, runner, self.teller, stuck_s)
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
        self.vocab_size = vocab_size
        self._loop = asyncio.get_running_loop()

    # ---- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.engine.start()
        self.tasks.start(self._beat())
        self.tasks.start(self.routers.flush())

    async def drain(self, timeout_s: float) -> None:
        """Takes no new request, and waits for those that are here."""
        self.info = replace(self.info, state="draining")
        self.routers.tell_load()  # it goes out with what is refused from now on: who hears of both blames nobody
        await until(lambda: not self.roster.router_of, timeout_s)

    async def close(self) -> None:
        await self.tasks.close()
        await asyncio.to_thread(self.engine.stop)

    async def attach(self, stream: Any) -> None:
        await self.routers.attach(stream)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.beats += 1
            self.routers.tell_load()

    # ---- requests -------------------------------------------------------------------------------------------

    def submit(self, router: str, submit: Submit) -> None:
        """A router's command. What is refused is told."""
        try:
            leaves = self.role.ends_at == "first_token" and submit.decode_node != ""
            if self.info.pool_of and not leaves:
                raise BusyError("this node has no KV pool of its own")
            request = self.take(router, submit, leaves=leaves)
        except ValueError as error:
            self.routers.send(router, Delta(submit.id, error=str(error), retry=isinstance(error, BusyError)))
            return
        except Exception:
            log.exception("request %s could not be taken", submit.id)
            self.routers.send(router, Delta(submit.id, error=INTERNAL))
            return
        if leaves and self.on_leaving is not None:
            self._guard(request.id, self.on_leaving, submit, request)

    def withdraw(self, router: str, identity: str) -> None:
        """A router's command: it ends its own requests only."""
        if self.roster.router_of.get(identity) == router:
            self.abort(identity)

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
        outbox = self.routers.outboxes.get(router)
        if outbox is None:
            raise ValueError("its router is not attached here")
        if self.refusal:
            raise BusyError(self.refusal)
        tokens = check_submit(submit, self.info.max_model_len, self.vocab_size)
        self.roster.check(submit.id, len(tokens))
        shares = submit.share_prefix and self._share_prefixes
        request = Request(
            submit.id,
            tokens,
            submit.num_prompt,
            submit.max_tokens,
            min_tokens=submit.min_tokens,
            stop_tokens=frozenset(unpack_ids(submit.stop_tokens)),
            salt=submit.salt if shares else submit.salt + b"\0" + submit.id.encode(),
            priority=submit.priority,
            lands=lands,
            leaves=leaves,
            in_place=self.in_place and (lands or leaves),
            every_logit=submit.sampling.prompt_logprobs is not None,
            payload=submit.sampling,
        )
        outbox.requests[request.id] = request
        self.roster.put(request.id, router, len(tokens))
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
        self.engine.post(lambda scheduler: self.teller.end(scheduler, request, done))
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
        self.routers.send(self.roster.router_of.get(identity, ""), Delta(identity, error=reason, retry=retry))
        self.abort(identity, reason)

    def give_up_all(self, reason: str) -> int:
        """Whoever is still here goes on elsewhere. Returns how many."""
        left = list(self.roster.router_of)
        for identity in left:
            self.give_up(identity, reason, retry=True)
        return len(left)

    def forget(self, identity: str, reason: str, at_ns: int | None = None) -> Request | None:
        """It is over here, since `at_ns` or now."""
        if identity in self.roster.router_of:
            self.recorder.event(identity, "ended", at_ns, reason=reason)
        return self._drop(identity)

    def _drop(self, identity: str) -> Request | None:
        """Every way to end leads through here, and finds the request once."""
        router = self.roster.pop(identity)
        outbox = self.routers.outboxes.get(router) if router is not None else None
        return outbox.requests.pop(identity, None) if outbox is not None else None

    def has(self, identity: str) -> bool:
        return identity in self.roster.router_of

    def send_for(self, identity: str, delta: Delta) -> None:
        self.routers.send(self.roster.router_of.get(identity, ""), delta)

    # ---- what the engine told -----------------------------------------------------------------------------------

    def landing(self, request: Request) -> None:
        self._guard(request.id, self.on_landing, request)

    def admitted(self, identity: str) -> None:
        self._guard(identity, self.on_admitted, identity)

    def told(self, deltas: list[Delta], progress: list[Progress], told_ns: int) -> None:
        for delta in deltas:
            self._guard(delta.id, self._tell, delta, told_ns)
        for row in progress:
            self._guard(row.request.id, self.on_progress, row)

    def _tell(self, delta: Delta, told_ns: int) -> None:
        router = self.roster.router_of.get(delta.id)
        if router is None:
            return
        self.routers.send(router, delta)
        if delta.finish or delta.error:
            self.forget(delta.id, delta.finish or delta.error, told_ns)

    def ended(self, error: BaseException) -> None:
        if not self.died_with.done():
            self.died_with.set_result(error)

    def stuck(self, why: str) -> None:
        """From any thread: nothing more is to be hoped for. The routers hear of it, then it counts as dead."""
        self._loop.call_soon_threadsafe(self._tell_stuck, why)

    def _tell_stuck(self, why: str) -> None:
        self.is_stuck = True
        self.routers.tell_load()
        self._loop.call_later(LAST_WORDS_S, self.ended, RuntimeError(why))

    @property
    def refusal(self) -> str:
        """Why nothing new is taken; "" when it is."""
        if self.info.state != "ready":
            return "this node is draining"
        if self.is_stuck:
            return "this node is stuck"
        return self.teller.breach and f"this node's block ledger is broken: {self.teller.breach}"

    def load(self) -> Load:
        breach = self.teller.breach
        load = load_of(self._scheduler, self.teller.seen, self.ticker)
        load.state = "stuck" if self.is_stuck else "breached" if breach else self.info.state
        load.records_dropped = self.routers.dropped + self.recorder.dropped
        load.overruns, load.breach, load.boot = self._runner.overruns, breach, self.info.boot
        return load
