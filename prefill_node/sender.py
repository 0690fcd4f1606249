"""Sends handoffs: reserves blocks at decode nodes, pushes rows over the best channel, commits, and reports the outcome.

Each request whose KV is sent has a task. Damaged rows are pushed once more. After any other failure, the handoff ends,
and the router retries the request on another node.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

from node.node import Node, RpcHandler
from node.output_publisher import PrefillProgress
from prefill_node.decode_peers import CorruptBlocksError, DecodePeer, DecodePeers, HandoffTiming, PeerRefusedError
from prefill_node.handoff import Action, CommitAction, Handoff, HandoffPhase, PushAction, StopAction
from scheduler.request import Request
from scheduler.role import PREFILL
from shared import failpoints
from shared.clock import now_ns
from shared.kv.channel import RESERVATION_ID_BYTES, ChannelError, KVChannel, ReservationRefusedError
from shared.kv.memory import KVMemory
from shared.lifecycle import TaskGroup
from shared.logs import about
from shared.rpc.messages import (
    Ack,
    CommitRequest,
    PushedNotice,
    ReserveReply,
    ReserveRequest,
    StopRequest,
    SubmitRequest,
    unpack_ids,
)
from shared.rpc.methods import COMMIT, PUSHED, RESERVE, PeerError, Rpc

log = logging.getLogger("baton.handoff")
# The number of requests that may hold a reservation in a shared pool before their first step.
MAX_RESERVED_EARLY = 4
RECENT_PUSHES = 32


class TransferTimeModel:
    """Learns the duration of a push from recent ones: a number of seconds for any push, plus seconds for each byte.

    It takes the median of the slopes between all pairs of pushes (Theil-Sen), which a few slow pushes do not change.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_PUSHES)  # bytes, seconds

    def observe(self, num_bytes: int, seconds: float) -> list[float]:
        """Return [seconds of any push, seconds of each byte].

        If all pushes have one size, the two cannot be separated, and all time is attributed to the bytes.
        """
        self._recent.append((num_bytes, seconds))
        slopes = [(s - t) / (b - a) for (a, t), (b, s) in combinations(self._recent, 2) if a != b]
        per_byte = max(0.0, median(slopes)) if slopes else median(s / b for b, s in self._recent)
        return [max(0.0, median(s - per_byte * b for b, s in self._recent)), per_byte]


@dataclass(slots=True)
class OutgoingHandoff:
    """A request whose KV is sent, and the state of its handoff."""

    submit: SubmitRequest
    request: Request
    handoff: Handoff
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    channel: KVChannel | None = None  # fixed, like `descriptor`, because the targets were granted for it
    descriptor: bytes = b""
    checksums: bytes = b""  # of pushed rows whose checksums were not yet sent to the peer
    is_running: bool = False  # its task runs
    is_early: bool = False  # holds one of the `MAX_RESERVED_EARLY` slots
    is_silent: bool = False  # do not report its outcome: the request was aborted, or has finished on this node

    def cancel(self, reason: str) -> None:
        self.handoff.cancel(reason)
        self.changed.set()


class HandoffSender:
    """The role adapter of a prefill node. `channels` lists the best channel first.

    Runs on the event loop: the node calls the `on_...` methods, and each handoff has a task that performs the actions
    of its state machine (`Handoff`). If the handoff fails, its request fails with `retry` set. If it commits, the
    request ends on this node, and its blocks stay in the prefix cache. For every reservation that is not committed, the
    sender repeats a stop until the decode node acknowledges it.
    """

    role = PREFILL

    def __init__(
        self,
        node: Node,
        memory: KVMemory,
        channels: Sequence[KVChannel],
        reserve_timeout_s: float,
        timing: HandoffTiming | None = None,
    ) -> None:
        self._info = node.state.info
        self._requests = node.requests
        self._engine = node.engine
        self._recorder = node.recorder
        self._counters = node.counters
        self._memory = memory
        self._reserve_timeout_s = reserve_timeout_s
        self._timing = timing or HandoffTiming()
        self.peers = DecodePeers(self._info.incarnation_id, node.counters, channels, self._timing)
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._tasks = TaskGroup()
        self._transfer_time = TransferTimeModel()
        self._early = asyncio.Semaphore(MAX_RESERVED_EARLY)

    @property
    def is_idle(self) -> bool:
        return not self._outgoing and self.peers.is_idle

    def handlers(self) -> Mapping[Rpc[Any, Any], RpcHandler]:
        return {}

    def start(self) -> None:
        self.peers.start()

    async def close(self) -> None:
        await self._tasks.close()
        await self.peers.close()

    # ---- from the node ------------------------------------------------------------------------------------------

    def on_submit(self, submit: SubmitRequest, request: Request) -> None:
        # Do not count request.tokens: the engine already has the request, and may have appended a token.
        handoff = Handoff(len(unpack_ids(submit.tokens)), self._info.block_tokens)
        outgoing = self._outgoing[request.id] = OutgoingHandoff(submit, request, handoff)
        if request.borrows_blocks:
            self._start(outgoing)  # the prompt is computed in the decode node's blocks

    def on_admitted(self, request: Request) -> None:
        """Reserve blocks when the first chunk is being computed."""
        outgoing = self._outgoing.get(request.id)
        if outgoing is not None:
            self._free_early_slot(outgoing)
            if not outgoing.is_running:
                self._start(outgoing)

    def on_progress(self, progress: PrefillProgress) -> None:
        outgoing = self._outgoing.get(progress.request.id)
        if outgoing is None:
            return
        outgoing.handoff.computed(progress.num_computed)
        if progress.finish is not None:  # the request ended at its first token, so there is nothing left to generate
            outgoing.is_silent = True
            outgoing.handoff.cancel(f"finished: {progress.finish}")
        elif progress.first_token is not None:
            outgoing.handoff.sampled(progress.first_token)
        outgoing.changed.set()

    def on_abort(self, request_id: str) -> bool:
        outgoing = self._outgoing.get(request_id)
        if outgoing is not None:
            outgoing.is_silent = True
            outgoing.cancel("aborted")
            if not outgoing.is_running:
                del self._outgoing[request_id]
        # The blocks may be reused from now on. A push in progress may send the wrong data, but is never committed.
        return False

    def on_writer_lost(self, writer: str) -> None:
        """Do nothing: no peer writes into the pool of a prefill node."""

    # ---- one handoff --------------------------------------------------------------------------------------------

    def _start(self, outgoing: OutgoingHandoff) -> None:
        outgoing.is_running = True
        self._tasks.start(self._run(outgoing))

    def _free_early_slot(self, outgoing: OutgoingHandoff) -> None:
        if outgoing.is_early:
            outgoing.is_early = False
            self._early.release()

    async def _run(self, outgoing: OutgoingHandoff) -> None:
        handoff, request_id = outgoing.handoff, outgoing.request.id
        about(request_id, outgoing.submit.traceparent)
        peer = None
        try:
            peer = self.peers.at(outgoing.submit.decode_node)
            if outgoing.request.borrows_blocks:
                outgoing.is_early = await self._early.acquire()
            if handoff.phase is HandoffPhase.RESERVING:  # not aborted while it waited
                await self._reserve(peer, outgoing)
            while handoff.phase is not HandoffPhase.DONE:
                if (action := handoff.next_action()) is not None:
                    await self._do(peer, outgoing, action)
                else:
                    await outgoing.changed.wait()
                    outgoing.changed.clear()
        except Exception as error:
            log.exception("handoff of %s raised an exception", request_id)
            handoff.reason = handoff.reason or type(error).__name__
            if peer is not None:
                await self._stop(peer, outgoing, StopAction(handoff.reason))
        finally:
            self._free_early_slot(outgoing)
            del self._outgoing[request_id]
            if peer is not None and handoff.reservation_id is not None:
                peer.reservations.pop(handoff.reservation_id, None)
            self._report(outgoing)

    async def _reserve(self, peer: DecodePeer, outgoing: OutgoingHandoff) -> None:
        handoff = outgoing.handoff
        peer.num_waiting += 1
        try:
            peer.check_breaker()
            async with peer.reserving:
                reply = await self._call_reserve(peer, outgoing)
            if reply.error:
                raise PeerRefusedError(f"{peer.address} refused: {reply.error}")
            held, targets = unpack_ids(reply.held), unpack_ids(reply.targets)
            handoff.granted(reply.reservation_id, reply.num_held, tuple(targets))
            peer.reservations[reply.reservation_id] = outgoing.cancel
            if reply.reservation_id in peer.void:
                raise ValueError(f"{peer.address} gave the reservation up before its answer came")
            self._check_grant(outgoing, reply, held + targets)
            outgoing.channel = self.peers.choose_channel(peer, reply.descriptors)
            outgoing.descriptor = reply.descriptors[outgoing.channel.name]
            if outgoing.request.borrows_blocks and handoff.phase is HandoffPhase.PUSHING:
                outgoing.request.blocks = held + targets
                outgoing.request.num_computed = reply.num_held * self._info.block_tokens
                self._requests.enqueue(outgoing.request)
        except (PeerError, ChannelError, ValueError) as error:
            handoff.failed(str(error))
        finally:
            peer.num_waiting -= 1

    async def _call_reserve(self, peer: DecodePeer, outgoing: OutgoingHandoff) -> ReserveReply:
        request = ReserveRequest(outgoing.submit, self._info.incarnation_id, self._info.fingerprint)
        began_ns = now_ns()
        try:
            reply = await RESERVE.call(peer.rpc, request, self._reserve_timeout_s + self._timing.call_s)
        except PeerError as error:
            peer.call_failed()
            # The lost reply may have granted a reservation. Stop it, since this node will not write under it.
            self.peers.retry_stop(peer, StopRequest(b"", str(error), outgoing.request.id))
            raise
        self._record(outgoing, "reserving", began_ns, peer)
        return reply

    def _check_grant(self, outgoing: OutgoingHandoff, reply: ReserveReply, blocks: list[int]) -> None:
        """Raise ValueError if the grant is invalid. In a shared pool, no channel would check the blocks later."""
        if len(reply.reservation_id) != RESERVATION_ID_BYTES or len(set(blocks)) < len(blocks):
            raise ValueError("the grant names a block twice, or its reservation id is malformed")
        is_whole = len(blocks) == outgoing.handoff.num_blocks and 0 < min(blocks) <= max(blocks) < self._memory.num_rows
        if outgoing.request.borrows_blocks and not is_whole:
            raise ValueError(f"the grant's {len(blocks)} blocks are not {outgoing.handoff.num_blocks} of the pool")

    async def _do(self, peer: DecodePeer, outgoing: OutgoingHandoff, action: Action) -> None:
        handoff = outgoing.handoff
        try:
            match action:
                case PushAction():
                    failpoints.reach("prefill.before_push", outgoing.request.id)
                    await self._push(peer, outgoing, action)
                    failpoints.reach("prefill.after_push", outgoing.request.id)
                case CommitAction():
                    failpoints.reach("prefill.before_commit", outgoing.request.id)
                    await self._commit(peer, outgoing, action)
                    failpoints.reach("prefill.after_commit", outgoing.request.id)
                case StopAction():
                    await self._stop(peer, outgoing, action)
        except CorruptBlocksError as error:
            outgoing.checksums = b""
            handoff.repeat(str(error))
        except (PeerError, ChannelError) as error:
            is_refusal = isinstance(error, PeerRefusedError | ReservationRefusedError)
            if handoff.phase is not HandoffPhase.STOPPING and not is_refusal:
                peer.call_failed()
            handoff.failed(str(error))
        else:
            handoff.done()

    async def _push(self, peer: DecodePeer, outgoing: OutgoingHandoff, push: PushAction) -> None:
        channel, descriptor, reservation_id = outgoing.channel, outgoing.descriptor, outgoing.handoff.reservation_id
        assert channel is not None
        assert reservation_id is not None
        if outgoing.request.borrows_blocks:
            await channel.push(descriptor, reservation_id, (), ())
            return
        source = outgoing.request.blocks[push.first : push.last]
        if len(source) < push.last - push.first:
            raise ChannelError("the request's blocks are gone")  # the request has just been aborted
        began_ns = now_ns()
        try:
            await channel.push(descriptor, reservation_id, source, push.targets)
        except ReservationRefusedError:
            raise  # the channel works
        except ChannelError:
            peer.drop_channel(channel, descriptor)
            raise
        num_bytes = len(source) * self._info.block_bytes
        moved = {"count": len(source), "bytes": num_bytes, "channel": channel.name}
        self._record(outgoing, "transfer", began_ns, peer, **moved)
        self._counters.transfer = self._transfer_time.observe(num_bytes, (now_ns() - began_ns) / 1e9)
        outgoing.checksums += await asyncio.to_thread(self._memory.checksums, source)
        if push.last < outgoing.handoff.num_blocks:
            notice = PushedNotice(reservation_id, outgoing.checksums)
            outgoing.checksums = b""
            _check(await PUSHED.call(peer.rpc, notice, self._timing.call_s))
        self._counters.blocks_moved += len(source)
        self._counters.bytes_moved += num_bytes

    async def _commit(self, peer: DecodePeer, outgoing: OutgoingHandoff, action: CommitAction) -> None:
        assert outgoing.handoff.reservation_id is not None
        commit = CommitRequest(outgoing.handoff.reservation_id, action.first_token, outgoing.checksums)
        began_ns = now_ns()
        _check(await COMMIT.call(peer.rpc, commit, self._timing.call_s))
        peer.failed_at.clear()
        self._record(outgoing, "committed", began_ns, peer)

    async def _stop(self, peer: DecodePeer, outgoing: OutgoingHandoff, stop: StopAction) -> None:
        reservation_id = outgoing.handoff.reservation_id
        if reservation_id is None:
            return
        if outgoing.request.borrows_blocks:
            await self._requests.release(outgoing.request)  # until released, steps write into the reserved blocks
        await self.peers.stop(peer, StopRequest(reservation_id, stop.reason))

    def _record(self, outgoing: OutgoingHandoff, kind: str, began_ns: int, peer: DecodePeer, **fields: object) -> None:
        """Record an event that lasted from `began_ns` until now."""
        at_ns = now_ns()
        fields |= {"duration_us": (at_ns - began_ns) // 1000, "peer": peer.address}
        self._recorder.event(outgoing.request.id, kind, at_ns, **fields)

    def _report(self, outgoing: OutgoingHandoff) -> None:
        request, handoff = outgoing.request, outgoing.handoff
        if outgoing.is_silent:
            return
        if handoff.committed:
            self._counters.handoffs += 1
            self._requests.finish(request.id, "handed_off")
            self._engine.post(lambda scheduler: scheduler.abort(request))  # the blocks stay in the prefix cache
        else:
            self._counters.handoffs_failed += 1
            log.warning("handoff of %s failed: %s", request.id, handoff.reason)
            self._requests.fail(request.id, f"handoff: {handoff.reason}", retry=True)


def _check(answer: Ack) -> None:
    if answer.error:
        raise (CorruptBlocksError if answer.again else PeerRefusedError)(answer.error)
