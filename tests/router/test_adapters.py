"""Test how several routers load and unload LoRA adapters on the same node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from router.nodes.adapters import AdapterSync
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from shared.lifecycle import wait_until
from shared.registry import Registry
from shared.rpc.messages import Ack, NodeInfo, NodeStats, NodeUpdate, SetAdapterRequest
from shared.rpc.methods import ATTACH, SET_ADAPTER, unary
from tests.shared.rpc import serving

WAIT_S = 30.0


class SharedList(Registry):
    """A registry whose list of nodes is set by the test."""

    kind = "embedded"

    async def start(self, changed: Any) -> None:
        self.changed = changed

    async def close(self) -> None:
        """Do nothing."""


class AdapterNode:
    """A node that announces its adapters in the registries of all routers."""

    def __init__(self) -> None:
        self.registries = [SharedList(), SharedList()]
        self.calls: list[tuple[str, str]] = []
        self.info = NodeInfo("d0", "boot-1", "decode", "", "m", "print", 4, 64, 100, 512, 8)

    async def attach(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(NodeUpdate([], NodeStats()))
        await asyncio.Event().wait()

    async def set_adapter(self, message: SetAdapterRequest) -> Ack:
        self.calls.append((message.name, message.directory))
        adapters = {name: digest for name, digest in self.info.adapters.items() if name != message.name}
        self.announce(replace(self.info, adapters=adapters | ({message.name: "digest"} if message.directory else {})))
        return Ack()

    def announce(self, info: NodeInfo) -> None:
        self.info = info
        for registry in self.registries:
            registry.nodes = {info.id: info}
            registry.changed()


@pytest.fixture
async def node() -> AsyncIterator[AdapterNode]:
    own = AdapterNode()
    async with serving({ATTACH: own.attach, SET_ADAPTER: unary(own.set_adapter)}) as (_, address):
        own.info = replace(own.info, address=address)
        yield own


@pytest.fixture
async def routers(node: AdapterNode) -> AsyncIterator[list[tuple[AdapterSync, NodePool]]]:
    async with AsyncExitStack() as cleanup:
        found = []
        for number, registry in enumerate(node.registries):
            pool = NodePool(f"router-{number}", registry, "colocated", 60.0, RouterObserver())
            await pool.start()
            cleanup.push_async_callback(pool.close)
            sync = AdapterSync(pool, {}).start()
            cleanup.push_async_callback(sync.close)
            found.append((sync, pool))
        node.announce(node.info)
        assert await wait_until(lambda: all(pool.routable()[1] for _, pool in found), WAIT_S)
        yield found


async def test_an_adapter_that_another_router_unloads_is_not_loaded_again(node: Any, routers: Any) -> None:
    (first, pool), (second, _) = routers
    await first.load("sql", "/sql")
    second.unload("sql")
    assert await wait_until(lambda: not node.info.adapters, WAIT_S)
    await first.load("poems", "/poems")  # completes after all earlier changes of the first router
    assert node.calls == [("sql", "/sql"), ("sql", ""), ("poems", "/poems")]
    assert pool.adapters == {"poems": "digest"}


async def test_an_adapter_that_another_router_loads_again_is_not_unloaded(node: Any, routers: Any) -> None:
    (first, pool), (second, _) = routers
    await first.load("sql", "/sql")
    first.unload("sql")
    assert await wait_until(lambda: not node.info.adapters, WAIT_S)
    await second.load("sql", "/sql")
    await first.load("poems", "/poems")
    assert node.calls == [("sql", "/sql"), ("sql", ""), ("sql", "/sql"), ("poems", "/poems")]
    assert pool.adapters == {"sql": "digest", "poems": "digest"}


async def test_a_restarted_node_gets_the_changes_of_the_router_that_made_them(node: Any, routers: Any) -> None:
    (first, _), _ = routers
    node.announce(replace(node.info, adapters={"old": "digest"}))
    await first.load("sql", "/sql")
    first.unload("old")
    assert await wait_until(lambda: node.info.adapters.keys() == {"sql"}, WAIT_S)
    node.announce(replace(node.info, incarnation_id="boot-2", adapters={"old": "digest"}))
    assert await wait_until(lambda: node.info.adapters.keys() == {"sql"}, WAIT_S)
