"""The journal of the nodes: the latest events, the state of each node, and the nodes that left or were lost."""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.nodes.connection import NodeConnection
from router.nodes.load import node_status
from shared.clock import now_ns
from shared.rpc.messages import NodeInfo, NodeStats

log = logging.getLogger("baton.fleet")
MAX_EVENTS = 50  # maximum number of events that are kept
MAX_GONE = 256  # maximum number of nodes that are kept after they left or were lost
KEPT_NS = {"lost": 600 * 10**9, "left": 60 * 10**9}  # how long nodes in these states are kept
# Maps the new state of a node to the kind, the level and the reason of its event. The reason of "lost" is the
# connection's `end_reason`.
CHANGES = {
    "ready": ("ready", logging.INFO, ""),
    "draining": ("draining", logging.INFO, "It takes no new requests and finishes those in progress."),
    "breached": (
        "draining",
        logging.WARNING,
        "Its count of KV blocks is wrong, so it takes no new requests. Restart it.",
    ),
    "left": ("left", logging.INFO, "It was shut down as planned."),
    "stuck": ("lost", logging.WARNING, "Its engine makes no progress."),
    "lost": ("lost", logging.WARNING, ""),
}


@dataclass(slots=True)
class NodePresence:
    """The state of one incarnation of a node as this router sees it, with the time and the reason of its last
    change."""

    connection: NodeConnection
    role: str
    since_ns: int
    state: str = "lost"
    reason: str = "The router has not connected to it yet."
    was_alive: bool = False

    def row(self) -> dict[str, Any]:
        each = self.connection
        status = node_status(each.info, each.stats, each.is_alive)
        state = status["state"] if each.is_alive and self.state != "lost" else self.state
        since_ms = self.since_ns // 10**6 if self.was_alive else None
        return status | {"state": state, "since_ms": since_ms, "reason": self.reason}


class NodeJournal:
    """Records and logs each change of a node once.

    The node pool owns the journal, and calls it on the event loop when a connection or the registry changes.
    The journal keeps a lost node for ten minutes, and a node that left as planned for one minute, unless the node comes
    back. It does not keep a node that never connected.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        """`clock` returns the Unix time in nanoseconds."""
        self._clock = clock
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._presences: dict[str, NodePresence] = {}  # by node id
        self._problem, self._problem_ns = "", 0
        self._num_ready = Counter[str]()

    # ---- recording ----------------------------------------------------------------------------------------------

    def joined(self, connection: NodeConnection) -> None:
        """Record that the registry lists a new node, or a new incarnation of a node."""
        info, before = connection.info, self._presences.pop(connection.info.id, None)
        if before is not None and before.connection.is_alive:
            moved = _moved(before.connection)
            self._record(
                "lost",
                info.id,
                f"Node {info.id} was replaced by a new process; if the old one still runs, set --id.{moved}",
                logging.WARNING,
            )
        present = {each.connection.info.fingerprint for each in self._presences.values() if each.state not in KEPT_NS}
        self._presences[info.id] = NodePresence(connection, info.role, self._clock())
        text, level = f"Node {info.id} joined as a {info.role} node at {info.address}.", logging.INFO
        if present and info.fingerprint not in present:
            others = " or ".join(sorted(present))
            text += (
                f" It has {info.fingerprint}, and the other nodes have {others}: check that its model is the right one."
            )
            level = logging.WARNING
        self._record("joined", info.id, text, level)

    def changed(self, connection: NodeConnection) -> None:
        """Record the changes of a connection's node. Call this before the listeners of a lost node are notified,
        because the event states the number of listeners."""
        info, node = connection.info, self._presences.get(connection.info.id)
        if node is None or node.connection is not connection or connection.router_is_closing:
            return
        if info.role != node.role:
            self._record("role", info.id, f"Node {info.id} is now a {info.role} node instead of a {node.role} node.")
            node.role = info.role
        before, state = node.state, _state(connection)
        if state == before or (not connection.is_alive and before in KEPT_NS):
            return
        now = self._clock()
        again = f" again after {(now - node.since_ns) / 1e9:.1f} s" if before in KEPT_NS and node.was_alive else ""
        node.state, node.since_ns, node.was_alive = state, now, True
        kind, level, reason = CHANGES.get(state, ("draining", logging.WARNING, "It takes no new requests."))
        if state == "lost" and connection.is_alive:
            reason = "Its vLLM server is gone or makes no progress."
        node.reason = reason or ("" if state == "ready" else connection.end_reason)
        if state == "lost" and before == "stuck":
            return  # this was recorded when the node got stuck
        what = {"draining": "is draining", "left": "left", "breached": "failed"}.get(state, f"is {state[:40]}{again}")
        moved = _moved(connection) if kind in {"lost", "left"} else ""
        self._record(kind, info.id, f"Node {info.id} {what}. {node.reason}".rstrip() + moved, level)

    def dropped(self, name: str) -> None:
        """Update the journal after the pool has dropped a node's connection. Forget the node if it never connected. If
        more than MAX_GONE nodes are gone, forget those that have been gone for the longest time."""
        if name in self._presences and not self._presences[name].was_alive:
            del self._presences[name]
        gone = sorted((each.since_ns, name) for name, each in self._presences.items() if each.state in KEPT_NS)
        for _, oldest in gone[:-MAX_GONE]:
            del self._presences[oldest]

    def registry_changed(self, problem: str) -> None:
        """Record a change of the registry's problem, which is "" while the registry works."""
        if problem == self._problem:
            return
        now = self._clock()
        text = problem or f"The registry answers again after {(now - self._problem_ns) / 1e9:.0f} s."
        self._problem, self._problem_ns = problem, now
        self._record("registry", "", text, logging.WARNING if problem else logging.INFO)

    def count_ready(self) -> None:
        """Log how many nodes of each role are ready, if this has changed."""
        counts = Counter(each.role for each in self._presences.values() if each.state == "ready")
        if counts != self._num_ready:
            self._num_ready = counts
            log.info("ready: %d prefill, %d decode", counts["prefill"], counts["decode"])

    def _record(self, kind: str, node: str, text: str, level: int = logging.INFO) -> None:
        event = {"number": self._num_events, "time_ms": self._clock() // 10**6, "kind": kind, "node": node}
        self._events.append(event | {"text": text})
        self._num_events += 1
        log.log(level, "%s", text)

    # ---- reading ------------------------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """Return the latest events, oldest first."""
        return list(self._events)

    def rows(self) -> list[dict[str, Any]]:
        """Return the status of every node, including those that left or were lost recently."""
        return [each.row() for each in self._kept()]

    def metric_rows(self) -> list[tuple[NodeInfo, NodeStats, bool]]:
        """Return the info and latest stats of every node, and whether the node is alive. Nodes that left as planned are
        not included."""
        rows = (each.connection for each in self._kept() if each.state != "left")
        return [(each.info, each.stats, each.is_alive) for each in rows]

    def _kept(self) -> list[NodePresence]:
        """Return the presences, after removing the nodes that have been gone for too long."""
        now = self._clock()
        self._presences = {
            name: each
            for name, each in self._presences.items()
            if each.connection.is_listed or now - each.since_ns < KEPT_NS.get(each.state, now)
        }
        return list(self._presences.values())


def _state(connection: NodeConnection) -> str:
    if not connection.is_alive:
        return "left" if connection.is_leaving else "lost"
    stats = connection.stats.state
    if stats == "stuck" and "engine_url" in connection.info.attributes:
        return "lost"  # a proxy node has lost its engine, and will rejoin as a new incarnation
    return connection.info.state if stats == "ready" else stats


def _moved(connection: NodeConnection) -> str:
    count = len(connection.listeners)
    requests = "1 request, which continues" if count == 1 else f"{count} requests, which continue"
    return f" It had {requests} on other nodes." if count else ""
