"""The KV channel between hosts: frames over TCP, sent directly from the pool and received directly into it.

Blocking sockets in threads need a quarter of the CPU time that an event loop would need. The receiver checks the
reservation and the rows of a frame before it writes the bytes, so a late writer cannot damage other rows: the channel
is `fenced`.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from zlib import crc32

from shared.kv.channel import PeerDescriptor, PeerLostError, ReservationRefusedError
from shared.kv.connections import (
    ANSWER,
    MAGIC,
    VERSION,
    WELCOME,
    MalformedError,
    SocketChannel,
    check_answer,
    pack_greeting,
    receive_exactly,
    set_timeout,
)
from shared.kv.memory import KVMemory, Staging

# A push consists of frames with rows and a last frame without rows. The receiver answers the last frame with an ACK.
# A frame has a header, the row numbers as u32, and the bytes of the rows. The checksums of rows are sent by RPC. The
# header has magic, version, number of rows, reservation id, bytes per row, and the CRC-32 of these fields. Without the
# CRC, a corrupted number of rows would make the receiver wait for rows that never arrive.
FRAME, FRAME_CHECK = struct.Struct("<4sHH16sI"), struct.Struct("<I")
ACK = struct.Struct("<4sHxxII")  # magic, version, rows accepted, rows refused
PATIENCE_S = 2.0
LEAST_BYTES_PER_S = 256 << 10  # minimum speed within a frame, because a slow writer occupies blocks and a thread
MAX_FRAME_ROWS = 512  # well below the kernel's limit of 1,024 buffers per call
FRAME_BYTES = 4 << 20  # large frames need few system calls, but a cancelled push must complete its current frame


class _OpenRows:
    """The rows of one reservation. Writers may fill them until `shut` is called.

    A thread holds the lock while it copies bytes from the socket's buffer into the rows, but not while it waits for
    bytes. `shut` therefore waits for at most one copy. After `shut`, bytes for these rows go to the scratch buffer.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = frozenset(rows)
        self.lock = threading.Lock()
        self.open = True

    def shut(self) -> None:
        with self.lock:
            self.open = False


class TcpChannel(SocketChannel[KVMemory]):
    """See KVChannel. A push fails if no byte is sent or received for `patience_s` seconds."""

    name = "tcp"
    fenced = True

    def __init__(
        self,
        memory: KVMemory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        host: str,
        port: int = 0,
        advertised: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Listen on `host`. Our descriptor contains `advertised` or, by default, `host`. Raises OSError."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, port), family=family, backlog=128)
        self._reservations: dict[bytes, _OpenRows] = {}
        self._scratch = memoryview(bytearray(memory.row_bytes))  # shared by all threads, because it is never read
        address = advertised or host, str(server.getsockname()[1])
        super().__init__(memory, incarnation_id, on_writer_lost, server, address, patience_s)

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        super().grant(reservation_id, rows)
        if reservation_id in self._reservations:
            raise ValueError("the reservation is open already")
        self._reservations[reservation_id] = _OpenRows(rows)

    def revoke(self, reservation_id: bytes) -> None:
        if (known := self._reservations.pop(reservation_id, None)) is not None:
            known.shut()

    def _is_open(self, reservation_id: bytes) -> bool:
        return reservation_id in self._reservations

    def _link(self, descriptor: PeerDescriptor, reservation_id: bytes) -> "_Connection":
        greeting = pack_greeting(descriptor, self._own.incarnation_id, reservation_id)
        return _Connection(descriptor, greeting, self._memory.staging, self._patience_s)

    def _serve(self, connection: socket.socket) -> None:
        _keep_alive(connection)
        with contextlib.closing(self._memory.staging()) as staging:
            connection.sendall(WELCOME)
            self.receive(connection, staging)

    def receive(self, connection: socket.socket, staging: Staging) -> None:
        """Receive pushes until an exception ends this call. `connection` must be a blocking socket with a timeout.

        Raises EOFError or OSError if the writer has ended or is silent during a push, and MalformedError if it violates
        the protocol.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        accepted = refused = 0
        pushing = False
        while True:
            if not pushing:
                poll.poll()  # wait without a limit, because a writer may be silent between pushes
            header = receive_exactly(connection, FRAME.size + FRAME_CHECK.size)
            magic, version, count, reservation_id, row_bytes = FRAME.unpack(header[: FRAME.size])
            is_known = (magic, version, row_bytes) == (MAGIC, VERSION, self._own.row_bytes)
            if not is_known or header != checked(header[: FRAME.size]) or count > MAX_FRAME_ROWS:
                raise MalformedError
            if count:
                rows = struct.unpack(f"<{count}I", receive_exactly(connection, 4 * count))
                granted = self._reservations.get(reservation_id) or _OpenRows(())
                num_received = self._receive_rows(connection, poll, staging, granted, rows)
                accepted, refused = accepted + num_received, refused + count - num_received
            else:
                # Do not wait for room in the send buffer: a peer that does not read its answers violates the protocol.
                connection.send(ACK.pack(MAGIC, VERSION, accepted, refused), socket.MSG_DONTWAIT)
                accepted = refused = 0
            pushing = count > 0

    def _receive_rows(
        self, connection: socket.socket, poll: select.poll, staging: Staging, granted: _OpenRows, rows: Sequence[int]
    ) -> int:
        """Receive each row of a frame into the pool or the scratch buffer. Return how many rows reached the pool."""
        row_bytes = self._own.row_bytes
        num_complete = len(rows)
        wanted = [row for row in rows if row in granted.rows]
        room = iter(staging.room(wanted))
        places = [next(room) if row in granted.rows else self._scratch for row in rows]
        done, size = 0, len(rows) * row_bytes
        deadline = time.monotonic() + self._patience_s + size / LEAST_BYTES_PER_S
        while done < size:
            row, offset = divmod(done, row_bytes)
            with granted.lock:
                if not granted.open:
                    places = [self._scratch] * len(rows)
                    num_complete = min(num_complete, row)
                try:
                    buffers = [places[row][offset:], *places[row + 1 :]]
                    received = connection.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]
                except BlockingIOError:
                    received = -1
            if not received:
                raise EOFError
            if received > 0:
                done += received
            elif not poll.poll(1000 * min(self._patience_s, max(0.0, deadline - time.monotonic()))):
                raise TimeoutError
        with granted.lock:
            if granted.open:
                staging.write(wanted)
        return sum(row in granted.rows for row in rows[:num_complete])


class _Connection:
    """The writer's end of a connection: sends frames, and receives one answer per push."""

    def __init__(
        self, descriptor: PeerDescriptor, greeting: bytes, staging: Callable[[], Staging], patience_s: float
    ) -> None:
        self._row_bytes = descriptor.row_bytes
        self._patience_s = patience_s
        with contextlib.ExitStack() as undo:
            self.socket = socket.create_connection((descriptor.host, int(descriptor.endpoint)), patience_s)
            undo.callback(self.socket.close)
            _keep_alive(self.socket)
            set_timeout(self.socket, patience_s)
            self.socket.sendall(greeting)
            check_answer(receive_exactly(self.socket, ANSWER.size))
            self._staging = staging()
            undo.pop_all()

    def push(
        self, reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Send the rows and wait for the answer. Once `stopped()` is true, omit the remaining frames."""
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
        magic, version, accepted, refused = ACK.unpack(receive_exactly(self.socket, ACK.size))
        if (magic, version, accepted + refused) != (MAGIC, VERSION, sent):
            raise PeerLostError("the peer's acknowledgement is invalid")
        if refused:
            raise ReservationRefusedError(
                f"the peer refused {refused} of {sent} rows: the reservation is not open for them"
            )

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
                raise TimeoutError(f"the peer accepted no byte for {self._patience_s} s") from error
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]


def checked(head: bytes) -> bytes:
    """Return the header of a frame with its checksum appended."""
    return head + FRAME_CHECK.pack(crc32(head))


def _keep_alive(connection: socket.socket) -> None:
    """Send small frames at once, and detect within 15 seconds that a host has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
