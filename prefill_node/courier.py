"""Carries handoffs out: asks decode nodes for room, pushes blocks over the best channel, commits, and says how it went.

One task a request that leaves. Rows that came damaged are pushed once more; whatever else goes wrong ends the handoff,
and the request goes on elsewhere.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.node import Node
from engine.teller import Progress
from prefill_node.handoff import Action, Commit, Handoff, Phase, Push, Stop
from prefill_node.peers import CALL_S, CorruptError, Peer, Peers, RefusedError
from prefill_node.push_fit import PushFit
from scheduler.request import Request
from shared import failpoints, messages
from shared.clock import now_ns
from shared.kv.channel import TICKET_BYTES, ChannelError, KVChannel, TicketRefusedError
from shared.kv.staging import KVMemory
from shared.logs import about
from shared.messages import Submit
from shared.serve import Tasks
from shared.services import COMMIT, PUSHED, RESERVE, PeerError, Rpc

log = logging.getLogger("baton.handoff")
# Of requests that are to be computed in the decode node's pool: how many may have their room before their turn.
MAX_GRANTED = 4


@dataclass(slots=True)
class Leaving:
    """One request on its way."""

    submit: Submit
    request: Request
    handoff: Handoff
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    channel: KVChannel | None = None  # with `card`, fixed for this handoff: they belong to the granted targets
    card: bytes = b""
    sums: bytes = b""  # of rows that are pushed, which the peer was not told yet
    carried: bool = False  # its task runs
    waits: bool = False  # computed in the decode node's pool, it has room there or asks for it, and no step had it yet
    silent: bool = False  # nobody is to be told how it ends: it was aborted, or ended here


class Courier:
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
        self._peers = Peers(node, channels)
        self._leaving: dict[str, Leaving] = {}
        self._tasks = Tasks()
        self._push_fit = PushFit()
        self._granted = asyncio.Semaphore(MAX_GRANTED)
        node.on_leaving = self.begin
        node.on_admitted = self.admitted
        node.on_progress = self.progress
        node.on_abort = self.abort

    def handlers(self) -> Mapping[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]:
        return {}  # nobody asks a prefill node for anything but prompts

    def writer_lost(self, writer: str) -> None:
        """Nobody writes into a prefill node's pool."""

    def start(self) -> None:
        self._peers.start()

    async def close(self) -> None:
        await self._tasks.close()
        await self._peers.close()

    # ---- what the node tells ------------------------------------------------------------------------------------

    def begin(self, submit: Submit, request: Request) -> None:
        # Not of request.tokens: the engine has the request already, and may have appended to them.
        handoff = Handoff(len(messages.unpack_ids(submit.tokens)), self._node.info.block_tokens)
        leaving = self._leaving[request.id] = Leaving(submit, request, handoff)
        if request.is_guest:
            self._start(leaving)  # it needs room before it can be computed

    def admitted(self, identity: str) -> None:
        """Its first chunk is being computed: time to ask for room, not earlier."""
        leaving = self._leaving.get(identity)
        if leaving is not None:
            self._take_turn(leaving)
            if not leaving.carried:
                self._start(leaving)

    def _start(self, leaving: Leaving) -> None:
        leaving.carried = True
        self._tasks.start(self._carry(leaving))

    def _take_turn(self, leaving: Leaving) -> None:
        if leaving.waits:
            leaving.waits = False
            self._granted.release()

    def progress(self, row: Progress) -> None:
        leaving = self._leaving.get(row.request.id)
        if leaving is None:
            return
        leaving.handoff.computed(row.num_computed)
        if row.finish is not None:  # over at its first token: nothing is left to generate elsewhere
            leaving.silent = True
            leaving.handoff.give_up(f"finished: {row.finish}")
        elif row.first_token is not None:
            leaving.handoff.sampled(row.first_token)
        leaving.changed.set()

    def abort(self, identity: str) -> bool:
        leaving = self._leaving.get(identity)
        if leaving is not None:
            leaving.silent = True
            leaving.handoff.give_up("aborted")
            leaving.changed.set()
            if not leaving.carried:
                del self._leaving[identity]
        return False  # the scheduler may have the blocks back now: what a push reads meanwhile is never committed

    # ---- one handoff --------------------------------------------------------------------------------------------

    async def _carry(self, leaving: Leaving) -> None:
        handoff, identity = leaving.handoff, leaving.request.id
        about(identity, leaving.submit.traceparent)
        peer = None
        try:
            peer = self._peers.at(leaving.submit.decode_node)
            if leaving.request.is_guest:
                leaving.waits = await self._granted.acquire()
            if handoff.phase is Phase.ASKING:  # else it was aborted meanwhile
                await self._ask(peer, leaving)
            while handoff.phase is not Phase.DONE:
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
                await self._stop(peer, leaving, Stop(handoff.reason))
        finally:
            self._take_turn(leaving)
            del self._leaving[identity]
            if peer is not None and handoff.ticket is not None:
                peer.tickets.pop(handoff.ticket, None)
            self._end(leaving)

    async def _ask(self, peer: Peer, leaving: Leaving) -> None:
        info, handoff = self._node.info, leaving.handoff
        peer.num_waiting += 1
        try:
            peer.check_breaker()
            async with peer.asking:
                question = messages.Reserve(leaving.submit, info.boot, info.fingerprint)
                asked_ns = now_ns()
                try:
                    reserved = await RESERVE.call(peer.rpc, question, self._reserve_timeout_s + CALL_S)
                except PeerError as error:
                    peer.broke()
                    self._peers.forgo(peer, leaving.request.id, str(error))
                    raise
                self._note(leaving, "reserving", asked_ns, peer=peer.address)
            if reserved.error:
                handoff.failed(f"{peer.address} refused: {reserved.error}")
                return
            held, targets = messages.unpack_ids(reserved.held), messages.unpack_ids(reserved.targets)
            handoff.granted(reserved.ticket, reserved.num_held, tuple(targets))
            peer.tickets[reserved.ticket] = None
            self._check_grant(leaving, reserved, held + targets)
            leaving.channel = self._peers.choose_channel(peer, reserved.cards)
            leaving.card = reserved.cards[leaving.channel.name]
            if leaving.request.is_guest and handoff.phase is Phase.MOVING:
                leaving.request.blocks = held + targets
                leaving.request.num_computed = reserved.num_held * info.block_tokens
                self._node.enter(leaving.request)
        except (PeerError, ChannelError, ValueError) as error:
            handoff.failed(str(error))
        finally:
            peer.num_waiting -= 1

    def _check_grant(self, leaving: Leaving, reserved: messages.Reserved, blocks: list[int]) -> None:
        """Raises ValueError. Where the prompt is computed in these blocks, no channel looks at them again."""
        if len(reserved.ticket) != TICKET_BYTES or len(set(blocks)) < len(blocks):
            raise ValueError("the grant names a block twice, or its ticket is none")
        is_whole = len(blocks) == leaving.handoff.num_blocks and 0 < min(blocks) <= max(blocks) < self._memory.num_rows
        if leaving.request.is_guest and not is_whole:
            raise ValueError(f"the grant's {len(blocks)} blocks are not {leaving.handoff.num_blocks} of the pool")

    async def _do(self, peer: Peer, leaving: Leaving, action: Action) -> None:
        handoff = leaving.handoff
        try:
            match action:
                case Push():
                    failpoints.reach("prefill.before_push", leaving.request.id)
                    await self._push(peer, leaving, action)
                    failpoints.reach("prefill.after_push", leaving.request.id)
                case Commit():
                    failpoints.reach("prefill.before_commit", leaving.request.id)
                    assert handoff.ticket is not None
                    commit = messages.Commit(handoff.ticket, action.first_token, leaving.sums)
                    told_ns = now_ns()
                    _check(await COMMIT.call(peer.rpc, commit, CALL_S))
                    peer.breaker.worked()
                    self._note(leaving, "committed", told_ns, peer=peer.address)
                    failpoints.reach("prefill.after_commit", leaving.request.id)
                case Stop():
                    await self._stop(peer, leaving, action)
        except CorruptError as error:
            leaving.sums = b""
            handoff.repeat(str(error))
        except (PeerError, ChannelError) as error:
            if handoff.phase is not Phase.STOPPING and not isinstance(error, RefusedError | TicketRefusedError):
                peer.broke()
            handoff.failed(str(error))
        else:
            handoff.done()

    async def _push(self, peer: Peer, leaving: Leaving, push: Push) -> None:
        channel, card = leaving.channel, leaving.card
        assert channel is not None
        assert leaving.handoff.ticket is not None
        if leaving.request.is_guest:
            await channel.push(card, leaving.handoff.ticket, (), ())
            return
        source = leaving.request.blocks[push.first : push.last]
        if len(source) < push.last - push.first:
            raise ChannelError("the request's blocks are gone")  # aborted just now
        began_ns = now_ns()
        try:
            await channel.push(card, leaving.handoff.ticket, source, push.targets)
        except TicketRefusedError:
            raise  # the channel is well
        except ChannelError:
            peer.gave_up_on(channel, card)
            raise
        if source:
            self._pushed(peer, leaving, began_ns, len(source))
        leaving.sums += await asyncio.to_thread(self._memory.checksums, source)
        if push.last < leaving.handoff.num_blocks:
            told = messages.Pushed(leaving.handoff.ticket, leaving.sums)
            leaving.sums = b""
            _check(await PUSHED.call(peer.rpc, told, CALL_S))
        self._node.ticker.blocks_moved += len(source)
        self._node.ticker.bytes_moved += len(source) * self._node.info.block_bytes

    def _pushed(self, peer: Peer, leaving: Leaving, began_ns: int, num_blocks: int) -> None:
        num_bytes = num_blocks * self._node.info.block_bytes
        channel = leaving.channel.name if leaving.channel is not None else ""
        self._note(leaving, "transfer", began_ns, count=num_blocks, bytes=num_bytes, peer=peer.address, channel=channel)
        self._push_fit.observe(num_bytes, (now_ns() - began_ns) / 1e9)
        self._node.ticker.transfer = self._push_fit.seconds()

    def _note(self, leaving: Leaving, kind: str, began_ns: int, **fields: object) -> None:
        """Records what took from `began_ns` until now."""
        at_ns = now_ns()
        duration_us = (at_ns - began_ns) // 1000
        self._node.recorder.event(leaving.request.id, kind, at_ns, duration_us=duration_us, **fields)

    async def _stop(self, peer: Peer, leaving: Leaving, stop: Stop) -> None:
        ticket = leaving.handoff.ticket
        if ticket is None:
            return
        if leaving.request.is_guest:
            await self._node.returned(leaving.request)  # as long as it takes: until then, steps write into its blocks
        await self._peers.stop(peer, messages.Stop(ticket, stop.reason))

    def _end(self, leaving: Leaving) -> None:
        node, request, handoff = self._node, leaving.request, leaving.handoff
        if handoff.committed and not leaving.silent:
            node.ticker.handoffs += 1
            node.forget(request.id, "handed_off")
            node.engine.post(lambda scheduler: scheduler.abort(request))  # the blocks stay as prefix cache
        elif not leaving.silent:
            node.ticker.handoffs_failed += 1
            log.warning("handoff of %s failed: %s", request.id, handoff.reason)
            node.give_up(request.id, f"handoff: {handoff.reason}", retry=True)


def _check(answer: messages.Answer) -> None:
    if answer.error:
        raise (CorruptError if answer.again else RefusedError)(answer.error)
