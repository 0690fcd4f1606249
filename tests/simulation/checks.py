"""Checks for an idle cluster: nothing is held or left behind, and all counts add up."""

from typing import Any


def unbalanced(world: Any) -> list[str]:
    """What is still held for requests, although all of them have their answer."""
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
        found += [f"{host.name} knows {identity}" for identity in node.active.router_of]
        for outbox in node.sessions.streams.values():
            found += [f"{host.name} outbox {identity}" for identity in outbox.requests]
        found += _of_sides(host)
    if world.router.is_up and world.router.fleet is not None:
        for link in world.router.fleet._connections.values():
            if link.listeners or link.outstanding_tokens or link.kv_tokens or link.prefilling:
                found.append(f"router counts {link.info.id}: {sorted(link.listeners)} {link.kv_tokens}")
    return found


def _of_sides(host: Any) -> list[str]:
    found: list[str] = []
    sides = host.sides()
    if (courier := sides.get("prefill")) is not None:
        found += [f"{host.name} hands off {identity}" for identity in courier._outgoing]
        for peer in courier._peers._peers.values():
            found += [f"{host.name} renews a ticket at {peer.address}" for _ in peer.reservations]
    if (receiver := sides.get("decode")) is not None:
        found += [f"{host.name} awaits room for {identity}" for identity in receiver._waiting]
        found += [f"{host.name} awaits a landing" for _ in range(len(receiver._table))]
    return found


def at_the_end(world: Any) -> list[str]:
    """Of the router that is up: every sample counted once, and as what its client saw."""
    dispatch = world.router.dispatch
    if dispatch is None or not world.router.is_up:
        return ["the router is not up"]
    requests: Any = dispatch.status()["requests"]
    ends = ("finished", "cancelled", "failed", "refused")
    mine = [client for client in world.clients if client.started_in is world.router.process]
    found = []
    if requests["running"] or requests["total"] != sum(requests[name] for name in ends):
        found.append(f"requests do not add up: {requests}")
    finished = sum(client.wish.n for client in mine if client.outcome == "finished")
    if requests["finished"] < finished:
        found.append(f"{finished} samples finished, and the router counted {requests}")
    return found


def left_behind(world: Any) -> list[str]:
    """What a process that ended in good order did not end."""
    found = [f"{host.name} left {task}" for host in world.hosts for task in host.left]
    found += [f"{end.process} left a connection" for end in world.network._ends.values() if end.process.alive]
    return found
