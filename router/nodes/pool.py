"""The pool of nodes, which tracks the nodes that are alive and take requests, and chooses the nodes for each attempt.

The registry lists the nodes to connect to. Whether a node is alive depends only on the stream to the node.
"""

import asyncio
import gc
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from random import Random
from typing import Any

from router.nodes.connection import ANY_VERSION, LIVENESS_INTERVALS, ModelVersion, NodeConnection
from router.nodes.health import OutlierDetector
from router.nodes.journal import NodeJournal
from router.nodes.load import kv_capacity_tokens, step_tokens
from router.nodes.placement import (
    BACKLOG_STEPS,
    PlacementCandidate,
    PoolCapacity,
    RoutableNodes,
    capacity_of,
    needs_peer,
)
from router.observer import RouterObserver
from scheduler.placement import PrefixIndex
from scheduler.prefix import MediaSpan, block_hashes
from shared.lifecycle import TaskGroup
from shared.registry import Registry
from shared.rpc.messages import NodeInfo, NodeStats

log = logging.getLogger("baton.fleet")
SLOW_START_S = 10.0  # during this time, a node that joins busy nodes gets less than its share of requests
MAX_LEFT = 1024
MAX_DETECTORS = 1024  # when this number is reached, the detectors of nodes without recent failures are removed
# A group, its prefill nodes that may be chosen, and its decode nodes that may be chosen
Allowed = tuple[RoutableNodes[NodeConnection], list[NodeConnection], list[NodeConnection]]
FEW_NODES = 64  # with at most this many nodes, each change of a node is processed at once
COLLECT_S = 0.05  # with more than FEW_NODES nodes: interval of collections of young garbage
NOTIFY_S = 0.1  # with more than FEW_NODES nodes, the capacity is computed at most once in this time
TIMER_S = 0.01  # added to timers, because a timer that fires early would find the node still ejected


class NodePool:
    """The nodes that the router knows. The pool owns one `NodeConnection` for each node.

    The pool follows the registry, ejects nodes that fail (`OutlierDetector`), gives new nodes a growing share of the
    requests, and chooses the nodes for each attempt. The dispatcher calls the pool on the router's event loop. To be
    fast with many nodes, the pool computes the list of routable nodes only when a node changes, and considers only a
    few nodes for each decision.
    """

    def __init__(
        self,
        router: str,
        registry: Registry,
        mode: str,
        timeout_s: float,
        observer: RouterObserver,
        on_capacity: Callable[[PoolCapacity, float], object] = lambda *_: None,
    ) -> None:
        """Create an empty pool. A node is lost after `timeout_s` seconds without a message. After every
        change, `on_capacity` is called with the pool's capacity and the monotonic time."""
        self.router = router
        self.mode = mode
        self.journal = NodeJournal()
        self.prefixes = PrefixIndex()
        # By node id; all incarnations of a node share a detector.
        self.outliers = defaultdict[str, OutlierDetector](OutlierDetector)
        self._registry = registry
        self._timeout_s = timeout_s
        self._observer = observer
        self._on_capacity = on_capacity
        self.connections: dict[str, NodeConnection] = {}  # by node id
        self.adapters: dict[str, str] = {}  # digests of the LoRA adapters of all nodes, including lost nodes, by name
        self.has_met_nodes = False  # whether any node has joined since the router started
        self.has_been_ready = False  # whether any node has been ready since the router started
        self.unloaded: set[str] = set()  # names of adapters that no request may use, even if nodes have them
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskGroup()
        self._changed = asyncio.Event()
        # If nodes of one role cannot work because no node of the other role is ready: this other role. Otherwise "".
        self.missing_role = ""
        # One group for each fingerprint; valid unless `_routable` is None.
        self._groups: list[RoutableNodes[NodeConnection]] = []
        self._routable: tuple[list[NodeConnection], list[NodeConnection]] | None = None  # None after a change
        self._capacity: PoolCapacity | None = None  # None after a change, until it is computed
        self._num_frozen = 0  # the number of live nodes when `gc.freeze` was last called
        self._notifying: asyncio.TimerHandle | None = None  # timer that will report a change to `on_capacity`
        self._ramps_until = 0.0  # the latest `ramp_until` of all connections
        self._handoffs_before = {"handoffs": 0, "blocks_moved": 0, "bytes_moved": 0}  # totals of nodes that left
        self._left: dict[str, dict[str, int]] = {}  # the totals of the last MAX_LEFT incarnations that left

    # ---- the nodes ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._registry.start(self._reconcile)
        self._tasks.start(self._watch())

    async def _watch(self) -> None:
        """Detect silent nodes. One timer for all nodes costs less than one timer for each node."""
        while True:
            await asyncio.sleep(self._timeout_s / LIVENESS_INTERVALS)
            for connection in list(self.connections.values()):
                connection.pass_interval()

    async def close(self) -> None:
        if self._notifying is not None:
            self._notifying.cancel()
        for connection in self.connections.values():
            connection.router_is_closing = True
        await self._registry.close()
        await self._tasks.close()

    def nodes(self) -> list[tuple[NodeInfo, NodeStats, bool]]:
        """Return every node's info and latest stats, and whether the node is alive."""
        return [(each.info, each.stats, each.is_alive) for each in self.connections.values()]

    def status(self) -> dict[str, Any]:
        """Return the pool's part of `/v1/status`. The totals include the handoffs of nodes that have left."""
        totals = {
            name: before + sum(int(getattr(each.stats, name)) for each in self.connections.values())
            for name, before in self._handoffs_before.items()
        }
        rows = self.journal.rows()
        are_replicas = bool(rows) and all(row["role"] == "decode" and "engine_url" in row["facts"] for row in rows)
        return {
            "mode": "replicas" if are_replicas else self.mode,
            "registry": {"kind": self._registry.kind, "state": self._registry.state},
            "nodes": rows,
            "events": self.journal.events(),
            **totals,
        }

    async def change(self) -> None:
        """Wait until a node joins, leaves, or changes whether it takes requests."""
        self._changed.clear()
        await self._changed.wait()

    def _reconcile(self) -> None:
        """Connect to the nodes that the registry has added. Drop the nodes that it no longer lists, unless they are
        still alive."""
        listed = self._registry.nodes
        for name, info in listed.items():
            connection = self.connections.get(name)
            if connection is not None and connection.info is info and connection.is_listed:
                continue
            if connection is not None and connection.info.incarnation_id == info.incarnation_id:
                before, connection.info = connection.info, info
                self._read_adapters(info, before)
                connection.is_listed = True
                self.journal.changed(connection)
                continue
            if connection is not None:
                self._drop(name)
            self._connect(info)
        for name in self.connections.keys() - listed.keys():
            self.connections[name].is_listed = False
            if not self.connections[name].is_alive:
                self._drop(name)
        self.journal.registry_changed(self._registry.problem)
        self.notify()

    def _connect(self, info: NodeInfo) -> None:
        if len(self.outliers) >= MAX_DETECTORS:
            now = time.monotonic()
            for name in [name for name, detector in self.outliers.items() if detector.is_forgotten(now)]:
                del self.outliers[name]
        connection = NodeConnection(
            self.router, info, self._timeout_s, self.connection_changed, self._observer, self._wants_records
        )
        self.connections[info.id] = connection
        self._count_left(self._left.pop(info.incarnation_id, {}), -1)  # a node that is back reports its own totals
        self.has_met_nodes = True
        self._read_adapters(info)
        self.journal.joined(connection)
        self._runs[info.id] = self._tasks.start(connection.run())

    def _read_adapters(self, info: NodeInfo, before: NodeInfo | None = None) -> None:
        """Add the adapters of a node. Remove the adapters that this node has unloaded and that no other node has."""
        for name in (before.adapters if before is not None else {}).keys() - info.adapters.keys():
            if not any(name in each.info.adapters for each in self.connections.values()):
                self.adapters.pop(name, None)
        self.adapters |= {name: digest for name, digest in info.adapters.items() if name not in self.unloaded}

    def _wants_records(self, name: str) -> bool:
        return self._observer.wants_records(name, len(self.connections))

    def _drop(self, name: str) -> None:
        connection = self.connections.pop(name)
        connection.is_listed = False
        self.journal.dropped(name)
        left = {total: int(getattr(connection.stats, total)) for total in self._handoffs_before}
        self._count_left(left, 1)
        self._left[connection.info.incarnation_id] = left
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]
        run = self._runs.pop(name)
        if run is not asyncio.current_task():
            run.cancel()

    def _count_left(self, totals: Mapping[str, int], sign: int) -> None:
        for total, value in totals.items():
            self._handoffs_before[total] += sign * value

    def notify(self) -> None:
        """Invalidate the cached lists after a change of a node, and wake the tasks that wait for a change.

        With many nodes, the capacity is computed at most once per NOTIFY_S, because the computation visits every
        node."""
        self._routable = self._capacity = None
        self._changed.set()
        if len(self.connections) <= FEW_NODES:
            self._notify_capacity()
        elif self._notifying is None:
            self._notifying = asyncio.get_running_loop().call_later(NOTIFY_S, self._notify_capacity)

    def _notify_capacity(self) -> None:
        if self._notifying is not None:
            self._notifying.cancel()
            self._notifying = None
        num_alive = sum(each.is_alive for each in self.connections.values())
        if num_alive > max(FEW_NODES, self._num_frozen):
            # Exclude the connections and their streams from garbage collections. With 1,000 nodes, a collection takes
            # 0.2 s, which would delay tokens. Frozen objects in cycles are never freed, so `gc.freeze` is called only
            # when there are more nodes than ever before.
            if not self._num_frozen:
                self._tasks.start(_collect_young())
            self._num_frozen = num_alive
            gc.freeze()
        self.journal.count_ready()
        self._on_capacity(self.capacity(), time.monotonic())

    def connection_changed(self, connection: NodeConnection) -> None:
        """Process a connection that has become alive, ready, not ready or lost."""
        self.journal.changed(connection)
        if connection.is_alive:
            self._start_slowly(connection)
        elif not connection.is_leaving:
            self.outliers[connection.info.id].died(time.monotonic())
            self._schedule_return(connection)
        self.notify()
        if not connection.is_alive:
            self.prefixes.forget(connection.info.id)
            if not connection.is_listed and self.connections.get(connection.info.id) is connection:
                self._drop(connection.info.id)

    def _start_slowly(self, connection: NodeConnection) -> None:
        """If the node joins busy nodes, limit the requests that it gets during SLOW_START_S. The new node is idle, so
        placement would otherwise send every new request to it."""
        before = time.monotonic() - SLOW_START_S
        peers = (each for each in self.connections.values() if each.info.role == connection.info.role)
        if connection.alive_since >= before and any(each.is_alive and each.alive_since < before for each in peers):
            connection.ramp_until = connection.alive_since + SLOW_START_S
            self._ramps_until = max(self._ramps_until, connection.ramp_until)

    # ---- outliers -----------------------------------------------------------------------------------------------

    def failed(self, *connections: NodeConnection) -> None:
        """Count a failure for each of these nodes, because it is unknown which of them caused it."""
        now = time.monotonic()
        for connection in connections:
            if self.outliers[connection.info.id].failed(now):
                log.info("node %s fails too often: other nodes are preferred for some time", connection.info.id)
                self._schedule_return(connection)

    def served(self, *connections: NodeConnection) -> None:
        for connection in connections:
            self.outliers[connection.info.id].succeeded()

    def _is_ejected(self, connection: NodeConnection) -> bool:
        return self.outliers[connection.info.id].is_ejected(time.monotonic())

    def _schedule_return(self, connection: NodeConnection) -> None:
        left_s = self.outliers[connection.info.id].ejected_until - time.monotonic()
        self.notify()
        asyncio.get_running_loop().call_later(left_s + TIMER_S, self.notify)

    # ---- placement ----------------------------------------------------------------------------------------------

    def routable(self) -> tuple[list[NodeConnection], list[NodeConnection]]:
        """Return the prefill and the decode nodes that take new requests. The lists are recomputed only after a
        change."""
        if self._routable is None:
            self._groups = self._find_groups()
            groups = _generating(self._groups)
            self._routable = (
                [node for each in groups for node in each.prefill],
                [node for each in groups for node in each.decode],
            )
        return self._routable

    def _find_groups(self) -> list[RoutableNodes[NodeConnection]]:
        """Return the ready nodes, grouped by fingerprint, because only nodes with the same fingerprint can exchange KV.
        A group with nodes that cannot work alone is omitted while it has no prefill node or no decode node."""
        ready = [each for each in self.connections.values() if each.is_ready]
        self.has_been_ready |= bool(ready)
        decode = [each for each in ready if each.info.role == "decode"]
        pool_owners = {"", *(each.info.incarnation_id for each in decode)}
        prefill = [each for each in ready if each.info.role == "prefill" and self.mode != "colocated"]
        prefill = [each for each in prefill if each.info.shared_pool_owner in pool_owners]
        groups = [
            self._group(one, prefill, decode) for one in sorted({each.info.fingerprint for each in prefill + decode})
        ]
        self.missing_role = next((group.missing_role for group in groups if group.missing_role), "")
        return [group for group in groups if not group.missing_role]

    def _group(
        self, fingerprint: str, prefill: list[NodeConnection], decode: list[NodeConnection]
    ) -> RoutableNodes[NodeConnection]:
        """Return the nodes with this fingerprint that are not ejected. If all nodes of a role are ejected, return them
        all, unless they are prefill nodes and the decode nodes can compute prompts."""
        prefill, decode = (
            [each for each in role if each.info.fingerprint == fingerprint] for role in (prefill, decode)
        )
        working = [[each for each in role if not self._is_ejected(each)] for role in (prefill, decode)]
        needs_prefill = not decode or any(needs_peer(each.info) for each in prefill + decode)
        return RoutableNodes(working[0] or (prefill if needs_prefill else []), working[1] or decode)

    def capacity(self) -> PoolCapacity:
        """Return the capacity of the routable nodes."""
        prefill, decode = self.routable()
        if self._capacity is None:
            self._capacity = capacity_of((each.info for each in prefill), (each.info for each in decode))
        return self._capacity

    def choose(
        self,
        identity: str,
        row: Sequence[int],
        salt: bytes,
        avoid: Container[str],
        disaggregate: str,
        prefix_node: str = "",
        adapter: str = "",
        version: ModelVersion = ANY_VERSION,
        media: Sequence[MediaSpan] = (),
        max_len: int = 0,
    ) -> PlacementCandidate | None:
        """Choose the nodes for the token sequence `row`, or return None if no node is routable.

        Nodes in `avoid` are chosen only if no other node can generate. `prefix_node` is chosen as the prefill node if
        it is routable, because it has the KV of the prefix. If `adapter` is given, only nodes with this adapter are
        chosen. If `version` is given, only nodes with the same revision of the model are chosen, and nodes with the
        same build are preferred. Nodes whose KV pool is too small are chosen only if no other node can generate. The
        pool of a node that generates must hold `max_len` tokens (the prompt and the answer), and the pool of a prefill
        node must hold `row`.

        Nodes with different fingerprints do not exchange KV, so one fingerprint is chosen first. If `prefix_node` is
        routable, its fingerprint is chosen. Otherwise, the fingerprint is drawn at random, in proportion to the number
        of requests that the nodes with each fingerprint can run.
        """
        self.routable()
        groups = self._groups
        if version.revision:
            groups = [each for each in groups if _version(each).revision == version.revision]
        same_build = [each for each in groups if version.build and _version(each).build == version.build]
        sizes = len(row), max_len
        allowed = self._eligible(same_build, avoid, prefix_node, adapter, sizes, only_others=True)
        allowed = allowed or self._eligible(groups, avoid, prefix_node, adapter, sizes)
        if not allowed:
            return None
        group, prefill, decode = _drawn(identity, allowed)
        hashes = block_hashes(row, (prefill or decode)[0].info.block_tokens, salt, media)
        among, encoded = (prefill, decode), Counter[str]()
        for one in media:
            encoded[group.encoder(one.digest).info.id] += one.rows * one.columns
        return group.choose(
            identity, len(row), hashes, self.prefixes, disaggregate, among=among, avoid=avoid, encoded=encoded
        )

    def encoder_address(self, node: NodeConnection, digest: bytes) -> str:
        """Return the address of the node that encodes the image with this digest for requests on `node`, or "" if
        `node` encodes it itself."""
        self.routable()
        group = next((each for each in self._groups if node in each), None)
        encoder = node if group is None else group.encoder(digest)
        return "" if encoder is node else encoder.info.address

    def _eligible(
        self,
        groups: list[RoutableNodes[NodeConnection]],
        avoid: Container[str],
        prefix_node: str,
        adapter: str,
        sizes: tuple[int, int],
        *,
        only_others: bool = False,
    ) -> list[Allowed]:
        """Return the groups that `choose` may draw from, each with those of its nodes that may be chosen.

        Groups that can generate only on nodes in `avoid` are returned only if there are no others and `only_others` is
        not set. Groups with a role whose nodes are all ejected are returned only if there are no others."""
        groups = [each for each in groups if each.most_kv_tokens >= sizes[1]] or groups
        allowed = [(each, *self._allowed(each, avoid, prefix_node, adapter, sizes)) for each in _generating(groups)]
        allowed = [each for each in allowed if each[1] or each[2]]
        others = [each for each in allowed if any(node.info.id not in avoid for node in each[2] or each[1])]
        if prefix_node:
            others = [each for each in others if any(node.info.id == prefix_node for node in each[1])] or others
        found = others if only_others else others or allowed
        # Of the nodes of one role in a group, either none or all are ejected.
        working = [each for each in found if not any(self._is_ejected(role[0]) for role in each[1:] if role)]
        return working or found

    def _allowed(
        self,
        group: RoutableNodes[NodeConnection],
        avoid: Container[str],
        prefix_node: str,
        adapter: str,
        sizes: tuple[int, int],
    ) -> tuple[list[NodeConnection], list[NodeConnection]]:
        """Return the group's prefill and decode nodes that `choose` may choose."""
        prefill, decode = group.prefill, group.decode
        if adapter:
            prefill, decode = (
                [each for each in pool if adapter in each.info.adapters.values()] for pool in (prefill, decode)
            )
        # Leave `prefill` empty only if decode nodes can also compute prompts.
        may_lack_prefill = bool(decode) and not group.is_paired
        if max(sizes) > group.least_kv_tokens:
            computed, generated = sizes if decode else (sizes[1], 0)
            large = [each for each in prefill if kv_capacity_tokens(each.info) >= computed]
            prefill = large if may_lack_prefill else large or prefill
            decode = [each for each in decode if kv_capacity_tokens(each.info) >= generated] or decode
        if avoid:
            preferred = [each for each in prefill if each.info.id not in avoid]
            prefill = preferred if may_lack_prefill else preferred or prefill
            decode = [each for each in decode if each.info.id not in avoid] or decode
        if (now := time.monotonic()) < self._ramps_until:
            prefill, decode = ([each for each in pool if _has_room(each, now)] or pool for pool in (prefill, decode))
        if prefix_node:
            prefill = [each for each in prefill if each.info.id == prefix_node] or prefill
        return prefill, decode


async def _collect_young() -> None:
    """Collect young garbage so often that no collection takes long.

    Python's own thresholds do not limit the number of young objects here. Python counts the created objects minus all
    freed objects, and each report of a node frees about as many older objects as it creates.
    """
    while True:
        await asyncio.sleep(COLLECT_S)
        gc.collect(1)


def _version(group: RoutableNodes[NodeConnection]) -> ModelVersion:
    return (group.decode or group.prefill)[0].version


def _generating(groups: list[RoutableNodes[NodeConnection]]) -> list[RoutableNodes[NodeConnection]]:
    """Return the groups that have decode nodes. If no group has any, return all groups, because prefill nodes then
    generate."""
    return [each for each in groups if each.decode] or groups


def _drawn(identity: str, allowed: list[Allowed]) -> Allowed:
    """Draw a group at random, weighted by the number of requests that its nodes can run. `identity` is the seed."""
    if len(allowed) == 1:
        return allowed[0]
    sizes = [sum(node.info.max_num_seqs for node in decode or prefill) for _, prefill, decode in allowed]
    return Random(identity).choices(allowed, sizes)[0]


def _has_room(connection: NodeConnection, now: float) -> bool:
    """Return whether the node may get one more request during its slow start."""
    share = 1 - max(0.0, connection.ramp_until - now) / SLOW_START_S
    if connection.info.role == "prefill":
        return connection.load.outstanding_tokens <= share * BACKLOG_STEPS * step_tokens(connection.info)
    return len(connection.listeners) <= share * connection.info.max_num_seqs
