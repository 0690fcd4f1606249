"""Checks that an idle cluster holds no resources, that counts add up, and that a set of seeds reaches all faults."""

from collections import Counter
from typing import Any

from shared.failpoints import SITES
from tests.simulation.channel import FAULTS
from tests.simulation.scenario import FLEET_FAULTS, NODE_FAULTS, OUTAGE, STALL


def unbalanced(world: Any) -> list[str]:
    """Return the resources that are still held although all requests have been answered."""
    found: list[str] = []
    for host in world.nodes:
        scheduler, node = host.scheduler, host.node
        if not host.is_up or scheduler is None or node is None:
            found.append(f"{host.name} is not up")
            continue
        ledger = scheduler.ledger()
        if ledger.owned or ledger.reserved or ledger.quarantined:
            found.append(f"{host.name} {ledger}")
        found += [f"{host.name} {request.id} {request.state}" for request in scheduler.requests.values()]
        if len(node.requests) or node.requests.num_tokens:
            found.append(f"{host.name} has {len(node.requests)} requests of {node.requests.num_tokens} tokens")
        found += [
            f"{host.name} has handoffs as a {adapter.role.name} node"
            for adapter in host.adapters
            if not adapter.is_idle
        ]
    if world.router.is_up and world.router.fleet is not None:
        for link in world.router.fleet.connections.values():
            if link.listeners or link.load.outstanding_tokens or link.load.kv_tokens or link.load.prefilling:
                found.append(f"the router still counts {link.info.id}: {sorted(link.listeners)} {link.load.kv_tokens}")
    return found


def at_the_end(world: Any) -> list[str]:
    """Return the errors in the running router's counts. Each sample must be counted once, by its outcome."""
    dispatch = world.router.dispatch
    if dispatch is None or not world.router.is_up:
        return ["the router is not up"]
    requests = dispatch.status()["requests"]
    ends = ("finished", "cancelled", "failed", "refused")
    mine = [client for client in world.clients if client.started_in is world.router.process]
    found = []
    if requests["running"] or requests["total"] != sum(requests[name] for name in ends):
        found.append(f"requests do not add up: {requests}")
    finished = sum(client.plan.n for client in mine if client.outcome == "finished")
    if requests["finished"] < finished:
        found.append(f"{finished} samples finished, but the router counted {requests}")
    return found


def left_behind(world: Any) -> list[str]:
    """Return the tasks and connections that processes left open after an orderly exit."""
    found = [f"{host.name} left {task}" for host in world.hosts for task in host.left]
    found += [f"{end.process} left a connection" for end in world.network._ends.values() if end.process.alive]
    return found


# The faults and states that a set of seeds must reach, because a fault that never occurs proves nothing.
STATES = (
    "client: finished", "client: cancelled", "client: failed", "client: lost", "state: preempted", "state: quarantined",
    "state: reserved", "state: prefix hit", "state: rows found corrupt", "state: two nodes down",
    "state: moved before a token", "state: moved in decode", "state: a moved request found its blocks",
    "state: guesses accepted", "state: guesses rejected",
    "channel: a fenced writer is refused", "channel: a writer that seems dead is connected",
    "channel: a row without a reservation is dropped", "channel: a row arrives after its writer gave up",
    "exited in order", "log: request %s is retried: %s", "log: handoff of %s failed: %s",
    "log: handoff of %s ended: %s",
)  # fmt: skip
WANTED = (
    *(f"site {site}" for site in SITES),
    *(f"fault: {kind}" for kind in sorted({*NODE_FAULTS, *FLEET_FAULTS, *OUTAGE.values(), STALL, "kill router"})),
    *(f"channel: {fault}" for fault in FAULTS),
    *STATES,
)


def table(reached: Counter[str]) -> tuple[str, list[str]]:
    """Return a table of the counts, with names outside WANTED last, and the names in WANTED that were never reached."""
    others = [what for what in sorted(reached) if what not in WANTED]
    lines = [f"{reached[what]:9}  {what}" for what in (*WANTED, *others)]
    return "\n".join(lines), [what for what in WANTED if not reached[what]]
