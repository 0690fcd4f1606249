"""The decode nodes that a prefill node hands off to: connection, channel and tickets of each.

Leases of all tickets with one peer are renewed in one message, by a timer that does not wait for the forward pass. A
peer that does not answer a renewal in time is given up with all that waits for it; one that fails again and again is
left alone for a while (`prefill_node.circuit_breaker`).
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from node.node import Node
from prefill_node.circuit_breaker import CircuitBreaker
from shared.kv.channel import ChannelError, KVChannel
from shared.lifecycle import TaskGroup
from shared.rpc import messages
from shared.rpc.connection import RpcChannel
from shared.rpc.methods import RENEW, STOP, PeerError, connect

log = logging.getLogger("baton.handoff")
RENEW_S = 0.5
CALL_S = 2.5  # for what is answered at once: with a renewal before it, a peer cut off is found in 3 s
INSIST_S = 2.0
GONE_S = 60.0  # with nothing to ask, until a decode node that hung up is forgotten: its next life has another address
# Long calls waiting for room share their connection with commits; HTTP/2 allows 100 calls on it.
MAX_ASKING = 64
STOP_TRIES = 30  # spread over a minute: a decode node that hears of no stop then is gone, or as good as


class PeerRefusedError(PeerError):
    """The peer lives, and answered that it does not do so."""


class CorruptBlocksError(PeerRefusedError):
    """It found the last rows damaged, and takes them once more."""


@dataclass(slots=True)
class DecodePeer:
    """A decode node as seen from here."""

    address: str
    rpc: RpcChannel
    asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING))
    channel: KVChannel | None = None  # the last one chosen, and the cards that it was chosen from
    descriptors: dict[str, bytes] = field(default_factory=dict)
    failed: dict[str, bytes] = field(default_factory=dict)  # the card with which a channel last failed
    reservations: dict[bytes, None] = field(default_factory=dict)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    num_waiting: int = 0  # handoffs that have asked for room
    asked_at: float = field(default_factory=time.monotonic)  # when a handoff began last, or a stop was to be said

    @property
    def is_idle(self) -> bool:
        return not self.reservations and not self.num_waiting

    def is_gone(self, now: float) -> bool:
        return self.is_idle and not self.rpc.is_connected and now - self.asked_at > GONE_S

    def check_breaker(self) -> None:
        """Raises RefusedError while the peer is left alone."""
        if not self.breaker.is_allowed(time.monotonic()):
            raise PeerRefusedError(f"{self.address} failed again and again, and is left alone for a moment")

    def failed_call(self) -> None:
        """It did not answer, or took no rows."""
        self.breaker.failed(time.monotonic())

    def drop_channel(self, channel: KVChannel, card: bytes) -> None:
        """A push over it failed: the next handoff chooses anew."""
        self.failed[channel.name] = card
        if self.channel is channel:
            self.channel = None


class DecodePeers:
    """All of them, by address. `channels`: best first."""

    def __init__(self, node: Node, channels: Sequence[KVChannel]) -> None:
        self._node = node
        self._channels = channels
        self._peers: dict[str, DecodePeer] = {}
        self._tasks = TaskGroup()

    def start(self) -> None:
        self._tasks.start(self._renew())

    async def close(self) -> None:
        await self._tasks.close()
        for peer in self._peers.values():
            peer.rpc.close()

    def at(self, address: str) -> DecodePeer:
        """Raises ValueError where that is no address."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = DecodePeer(address, connect(address))
        peer.asked_at = time.monotonic()
        return peer

    def _forget_gone(self) -> None:
        now = time.monotonic()
        for address in [peer.address for peer in self._peers.values() if peer.is_gone(now)]:
            self._peers.pop(address).rpc.close()
            self._node.handoff_counters.channels.pop(address, None)

    def choose_channel(self, peer: DecodePeer, cards: Mapping[str, bytes]) -> KVChannel:
        """The first that both sides can do. Falling to a later one is logged and counted. Raises ChannelError."""
        if peer.channel is not None and peer.descriptors == cards:
            return peer.channel
        peer.descriptors = dict(cards)
        common = [channel for channel in self._channels if channel.name in cards]
        for place, channel in enumerate(common):
            card = cards[channel.name]
            is_last = place == len(common) - 1
            if channel.reachable(card) and (is_last or peer.failed.get(channel.name) != card):
                if place:
                    log.warning("handoffs to %s go over %s, not over a faster channel", peer.address, channel.name)
                    self._node.handoff_counters.channel_fallbacks += 1
                peer.channel = channel
                self._node.handoff_counters.channels[peer.address] = channel.name
                return channel
        raise ChannelError(f"no common KV channel with {peer.address}: it offers {sorted(cards)}")

    async def stop(self, peer: DecodePeer, stop: messages.StopRequest) -> None:
        """Says that nothing more is written under a ticket. Not heard at once, it is said again, beside whatever goes
        on: from a writer that it takes for alive, a decode node believes nobody else, and keeps the blocks for it."""
        if not await self._acknowledged(peer, stop):
            self._tasks.start(self._retry_stop(peer, stop))

    def cancel_reservation(self, peer: DecodePeer, request: str, reason: str) -> None:
        """The answer to a question for room is lost. Whatever it granted, nothing is written there."""
        self._tasks.start(self._retry_stop(peer, messages.StopRequest(b"", reason, request)))

    async def _retry_stop(self, peer: DecodePeer, stop: messages.StopRequest) -> None:
        for _ in range(STOP_TRIES):
            if await self._acknowledged(peer, stop):
                return
            await asyncio.sleep(INSIST_S)
        log.warning("%s never heard that a handoff stopped: it keeps its blocks while we live", peer.address)

    async def _acknowledged(self, peer: DecodePeer, stop: messages.StopRequest) -> bool:
        peer.asked_at = time.monotonic()
        try:
            await STOP.call(peer.rpc, stop, CALL_S)
        except PeerError as error:
            log.debug("%s did not hear that a handoff stopped: %s", peer.address, error)
            return False
        return True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._forget_gone()
            await asyncio.gather(*(self._renew_at(peer) for peer in self._peers.values() if not peer.is_idle))

    async def _renew_at(self, peer: DecodePeer) -> None:
        try:
            await RENEW.call(
                peer.rpc, messages.RenewRequest(self._node.info.incarnation_id, b"".join(peer.reservations)), CALL_S
            )
        except PeerError as error:
            log.warning("leases at %s were not renewed: %s", peer.address, error)
            peer.rpc.close()  # who waits for room there goes elsewhere; the next call connects anew
