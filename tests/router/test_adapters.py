"""Test how several routers load and unload LoRA adapters on the same node."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from router.nodes.adapters import AdapterSync
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from shared.errors import RequestError, UnavailableError
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

    def __init__(self, name: str = "d0", registries: Sequence[Any] = ()) -> None:
        self.registries = registries or [SharedList(), SharedList()]
        self.calls: list[tuple[str, str]] = []
        self.loads_in_s = 0.0
        self.refusal = ""
        self.info = NodeInfo(name, "boot-1", "decode", "", "m", "print", 4, 64, 100, 512, 8)

    async def attach(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(NodeUpdate([], NodeStats()))
        await asyncio.Event().wait()

    async def set_adapter(self, message: SetAdapterRequest) -> Ack:
        self.calls.append((message.name, message.directory))
        await asyncio.sleep(self.loads_in_s)
        if self.refusal:
            return Ack(self.refusal)
        adapters = {name: digest for name, digest in self.info.adapters.items() if name != message.name}
        self.announce(replace(self.info, adapters=adapters | ({message.name: "digest"} if message.directory else {})))
        return Ack()

    def announce(self, info: NodeInfo) -> None:
        self.info = info
        for registry in self.registries:
            registry.nodes = registry.nodes | {info.id: info}
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


async def test_an_unloaded_adapter_can_be_loaded_again_on_nodes_of_different_speeds(node: Any, routers: Any) -> None:
    (first, pool), _ = routers
    slow = AdapterNode("d1", node.registries)
    async with serving({ATTACH: slow.attach, SET_ADAPTER: unary(slow.set_adapter)}) as (_, address):
        slow.announce(replace(slow.info, address=address))
        assert await wait_until(lambda: len(pool.routable()[1]) == 2, WAIT_S)
        await first.load("sql", "/sql")
        first.unload("sql")
        assert await wait_until(lambda: not (node.info.adapters or slow.info.adapters), WAIT_S)
        slow.loads_in_s = 0.3
        await first.load("sql", "/sql")
        await first.load("poems", "/poems")  # completes after all earlier changes of the first router
        for each in (node, slow):
            assert each.calls == [("sql", "/sql"), ("sql", ""), ("sql", "/sql"), ("poems", "/poems")]


async def test_a_refused_adapter_is_not_loaded_later_although_the_admin_has_repeated_the_call(
    node: Any, routers: Any
) -> None:
    (first, pool), _ = routers
    node.loads_in_s, node.refusal = 0.1, "there is no such directory"
    failures = await asyncio.gather(*(first.load("sql", "/none") for _ in range(2)), return_exceptions=True)
    assert [type(each) for each in failures] == [RequestError, UnavailableError]
    node.refusal = ""
    node.announce(replace(node.info, incarnation_id="boot-2"))
    assert await wait_until(lambda: pool.connections["d0"].is_ready, WAIT_S)
    await first.load("poems", "/poems")
    assert node.calls == [("sql", "/none"), ("poems", "/poems")]
