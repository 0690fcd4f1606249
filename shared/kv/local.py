"""The base class of channels within one host. A writer receives access to our memory over a private unix socket.

Afterwards, the socket carries no data, and the end of its stream means that the other side has ended. Writes are
one-sided, so the channels are not `fenced`.
"""

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.kv.channel import PeerDescriptor
from shared.kv.connections import ANSWER, WELCOME, Memory, SocketChannel, check_answer, pack_greeting

PATIENCE_S = 2.0
SWEEP_AGE_S = 60.0  # younger sockets are not removed, because they may not be listening yet


class LocalChannel(SocketChannel[Memory]):
    """See KVChannel. A subclass defines what a writer gets (`_offer`) and how we connect as a writer (`_link`). It may
    override where our memory is (`_place`) and which locations we can reach (`_reaches`).
    """

    def __init__(
        self,
        memory: Memory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        directory: str | Path,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Listen in `directory`, which writers must see under the same path. Raises OSError if that fails."""
        server = _listening(Path(directory))
        self._memory = memory
        self._path = Path(str(server.getsockname()))
        address = self._place(), str(self._path)
        super().__init__(memory, incarnation_id, on_writer_lost, server, address, patience_s)

    def _place(self) -> str:
        """Return the location of our memory, which is a part of our descriptor."""
        return host_id()

    def _reaches(self, place: str) -> bool:
        """Return whether we can write to memory at this location."""
        return place == host_id()

    def _offer(self) -> tuple[bytes, list[int]]:
        """Return the bytes and file descriptors that a writer gets after the welcome."""
        raise NotImplementedError

    def reachable(self, descriptor: bytes) -> bool:
        """Return whether the owner is alive on this machine and its socket can be reached from this container."""
        return super().reachable(descriptor) and self.is_live(PeerDescriptor.unpack(descriptor, self.name))

    def is_live(self, peer: PeerDescriptor) -> bool:
        """Return the result of `reachable`, but accept any row size."""
        return self._reaches(peer.host) and _answers(peer.endpoint)

    async def close(self) -> None:
        self._path.unlink(missing_ok=True)
        await super().close()

    def _serve(self, connection: socket.socket) -> None:
        data, descriptors = self._offer()
        socket.send_fds(connection, [WELCOME + data], descriptors)
        # Ignore unexpected bytes until the writer ends. Even a disconnected writer could still write to our memory.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
        while connection.recv(4096):
            pass


@contextlib.contextmanager
def greeted(
    descriptor: PeerDescriptor, incarnation_id: str, patience_s: float, offer_bytes: int = 0
) -> Iterator[tuple[socket.socket, bytes, list[int]]]:
    """Connect to the owner of the descriptor. Yield the connection, and the bytes and file descriptors from the owner.

    When the `with` block ends, the file descriptors are closed. The connection is closed only if the block raised an
    exception. Raises ChannelError or OSError.
    """
    with contextlib.ExitStack() as files, contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(patience_s)
        connection.connect(descriptor.endpoint)
        connection.sendall(pack_greeting(descriptor, incarnation_id))
        data, fds, _, _ = socket.recv_fds(connection, ANSWER.size + offer_bytes, 1, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            files.callback(os.close, fd)
        check_answer(data[: ANSWER.size])
        yield connection, data[ANSWER.size :], fds
        undo.pop_all()


def _answers(path: str) -> bool:
    """Return whether a process listens on the unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # the backlog is full: the owner is alive but busy
            return True
        except (OSError, ValueError):
            return False
    return True


def _listening(directory: Path) -> socket.socket:
    """Return a listening unix socket with a random name, which only our user can reach.

    First remove the sockets that killed processes left in the directory: those that are old and have no listener.
    """
    for old in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError):
            if old.is_socket() and time.time() - old.stat().st_mtime > SWEEP_AGE_S and not _answers(str(old)):
                old.unlink()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = directory.absolute() / secrets.token_hex(16)
    try:
        os.fchmod(server.fileno(), 0o600)  # set before `bind`, so that the file never exists with a wider mode
        server.bind(str(path))
        server.listen(128)
    except OSError as error:
        server.close()
        path.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot listen on the unix socket {path}: {error}") from error
    return server


def private(directory: str | Path) -> Path:
    """Create the directory if needed, and return it. Raises OSError if other users can create files in it.

    Such users could create sockets there, to which writers would send prompts. A directory that belongs to root, such
    as a mounted volume, is trusted if it has no sticky bit (/tmp has one).
    """
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    is_open = found.st_uid != 0 and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid not in {os.getuid(), 0} or is_open or found.st_mode & stat.S_ISVTX:
        raise OSError(f"--kv-directory {path}: other users can write there; give a directory of your own")
    return path


def host_id() -> str:
    """Return the boot id of the kernel, which is the same in all containers of a machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
