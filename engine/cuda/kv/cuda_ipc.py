"""The KV channel between GPUs of one host: the writer maps the receiver's memory and copies rows on the device.

The receiver sends its allocation as a file descriptor over the socket of `shared.kv.local`. Writes are one-sided, so
the channel is not `fenced`. A receiver is `reachable` if the writer sees the receiver's GPU, and the writer's GPU can
copy to the receiver's GPU. GPUs are identified by UUID, because ordinals differ between processes.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.cuda.kv.driver import CudaDevice, CudaError, CudaRegion, CudaStream
from shared.kv.channel import DescriptorError, PeerDescriptor, PeerLostError
from shared.kv.connections import hung_up
from shared.kv.local import LocalChannel, greeted, host_id
from shared.kv.memory import KVMemory
from shared.kv.shm import runs

OFFER = struct.Struct("<Q")  # size of the region in bytes
# Number of bytes copied between two checks whether to stop. Within one GPU, the copy takes half a millisecond, and a
# check takes far less.
PIECE_BYTES = 1 << 30
# How long to wait after a connection closes: if the peer's process was killed, its last copies may still be running.
SETTLE_S = 0.1


class DeviceRows(KVMemory, Protocol):
    """KV memory on a GPU. The rows are contiguous and begin at the start of `region`."""

    @property
    def region(self) -> CudaRegion: ...


class CudaIpcChannel(LocalChannel[DeviceRows]):
    """See KVChannel.

    The rows of a push must be complete. A push does not wait for the stream that computes, because the engine reports a
    chunk only after the chunk's step has ended.
    """

    name = "cuda_ipc"

    def _place(self) -> str:
        return f"{host_id()} {self._memory.region.gpu.uuid}"

    def _reaches(self, place: str) -> bool:
        host, _, uuid = place.partition(" ")
        return host == host_id() and self._memory.region.gpu.reaches(uuid)

    def _offer(self) -> tuple[bytes, list[int]]:
        region = self._memory.region
        assert region.descriptor is not None
        return OFFER.pack(region.size), [region.descriptor]

    def _link(self, descriptor: PeerDescriptor, _reservation_id: bytes) -> "_Copier":
        if not self._reaches(descriptor.host):
            raise DescriptorError("this process cannot write to the peer's GPU")
        return _Copier(descriptor, self._own.incarnation_id, self._memory.region, self._patience_s)

    def _serve(self, connection: socket.socket) -> None:
        super()._serve(connection)
        if not self._closed:
            time.sleep(SETTLE_S)


class _Copier:
    """Copies rows to a peer's pool, which is mapped into this process while the peer is alive."""

    def __init__(self, descriptor: PeerDescriptor, incarnation_id: str, ours: CudaRegion, patience_s: float) -> None:
        self._ours = ours
        self._row_bytes = descriptor.row_bytes
        with contextlib.ExitStack() as undo:
            self.socket, self._theirs = attach(descriptor, incarnation_id, ours.gpu, patience_s)
            undo.callback(self.socket.close)
            undo.callback(self._theirs.close)
            self._stream = CudaStream(ours.gpu)
            undo.pop_all()

    def push(
        self, _reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Copy each run of adjacent rows with one call. After each PIECE_BYTES, wait for the copies. Other threads run
        meanwhile."""
        size, started = self._row_bytes, 0
        for start, end in runs(source, target, max(1, PIECE_BYTES // size)):
            if not started and (stopped() or hung_up(self.socket)):
                break
            to, from_ = self._theirs.address + target[start] * size, self._ours.address + source[start] * size
            self._stream.copy(to, from_, (end - start) * size)
            started += (end - start) * size
            if started >= PIECE_BYTES or end == len(source):
                self._stream.wait()
                started = 0
        if hung_up(self.socket):
            raise PeerLostError("the peer has ended")

    def interrupt(self) -> None:
        """Do nothing: a push checks `stopped` after each piece, and needs an open connection until the push ends."""

    def close(self) -> None:
        with contextlib.suppress(CudaError):  # raised if the device is lost; in that case, no copy is in progress
            self._stream.wait()
            self._stream.close()
            self._theirs.close()
        self.socket.close()  # last: when it is closed, the peer knows that no more writes follow


def attach(
    descriptor: PeerDescriptor, incarnation_id: str, gpu: CudaDevice, patience_s: float
) -> tuple[socket.socket, CudaRegion]:
    """Connect to the descriptor's owner and map the owner's memory for `gpu`. Return the connection and the mapping.

    Raises DescriptorError if the owner refuses the descriptor, PeerLostError if the owner ends or offers no memory, and
    OSError if the driver or the socket fails.
    """
    with greeted(descriptor, incarnation_id, patience_s, OFFER.size) as (connection, data, fds):
        if len(data) != OFFER.size:
            raise PeerLostError("the peer offered no memory")
        (size,) = OFFER.unpack(data)
        if size < descriptor.num_rows * descriptor.row_bytes or not fds:
            raise PeerLostError(
                f"the peer did not offer memory for {descriptor.num_rows} rows of {descriptor.row_bytes} bytes"
            )
        region = CudaRegion.attach(gpu, size, fds[0])
    return connection, region
