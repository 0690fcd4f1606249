"""The KV channel between hosts: frames over TCP, sent directly from the pool and received directly into it.

Blocking sockets in threads take a quarter of the CPU time of an event loop. The receiver looks up the reservation and
the rows of a frame before it decides where to write the bytes, so a stale writer does no harm: the channel is `fenced`.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self
from zlib import crc32

from shared.kv.channel import PeerDescriptor, PeerLostError, ReservationRefusedError, check_incarnation_id, check_open
from shared.kv.listener import (
    ANSWER,
    MAGIC,
    VERSION,
    WELCOME,
    ChannelListener,
    MalformedError,
    check_answer,
    pack_greeting,
    receive_exactly,
)
from shared.kv.peers import ChannelPeers
from shared.kv.staging import KVMemory, Staging

# A push consists of frames with rows and a last frame without rows, which the receiver answers with an ACK.
# A frame has a header, then the row numbers as u32, then the bytes of the rows, whose checksums are in the commit. The
# header has magic, version, number of rows, reservation id, bytes per row, and a CRC-32 of these: with a corrupted
# number of rows, the receiver would wait for rows that never arrive.
FRAME, FRAME_CHECK = struct.Struct("<4sHH16sI"), struct.Struct("<I")
ACK = struct.Struct("<4sHxxII")  # magic, version, rows accepted, rows refused
PATIENCE_S = 2.0
LEAST_BYTES_PER_S = 256 << 10  # within a frame, since a slow writer occupies blocks and a thread
MAX_FRAME_ROWS = 512  # well below the kernel's limit of 1,024 buffers per call
FRAME_BYTES = 4 << 20  # large frames need few calls and few interpreter locks; a cancelled push ends after a frame


class _OpenRows:
    """The rows of one reservation, which may be written until `shut`.

    The lock is held during every receive into the rows, and never while waiting for bytes. So `shut` waits for at
    most one copy out of the socket's buffer. After it, no byte is written to the rows: the rest goes to scratch.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = frozenset(rows)
        self.lock = threading.Lock()
        self.open = True

    def shut(self) -> None:
        with self.lock:
            self.open = False


class TcpChannel:
    """See KVChannel."""

    name = "tcp"
    fenced = True

    def __init__(
        self,
        memory: KVMemory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        server: socket.socket,
        host: str,
        patience_s: float,
    ) -> None:
        num_rows, row_bytes = memory.num_rows, memory.row_bytes
        self._staging = memory.staging
        self._patience_s = patience_s
        self._reservations: dict[bytes, _OpenRows] = {}
        self._scratch = memoryview(bytearray(row_bytes))  # shared by all threads, since it is never read
        self._descriptor = PeerDescriptor(
            self.name, host, str(server.getsockname()[1]), incarnation_id, row_bytes, num_rows
        )
        self._peers = ChannelPeers(row_bytes, num_rows, self._connect)
        self._listener = ChannelListener(
            server, incarnation_id, row_bytes, self._serve, on_writer_lost, patience_s, self._reservations.__contains__
        )

    @classmethod
    async def start(
        cls,
        memory: KVMemory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        host: str,
        port: int = 0,
        advertised: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Listen on `host`, and advertise `advertised`, by default the same, to peers. Raises OSError.

        `patience_s` limits the time without any byte in the middle of a push.
        """
        check_incarnation_id(incarnation_id)
        if advertised is None and host in ("", "0.0.0.0", "::"):
            raise ValueError(f"listening on every address ({host!r}): give the one at which peers reach this node")
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, port), family=family, backlog=128)
        return cls(memory, incarnation_id, on_writer_lost, server, advertised or host, patience_s)

    @property
    def num_rejected(self) -> int:
        """The number of rejected connections: protocol error, unknown reservation or connection limit."""
        return self._listener.num_rejected

    def descriptor(self) -> bytes:
        return self._descriptor.pack()

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        check_open(reservation_id, rows, self._descriptor.num_rows)
        if reservation_id in self._reservations:
            raise ValueError("the reservation is open already")
        self._reservations[reservation_id] = _OpenRows(rows)

    def revoke(self, reservation_id: bytes) -> None:
        known = self._reservations.pop(reservation_id, None)
        if known is not None:
            known.shut()

    def fence_writer(self, incarnation_id: str) -> bool:
        return self._listener.fence_writer(incarnation_id)

    def reachable(self, descriptor: bytes) -> bool:
        """Return True for every valid descriptor. Only a push shows whether the address can be reached."""
        PeerDescriptor.unpack(descriptor, self.name).check_row_bytes(self._descriptor.row_bytes)
        return True

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        await self._peers.push(PeerDescriptor.unpack(descriptor, self.name), reservation_id, source, target)

    async def close(self) -> None:
        await self._peers.close()
        self._listener.close()
        self._staging = _none_left  # releases the memory, even if other objects still refer to this channel

    def _connect(self, descriptor: PeerDescriptor, reservation_id: bytes) -> "_Connection":
        greeting = pack_greeting(descriptor, self._descriptor.incarnation_id, reservation_id)
        return _Connection(descriptor, greeting, self._staging, self._patience_s)

    def _serve(self, connection: socket.socket, _incarnation_id: str) -> None:
        """Receive pushes until the writer ends, is silent in the middle of one, or violates the protocol."""
        with contextlib.closing(self._staging()) as staging:
            connection.sendall(WELCOME)
            connection.setblocking(False)
            self._receive(_Wire(connection, self._patience_s), connection, staging)

    def _receive(self, wire: "_Wire", connection: socket.socket, staging: Staging) -> None:
        indices = memoryview(bytearray(4 * MAX_FRAME_ROWS))
        accepted = refused = 0
        pushing = False
        while True:
            magic, version, count, reservation_id, row_bytes = FRAME.unpack(wire.head(may_idle=not pushing))
            known = (magic, version, row_bytes) == (MAGIC, VERSION, self._descriptor.row_bytes)
            if not known or count > MAX_FRAME_ROWS:
                raise MalformedError
            if count:
                wire.fill(indices[: 4 * count])
                granted = self._reservations.get(reservation_id) or _OpenRows(())
                landed = self._land(wire, staging, granted, indices[: 4 * count].cast("I"))
                accepted, refused = accepted + landed, refused + count - landed
            else:
                # The socket does not block: a peer that fills the buffer with unread answers violates the protocol.
                connection.send(ACK.pack(MAGIC, VERSION, accepted, refused))
                accepted = refused = 0
            pushing = count > 0

    def _land(self, wire: "_Wire", staging: Staging, granted: _OpenRows, rows: memoryview) -> int:
        """Receive the rows of a frame, each into the pool or into scratch. Return how many are complete in the pool."""
        size = self._descriptor.row_bytes
        num_landed = len(rows)
        wanted = [row for row in rows if row in granted.rows]
        room = iter(staging.room(wanted))
        places = [next(room) if row in granted.rows else self._scratch for row in rows]
        done = 0
        wire.expect(len(rows) * size)
        while done < len(rows) * size:
            row, offset = divmod(done, size)
            with granted.lock:
                if not granted.open:
                    places = [self._scratch] * len(rows)
                    num_landed = min(num_landed, row)
                received = wire.receive([places[row][offset:], *places[row + 1 :]])
            if not received:
                wire.wait()
            done += received
        with granted.lock:
            if granted.open:
                staging.write(wanted)
        return sum(row in granted.rows for row in rows[:num_landed])


class _Wire:
    """The receiving end of a connection. Only `wait` blocks, and the methods that call it."""

    def __init__(self, connection: socket.socket, patience_s: float) -> None:
        _keep_alive(connection)
        self._connection = connection
        self._patience_s = patience_s
        self._until = 0.0
        self._head = memoryview(bytearray(FRAME.size + FRAME_CHECK.size))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def expect(self, num_bytes: int) -> None:
        """Set the deadline of `wait` for these bytes, at the least rate that is accepted."""
        self._until = time.monotonic() + self._patience_s + num_bytes / LEAST_BYTES_PER_S

    def receive(self, buffers: list[memoryview]) -> int:
        """Receive what is available, without waiting. Raises EOFError if the connection has ended."""
        try:
            received = self._connection.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        if not received:
            raise EOFError
        return received

    def wait(self, for_ever: bool = False) -> None:
        """Wait for bytes to receive. Raises TimeoutError after the deadline, or `patience_s` without a byte."""
        left_s = min(self._patience_s, max(0.0, self._until - time.monotonic()))
        if not self._poll.poll(None if for_ever else left_s * 1000):
            raise TimeoutError

    def head(self, may_idle: bool) -> memoryview:
        """Receive the header of a frame, valid until the next call. Raises MalformedError if its checksum is wrong."""
        self.fill(self._head, may_idle)
        head = self._head[: FRAME.size]
        if FRAME_CHECK.unpack(self._head[FRAME.size :]) != (crc32(head),):
            raise MalformedError
        return head

    def fill(self, buffer: memoryview, may_idle: bool = False) -> None:
        """Receive until `buffer` is full. With `may_idle`, wait for the first byte without limit."""
        done = 0
        self.expect(len(buffer))
        while done < len(buffer):
            received = self.receive([buffer[done:]])
            if not received:
                self.wait(for_ever=may_idle and not done)
            if may_idle and not done:
                self.expect(len(buffer))
            done += received


class _Connection:
    """The writing end of a connection: sends frames, and receives one answer per push."""

    def __init__(
        self, descriptor: PeerDescriptor, greeting: bytes, staging: Callable[[], Staging], patience_s: float
    ) -> None:
        self._row_bytes = descriptor.row_bytes
        self._patience_s = patience_s
        with contextlib.ExitStack() as undo:
            self.socket = socket.create_connection((descriptor.host, int(descriptor.endpoint)), patience_s)
            undo.callback(self.socket.close)
            _keep_alive(self.socket)
            self.socket.sendall(greeting)
            check_answer(receive_exactly(self.socket, ANSWER.size, patience_s))
            self._staging = staging()
            undo.pop_all()
        # With the kernel's timeout on a blocking socket, a frame needs one call and one wait for the interpreter lock.
        self.socket.settimeout(None)
        seconds, fraction = divmod(patience_s, 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def push(
        self, reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Send the rows and wait for the answer. If stopped, send fewer rows, but only complete frames."""
        row_bytes = self._row_bytes
        per_frame = min(MAX_FRAME_ROWS, max(1, FRAME_BYTES // row_bytes))
        sent = 0
        while sent < len(source) and not stopped():
            rows = source[sent : sent + per_frame]
            head = checked(FRAME.pack(MAGIC, VERSION, len(rows), reservation_id, row_bytes))
            indices = struct.pack(f"<{len(rows)}I", *target[sent : sent + per_frame])
            self._send([memoryview(head + indices), *self._staging.read(rows)])
            sent += len(rows)
        self._send([memoryview(checked(FRAME.pack(MAGIC, VERSION, 0, reservation_id, row_bytes)))])
        self._check_ack(sent)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # the connection has ended already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()
        self._staging.close()

    def _send(self, buffers: list[memoryview]) -> None:
        while buffers:
            try:
                sent = self.socket.sendmsg(buffers)
            except BlockingIOError as error:
                raise TimeoutError(f"it accepted no byte for {self._patience_s} s") from error
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]

    def _check_ack(self, num_rows: int) -> None:
        answer = receive_exactly(self.socket, ACK.size, self._patience_s)
        self.socket.settimeout(None)
        magic, version, accepted, refused = ACK.unpack(answer)
        if (magic, version, accepted + refused) != (MAGIC, VERSION, num_rows):
            raise PeerLostError("its acknowledgement is invalid")
        if refused:
            raise ReservationRefusedError(
                f"the peer refused {refused} of {num_rows} rows: the reservation is not open for them"
            )


def checked(head: bytes) -> bytes:
    """Return the header of a frame with its checksum."""
    return head + FRAME_CHECK.pack(crc32(head))


def _none_left() -> Staging:
    raise PeerLostError("the channel is closed")


def _keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and detect a host that has vanished within 15 seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
