"""A process with one KV channel, for tests of channels between processes. It reads commands as lines of JSON."""

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.cuda.kv.cuda_ipc import CudaIpcChannel
from shared.kv.channel import PeerDescriptor
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from tests.shared.fake_cuda import FakeDeviceMemory

NUM_ROWS, ROW_BYTES = 32, 16_384
ALL_ROWS = range(NUM_ROWS)


class Peer:
    """A pool whose row i is filled with byte i + 1, and a channel for this pool. `lost` has the ids of the lost
    writers."""

    def __init__(self, memory: HostMemory | FakeDeviceMemory) -> None:
        self.memory = memory
        self.incarnation = secrets.token_hex(16)
        self.lost: list[str] = []
        self.channel: ShmChannel | TcpChannel | CudaIpcChannel
        for row in range(memory.num_rows):
            memory.rows[row] = (row + 1) % 256

    @classmethod
    async def start(cls, kind: str, directory: str, row_bytes: int = ROW_BYTES, **options: Any) -> "Peer":
        """Start a peer. `kind` is the name of a channel, followed by `:gpu` if the memory is on a GPU."""
        name, _, place = kind.partition(":")
        peer = cls((FakeDeviceMemory if place == "gpu" or name == "cuda_ipc" else HostMemory)(NUM_ROWS, row_bytes))
        common = peer.incarnation, peer.lost.append
        if name == "tcp":
            peer.channel = TcpChannel(peer.memory, *common, "127.0.0.1", **options)
        elif isinstance(peer.memory, HostMemory):
            peer.channel = ShmChannel(peer.memory, *common, directory, **options)
        else:
            peer.channel = CudaIpcChannel(peer.memory, *common, directory, **options)
        return peer

    async def close(self) -> None:
        await self.channel.close()
        self.memory.close()

    def described(self, **changes: Any) -> PeerDescriptor:
        """Return the descriptor of the channel with `changes` applied."""
        return replace(PeerDescriptor.unpack(self.channel.descriptor(), self.channel.name), **changes)

    def granted(self, rows: Sequence[int] = ALL_ROWS) -> bytes:
        """Grant a new reservation of the rows. Return its id."""
        reservation_id = secrets.token_bytes(16)
        self.channel.grant(reservation_id, rows)
        return reservation_id

    async def push(
        self, receiver: "Peer", source: Sequence[int], target: Sequence[int], reservation_id: bytes = b""
    ) -> None:
        """Push rows to another peer, by default into a new reservation of all rows of that peer."""
        reservation_id = reservation_id or receiver.granted()
        await self.channel.push(receiver.channel.descriptor(), reservation_id, source, target)

    def contents(self) -> list[list[int]]:
        """Return the distinct bytes of each row."""
        return [sorted(set(row.tobytes())) for row in self.memory.rows]


async def main(kind: str, directory: str) -> None:
    peer = await Peer.start(kind, directory)
    pushing: set[asyncio.Task[None]] = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        match json.loads(line):
            case ["describe"]:
                answer: Any = [peer.incarnation, peer.channel.descriptor().hex()]
            case ["grant", str(reservation_id), list(rows)]:
                answer = peer.channel.grant(bytes.fromhex(reservation_id), rows)
            case ["read"]:
                answer = peer.contents()
            case ["push forever", str(descriptor), str(reservation_id)]:
                rows = [*ALL_ROWS] * 8_000
                push = peer.channel.push(bytes.fromhex(descriptor), bytes.fromhex(reservation_id), rows, rows)
                pushing.add(asyncio.get_running_loop().create_task(push))
                answer = None
        print(json.dumps(answer), flush=True)
    await peer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
