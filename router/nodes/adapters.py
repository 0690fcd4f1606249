"""Loads and unloads LoRA adapters on all nodes of a model while they serve."""

import asyncio
import logging
from collections.abc import Mapping
from math import inf
from typing import Self

from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import TaskGroup, wait_until
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import SetAdapterRequest
from shared.rpc.methods import SET_ADAPTER, PeerError

log = logging.getLogger("baton.router")
LOAD_S = 120.0  # how long a node may take to read an adapter
REGISTRY_S = 5.0  # how long the registry may take to report a node's adapters
POLL_S = 0.1


class AdapterSync:
    """Loads and unloads adapters at run time, on every node of a pool.

    While this router runs, nodes that join later get the loaded adapters too, unless another router has unloaded them.
    All methods run on the router's event loop. `num_requests` maps each adapter's digest to the number of requests in
    progress that use the adapter. These requests continue when the adapter is unloaded.
    """

    def __init__(self, pool: NodePool, num_requests: Mapping[str, int]) -> None:
        self._pool = pool
        self._num_requests = num_requests
        self._directories: dict[str, str] = {}  # the directory of each adapter that was loaded, by name
        self._changing: set[tuple[str, str]] = set()  # node id and adapter name of each call in progress
        self._unloading: dict[str, asyncio.Task[None]] = {}  # by name
        self._tasks = TaskGroup()

    def start(self) -> Self:
        self._tasks.start(self._follow())
        return self

    async def close(self) -> None:
        await self._tasks.close()

    async def load(self, name: str, directory: str) -> None:
        """Load the adapter on all nodes. If a node refuses, unload the adapter from the other nodes.

        Raises RequestError with a node's reason, or UnavailableError if there is no node.
        """
        if (unloading := self._unloading.pop(name, None)) is not None:
            await unloading
        nodes = [each for each in self._pool.connections.values() if each.is_alive]
        if not nodes:
            raise UnavailableError("No node is ready to load an adapter; try again soon.", code="starting")
        was_unloaded = name in self._pool.unloaded
        self._pool.unloaded.discard(name)  # otherwise, `_follow` would unload it from the first nodes that load it
        errors = await asyncio.gather(*(self._set(each, name, directory) for each in nodes))
        if failed := [f"Node {node.info.id}: {text}." for node, text in zip(nodes, errors, strict=True) if text]:
            await asyncio.gather(*(self._set(each, name) for each, text in zip(nodes, errors, strict=True) if not text))
            self._pool.unloaded |= {name} if was_unloaded else set()
            raise RequestError(failed[0], "lora_path")
        digests = [each.info.adapters[name] for each in nodes if name in each.info.adapters]
        if not digests:
            raise UnavailableError("No node has loaded the adapter; try again soon.", code="node_lost")
        self._directories[name] = directory
        self._pool.adapters[name] = digests[-1]

    def unload(self, name: str) -> None:
        """Remove the adapter, so that no new request can use it. The nodes unload it when all requests that use it have
        ended. Raises KeyError if no node has the adapter."""
        digest = self._pool.adapters.pop(name)
        self._directories.pop(name, None)
        self._pool.unloaded.add(name)
        self._unloading[name] = self._tasks.start(self._unload_unused(name, digest))

    async def _unload_unused(self, name: str, digest: str) -> None:
        await wait_until(lambda: not self._num_requests.get(digest, 0), inf, POLL_S)
        if name in self._pool.unloaded:
            nodes = [each for each in self._pool.connections.values() if each.is_alive and name in each.info.adapters]
            await asyncio.gather(*(self._set(each, name) for each in nodes))

    async def _follow(self) -> None:
        """Load and unload adapters on nodes that join, and adopt the changes of other routers."""
        seen: dict[str, Mapping[str, str]] = {}  # the last known adapters of each node, by incarnation
        while True:
            nodes = list(self._pool.connections.values())
            for connection in nodes:
                if connection.is_ready:
                    self._compare(connection, seen.get(connection.info.incarnation_id))
            now = {each.info.incarnation_id: each.info.adapters for each in nodes if each.is_ready}
            known = {each.info.incarnation_id for each in nodes}
            seen = {name: adapters for name, adapters in seen.items() if name in known} | now
            await self._pool.change()

    def _compare(self, connection: NodeConnection, before: Mapping[str, str] | None) -> None:
        """Compare a node's adapters with those that this router has loaded and unloaded.

        `before` has the node's adapters at the last call, or is None at the first call. If an adapter has disappeared
        or appeared since then, another router has unloaded or loaded it, and this router adopts the change."""
        now = connection.info.adapters
        for name in self._directories.keys() - now.keys():
            if name in (before or ()):
                del self._directories[name]
            else:
                self._tasks.start(self._catch_up(connection, name))
        for name in self._pool.unloaded & now.keys():
            if before is not None and name not in before and (connection.info.id, name) not in self._changing:
                self._pool.unloaded.discard(name)
                self._pool.adapters[name] = now[name]
            else:
                self._tasks.start(self._unload_unused(name, now[name]))

    async def _catch_up(self, connection: NodeConnection, name: str) -> None:
        if error := await self._set(connection, name, self._directories.get(name, "")):
            log.warning("node %s cannot load the LoRA adapter %s: %s", connection.info.id, name, error)

    async def _set(self, connection: NodeConnection, name: str, directory: str = "") -> str:
        """Load the adapter from `directory` on a node, or unload it if `directory` is "". Wait until the registry
        reports the change. Return the reason why the node refuses, or "" on success."""
        key = connection.info.id, name
        if key in self._changing:
            return ""
        self._changing.add(key)
        channel = RpcChannel(connection.info.address)
        try:
            error = (await SET_ADAPTER.call(channel, SetAdapterRequest(name, directory), LOAD_S)).error
            if not error:
                await wait_until(lambda: (name in connection.info.adapters) == bool(directory), REGISTRY_S)
        except PeerError as failure:
            # A node that is lost gets the adapter when it joins again.
            is_lost = await wait_until(lambda: not connection.is_alive, REGISTRY_S)
            return "" if is_lost else f"it does not answer ({failure})"
        finally:
            channel.close()
            self._changing.discard(key)
        return error
