"""The KV channel within one host: the writer maps the receiver's memfd and copies rows directly into its pool.

The receiver sends the memfd once, over the socket of `shared.kv.local`. Writes are one-sided, so the channel is not
`fenced`.
"""

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shared.kv.channel import DescriptorError, PeerDescriptor, PeerLostError
from shared.kv.listener import ANSWER, check_answer, pack_greeting
from shared.kv.local import LocalChannel, host_id
from shared.kv.memory import HostMemory, Rows
from shared.kv.peers import hung_up

PIECE_BYTES = 8 << 20  # copied between two checks for a stop: a few milliseconds


class ShmChannel(LocalChannel[HostMemory]):
    """See KVChannel."""

    name = "shm"

    def __init__(
        self,
        memory: HostMemory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        server: socket.socket,
        patience_s: float,
    ) -> None:
        self._rows = memory.rows
        self._incarnation_id = incarnation_id
        self._fd = os.dup(memory.fd)  # our own: after the memory is closed, its number may belong to another file
        super().__init__(memory, incarnation_id, on_writer_lost, server, patience_s)

    def _place(self) -> str:
        return host_id()

    def _reaches(self, place: str) -> bool:
        return place == host_id()

    def _offer(self) -> tuple[bytes, list[int]]:
        return b"", [self._fd]

    def _link(self, descriptor: PeerDescriptor, _reservation_id: bytes) -> "_Mapping":
        return _Mapping(descriptor, self._incarnation_id, self._rows, self._patience_s)

    def _let_go(self) -> None:
        os.close(self._fd)
        self._rows = np.empty((0, 0), np.uint8)


class _Mapping:
    """A peer's pool, which is mapped into this process while the peer is alive."""

    def __init__(self, descriptor: PeerDescriptor, incarnation_id: str, rows: Rows, patience_s: float) -> None:
        self._ours = rows
        self.socket, self._theirs = attach(descriptor, incarnation_id, patience_s)

    def push(
        self, _reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Copy adjacent rows together. numpy releases the interpreter lock, so other threads run in the meantime."""
        row_bytes = self._ours.shape[1]
        copied = 0  # bytes since the last check
        for start, end in runs(source, target, max(1, PIECE_BYTES // row_bytes)):
            if copied >= PIECE_BYTES or not start:
                copied = 0
                if stopped() or hung_up(self.socket):
                    break
            count = end - start
            copied += count * row_bytes
            from_rows, to_rows = (slice(first, first + count) for first in (source[start], target[start]))
            self._theirs[to_rows] = self._ours[from_rows]  # without a local name, which a traceback would keep mapped
        if hung_up(self.socket):
            raise PeerLostError("it has ended")

    def interrupt(self) -> None:
        """Do nothing: a push checks `stopped` after each piece, and the connection must stay open until it ends."""

    def close(self) -> None:
        self._theirs = np.empty((0, 0), np.uint8)  # unmaps
        self.socket.close()  # last, since its end shows the peer that we write no more


def attach(descriptor: PeerDescriptor, incarnation_id: str, patience_s: float) -> tuple[socket.socket, Rows]:
    """Map the memory of the owner. Return the connection and the mapping, which must be released first.

    Raises DescriptorError, PeerLostError, or OSError.
    """
    if descriptor.host != host_id():
        raise DescriptorError("the peer is on another machine")
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(patience_s)
        connection.connect(descriptor.endpoint)
        connection.sendall(pack_greeting(descriptor, incarnation_id))
        rows = _received(connection, descriptor)
        undo.pop_all()
    return connection, rows


def _received(connection: socket.socket, descriptor: PeerDescriptor) -> Rows:
    answer, fds, _, _ = socket.recv_fds(connection, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        check_answer(answer)
        if not fds:
            raise PeerLostError("it sent no memory")
        return _map(fds[0], descriptor)
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int, descriptor: PeerDescriptor) -> Rows:
    """Map the peer's memfd as uint8 [num_rows, row_bytes], and touch its pages.

    Raises PeerLostError unless its size is sealed and equals that in the descriptor: an access to a mapping beyond the
    end of its file is a SIGBUS.
    """
    size = descriptor.num_rows * descriptor.row_bytes
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # not a memfd
        sealed = 0
    if not sealed or os.fstat(fd).st_size != size:
        raise PeerLostError(f"it did not send a sealed memory of {size} bytes")
    flat = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    flat[:: mmap.PAGESIZE].max()  # read only: the pool is in use
    return flat.reshape(descriptor.num_rows, descriptor.row_bytes)


def runs(source: Sequence[int], target: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Split the positions into ranges [start, end) of at most `limit` rows that are adjacent in both sequences."""
    start = 0
    for end in range(1, len(source) + 1):
        if (
            end == len(source)
            or end - start == limit
            or source[end] != source[end - 1] + 1
            or target[end] != target[end - 1] + 1
        ):
            yield start, end
            start = end
