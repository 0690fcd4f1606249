"""The name and the address of a process that joins a cluster as a node."""

import contextlib
import logging
import os
import socket
import time
from hashlib import blake2b
from urllib.parse import urlsplit

from shared.config.settings import EVERY_ADDRESS, JoiningSettings
from shared.lifecycle import in_container
from shared.registry import RESOLVE_INTERVAL_S, is_redis, listed_addresses
from shared.resolver import is_address

log = logging.getLogger("baton.node")
MAX_HOST = 48  # a node's name has at most 64 characters, which include the role and the process id


def default_id(role: str) -> str:
    """Return a name that no other node has.

    In a container, the name of the main process ends with the container's host name, so a restart does not change it.
    The end of a long host name is replaced by a hash.
    """
    if len(host := socket.gethostname()) > MAX_HOST:
        host = f"{host[: MAX_HOST - 9]}-{blake2b(host.encode(), digest_size=4).hexdigest()}"
    name = f"{role}-{host}"
    is_main_process = 1 in (os.getpid(), os.getppid())  # with `init`, the main process is the child of process 1
    return name if in_container() and is_main_process else f"{name}-{os.getpid()}"


def advertised(settings: JoiningSettings) -> str:
    """Return the host at which other processes reach this node.

    A node that listens on every address advertises the local address from which it reaches the registry (Redis or one
    of the routers). The address has the same family as `settings.host`. If a host name of the registry does not
    resolve, wait, because the routers may start later. Raises ValueError if there is no route to the registry.
    """
    if settings.advertise or settings.host not in EVERY_ADDRESS:
        return settings.advertise or settings.host
    is_logged = False
    while True:
        hosts = _registry_hosts(settings.registry)
        problem, may_resolve = "the file in --registry names no router", not hosts
        for host, port in hosts:
            try:
                return _route_to(host, port, socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
            except OSError as error:
                other = "0.0.0.0" if ":" in settings.host else "::"
                problem = (
                    f"--host {settings.host}: no route to --registry {host} ({error.strerror}): set --advertise to an "
                    f"address at which others reach this node, or try --host {other}"
                )
                may_resolve |= isinstance(error, socket.gaierror) and not is_address(host)
        if not may_resolve:
            raise ValueError(problem)
        if not is_logged:
            log.warning("%s; waiting until a name resolves", problem)
        is_logged = True
        time.sleep(RESOLVE_INTERVAL_S)


def _registry_hosts(registry: str) -> list[tuple[str, int]]:
    if is_redis(registry):
        parts = urlsplit(registry)
        return [(parts.hostname or "localhost", parts.port or 6379)]
    with contextlib.suppress(OSError, ValueError):  # the file is not there yet
        return listed_addresses(registry)
    return []


def _route_to(host: str, port: int, family: socket.AddressFamily) -> str:
    """Return the local address from which packets to the host are sent. Raises OSError if there is no route."""
    target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # selects a source address; no packet is sent
        return str(probe.getsockname()[0])
