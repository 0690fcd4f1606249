"""A minimal HTTP server with strict limits, for an orchestrator's health probes and for metric scrapes.

A node uses this server rather than that of the router's API, which parses all of HTTP/1.1.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from http import HTTPStatus

MAX_LINE_BYTES = 1024
MAX_HEADERS = 64
MAX_CONNECTIONS = 64
TIMEOUT_S = 2.0

Answer = tuple[HTTPStatus, str]


class HealthServer:
    """Answers one GET request per connection with plain text. `pages` maps paths to functions that return answers.

    A connection is closed after TIMEOUT_S. If MAX_CONNECTIONS are open, a new connection closes the oldest one, so that
    idle connections cannot keep a probe out. The server runs on the event loop, so it does not answer while the loop is
    blocked.
    """

    def __init__(self, pages: Mapping[str, Callable[[], Answer]]) -> None:
        self._pages = pages
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port in use. Raises OSError if the port cannot be bound."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        asyncio.get_running_loop().call_later(TIMEOUT_S, writer.transport.abort)
        try:
            with contextlib.suppress(OSError, EOFError):  # the connection is closed
                status, text = await self._answer(reader)
                body = text.encode()
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; version=0.0.4; "
                head += f"charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + body)
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            return HTTPStatus.REQUEST_URI_TOO_LONG, "the request line is too long\n"
        try:
            headers = 0
            while (await reader.readuntil(b"\n")).strip():  # closing with unread bytes would reset the connection
                headers += 1
                if headers > MAX_HEADERS:
                    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too many headers\n"
        except asyncio.LimitOverrunError:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "a header is too long\n"
        words = line.split()
        path = words[1].partition(b"?")[0].decode("latin-1") if len(words) == 3 and words[0] == b"GET" else ""
        page = self._pages.get(path)
        if page is None:
            return HTTPStatus.NOT_FOUND, f"use GET {', '.join(self._pages)}\n"
        return page()
