"""The KV channel within one host: the writer maps the receiver's memfd and copies rows directly into that memory.

The receiver sends the memfd over the socket of `shared.kv.local`. The receiver cannot stop a late write,
so the channel is not `fenced`.
"""

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shared.kv.channel import DescriptorError, PeerDescriptor, PeerLostError
from shared.kv.connections import hung_up
from shared.kv.local import LocalChannel, greeted, host_id
from shared.kv.memory import HostMemory, Rows

PIECE_BYTES = 8 << 20  # a push checks `stopped` after this many bytes, which take a few milliseconds


class ShmChannel(LocalChannel[HostMemory]):
    """See KVChannel. The channel must be closed before its memory is."""

    name = "shm"

    def _offer(self) -> tuple[bytes, list[int]]:
        return b"", [self._memory.fd]

    def _link(self, descriptor: PeerDescriptor, _reservation_id: bytes) -> "_Mapping":
        return _Mapping(self._memory.rows, *attach(descriptor, self._own.incarnation_id, self._patience_s))


class _Mapping:
    """A peer's pool, mapped into this process, and the connection, which shows whether the peer is alive."""

    def __init__(self, ours: Rows, connection: socket.socket, theirs: Rows) -> None:
        self._ours = ours
        self.socket = connection
        self._theirs = theirs

    def push(
        self, _reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Copy the rows, with one call of numpy for each range of adjacent rows. During the call, numpy releases the
        interpreter lock, so other threads run."""
        row_bytes = self._ours.shape[1]
        copied = PIECE_BYTES  # bytes since the last check
        for start, end in runs(source, target, max(1, PIECE_BYTES // row_bytes)):
            if copied >= PIECE_BYTES:
                copied = 0
                if stopped() or hung_up(self.socket):
                    break
            count = end - start
            copied += count * row_bytes
            from_rows, to_rows = (slice(first, first + count) for first in (source[start], target[start]))
            # Use no variables for the views, because a traceback would keep the variables, and so the mapping.
            self._theirs[to_rows] = self._ours[from_rows]
        if hung_up(self.socket):
            raise PeerLostError("the peer has ended")

    def interrupt(self) -> None:
        """Do nothing: a push checks `stopped` after each piece, and must keep the connection open until it returns."""

    def close(self) -> None:
        self._theirs = np.empty((0, 0), np.uint8)  # unmaps
        self.socket.close()  # must come last: the peer takes a closed connection as a sign that we write no more


def attach(descriptor: PeerDescriptor, incarnation_id: str, patience_s: float) -> tuple[socket.socket, Rows]:
    """Map the pool that the descriptor describes. Return the connection and the mapped rows.

    The caller must drop the rows before it closes the connection. Raises DescriptorError, PeerLostError, or OSError.
    """
    if descriptor.host != host_id():
        raise DescriptorError("the peer is on another machine")
    with greeted(descriptor, incarnation_id, patience_s) as (connection, _, fds):
        rows = _mapped(fds, descriptor)
    return connection, rows


def _mapped(fds: list[int], descriptor: PeerDescriptor) -> Rows:
    """Map the peer's memfd as a uint8 array [num_rows, row_bytes], and touch its pages.

    Raises PeerLostError unless the size is sealed and equals the size in the descriptor, because an access beyond the
    end of the file would raise SIGBUS.
    """
    size = descriptor.num_rows * descriptor.row_bytes
    sealed = 0
    with contextlib.suppress(OSError):  # not a memfd
        sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK if fds else 0
    if not sealed or os.fstat(fds[0]).st_size != size:
        raise PeerLostError(f"the peer did not send a sealed memory of {size} bytes")
    flat = np.frombuffer(mmap.mmap(fds[0], size), np.uint8)
    flat[:: mmap.PAGESIZE].max()  # only read, because the pool is in use
    return flat.reshape(descriptor.num_rows, descriptor.row_bytes)


def runs(source: Sequence[int], target: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, end) of up to `limit` indices. The rows in a range are adjacent in both sequences."""
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
