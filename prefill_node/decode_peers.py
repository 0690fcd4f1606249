"""The decode nodes to which a prefill node sends KV, called peers here.

A peer has a connection, a KV channel and reservations. A timer, which does not wait for the model's steps, renews the
leases of all reservations at a peer with one message. If a peer does not answer a renewal in time, this node closes the
connection, and every handoff that waits for the peer fails. After repeated failures of a peer, this node makes no
reservations there for a second.

The reply to a renewal lists the reservations whose blocks the peer keeps in quarantine, because this node may still
write to them. This node sends a stop for each of them, even if it has sent one before. It also sends renewals to an
idle peer, until that peer reports that it holds no reservations.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.kv.channel import RESERVATION_ID_BYTES, ChannelError, KVChannel
from shared.lifecycle import TaskGroup
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import NodeStats, RenewRequest, StopRequest
from shared.rpc.methods import RENEW, STOP, PeerError

log = logging.getLogger("baton.handoff")
# Maximum number of calls to a peer that wait for blocks. A connection allows 100 calls, so 36 are left for others.
MAX_RESERVING = 64
STOP_TRIES = 30  # after this many tries (one minute), a stop is sent only if a renewal's reply lists the reservation
MAX_STOPS = 64  # maximum number of stops for reservations in quarantine that are sent after one renewal
FAILURES, WITHIN_S = 5, 10.0  # this many failures within WITHIN_S seconds pause reservations at a peer
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class HandoffTiming:
    """Intervals and timeouts, in seconds, for calls to decode nodes."""

    renew_s: float = 0.5
    call_s: float = 2.5  # timeout of calls that do not wait for blocks; a lost peer is noticed within call_s + renew_s
    retry_stop_s: float = 2.0
    forget_s: float = 60.0  # how long an idle, disconnected peer is kept; a restarted peer may have another address


class PeerRefusedError(PeerError):
    """The peer is reachable and rejected the call."""


class CorruptBlocksError(PeerRefusedError):
    """The last rows arrived damaged, and the peer allows this node to push them once more."""


@dataclass(slots=True)
class DecodePeer:
    """The state that this prefill node keeps for one decode node."""

    address: str
    rpc: RpcChannel
    reserving: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_RESERVING))
    channel: KVChannel | None = None  # the channel that was chosen last, for these `descriptors`
    descriptors: dict[str, bytes] = field(default_factory=dict)
    # For each channel name, the descriptor with which a push over the channel last failed.
    failed: dict[str, bytes] = field(default_factory=dict)
    # Reservations whose leases are renewed, each with a function that cancels its handoff.
    reservations: dict[bytes, Callable[[str], None]] = field(default_factory=dict)
    void: set[bytes] = field(default_factory=set)  # reservations that this node stopped before their grant arrived
    is_settled: bool = False  # the peer reported that it holds no reservations, and no handoff has begun since then
    # When the latest failures occurred. A successful commit clears the list.
    failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=FAILURES))
    num_waiting: int = 0  # number of handoffs that wait for blocks
    used_at: float = field(default_factory=time.monotonic)  # time at which a handoff or a stop last began

    @property
    def is_idle(self) -> bool:
        return not self.reservations and not self.num_waiting

    def check_breaker(self) -> None:
        """Raise PeerRefusedError after FAILURES failures in WITHIN_S seconds, if the last was less than PAUSE_S ago."""
        failed_at = self.failed_at
        is_often = len(failed_at) == FAILURES and failed_at[-1] - failed_at[0] < WITHIN_S
        if is_often and time.monotonic() < failed_at[-1] + PAUSE_S:
            raise PeerRefusedError(f"{self.address} failed repeatedly; the next call is made in up to {PAUSE_S:g} s")

    def call_failed(self) -> None:
        """Record a failed push or an unanswered call, for `check_breaker`."""
        self.failed_at.append(time.monotonic())

    def drop_channel(self, channel: KVChannel, descriptor: bytes) -> None:
        """Record that a push over this channel failed, so that the next handoff chooses a channel again."""
        self.failed[channel.name] = descriptor
        if self.channel is channel:
            self.channel = None


class DecodePeers:
    """The decode nodes in use, keyed by address. `channels` lists this node's channels, best first.

    The `HandoffSender` owns this object, and uses it only on the event loop. The object renews leases, retries stops,
    and forgets peers that are gone.
    """

    def __init__(
        self, incarnation_id: str, counters: NodeStats, channels: Sequence[KVChannel], timing: HandoffTiming
    ) -> None:
        self._incarnation_id = incarnation_id
        self._counters = counters
        self._channels = channels
        self._timing = timing
        self._peers: dict[str, DecodePeer] = {}
        self._tasks = TaskGroup()

    def start(self) -> None:
        self._tasks.start(self._renew())

    async def close(self) -> None:
        await self._tasks.close()
        for peer in self._peers.values():
            peer.rpc.close()

    @property
    def is_idle(self) -> bool:
        return all(peer.is_idle for peer in self._peers.values())

    def at(self, address: str) -> DecodePeer:
        """Return the peer at `address`, and create the peer if it is not known. Raises ValueError if `address` is not
        host:port."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = DecodePeer(address, RpcChannel(address))
        peer.used_at = time.monotonic()
        peer.is_settled = False
        return peer

    def choose_channel(self, peer: DecodePeer, descriptors: Mapping[str, bytes]) -> KVChannel:
        """Return the best channel that works between the two nodes. Log and count a fallback to a slower channel.
        Raises ChannelError if no channel works."""
        if peer.channel is not None and peer.descriptors == descriptors:
            return peer.channel
        peer.descriptors = dict(descriptors)
        common = [channel for channel in self._channels if channel.name in descriptors]
        for index, channel in enumerate(common):
            descriptor = descriptors[channel.name]
            is_last = index == len(common) - 1
            if channel.reachable(descriptor) and (is_last or peer.failed.get(channel.name) != descriptor):
                if index:
                    log.warning("handoffs to %s use %s: no faster channel works", peer.address, channel.name)
                    self._counters.channel_fallbacks += 1
                peer.channel = channel
                self._counters.channels[peer.address] = channel.name
                return channel
        ours = [channel.name for channel in self._channels]
        raise ChannelError(f"no KV channel to {peer.address} works: it has {sorted(descriptors)}, this node has {ours}")

    async def stop(self, peer: DecodePeer, stop: StopRequest) -> None:
        """Report to the peer that this node writes nothing more under a reservation. If the peer does not acknowledge
        this, retry in the background.

        The peer keeps the blocks in quarantine until it receives this message or this node has ended.
        """
        if not await self._acknowledged(peer, stop):
            self.retry_stop(peer, stop)

    def retry_stop(self, peer: DecodePeer, stop: StopRequest) -> None:
        """Report in the background that this node writes nothing more under a reservation, or for a request."""
        self._tasks.start(self._retry_stop(peer, stop))

    async def _retry_stop(self, peer: DecodePeer, stop: StopRequest) -> None:
        for _ in range(STOP_TRIES):
            if await self._acknowledged(peer, stop):
                return
            await asyncio.sleep(self._timing.retry_stop_s)
        text = "%s did not acknowledge that a handoff stopped: it may keep the handoff's blocks in quarantine"
        log.warning(text, peer.address)

    async def _acknowledged(self, peer: DecodePeer, stop: StopRequest) -> bool:
        peer.used_at = time.monotonic()
        try:
            await STOP.call(peer.rpc, stop, self._timing.call_s)
        except PeerError as error:
            log.debug("%s did not acknowledge a stopped handoff: %s", peer.address, error)
            return False
        return True

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._timing.renew_s)
            self._forget_gone()
            due = [peer for peer in self._peers.values() if not (peer.is_idle and peer.is_settled)]
            outcomes = await asyncio.gather(*map(self._renew_at, due), return_exceptions=True)
            for peer, error in zip(due, outcomes, strict=True):
                if error is not None:
                    log.error("leases at %s were not renewed", peer.address, exc_info=error)

    async def _renew_at(self, peer: DecodePeer) -> None:
        is_idle = peer.is_settled = peer.is_idle  # `at` clears `is_settled` if a handoff begins during the call below
        if not peer.num_waiting:
            peer.void.clear()  # no call is in progress, so no grant of these reservations can still arrive
        renewal = RenewRequest(self._incarnation_id, b"".join(peer.reservations))
        try:
            reply = await RENEW.call(peer.rpc, renewal, self._timing.call_s)
        except PeerError as error:
            peer.is_settled = False
            level = logging.DEBUG if is_idle else logging.WARNING
            log.log(level, "leases at %s were not renewed: %s", peer.address, error)
            peer.rpc.close()  # this fails the handoffs that wait for the peer's blocks; the next call reconnects
            return
        if reply.has_reservations:
            peer.is_settled = False
        self._stop_quarantined(peer, reply.quarantined)

    def _stop_quarantined(self, peer: DecodePeer, reservation_ids: bytes) -> None:
        """Stop the reservations whose blocks the peer keeps in quarantine.

        If a handoff uses a reservation, cancel the handoff, which sends the stop when its push has ended. Otherwise,
        nothing is being written under the reservation, so send the stop now. If the grant of the reservation arrives
        later, its handoff fails.
        """
        for at in range(0, min(len(reservation_ids), MAX_STOPS * RESERVATION_ID_BYTES), RESERVATION_ID_BYTES):
            reservation_id = reservation_ids[at : at + RESERVATION_ID_BYTES]
            if (cancel := peer.reservations.get(reservation_id)) is not None:
                cancel("the decode node gave up the reservation")
            else:
                peer.void.add(reservation_id)
                self._tasks.start(self._acknowledged(peer, StopRequest(reservation_id, "it is in quarantine")))

    def _forget_gone(self) -> None:
        expired = time.monotonic() - self._timing.forget_s
        for peer in list(self._peers.values()):
            if peer.is_idle and not peer.rpc.is_connected and peer.used_at < expired:
                self._peers.pop(peer.address).rpc.close()
                self._counters.channels.pop(peer.address, None)
