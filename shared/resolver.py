"""Checks addresses, and resolves a host name to its addresses without blocking the event loop."""

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import ip_address

TIMEOUT_S = 1.0

# Returns the addresses of a host. Raises OSError, which includes TimeoutError, if they cannot be found.
Resolver = Callable[[], Awaitable[list[str]]]


def is_address(host: str) -> bool:
    """Return whether the host is an IP address rather than a name."""
    with contextlib.suppress(ValueError):
        return bool(ip_address(host))
    return False


def is_host_and_port(text: str) -> bool:
    """Return whether the text is `host:port`. An IPv6 address may be in brackets."""
    host, _, port = text.rpartition(":")
    is_host = re.fullmatch(r"[\w.%:-]{1,253}|\[[0-9A-Fa-f:.%\w-]{2,253}\]", host, re.ASCII)
    return bool(is_host and re.fullmatch("[0-9]{1,5}", port)) and 1 <= int(port) <= 65535


class NameResolver:
    """Resolves one name with `getaddrinfo`, in a thread, with a time limit.

    `getaddrinfo` cannot be cancelled, and may take half a minute if the name service does not answer. Its thread is a
    daemon, which does not delay the end of the process. While the thread runs, further calls wait for its answer.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._answer: asyncio.Future[list[str]] | None = None

    async def __call__(self) -> list[str]:
        """Return the host's addresses. Raises OSError if it has no address, and TimeoutError after TIMEOUT_S."""
        if is_address(self._host):
            return [self._host]
        answer = self._answer = self._answer or _look_up(self._host)
        done, _ = await asyncio.wait([answer], timeout=TIMEOUT_S)
        if not done:
            raise TimeoutError(f"the name service did not answer within {TIMEOUT_S:g} s")
        self._answer = None
        return answer.result()


def _look_up(host: str) -> "asyncio.Future[list[str]]":
    """Start a thread that resolves the host, and return a future for the result. Raises OSError if no thread can
    start."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def work() -> None:
        settle: Callable[[], None]
        try:
            found = socket.getaddrinfo(host.encode(), None, type=socket.SOCK_STREAM)
            settle = partial(answer.set_result, list(dict.fromkeys(str(each[4][0]) for each in found)))
        except OSError as error:
            settle = partial(answer.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle)

    try:
        threading.Thread(target=work, name="resolver", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"no thread for the name service: {error}") from None
    return answer
