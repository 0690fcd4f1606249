"""A TCP channel's receiving end without its socket: what a writer might say, as bytes that are all there at once."""

import asyncio
from typing import Any

from shared.kv.memory import HostMemory
from shared.kv.tcp import FRAME, TcpChannel

BOOT = "0" * 32


class PlayedWire:
    """What a connection and its receiving end are to the channel; `answers` are what it sends back. `data` has no
    checksums of heads, which would keep nearly all that is drawn from being read any further."""

    def __init__(self, data: bytes) -> None:
        self.answers: list[bytes] = []
        self._data = memoryview(data)
        self._at = 0

    def expect(self, num_bytes: int) -> None:
        pass

    def wait(self, for_ever: bool = False) -> None:
        raise AssertionError("everything is there, or the end")

    def receive(self, buffers: list[memoryview]) -> int:
        begun = self._at
        for buffer in buffers:
            piece = self._data[self._at : self._at + len(buffer)]
            buffer[: len(piece)] = piece
            self._at += len(piece)
        if self._at == begun:
            raise EOFError
        return self._at - begun

    def head(self, may_idle: bool) -> memoryview:
        head = memoryview(bytearray(FRAME.size))
        self.fill(head)
        return head

    def fill(self, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            done += self.receive([buffer[done:]])

    def send(self, data: bytes) -> None:
        self.answers.append(data)


class PlayedReceiver:
    """A pool and its channel; `hear` is what its thread does with one connection, up to its end."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = HostMemory(num_rows, row_bytes)
        start = TcpChannel.start(self.memory, BOOT, lambda _: None, "127.0.0.1")
        self.channel: Any = self.loop.run_until_complete(start)

    def hear(self, data: bytes) -> list[bytes]:
        """Raises EOFError at the end of `data`, MalformedError when it is no push; the answers are in the wire's."""
        wire = PlayedWire(data)
        staging = self.memory.staging()
        try:
            self.channel._receive(wire, wire, staging)
        except EOFError:
            return wire.answers
        raise AssertionError("a channel hears on until its writer ends")

    def close(self) -> None:
        self.loop.run_until_complete(self.channel.close())
        self.loop.close()
        self.memory.close()
