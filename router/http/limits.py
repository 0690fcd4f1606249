"""Limits of clients' connections: their number, their timeouts, and the choice of an idle one to close."""

import asyncio
import resource
from dataclasses import dataclass, field
from typing import Protocol

SPARE_FILES = 256  # file descriptors for everything except clients' connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The number of connections, and timeouts in seconds.

    `head_s` bounds the head of a request, `rest_s` the rest of a request that was answered early, `idle_s` the time
    between requests, and `drain_s` the wait for a first request while the server drains.
    """

    connections: int = 10_000
    head_s: float = 10.0
    rest_s: float = 2.0
    idle_s: float = 75.0
    drain_s: float = 1.0


class IdleConnection(Protocol):
    transport: asyncio.Transport


@dataclass(slots=True)
class IdleConnections:
    """The connections of one server that wait for a request, oldest first. If there are too many connections, these are
    closed to admit new ones. Those that never sent a request go first."""

    is_draining: bool = False  # each connection closes after its next response
    silent: dict[IdleConnection, None] = field(default_factory=dict)
    idle: dict[IdleConnection, None] = field(default_factory=dict)

    def oldest(self) -> IdleConnection | None:
        return next(iter(self.silent or self.idle), None)

    def drop(self, connection: IdleConnection) -> None:
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)


def raise_fd_limit(connections: int) -> int:
    """Raise the file descriptor limit for `connections`. Return the number of connections that the limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - SPARE_FILES)
    return connections
