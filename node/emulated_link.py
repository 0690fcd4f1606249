"""A KV channel that takes the time of an emulated link, over a real channel that moves the (much smaller) rows."""

import asyncio
from collections.abc import Sequence

from engine.emulation import Emulation
from shared.kv.channel import KVChannel


class EmulatedLink:
    """Pushes of one node share its link: each begins when the one before it ends, in the order of their asking."""

    def __init__(self, channel: KVChannel, emulation: Emulation, block_tokens: int) -> None:
        self.name = channel.name
        self.fenced = channel.fenced
        self._channel = channel
        self._latency_s = emulation.link.latency_s
        self._block_s = block_tokens * emulation.kv_bytes_per_token / emulation.link.bytes_per_s
        self._free_at = 0.0  # of the loop's clock

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        ends = max(loop.time(), self._free_at) + self._latency_s + len(source) * self._block_s
        self._free_at = ends
        await self._channel.push(card, ticket, source, target)
        await asyncio.sleep(ends - loop.time())

    def descriptor(self) -> bytes:
        return self._channel.descriptor()

    def grant(self, ticket: bytes, rows: Sequence[int]) -> None:
        self._channel.grant(ticket, rows)

    def revoke(self, ticket: bytes) -> None:
        self._channel.revoke(ticket)

    def fence_writer(self, boot: str) -> bool:
        return self._channel.fence_writer(boot)

    def reachable(self, card: bytes) -> bool:
        return self._channel.reachable(card)

    async def close(self) -> None:
        await self._channel.close()
