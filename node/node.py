"""A node: the engine, the standing streams to routers, and the adapter of its role.

A router's submits go to the engine, and what its steps do goes back to the router. The role adapter sends the KV of
prompts to decode nodes, or receives it from prefill nodes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from engine.engine import INTERNAL, STUCK_S, Engine, EngineListener
from engine.runner import Runner
from node.active_requests import ActiveRequests, OverloadedError, RequestRules
from node.output_publisher import OutputPublisher, PrefillProgress
from node.recorder import StepRecorder
from node.router_sessions import FLUSH_S, RouterSessions
from node.stats import HandoffCounters, NodeState
from scheduler.request import Request, RequestState
from scheduler.role import Role
from scheduler.scheduler import Scheduler
from shared.lifecycle import TaskGroup, wait_until
from shared.rpc.messages import NodeInfo, NodeStats, RouterCommand, SubmitRequest, TokenDelta
from shared.rpc.methods import Rpc

log = logging.getLogger("baton.node")


class NodeServices:
    """What a node and its role adapters share, wired together."""

    def __init__(
        self,
        info: NodeInfo,
        scheduler: Scheduler,
        runner: Runner,
        rules: RequestRules,
        *,
        stuck_s: float = STUCK_S,
        recorder: StepRecorder | None = None,
        sessions: RouterSessions | None = None,
        make_engine: Callable[[Scheduler, Runner, EngineListener, float], Engine] = Engine,
    ) -> None:
        """`stuck_s` is the least time a step may take: see `engine.step_time_fit`."""
        self.scheduler, self.runner, self.rules = scheduler, runner, rules
        self.recorder = recorder or StepRecorder()
        self.sessions = sessions or RouterSessions(self.recorder)
        self.counters = HandoffCounters()
        self.publisher = OutputPublisher(scheduler, self.recorder)
        self.engine = make_engine(scheduler, runner, self.publisher, stuck_s)
        self.state = NodeState(info, self.publisher)
        self.requests = ActiveRequests(self.state, self.engine, self.sessions, self.recorder, rules)

    def stats(self) -> NodeStats:
        """Collect the node's statistics, on the event loop.

        Reads only numbers of the scheduler and the runner, which belong to the engine's thread.
        """
        snapshot, cost = self.publisher.snapshot, self.scheduler.cost
        requests = tuple(self.scheduler.requests.values())
        waiting = (each for each in requests if each.state is RequestState.WAITING and not each.receive_kv)
        return NodeStats(
            state=self.state.name,
            running=snapshot.running,
            waiting=snapshot.waiting,
            waiting_tokens=sum(len(request.tokens) for request in waiting),
            **{f"blocks_{name}": count for name, count in snapshot.ledger._asdict().items()},
            **asdict(self.scheduler.counters),
            **asdict(self.counters),
            cost=cost.packed() if cost is not None else [],
            records_dropped=self.sessions.dropped_records + self.recorder.dropped,
            overruns=self.runner.overruns,
            ledger_error=self.publisher.ledger_error,
            incarnation_id=self.state.info.incarnation_id,
        )


RpcHandler = Callable[[Any], Awaitable[None]]


class RoleAdapter(Protocol):
    """A node's end of its handoffs. Used on the event loop; an exception in an `on_...` fails that request alone."""

    role: Role

    def start(self) -> None: ...

    async def close(self) -> None: ...

    def handlers(self) -> Mapping[Rpc[Any, Any], RpcHandler]:
        """Return the RPCs that this role serves to peers."""

    def on_submit(self, submit: SubmitRequest, request: Request) -> None:
        """Handle a newly registered request whose KV is to be sent."""

    def on_admitted(self, request: Request) -> None:
        """Handle the first step of a request that sends KV, or the blocks of one that receives KV."""

    def on_progress(self, progress: PrefillProgress) -> None:
        """Handle a step that computed part of a request whose KV is sent."""

    def on_abort(self, request_id: str) -> bool:
        """End the request's handoff. Return True if the adapter returns its blocks to the scheduler."""

    def on_writer_lost(self, writer: str) -> None:
        """Handle the end of a process that could write into this node's KV pool."""


class Node:
    """The life of one node, and the flow between routers, engine and role adapter.

    Created and used on the event loop of its process, which starts it, drains it and closes it. It owns the services,
    which it starts and stops, and the current role adapter. `fatal_error` is set when the engine has failed or made
    no progress for too long; the process then exits.
    """

    def __init__(self, role: RoleAdapter, services: NodeServices, heartbeat_s: float) -> None:
        self.role = role
        self.state = services.state
        self.engine = services.engine
        self.requests = services.requests
        self.sessions = services.sessions
        self.tasks = TaskGroup()
        self.num_heartbeats = 0  # changes at each heartbeat of the event loop
        self.fatal_error: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._services = services
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()

    # ---- lifecycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._services.publisher.subscribe(self)
        self.engine.start()
        self.tasks.start(self._heartbeat())
        self.tasks.start(self.sessions.publish_records())

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, and wait until those in progress have ended."""
        self.update_info(state="draining")
        # Sent together with the first rejections, so that routers see that the node drains and did not fail.
        self.sessions.publish_stats(self.stats())
        await wait_until(lambda: not self.requests, timeout_s)

    async def close(self) -> None:
        await self.tasks.close()
        await self.sessions.close()
        await asyncio.to_thread(self.engine.stop)

    def switch_role(self, adapter: RoleAdapter) -> None:
        """Use another role adapter from now on. The node is drained, and has no requests."""
        self.role = adapter
        self.update_info(role=adapter.role.name, state="ready")

    @property
    def shared_pool(self) -> bool:
        return self._services.rules.shared_pool

    def update_info(self, **changes: Any) -> None:
        self.state.info = replace(self.state.info, **changes)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self.num_heartbeats += 1
            self.sessions.publish_stats(self.stats())

    def stats(self) -> NodeStats:
        return self._services.stats()

    def report_stuck(self, reason: str) -> None:
        """Report to the routers that this node makes no progress, then fail. May be called on any thread."""
        self._loop.call_soon_threadsafe(self._on_stuck, reason)

    def _on_stuck(self, reason: str) -> None:
        self.state.is_stuck = True
        self.sessions.publish_stats(self.stats())
        self._loop.call_later(FLUSH_S, self.on_engine_failed, RuntimeError(reason))

    # ---- from routers -------------------------------------------------------------------------------------------

    async def attach(self, stream: Any) -> None:
        await self.sessions.attach(stream, self)

    def on_command(self, router: str, command: RouterCommand) -> None:
        for request_id in command.aborts:
            if self.requests.is_from(router, request_id):
                self.requests.abort(request_id)
        for submit in command.submits:
            self.submit(router, submit)

    def on_router_lost(self, router: str) -> None:
        self.requests.abort_router(router)

    def submit(self, router: str, submit: SubmitRequest) -> None:
        """Register a request of a router. A rejection is sent to the router."""
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
