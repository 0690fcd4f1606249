"""A KV channel whose pushes take as long as they would take on the emulated link.

The pushes go over a real channel, but move the small rows of the hash runner, not the large rows of the emulated model.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from engine.emulation import Emulation
from shared.kv.channel import KVChannel


class EmulatedLink:
    """A link that carries one push at a time: each push begins when the node's previous push has ended."""

    def __init__(self, channel: KVChannel, emulation: Emulation, block_tokens: int) -> None:
        self._channel = channel
        self._latency_s = emulation.link.latency_s
        self._block_s = block_tokens * emulation.kv_bytes_per_token / emulation.link.bytes_per_s
        self._free_at = 0.0  # when the link becomes free, on the event loop's clock

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        loop = asyncio.get_running_loop()
        ends = max(loop.time(), self._free_at) + self._latency_s + len(source) * self._block_s
        self._free_at = ends
        await self._channel.push(descriptor, reservation_id, source, target)
        await asyncio.sleep(ends - loop.time())

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real channel, because only `push` is emulated."""
        return getattr(self._channel, name)
