"""A KV channel that copies no KV: a prefill node computes in the pool of the decode node on the same device.

The decode node shares its memory (`PoolOwner`) and writes a descriptor of the memory to a file in a common directory. A
prefill node has no pool of its own. When the prefill node starts, it maps the shared memory (`PoolClient`). It then
computes each prompt in the blocks that the decode node reserved for the prompt. A client keeps a connection of the
channel `shm` or `cuda_ipc` open until the client ends. The channel `pool` is not `fenced`.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from engine.cuda.kv import cuda_ipc
from engine.cuda.kv.driver import CudaDevice, CudaRegion
from shared.kv import shm
from shared.kv.channel import ChannelError, DescriptorError, PeerDescriptor, PeerLostError
from shared.kv.connections import hung_up
from shared.kv.local import LocalChannel
from shared.kv.memory import InPlaceStaging, Rows, Staging, checksums

log = logging.getLogger("baton.kv")
NAME = "pool"
POLL_S = 0.2


def descriptor_file(directory: str | Path, gpu: CudaDevice | None) -> Path:
    """Return the path of the descriptor file of the pool on `gpu`, or on the host if `gpu` is None. Each GPU has its
    own file."""
    return Path(directory) / f"{NAME}-{gpu.uuid if gpu is not None else 'host'}"


class PoolOwner:
    """The decode node's end of the channel; see KVChannel. Clients connect to `inner`. `close` also closes `inner`."""

    name = NAME
    fenced = False

    def __init__(self, inner: LocalChannel[Any], path: Path) -> None:
        """Write the descriptor to `path`. Raises OSError if `path` belongs to another running decode node."""
        self._inner = inner
        self._path = path
        with path.with_suffix(".lock").open("w") as lock:  # until it is closed, no other process passes this check
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_live(inner, path):
                raise OSError(
                    f"--kv-channel pool: {path} is the pool of another decode node; only one node per device can share "
                    "its pool"
                )
            written = path.with_suffix(".new")
            written.write_bytes(inner.descriptor())
            written.replace(path)

    def descriptor(self) -> bytes:
        return self._inner.descriptor()

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        self._inner.grant(reservation_id, rows)

    def revoke(self, reservation_id: bytes) -> None:
        """Do nothing: clients write directly into the memory, so this process cannot refuse a write."""

    def fence_writer(self, incarnation_id: str) -> bool:
        return self._inner.fence_writer(incarnation_id)

    def reachable(self, descriptor: bytes) -> bool:
        return False

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        raise ChannelError("the owner of a shared pool does not push KV")

    async def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.read_bytes() == self.descriptor():
                self._path.unlink()
        await self._inner.close()


def _is_live(channel: LocalChannel[Any], path: Path) -> bool:
    """Return whether the process that wrote `path` still runs. A process that was killed leaves its file behind."""
    try:
        return channel.is_live(PeerDescriptor.unpack(path.read_bytes(), channel.name))
    except (FileNotFoundError, DescriptorError):
        return False


class PoolClient:
    """The prefill node's end of the channel, which is also the node's pool; see KVChannel and KVMemory.

    On the host, `rows` is uint8 [num_rows, row_bytes]. On a GPU, `rows` is empty and `region` is the memory. Until
    `close` is called, the owner assumes that this node may write. Call `close` only after all computing has ended.
    """

    name = NAME
    fenced = False
    sums: ClassVar[str] = "xxh3"

    def __init__(
        self, descriptor: PeerDescriptor, connection: socket.socket, rows: Rows, region: CudaRegion | None
    ) -> None:
        self.rows = rows
        self.region = region
        self.num_rows, self.row_bytes = descriptor.num_rows, descriptor.row_bytes
        self.owner = descriptor.incarnation_id
        self._descriptor = descriptor.pack()
        self._connection = connection

    @classmethod
    def attach(
        cls, directory: str | Path, gpu: CudaDevice | None, incarnation_id: str, wait_s: float, patience_s: float
    ) -> Self:
        """Wait for an owner on this device, and map its pool. Raises ValueError if no owner is found in `wait_s`
        seconds."""
        path, until = descriptor_file(directory, gpu), time.monotonic() + wait_s
        while True:
            try:
                return cls._attached(path.read_bytes(), gpu, incarnation_id, patience_s)
            except (OSError, ChannelError) as error:
                reason = str(error)
            if time.monotonic() > until:
                raise ValueError(
                    f"--kv-channel pool: no decode node shares its pool in {path.parent} ({reason}): start one on this "
                    "device with the same --kv-channel and --kv-directory"
                )
            time.sleep(POLL_S)

    @classmethod
    def _attached(cls, data: bytes, gpu: CudaDevice | None, incarnation_id: str, patience_s: float) -> Self:
        if gpu is None:
            descriptor = PeerDescriptor.unpack(data, shm.ShmChannel.name)
            return cls(descriptor, *shm.attach(descriptor, incarnation_id, patience_s), None)
        descriptor = PeerDescriptor.unpack(data, cuda_ipc.CudaIpcChannel.name)
        connection, region = cuda_ipc.attach(descriptor, incarnation_id, gpu, patience_s)
        return cls(descriptor, connection, np.empty((0, 0), np.uint8), region)

    def fitting(self, row_bytes: int) -> Self:
        """Return this client. Raises ValueError if the owner's blocks do not have `row_bytes` bytes."""
        if row_bytes != self.row_bytes:
            raise ValueError(
                f"--kv-channel pool: the decode node's KV blocks have {self.row_bytes} bytes, ours {row_bytes}: both "
                "need the same --model, --kv-cache-dtype and --block-size"
            )
        return self

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Start watching the owner. When the owner ends, call `on_lost` once, on the running event loop."""
        loop = asyncio.get_running_loop()

        def look() -> None:
            if hung_up(self._connection):
                loop.remove_reader(self._connection)
                on_lost()

        loop.add_reader(self._connection, look)

    def checksums(self, rows: Sequence[int]) -> bytes:
        return checksums(self.rows, rows)

    def staging(self) -> Staging:
        return InPlaceStaging(self.rows)

    def descriptor(self) -> bytes:
        return b""

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        raise ValueError("this process only maps the KV pool of another process: reserve at its owner")

    def revoke(self, reservation_id: bytes) -> None:
        """Do nothing: a client has no reservations."""

    def fence_writer(self, incarnation_id: str) -> bool:
        return True

    def reachable(self, descriptor: bytes) -> bool:
        return descriptor == self._descriptor and not hung_up(self._connection)

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        """Copy nothing, because the rows were computed in the decode node's pool. Raises PeerLostError if that node has
        ended."""
        if not self.reachable(descriptor):
            raise PeerLostError("the decode node that owns the shared pool is gone")

    async def close(self) -> None:
        if self._connection.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        self.rows = np.empty((0, 0), np.uint8)
        if self.region is not None:
            self.region.close()
        self._connection.close()
