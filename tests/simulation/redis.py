"""An in-memory Redis with sets and with keys that expire. It may be down, slow or empty, or return invalid values."""

import asyncio
from typing import Any


class FakeRedis:
    """A Redis server and client with the methods that `shared.registry` uses. Connections are refused before `down_until`,
    calls time out before `hangs_until`, and values are truncated before `wrong_until`."""

    def __init__(self) -> None:
        self.keys: dict[str, tuple[bytes, float]] = {}
        self.sets: dict[str, dict[bytes, None]] = {}
        self.down_until = self.hangs_until = self.wrong_until = 0.0

    async def set(self, key: str, value: bytes, px: int | None = None, **_: Any) -> None:
        await self.answer()
        ends = asyncio.get_running_loop().time() + px / 1000 if px is not None else float("inf")
        self.keys[key] = (value, ends)

    async def sadd(self, key: str, *members: str | bytes) -> None:
        await self.answer()
        self.sets.setdefault(key, {}).update(dict.fromkeys(map(_encoded, members)))

    async def srem(self, key: str, *members: str | bytes) -> None:
        await self.answer()
        for member in members:
            self.sets.get(key, {}).pop(_encoded(member), None)

    async def delete(self, *keys: str) -> None:
        await self.answer()
        for key in keys:
            self.keys.pop(key, None)

    async def smembers(self, key: str) -> list[bytes]:
        await self.answer()
        return list(self.sets.get(key, {}))

    async def mget(self, keys: list[str] | list[bytes]) -> list[bytes | None]:
        await self.answer()
        return [self._read(_encoded(key).decode()) for key in keys]

    async def aclose(self) -> None:
        await asyncio.sleep(0)

    def flush(self) -> None:
        self.keys.clear()
        self.sets.clear()

    async def answer(self) -> None:
        """Wait for the time that an answer takes. Raises OSError if there is no answer."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(0.0005)
        if now < self.down_until:
            raise ConnectionRefusedError(111, "redis is down")
        if now < self.hangs_until:
            await asyncio.sleep(0.5)
            raise TimeoutError("redis does not answer")

    def _read(self, key: str) -> bytes | None:
        now = asyncio.get_running_loop().time()
        value, ends = self.keys.get(key, (b"", 0.0))
        if ends < now:
            return None
        return value[: len(value) // 2] if now < self.wrong_until else value


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
