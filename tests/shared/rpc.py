"""RPC servers on loopback, and channels to them, for tests."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from shared.rpc.connection import RpcChannel
from shared.rpc.methods import Rpc, RpcServer

Handlers = dict[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]


@asynccontextmanager
async def serving(handlers: Handlers, **options: Any) -> AsyncIterator[tuple[RpcServer, str]]:
    """Start a server with these options of `RpcServer`. Yield the server and its address."""
    server = RpcServer(handlers, **options)
    try:
        yield server, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.close()


@asynccontextmanager
async def connected(address: str, **options: Any) -> AsyncIterator[RpcChannel]:
    """Yield a channel with these options of `RpcChannel`. Close the channel at the end."""
    channel = RpcChannel(address, **options)
    try:
        yield channel
    finally:
        channel.close()
