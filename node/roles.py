"""A node's ends of handoffs, by role: the prefill side carries KV out, the decode side takes it in.

A node may change its role while it runs. It drains, takes on the other side, and keeps its weights, its KV pool and
its prefix cache. The side it had stays, idle, for what writers still say of landings that ended.
"""

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from node.node import Node
from scheduler.role import ROLES, Role
from shared.kv.channel import KVChannel
from shared.kv.staging import KVMemory
from shared.registry import Announcer
from shared.rpc.messages import Ack, SetRoleRequest
from shared.rpc.methods import COMMIT, PUSHED, RENEW, RESERVE, STOP, Rpc, unary

log = logging.getLogger("baton.node")
# Module and class of each role's side: named, as the engine imports nothing that is built on it.
SIDES = {"prefill": ("prefill_node.sender", "HandoffSender"), "decode": ("decode_node.receiver", "HandoffReceiver")}
DECODE_CALLS: tuple[Rpc[Any, Any], ...] = (RESERVE, PUSHED, COMMIT, STOP, RENEW)
MAX_DRAIN_S = 3600.0


class RoleAdapter(Protocol):
    """What a prefill or a decode node does beyond computing: its end of the handoffs."""

    def handlers(self) -> Mapping[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]: ...
    def start(self) -> None: ...
    async def close(self) -> None: ...
    def on_writer_lost(self, writer: str) -> None: ...
    def on_abort(self, identity: str) -> bool: ...


class Roles:
    """The sides that a node has had; `use` first. `channels`: best first, and there before the first `use`."""

    def __init__(
        self,
        node: Node,
        memory: KVMemory,
        channels: Sequence[KVChannel],
        reserve_timeout_s: float,
    ) -> None:
        self._node = node
        self._make = (memory, channels, reserve_timeout_s)
        self._adapters: dict[str, RoleAdapter] = {}

    def assume(self, role: Role) -> None:
        """From now on the node ends requests where `role` says."""
        if role.name not in self._adapters:
            module, name = SIDES[role.name]
            side: RoleAdapter = getattr(importlib.import_module(module), name)(self._node, *self._make)
            self._adapters[role.name] = side
            side.start()
        self._node.role = role
        self._node.on_abort = self._abort

    def handlers(self) -> dict[Rpc[Any, Any], Callable[[Any], Awaitable[None]]]:
        return {rpc: partial(self._call, rpc) for rpc in DECODE_CALLS}

    def on_writer_lost(self, boot: str) -> None:
        for side in self._adapters.values():
            side.on_writer_lost(boot)

    async def close(self) -> None:
        for side in self._adapters.values():
            await side.close()

    def _abort(self, identity: str) -> bool:
        return any(side.on_abort(identity) for side in self._adapters.values())

    async def _call(self, rpc: Rpc[Any, Any], stream: Any) -> None:
        """To the decode side. Without it, or for new room when it is not in use, the answer says so."""
        side = self._adapters.get("decode")
        if side is None or (rpc is RESERVE and self._node.role.name != "decode"):
            refusal = rpc.reply(error=f"node {self._node.info.id} is a {self._node.role.name} node now")
            await unary(partial(_answer, refusal))(stream)
            return
        await side.handlers()[rpc](stream)


async def _answer(reply: Any, _request: Any) -> Any:
    return reply


class RoleSwitch:
    """Serves `SET_ROLE`. `ending` is set once the process ends: nothing rejoins after that."""

    def __init__(self, node: Node, sides: Roles, announcer: Announcer, ending: asyncio.Event) -> None:
        self._node = node
        self._roles = sides
        self._announcer = announcer
        self._ending = ending

    async def set_role(self, message: SetRoleRequest) -> Ack:
        """Returns when the node has rejoined. Requests that still run after `drain_s` go on elsewhere."""
        node, role = self._node, ROLES.get(message.role)
        if role is None:
            return Ack(f"{message.role!r} is no role: it is {' or '.join(ROLES)}")
        if node.info.state != "ready":
            return Ack("the node is draining")
        if role is node.role:
            return Ack()
        if node.shared_pool:
            return Ack("its KV pool is shared with a node of the other role: start it anew in that role")
        node.info = replace(node.info, state="draining")  # at once: another call finds it so
        # A caller that hangs up must not leave the node draining.
        drain_s = min(max(message.drain_s, 0.0), MAX_DRAIN_S)
        return await asyncio.shield(node.tasks.start(self._change(role, drain_s)))

    async def _change(self, role: Role, drain_s: float) -> Ack:
        node = self._node
        await self._announcer.update(node.info)
        await node.drain(drain_s)
        moved = node.migrate_all(f"node {node.info.id} becomes a {role.name} node")
        if self._ending.is_set():
            return Ack("the node ends")
        self._roles.assume(role)
        node.info = replace(node.info, role=role.name, state="ready")
        await self._announcer.update(node.info)
        log.info("a %s node from now on; %d requests went on elsewhere", role.name, moved)
        return Ack()
