"""The base of the channels within one host: a private unix socket, over which a writer receives our memory.

After that, the socket carries no data; its end of file shows each side that the other is gone. Writes are one-sided, so
the channels are not `fenced`.
"""

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Self, TypeVar

from shared.kv.channel import PeerDescriptor, check_incarnation_id, check_open
from shared.kv.listener import WELCOME, ChannelListener
from shared.kv.peers import ChannelLink, ChannelPeers
from shared.kv.staging import KVMemory

PATIENCE_S = 2.0
SWEEP_AGE_S = 60.0  # a younger socket may be bound but not listening yet


Memory = TypeVar("Memory", bound=KVMemory)


class LocalChannel(Generic[Memory]):
    """See KVChannel. `grant` only checks its arguments, and `revoke` does nothing, since writes are one-sided.

    A subclass defines what a writer receives (`_offer`), how a writer uses it (`_link`), and where it can write
    (`_place`, `_reaches`).
    """

    name: str
    fenced = False

    def __init__(
        self,
        memory: Memory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        server: socket.socket,
        patience_s: float,
    ) -> None:
        self._path = str(server.getsockname())
        self._descriptor = PeerDescriptor(
            self.name, self._place(), self._path, incarnation_id, memory.row_bytes, memory.num_rows
        )
        self._peers = ChannelPeers(memory.row_bytes, memory.num_rows, self._link)
        self._listener = ChannelListener(
            server, incarnation_id, memory.row_bytes, self._serve, on_writer_lost, patience_s
        )
        self._patience_s = patience_s
        self._closed = False

    @classmethod
    async def start(
        cls,
        memory: Memory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        directory: str | Path,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Listen in `directory`, which writers must see under the same path. Raises OSError if that fails."""
        check_incarnation_id(incarnation_id)
        return cls(memory, incarnation_id, on_writer_lost, _listening(directory), patience_s)

    def _place(self) -> str:
        """Return where our memory is, for the descriptor."""
        raise NotImplementedError

    def _reaches(self, place: str) -> bool:
        """Return whether we can write to memory there."""
        raise NotImplementedError

    def _offer(self) -> tuple[bytes, list[int]]:
        """Return what is sent to a writer after the welcome: bytes, and file descriptors."""
        raise NotImplementedError

    def _link(self, descriptor: PeerDescriptor, _reservation_id: bytes) -> ChannelLink:
        raise NotImplementedError

    @property
    def num_rejected(self) -> int:
        """The number of rejected connections: protocol error or connection limit."""
        return self._listener.num_rejected

    def descriptor(self) -> bytes:
        return self._descriptor.pack()

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        check_open(reservation_id, rows, self._descriptor.num_rows)

    def revoke(self, reservation_id: bytes) -> None:
        pass

    def fence_writer(self, incarnation_id: str) -> bool:
        return self._listener.fence_writer(incarnation_id)

    def reachable(self, descriptor: bytes) -> bool:
        """Return whether the owner is alive on this machine, and this container can reach its socket.

        Raises DescriptorError if it is not a descriptor of this channel, or its rows differ in size from ours.
        """
        peer = PeerDescriptor.unpack(descriptor, self.name)
        peer.check_row_bytes(self._descriptor.row_bytes)
        return self.is_live(peer)

    def is_live(self, peer: PeerDescriptor) -> bool:
        """Return the same as `reachable`, but accept rows of any size."""
        return self._reaches(peer.host) and _answers(peer.endpoint)

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        await self._peers.push(PeerDescriptor.unpack(descriptor, self.name), reservation_id, source, target)

    async def close(self) -> None:
        await self._peers.close()
        if self._closed:
            return
        self._closed = True
        _unlink(self._path)
        self._listener.close()
        self._let_go()

    def _let_go(self) -> None:
        """Release the memory, even if other objects still refer to this channel."""
        raise NotImplementedError

    def _serve(self, connection: socket.socket, _incarnation_id: str) -> None:
        data, descriptors = self._offer()
        socket.send_fds(connection, [WELCOME + data], descriptors)
        connection.settimeout(None)
        # Read until the writer ends, and ignore the bytes: a writer that we disconnect could still write to the memory.
        while connection.recv(4096):
            pass


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # the backlog is full: the owner is alive but busy
            return True
        except (OSError, ValueError):
            return False
    return True


def _listening(directory: str | Path) -> socket.socket:
    """Return a listening unix socket that only our user can reach, with a random name."""
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
    """Remove the sockets of killed processes: those that are old and have no listener."""
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


def private(directory: str | Path) -> Path:
    """Return the directory, created if needed. Raises OSError if other users can create files there.

    They could create sockets and descriptors, to which writers would send their prompts. A directory that belongs to
    root, such as a mounted volume, is trusted.
    """
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid not in {os.getuid(), 0} or found.st_mode & stat.S_ISVTX:
        raise OSError(f"--kv-directory {path}: other users can write there; give a directory of your own")
    return path


def host_id() -> str:
    """Return the id of the running kernel, which all its processes and containers share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
