"""The live nodes as the router sees them, judged alive by what comes over their streams.

The registry says whom to dial; it never says that a node is dead while its stream lives.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from router.admission import Capacity
from router.fleet_status import node_status
from router.link import SLOW_START_S, Link
from router.records import Records
from router.standing import Standing
from scheduler.disaggregate import NodeView
from scheduler.placement import Placement, PrefixIndex, candidates, place
from scheduler.prefix import block_hashes
from shared.messages import Load, NodeInfo
from shared.registry import Registry
from shared.serve import Tasks

log = logging.getLogger("baton.fleet")
PROMPTS_A_NODE = 2  # that it should have before it, whatever their length
SPARE_REQUESTS = 8  # one more for each so many that a node runs at once: who waits there starts without a pause
MAX_STANDINGS = 1024
TIMER_S = 0.01  # a loop counts whole milliseconds, and may call so much too early: the node would be left out for good


class Proposal(NamedTuple):
    """A placement of a row, the hashes of the row's blocks, and how many tokens its computing node holds already."""

    placement: Placement
    hashes: list[bytes]
    cached_tokens: int


class Fleet:
    def __init__(self, router: str, registry: Registry, mode: str, timeout_s: float, records: Records) -> None:
        self.router = router
        self.prefixes = PrefixIndex()
        self._registry = registry
        self.mode = mode
        self._timeout_s = timeout_s
        self._records = records
        self._links: dict[str, Link] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._news = asyncio.Event()
        self._usable: tuple[list[Link], list[Link]] | None = None  # None: to be found again
        self._usable_by_name: dict[str, Link] = {}
        self._some_are_bound = False
        self._capacity: Capacity | None = None  # as `_usable`
        self._standings: dict[str, Standing] = {}
        self._ramps_until = 0.0  # the last of the links' own
        self.on_change: Callable[[], None] = lambda: None  # told of each `change`
        self._moved_before: dict[str, int] = {"handoffs": 0, "blocks_moved": 0, "bytes_moved": 0}  # by nodes now gone

    async def start(self) -> None:
        await self._registry.start(self._reconcile)

    async def close(self) -> None:
        for link in self._links.values():
            link.is_left = True
        await self._registry.close()
        await self._tasks.close()

    def link(self, node: str) -> Link:
        return self._links[node]

    def find(self, node: str) -> Link | None:
        return self._links.get(node)

    def usable(self) -> tuple[list[Link], list[Link]]:
        """Prefill and decode nodes that may be placed on, all of one fingerprint: only these can exchange KV.

        Found again only after a node came, went, or became ready: a request costs as little among many nodes.
        """
        if self._usable is None:
            prefill, decode = self._usable = self._find_usable()
            self._usable_by_name = {link.info.id: link for link in prefill + decode}
            self._some_are_bound = any(link.info.pool_of for link in prefill)
        return self._usable

    def _find_usable(self) -> tuple[list[Link], list[Link]]:
        ready = [link for link in self._links.values() if link.is_ready]
        decode = [link for link in ready if link.info.role == "decode"]
        lenders = {"", *(link.info.boot for link in decode)}  # of the pools that prefill nodes may compute in
        prefill = [link for link in ready if link.info.role == "prefill" and self.mode != "colocated"]
        prefill = [link for link in prefill if link.info.pool_of in lenders]
        prints = [link.info.fingerprint for link in decode or prefill]
        if not prints:
            return [], []
        common = max(sorted(set(prints)), key=prints.count)
        return self._trusted(_of(common, prefill)), self._trusted(_of(common, decode))

    def _trusted(self, links: list[Link]) -> list[Link]:
        """Without those whose failures are too fresh; never nobody."""
        now = time.monotonic()
        return [link for link in links if not self._standing(link.info.id).is_out(now)] or links

    def _standing(self, name: str) -> Standing:
        standing = self._standings.get(name)
        if standing is None:
            if len(self._standings) >= MAX_STANDINGS:
                now = time.monotonic()
                self._standings = {old: kept for old, kept in self._standings.items() if not kept.is_forgotten(now)}
            standing = self._standings[name] = Standing()
        return standing

    def failed(self, *links: Link) -> None:
        """These nodes failed at something together; who was at fault is not known."""
        for link in links:
            if self._standing(link.info.id).failed(time.monotonic()):
                self._leave_out(link)

    def served(self, *links: Link) -> None:
        for link in links:
            self._standing(link.info.id).served()

    def _leave_out(self, link: Link) -> None:
        left_s = self._standing(link.info.id).until - time.monotonic()
        log.info("node %s failed: for %.0f s others are preferred", link.info.id, left_s)
        self._tell()
        asyncio.get_running_loop().call_later(left_s + TIMER_S, self._tell)

    def capacity(self) -> Capacity:
        """What the usable nodes should hold: all that they can generate, and prompts for a second or two."""
        prefill, decode = self.usable()
        if self._capacity is None:
            self._capacity = Capacity(
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
    ) -> Proposal | None:
        """Return the nodes that should take these tokens, None only if no node is usable. Nodes to `avoid` are taken
        where only they can generate; of prefill nodes the `holder` alone where it is usable, as it has the KV. Looks
        at a few nodes, however many there are."""
        prefill, decode = self.usable()
        if avoid:
            preferred = [link for link in prefill if link.info.id not in avoid]
            prefill = preferred if decode else preferred or prefill  # a decode node generates without a prefill node
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
        if self._some_are_bound:  # to a decode node in whose pool they compute: of these, those of the ones looked at
            boots = {"", *(view.boot for view in decode_views)}
            prefill = [link for link in prefill if link.info.pool_of in boots]
        prefill_views = self._views(identity, prefill, knowers)
        placement = place(len(row), prefill_views, decode_views, cached, disaggregate)
        assert placement is not None
        return Proposal(placement, hashes, cached.get(placement.prefill or placement.decode, 0))

    def _views(self, identity: str, links: list[Link], knowers: list[str]) -> list[NodeView]:
        known = (self._usable_by_name[name] for name in knowers if name in self._usable_by_name)
        knower = next((link for link in known if link.info.role == links[0].info.role), None) if links else None
        return [link.view() for link in candidates(identity, links, knower)]

    async def change(self) -> None:
        """Returns when a node came, went, or became ready."""
        self._news.clear()
        await self._news.wait()

    def status(self) -> dict[str, object]:
        nodes = [node_status(link.info, link.load, link.alive) for link in self._links.values()]
        totals = {
            name: before + sum(int(getattr(link.load, name)) for link in self._links.values())
            for name, before in self._moved_before.items()
        }
        registry = {"kind": self._registry.kind, "state": self._registry.state}
        return {"mode": self.mode, "registry": registry, "nodes": nodes, **totals}

    def nodes(self) -> list[tuple[NodeInfo, Load, bool]]:
        return [(link.info, link.load, link.alive) for link in self._links.values()]

    def _reconcile(self) -> None:
        """The registry changed: dial who is new, let go who is gone."""
        listed = self._registry.nodes
        for name, info in listed.items():
            link = self._links.get(name)
            if link is not None and link.info.boot == info.boot:
                link.info = info
                link.is_listed = True
                continue
            if link is not None:
                self._drop(name)
            self._dial(info)
        for name, link in list(self._links.items()):
            link.is_listed = name in listed
            if not link.is_listed and not link.alive:
                self._drop(name)
        self._tell()

    def _dial(self, info: NodeInfo) -> None:
        link = self._links[info.id] = Link(self.router, info, self._timeout_s, self._link_changed, self._records)
        self._runs[info.id] = self._tasks.start(link.run())

    def _tell(self) -> None:
        self._usable = self._capacity = None
        self._news.set()
        self.on_change()

    def _link_changed(self, link: Link) -> None:
        if link.alive:
            self._ramp(link)
        elif not link.is_leaving:
            self._standing(link.info.id).died(time.monotonic())
            self._leave_out(link)
        self._tell()
        if not link.alive:
            self.prefixes.forget(link.info.id)
            if not link.is_listed and self._links.get(link.info.id) is link:
                self._drop(link.info.id)

    def _ramp(self, link: Link) -> None:
        """A node that has just joined others at work is empty, and would be given everything at once."""
        now = time.monotonic()
        if link.alive_since < now - SLOW_START_S or not any(
            other.alive and other.info.role == link.info.role and other.alive_since < now - SLOW_START_S
            for other in self._links.values()
        ):
            return
        link.ramps_until = link.alive_since + SLOW_START_S
        self._ramps_until = max(self._ramps_until, link.ramps_until)

    def _drop(self, name: str) -> None:
        link = self._links.pop(name)
        link.is_listed = False
        for total in self._moved_before:
            self._moved_before[total] += int(getattr(link.load, total))
        run = self._runs.pop(name)
        if run is not asyncio.current_task():
            run.cancel()


def _with_room(links: list[Link]) -> list[Link]:
    now = time.monotonic()
    return [link for link in links if link.has_room(now)] or links


def _of(fingerprint: str, links: Sequence[Link]) -> list[Link]:
    return [link for link in links if link.info.fingerprint == fingerprint]
