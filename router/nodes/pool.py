"""The live nodes as the router sees them, judged alive by what comes over their streams.

The registry says whom to dial; it never says that a node is dead while its stream lives.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from router.dispatch.admission import PoolCapacity
from router.history.history import RequestHistory
from router.nodes.connection import SLOW_START_S, NodeConnection
from router.nodes.health import OutlierDetector
from router.nodes.status import node_status
from scheduler.disaggregate import NodeView
from scheduler.placement import Placement, PrefixIndex, candidates, place
from scheduler.prefix import block_hashes
from shared.lifecycle import TaskGroup
from shared.registry import Registry
from shared.rpc.messages import NodeInfo, NodeStats

log = logging.getLogger("baton.fleet")
PROMPTS_A_NODE = 2  # that it should have before it, whatever their length
SPARE_REQUESTS = 8  # one more for each so many that a node runs at once: who waits there starts without a pause
MAX_STANDINGS = 1024
TIMER_S = 0.01  # a loop counts whole milliseconds, and may call so much too early: the node would be left out for good


class PlacementCandidate(NamedTuple):
    """A placement of a row, the hashes of the row's blocks, and how many tokens its computing node holds already."""

    placement: Placement
    hashes: list[bytes]
    cached_tokens: int


class NodePool:
    def __init__(self, router: str, registry: Registry, mode: str, timeout_s: float, records: RequestHistory) -> None:
        self.router = router
        self.prefixes = PrefixIndex()
        self._registry = registry
        self.mode = mode
        self._timeout_s = timeout_s
        self._records = records
        self._connections: dict[str, NodeConnection] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskGroup()
        self._changed = asyncio.Event()
        self._routable: tuple[list[NodeConnection], list[NodeConnection]] | None = None  # None: to be found again
        self._routable_by_name: dict[str, NodeConnection] = {}
        self._has_shared_pools = False
        self._capacity: PoolCapacity | None = None  # as `_usable`
        self._detectors: dict[str, OutlierDetector] = {}
        self._ramps_until = 0.0  # the last of the links' own
        self.on_change: Callable[[], None] = lambda: None  # told of each `change`
        self._handoffs_before: dict[str, int] = {
            "handoffs": 0,
            "blocks_moved": 0,
            "bytes_moved": 0,
        }  # by nodes now gone

    async def start(self) -> None:
        await self._registry.start(self._reconcile)

    async def close(self) -> None:
        for link in self._connections.values():
            link.router_is_closing = True
        await self._registry.close()
        await self._tasks.close()

    def connection(self, node: str) -> NodeConnection:
        return self._connections[node]

    def find(self, node: str) -> NodeConnection | None:
        return self._connections.get(node)

    def routable(self) -> tuple[list[NodeConnection], list[NodeConnection]]:
        """Prefill and decode nodes that may be placed on, all of one fingerprint: only these can exchange KV.

        Found again only after a node came, went, or became ready: a request costs as little among many nodes.
        """
        if self._routable is None:
            prefill, decode = self._routable = self._find_routable()
            self._routable_by_name = {link.info.id: link for link in prefill + decode}
            self._has_shared_pools = any(link.info.shared_pool_owner for link in prefill)
        return self._routable

    def _find_routable(self) -> tuple[list[NodeConnection], list[NodeConnection]]:
        ready = [link for link in self._connections.values() if link.is_ready]
        decode = [link for link in ready if link.info.role == "decode"]
        lenders = {"", *(link.info.incarnation_id for link in decode)}  # of the pools that prefill nodes may compute in
        prefill = [link for link in ready if link.info.role == "prefill" and self.mode != "colocated"]
        prefill = [link for link in prefill if link.info.shared_pool_owner in lenders]
        prints = [link.info.fingerprint for link in decode or prefill]
        if not prints:
            return [], []
        common = max(sorted(set(prints)), key=prints.count)
        return self._without_outliers(_of(common, prefill)), self._without_outliers(_of(common, decode))

    def _without_outliers(self, links: list[NodeConnection]) -> list[NodeConnection]:
        """Without those whose failures are too fresh; never nobody."""
        now = time.monotonic()
        return [link for link in links if not self._detector(link.info.id).is_ejected(now)] or links

    def _detector(self, name: str) -> OutlierDetector:
        standing = self._detectors.get(name)
        if standing is None:
            if len(self._detectors) >= MAX_STANDINGS:
                now = time.monotonic()
                self._detectors = {old: kept for old, kept in self._detectors.items() if not kept.is_forgotten(now)}
            standing = self._detectors[name] = OutlierDetector()
        return standing

    def failed(self, *links: NodeConnection) -> None:
        """These nodes failed at something together; who was at fault is not known."""
        for link in links:
            if self._detector(link.info.id).failed(time.monotonic()):
                self._schedule_return(link)

    def served(self, *links: NodeConnection) -> None:
        for link in links:
            self._detector(link.info.id).succeeded()

    def _schedule_return(self, link: NodeConnection) -> None:
        left_s = self._detector(link.info.id).ejected_until - time.monotonic()
        log.info("node %s failed: for %.0f s others are preferred", link.info.id, left_s)
        self._notify()
        asyncio.get_running_loop().call_later(left_s + TIMER_S, self._notify)

    def capacity(self) -> PoolCapacity:
        """What the usable nodes should hold: all that they can generate, and prompts for a second or two."""
        prefill, decode = self.routable()
        if self._capacity is None:
            self._capacity = PoolCapacity(
                sum(link.info.max_num_seqs * (SPARE_REQUESTS + 1) // SPARE_REQUESTS + 2 for link in decode or prefill),
                sum(link.kv_capacity_tokens for link in decode or prefill),
                sum(link.backlog_tokens for link in prefill + decode),
                PROMPTS_A_NODE * len(prefill + decode),
            )
        return self._capacity

    def place(
        self,
        identity: str,
        row: Sequence[int],
        salt: bytes,
        avoid: Container[str],
        disaggregate: str,
        holder: str = "",
    ) -> PlacementCandidate | None:
        """Who should take these tokens; None: nobody may be placed on. Nodes to `avoid` are taken where only they could
        generate; of prefill nodes the `holder` alone where it is usable, as it has the KV. Looks at a few nodes,
        however many there are."""
        prefill, decode = self.routable()
        if avoid:
            prefill = [link for link in prefill if link.info.id not in avoid]  # none left: the decode node alone
            decode = [link for link in decode if link.info.id not in avoid] or decode
        if time.monotonic() < self._ramps_until:
            prefill, decode = _with_room(prefill), _with_room(decode)
        if holder:
            prefill = [link for link in prefill if link.info.id == holder] or prefill
        if not (prefill or decode):
            return None
        block_tokens = (prefill or decode)[0].info.block_tokens
        hashes = block_hashes(row, block_tokens, salt)
        cached = {name: depth * block_tokens for name, depth in self.prefixes.overlap(hashes).items()}
        knowers = [name for name in reversed(cached) if name not in avoid]  # the best first
        decode_views = self._views(identity, decode, knowers)
        if self._has_shared_pools:  # to a decode node in whose pool they compute: of these, those of the ones looked at
            boots = {"", *(view.incarnation_id for view in decode_views)}
            prefill = [link for link in prefill if link.info.shared_pool_owner in boots]
        prefill_views = self._views(identity, prefill, knowers)
        placement = place(len(row), prefill_views, decode_views, cached, disaggregate)
        assert placement is not None
        return PlacementCandidate(placement, hashes, cached.get(placement.prefill or placement.decode, 0))

    def _views(self, identity: str, links: list[NodeConnection], knowers: list[str]) -> list[NodeView]:
        known = (self._routable_by_name[name] for name in knowers if name in self._routable_by_name)
        knower = next((link for link in known if link.info.role == links[0].info.role), None) if links else None
        return [link.view() for link in candidates(identity, links, knower)]

    async def change(self) -> None:
        """Returns when a node came, went, or became ready."""
        self._changed.clear()
        await self._changed.wait()

    def status(self) -> dict[str, object]:
        nodes = [node_status(link.info, link.stats, link.is_alive) for link in self._connections.values()]
        totals = {
            name: before + sum(int(getattr(link.stats, name)) for link in self._connections.values())
            for name, before in self._handoffs_before.items()
        }
        registry = {"kind": self._registry.kind, "state": self._registry.state}
        return {"mode": self.mode, "registry": registry, "nodes": nodes, **totals}

    def nodes(self) -> list[tuple[NodeInfo, NodeStats, bool]]:
        return [(link.info, link.stats, link.is_alive) for link in self._connections.values()]

    def _reconcile(self) -> None:
        """The registry changed: dial who is new, let go who is gone."""
        listed = self._registry.nodes
        for name, info in listed.items():
            link = self._connections.get(name)
            if link is not None and link.info.incarnation_id == info.incarnation_id:
                link.info = info
                link.is_listed = True
                continue
            if link is not None:
                self._drop(name)
            self._dial(info)
        for name, link in list(self._connections.items()):
            link.is_listed = name in listed
            if not link.is_listed and not link.is_alive:
                self._drop(name)
        self._notify()

    def _dial(self, info: NodeInfo) -> None:
        link = self._connections[info.id] = NodeConnection(
            self.router, info, self._timeout_s, self._connection_changed, self._records
        )
        self._runs[info.id] = self._tasks.start(link.run())

    def _notify(self) -> None:
        self._routable = self._capacity = None
        self._changed.set()
        self.on_change()

    def _connection_changed(self, link: NodeConnection) -> None:
        if link.is_alive:
            self._ramp(link)
        elif not link.is_leaving:
            self._detector(link.info.id).died(time.monotonic())
            self._schedule_return(link)
        self._notify()
        if not link.is_alive:
            self.prefixes.forget(link.info.id)
            if not link.is_listed and self._connections.get(link.info.id) is link:
                self._drop(link.info.id)

    def _ramp(self, link: NodeConnection) -> None:
        """A node that has just joined others at work is empty, and would be given everything at once."""
        now = time.monotonic()
        if link.alive_since < now - SLOW_START_S or not any(
            other.is_alive and other.info.role == link.info.role and other.alive_since < now - SLOW_START_S
            for other in self._connections.values()
        ):
            return
        link.ramp_until = link.alive_since + SLOW_START_S
        self._ramps_until = max(self._ramps_until, link.ramp_until)

    def _drop(self, name: str) -> None:
        link = self._connections.pop(name)
        link.is_listed = False
        for total in self._handoffs_before:
            self._handoffs_before[total] += int(getattr(link.stats, total))
        run = self._runs.pop(name)
        if run is not asyncio.current_task():
            run.cancel()


def _with_room(links: list[NodeConnection]) -> list[NodeConnection]:
    now = time.monotonic()
    return [link for link in links if link.has_room(now)] or links


def _of(fingerprint: str, links: Sequence[NodeConnection]) -> list[NodeConnection]:
    return [link for link in links if link.info.fingerprint == fingerprint]
