"""A proxy node in the test's process, its stub engine, and the router's end of the node's standing stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from node.engine_steps import StepSocket
from proxy_node import client
from proxy_node.client import EngineClient
from proxy_node.node import ProxyNode
from proxy_node.vllm import VllmEngine
from shared.lifecycle import wait_until
from shared.registry import Announcer
from shared.rpc.messages import NodeInfo
from shared.rpc.methods import RpcServer
from tests.node.harness import RouterLine
from tests.proxy_node.vllm_stub import NUM_BLOCKS, VOCABULARY, VllmStub

PROMPT = [5, 6, 7]
INFO = NodeInfo("decode-0", "i" * 32, "decode", "127.0.0.1:1", "stub", "f", 16, 1, NUM_BLOCKS, 8192, 64)
WAIT_S = 60.0
client.CONNECT_S = WAIT_S  # on a busy machine, connecting may take seconds


class Unannounced(Announcer):
    """An announcer of a node that no registry lists. It records the node's announcements."""

    def __init__(self) -> None:
        super().__init__()
        self.infos: list[NodeInfo] = []

    async def start(self, info: NodeInfo) -> None:
        self.infos.append(info)

    async def update(self, info: NodeInfo) -> None:
        self.infos.append(info)


@dataclass
class Running:
    node: ProxyNode
    stub: VllmStub
    line: RouterLine
    stop: Any  # ends the stub's server
    address: str  # of the node
    url: str  # of the engine

    async def until(self, condition: Any) -> None:
        assert await wait_until(condition, WAIT_S), (self.line.errors(), self.node.stats())

    def is_over(self, name: str) -> bool:
        return bool(self.line.finishes(name)) or any(delta.error and delta.id == name for delta in self.line.deltas)


@asynccontextmanager
async def running(
    stuck_s: float = 60.0, role: str = "decode", lease_s: float = 30.0, resumes: str = "greedy, seeded",
    kind: tuple[type[VllmStub], type[EngineClient]] = (VllmStub, VllmEngine), **knobs: Any,
) -> AsyncIterator[Running]:  # fmt: skip
    stub, line = kind[0](**knobs), RouterLine()
    async with AsyncExitStack() as server, AsyncExitStack() as stack:  # the node ends before the server
        engine = kind[1](await server.enter_async_context(stub.serve()), "", VOCABULARY)
        await stack.enter_async_context(engine.open())
        await engine.describe()
        attributes = {"connector": knobs.get("connector", "") or "none", "resumes": resumes}
        node = ProxyNode(replace(INFO, role=role, attributes=attributes), engine, 0.05, stuck_s, lease_s, StepSocket())
        server_of_node = RpcServer(node.handlers())
        address = f"127.0.0.1:{await server_of_node.start('127.0.0.1', 0)}"
        stack.push_async_callback(server_of_node.close)
        await node.start(Unannounced())
        stack.push_async_callback(node.close)
        line.say_hello()
        attached = asyncio.ensure_future(node.attach(line))
        stack.callback(attached.cancel)
        assert await wait_until(lambda: any(update.stats for update in line.updates), WAIT_S)
        yield Running(node, stub, line, server.aclose, address, engine.url)
