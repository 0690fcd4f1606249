"""The KV channel within one host: the writer maps the receiver's memfd and copies rows straight into its pool.

The descriptor travels once, over a unix socket (SCM_RIGHTS). From then on the socket says nothing; its end of file
is how each side learns, in either direction, that the other is gone. Writes are one-sided: not `fenced`.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from shared.kv.channel import Card, CardError, PeerLostError, check_boot, check_open
from shared.kv.listener import ANSWER, WELCOME, Listener, check_answer, hello
from shared.kv.memory import HostMemory, Rows
from shared.kv.peers import Peers, hung_up

PATIENCE_S = 2.0
SWEEP_AGE_S = 60.0  # a younger socket may be bound and not listening yet
PIECE_BYTES = 8 << 20  # copied between two looks at whether to go on: a few milliseconds


class ShmChannel:
    """See KVChannel. `open` and `shut` fence nothing here, since a writer asks nobody."""

    name = "shm"
    fenced = False

    def __init__(
        self,
        memory: HostMemory,
        boot: str,
        on_writer_lost: Callable[[str], None],
        server: socket.socket,
        patience_s: float,
    ) -> None:
        num_rows, row_bytes = memory.rows.shape
        self._rows = memory.rows
        self._fd = os.dup(memory.fd)  # ours, so that a closed memory can never send out another file's number
        self._path = str(server.getsockname())
        self._card = Card(self.name, host_id(), self._path, boot, row_bytes, num_rows)
        self._peers = Peers(row_bytes, num_rows, lambda card: _Mapping(card, boot, self._rows, patience_s))
        self._listener = Listener(server, boot, row_bytes, self._serve, on_writer_lost, patience_s)
        self._closed = False

    @classmethod
    async def start(
        cls,
        memory: HostMemory,
        boot: str,
        on_writer_lost: Callable[[str], None],
        directory: str | Path,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Listen in `directory`, which writers must see under the same path. Raises OSError when it cannot be."""
        check_boot(boot)
        return cls(memory, boot, on_writer_lost, _listening(directory), patience_s)

    @property
    def num_rejected(self) -> int:
        """Connections that were closed for what they said, or for being too many."""
        return self._listener.num_rejected

    def card(self) -> bytes:
        return self._card.pack()

    def open(self, ticket: bytes, rows: Sequence[int]) -> None:
        check_open(ticket, rows, len(self._rows))

    def shut(self, ticket: bytes) -> None:
        pass

    def bar(self, boot: str) -> bool:
        return self._listener.bar(boot)

    def reachable(self, card: bytes) -> bool:
        """Whether the card's owner is alive on this machine and its socket can be reached from this container.

        Raises CardError when it is no shm card, or its rows have another size than ours.
        """
        peer = Card.unpack(card, self.name)
        peer.check_row_bytes(self._rows.shape[1])
        if peer.host != self._card.host:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(peer.endpoint)
            except BlockingIOError:  # a full backlog: it is there, and busy
                return True
            except (OSError, ValueError):
                return False
        return True

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        await self._peers.push(Card.unpack(card, self.name), ticket, source, target)

    async def close(self) -> None:
        await self._peers.close()
        if self._closed:
            return
        self._closed = True
        _unlink(self._path)
        self._listener.close()
        os.close(self._fd)
        self._rows = np.empty((0, 0), np.uint8)  # lets go of the memory, whoever may still hold this channel

    def _serve(self, connection: socket.socket, _boot: str) -> None:
        socket.send_fds(connection, [WELCOME], [self._fd])
        connection.settimeout(None)
        # Nothing but the end counts: hanging up on a writer that talks would leave it writing unobserved.
        while connection.recv(4096):
            pass


def _listening(directory: str | Path) -> socket.socket:
    """A unix socket that only our user can reach; its random name clashes with no leftover of a dead process."""
    _sweep(Path(directory))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = Path(directory).absolute() / secrets.token_hex(16)
    try:
        os.fchmod(server.fileno(), 0o600)  # before bind: the file never exists with a wider mode
        server.bind(str(path))
        server.listen(128)
    except OSError as error:
        server.close()
        path.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot listen on the unix socket {path}: {error}") from error
    return server


def _sweep(directory: Path) -> None:
    """Removes the sockets that killed processes left: old ones on which nobody listens."""
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError):
            if not path.is_socket() or time.time() - path.stat().st_mtime < SWEEP_AGE_S:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(0.1)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


class _Mapping:
    """A peer's pool, mapped into this process for as long as the peer lives."""

    def __init__(self, card: Card, boot: str, rows: Rows, patience_s: float) -> None:
        if card.host != host_id():
            raise CardError("the peer is on another machine")
        self._ours = rows
        with contextlib.ExitStack() as undo:
            self.socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self.socket.settimeout(patience_s)
            self.socket.connect(card.endpoint)
            self.socket.sendall(hello(card, boot))
            self._theirs = self._received(card)
            undo.pop_all()

    def push(self, _ticket: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]) -> None:
        """Copy row by row at the speed of memcpy; numpy lets the other threads run meanwhile."""
        row_bytes = self._ours.shape[1]
        copied = 0  # bytes since the last look
        for start, end in runs(source, target, max(1, PIECE_BYTES // row_bytes)):
            if copied >= PIECE_BYTES or not start:
                copied = 0
                if stopped() or hung_up(self.socket):
                    break
            count = end - start
            copied += count * row_bytes
            from_rows, to_rows = (slice(first, first + count) for first in (source[start], target[start]))
            self._theirs[to_rows] = self._ours[from_rows]  # in no local name: a traceback would keep it mapped
        if hung_up(self.socket):
            raise PeerLostError("it has ended")

    def interrupt(self) -> None:
        """Nothing: a push looks at `stopped` every few milliseconds, and the peer must not see an end before that."""

    def close(self) -> None:
        self._theirs = np.empty((0, 0), np.uint8)  # unmaps
        self.socket.close()  # last, since this tells the peer that we write no more

    def _received(self, card: Card) -> Rows:
        answer, fds, _, _ = socket.recv_fds(self.socket, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            check_answer(answer)
            if not fds:
                raise PeerLostError("it sent no memory")
            return _map(fds[0], card)
        finally:
            for fd in fds:
                os.close(fd)


def _map(fd: int, card: Card) -> Rows:
    """uint8 [num_rows, row_bytes] over the peer's memfd, its pages touched.

    Raises PeerLostError unless its size is what the card says, for ever: a mapping longer than its file is a SIGBUS.
    """
    size = card.num_rows * card.row_bytes
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # not a memfd
        sealed = 0
    if not sealed or os.fstat(fd).st_size != size:
        raise PeerLostError(f"what it sent is not a sealed memory of {size} bytes")
    flat = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    flat[:: mmap.PAGESIZE].max()  # a read: the pool is in use
    return flat.reshape(card.num_rows, card.row_bytes)


def runs(source: Sequence[int], target: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Split positions into [start, end) whose rows are adjacent on both sides, at most `limit` long."""
    start = 0
    for end in range(1, len(source) + 1):
        if (
            end == len(source)
            or end - start == limit
            or source[end] != source[end - 1] + 1
            or target[end] != target[end - 1] + 1
        ):
            yield start, end
            start = end


def host_id() -> str:
    """The same for all processes and containers of one running kernel, and for no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
