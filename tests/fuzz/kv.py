"""The receiving end of a TCP channel, for tests. It gets all bytes of a connection at once."""

import asyncio
import contextlib
import socket

from shared.kv.connections import set_timeout
from shared.kv.memory import HostMemory
from shared.kv.tcp import ACK, FRAME, TcpChannel, checked

INCARNATION = "0" * 32


def with_checksums(data: bytes, row_bytes: int) -> bytes:
    """Insert a checksum after each header. Without checksums, nearly every input would fail at its first header."""
    frames, at = [], 0
    while len(data) - at >= FRAME.size:
        head = data[at : at + FRAME.size]
        size = FRAME.size + FRAME.unpack(head)[2] * (4 + row_bytes)
        frames.append(checked(head) + data[at + FRAME.size : at + size])
        at += size
    return b"".join([*frames, data[at:]])


class FakeReceiver:
    """A pool and its channel. `receive` reads one connection, as a thread of the channel does."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = HostMemory(num_rows, row_bytes)

        async def start() -> TcpChannel:
            return TcpChannel(self.memory, INCARNATION, lambda _: None, "127.0.0.1")

        self.channel = self.loop.run_until_complete(start())

    def receive(self, data: bytes) -> list[bytes]:
        """Return the channel's answers to the frames in `data`, which have no header checksums.

        Raises MalformedError if `data` is not a sequence of pushes.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(with_checksums(data, self.memory.row_bytes))
            ours.shutdown(socket.SHUT_WR)
            set_timeout(theirs, 2.0)
            with contextlib.suppress(EOFError):
                self.channel.receive(theirs, self.memory.staging())
            theirs.close()
            answers = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        return [answers[at : at + ACK.size] for at in range(0, len(answers), ACK.size)]

    def close(self) -> None:
        self.loop.run_until_complete(self.channel.close())
        self.loop.close()
        self.memory.close()
