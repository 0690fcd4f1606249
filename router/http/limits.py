"""Places for clients' connections: how many there are, for how long one is kept, and who gives way to a newcomer."""

import resource
from dataclasses import dataclass, field

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SPARE_FILES = 256  # for everything but clients' connections


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of connections and times in seconds: for a request's head, for the rest of a request that is answered already,
    without a request, and without the first one while the server drains."""

    connections: int = 10_000
    head_s: float = 10.0
    rest_s: float = 2.0
    idle_s: float = 75.0
    drain_s: float = 1.0


@dataclass(slots=True)
class IdleConnections:
    """The connections of one server whose clients owe it a request, oldest first. When there are too many connections,
    these give way; first those that were never answered anything."""

    is_draining: bool = False  # the server: an answer is its connection's last
    silent: dict[HttpToolsProtocol, None] = field(default_factory=dict)
    idle: dict[HttpToolsProtocol, None] = field(default_factory=dict)

    def oldest(self) -> HttpToolsProtocol | None:
        return next(iter(self.silent or self.idle), None)

    def drop(self, connection: HttpToolsProtocol) -> None:
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)


def raise_fd_limit(connections: int) -> int:
    """How many connections this process may hold. Takes as many file descriptors as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - SPARE_FILES)
    return connections
