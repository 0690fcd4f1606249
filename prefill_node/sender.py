"""Carries handoffs out: asks decode nodes for room, pushes blocks over the best channel, commits, and says how it went.

One task a request that leaves. Rows that came damaged are pushed once more; whatever else goes wrong ends the handoff,
and the request goes on elsewhere.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from node.node import Node
from node.output_publisher import PrefillProgress
from prefill_node.decode_peers import CALL_S, CorruptBlocksError, DecodePeer, DecodePeers, PeerRefusedError
from prefill_node.handoff import Action, CommitAction, Handoff, HandoffPhase, PushAction, StopAction
from prefill_node.transfer_time import TransferTimeModel
from scheduler.request import Request
from shared import failpoints
from shared.clock import now_ns
from shared.kv.channel import RESERVATION_ID_BYTES, ChannelError, KVChannel, ReservationRefusedError
from shared.kv.staging import KVMemory
from shared.lifecycle import TaskGroup
from shared.logs import about
from shared.rpc import messages
from shared.rpc.messages import SubmitRequest
from shared.rpc.methods import COMMIT, PUSHED, RESERVE, PeerError, Rpc

log = logging.getLogger("baton.handoff")
# Of requests that are to be computed in the decode node's pool: how many may have their room before their turn.
MAX_GRANTED = 4


@dataclass(slots=True)
class OutgoingHandoff:
    """One request on its way."""

    submit: SubmitRequest
    request: Request
    handoff: Handoff
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    channel: KVChannel | None = None  # with `card`, fixed for this handoff: they belong to the granted targets
    descriptor: bytes = b""
    checksums: bytes = b""  # of rows that are pushed, which the peer was not told yet
    is_running: bool = False  # its task runs
    waits: bool = False  # computed in the decode node's pool, it has room there or asks for it, and no step had it yet
    is_silent: bool = False  # nobody is to be told how it ends: it was aborted, or ended here


class HandoffSender:
    """`channels`: best first."""

    def __init__(
        self,
        node: Node,
        memory: KVMemory,
        channels: Sequence[KVChannel],
        reserve_timeout_s: float,
    ) -> None:
        self._node = node
        self._memory = memory
        self._reserve_timeout_s = reserve_timeout_s
        self._peers = DecodePeers(node, channels)
        self._outgoing: dict[str, OutgoingHandoff] = {}
        self._tasks = TaskGroup()
        self._push_fit = TransferTimeModel()
        self._granted = asyncio.Semaphore(MAX_GRANTED)
        node.on_send_submitted = self.on_submit
        node.on_send_admitted = self.on_admitted
        node.on_progress = self.on_progress
        node.on_abort = self.on_abort

    def handlers(self) -> Mapping[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]:
        return {}  # nobody asks a prefill node for anything but prompts

    def on_writer_lost(self, writer: str) -> None:
        """Nobody writes into a prefill node's pool."""

    def start(self) -> None:
        self._peers.start()

    async def close(self) -> None:
        await self._tasks.close()
        await self._peers.close()

    # ---- what the node tells ------------------------------------------------------------------------------------

    def on_submit(self, submit: SubmitRequest, request: Request) -> None:
        # Not of request.tokens: the engine has the request already, and may have appended to them.
        handoff = Handoff(len(messages.unpack_ids(submit.tokens)), self._node.info.block_tokens)
        leaving = self._outgoing[request.id] = OutgoingHandoff(submit, request, handoff)
        if request.borrows_blocks:
            self._start(leaving)  # it needs room before it can be computed

    def on_admitted(self, identity: str) -> None:
        """Its first chunk is being computed: time to ask for room, not earlier."""
        leaving = self._outgoing.get(identity)
        if leaving is not None:
            self._start_next(leaving)
            if not leaving.is_running:
                self._start(leaving)

    def _start(self, leaving: OutgoingHandoff) -> None:
        leaving.is_running = True
        self._tasks.start(self._run(leaving))

    def _start_next(self, leaving: OutgoingHandoff) -> None:
        if leaving.waits:
            leaving.waits = False
            self._granted.release()

    def on_progress(self, row: PrefillProgress) -> None:
        leaving = self._outgoing.get(row.request.id)
        if leaving is None:
            return
        leaving.handoff.computed(row.num_computed)
        if row.finish is not None:  # over at its first token: nothing is left to generate elsewhere
            leaving.is_silent = True
            leaving.handoff.cancel(f"finished: {row.finish}")
        elif row.first_token is not None:
            leaving.handoff.sampled(row.first_token)
        leaving.changed.set()

    def on_abort(self, identity: str) -> bool:
        leaving = self._outgoing.get(identity)
        if leaving is not None:
            leaving.is_silent = True
            _cancel(leaving, "aborted")
            if not leaving.is_running:
                del self._outgoing[identity]
        return False  # the scheduler may have the blocks back now: what a push reads meanwhile is never committed

    # ---- one handoff --------------------------------------------------------------------------------------------

    async def _run(self, leaving: OutgoingHandoff) -> None:
        handoff, identity = leaving.handoff, leaving.request.id
        about(identity, leaving.submit.traceparent)
        peer = None
        try:
            peer = self._peers.at(leaving.submit.decode_node)
            if leaving.request.borrows_blocks:
                leaving.waits = await self._granted.acquire()
            if handoff.phase is HandoffPhase.ASKING:  # else it was aborted meanwhile
                await self._ask(peer, leaving)
            while handoff.phase is not HandoffPhase.DONE:
                action = handoff.next_action()
                if action is not None:
                    await self._do(peer, leaving, action)
                else:
                    await leaving.changed.wait()
                    leaving.changed.clear()
        except Exception as error:
            log.exception("handoff of %s broke", identity)
            handoff.reason = handoff.reason or type(error).__name__
            if peer is not None:
                await self._stop(peer, leaving, StopAction(handoff.reason))
        finally:
            self._start_next(leaving)
            del self._outgoing[identity]
            if peer is not None and handoff.reservation_id is not None:
                peer.reservations.pop(handoff.reservation_id, None)
            self._end(leaving)

    async def _ask(self, peer: DecodePeer, leaving: OutgoingHandoff) -> None:
        info, handoff = self._node.info, leaving.handoff
        peer.num_waiting += 1
        try:
            peer.check_breaker()
            async with peer.asking:
                question = messages.ReserveRequest(leaving.submit, info.incarnation_id, info.fingerprint)
                asked_ns = now_ns()
                try:
                    reserved = await RESERVE.call(peer.rpc, question, self._reserve_timeout_s + CALL_S)
                except PeerError as error:
                    peer.failed_call()
                    self._peers.cancel_reservation(peer, leaving.request.id, str(error))
                    raise
                self._note(leaving, "reserving", asked_ns, peer=peer.address)
            if reserved.error:
                handoff.failed(f"{peer.address} refused: {reserved.error}")
                return
            held, targets = messages.unpack_ids(reserved.held), messages.unpack_ids(reserved.targets)
            handoff.granted(reserved.reservation_id, reserved.num_held, tuple(targets))
            peer.reservations[reserved.reservation_id] = partial(_cancel, leaving)
            if reserved.reservation_id in peer.void:
                raise ValueError(f"{peer.address} gave the reservation up before its answer came")
            self._check_grant(leaving, reserved, held + targets)
            leaving.channel = self._peers.choose_channel(peer, reserved.descriptors)
            leaving.descriptor = reserved.descriptors[leaving.channel.name]
            if leaving.request.borrows_blocks and handoff.phase is HandoffPhase.MOVING:
                leaving.request.blocks = held + targets
                leaving.request.num_computed = reserved.num_held * info.block_tokens
                self._node.enqueue(leaving.request)
        except (PeerError, ChannelError, ValueError) as error:
            handoff.failed(str(error))
        finally:
            peer.num_waiting -= 1

    def _check_grant(self, leaving: OutgoingHandoff, reserved: messages.ReserveReply, blocks: list[int]) -> None:
        """Raises ValueError. Where the prompt is computed in these blocks, no channel looks at them again."""
        if len(reserved.reservation_id) != RESERVATION_ID_BYTES or len(set(blocks)) < len(blocks):
            raise ValueError("the grant names a block twice, or its ticket is none")
        is_whole = len(blocks) == leaving.handoff.num_blocks and 0 < min(blocks) <= max(blocks) < self._memory.num_rows
        if leaving.request.borrows_blocks and not is_whole:
            raise ValueError(f"the grant's {len(blocks)} blocks are not {leaving.handoff.num_blocks} of the pool")

    async def _do(self, peer: DecodePeer, leaving: OutgoingHandoff, action: Action) -> None:
        handoff = leaving.handoff
        try:
            match action:
                case PushAction():
                    failpoints.reach("prefill.before_push", leaving.request.id)
                    await self._push(peer, leaving, action)
                    failpoints.reach("prefill.after_push", leaving.request.id)
                case CommitAction():
                    failpoints.reach("prefill.before_commit", leaving.request.id)
                    assert handoff.reservation_id is not None
                    commit = messages.CommitRequest(handoff.reservation_id, action.first_token, leaving.checksums)
                    told_ns = now_ns()
                    _check(await COMMIT.call(peer.rpc, commit, CALL_S))
                    peer.breaker.succeeded()
                    self._note(leaving, "committed", told_ns, peer=peer.address)
                    failpoints.reach("prefill.after_commit", leaving.request.id)
                case StopAction():
                    await self._stop(peer, leaving, action)
        except CorruptBlocksError as error:
            leaving.checksums = b""
            handoff.repeat(str(error))
        except (PeerError, ChannelError) as error:
            if handoff.phase is not HandoffPhase.STOPPING and not isinstance(
                error, PeerRefusedError | ReservationRefusedError
            ):
                peer.failed_call()
            handoff.failed(str(error))
        else:
            handoff.done()

    async def _push(self, peer: DecodePeer, leaving: OutgoingHandoff, push: PushAction) -> None:
        channel, card = leaving.channel, leaving.descriptor
        assert channel is not None
        assert leaving.handoff.reservation_id is not None
        if leaving.request.borrows_blocks:
            await channel.push(card, leaving.handoff.reservation_id, (), ())
            return
        source = leaving.request.blocks[push.first : push.last]
        if len(source) < push.last - push.first:
            raise ChannelError("the request's blocks are gone")  # aborted just now
        began_ns = now_ns()
        try:
            await channel.push(card, leaving.handoff.reservation_id, source, push.targets)
        except ReservationRefusedError:
            raise  # the channel is well
        except ChannelError:
            peer.drop_channel(channel, card)
            raise
        if source:
            self._pushed(peer, leaving, began_ns, len(source))
        leaving.checksums += await asyncio.to_thread(self._memory.checksums, source)
        if push.last < leaving.handoff.num_blocks:
            told = messages.PushedNotice(leaving.handoff.reservation_id, leaving.checksums)
            leaving.checksums = b""
            _check(await PUSHED.call(peer.rpc, told, CALL_S))
        self._node.handoff_counters.blocks_moved += len(source)
        self._node.handoff_counters.bytes_moved += len(source) * self._node.info.block_bytes

    def _pushed(self, peer: DecodePeer, leaving: OutgoingHandoff, began_ns: int, num_blocks: int) -> None:
        num_bytes = num_blocks * self._node.info.block_bytes
        channel = leaving.channel.name if leaving.channel is not None else ""
        self._note(leaving, "transfer", began_ns, count=num_blocks, bytes=num_bytes, peer=peer.address, channel=channel)
        self._push_fit.observe(num_bytes, (now_ns() - began_ns) / 1e9)
        self._node.handoff_counters.transfer = self._push_fit.seconds()

    def _note(self, leaving: OutgoingHandoff, kind: str, began_ns: int, **fields: object) -> None:
        """Records what took from `began_ns` until now."""
        at_ns = now_ns()
        duration_us = (at_ns - began_ns) // 1000
        self._node.recorder.event(leaving.request.id, kind, at_ns, duration_us=duration_us, **fields)

    async def _stop(self, peer: DecodePeer, leaving: OutgoingHandoff, stop: StopAction) -> None:
        ticket = leaving.handoff.reservation_id
        if ticket is None:
            return
        if leaving.request.borrows_blocks:
            await self._node.release(leaving.request)  # as long as it takes: until then, steps write into its blocks
        await self._peers.stop(peer, messages.StopRequest(ticket, stop.reason))

    def _end(self, leaving: OutgoingHandoff) -> None:
        node, request, handoff = self._node, leaving.request, leaving.handoff
        if handoff.committed and not leaving.is_silent:
            node.handoff_counters.handoffs += 1
            node.finish(request.id, "handed_off")
            node.engine.post(lambda scheduler: scheduler.abort(request))  # the blocks stay as prefix cache
        elif not leaving.is_silent:
            node.handoff_counters.handoffs_failed += 1
            log.warning("handoff of %s failed: %s", request.id, handoff.reason)
            node.fail(request.id, f"handoff: {handoff.reason}", retry=True)


def _cancel(leaving: OutgoingHandoff, reason: str) -> None:
    leaving.handoff.cancel(reason)
    leaving.changed.set()


def _check(answer: messages.Ack) -> None:
    if answer.error:
        raise (CorruptBlocksError if answer.again else PeerRefusedError)(answer.error)
