"""The receiving end of a TCP channel without a socket: all bytes from the writer are available at once."""

import asyncio
from typing import Any

from shared.kv.memory import HostMemory
from shared.kv.tcp import FRAME, TcpChannel

INCARNATION = "0" * 32


class FakeWire:
    """The connection that the channel reads from. `answers` has the bytes that the channel sends back.

    `data` has no checksums of frame headers: with them, nearly every drawn input would be rejected at its first header.
    """

    def __init__(self, data: bytes) -> None:
        self.answers: list[bytes] = []
        self._data = memoryview(data)
        self._at = 0

    def expect(self, num_bytes: int) -> None:
        pass

    def wait(self, for_ever: bool = False) -> None:
        raise AssertionError("the wire has all bytes from the start and never waits")

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


class FakeReceiver:
    """A pool and its channel; `receive` does what the channel's thread does with one connection."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = HostMemory(num_rows, row_bytes)
        start = TcpChannel.start(self.memory, INCARNATION, lambda _: None, "127.0.0.1")
        self.channel: Any = self.loop.run_until_complete(start)

    def receive(self, data: bytes) -> list[bytes]:
        """Return the channel's answers. Raises MalformedError if `data` is not a sequence of pushes."""
        wire = FakeWire(data)
        staging = self.memory.staging()
        try:
            self.channel._receive(wire, wire, staging)
        except EOFError:
            return wire.answers
        raise AssertionError("the channel stopped reading before the writer closed")

    def close(self) -> None:
        self.loop.run_until_complete(self.channel.close())
        self.loop.close()
        self.memory.close()
