"""One incarnation of a proxy node: the requests that routers send, and the engine that computes them."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from node.recorder import StepRecorder
from node.router_sessions import RouterSessions
from node.validation import check_submit
from proxy_node.health import EngineHealth
from proxy_node.vllm import VllmEngine
from proxy_node.wire import EngineFailure, EngineMetrics
from shared.lifecycle import TaskGroup, wait_until
from shared.rpc.messages import (
    Ack,
    NodeInfo,
    NodeStats,
    RouterCommand,
    SetRoleRequest,
    SubmitRequest,
    TokenDelta,
    pack_ids,
)
from shared.rpc.methods import ATTACH, SET_ROLE, Rpc, unary

log = logging.getLogger("baton.proxy")
MAX_REQUESTS = 8192  # a node with this number of requests rejects new ones
INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    router: str
    task: "asyncio.Task[None]"


class ProxyNode:
    """Serves the node protocol for one incarnation of an engine.

    The process creates it when the engine has answered, calls `start`, and waits for `lost`, whose result is the reason
    why the engine is lost. The routers are then told that the node is stuck, and retry its requests on other nodes. A
    request has one task, which calls the engine and sends one delta for all events that arrive together. Cancelling the
    task closes the connection, and the engine drops the request. Runs on the event loop.
    """

    def __init__(self, info: NodeInfo, engine: VllmEngine, heartbeat_s: float, stuck_s: float) -> None:
        self.info = info
        self.recorder = StepRecorder()
        self.sessions = RouterSessions(self.recorder)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine, self._heartbeat_s = engine, heartbeat_s
        self._now = asyncio.get_running_loop().time
        self._health = EngineHealth(stuck_s, self._now())
        self._metrics = EngineMetrics({}, {}, 1)
        self._requests: dict[str, ProxiedRequest] = {}
        self._serials = itertools.count()
        self._tasks = TaskGroup()

    # ---- lifecycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._tasks.start(self._heartbeat())
        self._tasks.start(self._scrape())
        self._tasks.start(self.sessions.publish_records())

    def handlers(self) -> dict[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]:
        return {ATTACH: self.attach, SET_ROLE: unary(self.set_role)}

    async def drain(self, timeout_s: float) -> int:
        """Reject new requests, and wait until those in progress have ended. After `timeout_s`, fail the others, so that
        their routers retry them on other nodes. Return the number of these."""
        self.info = replace(self.info, state="draining")
        self.sessions.publish_stats(self.stats())
        await wait_until(lambda: not self._requests or self.lost.done(), timeout_s)
        rest = list(self._requests)
        for request_id in rest:
            self._fail(request_id, f"node {self.info.id} is shutting down", retry=True)
        await self.sessions.flush()
        return len(rest)

    async def close(self) -> None:
        await self._tasks.close()
        await self.sessions.close()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if reason := self._health.check(self._now()):
                self._lose(reason)
            self.sessions.publish_stats(self.stats())

    async def _scrape(self) -> None:
        """Read the engine's metrics at each heartbeat. The heartbeats to the routers do not wait for them."""
        while True:
            try:
                self._metrics = await self._engine.metrics()
                steps = self._value("iteration_tokens_total_count")
                self._health.scraped(self._now(), steps, len(self._requests))
            except EngineFailure as failure:
                await self._is_lost(failure)
            await asyncio.sleep(self._heartbeat_s)

    async def _is_lost(self, failure: EngineFailure) -> bool:
        """Return whether the engine is lost, which is asked before the failure is blamed on a request or on a node."""
        if failure.is_garbage:
            self._health.malformed(self._now())
        elif failure.is_suspicious and await self._engine.is_gone():
            self._health.lost(f"{failure}")
        if reason := self._health.failure:
            self._lose(reason)
        return self.lost.done()

    def _lose(self, reason: str) -> None:
        """Report the engine as lost, which ends all requests: routers retry them as those of a lost node."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self.sessions.publish_stats(self.stats())
            for request in self._requests.values():
                if request.task is not asyncio.current_task():
                    request.task.cancel()

    # ---- state --------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> float:
        return self._metrics.values.get(name, 0.0)

    def stats(self) -> NodeStats:
        """Return the node's statistics, of which the engine reports most. It does not report which blocks are cached:
        they count as free."""
        usage = self._value("kv_cache_usage_perc") or self._value("gpu_cache_usage_perc")  # the name before 0.10
        total = self.info.num_blocks - 1
        owned = min(total, round(usage * total))
        return NodeStats(
            state="stuck" if self.lost.done() else self.info.state,
            running=int(self._value("num_requests_running")),
            waiting=int(self._value("num_requests_waiting")),
            blocks_free=total - owned,
            blocks_owned=owned,
            blocks_total=total,
            steps=int(self._value("iteration_tokens_total_count")),
            prompt_tokens=int(self._value("prompt_tokens_total")),
            generated_tokens=int(self._value("generation_tokens_total")),
            cache_queries=int(self._value("prefix_cache_queries_total")),
            cache_hits=int(self._value("prefix_cache_hits_total")),
            preemptions=int(self._value("num_preemptions_total")),
            records_dropped=self.sessions.dropped_records + self.recorder.dropped,
            incarnation_id=self.info.incarnation_id,
        )

    async def set_role(self, message: SetRoleRequest) -> Ack:
        """Serve `SET_ROLE`: the engine behind this node determines the role."""
        if message.role == self.info.role:
            return Ack()
        return Ack(f"it is the proxy of a vLLM server, and stays a {self.info.role} node: restart it with another role")

    # ---- requests -----------------------------------------------------------------------------------------------

    async def attach(self, stream: Any) -> None:
        await self.sessions.attach(stream, self.stats, self.on_command, self._abort_router)

    def on_command(self, router: str, command: RouterCommand) -> None:
        for request_id in command.aborts:
            request = self._requests.get(request_id)
            if request is not None and request.router == router:
                self._end(request_id, "aborted")
        for submit in command.submits:
            self.submit(router, submit)

    def submit(self, router: str, submit: SubmitRequest) -> None:
        """Start a router's request, or send the router a rejection."""
        if self.lost.done():
            return  # the router learns it from the node's state
        try:
            tokens = check_submit(submit, self.info.max_model_len, self._engine.vocab_size)
            if submit.id in self._requests:
                raise ValueError(f"request {submit.id} is already on this node")
            if submit.decode_node:
                raise ValueError("decode_node: this node generates all tokens itself")
            if refusal := self._refusal(submit):
                self._send(router, TokenDelta(submit.id, error=refusal, retry=True))
                return
            outputs = self._engine.generate(submit, tokens)
        except ValueError as error:
            self._send(router, TokenDelta(submit.id, error=str(error)))
            return
        self.recorder.event(submit.id, "queued", serial=next(self._serials), count=len(tokens))
        task = self._tasks.start(self._run(submit.id, len(tokens) - submit.num_prompt, outputs))
        self._requests[submit.id] = ProxiedRequest(router, task)

    def _refusal(self, submit: SubmitRequest) -> str:
        """Return why another node should take the request; "" if this one can."""
        if self.info.state != "ready":
            return "this node is draining"
        if submit.adapter:
            return "this node does not have the request's LoRA adapter"
        return "this node has too many requests" if len(self._requests) >= MAX_REQUESTS else ""

    async def _run(self, request_id: str, position: int, outputs: Any) -> None:
        """Send the tokens of one request to its router. `position` is the number of tokens generated before."""
        start = position
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._health.streamed(self._now())
                    if position == start and output.tokens:
                        self.recorder.event(request_id, "first")
                    ids = TokenDelta(request_id, position, pack_ids(output.tokens), output.finish)
                    ids.logprobs = output.logprobs
                    position += len(output.tokens)
                    self._send(self._requests[request_id].router, ids)
                    if output.finish:
                        self._end(request_id, output.finish)
                        return
        except EngineFailure as failure:
            if not await self._is_lost(failure):
                reason = str(failure) if failure.retry or failure.status == 400 else INTERNAL
                log.warning("request %s failed: %s", request_id, failure)
                self._fail(request_id, reason, retry=failure.retry)
        except Exception:
            log.exception("request %s failed", request_id)
            self._fail(request_id, INTERNAL, retry=False)

    def _send(self, router: str, delta: TokenDelta) -> None:
        """Send a delta to a router. If the router has stopped reading, abort its requests."""
        if not self.sessions.send(router, delta):
            self._abort_router(router)

    def _fail(self, request_id: str, reason: str, *, retry: bool) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._send(request.router, TokenDelta(request_id, error=reason, retry=retry))
            self._end(request_id, reason)

    def _end(self, request_id: str, reason: str) -> None:
        """Remove a request, and close its connection to the engine. Do nothing if it has ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.recorder.event(request_id, "ended", reason=reason)
        if request.task is not asyncio.current_task():
            request.task.cancel()

    def _abort_router(self, router: str) -> None:
        for request_id in [key for key, request in self._requests.items() if request.router == router]:
            self._end(request_id, "aborted")
