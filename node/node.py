"""A node: the engine, the long-lived streams to routers, and the adapters of its roles.

Requests from a router go to the engine, and the results of the engine's steps go back to the router. The adapter of the
current role sends the KV of prompts to decode nodes, or receives KV from prefill nodes. To switch its role, a node
drains and then uses the adapter of the other role. The node keeps its weights, its KV pool and its prefix cache. After
the switch, the adapter of the previous role starts no handoffs, but still answers calls of peers about earlier
reservations.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from engine.engine import INTERNAL, STUCK_S, Engine, EngineListener
from engine.runner import Runner
from node.active_requests import ActiveRequests, OverloadedError, RequestRules
from node.image_encoding import ImageEncoding
from node.output_publisher import OutputPublisher, PrefillProgress
from node.recorder import StepRecorder
from node.router_sessions import FLUSH_S, MAX_ROUTERS, MAX_UNREAD_DELTAS, RouterSessions
from node.stats import NodeState
from scheduler.request import Request, RequestState
from scheduler.role import DECODE, ROLES, Role
from scheduler.scheduler import Scheduler
from shared.clock import to_tick
from shared.kv.channel import KVChannel
from shared.kv.memory import KVMemory
from shared.lifecycle import TaskGroup
from shared.registry import Announcer
from shared.rpc.messages import Ack, NodeInfo, NodeStats, RouterCommand, SetRoleRequest, SubmitRequest, TokenDelta
from shared.rpc.methods import COMMIT, ENCODE, PUSHED, RENEW, RESERVE, STOP, Rpc, unary

log = logging.getLogger("baton.node")
DECODE_CALLS: tuple[Rpc[Any, Any], ...] = (RESERVE, PUSHED, COMMIT, STOP, RENEW)
MAX_DRAIN_S = 3600.0
RpcHandler = Callable[[Any], Awaitable[None]]


class RoleAdapter:
    """The part of a handoff that a node of one role performs. Used on the event loop.

    An exception in an `on_...` method fails only the request for which the method was called. Every role implements
    `on_abort`. The other `on_...` methods do nothing by default.
    """

    role: Role
    handlers: Mapping[Rpc[Any, Any], RpcHandler] = {}  # handlers of the RPCs that this role serves to peers

    def __init__(self, node: "Node", memory: KVMemory, channels: Sequence[KVChannel], reserve_timeout_s: float) -> None:
        """`channels` lists the best channel first. A reservation waits up to `reserve_timeout_s` for free blocks."""
        self._info = node.state.info
        self._geometry = node.geometry
        self._requests, self._engine = node.requests, node.engine
        self._recorder, self._counters = node.recorder, node.counters
        self._memory, self._channels, self._reserve_timeout_s = memory, channels, reserve_timeout_s
        self._tasks = TaskGroup()

    def start(self) -> None:
        """Start the background tasks."""

    async def close(self) -> None:
        await self._tasks.close()

    def on_submit(self, submit: SubmitRequest, request: Request) -> None:
        """Handle a newly registered request whose KV is to be sent."""

    def on_admitted(self, request: Request) -> None:
        """Handle the first step of a request that sends KV, or the allocation of blocks for a request that receives
        KV."""

    def on_progress(self, progress: PrefillProgress) -> None:
        """Handle a step that computed part of a request whose KV is sent."""

    def on_abort(self, request_id: str) -> bool:
        """End the request's handoff. Return whether the adapter will give the request's blocks back to the scheduler.
        If it will not, the caller must."""
        raise NotImplementedError

    def on_writer_lost(self, writer: str) -> None:
        """Handle the loss of a process that could write into this node's KV pool: its last connection has ended."""


class Node:
    """One node: its lifecycle, and the flow of requests between routers, engine and role adapters.

    `NodeProcess` creates the node on the event loop, gives it the first role, and starts, drains and closes it. The
    node owns the engine, the sessions with routers, the requests in progress and the role adapters. `make_adapter`
    creates the adapter of a role when the node first takes that role. When the engine has failed or has made no
    progress for too long, `fatal_error` gets a result, and the process exits.
    """

    role: RoleAdapter  # the adapter of the current role

    def __init__(
        self,
        info: NodeInfo,
        scheduler: Scheduler,
        runner: Runner,
        rules: RequestRules,
        make_adapter: "Callable[[Node, Role], RoleAdapter]",
        heartbeat_s: float,
        *,
        stuck_s: float = STUCK_S,
        max_routers: int = MAX_ROUTERS,
        max_unread: int = MAX_UNREAD_DELTAS,
        make_engine: Callable[[Scheduler, Runner, EngineListener, float], Engine] = Engine,
    ) -> None:
        """Create a node without a role.

        A step counts as stuck after `stuck_s` seconds, or later if `engine.step_time_fit` allows more time.
        """
        self.rules = rules
        self.recorder = StepRecorder()
        self.sessions = RouterSessions(self.recorder, max_routers, max_unread)
        self.counters = NodeStats()  # only the handoff fields are used; a change of role does not reset them
        self.publisher = OutputPublisher(scheduler, self.recorder)
        self.engine = make_engine(scheduler, runner, self.publisher, stuck_s)
        self.state = NodeState(info, self.publisher)
        self.tasks = TaskGroup()
        encoder = rules.images.encoder if rules.images is not None else None
        self.images = None if encoder is None else ImageEncoding(self.state, encoder, self.tasks)
        self.requests = ActiveRequests(self.state, self.engine, self.sessions, self.recorder, rules, self.images)
        self.num_heartbeats = 0  # increases at each heartbeat of the event loop
        self._loop = asyncio.get_running_loop()
        self.fatal_error: asyncio.Future[BaseException] = self._loop.create_future()
        self._scheduler, self._runner = scheduler, runner
        self.geometry = scheduler.geometry
        self._make_adapter = make_adapter
        self._adapters: dict[str, RoleAdapter] = {}
        self._heartbeat_s = heartbeat_s

    # ---- lifecycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.publisher.subscribe(self)
        self.engine.start()
        self.tasks.start(self._heartbeat())
        self.tasks.start(self.sessions.publish_records())

    async def drain(self, timeout_s: float, reason: str) -> int:
        """Reject new requests, and wait until those in progress have ended, including those that prefill nodes will
        hand over to this node.

        After `timeout_s`, fail the requests still in progress, so that their routers retry them on other nodes. Return
        the number of failed requests.
        """
        self.update_info(state="draining")
        # Publish the state before the first rejection. Otherwise routers would take the rejection for a failure.
        self.sessions.publish_stats(self.stats())
        await self.sessions.wait_until_ended(lambda: not self.requests, timeout_s, receives=self.role.role is DECODE)
        return self.requests.fail_all(reason)

    async def close(self) -> None:
        await self.tasks.close()
        await self.sessions.close()
        await asyncio.to_thread(self.engine.stop)

    async def close_adapters(self) -> None:
        for adapter in self._adapters.values():
            await adapter.close()

    def update_info(self, **changes: Any) -> None:
        self.state.info = replace(self.state.info, **changes)

    async def between_steps(self, work: Callable[[], object]) -> None:
        """Run `work` on the engine's thread between two steps, and wait until it has run or the engine has failed. If
        `work` raises an exception, raise it again."""
        done: asyncio.Future[Exception | None] = self._loop.create_future()

        def command(_: Scheduler) -> None:
            failed = None
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again by the coroutine that waits
                failed = error
            self._loop.call_soon_threadsafe(done.set_result, failed)

        self.engine.post(command)
        await asyncio.wait((done, self.fatal_error), return_when=asyncio.FIRST_COMPLETED)
        if done.done() and (failed := done.result()) is not None:
            raise failed

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(to_tick(self._heartbeat_s))
            self.num_heartbeats += 1
            self.sessions.publish_stats(self.stats())

    def failure(self) -> str:
        """Return why the process must be restarted, or "". A process that must be restarted will exit soon."""
        is_failed = self.state.is_stuck or self.fatal_error.done()
        return "the engine has failed or makes no progress" if is_failed else ""

    def refusal(self) -> str:
        """Return why the node takes no requests, or "". Routers connect after `NodeProcess._warm_up`."""
        return self.state.refusal() or ("" if self.sessions.num_routers else "no router is connected to this node")

    def stats(self) -> NodeStats:
        """Collect the node's statistics. Called on the event loop.

        The scheduler and the runner belong to the engine's thread; this method only reads them.
        """
        snapshot, cost = self.publisher.snapshot, self._scheduler.cost
        encoder = self.rules.images.encoder if self.rules.images is not None else None
        requests = tuple(self._scheduler.requests.values())
        waiting = (each for each in requests if each.state is RequestState.WAITING and not each.receive_kv)
        blocks: dict[str, Any] = {f"blocks_{name}": count for name, count in snapshot.ledger._asdict().items()}
        return replace(
            self.counters,
            state=self.state.name,
            running=snapshot.running,
            waiting=snapshot.waiting,
            waiting_tokens=sum(len(request.tokens) for request in waiting),
            **blocks,
            **asdict(self._scheduler.counters),
            channels=dict(self.counters.channels),
            cost=cost.packed() if cost is not None else [],
            records_dropped=self.sessions.dropped_records + self.recorder.dropped,
            overruns=self._runner.overruns,
            ledger_error=self.publisher.ledger_error,
            incarnation_id=self.state.info.incarnation_id,
            images_encoded=0 if encoder is None else encoder.num_encoded,
            images_cached=0 if encoder is None else encoder.num_cached,
            num_routers=self.sessions.num_routers,
            images_fetched=0 if self.images is None else self.images.num_fetched,
        )

    def report_stuck(self, reason: str) -> None:
        """Report to the routers that this node makes no progress, then set `fatal_error`. May be called on any
        thread."""
        self._loop.call_soon_threadsafe(self._on_stuck, reason)

    def _on_stuck(self, reason: str) -> None:
        self.state.is_stuck = True
        self.sessions.publish_stats(self.stats())
        self._loop.call_later(FLUSH_S, self.on_engine_failed, RuntimeError(reason))

    # ---- role ---------------------------------------------------------------------------------------------------

    def take_role(self, role: Role) -> None:
        """Switch to this role. The node must have no requests: call this after a drain or before the start."""
        if role.name not in self._adapters:
            self._adapters[role.name] = self._make_adapter(self, role)
            self._adapters[role.name].start()
        self.role = self._adapters[role.name]
        self.update_info(role=role.name, state="ready")

    async def set_role(self, announcer: Announcer, ending: asyncio.Event, message: SetRoleRequest) -> Ack:
        """Serve `SET_ROLE`: drain, switch the role, rejoin and reply. The node does not rejoin if `ending` is set.

        Requests that still run after `drain_s` are retried on other nodes.
        """
        role = ROLES.get(message.role)
        if role is None:
            return Ack(f"unknown role {message.role!r:.40}: use {' or '.join(ROLES)}")
        if self.state.info.state != "ready":
            return Ack("the node is draining")
        if role is self.role.role:
            return Ack()
        if self.rules.shared_pool:
            return Ack(
                "its KV pool is shared with a node of the other role; restart the node in the role that you want"
            )
        self.update_info(state="draining")  # set before the first await, so that a concurrent call is refused
        self.sessions.publish_stats(self.stats())  # as in `drain`, before the first rejection
        drain_s = min(max(0.0, message.drain_s), MAX_DRAIN_S)  # in this order, NaN becomes 0
        # Shield the switch, because a caller that disconnects must not leave the node draining.
        return await asyncio.shield(self.tasks.start(self._switch(role, drain_s, announcer, ending)))

    async def _switch(self, role: Role, drain_s: float, announcer: Announcer, ending: asyncio.Event) -> Ack:
        await announcer.update(self.state.info)
        migrated = await self.drain(drain_s, f"node {self.state.info.id} becomes a {role.name} node")
        if ending.is_set():
            return Ack("the node is shutting down")
        self.take_role(role)
        await announcer.update(self.state.info)
        log.info("this node becomes a %s node; %d requests are retried on other nodes", role.name, migrated)
        return Ack()

    def on_writer_lost(self, writer: str) -> None:
        for adapter in self._adapters.values():
            adapter.on_writer_lost(writer)

    def handlers(self) -> dict[Rpc[Any, Any], RpcHandler]:
        """Return handlers for the RPCs of all roles, so that the RPC server can stay the same when the role changes."""
        handlers: dict[Rpc[Any, Any], RpcHandler] = {rpc: partial(self._call, rpc) for rpc in DECODE_CALLS}
        return handlers if self.images is None else handlers | {ENCODE: unary(self.images.serve)}

    async def _call(self, rpc: Rpc[Any, Any], stream: Any) -> None:
        """Pass the call to the adapter that serves this RPC, also after a change of role. Only the adapter of the
        current role makes new reservations."""
        adapters = [each for each in self._adapters.values() if each is self.role or rpc is not RESERVE]
        handler = next((each.handlers[rpc] for each in adapters if rpc in each.handlers), None)
        await (handler or unary(partial(self._refuse, rpc)))(stream)

    async def _refuse(self, rpc: Rpc[Any, Any], _request: Any) -> Any:
        return rpc.reply(error=f"node {self.state.info.id} is a {self.role.role.name} node now")

    # ---- from routers -------------------------------------------------------------------------------------------

    async def attach(self, stream: Any) -> None:
        await self.sessions.attach(stream, self.stats, self.on_command, self.requests.abort_router)

    def on_command(self, router: str, command: RouterCommand) -> None:
        for request_id in command.aborts:
            if self.requests.is_from(router, request_id):
                self.requests.abort(request_id)
        for submit in command.submits:
            self.submit(router, submit)

    def submit(self, router: str, submit: SubmitRequest) -> None:
        """Register a router's request, or send the router a rejection."""
        sends_kv = self.role.role.ends_at == "first_token" and submit.decode_node != ""
        try:
            if self.state.info.shared_pool_owner and not sends_kv:
                raise OverloadedError("this node has no KV pool of its own")
            request = self.requests.register(router, submit, self.role.on_abort if sends_kv else None, send_kv=sends_kv)
        except ValueError as error:
            retry = isinstance(error, OverloadedError)
            self.requests.send_to(router, TokenDelta(submit.id, error=str(error), retry=retry))
        except Exception:
            log.exception("request %s could not be registered", submit.id)
            self.requests.send_to(router, TokenDelta(submit.id, error=INTERNAL))
        else:
            if sends_kv:
                self.requests.guard(request.id, self.role.on_submit, submit, request)

    # ---- from the engine ----------------------------------------------------------------------------------------

    def on_admitted(self, request: Request) -> None:
        self.requests.guard(request.id, self.role.on_admitted, request)

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], at_ns: int) -> None:
        for delta in deltas:
            self.requests.guard(delta.id, self._publish, delta, at_ns)
        for row in progress:
            self.requests.guard(row.request.id, self.role.on_progress, row)

    def _publish(self, delta: TokenDelta, at_ns: int) -> None:
        self.requests.send(delta)
        if delta.finish or delta.error:
            self.requests.finish(delta.id, delta.finish or delta.error, at_ns)

    def on_request_failed(self, request_id: str) -> None:
        self.requests.fail(request_id, INTERNAL, retry=False)

    def on_engine_failed(self, error: BaseException) -> None:
        if not self.fatal_error.done():
            self.fatal_error.set_result(error)
