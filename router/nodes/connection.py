"""The standing stream to one node: requests out, what it says of them in, and whether it lives."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from router.history.history import RequestHistory
from scheduler.cost import MOST, CostModel
from scheduler.disaggregate import NodeView
from shared.rpc.connection import ANSWER_S, PING_S
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RouterCommand, SubmitRequest, TokenDelta
from shared.rpc.methods import ATTACH, PEER_FAILURES, STREAM_ENDED, connect

log = logging.getLogger("baton.fleet")
MAX_COMMAND_BYTES = 4 << 20
REDIAL_S = (0.05, 0.1, 0.2, 0.5, 1.0)
STALE_S = 30.0  # without a step, what a node's step-time model says counts no longer
LEARNT_PROMPT_TOKENS = 4096  # that a node computes itself before its step-time model is believed on prompts
LIVENESS_INTERVALS = 8  # without a word, and a node is lost: together they last as long as its timeout
SLOW_START_S = 10.0  # a node that joins others at work gets its full share of requests after so long
BACKLOG_STEPS = 16  # a node should have so many steps' prompt tokens to compute, as they fit in a second or two


class DeltaListener(Protocol):
    """One request's attempt, told of everything that concerns it."""

    def on_delta(self, link: "NodeConnection", delta: TokenDelta) -> None: ...
    def on_node_lost(self, link: "NodeConnection") -> None: ...


class NodeConnection:
    """The standing stream to one life of one node."""

    def __init__(
        self,
        router: str,
        info: NodeInfo,
        timeout_s: float,
        changed: Callable[["NodeConnection"], None],
        records: RequestHistory,
    ) -> None:
        self.info = info  # the setter reads what placement wants of it
        self.stats = NodeStats()
        self._cost: CostModel | None = None
        self._push_and_byte_s = (0.0, 0.0)
        self.is_alive = False
        self.alive_since = 0.0
        self.ramp_until = 0.0  # until then it is given less than its share
        self.has_crashed = False  # its stream broke while it worked: it had not fallen silent, nor left
        self.is_listed = True  # the registry has it
        self.router_is_closing = False  # this router is ending
        self.listeners: dict[str, DeltaListener] = {}
        self.outstanding_tokens = 0  # prompt tokens sent there whose computation was not told yet
        self.outstanding_pairs = 0  # query-key pairs of them
        self.kv_tokens = 0  # tokens whose KV is, or will be, there
        self.prefilling = 0  # attempts that generate there, and whose prompt is not computed yet
        self.placed = 0  # attempts that named it, ever
        self._router = router
        self._timeout_s = timeout_s
        self._on_change = changed
        self._records = records
        self._command = RouterCommand(router)
        self._wake = asyncio.Event()
        self._last_active = time.monotonic()  # when it last computed something, or was given something to
        self._silent_intervals = 0

    @property
    def info(self) -> NodeInfo:
        return self._info

    @info.setter
    def info(self, info: NodeInfo) -> None:
        self._info = info
        self._max_step_tokens = int(_fact(info, "max_step_tokens", 512))
        self._tbt_slo_s = _fact(info, "tbt_slo_ms", 0) / 1000

    @property
    def is_stale(self) -> bool:
        """Its steps are too long ago to predict from."""
        return time.monotonic() - self._last_active > STALE_S

    @property
    def is_leaving(self) -> bool:
        """It ends, or changes its role, as it was told to; or this router ends."""
        return self.router_is_closing or "draining" in {self.info.state, self.stats.state}

    @property
    def is_ready(self) -> bool:
        """Takes new requests."""
        return self.is_alive and self.info.state == "ready" and self.stats.state == "ready"

    @property
    def kv_capacity_tokens(self) -> int:
        return max(1, (self.info.num_blocks - 1) * self.info.block_tokens)

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that it should have before it, so that it never waits for more."""
        return BACKLOG_STEPS * self._max_step_tokens

    def has_room(self, now: float) -> bool:
        """Whether it may be given one more request while it ramps up."""
        share = 1 - max(0.0, self.ramp_until - now) / SLOW_START_S
        if self.info.role == "prefill":
            return self.outstanding_tokens <= share * self.backlog_tokens
        return len(self.listeners) <= share * self.info.max_num_seqs

    def submit(self, submit: SubmitRequest, listener: DeltaListener) -> None:
        self.listen(submit.id, listener)
        self._command.submits.append(submit)
        self._wake.set()

    def listen(self, identity: str, listener: DeltaListener) -> None:
        """Also hear what this node says of a request that another node hands to it."""
        self.listeners[identity] = listener
        self.placed += 1
        self._last_active = time.monotonic()

    def forget(self, identity: str) -> None:
        """Nothing more is expected of it here."""
        self.listeners.pop(identity, None)

    def abort(self, identity: str) -> None:
        if self.listeners.pop(identity, None) is None or not self.is_alive:
            return
        unsent = self._command.submits
        kept = [submit for submit in unsent if submit.id != identity]
        if len(kept) < len(unsent):  # of one command the node takes the aborts first: this one would meet nothing
            self._command.submits = kept
        else:
            self._command.aborts.append(identity)
            self._wake.set()

    def view(self) -> NodeView:
        info, load = self.info, self.stats
        in_blocks = (load.blocks_owned + load.blocks_reserved) * info.block_tokens
        return NodeView(
            info.id,
            info.role,
            max(self.outstanding_tokens, load.waiting_tokens),
            max(len(self.listeners), load.running + load.waiting),
            info.max_num_seqs,
            max(self.kv_tokens, in_blocks),
            self.kv_capacity_tokens,
            self.placed,
            self.outstanding_pairs,
            load.blocks_owned * info.block_tokens,
            self._max_step_tokens,
            self._tbt_slo_s,
            self._cost,
            load.prompt_tokens >= LEARNT_PROMPT_TOKENS,
            *self._push_and_byte_s,
            info.block_bytes // info.block_tokens,
            self.prefilling,
            info.incarnation_id,
            info.shared_pool_owner,
            self.is_stale,
        )

    async def run(self) -> None:
        """Dials until the registry has dropped the node and its stream has ended."""
        tries = 0
        while self.is_listed:
            is_silent = False
            try:
                tries = 0 if await self._serve_stream() else tries
            except (*PEER_FAILURES, ValueError) as error:  # ValueError: a delta's tokens are no ids
                is_silent = isinstance(error, TimeoutError) or self._silent_intervals >= LIVENESS_INTERVALS
                level = logging.WARNING if self.is_alive else logging.DEBUG
                log.log(level, "node %s: %s", self.info.id, str(error) or "no sign of life")
            finally:
                self._end(is_silent)
            await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
            tries += 1

    async def _serve_stream(self) -> bool:
        """One stream, from its start to its end. True when the node was alive on it."""
        channel = connect(self.info.address, answer_s=max(ANSWER_S, self._timeout_s - PING_S))
        self._command = RouterCommand(self._router)
        self._wake.clear()
        self._silent_intervals = 0
        try:
            async with self._liveness_timeout(), ATTACH.open(channel) as stream:
                await stream.send_message(RouterCommand(self._router))
                writer = asyncio.ensure_future(self._write(stream))
                try:
                    while (report := await stream.recv_message()) is not None:
                        self._silent_intervals = 0
                        self._process(report)
                finally:
                    writer.cancel()
                return self.is_alive
        finally:
            if channel.fell_silent:
                self._silent_intervals = LIVENESS_INTERVALS
            channel.close()

    @asynccontextmanager
    async def _liveness_timeout(self) -> AsyncIterator[None]:
        """Raises TimeoutError where nothing is heard for the timeout. It counts moments, not time: one in which this
        very process stood still is one, however long, and what came meanwhile is heard before the next."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def pass_moment() -> None:
            nonlocal timer
            self._silent_intervals += 1
            if self._silent_intervals >= LIVENESS_INTERVALS:
                patience.reschedule(loop.time())
            else:
                timer = loop.call_later(self._timeout_s / LIVENESS_INTERVALS, pass_moment)

        timer = loop.call_later(self._timeout_s / LIVENESS_INTERVALS, pass_moment)
        try:
            async with asyncio.timeout(None) as patience:
                yield
        finally:
            timer.cancel()

    async def _write(self, stream: Any) -> None:
        with suppress(*STREAM_ENDED):
            while True:
                await self._wake.wait()
                self._wake.clear()
                command, self._command = self._command, RouterCommand(self._router)
                for part in _parts(command):
                    await stream.send_message(part)

    def _process(self, report: NodeUpdate) -> None:
        if report.stats is not None and report.stats.incarnation_id not in {"", self.info.incarnation_id}:
            raise ValueError("another node, or another life of it, answers at its address")
        self._records.take(self.info, report)
        if report.stats is not None:
            self._read_speed_models(report.stats)
            if report.stats.steps != self.stats.steps:
                self._last_active = time.monotonic()
            was_ready, self.stats = self.is_ready, report.stats
            if not self.is_alive:
                self.is_alive, self.alive_since, self.has_crashed = True, time.monotonic(), False
            if self.stats.state == "stuck":
                self.has_crashed = True
                self._fail_requests("is stuck")
            if self.is_ready != was_ready:
                self._on_change(self)
        for delta in report.deltas:
            listener = self.listeners.get(delta.id)
            if listener is not None:
                listener.on_delta(self, delta)
            elif delta.tokens and not delta.finish:  # it was over here before it began there
                self._command.aborts.append(delta.id)
                self._wake.set()

    def _read_speed_models(self, load: NodeStats) -> None:
        """What it says of its speed, read once a heartbeat and not for each placement. Nonsense counts as unsaid."""
        self._cost = CostModel.unpacked(load.cost)
        if self._cost is None:
            load.cost = []
        is_sound = len(load.transfer) == 2 and all(0 <= number < MOST for number in load.transfer)
        self._push_and_byte_s = (load.transfer[0], load.transfer[1]) if is_sound else (0.0, 0.0)

    def _end(self, is_silent: bool = False) -> None:
        was_alive, self.is_alive = self.is_alive, False
        self.has_crashed = was_alive and not is_silent and not self.is_leaving
        self.outstanding_tokens = self.outstanding_pairs = self.kv_tokens = self.prefilling = 0
        if was_alive:  # to dial in vain is no news: telling it makes the fleet walk all that it knows
            self._on_change(self)
            self._records.lost(self.info.id)
        self._fail_requests("is lost" if was_alive and not self.router_is_closing else "")

    def _fail_requests(self, what: str) -> None:
        """All requests on the node go on elsewhere. Over a stream that lives, the node hears of it."""
        listeners, self.listeners = self.listeners, {}
        if what and (listeners or not self.is_alive):
            log.warning("node %s %s with %d requests on it", self.info.id, what, len(listeners))
        if self.is_alive:
            self._command.submits = []  # they are of these
            self._command.aborts += listeners
            self._wake.set()
        for listener in listeners.values():
            listener.on_node_lost(self)


def _parts(command: RouterCommand) -> Iterator[RouterCommand]:
    """A command in messages that stay below the cap: aborts first, then the submits, by the bytes of their tokens."""
    part, size = RouterCommand(command.router, aborts=command.aborts), 0
    for submit in command.submits:
        if size > MAX_COMMAND_BYTES:
            yield part
            part, size = RouterCommand(command.router), 0
        part.submits.append(submit)
        size += len(submit.tokens)
    yield part


def _fact(info: NodeInfo, name: str, otherwise: float) -> float:
    """A number that a node says of itself; what it does not say, or garbles, is `otherwise`."""
    try:
        value = float(info.attributes[name])
    except (KeyError, ValueError):
        return otherwise
    return value if 0 < value < 1e9 else otherwise
