"""Limits of clients' connections: their number, their timeouts, and which idle one is closed for a new one."""

import asyncio
import resource
from dataclasses import dataclass, field
from typing import Protocol

SPARE_FILES = 256  # file descriptors for everything except clients' connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The number of connections, and timeouts in seconds.

    `head_s` bounds a request's head, `rest_s` the rest of a request that is answered already, `idle_s` the time without
    a request, and `drain_s` the time without a first request while the server drains.
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
    """The connections of one server that wait for a request, oldest first.

    If there are too many connections, these are closed for new ones, beginning with those that never sent a request.
    """

    is_draining: bool = False  # each connection ends with its next response
    silent: dict[IdleConnection, None] = field(default_factory=dict)
    idle: dict[IdleConnection, None] = field(default_factory=dict)

    def oldest(self) -> IdleConnection | None:
        return next(iter(self.silent or self.idle), None)

    def drop(self, connection: IdleConnection) -> None:
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)


def raise_fd_limit(connections: int) -> int:
    """Raise the limit of file descriptors for `connections`, and return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - SPARE_FILES)
    return connections
