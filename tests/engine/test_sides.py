"""A node that changes its role: what it answers meanwhile and afterwards, without a router or a peer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine.hash_model import KV_BYTES, HashRunner
from engine.node import Node
from engine.sides import RoleChange, Sides
from scheduler.role import PREFILL, Role
from scheduler.scheduler import Limits, Scheduler
from shared.kv.memory import HostMemory
from shared.messages import Answer, NodeInfo, Pushed, Reserve, Reserved, Sampling, SetRole, Stop, Submit, pack_ids
from shared.serve import until
from shared.services import PUSHED, RESERVE, STOP, RpcServer, connect

BLOCKS, BLOCK_TOKENS, LAYERS = 9, 4, 1
RESERVATION = Reserve(Submit("r", "router", pack_ids([5]), 1, 4, Sampling()), "a" * 32, "print")


@dataclass
class Told:
    """An announcer that keeps what it was told, as (role, state)."""

    infos: list[tuple[str, str]] = field(default_factory=list)

    async def start(self, info: NodeInfo) -> None:
        await self.update(info)

    async def update(self, info: NodeInfo) -> None:
        self.infos.append((info.role, info.state))

    async def close(self) -> None:
        """Nothing is open."""


@dataclass
class Stage:
    node: Node
    sides: Sides
    told: Told
    ending: asyncio.Event
    change: RoleChange


@asynccontextmanager
async def stage(role: Role = PREFILL) -> AsyncIterator[Stage]:
    memory = HostMemory(BLOCKS, BLOCK_TOKENS * LAYERS * KV_BYTES)
    info = NodeInfo("n0", "b" * 32, role.name, "h:1", "m", "print", BLOCK_TOKENS, 32, BLOCKS, 64, 8)
    runner = HashRunner(memory.rows, BLOCK_TOKENS, LAYERS, 512)
    node = Node(info, role, Scheduler(Limits(), BLOCKS, BLOCK_TOKENS), runner, 0.05, 512)
    sides, told, ending = Sides(node, memory, [], 0.2), Told(), asyncio.Event()
    sides.use(role)
    node.start()
    try:
        yield Stage(node, sides, told, ending, RoleChange(node, sides, told, ending))
    finally:
        await sides.close()
        await node.close()
        memory.close()


async def test_a_node_says_that_it_drains_and_then_that_it_is_back_in_its_new_role() -> None:
    async with stage() as here:
        assert await here.change.set_role(SetRole("decode", 1.0)) == Answer()
        assert here.told.infos == [("prefill", "draining"), ("decode", "ready")]
        assert (here.node.role.name, here.node.info.role, here.node.load().state) == ("decode", "decode", "ready")
        assert await here.change.set_role(SetRole("decode", 1.0)) == Answer()
        assert len(here.told.infos) == 2, "nothing was to change"
        assert await here.change.set_role(SetRole("prefill", 1.0)) == Answer()
        assert here.node.role is PREFILL


async def test_handoffs_reach_the_decode_side_while_it_is_one_and_are_answered_always() -> None:
    async with stage() as here:
        server = RpcServer(here.sides.handlers())
        channel = connect(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        try:
            refused = Reserved(error="node n0 is a prefill node now")
            assert await RESERVE.call(channel, RESERVATION, 5.0) == refused
            assert await PUSHED.call(channel, Pushed(b"t" * 16, b""), 5.0) == Answer("node n0 is a prefill node now")
            await here.change.set_role(SetRole("decode", 1.0))
            asked = await RESERVE.call(channel, RESERVATION, 5.0)
            assert asked.error == "its router is not attached here", "the decode side looked at it"
            await here.change.set_role(SetRole("prefill", 1.0))
            assert await RESERVE.call(channel, RESERVATION, 5.0) == refused
            assert await STOP.call(channel, Stop(b"t" * 16), 5.0) == Answer(), "what began before may still end"
        finally:
            channel.close()
            await server.close()


@pytest.mark.parametrize("role", ["king", ""])
async def test_what_is_no_role_is_refused(role: str) -> None:
    async with stage() as here:
        answer = await here.change.set_role(SetRole(role))
        assert answer.error == f"{role!r} is no role: it is prefill or decode"
        assert here.told.infos == []


async def test_a_node_that_drains_keeps_its_role_and_one_that_ends_does_not_come_back() -> None:
    async with stage() as here:
        here.node.roster.router_of["r"] = "router"  # a request that does not end
        changing = asyncio.ensure_future(here.change.set_role(SetRole("decode", 0.3)))
        await asyncio.sleep(0.05)
        assert await here.change.set_role(SetRole("decode", 0.3)) == Answer("the node is draining")
        here.ending.set()
        assert await changing == Answer("the node ends")
        assert here.told.infos == [("prefill", "draining")]
        assert not here.node.has("r"), "it was told to go on elsewhere"


async def test_of_two_changes_at_once_one_is_refused_and_the_node_is_not_drained_twice() -> None:
    async with stage() as here:
        first, second = await asyncio.gather(
            here.change.set_role(SetRole("decode", 0.3)), here.change.set_role(SetRole("decode", 0.3))
        )
        assert (first, second) == (Answer(), Answer("the node is draining"))
        assert here.told.infos == [("prefill", "draining"), ("decode", "ready")]


async def test_a_caller_that_hangs_up_leaves_no_node_draining() -> None:
    async with stage() as here:
        here.node.roster.router_of["r"] = "router"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(here.change.set_role(SetRole("decode", 0.2)), 0.05)
        assert await until(lambda: here.node.info.state == "ready", 5.0)
        assert here.node.role.name == "decode"
