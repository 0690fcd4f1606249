"""The stream between the router and one node. It sends requests, receives their tokens, and detects a lost node."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from router.nodes.load import NodeLoad
from router.observer import RouterObserver
from scheduler.disaggregate import NodeView
from shared.rpc.connection import ANSWER_S, PING_S, RpcChannel
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RouterCommand, SubmitRequest, TokenDelta
from shared.rpc.methods import ATTACH, PEER_FAILURES, STREAM_ENDED

log = logging.getLogger("baton.fleet")
MAX_COMMAND_BYTES = 4 << 20
CLOSED = "The connection was closed without notice, probably because the node's process ended."
REDIAL_S = (0.05, 0.1, 0.2, 0.5, 1.0)
LIVENESS_INTERVALS = 8  # the timeout is divided into this many intervals; see `pass_interval`
UNUSED_INTERVALS = 3 * LIVENESS_INTERVALS  # limit for nodes without requests of this router; they report less often


class ModelVersion(NamedTuple):
    """The versions that determine a node's tokens: the digest of the model's files (`revision`) and the digest of
    Baton's code (`build`). A digest is "" if it is unknown."""

    revision: str
    build: str


ANY_VERSION = ModelVersion("", "")


class DeltaListener(Protocol):
    """An object that receives the deltas of one request from a node."""

    def on_delta(self, connection: "NodeConnection", delta: TokenDelta) -> None:
        """Process a delta. Raises ValueError, which ends the stream to the node, if the delta is malformed."""

    def on_node_lost(self, connection: "NodeConnection") -> None:
        """Handle the loss of the node, or of all its requests. The connection calls this method once, and then
        passes no more deltas."""


class NodeConnection:
    """The stream to one incarnation (one start) of a node. If the stream ends, the connection opens a new stream.

    The pool creates the connection, and runs `run` as a task. All methods run on the router's event loop. Each
    `Attempt` sends its request with `submit`, stops it with `abort`, and receives its deltas as a `DeltaListener` until
    it calls `forget`. The node is alive while messages arrive. When messages stop, `on_change` is called first, and
    then every listener is notified once. `load` holds the node's load for placement.
    """

    def __init__(
        self,
        router: str,
        info: NodeInfo,
        timeout_s: float,
        on_change: Callable[["NodeConnection"], None],
        observer: RouterObserver,
        wants_records: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`on_change` is called when the node becomes alive, ready, not ready or lost. `wants_records` returns whether
        the node with this id should send its records."""
        self.info = info
        self.stats = NodeStats()
        self.load = NodeLoad(time.monotonic)
        self.is_alive = False
        self.alive_since = 0.0
        self.ramp_until = 0.0  # until this time, the node gets less than its share of requests
        # True if the node is stuck, or if its stream broke while the node was still answering and not leaving.
        self.has_crashed = False
        self.is_listed = True  # whether the registry lists the node
        self.router_is_closing = False
        self.end_reason = ""  # why the last stream ended, as a sentence
        self.listeners: dict[str, DeltaListener] = {}  # by attempt id
        self._router = router
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._observer = observer
        self._wants_records = wants_records
        self._has_asked = self._wants_records(info.id)  # whether the node was asked to send its records
        # The values last sent to the node: whether this router has requests on it, and has noticed its drain.
        self._has_requests = self._has_seen_drain = False
        self._command = self._new_command()
        self._wake = asyncio.Event()
        self._silent_intervals, self._max_silent = 0, LIVENESS_INTERVALS
        self._timeout: asyncio.Timeout | None = None  # timeout of the open stream

    @property
    def is_leaving(self) -> bool:
        """Whether the node is draining (because it will shut down or change its role) or this router is closing."""
        return self.router_is_closing or self.is_draining

    @property
    def is_draining(self) -> bool:
        return "draining" in {self.info.state, self.stats.state}

    @property
    def is_ready(self) -> bool:
        """Whether the node takes new requests."""
        return self.is_alive and self.info.state == "ready" and self.stats.state == "ready"

    @property
    def version(self) -> ModelVersion:
        return ModelVersion(self.info.attributes.get("revision", ""), self.info.attributes.get("build", ""))

    @property
    def caches_prefixes(self) -> bool:
        return self.info.attributes.get("prefix_caching") != "false"

    def view(self) -> NodeView:
        return self.load.view(self.info, self.stats, len(self.listeners))

    # ---- to the node --------------------------------------------------------------------------------------------

    def submit(self, submit: SubmitRequest, listener: DeltaListener) -> None:
        """Send a request, and pass its deltas to `listener`."""
        self.listen(submit.id, listener)
        self._command.submits.append(submit)
        self._wake.set()

    def listen(self, identity: str, listener: DeltaListener) -> None:
        """Pass to `listener` the deltas of a request that another node will hand over to this node."""
        self.listeners[identity] = listener
        self.load.count_placement()
        self._inform()

    def forget(self, identity: str) -> None:
        """Stop listening to a request that has ended on this node."""
        self.listeners.pop(identity, None)
        self._inform_draining()

    def abort(self, identity: str) -> None:
        """Stop listening to a request, and stop the request on the node."""
        if self.listeners.pop(identity, None) is None or not self.is_alive:
            return
        unsent = self._command.submits
        kept = [submit for submit in unsent if submit.id != identity]
        if len(kept) < len(unsent):
            # A node handles the aborts in a message before the submits, so an abort in the same message as the submit
            # would not find the request.
            self._command.submits = kept
        else:
            self._command.aborts.append(identity)
            self._wake.set()
        self._inform_draining()

    def take_command(self) -> RouterCommand:
        """Return the unsent command, and start a new one."""
        command, self._command = self._command, self._new_command()
        return command

    def _new_command(self) -> RouterCommand:
        return RouterCommand(
            self._router,
            records=self._has_asked,
            has_requests=self._has_requests,
            has_seen_drain=self._has_seen_drain,
        )

    def _inform(self) -> None:
        """Inform the node if this router's first request was placed on it, if the last request on it has ended, or if
        this router has learnt that the node drains. After the first request, the node reports at once."""
        has_requests, is_draining = bool(self.listeners), self.is_draining
        if has_requests is not self._has_requests:
            self._command.has_requests = self._has_requests = has_requests
            answer_by = self._silent_intervals + LIVENESS_INTERVALS
            self._max_silent = min(answer_by, UNUSED_INTERVALS) if has_requests else UNUSED_INTERVALS
            self._wake.set()
        if is_draining is not self._has_seen_drain:
            self._command.has_seen_drain = self._has_seen_drain = is_draining
            self._wake.set()

    def _inform_draining(self) -> None:
        """Inform a draining node at once when its last request has ended, because its drain waits for this message."""
        if not self.listeners and self.is_draining:
            self._inform()

    # ---- the stream ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """While the registry lists the node, keep a stream to it open, and reconnect when the stream ends."""
        tries = 0
        while self.is_listed:
            is_silent, self.end_reason = False, CLOSED
            try:
                tries = 0 if await self._serve_stream() else tries
            except (*PEER_FAILURES, ValueError) as error:  # ValueError: malformed token ids
                is_silent = isinstance(error, TimeoutError) or self._silent_intervals >= self._max_silent
                if is_silent:
                    self.end_reason = "It stopped answering: it is frozen or unreachable."
                elif isinstance(error, ValueError):
                    self.end_reason = f"It sent an invalid message: {error}."
                log.debug("node %s: %s", self.info.id, str(error) or "no message arrived in time")
            finally:
                self.stream_ended(is_silent=is_silent)
            await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
            tries += 1

    async def _serve_stream(self) -> bool:
        """Serve one stream until it ends. Return whether the node sent its stats on the stream."""
        answer_s = max(ANSWER_S, self._timeout_s - PING_S)
        # The node's stats show that the node is alive, so pings are needed only while no stats arrive.
        channel = RpcChannel(self.info.address, answer_s=answer_s, pings_idle=True)
        self._has_asked, self._has_requests = self._wants_records(self.info.id), bool(self.listeners)
        self._has_seen_drain = self.is_draining
        self._command = self._new_command()
        self._wake.clear()
        self._silent_intervals, self._max_silent = 0, LIVENESS_INTERVALS
        try:
            async with asyncio.timeout(None) as self._timeout, ATTACH.open(channel) as stream:
                await stream.send_message(self._new_command())
                writer = asyncio.ensure_future(self._write(stream))
                try:
                    while (update := await stream.recv_message()) is not None:
                        self._silent_intervals = 0
                        self._max_silent = LIVENESS_INTERVALS if self._has_requests else UNUSED_INTERVALS
                        self.process(update)
                finally:
                    writer.cancel()
                return self.is_alive
        finally:
            self._timeout = None
            if channel.fell_silent:
                self._silent_intervals = self._max_silent
            channel.close()

    def pass_interval(self) -> None:
        """End the stream if no message has arrived within the node's timeout, or within three timeouts if the node has
        no requests of this router. The pool calls this method LIVENESS_INTERVALS times per timeout.

        The timeout consists of several intervals, so that a stall of this process counts as a single interval. Messages
        that arrived during the stall are processed before the next interval ends.
        """
        self._silent_intervals += 1
        if self._silent_intervals == self._max_silent and self._timeout is not None:
            self._timeout.reschedule(0.0)
        self._inform()

    async def _write(self, stream: Any) -> None:
        with suppress(*STREAM_ENDED):
            while True:
                await self._wake.wait()
                self._wake.clear()
                for part in _parts(self.take_command()):
                    await stream.send_message(part)

    # ---- from the node ------------------------------------------------------------------------------------------

    def process(self, update: NodeUpdate) -> None:
        """Process a message. Raises ValueError if the message is malformed or comes from another node. The error ends
        the stream."""
        if update.stats is not None and update.stats.incarnation_id not in {"", self.info.incarnation_id}:
            raise ValueError("another node, or another incarnation of this node, answers at its address")
        if update.stats is not None or update.steps or update.events:
            self._observer.node_updated(self.info, update)
        if update.stats is not None:
            self._process_stats(update.stats)
        for delta in update.deltas:
            listener = self.listeners.get(delta.id)
            if listener is not None:
                listener.on_delta(self, delta)
            elif delta.tokens and not delta.finish:  # the router ended the request before the node started it
                self._command.aborts.append(delta.id)
                self._wake.set()

    def _process_stats(self, stats: NodeStats) -> None:
        if self._has_asked is not (asks := self._wants_records(self.info.id)):
            self._command.records = self._has_asked = asks
            self._wake.set()
        self.load.read_stats(stats, has_stepped=stats.steps != self.stats.steps)
        before, self.stats = (self.is_alive, self.stats.state), stats
        if not self.is_alive:
            self.is_alive, self.alive_since, self.has_crashed = True, time.monotonic(), False
        if (self.is_alive, stats.state) != before:
            self._on_change(self)
            self._inform()
        if stats.state == "stuck":
            self.has_crashed = True
            self._fail_requests()

    def stream_ended(self, *, is_silent: bool = False) -> None:
        """Mark the node as lost, and notify the listeners. `is_silent` is true if the node stopped answering."""
        was_alive, self.is_alive = self.is_alive, False
        self.has_crashed = was_alive and not is_silent and not self.is_leaving
        if was_alive:  # a failed reconnect changes nothing, and notifying the pool would make it scan all nodes
            self._on_change(self)
            self._observer.node_lost(self.info.id)
        self._fail_requests()
        self.load.clear()

    def _fail_requests(self) -> None:
        """Notify every listener that the node dropped its request. If the node is connected, make it abort them."""
        listeners, self.listeners = self.listeners, {}
        if self.is_alive:
            self._command.submits = []  # all unsent requests belong to these listeners
            self._command.aborts += listeners
            self._wake.set()
        for listener in listeners.values():
            listener.on_node_lost(self)


def _parts(command: RouterCommand) -> Iterator[RouterCommand]:
    """Split a command into messages, each with at most about MAX_COMMAND_BYTES plus one request. The first message has
    the aborts."""
    part, size = replace(command, submits=[]), 0
    for submit in command.submits:
        if size > MAX_COMMAND_BYTES:
            yield part
            part, size = replace(command, submits=[], aborts=[]), 0
        part.submits.append(submit)
        large = [submit.sampling.allowed_tokens, *submit.sampling.bad_words, *(image.pixels for image in submit.media)]
        size += len(submit.tokens) + len(submit.grammar) + sum(map(len, large))
    yield part
