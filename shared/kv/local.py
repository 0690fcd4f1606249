"""What the channels within one host share: a private unix socket over which a writer is let in and given our memory.

From then on the socket says nothing; its end of file is how each side learns, in either direction, that the other is
gone. Writes are one-sided: not `fenced`.
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
SWEEP_AGE_S = 60.0  # a younger socket may be bound and not listening yet


Memory = TypeVar("Memory", bound=KVMemory)


class LocalChannel(Generic[Memory]):
    """See KVChannel. `open` and `shut` fence nothing here, since a writer asks nobody.

    A subclass says what a writer is given (`_offer`), how it is used (`_link`), and which places it can write to.
    """

    name: str
    fenced = False

    def __init__(
        self,
        memory: Memory,
        boot: str,
        on_writer_lost: Callable[[str], None],
        server: socket.socket,
        patience_s: float,
    ) -> None:
        self._path = str(server.getsockname())
        self._card = PeerDescriptor(self.name, self._place(), self._path, boot, memory.row_bytes, memory.num_rows)
        self._peers = ChannelPeers(memory.row_bytes, memory.num_rows, self._link)
        self._listener = ChannelListener(server, boot, memory.row_bytes, self._serve, on_writer_lost, patience_s)
        self._patience_s = patience_s
        self._closed = False

    @classmethod
    async def start(
        cls,
        memory: Memory,
        boot: str,
        on_writer_lost: Callable[[str], None],
        directory: str | Path,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Listen in `directory`, which writers must see under the same path. Raises OSError when it cannot be."""
        check_incarnation_id(boot)
        return cls(memory, boot, on_writer_lost, _listening(directory), patience_s)

    def _place(self) -> str:
        """Where our memory is, for the card."""
        raise NotImplementedError

    def _reaches(self, place: str) -> bool:
        """Whether we can write to memory there."""
        raise NotImplementedError

    def _offer(self) -> tuple[bytes, list[int]]:
        """What a writer is given after the welcome: bytes, and descriptors."""
        raise NotImplementedError

    def _link(self, card: PeerDescriptor, _ticket: bytes) -> ChannelLink:
        raise NotImplementedError

    @property
    def num_rejected(self) -> int:
        """Connections that were closed for what they said, or for being too many."""
        return self._listener.num_rejected

    def descriptor(self) -> bytes:
        return self._card.pack()

    def grant(self, ticket: bytes, rows: Sequence[int]) -> None:
        check_open(ticket, rows, self._card.num_rows)

    def revoke(self, ticket: bytes) -> None:
        pass

    def fence_writer(self, boot: str) -> bool:
        return self._listener.fence_writer(boot)

    def reachable(self, card: bytes) -> bool:
        """Whether the card's owner is alive on this machine and its socket can be reached from this container.

        Raises CardError when it is no card of this channel, or its rows have another size than ours.
        """
        peer = PeerDescriptor.unpack(card, self.name)
        peer.check_row_bytes(self._card.row_bytes)
        return self.is_live(peer)

    def is_live(self, peer: PeerDescriptor) -> bool:
        """As `reachable`, whatever the size of its rows."""
        return self._reaches(peer.host) and _answers(peer.endpoint)

    async def push(self, card: bytes, ticket: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        await self._peers.push(PeerDescriptor.unpack(card, self.name), ticket, source, target)

    async def close(self) -> None:
        await self._peers.close()
        if self._closed:
            return
        self._closed = True
        _unlink(self._path)
        self._listener.close()
        self._let_go()

    def _let_go(self) -> None:
        """Of the memory, whoever may still hold this channel."""
        raise NotImplementedError

    def _serve(self, connection: socket.socket, _boot: str) -> None:
        data, descriptors = self._offer()
        socket.send_fds(connection, [WELCOME + data], descriptors)
        connection.settimeout(None)
        # Nothing but the end counts: hanging up on a writer that talks would leave it writing unobserved.
        while connection.recv(4096):
            pass


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # a full backlog: it is there, and busy
            return True
        except (OSError, ValueError):
            return False
    return True


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


def private(directory: str | Path) -> Path:
    """The directory, made where there is none. Raises OSError when others could put their sockets and cards there: a
    writer would hand them its prompts. What the machine's administrator made for us (a volume) is trusted."""
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid not in {os.getuid(), 0} or found.st_mode & stat.S_ISVTX:
        raise OSError(f"--kv-directory {path}: others may write there; give a directory of your own")
    return path


def host_id() -> str:
    """The same for all processes and containers of one running kernel, and for no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
