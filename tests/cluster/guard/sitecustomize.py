"""Log the connections of every Python process that has this directory on its path.

An audit hook logs connections of Python's own sockets. uvloop uses other sockets, so uvloop's methods are wrapped.
"""

import os
import sys
from typing import Any

if log := os.environ.get("CONNECTIONS_LOG"):
    descriptor = os.open(log, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def note(kind: str, address: object) -> None:
        os.write(descriptor, f"{os.getpid()}\t{kind}\t{address!r}\n".encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in {"socket.connect", "socket.sendto"}:
            note(event, arguments[1])
        elif event in {"socket.getaddrinfo", "socket.gethostbyname"}:
            note(event, arguments[0])

    sys.addaudithook(hook)

    import uvloop

    def watched(name: str) -> None:
        method = getattr(uvloop.Loop, name)

        def call(loop: object, *arguments: Any, **options: Any) -> Any:
            named = (options.get("host"), options.get("port")) if "host" in options else arguments[1:3]
            note(name, tuple(named))
            return method(loop, *arguments, **options)

        setattr(uvloop.Loop, name, call)

    for method_name in ("create_connection", "create_unix_connection", "create_datagram_endpoint", "sock_connect"):
        watched(method_name)
