"""The admin route that changes a node's role."""

import logging
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.asgi import read_body
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import wait_until
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import Ack, SetRoleRequest
from shared.rpc.methods import SET_ROLE, PeerError

log = logging.getLogger("baton.router")
MARGIN_S = 10.0  # how long the node may take to answer after its drain
REGISTRY_S = 2.0  # how long the registry may take to report the new role
BODY_BYTES, BODY_S = 4096, 10.0


class RoleBody(BaseModel):
    role: Literal["prefill", "decode"]


class Admin:
    """The handlers of the admin routes. The object tracks the role changes in progress, so that two changes at the same
    time cannot leave the cluster without a usable node."""

    def __init__(self, pools: Sequence[NodePool], drain_s: float) -> None:
        """A node that changes its role waits up to `drain_s` seconds for its requests to end."""
        self._pools = pools
        self._drain_s = drain_s
        self._becoming: dict[str, str] = {}  # the new roles of the nodes that are changing their role, keyed by node id

    def routes(self) -> list[Route]:
        return [Route("/v1/nodes/{node}/role", self.set_role, methods=["POST"])]

    async def set_role(self, request: Request) -> Response:
        """Handle POST {"role": "prefill" | "decode"}. Respond when the node has rejoined. The response contains a note
        if the cluster now has no node of the other role."""
        raw = await read_body(request.scope, request.receive, BODY_BYTES, BODY_S)
        try:
            role = RoleBody.model_validate_json(raw).role
        except ValidationError:
            raise RequestError('role: must be "prefill" or "decode", as in {"role": "decode"}.', "role") from None
        _, connection = self._find(request.path_params["node"])
        note = await self.change(connection, role)
        return JSONResponse({"node": connection.info.id, "role": role, "note": note})

    async def change(self, connection: NodeConnection, role: str) -> str:
        """Change a node's role, and wait until it has rejoined. Return the note for the response.

        Raises RequestError if the node may not change its role, and UnavailableError if it does not answer."""
        pool, _ = self._find(connection.info.id)
        note = self._check(pool, connection, role)
        name, channel = connection.info.id, RpcChannel(connection.info.address)
        self._becoming[name] = role
        try:
            answer: Ack = await SET_ROLE.call(channel, SetRoleRequest(role, self._drain_s), self._drain_s + MARGIN_S)
        except PeerError as error:
            log.warning("changing the role of node %s failed: %s", name, error)
            raise UnavailableError(f"Node {name} did not answer; see the router's log.") from None
        finally:
            channel.close()
            del self._becoming[name]
        if answer.error:
            raise RequestError(f"Node {name} keeps its role: {answer.error}.", "role", status=409)
        await wait_until(lambda: connection.info.role == role, REGISTRY_S)
        return note

    def _find(self, name: str) -> tuple[NodePool, NodeConnection]:
        """Return the pool and the connection of the live node with this name. Raises RequestError if there is none."""
        for pool in self._pools:
            connection = pool.connections.get(name)
            if connection is not None and connection.is_alive:
                return pool, connection
        nodes = [node for pool in self._pools for node in pool.nodes()]
        alive = ", ".join(info.id for info, _, is_alive in nodes if is_alive) or "none"
        raise RequestError(f"There is no live node {name[:64]!r}; live nodes: {alive}.", "node", status=404)

    def _check(self, pool: NodePool, connection: NodeConnection, role: str) -> str:
        """Return a note if the change leaves one role without nodes, or else "". Raises RequestError if the node is
        already changing its role, or if no remaining node could take requests."""
        name = connection.info.id
        if name in self._becoming:
            raise RequestError(f"Node {name} is already becoming a {self._becoming[name]} node.", "role", status=409)
        others = [info for info, _, is_alive in pool.nodes() if is_alive and info.id != name]
        roles = {self._becoming.get(info.id, info.role) for info in others} | {role}
        if pool.mode == "colocated" and "decode" not in roles:
            raise RequestError(
                "In the mode colocated, only decode nodes are used, and this is the last one.", "role", status=409
            )
        if "decode" not in roles:
            return "no decode node is left: prefill nodes generate too"
        return "" if "prefill" in roles else "no prefill node is left: decode nodes compute prompts too"
