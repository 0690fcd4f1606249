"""What both kinds of node are: an engine, a standing stream to every router, a place in the registry.

A router's commands go to the engine; what its steps do goes back. What a prefill or a decode node does beyond that
hangs on the `on_…` hooks. What raises over one request fails that request alone ("internal").
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.engine import INTERNAL, STUCK_S, Engine
from engine.runner import Runner
from node.active_requests import ActiveRequests, OverloadedError
from node.output_publisher import OutputPublisher, PrefillProgress
from node.recorder import StepRecorder
from node.router_sessions import LAST_WORDS_S, RouterSessions
from node.stats import HandoffCounters, node_stats
from node.validation import check_submit
from scheduler.request import Request
from scheduler.role import Role
from scheduler.scheduler import Scheduler
from shared import failpoints
from shared.clock import now_ns
from shared.lifecycle import TaskGroup, wait_until
from shared.logs import fields
from shared.rpc.messages import NodeInfo, NodeStats, SubmitRequest, TokenDelta, unpack_ids

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
        shared_pool: bool = False,
        stuck_s: float = STUCK_S,
    ) -> None:
        """`shared_pool`: handoffs of this node move nothing, as one of the two computes in the pool of the other.
        `stuck_s`: see `node.watchdog.StepDeadline`."""
        self.info = info
        self.role = role
        self.handoff_counters = HandoffCounters()
        self.recorder = StepRecorder()
        self.tasks = TaskGroup()
        self.active = ActiveRequests(info.num_blocks * info.block_tokens)
        self.sessions = RouterSessions(self, self.tasks, self.recorder)
        self.publisher = OutputPublisher(scheduler, self.recorder, self)
        self.engine = Engine(scheduler, runner, self.publisher, stuck_s)
        self.is_stuck = False
        self.num_heartbeats = 0  # of the event loop: another number at each heartbeat
        self._runner = runner  # the engine's: only a count is read here
        self.on_send_submitted: Callable[[SubmitRequest, Request], None] | None = None
        self.on_send_admitted: Callable[[str], None] = lambda _: None
        self.on_progress: Callable[[PrefillProgress], None] = lambda _: None
        self.on_room_found: Callable[[Request], None] = lambda _: None
        self.on_abort: Callable[[str], bool] = lambda _: False  # True: the request's blocks are being seen to
        self.fatal_error: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._scheduler = scheduler  # the engine's: only numbers are read here
        self._heartbeat_s = heartbeat_s
        self._share_prefixes = share_prefixes
        self.shared_pool = shared_pool
        self.vocab_size = vocab_size
        self._loop = asyncio.get_running_loop()

    # ---- life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.engine.start()
        self.tasks.start(self._heartbeat())
        self.tasks.start(self.sessions.publish_records())

    async def drain(self, timeout_s: float) -> None:
        """Takes no new request, and waits for those that are here."""
        self.info = replace(self.info, state="draining")
        self.sessions.publish_stats()  # it goes out with what is refused from now on: who hears of both blames nobody
        await wait_until(lambda: not self.active.router_of, timeout_s)

    async def close(self) -> None:
        await self.tasks.close()
        await asyncio.to_thread(self.engine.stop)

    async def attach(self, stream: Any) -> None:
        await self.sessions.attach(stream)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.num_heartbeats += 1
            self.sessions.publish_stats()

    # ---- requests -------------------------------------------------------------------------------------------

    def submit(self, router: str, submit: SubmitRequest) -> None:
        """A router's command. What is refused is told."""
        try:
            leaves = self.role.ends_at == "first_token" and submit.decode_node != ""
            if self.info.shared_pool_owner and not leaves:
                raise OverloadedError("this node has no KV pool of its own")
            request = self.register(router, submit, leaves=leaves)
        except ValueError as error:
            self.sessions.send(
                router, TokenDelta(submit.id, error=str(error), retry=isinstance(error, OverloadedError))
            )
            return
        except Exception:
            log.exception("request %s could not be taken", submit.id)
            self.sessions.send(router, TokenDelta(submit.id, error=INTERNAL))
            return
        if leaves and self.on_send_submitted is not None:
            self._guard(request.id, self.on_send_submitted, submit, request)

    def abort_for_router(self, router: str, identity: str) -> None:
        """A router's command: it ends its own requests only."""
        if self.active.router_of.get(identity) == router:
            self.abort(identity)

    def _guard(self, identity: str, do: Callable[..., object], *given: object) -> None:
        """Does what concerns one request."""
        try:
            do(*given)
        except Exception:
            log.exception("request %s failed", identity)
            self.fail(identity, INTERNAL, retry=False)

    def post_for(self, request: Request, command: Callable[[Scheduler], object]) -> None:
        """Runs on the engine's thread what concerns one request."""

        def guarded(scheduler: Scheduler) -> None:
            try:
                command(scheduler)
            except Exception:
                log.exception("request %s failed", request.id)
                self._loop.call_soon_threadsafe(self.fail, request.id, INTERNAL, False)

        self.engine.post(guarded)

    def register(self, router: str, submit: SubmitRequest, *, leaves: bool = False, lands: bool = False) -> Request:
        """Gives a request to the engine; one that is to be computed in another node's blocks waits for `enter`. Raises
        ValueError when it is malformed or its router is not attached, BusyError when another node may take it."""
        log.debug("took request", extra=fields(request=submit.id, traceparent=submit.traceparent))
        outbox = self.sessions.streams.get(router)
        if outbox is None:
            raise ValueError("its router is not attached here")
        if self.refusal:
            raise OverloadedError(self.refusal)
        tokens = check_submit(submit, self.info.max_model_len, self.vocab_size)
        self.active.check(submit.id, len(tokens))
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
            receive_kv=lands,
            send_kv=leaves,
            shared_pool=self.shared_pool and (lands or leaves),
            needs_prompt_logprobs=submit.sampling.prompt_logprobs is not None,
            sampling=submit.sampling,
        )
        outbox.requests[request.id] = request
        self.active.put(request.id, router, len(tokens))
        try:
            failpoints.reach("node.taken", request.id)
            if not request.borrows_blocks:
                self.enqueue(request)
        except BaseException:
            self._drop(request.id)
            raise
        return request

    def enqueue(self, request: Request) -> None:
        """Gives a request that was taken to the engine."""
        taken_ns = now_ns()
        self.post_for(request, lambda scheduler: self._add(scheduler, request, taken_ns))

    def release(self, request: Request) -> "asyncio.Future[None]":
        """Ends the request here. Done once no step that was launched computes it: its blocks may be used again."""
        done: asyncio.Future[None] = self._loop.create_future()
        self.engine.post(lambda scheduler: self.publisher.release(scheduler, request, done))
        return done

    def _add(self, scheduler: Scheduler, request: Request, taken_ns: int) -> None:
        try:
            scheduler.add(request)
            self.recorder.added(request, taken_ns)
        except ValueError as error:
            self.recorder.event(request.id, "queued", taken_ns, count=len(request.tokens))
            self._loop.call_soon_threadsafe(self.fail, request.id, str(error), False)

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

    def fail(self, identity: str, reason: str, retry: bool) -> None:
        """Tells the router that this node will not finish a request, and drops it."""
        self.sessions.send(self.active.router_of.get(identity, ""), TokenDelta(identity, error=reason, retry=retry))
        self.abort(identity, reason)

    def migrate_all(self, reason: str) -> int:
        """Whoever is still here goes on elsewhere. Returns how many."""
        left = list(self.active.router_of)
        for identity in left:
            self.fail(identity, reason, retry=True)
        return len(left)

    def finish(self, identity: str, reason: str, at_ns: int | None = None) -> Request | None:
        """It is over here, since `at_ns` or now."""
        if identity in self.active.router_of:
            self.recorder.event(identity, "ended", at_ns, reason=reason)
        return self._drop(identity)

    def _drop(self, identity: str) -> Request | None:
        """Every way to end leads through here, and finds the request once."""
        router = self.active.pop(identity)
        outbox = self.sessions.streams.get(router) if router is not None else None
        return outbox.requests.pop(identity, None) if outbox is not None else None

    def owns(self, identity: str) -> bool:
        return identity in self.active.router_of

    def send_for(self, identity: str, delta: TokenDelta) -> None:
        self.sessions.send(self.active.router_of.get(identity, ""), delta)

    # ---- what the engine told -----------------------------------------------------------------------------------

    def on_receiving(self, request: Request) -> None:
        self._guard(request.id, self.on_room_found, request)

    def on_admitted(self, identity: str) -> None:
        self._guard(identity, self.on_send_admitted, identity)

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], told_ns: int) -> None:
        for delta in deltas:
            self._guard(delta.id, self._publish, delta, told_ns)
        for row in progress:
            self._guard(row.request.id, self.on_progress, row)

    def _publish(self, delta: TokenDelta, told_ns: int) -> None:
        router = self.active.router_of.get(delta.id)
        if router is None:
            return
        self.sessions.send(router, delta)
        if delta.finish or delta.error:
            self.finish(delta.id, delta.finish or delta.error, told_ns)

    def on_engine_failed(self, error: BaseException) -> None:
        if not self.fatal_error.done():
            self.fatal_error.set_result(error)

    def stuck(self, why: str) -> None:
        """From any thread: nothing more is to be hoped for. The routers hear of it, then it counts as dead."""
        self._loop.call_soon_threadsafe(self._report_stuck, why)

    def _report_stuck(self, why: str) -> None:
        self.is_stuck = True
        self.sessions.publish_stats()
        self._loop.call_later(LAST_WORDS_S, self.on_engine_failed, RuntimeError(why))

    @property
    def refusal(self) -> str:
        """Why nothing new is taken; "" when it is."""
        if self.info.state != "ready":
            return "this node is draining"
        if self.is_stuck:
            return "this node is stuck"
        return self.publisher.ledger_error and f"this node's block ledger is broken: {self.publisher.ledger_error}"

    def stats(self) -> NodeStats:
        breach = self.publisher.ledger_error
        load = node_stats(self._scheduler, self.publisher.snapshot, self.handoff_counters)
        load.state = "stuck" if self.is_stuck else "breached" if breach else self.info.state
        load.records_dropped = self.sessions.dropped + self.recorder.dropped
        load.overruns, load.ledger_error, load.incarnation_id = self._runner.overruns, breach, self.info.incarnation_id
        return load
