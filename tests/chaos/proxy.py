"""A TCP relay that injects faults: it resets connections, stops or delays data, flips bits, or repeats chunks.

A node listens on 127.0.0.1 and advertises another loopback address. A relay listens on the same port of that
address, so all RPC and KV traffic to the node passes through the relay. The design follows Toxiproxy.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

CHUNK_BYTES = 65_536
POLL_S = 0.02  # interval at which a relay checks whether a direction is still silent
INTRODUCTION_BYTES = 512  # the first bytes of a connection stay intact; otherwise few connections would open


@dataclass(frozen=True, slots=True)
class Harm:
    """The faults of a link to the node behind the relay."""

    refuse: bool = False  # reset new and existing connections
    silent: frozenset[str] = frozenset()  # directions ("up": to the node, "down") in which data is held back
    delay_s: float = 0.0  # delay of each chunk
    bytes_per_s: float = 0.0  # rate limit to the node; 0: no limit
    cut_at: int = 0  # reset a connection after this many bytes to the node, plus 1 per earlier reset; 0: never
    corrupt: float = 0.0  # share of the chunks to the node in which one bit is flipped
    double: float = 0.0  # share of the chunks to the node that are sent twice
    reply: bytes | None = None  # sent back for each chunk instead of relaying it; b"": close the connection

    @property
    def damage(self) -> set[str]:
        """Return the kinds of damage that must each happen at least once during the fault."""
        kinds = {"cut": self.cut_at, "corrupted": self.corrupt, "doubled": self.double}
        return {kind for kind, amount in kinds.items() if amount}


NONE = Harm()
PARTITION = Harm(silent=frozenset({"up", "down"}))


class Proxy:
    """A relay from `host`:`port` to 127.0.0.1:`port`. Any thread may set `harm` at any time."""

    def __init__(self, relays: "Relays", host: str, port: int, seed: int = 0) -> None:
        self.harms = Counter[str]()  # by kind: cut, corrupted, doubled
        self._harm = NONE
        self._relays = relays
        self._port = port
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection
        self._server = socket.create_server((host, port), backlog=128)
        self._server.setblocking(False)

    @property
    def harm(self) -> Harm:
        return self._harm

    @harm.setter
    def harm(self, harm: Harm) -> None:
        self._harm = harm
        if harm.refuse:
            self.reset()

    def reset(self) -> None:
        """Reset both ends of all existing connections."""
        self._relays.call(lambda: [task.cancel() for task in self._tasks])

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                near, _ = await loop.sock_accept(self._server)
                near.setblocking(False)
                if self._harm.refuse:
                    _reset(near)
                    continue
                task = asyncio.create_task(self._relay(near))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()

    async def _relay(self, near: socket.socket) -> None:
        far = socket.socket()
        far.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", self._port))
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(near, far, "up"))
                group.create_task(self._pump(far, near, "down"))
        except* OSError:
            pass
        finally:
            _reset(near)
            _reset(far)

    async def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        """Relay one direction. Raises OSError if either end closes or a fault resets this connection."""
        loop = asyncio.get_running_loop()
        passed = 0
        while data := await loop.sock_recv(source, self._max_chunk(direction)):
            while direction in self._harm.silent:  # noqa: ASYNC110 - another thread sets `_harm` without waking a task
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(self._harm.delay_s)
            if direction == "up" and (reply := self._harm.reply) is not None:
                await loop.sock_sendall(source, reply) if reply else source.shutdown(socket.SHUT_WR)
                continue
            if direction == "up":
                data = await self._harmed(data, passed, target)
            passed += len(data)
            await loop.sock_sendall(target, data)
        raise ConnectionResetError("the other end closed the connection")

    def _max_chunk(self, direction: str) -> int:
        """Return the maximum size of a chunk. A link with a rate limit relays this size in 50 ms."""
        rate = self._harm.bytes_per_s if direction == "up" else 0.0
        return min(CHUNK_BYTES, max(1, int(rate / 20))) if rate else CHUNK_BYTES

    async def _harmed(self, data: bytes, passed: int, target: socket.socket) -> bytes:
        harm = self._harm
        cut_at = harm.cut_at + self.harms["cut"]
        if harm.cut_at and passed + len(data) > cut_at:
            await asyncio.get_running_loop().sock_sendall(target, data[: max(0, cut_at - passed)])
            self.harms["cut"] += 1
            raise ConnectionResetError("reset by the relay")
        first = max(0, INTRODUCTION_BYTES - passed)
        if first < len(data) and self._random.random() < harm.corrupt:
            at = self._random.randrange(first, len(data))
            data = data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]
            self.harms["corrupted"] += 1
        if first < len(data) and self._random.random() < harm.double:
            data += data
            self.harms["doubled"] += 1
        if harm.bytes_per_s:
            await asyncio.sleep(len(data) / harm.bytes_per_s)
        return data


class Relays:
    """A context manager that runs relays in a thread with its own event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._running: list[asyncio.Task[None]] = []

    def __enter__(self) -> "Relays":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        async def stop() -> None:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def between(self, host: str, port: int, seed: int = 0) -> Proxy:
        """Start a relay from `host`:`port` to 127.0.0.1:`port`. Raises OSError if `host`:`port` is in use."""
        proxy = Proxy(self, host, port, seed)

        async def start() -> None:
            self._running.append(asyncio.create_task(proxy.serve()))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)
        return proxy

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)


def _reset(connection: socket.socket) -> None:
    """Close the connection with RST."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
