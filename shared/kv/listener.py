"""The receiving end of a channel: admits writers, runs a thread for each connection, and reports lost writers.

It handles only the greeting; the channel handles the rest of the connection (`serve`). A greeting names a reservation:
16 random bytes, which the writer received in the reply of an RPC over TLS. Over tcp, only a writer that names an open
reservation is admitted. A unix socket is protected by its permissions.
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
# Magic, version, row bytes, the writer's incarnation id, that of the process that it wants to reach, a reservation id.
HELLO = struct.Struct("<4sHxxI32s32s16s")
ANSWER = struct.Struct("<4sHH")  # magic, version, Verdict
MAX_CONNECTIONS_PER_ADDRESS = 64  # enough for all nodes of a host, and still few threads
MAX_CONNECTIONS_PER_WRITER = 4  # it uses one; a lost one may remain until its end is noticed


class HandshakeVerdict(IntEnum):
    """The receiver's answer to a greeting."""

    WELCOME = 0
    OTHER_ROW_BYTES = 1
    OTHER_INCARNATION = 2
    TOO_MANY = 3
    FENCED = 4
    NO_RESERVATION = 5


REFUSALS = {
    HandshakeVerdict.OTHER_INCARNATION: "it was restarted",
    HandshakeVerdict.TOO_MANY: "it has too many writers",
    HandshakeVerdict.FENCED: "it treats us as dead, and reuses our rows",
}
WELCOME = ANSWER.pack(MAGIC, VERSION, HandshakeVerdict.WELCOME)


class MalformedError(Exception):
    """The bytes on a connection violate the protocol."""


class ChannelListener:
    """Accepts writers on `server` (bound and listening) until `close`; must be created on the event loop.

    `serve(connection, incarnation_id)` runs in the connection's thread once a writer is admitted: it sends WELCOME, and
    returns when the writer ends. `on_writer_lost(incarnation_id)` is called on the loop when the last connection of
    that writer has ended for any reason but our own `close`. `patience_s` bounds the wait for a greeting.
    `is_open(reservation_id)` decides whether a writer that names this reservation is admitted.
    """

    def __init__(
        self,
        server: socket.socket,
        incarnation_id: str,
        row_bytes: int,
        serve: Callable[[socket.socket, str], None],
        on_writer_lost: Callable[[str], None],
        patience_s: float,
        is_open: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self._server = server
        self._incarnation_id = incarnation_id
        self._row_bytes = row_bytes
        self._serve = serve
        self._on_writer_lost = on_writer_lost
        self._patience_s = patience_s
        self._is_open = is_open
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the attributes below
        self._threads: dict[socket.socket, threading.Thread] = {}
        # Connections by address, and, after the greeting, also by the incarnation id of the writer.
        self._num_open: Counter[str] = Counter()
        self._fenced: set[str] = set()
        self._closing = False
        self.num_rejected = 0  # connections closed for a protocol error, an unknown reservation or a limit
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and wait for their threads, which only have to wake up. Idempotent."""
        with self._lock:
            self._closing = True
            threads = dict(self._threads)
        for connection in (self._server, *threads):
            with contextlib.suppress(OSError):  # it may have ended by itself
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *threads.values()):
            thread.join()
        self._server.close()

    def fence_writer(self, incarnation_id: str) -> bool:
        """Refuse this writer from now on. Return False, and do not refuse it, if it is connected."""
        with self._lock:
            if self._num_open[incarnation_id]:
                return False
            self._fenced.add(incarnation_id)
            return True

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._server.accept()
            except OSError:  # closed by us, or a connection was aborted, or no file descriptor is left
                time.sleep(0 if self._closing else 0.05)
                continue
            self._admit(connection, str(address[0]) if address else "local")

    def _admit(self, connection: socket.socket, address: str) -> None:
        thread = threading.Thread(target=self._host, args=(connection, address), name="kv-receive", daemon=True)
        with self._lock:
            if not self._closing and self._take(address, MAX_CONNECTIONS_PER_ADDRESS):
                try:
                    thread.start()  # it removes itself under this lock, so not before it is added
                    self._threads[connection] = thread
                    return
                except RuntimeError:  # no more threads can be started
                    self._release(address)
            self.num_rejected += 1
        connection.close()

    def _host(self, connection: socket.socket, address: str) -> None:
        incarnation_id = None
        try:
            incarnation_id = self._introduction(connection)
            if incarnation_id is not None:
                self._serve(connection, incarnation_id)
        except MalformedError:
            with self._lock:
                self.num_rejected += 1
        except (OSError, EOFError):
            pass  # the writer hung up, or was silent for too long; `_leave` reports it
        finally:
            connection.close()
            self._leave(connection, address, incarnation_id)

    def _leave(self, connection: socket.socket, address: str, incarnation_id: str | None) -> None:
        with self._lock:
            self._threads.pop(connection)
            self._release(address)
            told = (
                None if incarnation_id is None or not self._release(incarnation_id) or self._closing else incarnation_id
            )
        if told is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_writer_lost, told)

    def _introduction(self, connection: socket.socket) -> str | None:
        """Return the writer's incarnation id, or None if it was turned away."""
        magic = receive_exactly(connection, len(MAGIC), self._patience_s)
        if magic != MAGIC:
            raise MalformedError
        greeting = magic + receive_exactly(connection, HELLO.size - len(magic), self._patience_s)
        _, version, row_bytes, incarnation_field, wanted, reservation_id = HELLO.unpack(greeting)
        incarnation_id: str = incarnation_field.decode("ascii", "replace")
        if version != VERSION or not is_incarnation_id(incarnation_id):
            raise MalformedError
        verdict = self._verdict(incarnation_id, row_bytes, wanted, reservation_id)
        if verdict is HandshakeVerdict.WELCOME:
            return incarnation_id
        with self._lock:
            self.num_rejected += 1
        connection.sendall(ANSWER.pack(MAGIC, VERSION, verdict))
        return None

    def _verdict(self, incarnation_id: str, row_bytes: int, wanted: bytes, reservation_id: bytes) -> HandshakeVerdict:
        if wanted != self._incarnation_id.encode():
            return HandshakeVerdict.OTHER_INCARNATION
        if not self._is_open(reservation_id):
            return HandshakeVerdict.NO_RESERVATION
        if row_bytes != self._row_bytes:
            return HandshakeVerdict.OTHER_ROW_BYTES
        with self._lock:
            if incarnation_id in self._fenced:
                return HandshakeVerdict.FENCED
            return (
                HandshakeVerdict.WELCOME
                if self._take(incarnation_id, MAX_CONNECTIONS_PER_WRITER)
                else HandshakeVerdict.TOO_MANY
            )

    def _take(self, key: str, limit: int) -> bool:
        if self._num_open[key] >= limit:
            return False
        self._num_open[key] += 1
        return True

    def _release(self, key: str) -> bool:
        """Decrement the number of connections of `key`. Return whether this was the last one."""
        self._num_open[key] -= 1
        if self._num_open[key]:
            return False
        del self._num_open[key]
        return True


def pack_greeting(
    descriptor: PeerDescriptor, incarnation_id: str, reservation_id: bytes = bytes(RESERVATION_ID_BYTES)
) -> bytes:
    """Return the greeting of the writer `incarnation_id` to the owner of `descriptor`."""
    return HELLO.pack(
        MAGIC,
        VERSION,
        descriptor.row_bytes,
        incarnation_id.encode(),
        descriptor.incarnation_id.encode(),
        reservation_id,
    )


def check_answer(data: bytes) -> None:
    """Raise ChannelError unless `data` is a welcome."""
    if len(data) != ANSWER.size:
        raise PeerLostError("it hung up at the greeting")
    magic, version, verdict = ANSWER.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise PeerLostError(f"it is not a KV channel of version {VERSION}")
    if verdict == HandshakeVerdict.OTHER_ROW_BYTES:
        raise DescriptorError("the KV rows of the peer do not have the size in its descriptor")
    if verdict == HandshakeVerdict.NO_RESERVATION:
        raise ReservationRefusedError("it does not know the reservation, or has closed it")
    if verdict != HandshakeVerdict.WELCOME:
        raise PeerLostError(REFUSALS.get(verdict, "it refused the connection"))


def receive_exactly(connection: socket.socket, size: int, patience_s: float) -> bytes:
    """Receive `size` bytes. Raises EOFError if the connection ends first, TimeoutError after `patience_s`."""
    data = b""
    deadline = time.monotonic() + patience_s
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError("it hung up")
        data += piece
    return data
