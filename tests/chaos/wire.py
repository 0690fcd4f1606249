"""A network namespace behind a link that delays or drops packets, or drops all packets of one direction.

This needs root on Linux. It does not need netem, because this process forwards the packets.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
HERE, THERE = "10.213.77.1", "10.213.77.2"
MTU = 1500
MAX_QUEUE = 20_000  # maximum number of packets in flight


@dataclass(frozen=True, slots=True)
class Line:
    """One direction of a link: its delay, the share of lost packets, and its rate in bits per second (0: no limit)."""

    delay_s: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


GOOD = Line()
FAR = Line(delay_s=0.025, loss=0.01, rate=100e6)  # round trip of 50 ms
DEAD = Line(loss=1.0)


def is_permitted() -> bool:
    return os.geteuid() == 0 and TUN.exists() and os.access("/run", os.W_OK)


class Wire:
    """A tun device in this namespace, connected to a tun device in a new namespace."""

    def __init__(self) -> None:
        """Create both devices. Raises OSError or CalledProcessError if the system does not permit it."""
        self.namespace = f"baton-{os.getpid()}"
        self.there = self.back = GOOD
        self._random = random.Random(0)
        self._queue: list[tuple[float, int, int, bytes]] = []  # due time, number, index of the target, packet
        self._free_at = {0: 0.0, 1: 0.0}
        self._number = 0
        self._over = threading.Event()
        with contextlib.ExitStack() as undo:
            _ip("netns", "add", self.namespace)
            undo.callback(_ip, "netns", "del", self.namespace)
            inside = ("-n", self.namespace)
            self._ends = [_tun(undo, f"bt{os.getpid() % 10**7}a"), _tun(undo, f"bt{os.getpid() % 10**7}b")]
            here, there = (name for _, name in self._ends)
            _ip("link", "set", there, "netns", self.namespace)
            for where, name, own, peer in (((), here, HERE, THERE), (inside, there, THERE, HERE)):
                _ip(*where, "addr", "add", own, "peer", peer, "dev", name)
                _ip(*where, "link", "set", name, "mtu", str(MTU), "up")
            _ip(*inside, "link", "set", "lo", "up")
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="wire")

    def __enter__(self) -> "Wire":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._undo.close()

    def _run(self) -> None:
        fds = [fd for fd, _ in self._ends]
        poll = select.epoll()
        for fd in fds:
            poll.register(fd, select.EPOLLIN)
        while not self._over.is_set():
            now = time.monotonic()
            while self._queue and self._queue[0][0] <= now:
                _, _, end, packet = heapq.heappop(self._queue)
                with contextlib.suppress(OSError):  # the device is down
                    os.write(fds[end], packet)
            due_s = self._queue[0][0] - time.monotonic() if self._queue else 0.1
            for fd, _ in poll.poll(min(0.1, max(0.0, due_s))):
                self._take(fd, 1 - fds.index(fd))
        poll.close()

    def _take(self, fd: int, end: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(fd, 65_600)
            except BlockingIOError:
                return
            line = self.there if end == 1 else self.back
            if len(self._queue) >= MAX_QUEUE or self._random.random() < line.loss:
                continue
            self._number += 1
            due = time.monotonic()
            if line.rate:
                due = self._free_at[end] = max(due, self._free_at[end]) + 8 * len(packet) / line.rate
            heapq.heappush(self._queue, (due + line.delay_s, self._number, end, packet))


def _tun(undo: contextlib.ExitStack, name: str) -> tuple[int, str]:
    """Create a tun device. `undo` closes its descriptor, which removes the device."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    undo.callback(os.close, fd)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd, name


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)
