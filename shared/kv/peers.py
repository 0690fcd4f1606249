"""The writing end of a channel: a thread and a connection for each peer, which runs one push at a time."""

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from shared.kv.channel import (
    RESERVATION_ID_BYTES,
    ChannelError,
    DescriptorError,
    PeerDescriptor,
    PeerLostError,
    ReservationRefusedError,
)


class ChannelLink(Protocol):
    """A blocking connection to one peer. One thread uses it, except for `interrupt`."""

    socket: socket.socket

    def push(
        self, reservation_id: bytes, source: Sequence[int], target: Sequence[int], stopped: Callable[[], bool]
    ) -> None:
        """Move rows. When `stopped()`, return early, at a point from which the next push can continue.

        Raises ReservationRefusedError if the link remains usable, and OSError, EOFError or PeerLostError if not.
        """
        ...

    def interrupt(self) -> None:
        """Make a blocked push fail soon, unless it ends soon by itself. May be called on any thread."""
        ...

    def close(self) -> None: ...


class _Peer:
    """One peer, for the life of one connection. When it is `lost`, the next push creates another one."""

    def __init__(self, descriptor: PeerDescriptor, connect: Callable[[bytes], ChannelLink]) -> None:
        self._name = f"{descriptor.channel} peer {descriptor.incarnation_id[:8]} at {descriptor.endpoint}"
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-push-{descriptor.incarnation_id[:8]}")
        self._link: ChannelLink | None = None  # owned by the thread
        self.lost = False

    def hung_up(self) -> bool:
        return self.lost or (self._link is not None and hung_up(self._link.socket))

    async def push(self, reservation_id: bytes, source: Sequence[int], target: Sequence[int]) -> None:
        """Push when earlier pushes have ended. If cancelled, still wait until nothing more is being written."""
        stop = threading.Event()
        call = self._thread.submit(self._run, reservation_id, source, target, stop)
        moving = asyncio.wrap_future(call)
        cancelled: asyncio.CancelledError | None = None
        while not moving.done():
            try:
                await asyncio.wait({moving})
            except asyncio.CancelledError as error:
                cancelled = error
                stop.set()
                call.cancel()  # has an effect only if the push has not started
        try:
            if cancelled is None:
                return moving.result()
            if not moving.cancelled():
                moving.exception()  # mark it as retrieved; the caller gets the cancellation
            raise cancelled
        finally:  # break the cycle between an error and this frame, which would keep memory until the next collection
            del call, moving, cancelled

    async def close(self) -> None:
        self.lost = True
        if (link := self._link) is not None:
            link.interrupt()
        await asyncio.wrap_future(self._thread.submit(self._drop))
        self._thread.shutdown()

    def _run(self, reservation_id: bytes, source: Sequence[int], target: Sequence[int], stop: threading.Event) -> None:
        try:
            if not self.lost and self._link is None:
                self._link = self._linked(reservation_id)
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
            raise kind(f"{self._name}: {error}") from error

    def _linked(self, reservation_id: bytes) -> ChannelLink:
        try:
            return self._connect(reservation_id)
        except (ValueError, OverflowError) as error:  # an address that no system call takes
            raise DescriptorError(f"not an address: {error}") from error

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class ChannelPeers:
    """The peers that we write to, by incarnation id. Must be created on the event loop.

    `connect` runs in the thread of the peer.
    """

    def __init__(self, row_bytes: int, num_rows: int, connect: Callable[[PeerDescriptor, bytes], ChannelLink]) -> None:
        self._row_bytes = row_bytes
        self._num_rows = num_rows
        self._connect = connect
        self._peers: dict[str, _Peer] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False
        # The loop waits on this epoll, and so notices every peer that hangs up, even while no push is in progress, and
        # releases the memory of a dead peer at once. It reads nothing from the sockets, which belong to the threads.
        self._hangups = select.epoll()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._hangups.fileno(), self._on_hangup)

    async def push(
        self, descriptor: PeerDescriptor, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        if self._closed:
            raise ChannelError("the channel is closed")
        descriptor.check_row_bytes(self._row_bytes)
        _check_rows(descriptor, reservation_id, source, target, self._num_rows)
        peer = self._peers.get(descriptor.incarnation_id)
        if peer is None or peer.hung_up():
            self._retire_lost()
            peer = self._peers[descriptor.incarnation_id] = _Peer(
                descriptor, lambda reservation_id: self._linked(descriptor, reservation_id)
            )
        try:
            await peer.push(reservation_id, source, target)
        finally:
            if peer.lost:
                self._retire_lost()

    async def close(self) -> None:
        """Fail the pushes in progress and wait for every thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._hangups.fileno())
            self._retire(list(self._peers))
        await asyncio.gather(*self._leaving)
        self._hangups.close()

    def _linked(self, descriptor: PeerDescriptor, reservation_id: bytes) -> ChannelLink:
        link = self._connect(descriptor, reservation_id)
        with contextlib.suppress(ValueError):  # the socket was closed in the meantime
            self._hangups.register(link.socket, select.EPOLLRDHUP | select.EPOLLET)
        return link

    def _on_hangup(self) -> None:
        self._hangups.poll(0)  # clears the edge-triggered events; each peer is then asked
        self._retire_lost()

    def _retire_lost(self) -> None:
        self._retire([incarnation_id for incarnation_id, peer in self._peers.items() if peer.hung_up()])

    def _retire(self, incarnation_ids: list[str]) -> None:
        for incarnation_id in incarnation_ids:
            leaving = self._loop.create_task(self._peers.pop(incarnation_id).close())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)


def hung_up(connection: socket.socket) -> bool:
    """Return whether the other end has closed or died. Reads nothing from the stream."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLRDHUP)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # our end is closed
        return True


def _check_rows(
    descriptor: PeerDescriptor, reservation_id: bytes, source: Sequence[int], target: Sequence[int], num_rows: int
) -> None:
    """Raise ChannelError unless all rows are in the pools. A one-sided write outside the peer's pool would not fail."""
    if len(reservation_id) != RESERVATION_ID_BYTES:
        raise ChannelError(f"a reservation id has {RESERVATION_ID_BYTES} bytes, not {len(reservation_id)}")
    if len(source) != len(target):
        raise ChannelError(f"{len(source)} rows to push, {len(target)} rows to fill")
    for side, rows, limit in (("our", source, num_rows), ("the peer's", target, descriptor.num_rows)):
        if rows and not 0 <= min(rows) <= max(rows) < limit:
            raise ChannelError(f"rows {min(rows)} to {max(rows)} are not all in {side} pool of {limit}")
