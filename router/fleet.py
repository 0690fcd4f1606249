"""The live nodes as the router sees them, judged alive by what comes over their streams.

The registry says whom to dial; it never says that a node is dead while its stream lives.
"""

import asyncio
from collections.abc import Sequence

from router.fleet_status import node_status
from router.link import Link
from router.records import Records
from scheduler.placement import PrefixIndex
from shared.messages import Load, NodeInfo
from shared.registry import Registry
from shared.serve import Tasks


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
        """Prefill and decode nodes that may be placed on, all of one fingerprint: only these can exchange KV."""
        ready = [link for link in self._links.values() if link.is_ready]
        decode = [link for link in ready if link.info.role == "decode"]
        prefill = [link for link in ready if link.info.role == "prefill" and self.mode != "colocated"]
        prints = [link.info.fingerprint for link in decode or prefill]
        if not prints:
            return [], []
        common = max(sorted(set(prints)), key=prints.count)
        return _of(common, prefill), _of(common, decode)

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
        listed = {name: info for name, info in self._registry.nodes.items() if _is_sound(info)}
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
        self._news.set()

    def _dial(self, info: NodeInfo) -> None:
        link = self._links[info.id] = Link(self.router, info, self._timeout_s, self._link_changed, self._records)
        self._runs[info.id] = self._tasks.start(link.run())

    def _link_changed(self, link: Link) -> None:
        self._news.set()
        if not link.alive:
            self.prefixes.forget(link.info.id)
            if not link.is_listed and self._links.get(link.info.id) is link:
                self._drop(link.info.id)

    def _drop(self, name: str) -> None:
        link = self._links.pop(name)
        link.is_listed = False
        for total in self._moved_before:
            self._moved_before[total] += int(getattr(link.load, total))
        run = self._runs.pop(name)
        if run is not asyncio.current_task():
            run.cancel()


def _is_sound(info: NodeInfo) -> bool:
    """Whether a node of these numbers can be; what is not is left alone."""
    return min(info.block_tokens, info.block_bytes, info.num_blocks, info.max_num_seqs, info.max_model_len) > 0


def _of(fingerprint: str, links: Sequence[Link]) -> list[Link]:
    return [link for link in links if link.info.fingerprint == fingerprint]
