"""The receiving end of a channel: admits writers, runs a thread for each, and reports when the last of one has gone.

It handles only the greeting; what follows on a connection is up to the channel (`serve`). A greeting names a
reservation: 16 random bytes, which the writer received over the TLS of the RPC that made it. Over tcp only a writer
that names an open one is admitted; a unix socket is protected by its permissions.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

from shared.kv.channel import (
    RESERVATION_ID_BYTES,
    DescriptorError,
    PeerDescriptor,
    PeerLostError,
    ReservationRefusedError,
    is_incarnation_id,
)

MAGIC = b"BTKV"
VERSION = 3
# Magic, version, row bytes, the writer's incarnation id, that of the process it wants to reach, a reservation id.
HELLO = struct.Struct("<4sHxxI32s32s16s")
ANSWER = struct.Struct("<4sHH")  # magic, version, Verdict
MAX_CONNECTIONS_PER_ADDRESS = 64  # a whole host of nodes, and still few threads
MAX_CONNECTIONS_PER_WRITER = 4  # one is in use; a lost one may linger until its end is noticed


class HandshakeVerdict(IntEnum):
    """The receiver's answer to an introduction."""

    WELCOME = 0
    OTHER_ROW_BYTES = 1
    OTHER_BOOT = 2
    TOO_MANY = 3
    BARRED = 4
    NO_RESERVATION = 5


REFUSALS = {
    HandshakeVerdict.OTHER_BOOT: "it was started anew",
    HandshakeVerdict.TOO_MANY: "it has too many writers",
    HandshakeVerdict.BARRED: "it took us for dead and gave our rows to others",
}
WELCOME = ANSWER.pack(MAGIC, VERSION, HandshakeVerdict.WELCOME)


class MalformedError(Exception):
    """What came over a connection is not our protocol."""


class ChannelListener:
    """Accepts writers on `server` (bound and listening) until `close`; must be created on the event loop.

    `serve(connection, boot)` runs in the connection's thread once a writer is admitted: it sends WELCOME, and returns
    when the writer ends. `on_writer_lost(boot)` is called on the loop when the last connection of that writer has ended
    for any reason but our own `close`. `patience_s` bounds the wait for a greeting. `is_open(reservation_id)` decides
    whether a writer that names this reservation is admitted.
    """

    def __init__(
        self,
        server: socket.socket,
        boot: str,
        row_bytes: int,
        serve: Callable[[socket.socket, str], None],
        on_writer_lost: Callable[[str], None],
        patience_s: float,
        is_open: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self._server = server
        self._boot = boot
        self._row_bytes = row_bytes
        self._serve = serve
        self._on_writer_lost = on_writer_lost
        self._patience_s = patience_s
        self._is_open = is_open
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards all below
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._num_open: Counter[str] = Counter()  # connections by address, and by writer's boot once introduced
        self._barred: set[str] = set()
        self._closing = False
        self.num_rejected = 0  # connections closed for a protocol error, an unknown reservation or a limit
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everyone and wait for the threads; they only have to wake up. Idempotent."""
        with self._lock:
            self._closing = True
            threads = dict(self._threads)
        for connection in (self._server, *threads):
            with contextlib.suppress(OSError):  # it may have ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *threads.values()):
            thread.join()
        self._server.close()

    def fence_writer(self, boot: str) -> bool:
        """Refuse this writer from now on. False: it is connected at this moment, so it is not barred."""
        with self._lock:
            if self._num_open[boot]:
                return False
            self._barred.add(boot)
            return True

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._server.accept()
            except OSError:  # ours on close; else one connection aborted, or no descriptor left for now
                time.sleep(0 if self._closing else 0.05)
                continue
            self._admit(connection, str(address[0]) if address else "local")

    def _admit(self, connection: socket.socket, address: str) -> None:
        thread = threading.Thread(target=self._host, args=(connection, address), name="kv-receive", daemon=True)
        with self._lock:
            if not self._closing and self._take(address, MAX_CONNECTIONS_PER_ADDRESS):
                try:
                    thread.start()  # it leaves under this lock, so not before it is entered here
                    self._threads[connection] = thread
                    return
                except RuntimeError:  # no more threads can be had
                    self._release(address)
            self.num_rejected += 1
        connection.close()

    def _host(self, connection: socket.socket, address: str) -> None:
        boot = None
        try:
            boot = self._introduction(connection)
            if boot is not None:
                self._serve(connection, boot)
        except MalformedError:
            with self._lock:
                self.num_rejected += 1
        except (OSError, EOFError):
            pass  # it hung up, or was silent for too long; its end is told below
        finally:
            connection.close()
            self._leave(connection, address, boot)

    def _leave(self, connection: socket.socket, address: str, boot: str | None) -> None:
        with self._lock:
            self._threads.pop(connection)
            self._release(address)
            told = None if boot is None or not self._release(boot) or self._closing else boot
        if told is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._on_writer_lost, told)

    def _introduction(self, connection: socket.socket) -> str | None:
        """Return the writer's boot, or None if it was turned away."""
        magic = receive_exactly(connection, len(MAGIC), self._patience_s)
        if magic != MAGIC:
            raise MalformedError
        greeting = magic + receive_exactly(connection, HELLO.size - len(magic), self._patience_s)
        _, version, row_bytes, boot_field, wanted, reservation_id = HELLO.unpack(greeting)
        boot: str = boot_field.decode("ascii", "replace")
        if version != VERSION or not is_incarnation_id(boot):
            raise MalformedError
        verdict = self._verdict(boot, row_bytes, wanted, reservation_id)
        if verdict is HandshakeVerdict.WELCOME:
            return boot
        with self._lock:
            self.num_rejected += 1
        connection.sendall(ANSWER.pack(MAGIC, VERSION, verdict))
        return None

    def _verdict(self, boot: str, row_bytes: int, wanted: bytes, reservation_id: bytes) -> HandshakeVerdict:
        if wanted != self._boot.encode():
            return HandshakeVerdict.OTHER_BOOT
        if not self._is_open(reservation_id):
            return HandshakeVerdict.NO_RESERVATION
        if row_bytes != self._row_bytes:
            return HandshakeVerdict.OTHER_ROW_BYTES
        with self._lock:
            if boot in self._barred:
                return HandshakeVerdict.BARRED
            return (
                HandshakeVerdict.WELCOME if self._take(boot, MAX_CONNECTIONS_PER_WRITER) else HandshakeVerdict.TOO_MANY
            )

    def _take(self, key: str, limit: int) -> bool:
        if self._num_open[key] >= limit:
            return False
        self._num_open[key] += 1
        return True

    def _release(self, key: str) -> bool:
        """Count one connection less; True when it was the last."""
        self._num_open[key] -= 1
        if self._num_open[key]:
            return False
        del self._num_open[key]
        return True


def pack_greeting(card: PeerDescriptor, boot: str, reservation_id: bytes = bytes(RESERVATION_ID_BYTES)) -> bytes:
    """Return how the writer `boot` greets the owner of `card`."""
    return HELLO.pack(MAGIC, VERSION, card.row_bytes, boot.encode(), card.incarnation_id.encode(), reservation_id)


def check_answer(data: bytes) -> None:
    """Raises CardError or PeerLostError unless `data` is a welcome."""
    if len(data) != ANSWER.size:
        raise PeerLostError("it hung up at the greeting")
    magic, version, verdict = ANSWER.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise PeerLostError(f"it is not a KV channel of version {VERSION}")
    if verdict == HandshakeVerdict.OTHER_ROW_BYTES:
        raise DescriptorError("the peer's KV rows are not of the size that its card says")
    if verdict == HandshakeVerdict.NO_RESERVATION:
        raise ReservationRefusedError("it does not know the reservation, or has closed it")
    if verdict != HandshakeVerdict.WELCOME:
        raise PeerLostError(REFUSALS.get(verdict, "it refused us"))


def receive_exactly(connection: socket.socket, size: int, patience_s: float) -> bytes:
    """Raises EOFError when the connection ends before, TimeoutError when not all is there after `patience_s`."""
    data = b""
    deadline = time.monotonic() + patience_s
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("it hung up")
        data += piece
    return data
