"""What an operator may ask of a running cluster: another role for a node."""

import json
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.http.asgi import read_body
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import wait_until
from shared.rpc.messages import Ack, SetRoleRequest
from shared.rpc.methods import SET_ROLE, PeerError, connect

log = logging.getLogger("baton.router")
ROLES = ("prefill", "decode")
MARGIN_S = 10.0  # beyond the drain, for the node to answer
NEWS_S = 2.0  # for the registry to say so too
BODY_BYTES, BODY_S = 4096, 10.0


def admin_routes(fleet: NodePool, drain_s: float) -> list[Route]:
    """`drain_s`: how long a node that changes its role waits for its requests."""
    return [Route("/v1/nodes/{node}/role", Admin(fleet, drain_s).set_role, methods=["POST"])]


class Admin:
    def __init__(self, fleet: NodePool, drain_s: float) -> None:
        self._fleet = fleet
        self._drain_s = drain_s
        self._becoming: dict[str, str] = {}  # node -> role, of the changes under way

    async def set_role(self, request: Request) -> Response:
        """POST {"role": "prefill" | "decode"}; answered when the node has rejoined, with a note where the cluster
        works in another way than it did."""
        role = _role(await read_body(request.scope, request.receive, BODY_BYTES, BODY_S))
        link = self._link(request.path_params["node"])
        note = self._check(link, role)
        name, channel = link.info.id, connect(link.info.address)
        self._becoming[name] = role
        try:
            answer: Ack = await SET_ROLE.call(channel, SetRoleRequest(role, self._drain_s), self._drain_s + MARGIN_S)
        except PeerError as error:
            log.warning("node %s was not given another role: %s", name, error)
            raise UnavailableError(f"Node {name} did not answer; the router's log says more.") from None
        finally:
            channel.close()
            del self._becoming[name]
        if answer.error:
            raise RequestError(f"Node {name} keeps its role: {answer.error}.", "role", status=409)
        await wait_until(lambda: link.info.role == role, NEWS_S)
        return JSONResponse({"node": name, "role": role, "note": note})

    def _link(self, name: str) -> NodeConnection:
        link = self._fleet.find(name)
        if link is None or not link.is_alive:
            there = ", ".join(info.id for info, _, alive in self._fleet.nodes() if alive) or "none"
            raise RequestError(f"There is no live node {name[:64]!r}; those that live: {there}.", "node", status=404)
        return link

    def _check(self, link: NodeConnection, role: str) -> str:
        """What will be different; raises Rejected when nobody would take requests any more."""
        name = link.info.id
        if name in self._becoming:
            raise RequestError(f"Node {name} is becoming a {self._becoming[name]} node already.", "role", status=409)
        others = [info for info, _, alive in self._fleet.nodes() if alive and info.id != name]
        roles = {self._becoming.get(info.id, info.role) for info in others} | {role}
        if self._fleet.mode == "colocated" and "decode" not in roles:
            raise RequestError("Only decode nodes are used in mode colocated, and it is the last.", "role", status=409)
        if "decode" not in roles:
            return "no decode node is left: prefill nodes generate too"
        return "" if "prefill" in roles else "no prefill node is left: decode nodes compute prompts too"


def _role(body: bytes) -> str:
    try:
        value: Any = json.loads(body)
        role = value["role"]
    except (ValueError, TypeError, KeyError):
        role = None
    if role not in ROLES:
        raise RequestError('role: must be "prefill" or "decode", as in {"role": "decode"}.', "role")
    return str(role)
