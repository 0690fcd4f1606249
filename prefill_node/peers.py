"""The decode nodes that a prefill node hands off to: connection, channel and tickets of each.

Leases of all tickets with one peer are renewed in one message, by a timer that does not wait for the forward pass. A
peer that does not answer a renewal in time is given up with all that waits for it; one that fails again and again is
left alone for a while (`prefill_node.breaker`).
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.node import Node
from prefill_node.breaker import Breaker
from shared import messages
from shared.grpc_connection import GuardedChannel
from shared.kv.channel import ChannelError, KVChannel
from shared.serve import Tasks
from shared.services import RENEW, STOP, PeerError, connect

log = logging.getLogger("baton.handoff")
RENEW_S = 0.5
CALL_S = 2.5  # for what is answered at once: with a renewal before it, a peer cut off is found in 3 s
INSIST_S = 2.0
GONE_S = 60.0  # with nothing to ask, until a decode node that hung up is forgotten: its next life has another address
# Long calls waiting for room share their connection with commits; HTTP/2 allows 100 calls on it.
MAX_ASKING = 64
STOP_TRIES = 30  # spread over a minute: a decode node that hears of no stop then is gone, or as good as


class RefusedError(PeerError):
    """The peer lives, and answered that it does not do so."""


class CorruptError(RefusedError):
    """It found the last rows damaged, and takes them once more."""


@dataclass(slots=True)
class Peer:
    """A decode node as seen from here."""

    address: str
    rpc: GuardedChannel
    asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING))
    channel: KVChannel | None = None  # the last one chosen, and the cards that it was chosen from
    cards: dict[str, bytes] = field(default_factory=dict)
    failed: dict[str, bytes] = field(default_factory=dict)  # the card with which a channel last failed
    tickets: dict[bytes, None] = field(default_factory=dict)
    breaker: Breaker = field(default_factory=Breaker)
    num_waiting: int = 0  # handoffs that have asked for room
    asked_at: float = field(default_factory=time.monotonic)  # when a handoff began last, or a stop was to be said

    @property
    def is_idle(self) -> bool:
        return not self.tickets and not self.num_waiting

    def is_gone(self, now: float) -> bool:
        return self.is_idle and not self.rpc.is_connected and now - self.asked_at > GONE_S

    def check_breaker(self) -> None:
        """Raises RefusedError while the peer is left alone."""
        if not self.breaker.allows(time.monotonic()):
            raise RefusedError(f"{self.address} failed again and again, and is left alone for a moment")

    def broke(self) -> None:
        """It did not answer, or took no rows."""
        self.breaker.failed(time.monotonic())

    def gave_up_on(self, channel: KVChannel, card: bytes) -> None:
        """A push over it failed: the next handoff chooses anew."""
        self.failed[channel.name] = card
        if self.channel is channel:
            self.channel = None


class Peers:
    """All of them, by address. `channels`: best first."""

    def __init__(self, node: Node, channels: Sequence[KVChannel]) -> None:
        self._node = node
        self._channels = channels
        self._peers: dict[str, Peer] = {}
        self._tasks = Tasks()

    def start(self) -> None:
        self._tasks.start(self._renew())

    async def close(self) -> None:
        await self._tasks.close()
        for peer in self._peers.values():
            peer.rpc.close()

    def at(self, address: str) -> Peer:
        """Raises ValueError where that is no address."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, connect(address))
        peer.asked_at = time.monotonic()
        return peer

    def _forget_gone(self) -> None:
        now = time.monotonic()
        for address in [peer.address for peer in self._peers.values() if peer.is_gone(now)]:
            self._peers.pop(address).rpc.close()
            self._node.ticker.channels.pop(address, None)

    def choose_channel(self, peer: Peer, cards: Mapping[str, bytes]) -> KVChannel:
        """The first that both sides can do. Falling to a later one is logged and counted. Raises ChannelError."""
        if peer.channel is not None and peer.cards == cards:
            return peer.channel
        peer.cards = dict(cards)
        common = [channel for channel in self._channels if channel.name in cards]
        for place, channel in enumerate(common):
            card = cards[channel.name]
            is_last = place == len(common) - 1
            if channel.reachable(card) and (is_last or peer.failed.get(channel.name) != card):
                if place:
                    log.warning("handoffs to %s go over %s, not over a faster channel", peer.address, channel.name)
                    self._node.ticker.channel_fallbacks += 1
                peer.channel = channel
                self._node.ticker.channels[peer.address] = channel.name
                return channel
        raise ChannelError(f"no common KV channel with {peer.address}: it offers {sorted(cards)}")

    async def stop(self, peer: Peer, stop: messages.Stop) -> None:
        """Says that nothing more is written under a ticket. Not heard at once, it is said again, beside whatever goes
        on: from a writer that it takes for alive, a decode node believes nobody else, and keeps the blocks for it."""
        if not await self._heard(peer, stop):
            self._tasks.start(self._insist(peer, stop))

    def forgo(self, peer: Peer, request: str, reason: str) -> None:
        """The answer to a question for room is lost. Whatever it granted, nothing is written there."""
        self._tasks.start(self._insist(peer, messages.Stop(b"", reason, request)))

    async def _insist(self, peer: Peer, stop: messages.Stop) -> None:
        for _ in range(STOP_TRIES):
            if await self._heard(peer, stop):
                return
            await asyncio.sleep(INSIST_S)
        log.warning("%s never heard that a handoff stopped: it keeps its blocks while we live", peer.address)

    async def _heard(self, peer: Peer, stop: messages.Stop) -> bool:
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

    async def _renew_at(self, peer: Peer) -> None:
        try:
            await RENEW.call(peer.rpc, messages.Renew(self._node.info.boot, b"".join(peer.tickets)), CALL_S)
        except PeerError as error:
            log.warning("leases at %s were not renewed: %s", peer.address, error)
            peer.rpc.close()  # who waits for room there goes elsewhere; the next call connects anew
