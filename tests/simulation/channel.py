"""Simulated KV channels with faults. They are of two kinds, as in `shared.kv.channel`.

In a fenced channel (like tcp), the process of the receiver checks the reservation of each row. Rows may arrive late,
after a partition or a freeze.

In a one-sided channel (like shm), the process of the writer writes into the memory of the receiver while the connection
is open. Reservations are not checked, so a frozen writer that resumes continues to write where it stopped.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray

from shared.kv.channel import ChannelError, PeerDescriptor, PeerLostError, ReservationRefusedError, check_open
from shared.kv.memory import Staging, checksums
from tests.simulation.loop import CURRENT, Process
from tests.simulation.network import WORLD_CONTEXT, Network

TIMEOUT_S = 2.0
FAULTS = ("stall", "drop", "flip", "swap", "duplicate", "refuse")


class SimMemory:
    """An implementation of KVMemory. Its rows start with a fill pattern: tokens computed from an unwritten row are
    wrong."""

    sums = "xxh3"

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self.rows: NDArray[np.uint8] = np.full((num_rows, row_bytes), 0xA5, np.uint8)

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        raise NotImplementedError("simulated channels copy rows themselves")


@dataclass(slots=True)
class Exchange:
    """All channels of a simulation. An exchange draws at most one fault per push, and at most `num_faults` faults in
    total."""

    network: Network
    random: Random
    num_faults: int
    row_s: float
    reached: Callable[[str], None]
    violate: Callable[[str], None]
    channels: dict[tuple[str, str], "SimChannel"] = field(default_factory=dict)  # by name and incarnation_id

    def draw_fault(self) -> str:
        if self.num_faults and self.random.random() < 0.3:
            self.num_faults -= 1
            return FAULTS[int(self.random.random() * len(FAULTS))]
        return ""

    def died(self, process: Process, *, silent: bool) -> None:
        """End a process's connections. If its host vanished (`silent`), only peers of one-sided channels notice."""
        for channel in list(self.channels.values()):
            if channel.process is process:
                channel.leave(silent and channel.fenced)


class Line:
    """A writer's connection to one receiver."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.is_open = False


class SimChannel:
    """An implementation of KVChannel."""

    def __init__(
        self,
        exchange: Exchange,
        name: str,
        memory: SimMemory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        is_promised: Callable[[int], bool],
    ) -> None:
        """`is_promised` returns whether a block is reserved for a writer or in quarantine."""
        self.name = name
        self.fenced = name == "tcp"
        self.process = CURRENT.get()
        self.barred: dict[str, None] = {}
        self._exchange = exchange
        self._memory = memory
        self._incarnation_id = incarnation_id
        self._on_writer_lost = on_writer_lost
        self._is_promised = is_promised
        self._writers: Counter[str] = Counter()
        self._granted: dict[bytes, frozenset[int]] = {}
        self._lines: dict[str, Line] = {}
        self._descriptor = PeerDescriptor(
            name, "host", self.process.name, incarnation_id, memory.row_bytes, memory.num_rows
        )
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        exchange.channels[name, incarnation_id] = self

    # ---- receiver ------------------------------------------------------------------------------------------------

    def descriptor(self) -> bytes:
        return self._descriptor.pack()

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        check_open(reservation_id, rows, self._memory.num_rows)
        if reservation_id in self._granted:
            raise ValueError("the reservation is already granted")
        self._granted[reservation_id] = frozenset(rows)

    def revoke(self, reservation_id: bytes) -> None:
        self._granted.pop(reservation_id, None)

    def fence_writer(self, incarnation_id: str) -> bool:
        if self._writers[incarnation_id]:
            self._exchange.reached("channel: a writer that seems dead is connected")
            return False
        self.barred[incarnation_id] = None
        return True

    def admit(self, incarnation_id: str, wanted: str) -> None:
        """Accept a writer's connection. Raises PeerLostError if this process has restarted or has fenced the writer."""
        if self._is_closed or wanted != self._incarnation_id:
            raise PeerLostError("it was restarted")
        if incarnation_id in self.barred:
            self._exchange.reached("channel: a fenced writer is refused")
            raise PeerLostError("it considered us dead and reassigned our rows")
        self._writers[incarnation_id] += 1

    def part(self, incarnation_id: str) -> None:
        """Handle the end of a writer's connection. This process notices it after the network latency."""
        if self._is_closed:
            return
        context = WORLD_CONTEXT.copy()
        context.run(CURRENT.set, self.process)
        self._loop.call_later(self._exchange.network.latency(), self._parted, incarnation_id, context=context)

    def _parted(self, incarnation_id: str) -> None:
        self._writers[incarnation_id] -= 1
        if not self._writers[incarnation_id]:
            self._on_writer_lost(incarnation_id)

    def land(self, reservation_id: bytes, row: int, data: NDArray[np.uint8]) -> bool:
        """Write one row if the reservation includes it. Return whether the row was written."""
        if row not in self._granted.get(reservation_id, frozenset()):
            self._exchange.reached("channel: a row without a reservation is dropped")
            return False
        self.fill(row, data)
        return True

    def fill(self, row: int, data: NDArray[np.uint8]) -> None:
        """Write a row. A write outside reserved blocks is a violation: it could corrupt the KV of another request."""
        if not self._is_promised(row):
            self._exchange.violate(f"{self.process}: a writer filled block {row}, which is not reserved")
        self._memory.rows[row] = data

    # ---- writer --------------------------------------------------------------------------------------------------

    def reachable(self, descriptor: bytes) -> bool:
        peer = PeerDescriptor.unpack(descriptor, self.name)
        peer.check_row_bytes(self._memory.row_bytes)
        return self.fenced or (self.name, peer.incarnation_id) in self._exchange.channels

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        if self._is_closed:
            raise ChannelError("the channel is closed")
        peer = PeerDescriptor.unpack(descriptor, self.name)
        if len(source) != len(target) or not all(0 <= row < peer.num_rows for row in target):
            raise ChannelError("the rows do not match or are outside the peer's pool")
        line = self._lines.setdefault(peer.incarnation_id, Line())
        async with line.lock:
            try:
                await self._move(line, peer, reservation_id, source, target)
            except PeerLostError:
                self._hang_up(peer.incarnation_id)
                raise

    async def _move(
        self, line: Line, to: PeerDescriptor, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        exchange, random = self._exchange, self._exchange.random
        fault = exchange.draw_fault() if source else ""
        breaks_at = int(random.random() * (len(source) + 1)) if fault in {"stall", "drop"} else -1
        if fault:
            exchange.reached(f"channel: {fault}")
        await asyncio.sleep(exchange.network.latency())
        peer = exchange.channels.get((self.name, to.incarnation_id))
        if peer is None:
            raise PeerLostError("connection refused")
        if not line.is_open:
            await self._wait_for_peer(peer)
            peer.admit(self._incarnation_id, to.incarnation_id)
            line.is_open = True
        refused = fault == "refuse"
        order = list(range(len(source)))
        if fault == "swap" and len(order) > 1:
            order[0], order[-1] = order[-1], order[0]
        for place, row in enumerate(target):
            await asyncio.sleep(exchange.row_s * random.random())
            data = self._memory.rows[source[order[place]]].copy()
            if place == breaks_at:
                if fault == "stall":
                    await asyncio.sleep(TIMEOUT_S)
                    self._late(peer, reservation_id, row, data)
                raise PeerLostError("the connection was reset")
            if fault == "flip" and not place:
                data[int(random.random() * len(data))] ^= 1 << int(random.random() * 8)
            refused |= not await self._write(line, peer, reservation_id, row, data)
            if fault == "duplicate" and self.fenced:
                delay_s = random.random() * 4.0
                self._loop.call_later(delay_s, peer.land_late, reservation_id, row, data, context=WORLD_CONTEXT)
        if refused:
            raise ReservationRefusedError("the peer refused rows: they are not reserved")

    async def _write(
        self, line: Line, peer: "SimChannel", reservation_id: bytes, row: int, data: NDArray[np.uint8]
    ) -> bool:
        """Write one row to the peer. Return False if the receiver refused the row."""
        if not line.is_open or peer._is_closed or not self.process.alive:
            raise PeerLostError("the connection has ended")
        if not self.fenced:
            peer.fill(row, data)
            return True
        try:
            await self._wait_for_peer(peer)
        except PeerLostError:
            self._late(peer, reservation_id, row, data)
            raise
        return peer.land(reservation_id, row, data)

    async def _wait_for_peer(self, peer: "SimChannel") -> None:
        """Wait until the peer can receive. Raises PeerLostError if the channel's timeout passes."""
        network, until = self._exchange.network, self._loop.time() + TIMEOUT_S
        while peer.process.thaws_at > self._loop.time() or (
            network.is_unreachable(self.process, peer.process) if self.fenced else not peer.process.alive
        ):
            if not self.fenced and peer.process.alive:
                return  # shared memory can be written while the receiver is frozen
            if self._loop.time() > until:
                raise PeerLostError("it took no byte for too long")
            await asyncio.sleep(0.05)

    def _late(self, peer: "SimChannel", reservation_id: bytes, row: int, data: NDArray[np.uint8]) -> None:
        """Deliver a row of a fenced channel after its writer gave up, because data in the network still arrives."""
        if self.fenced:
            self._exchange.reached("channel: a row arrives after its writer gave up")
            later = 3.0 * self._exchange.random.random()
            self._loop.call_later(later, peer.land_late, reservation_id, row, data, context=WORLD_CONTEXT)

    def land_late(self, reservation_id: bytes, row: int, data: NDArray[np.uint8]) -> None:
        """Accept a row that was delayed in the network."""
        if not self._is_closed and self.process.alive:
            self.land(reservation_id, row, data)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _hang_up(self, incarnation_id: str, *, silent: bool = False) -> None:
        line = self._lines.get(incarnation_id)
        if line is None or not line.is_open:
            return
        line.is_open = False
        peer = self._exchange.channels.get((self.name, incarnation_id))
        if peer is not None and not silent:
            peer.part(self._incarnation_id)

    def leave(self, silent: bool) -> None:
        """Close the channel. Its peers are notified unless `silent` is set."""
        if self._is_closed:
            return
        self._is_closed = True
        del self._exchange.channels[self.name, self._incarnation_id]
        for incarnation_id in self._lines:
            self._hang_up(incarnation_id, silent=silent)
        if not silent:
            for channel in self._exchange.channels.values():
                if channel.name == self.name:
                    channel.lost(self._incarnation_id)

    def lost(self, incarnation_id: str) -> None:
        """Mark the connection to a lost receiver as closed. The next push reconnects."""
        if (line := self._lines.get(incarnation_id)) is not None:
            line.is_open = False

    async def close(self) -> None:
        self.leave(silent=False)
