"""TCP between simulated processes. The bytes of a connection arrive in order, but they may be late, split or missing.

A cut link loses no byte: data in flight arrives after the cut ends, as if it were retransmitted. A single connection
can stall, as after lost segments. The data and the end of a stalled connection may arrive after data that was sent
later over another connection to the same process. If a process dies, its connections are reset. If its host vanishes,
its connections are not reset, and its peers are not notified.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from tests.simulation.loop import CURRENT, WORLD, Process, SimLoop

HIGH_BYTES, LOW_BYTES = 64 << 10, 16 << 10  # unread bytes at which a writer pauses and resumes
DELAYS_S = (0.0, 0.0, 0.002, 0.05)  # one is drawn per connection and added to the latency of each segment
RESEND_S = 0.2  # maximum time between two segments of a connection after a stall
CONNECT_S = 20.0  # an unanswered connection attempt fails after this time
WORLD_CONTEXT = Context()
WORLD_CONTEXT.run(CURRENT.set, WORLD)


class Network:
    """The simulated network: the listening ports, the connections, and the cuts between processes."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self._listeners: dict[int, Listener] = {}
        self._ports = 20_000
        self._ends: dict[int, End] = {}
        self._cuts: dict[tuple[str, str], float] = {}  # (from, to) -> end of the cut

    # ---- sockets ---------------------------------------------------------------------------------------------------

    def listen(self, factory: Callable[[], Any], host: str, port: int) -> "Listener":
        """Listen on a port; 0 chooses a free one. Raises OSError if the port is in use."""
        if not port:
            self._ports += 1
            port = self._ports
        if port in self._listeners:
            raise OSError(98, f"port {port} is in use")
        listener = self._listeners[port] = Listener(self, factory, host, port)
        return listener

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple["End", Any]:
        ours = CURRENT.get()
        await asyncio.sleep(self.latency())
        listener = self._listeners.get(port)
        deadline = self.loop.now + CONNECT_S
        while listener is not None and self.is_unreachable(ours, listener.process):
            if self.loop.now > deadline:
                raise TimeoutError(f"no answer from {host}:{port}")
            await asyncio.sleep(0.2)
            listener = self._listeners.get(port)
        if listener is None or not ours.alive:
            raise ConnectionRefusedError(111, f"connect call failed to {host}:{port}")
        near = End(self, ours, copy_context(), (host, port))
        far = End(self, listener.process, listener.context.copy(), ("127.0.0.1", 1))
        near.peer, far.peer = far, near
        near.delay_s = far.delay_s = self.loop.random.choice(DELAYS_S)
        for end in (near, far):
            self._ends[id(end)] = end
        near.protocol = factory()
        self.loop.call_soon(far.accept, listener.factory, context=far.context)
        near.protocol.connection_made(near)
        return near, near.protocol

    def latency(self) -> float:
        return 0.0001 + self.loop.random.expovariate(2000.0)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def is_cut(self, source: Process, target: Process) -> bool:
        return self._cuts.get((source.name, target.name), 0.0) > self.loop.now

    def cut(self, source: str, target: str, for_s: float) -> None:
        """Block the data from `source` to `target` for `for_s` seconds."""
        self._cuts[source, target] = self.loop.now + for_s
        self.loop.call_later(for_s + 0.001, self._resume, context=WORLD_CONTEXT)

    def stall(self, one: Process, other: Process, for_s: float) -> None:
        """Stall the existing connections between two processes. Connections opened later are not affected."""
        for end in self.ends_of(one) + self.ends_of(other):
            if {end.process, end.peer.process} == {one, other}:
                end.stall(for_s)

    def heal(self) -> None:
        self._cuts.clear()
        self._resume()

    def died(self, process: Process, *, silent: bool) -> None:
        """End a process: free its ports and reset its connections, unless its host vanished too (`silent`)."""
        for port, listener in list(self._listeners.items()):
            if listener.process is process and not silent:
                del self._listeners[port]
        for end in self.ends_of(process):
            end.is_lost = True
            if not silent:
                end.peer.reset_soon()

    def ends_of(self, process: Process) -> list["End"]:
        return [end for end in self._ends.values() if end.process is process]

    def forget(self, end: "End") -> None:
        self._ends.pop(id(end), None)

    def is_unreachable(self, source: Process, target: Process) -> bool:
        return not target.alive or self.is_cut(source, target) or self.is_cut(target, source)

    def _resume(self) -> None:
        for end in list(self._ends.values()):
            end.flow_on()


class Listener(asyncio.AbstractServer):
    """One listening port of one process."""

    def __init__(self, network: Network, factory: Callable[[], Any], host: str, port: int) -> None:
        self.factory = factory
        self.process = CURRENT.get()
        self.context = copy_context()
        self._network = network
        self._name = (host, port)
        self.sockets: list[Any] = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def close(self) -> None:
        if self._network._listeners.get(self._name[1]) is self:
            del self._network._listeners[self._name[1]]

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    def is_serving(self) -> bool:
        return self._network._listeners.get(self._name[1]) is self


class End(asyncio.Transport):
    """One end of a connection. The connection is reset after this end has sent `breaks_after` bytes, if set."""

    def __init__(self, network: Network, process: Process, context: Context, name: tuple[str, int]) -> None:
        super().__init__({"peername": name, "sockname": ("127.0.0.1", 1)})
        self.process = process
        self.context = context
        self.peer: End
        self.protocol: Any = None
        self.is_lost = False
        self.breaks_after: int | None = None
        self.delay_s = 0.0
        self._network = network
        self._loop = network.loop
        self._closing = False
        self._wire: deque[bytes | None] = deque()  # None marks the end of the stream
        self._unread = 0
        self._paused = False
        self._last_arrival = 0.0
        self._is_stalled = False

    # ---- the transport's interface ------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.is_lost or self._closing or not self.process.alive:
            return
        data = bytes(data)
        if self.breaks_after is not None:
            data = data[: self.breaks_after]
            self.breaks_after -= len(data)
        size = len(data)
        random = self._loop.random
        if size > 1 and random.random() < 0.1:  # a segment may be split at any byte
            at = 1 + int(random.random() * (size - 1))
            self._send(data[:at])
            self._send(data[at:])
        elif size:
            self._send(data)
        if self.breaks_after == 0:
            self.reset_soon()
            self.peer.reset_soon()
        elif self._unread > HIGH_BYTES and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def close(self) -> None:
        if self._closing or self.is_lost:
            return
        self._send(None)
        self._closing = True
        self._loop.call_soon(self.lose, None, context=self.context)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing or self.is_lost

    def get_write_buffer_size(self) -> int:
        return self._unread

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def accept(self, factory: Callable[[], Any]) -> None:
        if self.is_lost:
            return
        self.protocol = factory()
        self.protocol.connection_made(self)

    def _send(self, data: bytes | None) -> None:
        self._wire.append(data)
        self._unread += len(data or b"")
        self._last_arrival = max(self._last_arrival, self._loop.now + self.delay_s + self._network.latency())
        self._loop.call_at(self._last_arrival, self._arrive, context=WORLD_CONTEXT)

    @property
    def _can_arrive(self) -> bool:
        return bool(self._wire) and not self._network.is_cut(self.process, self.peer.process)

    def _arrive(self) -> None:
        if self._can_arrive and not self._is_stalled:
            self._deliver()
        if self.is_lost and not self._wire:
            self._network.forget(self)

    def _deliver(self) -> None:
        self._loop.call_soon(self.peer.receive, self._wire.popleft(), context=self.peer.context)

    def flow_on(self) -> None:
        while self._can_arrive and not self._is_stalled:
            self._arrive()

    def stall(self, for_s: float) -> None:
        """Hold back all sent segments for `for_s` seconds. After that, they arrive one at a time."""
        self._is_stalled = True
        self._loop.call_later(for_s, self._resend, context=WORLD_CONTEXT)

    def _resend(self) -> None:
        if self._can_arrive:
            self._deliver()
            self._loop.call_later(RESEND_S * self._loop.random.random(), self._resend, context=WORLD_CONTEXT)
            return
        self._is_stalled = False
        self._arrive()

    def receive(self, data: bytes | None) -> None:
        if data is None:
            self.lose(None)
        elif not self.is_lost and self.protocol is not None:
            self.protocol.data_received(data)
            self.peer.drained(len(data))

    def drained(self, size: int) -> None:
        self._unread -= size
        if self._paused and self._unread < LOW_BYTES and not self.is_lost:
            self._paused = False
            self._loop.call_soon(self.protocol.resume_writing, context=self.context)

    def reset_soon(self) -> None:
        error = ConnectionResetError(104, "connection reset by peer")
        later = self._loop.now + self._network.latency()
        self._loop.call_at(later, self.lose, error, context=self.context)

    def lose(self, error: Exception | None) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if error is not None:
            self._wire.clear()
        if not self._wire:
            self._network.forget(self)
        if self.protocol is not None:
            self.protocol.connection_lost(error)
