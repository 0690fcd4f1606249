"""One incarnation of a proxy node. Routers send it requests, and an engine outside of Baton computes them."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from node.engine_steps import EngineStep, StepSocket, StepTracker
from node.recorder import StepRecorder
from node.router_sessions import RouterSessions
from node.validation import check_submit
from proxy_node.client import EngineClient, Outputs, Params
from proxy_node.connectors import NIXL
from proxy_node.health import EngineHealth
from proxy_node.wire import EngineFailure, EngineOutput, garbage
from shared.clock import to_tick
from shared.lifecycle import TaskGroup
from shared.registry import Announcer
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import (
    AcceptRequest,
    Ack,
    CommitRequest,
    NodeInfo,
    NodeStats,
    RouterCommand,
    SetRoleRequest,
    SubmitRequest,
    TokenDelta,
    pack_ids,
)
from shared.rpc.methods import ACCEPT, ATTACH, COMMIT, SET_ROLE, PeerError, Rpc, unary

log = logging.getLogger("baton.proxy")
MAX_REQUESTS = 8192  # a node with this many requests rejects new ones
Work = Callable[[], Awaitable[None]]
INTERNAL = "internal"
HANDOFF = "handoff: "  # prefix of errors that either of the two nodes may have caused; the router recognizes it
LOAD = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
LEASE_SHARE = 0.8  # the first token must come within this share of the lease
PUSH_LEASE_MS = 300_000  # how long SGLang servers wait for each other
NOT_SENT, FROM_COMMIT = -1, -2  # values of `AcceptRequest.first_token`
ACCEPT_S = 5.0
MAX_DRAIN_S = 3600.0
MAX_ABORTED = 1024


@dataclass(frozen=True, slots=True)
class ProxiedRequest:
    router: str
    task: "asyncio.Task[None]"
    committed: "asyncio.Future[int] | None" = None  # the first token, once a prefill engine has pushed all KV


class ProxyNode:
    """Serves the node protocol for one incarnation of an engine.

    When the engine has answered, the process creates the node, calls `start`, and waits for `lost`. The result of
    `lost` is the reason why the engine is lost. The node then reports that it is stuck, and the routers retry its
    requests on other nodes. A request has one task, which calls the engine, and sends one delta for all events that
    arrive together. Cancelling the task closes the connection, and the engine drops the request. All methods run on the
    event loop.
    """

    def __init__(
        self, info: NodeInfo, engine: EngineClient, heartbeat_s: float, stuck_s: float, lease_s: float,
        steps: StepSocket,
    ) -> None:  # fmt: skip
        """Set up the node. The engine keeps a prompt's blocks for another engine for `lease_s` seconds. `steps`
        receives the steps that the engine reports."""
        self.info = info
        self.counters = NodeStats()  # only the handoff fields are used
        self.recorder = StepRecorder()
        self._steps = StepTracker(self.recorder)
        steps.on_step = self._stepped
        self.sessions = RouterSessions(self.recorder)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine, self._heartbeat_s, self._lease_s = engine, heartbeat_s, lease_s
        self._now = asyncio.get_running_loop().time
        self._health = EngineHealth(stuck_s, self._now())
        self._metrics: dict[str, float] = {}
        self._requests: dict[str, ProxiedRequest] = {}
        # The latest aborted requests that were not on this node. A prefill node may still try to hand them over.
        self._aborted: deque[str] = deque(maxlen=MAX_ABORTED)
        self.is_ending = False
        self._announcer: Announcer
        self._peers: dict[str, RpcChannel] = {}  # channels to the proxies of decode engines, by address
        self._tasks = TaskGroup()

    # ---- lifecycle ----------------------------------------------------------------------------------------------

    async def start(self, announcer: Announcer) -> None:
        """Join the cluster. `info` must contain an address. The caller closes the announcer."""
        self._announcer = announcer
        await announcer.start(self.info)
        self._tasks.start(self._heartbeat())
        self._tasks.start(self._scrape())
        self._tasks.start(self.sessions.publish_records())

    def handlers(self) -> dict[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]:
        return {
            ATTACH: self.attach, SET_ROLE: unary(self.set_role), ACCEPT: unary(self.accept), COMMIT: unary(self.commit)
        }  # fmt: skip

    async def end(self, timeout_s: float) -> int:
        """Leave the cluster for a planned shutdown. Return the number of requests that are retried on other nodes."""
        self.is_ending = True
        return await self.drain(timeout_s, f"node {self.info.id} is shutting down")

    async def drain(self, timeout_s: float, reason: str) -> int:
        """Reject new requests, and wait until those in progress have ended. After `timeout_s`, fail the remaining
        requests, so that their routers retry them on other nodes. Return the number of failed requests."""
        self.info = replace(self.info, state="draining")
        self.sessions.publish_stats(self.stats())
        await self._announcer.update(self.info)
        await self.sessions.wait_until_ended(
            lambda: not self._requests or self.lost.done(), timeout_s, receives=self.info.role == "decode"
        )
        rest = list(self._requests)
        for request_id in rest:
            self._fail(request_id, reason, retry=True)
        await self.sessions.flush()
        return len(rest)

    async def close(self) -> None:
        await self._tasks.close()
        await self.sessions.close()
        for peer in self._peers.values():
            peer.close()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(to_tick(self._heartbeat_s))
            if reason := self._health.check(self._now()):
                self._lose(reason)
            self.sessions.publish_stats(self.stats())

    async def _scrape(self) -> None:
        """Read the engine's metrics periodically. The heartbeats to the routers do not wait for the metrics."""
        while True:
            try:
                self._metrics = await self._engine.metrics()
                steps, load = self._value("iteration_tokens_total_count"), tuple(map(self._value, LOAD))
                self._health.scraped(self._now(), steps, load, len(self._requests))
            except EngineFailure as failure:
                await self._is_lost(failure)
            await asyncio.sleep(self._heartbeat_s)

    async def _is_lost(self, failure: EngineFailure) -> bool:
        """Record a failure, and return whether the engine is lost. If it is unknown whether the server is gone, set
        `failure.retry`, so that another node retries the request."""
        is_gone = await self._engine.is_gone() if failure.is_suspicious else False
        failure.retry |= is_gone is None
        if is_gone:
            self._health.lost(f"{failure}")
        elif failure.fault is not None:
            self._health.failed(self._now(), failure.fault)
        if reason := self._health.failure:
            self._lose(reason)
        return self.lost.done()

    def _lose(self, reason: str) -> None:
        """Report the engine as lost, and end all requests. Routers then retry them on other nodes."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self.sessions.publish_stats(self.stats())
            for request in self._requests.values():
                request.task.cancel()

    def _stepped(self, step: EngineStep) -> None:
        self._health.streamed(self._now())
        stats = self.stats()
        self._steps.add(step, stats.blocks_free, stats.blocks_owned)

    # ---- state --------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> float:
        return self._metrics.get(name, 0.0)

    def refusal(self) -> str:
        """Return why the node takes no requests, or "" if it takes requests."""
        if self.lost.done() or self.info.state != "ready":
            return "the engine is lost" if self.lost.done() else "this node is draining"
        return "" if self.sessions.num_routers else "no router is connected to this node"

    def stats(self) -> NodeStats:
        """Return the node's statistics, most of which the engine reports. The engine does not report cached blocks, so
        they count as free."""
        total = self.info.num_blocks - 1
        owned = min(total, round(self._value("kv_cache_usage_perc") * total))
        return replace(
            self.counters,
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
            bytes_moved=int(self._value("nixl_bytes_transferred_sum")),
            cost=self._steps.cost.packed() if self._steps.cost is not None else [],
            records_dropped=self.sessions.dropped_records + self.recorder.dropped,
            incarnation_id=self.info.incarnation_id,
        )

    async def set_role(self, message: SetRoleRequest) -> Ack:
        """Serve `SET_ROLE`: drain, and rejoin in the other role. The engine needs no change: NIXL has no roles."""
        role, info = message.role, self.info
        if role == info.role:
            return Ack()
        if role not in {"prefill", "decode"} or info.attributes["connector"] != NIXL:
            reason = "its engine has no KV connector that works in both roles; see docs/engines.md"
            return Ack(reason)
        if info.state != "ready" or self.lost.done():
            return Ack("the node is draining")
        self.info = replace(info, state="draining")  # set before the first await, to refuse a concurrent call
        self.sessions.publish_stats(self.stats())  # otherwise, routers would mistake a rejection for a failure
        return await asyncio.shield(self._tasks.start(self._switch(role, min(max(0.0, message.drain_s), MAX_DRAIN_S))))

    async def _switch(self, role: str, drain_s: float) -> Ack:
        await self.drain(drain_s, f"node {self.info.id} becomes a {role} node")
        if self.is_ending:
            return Ack("the node is shutting down")
        self.info = replace(self.info, role=role, state="ready")
        await self._announcer.update(self.info)
        self.sessions.publish_stats(self.stats())
        return Ack()

    # ---- requests -----------------------------------------------------------------------------------------------

    async def attach(self, stream: Any) -> None:
        await self.sessions.attach(stream, self.stats, self.on_command, self._abort_router)

    def on_command(self, router: str, command: RouterCommand) -> None:
        for request_id in command.aborts:
            request = self._requests.get(request_id)
            if request is None:
                self._aborted.append(request_id)
            elif request.router == router:
                self._end(request_id, "aborted")
        for submit in command.submits:
            self.submit(router, submit)

    def submit(self, router: str, submit: SubmitRequest) -> None:
        """Start a router's request, or send the router a rejection."""
        if self.lost.done():
            return  # the node's state makes the router retry the request on another node
        try:
            if submit.decode_node and self.info.role != "prefill":
                raise ValueError("decode_node: this node generates all tokens itself")
            tokens = self._admit(submit)
            if submit.decode_node:
                self._engine.check(submit)
                self._start(router, submit, tokens, partial(self._hand_off, submit, tokens))
            else:
                outputs = self._engine.generate(submit, tokens)
                self._start(router, submit, tokens, partial(self._run, submit, tokens, outputs))
        except (ValueError, EngineFailure) as error:
            self._send(router, TokenDelta(submit.id, error=str(error), retry=isinstance(error, EngineFailure)))

    def _admit(self, submit: SubmitRequest, *, is_handoff: bool = False) -> list[int]:
        """Check a request, and return its tokens. A draining node accepts handoffs, because routers placed these
        requests on the node before it drained.

        Raises ValueError if the request is malformed, and EngineFailure if only other nodes can take it.
        """
        tokens = check_submit(submit, self.info.max_model_len, self._engine.vocab_size)
        if submit.id in self._requests:
            raise ValueError(f"request {submit.id} is already on this node")
        if self.info.state != "ready" and not is_handoff:
            raise EngineFailure("this node is draining")
        if submit.adapter:
            raise EngineFailure("this node does not have the request's LoRA adapter")
        if len(self._requests) >= MAX_REQUESTS:
            raise EngineFailure("this node has too many requests")
        return tokens

    def _start(self, router: str, submit: SubmitRequest, tokens: list[int], work: Work, committed: Any = None) -> None:
        self._steps.begin(submit.id, tokens)
        task = self._tasks.start(self._guard(submit.id, work))
        self._requests[submit.id] = ProxiedRequest(router, task, committed)

    async def _guard(self, request_id: str, work: Work) -> None:
        """Run one request. An error fails only this request, unless the engine is lost."""
        try:
            await work()
        except EngineFailure as failure:
            if not await self._is_lost(failure):
                reason = str(failure) if failure.retry or failure.status == 400 else INTERNAL
                log.warning("request %s failed: %s", request_id, failure)
                self._fail(request_id, reason, retry=failure.retry)
        except Exception:
            log.exception("request %s failed", request_id)
            self._fail(request_id, INTERNAL, retry=False)

    async def _run(
        self, submit: SubmitRequest, tokens: list[int], outputs: Outputs, handoff: AcceptRequest | None = None
    ) -> None:
        """Send the tokens of one request to its router. `handoff` is given if another engine computed the prompt."""
        request, began, handed_off = self._requests[submit.id], self._now(), handoff is not None
        async with aclosing(outputs):
            if handoff is None:
                output = await anext(outputs)
            else:
                output = await _first_output(outputs, handoff, request.committed)
                tokens += [handoff.first_token] if handoff.first_token >= 0 else []
            self.recorder.event(submit.id, "first")
            while True:
                self._health.streamed(self._now())
                delta = TokenDelta(submit.id, len(tokens) - submit.num_prompt, pack_ids(output.tokens), output.finish)
                delta.handed_off, delta.logprobs, handed_off = handed_off, output.logprobs, False
                tokens += output.tokens
                self._send(request.router, delta)
                if output.finish:
                    break
                output = await anext(outputs)
        self._health.answered(began)
        self._end(submit.id, output.finish)

    # ---- handoffs -----------------------------------------------------------------------------------------------

    async def _hand_off(self, submit: SubmitRequest, tokens: list[int]) -> None:
        """Let the engine compute a prompt, and pass the request on to the proxy of a decode engine.

        If sampling is repeatable, the router gets the first token at once, and the decode engine must sample the same
        token. Otherwise, the router gets the decode engine's first token.
        """
        if (offer := self._engine.offer()) is not None:
            await self._push(submit, tokens, offer)
            return
        output, params = await self._prefill(submit, tokens, None)
        position = len(tokens) - submit.num_prompt
        delta = TokenDelta(submit.id, position, pack_ids(output.tokens), output.finish, logprobs=output.logprobs)
        kind = "seeded" if submit.sampling.temperature > 0 else "greedy"
        is_sent = bool(output.finish) or kind in self.info.attributes["resumes"]
        if is_sent:
            self._send(self._requests[submit.id].router, delta)
        if output.finish:
            self._end(submit.id, output.finish)
            return
        if params is None:
            raise garbage("the engine has no KV connector any more")
        lease_ms = round(1000 * LEASE_SHARE * self._lease_s)
        first_token = output.tokens[0] if is_sent else NOT_SENT
        await self._call(submit, ACCEPT, AcceptRequest(submit, json.dumps(params).encode(), lease_ms, first_token))
        self.counters.handoffs += 1
        self._end(submit.id, "handed_off")

    async def _push(self, submit: SubmitRequest, tokens: list[int], offer: dict[str, Any]) -> None:
        """Let a decode engine wait for the KV of a prompt, which this node's engine computes and pushes.

        The decode node sends no token before this node has committed the handoff. If the prefill engine gives up the
        request, the decode engine may generate tokens from incomplete KV. These tokens are never sent, and the router,
        which learns of the failure from this node, aborts the request on the decode node.
        """
        await self._call(submit, ACCEPT, AcceptRequest(submit, json.dumps(offer).encode(), PUSH_LEASE_MS, FROM_COMMIT))
        try:
            output, _ = await self._prefill(submit, tokens, offer)
        except EngineFailure as failure:
            if failure.status != 500:
                raise
            self.counters.handoffs_failed += 1  # the transfer failed, and either engine may be at fault
            raise replace(failure, reason=f"{HANDOFF}{failure}", retry=True, is_suspicious=True) from None
        await self._call(submit, COMMIT, CommitRequest(submit.id.encode(), output.tokens[0], b""))
        self.counters.handoffs += 1
        self._end(submit.id, "handed_off")

    async def _prefill(self, submit: SubmitRequest, tokens: list[int], offer: Params) -> tuple[EngineOutput, Params]:
        began = self._now()
        output, params = await self._engine.prefill(submit, tokens, offer)
        if len(output.tokens) != 1:
            raise garbage(f"it has {len(output.tokens)} tokens instead of one")
        self._health.streamed(self._now())
        self._health.answered(began)
        self.recorder.event(submit.id, "first", count=1)
        return output, params

    async def _call(self, submit: SubmitRequest, rpc: Rpc[Any, Ack], message: AcceptRequest | CommitRequest) -> None:
        """Call the proxy of the decode engine. Raises EngineFailure if that node cannot serve the request."""
        peer = self._peers.setdefault(submit.decode_node, RpcChannel(submit.decode_node))
        try:
            error = (await rpc.call(peer, message, ACCEPT_S)).error
        except PeerError as failure:
            error = str(failure)
        if error:
            self.counters.handoffs_failed += 1
            raise EngineFailure(f"{HANDOFF}{error}")

    async def accept(self, message: AcceptRequest) -> Ack:
        """Serve `ACCEPT`: answer a request whose prompt another engine computed. The KV can be read only once."""
        submit = message.request
        try:
            if self.lost.done() or self.info.role != "decode":
                raise ValueError(f"node {self.info.id} does not decode now")
            if not self.sessions.is_attached(submit.router):
                raise ValueError("this router is not connected to this node")
            if submit.id in self._aborted:
                raise ValueError("the router has aborted this request")
            tokens = self._admit(submit, is_handoff=True)
            outputs = self._engine.generate(submit, tokens, self._engine.transfer.read(message.params))
        except (ValueError, EngineFailure) as error:
            return Ack(str(error))
        committed = asyncio.get_running_loop().create_future() if message.first_token == FROM_COMMIT else None
        self._start(submit.router, submit, tokens, partial(self._run, submit, tokens, outputs, message), committed)
        return Ack()

    async def commit(self, message: CommitRequest) -> Ack:
        """Serve `COMMIT`: the prefill engine has pushed all KV of a request, and sampled its first token."""
        request = self._requests.get(message.reservation_id.decode("utf-8", "replace"))
        if request is None or request.committed is None or request.committed.done():
            return Ack("this node no longer has the request")
        request.committed.set_result(message.first_token)
        return Ack()

    # ---- ends ---------------------------------------------------------------------------------------------------

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
        """Remove a request, and close its connection to the engine. Do nothing if the request has ended."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._steps.end(request_id, reason)
            request.task.cancel()  # if it is the current task, it ends at its next await

    def _abort_router(self, router: str) -> None:
        for request_id in [key for key, request in self._requests.items() if request.router == router]:
            self._end(request_id, "aborted")


async def _first_output(outputs: Outputs, handoff: AcceptRequest, committed: Any) -> EngineOutput:
    """Return the first output of a decode engine, without the first token if the router already has that token.

    Raises EngineFailure if the KV cannot be read in time, or if the prefill engine sampled another first token.
    """
    try:
        async with asyncio.timeout(handoff.lease_ms / 1000):
            output = await anext(outputs)
            expected = handoff.first_token if committed is None else await committed
    except TimeoutError:
        raise EngineFailure(f"{HANDOFF}no token came in time, and the lease of the KV may have ended") from None
    except EngineFailure as failure:
        # An engine reports the same error whether it cannot read the KV or fails in another way, so the handoff may
        # have failed.
        raise replace(failure, reason=f"{HANDOFF}{failure}", retry=True, is_suspicious=True) from None
    if expected >= 0 and output.tokens[:1] != [expected]:
        raise EngineFailure(f"{HANDOFF}the engines sampled different first tokens")
    if handoff.first_token >= 0:
        del output.tokens[0], output.logprobs[:1]
    return output
