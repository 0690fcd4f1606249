"""Test how a single node answers while it changes its role, and afterwards."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from decode_node.receiver import HandoffReceiver
from node.node import Node
from prefill_node.sender import HandoffSender
from scheduler.role import PREFILL
from shared.lifecycle import wait_until
from shared.rpc.messages import Ack, NodeInfo, PushedNotice, ReserveReply, ReserveRequest, SetRoleRequest, StopRequest
from shared.rpc.methods import PUSHED, RESERVE, STOP
from tests.node.harness import RouterLine, attached, hash_node, submission
from tests.shared.rpc import connected, serving

RESERVATION = ReserveRequest(submission(router="unknown"), "a" * 32, "print")


@dataclass
class RecordingAnnouncer:
    """An announcer that records each announced pair (role, state)."""

    infos: list[tuple[str, str]] = field(default_factory=list)
    waits_for: asyncio.Event | None = None

    async def start(self, info: NodeInfo) -> None:
        await self.update(info)

    async def update(self, info: NodeInfo) -> None:
        self.infos.append((info.role, info.state))
        if self.waits_for is not None:
            await self.waits_for.wait()

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class Stage:
    node: Node
    line: RouterLine
    announcer: RecordingAnnouncer
    ending: asyncio.Event

    async def set_role(self, role: str, drain_s: float = 1.0) -> Ack:
        return await self.node.set_role(self.announcer, self.ending, SetRoleRequest(role, drain_s))

    async def submit_endless(self) -> None:
        """Submit a request that takes longer than any drain in these tests."""
        self.line.submit(submission("r", max_tokens=100_000))
        assert await wait_until(lambda: "r" in self.node.requests, 5.0)


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    factories = {
        kind.role.name: lambda *made, kind=kind: kind(*made, [], 0.2) for kind in (HandoffSender, HandoffReceiver)
    }
    here = hash_node(PREFILL, factories, num_blocks=1 << 16, max_model_len=1 << 18)
    async with attached(here) as line:
        yield Stage(here.node, line, RecordingAnnouncer(), asyncio.Event())


async def test_a_node_announces_that_it_drains_and_then_that_it_is_ready_in_its_new_role() -> None:
    async with stage() as here:
        assert await here.set_role("decode") == Ack()
        assert here.announcer.infos == [("prefill", "draining"), ("decode", "ready")]
        assert (here.node.role.role.name, here.node.state.info.role, here.node.stats().state) == (
            "decode",
            "decode",
            "ready",
        )
        assert await here.set_role("decode") == Ack()
        assert len(here.announcer.infos) == 2, "nothing changed"
        assert await here.set_role("prefill") == Ack()
        assert here.node.role.role is PREFILL


async def test_the_state_is_published_before_a_request_is_rejected() -> None:
    async with stage() as here:
        answered = here.announcer.waits_for = asyncio.Event()
        changing = asyncio.ensure_future(here.set_role("decode"))
        assert await wait_until(lambda: bool(here.announcer.infos), 5.0, interval_s=0.0)
        here.line.submit(submission("r"))  # before the next heartbeat
        assert await wait_until(lambda: bool(here.line.errors()), 5.0)
        rejected = next(index for index, update in enumerate(here.line.updates) if update.deltas)
        assert "draining" in [update.stats.state for update in here.line.updates[:rejected] if update.stats is not None]
        answered.set()
        assert await changing == Ack()


async def test_handoffs_reach_the_decode_adapter_while_the_node_has_that_role() -> None:
    async with stage() as here, serving(here.node.handlers()) as (_, address), connected(address) as channel:
        reason = "node prefill-0 is a prefill node now"
        assert await RESERVE.call(channel, RESERVATION, 5.0) == ReserveReply(error=reason)
        assert await PUSHED.call(channel, PushedNotice(b"t" * 16, b""), 5.0) == Ack(reason)
        await here.set_role("decode")
        asked = await RESERVE.call(channel, RESERVATION, 5.0)
        assert asked.error == "this router is not connected to this node", "the decode adapter answered"
        await here.set_role("prefill")
        assert await RESERVE.call(channel, RESERVATION, 5.0) == ReserveReply(error=reason)
        assert await STOP.call(channel, StopRequest(b"t" * 16), 5.0) == Ack(), "earlier handoffs may still end"


@pytest.mark.parametrize("role", ["king", ""])
async def test_an_unknown_role_is_refused(role: str) -> None:
    async with stage() as here:
        answer = await here.set_role(role)
        assert answer.error == f"unknown role {role!r}: use prefill or decode"
        assert here.announcer.infos == []


async def test_a_drain_of_nan_seconds_ends() -> None:
    async with stage() as here:
        await here.submit_endless()
        assert await asyncio.wait_for(here.set_role("decode", math.nan), 10.0) == Ack()


async def test_a_node_that_ends_while_it_drains_does_not_rejoin() -> None:
    async with stage() as here:
        await here.submit_endless()
        changing = asyncio.ensure_future(here.set_role("decode", 0.3))
        await asyncio.sleep(0.05)
        assert await here.set_role("decode", 0.3) == Ack("the node is draining")
        here.ending.set()
        assert await changing == Ack("the node is shutting down")
        assert here.announcer.infos == [("prefill", "draining")]
        assert here.line.errors() == [("node prefill-0 becomes a decode node", True)]


async def test_one_of_two_concurrent_switches_is_refused() -> None:
    async with stage() as here:
        first, second = await asyncio.gather(here.set_role("decode", 0.3), here.set_role("decode", 0.3))
        assert (first, second) == (Ack(), Ack("the node is draining"))
        assert here.announcer.infos == [("prefill", "draining"), ("decode", "ready")]


async def test_a_caller_that_hangs_up_does_not_leave_the_node_draining() -> None:
    async with stage() as here:
        await here.submit_endless()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(here.set_role("decode", 0.2), 0.05)
        assert await wait_until(lambda: here.node.state.info.state == "ready", 5.0)
        assert here.node.role.role.name == "decode"
