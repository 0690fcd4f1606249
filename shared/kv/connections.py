"""The connections of a KV channel over sockets: a listener for writers to our pool, and the peers to which we write.

The greeting of a writer contains the id of a reservation: 16 random bytes, which the writer received in an RPC reply
over TLS. Over tcp, a writer is admitted only if its reservation is open. A unix socket is protected by its file
permissions instead.
"""

import asyncio
import contextlib
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from shared.kv.channel import (
    RESERVATION_ID_BYTES,
    ChannelError,
    DescriptorError,
    PeerDescriptor,
    PeerLostError,
    ReservationRefusedError,
    check_open,
    is_incarnation_id,
)
from shared.kv.memory import KVMemory

MAGIC = b"BTKV"
VERSION = 3
# Magic, version, bytes per row, incarnation id of the writer, incarnation id of the receiver, and reservation id.
HELLO = struct.Struct("<4sHxxI32s32s16s")
ANSWER = struct.Struct("<4sHH")  # magic, version, verdict
MAX_CONNECTIONS_PER_ADDRESS = 64  # enough for all nodes of a host; bounded, because each connection has a thread
MAX_CONNECTIONS_PER_WRITER = 4  # a writer uses one connection; lost connections may still be counted

Memory = TypeVar("Memory", bound=KVMemory)


# The receiver's answers to a greeting, and the errors that a writer raises for them.
ADMITTED, OTHER_ROW_BYTES, OTHER_INCARNATION, TOO_MANY, FENCED, NO_RESERVATION = range(6)
REFUSALS: dict[int, tuple[type[ChannelError], str]] = {
    OTHER_ROW_BYTES: (DescriptorError, "the peer's KV rows do not have the size in its descriptor"),
    OTHER_INCARNATION: (PeerLostError, "the peer has restarted"),
    TOO_MANY: (PeerLostError, "the peer has too many writers"),
    FENCED: (PeerLostError, "the peer has declared this node dead and reuses its rows"),
    NO_RESERVATION: (ReservationRefusedError, "the peer has closed the reservation, or never had it"),
}
WELCOME = ANSWER.pack(MAGIC, VERSION, ADMITTED)


class MalformedError(Exception):
    """The bytes on a connection violate the protocol."""


class Greeting(NamedTuple):
    """The first message of a writer. `owner` is the incarnation id of the process that the writer wants to reach."""

    row_bytes: int
    writer: str
    owner: str
    reservation_id: bytes

    @classmethod
    def unpack(cls, data: bytes) -> "Greeting":
        magic, version, row_bytes, writer, owner, reservation_id = HELLO.unpack(data)
        greeting = cls(row_bytes, writer.decode("ascii", "replace"), owner.decode("ascii", "replace"), reservation_id)
        if (magic, version) != (MAGIC, VERSION) or not is_incarnation_id(greeting.writer):
            raise MalformedError
        return greeting


def pack_greeting(
    descriptor: PeerDescriptor, incarnation_id: str, reservation_id: bytes = bytes(RESERVATION_ID_BYTES)
) -> bytes:
    """Return the greeting that the writer `incarnation_id` sends to the owner of `descriptor`."""
    names = incarnation_id.encode(), descriptor.incarnation_id.encode()
    return HELLO.pack(MAGIC, VERSION, descriptor.row_bytes, *names, reservation_id)


def check_answer(data: bytes) -> None:
    """Check `data`, the answer to a greeting. Raises ChannelError if the answer does not admit the writer."""
    if len(data) != ANSWER.size:
        raise PeerLostError("the peer closed the connection during the greeting")
    magic, version, verdict = ANSWER.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise PeerLostError(f"the peer's version of the KV protocol is not {VERSION}: run one version of Baton")
    if verdict != ADMITTED:
        kind, text = REFUSALS.get(verdict, (PeerLostError, "the peer refused the connection"))
        raise kind(text)


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Limit the time of each blocking call. `settimeout` would split a large send into many system calls."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises EOFError if they do not arrive within the timeout, or if the connection ends."""
    try:
        data = connection.recv(size, socket.MSG_WAITALL)
    except BlockingIOError as error:
        raise EOFError("the peer was silent for too long") from error
    if len(data) < size:
        raise EOFError("the peer closed the connection, or was silent for too long")
    return data


def hung_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed the connection or died. Reads nothing from the stream."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # our end is closed
        return True


@dataclass(eq=False)
class ChannelListener:
    """Accepts writers on `server` (bound and listening) until `close`. Must be created on the event loop.

    When a writer is admitted, `serve(connection)` runs in the connection's thread: it sends WELCOME, and returns when
    the connection ends. `on_writer_lost(incarnation_id)` is called on the loop when the writer's last connection has
    ended, unless our `close` ended it. `timeout_s` limits each blocking call on a connection.
    `is_open(reservation_id)` returns whether to admit a writer with this reservation.
    """

    _server: socket.socket
    _descriptor: PeerDescriptor
    _serve: Callable[[socket.socket], None]
    _is_open: Callable[[bytes], bool]
    _on_writer_lost: Callable[[str], None]
    _timeout_s: float

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards the attributes below
        self._threads: dict[socket.socket, threading.Thread] = {}
        # The number of open connections from each address, and of admitted connections of each writer (incarnation id).
        self._num_open: Counter[str] = Counter()
        self._fenced: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, which ends their threads, and wait for the threads. Idempotent."""
        with self._lock:
            self._closing = True
            threads = dict(self._threads)
        for connection in (self._server, *threads):
            with contextlib.suppress(OSError):  # raised if the connection has already ended
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *threads.values()):
            thread.join()
        self._server.close()

    def fence_writer(self, incarnation_id: str) -> bool:
        """Refuse connections of this writer from now on, and return True. If it is connected, only return False."""
        with self._lock:
            if not self._num_open[incarnation_id]:
                self._fenced.add(incarnation_id)
            return incarnation_id in self._fenced

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, address = self._server.accept()
            except OSError:  # `close` shut the socket down, a client disconnected, or no file descriptor is free
                time.sleep(0 if self._closing else 0.05)
                continue
            self._start(connection, str(address[0]) if address else "local")

    def _start(self, connection: socket.socket, address: str) -> None:
        thread = threading.Thread(target=self._run, args=(connection, address), name="kv-receive", daemon=True)
        with self._lock:
            if not self._closing and self._take(address, MAX_CONNECTIONS_PER_ADDRESS):
                try:
                    thread.start()  # the thread cannot remove itself before it is added, because both need the lock
                    self._threads[connection] = thread
                    return
                except RuntimeError:  # the system cannot start another thread
                    self._release(address)
        connection.close()

    def _run(self, connection: socket.socket, address: str) -> None:
        writer = ""  # set when the writer is admitted
        try:
            set_timeout(connection, self._timeout_s)
            greeting = Greeting.unpack(receive_exactly(connection, HELLO.size))
            verdict = self._verdict(greeting)
            if verdict == ADMITTED:
                writer = greeting.writer
                self._serve(connection)
            else:
                connection.sendall(ANSWER.pack(MAGIC, VERSION, verdict))
        except (MalformedError, OSError, EOFError):
            pass  # the connection is closed below, where the loss of the writer is reported
        finally:
            connection.close()
            with self._lock:
                del self._threads[connection]
                self._release(address)
                is_lost = bool(writer) and self._release(writer) and not self._closing
            if is_lost:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._on_writer_lost, writer)

    def _verdict(self, greeting: Greeting) -> int:
        """Return the answer to a greeting. If it is ADMITTED, count the connection as one of the writer's."""
        with self._lock:
            if greeting.owner != self._descriptor.incarnation_id:
                return OTHER_INCARNATION
            if not self._is_open(greeting.reservation_id):
                return NO_RESERVATION
            if greeting.row_bytes != self._descriptor.row_bytes:
                return OTHER_ROW_BYTES
            if greeting.writer in self._fenced:
                return FENCED
            return ADMITTED if self._take(greeting.writer, MAX_CONNECTIONS_PER_WRITER) else TOO_MANY

    def _take(self, key: str, limit: int) -> bool:
        is_free = self._num_open[key] < limit
        self._num_open[key] += is_free
        return is_free

    def _release(self, key: str) -> bool:
        """Decrement the number of connections of `key`, an address or a writer. Return whether the number is 0 now."""
        self._num_open[key] -= 1
        if is_last := not self._num_open[key]:
            del self._num_open[key]
        return is_last


class ChannelLink(Protocol):
    """A blocking connection to one peer. One thread makes all calls, except `interrupt`."""

    socket: socket.socket

    def push(
        self, reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Copy rows to the peer. Once `stopped()` is true, return early, in a state that allows another push.

        After a ReservationRefusedError, the link can still be used; after an OSError, EOFError or PeerLostError, it
        cannot.
        """

    def interrupt(self) -> None:
        """Make a blocked push fail soon. May be called on any thread."""

    def close(self) -> None: ...


class _Peer:
    """One connection to a peer, which the first push opens. If it is `lost`, the next push creates a new `_Peer`."""

    def __init__(self, descriptor: PeerDescriptor, connect: Callable[[PeerDescriptor, bytes], ChannelLink]) -> None:
        self._descriptor = descriptor
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-push-{descriptor.incarnation_id[:8]}")
        self._link: ChannelLink | None = None  # set and used by the thread
        self.lost = False

    def hung_up(self) -> bool:
        return self.lost or (self._link is not None and hung_up(self._link.socket))

    async def push(self, reservation_id: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        """Push the rows after all earlier pushes. A cancelled call ends only when nothing is being written any more."""
        stop = threading.Event()
        call = self._thread.submit(self._run, reservation_id, source, target, stop)
        pushing = asyncio.wrap_future(call)
        cancelled: asyncio.CancelledError | None = None
        while not pushing.done():
            try:
                await asyncio.wait({pushing})
            except asyncio.CancelledError as error:
                cancelled = error
                stop.set()
                call.cancel()  # no effect once the push has started
        try:
            if cancelled is None:
                return pushing.result()
            if not pushing.cancelled():
                pushing.exception()  # without this call, asyncio would log the error
            raise cancelled
        finally:  # break the reference cycle between the error and this frame, so that both are freed at once
            del call, pushing, cancelled

    async def close(self) -> None:
        self.lost = True
        if (link := self._link) is not None:
            link.interrupt()
        await asyncio.wrap_future(self._thread.submit(self._drop))
        self._thread.shutdown()

    def _run(self, reservation_id: bytes, source: Sequence[int], target: Sequence[int], stop: threading.Event) -> None:
        try:
            if not self.lost and self._link is None:
                self._link = self._connect(self._descriptor, reservation_id)
            if not self.lost and self._link is not None:
                self._link.push(reservation_id, source, target, lambda: stop.is_set() or self.lost)
            if self.lost:
                raise PeerLostError("the connection has ended")
        except ReservationRefusedError:
            raise
        except Exception as error:
            self.lost = True  # the exchange is incomplete, so the connection cannot be used again
            self._drop()
            if not isinstance(error, OSError | EOFError | ChannelError):
                raise
            kind = PeerLostError if isinstance(error, OSError | EOFError) else type(error)
            peer = self._descriptor
            name = f"{peer.channel} peer {peer.incarnation_id[:8]} at {peer.endpoint}"
            raise kind(f"{name}: {error}") from error

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class SocketChannel(Generic[Memory]):
    """The base class of channels over sockets (see KVChannel). Must be created on the event loop.

    Each connection has a thread. The thread for a writer runs `_serve` until the connection ends. The thread for a peer
    connects with `_link`, and then pushes rows, one push at a time. In this class, `grant` only checks its arguments,
    and `revoke` does nothing.
    """

    name: str
    fenced = False

    def __init__(
        self,
        memory: Memory,
        incarnation_id: str,
        on_writer_lost: Callable[[str], None],
        server: socket.socket,
        address: tuple[str, str],
        patience_s: float,
    ) -> None:
        """`address` is the host and the endpoint that our descriptor contains."""
        self._memory = memory
        self._own = PeerDescriptor(self.name, *address, incarnation_id, memory.row_bytes, memory.num_rows)
        self._patience_s = patience_s
        self._closed = False
        self._peers: dict[str, _Peer] = {}  # by incarnation id
        self._leaving: set[asyncio.Task[None]] = set()
        # The loop waits on this epoll to notice disconnected peers even while no push is in progress, so that the
        # memory of a dead peer is released at once. Only the threads read from the sockets.
        self._hangups = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._hangups.fileno(), self._on_hangup)
        self._listener = ChannelListener(server, self._own, self._serve, self._is_open, on_writer_lost, patience_s)

    def _is_open(self, _reservation_id: bytes) -> bool:
        """Return whether to admit a writer with this reservation."""
        return True

    def _serve(self, connection: socket.socket) -> None:
        """Send the welcome to a writer, serve it, and return when its connection ends."""
        raise NotImplementedError

    def _link(self, descriptor: PeerDescriptor, reservation_id: bytes) -> ChannelLink:
        """Connect to a peer. `reservation_id` is the reservation of the first push."""
        raise NotImplementedError

    def descriptor(self) -> bytes:
        return self._own.pack()

    def grant(self, reservation_id: bytes, rows: Sequence[int]) -> None:
        check_open(reservation_id, rows, self._own.num_rows)

    def revoke(self, reservation_id: bytes) -> None:
        pass

    def fence_writer(self, incarnation_id: str) -> bool:
        return self._listener.fence_writer(incarnation_id)

    def reachable(self, descriptor: bytes) -> bool:
        """Return True for every valid descriptor. Only a push shows whether the address can be reached."""
        PeerDescriptor.unpack(descriptor, self.name).check_row_bytes(self._own.row_bytes)
        return True

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        if self._closed:
            raise ChannelError("the channel is closed")
        other = PeerDescriptor.unpack(descriptor, self.name)
        other.check_row_bytes(self._own.row_bytes)
        try:  # check here, since a one-sided write outside the peer's pool would cause no error
            check_open(reservation_id, source, self._own.num_rows)
            check_open(reservation_id, target, other.num_rows)
        except ValueError as error:
            raise ChannelError(str(error)) from error
        if len(source) != len(target):
            raise ChannelError(f"{len(source)} rows to push, {len(target)} rows to fill")
        peer = self._peers.get(other.incarnation_id)
        if peer is None or peer.hung_up():
            self._retire_lost()
            peer = self._peers[other.incarnation_id] = _Peer(other, self._connect)
        try:
            await peer.push(reservation_id, source, target)
        finally:
            if peer.lost:
                self._retire_lost()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._hangups.fileno())
            self._retire(list(self._peers))
        await asyncio.gather(*self._leaving)
        self._hangups.close()
        self._listener.close()

    def _connect(self, descriptor: PeerDescriptor, reservation_id: bytes) -> ChannelLink:
        try:
            link = self._link(descriptor, reservation_id)
        except (ValueError, OverflowError) as error:  # the address is not valid for a system call
            raise DescriptorError(f"not an address: {error}") from error
        with contextlib.suppress(ValueError):  # `interrupt` or `close` closed the socket in the meantime
            self._hangups.register(link.socket, select.EPOLLRDHUP | select.EPOLLET)
        return link

    def _on_hangup(self) -> None:
        self._hangups.poll(0)  # only clears the edge-triggered events; every peer is checked below
        self._retire_lost()

    def _retire_lost(self) -> None:
        self._retire([incarnation_id for incarnation_id, peer in self._peers.items() if peer.hung_up()])

    def _retire(self, incarnation_ids: list[str]) -> None:
        for incarnation_id in incarnation_ids:
            leaving = self._loop.create_task(self._peers.pop(incarnation_id).close())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
