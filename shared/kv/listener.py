"""The receiving end of a channel: lets writers in, a thread for each, and tells when the last of one has gone.

It speaks only the introduction, in which both sides prove the cluster's secret if there is one; what follows on a
connection is the channel's own (`serve`).
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

from shared.kv.channel import DescriptorError, PeerDescriptor, PeerLostError, is_incarnation_id
from shared.rpc import security
from shared.rpc.security import CHALLENGE, OPENING, PROOF_BYTES, AuthenticationError, Called, Caller, Secret, complaints

MAGIC = b"BTKV"
VERSION = 2
PURPOSE = "kv"
HELLO = struct.Struct("<4sHxxI32s32s")  # magic, version, row bytes, the writer's boot, the boot it wants to reach
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


REFUSALS = {
    HandshakeVerdict.OTHER_BOOT: "it was started anew",
    HandshakeVerdict.TOO_MANY: "it has too many writers",
    HandshakeVerdict.BARRED: "it took us for dead and gave our rows to others",
}
WELCOME = ANSWER.pack(MAGIC, VERSION, HandshakeVerdict.WELCOME)


class MalformedError(Exception):
    """What came over a connection is not our protocol."""


class ChannelListener:
    """Accepts on `server` (bound and listening) until `close`; must be made on the event loop.

    `serve(connection, boot)` runs in the connection's thread once a writer is introduced: it sends WELCOME, and
    ends when the writer does. `on_writer_lost(boot)` is called on the loop when the last connection of that writer
    has ended, for whatever reason but our own `close`. `patience_s` bounds each part of the introduction. Writers have
    to prove this process's secret, if it has one.
    """

    def __init__(
        self,
        server: socket.socket,
        boot: str,
        row_bytes: int,
        serve: Callable[[socket.socket, str], None],
        on_writer_lost: Callable[[str], None],
        patience_s: float,
    ) -> None:
        self._server = server
        self._boot = boot
        self._secret = security.own()
        self._row_bytes = row_bytes
        self._serve = serve
        self._on_writer_lost = on_writer_lost
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards all below
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._num_open: Counter[str] = Counter()  # connections by address, and by writer's boot once introduced
        self._barred: set[str] = set()
        self._closing = False
        self.num_rejected = 0  # connections closed for what they said, or for being too many
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
        except (MalformedError, AuthenticationError) as error:
            with self._lock:
                self.num_rejected += 1
            if isinstance(error, AuthenticationError):
                complaints.warn(address, f"KV writer refused: {error}")
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
        """The writer's boot, or None when it was turned away."""
        greeting = self._greeting(connection)
        magic, version, row_bytes, boot_field, wanted = HELLO.unpack(greeting)
        boot: str = boot_field.decode("ascii", "replace")
        if (magic, version) != (MAGIC, VERSION) or not is_incarnation_id(boot):
            raise MalformedError
        verdict = self._verdict(boot, row_bytes, wanted)
        if verdict is HandshakeVerdict.WELCOME:
            return boot
        with self._lock:
            self.num_rejected += 1
        connection.sendall(ANSWER.pack(MAGIC, VERSION, verdict))
        return None

    def _greeting(self, connection: socket.socket) -> bytes:
        """What the writer says of itself. With a secret, nothing of it is read that its proof does not cover."""
        secret, patience_s = self._secret, self._patience_s
        if secret is None:
            first = receive_exactly(connection, len(MAGIC), patience_s)
            if first != MAGIC:  # known at once, since a writer that proves a secret waits for an answer here
                raise MalformedError
            return first + receive_exactly(connection, HELLO.size - len(first), patience_s)
        called = Called(secret, PURPOSE)
        connection.sendall(called.challenge(receive_exactly(connection, OPENING.size, patience_s)))
        answer = receive_exactly(connection, PROOF_BYTES + HELLO.size, patience_s)
        called.check(answer[:PROOF_BYTES], answer[PROOF_BYTES:])
        return answer[PROOF_BYTES:]

    def _verdict(self, boot: str, row_bytes: int, wanted: bytes) -> HandshakeVerdict:
        if wanted != self._boot.encode():
            return HandshakeVerdict.OTHER_BOOT
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


def pack_greeting(card: PeerDescriptor, boot: str) -> bytes:
    """How the writer `boot` introduces itself to the owner of `card`."""
    return HELLO.pack(MAGIC, VERSION, card.row_bytes, boot.encode(), card.incarnation_id.encode())


def introduce(
    connection: socket.socket, card: PeerDescriptor, boot: str, patience_s: float, secret: Secret | None = None
) -> None:
    """The writer's part, up to the answer: both sides prove `secret`, by default this process's, if there is one.

    Raises NotTrustedError, or OSError when the connection ends. Leaves the timeout at `patience_s`.
    """
    greeting = pack_greeting(card, boot)
    if secret := secret or security.own():
        caller = Caller(secret, PURPOSE)
        try:
            connection.sendall(caller.opening)
            challenge = receive_exactly(connection, CHALLENGE.size, patience_s)
        except (EOFError, ConnectionError):
            raise AuthenticationError(
                "it hung up at the introduction, as one does that has no cluster secret"
            ) from None
        greeting = caller.answer(challenge, greeting) + greeting
        connection.settimeout(patience_s)
    connection.sendall(greeting)


def check_answer(data: bytes) -> None:
    """Raises CardError or PeerLostError unless `data` is a welcome."""
    if len(data) != ANSWER.size:
        raise PeerLostError("it hung up at the introduction, as one does that has a cluster secret when we prove none")
    magic, version, verdict = ANSWER.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise PeerLostError(f"it is not a KV channel of version {VERSION}")
    if verdict == HandshakeVerdict.OTHER_ROW_BYTES:
        raise DescriptorError("the peer's KV rows are not of the size that its card says")
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
