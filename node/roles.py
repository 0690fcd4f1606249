"""Roles of a node: the adapter that sends KV (prefill) or receives it (decode), and the switch between them.

A node that switches its role drains, takes the adapter of the other role, and keeps its weights, its KV pool and its
prefix cache. The adapter of the former role remains, idle, and answers calls of peers about reservations that ended.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from node.node import Node, RoleAdapter, RpcHandler
from scheduler.role import ROLES, Role
from shared.registry import Announcer
from shared.rpc.messages import Ack, SetRoleRequest
from shared.rpc.methods import COMMIT, PUSHED, RENEW, RESERVE, STOP, Rpc, unary

log = logging.getLogger("baton.node")
DECODE_CALLS: tuple[Rpc[Any, Any], ...] = (RESERVE, PUSHED, COMMIT, STOP, RENEW)
MAX_DRAIN_S = 3600.0


class Roles:
    """The adapters that a node has had, by role; each is created and started when it is first used."""

    def __init__(self, factories: Mapping[str, Callable[[], RoleAdapter]]) -> None:
        self._factories = factories
        self._adapters: dict[str, RoleAdapter] = {}

    def adapter(self, role: Role) -> RoleAdapter:
        if role.name not in self._adapters:
            self._adapters[role.name] = adapter = self._factories[role.name]()
            adapter.start()
        return self._adapters[role.name]

    def on_writer_lost(self, writer: str) -> None:
        for adapter in self._adapters.values():
            adapter.on_writer_lost(writer)

    async def close(self) -> None:
        for adapter in self._adapters.values():
            await adapter.close()

    def handlers(self, node: Node) -> dict[Rpc[Any, Any], RpcHandler]:
        """Return handlers of every RPC of any role, for a server that outlives role switches of `node`."""
        return {rpc: partial(self._call, node, rpc) for rpc in DECODE_CALLS}

    async def _call(self, node: Node, rpc: Rpc[Any, Any], stream: Any) -> None:
        """Call the adapter that serves this RPC. Only that of the current role makes new reservations."""
        handlers = [
            adapter.handlers() for adapter in self._adapters.values() if adapter is node.role or rpc is not RESERVE
        ]
        handler = next((served[rpc] for served in handlers if rpc in served), None)
        if handler is None:
            refusal = rpc.reply(error=f"node {node.state.info.id} is a {node.role.role.name} node now")
            handler = unary(partial(_answer, refusal))
        await handler(stream)


async def _answer(reply: Any, _request: Any) -> Any:
    return reply


class RoleSwitch:
    """Serves `SET_ROLE`. Once `ending` is set, the process ends and the node does not rejoin."""

    def __init__(self, node: Node, roles: Roles, announcer: Announcer, ending: asyncio.Event) -> None:
        self._node = node
        self._roles = roles
        self._announcer = announcer
        self._ending = ending

    async def set_role(self, message: SetRoleRequest) -> Ack:
        """Answer when the node has rejoined. Requests that still run after `drain_s` are retried on other nodes."""
        node, role = self._node, ROLES.get(message.role)
        if role is None:
            return Ack(f"unknown role {message.role!r:.40}: use {' or '.join(ROLES)}")
        if node.state.info.state != "ready":
            return Ack("the node is draining")
        if role is node.role.role:
            return Ack()
        if node.shared_pool:
            return Ack("its KV pool is shared with a node of the other role: restart it in that role")
        node.update_info(state="draining")  # before the first await, so that a concurrent call is refused
        drain_s = min(max(message.drain_s, 0.0), MAX_DRAIN_S)
        # Shielded: a caller that hangs up must not leave the node draining.
        return await asyncio.shield(node.tasks.start(self._switch(role, drain_s)))

    async def _switch(self, role: Role, drain_s: float) -> Ack:
        node = self._node
        await self._announcer.update(node.state.info)
        await node.drain(drain_s)
        migrated = node.requests.fail_all(f"node {node.state.info.id} becomes a {role.name} node")
        if self._ending.is_set():
            return Ack("the node ends")
        node.switch_role(self._roles.adapter(role))
        await self._announcer.update(node.state.info)
        log.info("this is a %s node from now on; %d requests are retried on other nodes", role.name, migrated)
        return Ack()
