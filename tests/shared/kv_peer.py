"""One process with one KV channel, told what to do in lines of JSON: the other end of the channel tests."""

import asyncio
import json
import secrets
import sys
from typing import Any

from engine.cuda.kv.cuda_ipc import CudaIpcChannel
from shared.kv.channel import ChannelError
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from tests.shared.fake_cuda import FakeDeviceMemory

Channel = ShmChannel | TcpChannel | CudaIpcChannel
Memory = HostMemory | FakeDeviceMemory


class Peer:
    """A pool whose row i is filled with byte i + 1, its channel, and the boots of the writers it lost."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.boot = secrets.token_hex(16)
        self.lost: list[str] = []
        self.channel: Channel
        self._pushing: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, kind: str, num_rows: int, row_bytes: int, directory: str, **options: Any) -> "Peer":
        name, _, place = kind.partition(":")
        on_gpu = place == "gpu" or name == "cuda_ipc"
        peer = cls((FakeDeviceMemory if on_gpu else HostMemory)(num_rows, row_bytes))
        for row in range(num_rows):
            peer.memory.rows[row] = (row + 1) % 256
        told = peer.boot, peer.lost.append
        if name == "tcp":
            peer.channel = await TcpChannel.start(peer.memory, *told, "127.0.0.1", **options)
        elif isinstance(peer.memory, HostMemory):
            peer.channel = await ShmChannel.start(peer.memory, *told, directory, **options)
        else:
            peer.channel = await CudaIpcChannel.start(peer.memory, *told, directory, **options)
        return peer

    async def do(self, what: str, **options: Any) -> Any:
        """The answer to one command. Errors of a push are an answer: the name of their class, and their text."""
        return await getattr(self, what)(**options)

    async def close(self) -> None:
        await self.channel.close()
        self.memory.close()

    async def card(self) -> str:
        return self.channel.descriptor().hex()

    async def introduce(self) -> str:
        return self.boot

    async def open(self, ticket: str, rows: list[int]) -> None:
        self.channel.grant(bytes.fromhex(ticket), rows)

    async def shut(self, ticket: str) -> None:
        self.channel.revoke(bytes.fromhex(ticket))

    async def read(self) -> list[list[int]]:
        """For each row, the different bytes in it."""
        return [sorted(set(row.tobytes())) for row in self.memory.rows]

    async def push(self, card: str, ticket: str, source: list[int], target: list[int]) -> list[str]:
        try:
            await self.channel.push(bytes.fromhex(card), bytes.fromhex(ticket), source, target)
        except ChannelError as error:
            return [type(error).__name__, str(error)]
        return []

    async def push_on_and_on(self, card: str, ticket: str) -> None:
        """Begin a push that lasts until somebody dies."""
        rows = list(range(len(self.memory.rows))) * 8_000
        pushing = self.channel.push(bytes.fromhex(card), bytes.fromhex(ticket), rows, rows)
        self._pushing.add(asyncio.get_running_loop().create_task(pushing))


async def main(kind: str, num_rows: str, row_bytes: str, directory: str) -> None:
    peer = await Peer.start(kind, int(num_rows), int(row_bytes), directory)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await peer.do(**json.loads(line))), flush=True)
    await peer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
