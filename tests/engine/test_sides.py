"""A node that changes its role: what it answers meanwhile and afterwards, without a router or a peer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from engine.hash_model import KV_BYTES, HashRunner
from node.node import Node
from node.roles import Roles, RoleSwitch
from scheduler.role import PREFILL, Role
from scheduler.scheduler import Scheduler, StepLimits
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    Ack,
    NodeInfo,
    PushedNotice,
    ReserveReply,
    ReserveRequest,
    SamplingParams,
    SetRoleRequest,
    StopRequest,
    SubmitRequest,
    pack_ids,
)
from shared.rpc.methods import PUSHED, RESERVE, STOP, RpcServer, connect

BLOCKS, BLOCK_TOKENS, LAYERS = 9, 4, 1
RESERVATION = ReserveRequest(SubmitRequest("r", "router", pack_ids([5]), 1, 4, SamplingParams()), "a" * 32, "print")


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
    sides: Roles
    told: Told
    ending: asyncio.Event
    change: RoleSwitch


@asynccontextmanager
async def stage(role: Role = PREFILL) -> AsyncIterator[Stage]:
    memory = HostMemory(BLOCKS, BLOCK_TOKENS * LAYERS * KV_BYTES)
    info = NodeInfo("n0", "b" * 32, role.name, "h:1", "m", "print", BLOCK_TOKENS, 32, BLOCKS, 64, 8)
    runner = HashRunner(memory.rows, BLOCK_TOKENS, LAYERS, 512)
    node = Node(info, role, Scheduler(StepLimits(), BLOCKS, BLOCK_TOKENS), runner, 0.05, 512)
    sides, told, ending = Roles(node, memory, [], 0.2), Told(), asyncio.Event()
    sides.assume(role)
    node.start()
    try:
        yield Stage(node, sides, told, ending, RoleSwitch(node, sides, told, ending))
    finally:
        await sides.close()
        await node.close()
        memory.close()


async def test_a_node_says_that_it_drains_and_then_that_it_is_back_in_its_new_role() -> None:
    async with stage() as here:
        assert await here.change.set_role(SetRoleRequest("decode", 1.0)) == Ack()
        assert here.told.infos == [("prefill", "draining"), ("decode", "ready")]
        assert (here.node.role.name, here.node.info.role, here.node.stats().state) == ("decode", "decode", "ready")
        assert await here.change.set_role(SetRoleRequest("decode", 1.0)) == Ack()
        assert len(here.told.infos) == 2, "nothing was to change"
        assert await here.change.set_role(SetRoleRequest("prefill", 1.0)) == Ack()
        assert here.node.role is PREFILL


async def test_handoffs_reach_the_decode_side_while_it_is_one_and_are_answered_always() -> None:
    async with stage() as here:
        server = RpcServer(here.sides.handlers())
        channel = connect(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        try:
            refused = ReserveReply(error="node n0 is a prefill node now")
            assert await RESERVE.call(channel, RESERVATION, 5.0) == refused
            assert await PUSHED.call(channel, PushedNotice(b"t" * 16, b""), 5.0) == Ack("node n0 is a prefill node now")
            await here.change.set_role(SetRoleRequest("decode", 1.0))
            asked = await RESERVE.call(channel, RESERVATION, 5.0)
            assert asked.error == "its router is not attached here", "the decode side looked at it"
            await here.change.set_role(SetRoleRequest("prefill", 1.0))
            assert await RESERVE.call(channel, RESERVATION, 5.0) == refused
            assert await STOP.call(channel, StopRequest(b"t" * 16), 5.0) == Ack(), "what began before may still end"
        finally:
            channel.close()
            await server.close()


@pytest.mark.parametrize("role", ["king", ""])
async def test_what_is_no_role_is_refused(role: str) -> None:
    async with stage() as here:
        answer = await here.change.set_role(SetRoleRequest(role))
        assert answer.error == f"{role!r} is no role: it is prefill or decode"
        assert here.told.infos == []


async def test_a_node_that_drains_keeps_its_role_and_one_that_ends_does_not_come_back() -> None:
    async with stage() as here:
        here.node.active.router_of["r"] = "router"  # a request that does not end
        changing = asyncio.ensure_future(here.change.set_role(SetRoleRequest("decode", 0.3)))
        await asyncio.sleep(0.05)
        assert await here.change.set_role(SetRoleRequest("decode", 0.3)) == Ack("the node is draining")
        here.ending.set()
        assert await changing == Ack("the node ends")
        assert here.told.infos == [("prefill", "draining")]
        assert not here.node.owns("r"), "it was told to go on elsewhere"


async def test_of_two_changes_at_once_one_is_refused_and_the_node_is_not_drained_twice() -> None:
    async with stage() as here:
        first, second = await asyncio.gather(
            here.change.set_role(SetRoleRequest("decode", 0.3)), here.change.set_role(SetRoleRequest("decode", 0.3))
        )
        assert (first, second) == (Ack(), Ack("the node is draining"))
        assert here.told.infos == [("prefill", "draining"), ("decode", "ready")]


async def test_a_caller_that_hangs_up_leaves_no_node_draining() -> None:
    async with stage() as here:
        here.node.active.router_of["r"] = "router"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(here.change.set_role(SetRoleRequest("decode", 0.2)), 0.05)
        assert await wait_until(lambda: here.node.info.state == "ready", 5.0)
        assert here.node.role.name == "decode"
