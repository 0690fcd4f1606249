"""The live nodes as the router sees them: one standing stream each, judged alive by what comes over it.

The registry says whom to dial; it never says that a node is dead while its stream lives.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from router.fleet_status import node_status
from scheduler.placement import NodeView, PrefixIndex
from shared.messages import Command, Delta, Load, NodeInfo, Report, Submit
from shared.registry import Registry
from shared.serve import Tasks
from shared.services import ATTACH, PEER_FAILURES, connect

log = logging.getLogger("baton.fleet")
MAX_COMMAND_BYTES = 4 << 20
REDIAL_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Listener(Protocol):
    """One request's attempt, told of everything that concerns it."""

    def delta(self, link: "Link", delta: Delta) -> None: ...
    def lost(self, link: "Link") -> None: ...


class Link:
    """The standing stream to one life of one node."""

    def __init__(self, router: str, info: NodeInfo, timeout_s: float, changed: Callable[["Link"], None]) -> None:
        self.info = info
        self.load = Load()
        self.alive = False
        self.is_listed = True  # the registry has it
        self.is_left = False  # this router is ending
        self.listeners: dict[str, Listener] = {}
        self.outstanding_tokens = 0  # prompt tokens sent there whose computation was not told yet
        self.kv_tokens = 0  # tokens whose KV is, or will be, there
        self.placed = 0  # attempts that named it, ever
        self._router = router
        self._timeout_s = timeout_s
        self._changed = changed
        self._command = Command(router)
        self._wake = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Takes new requests."""
        return self.alive and self.info.state == "ready" and self.load.state == "ready"

    def submit(self, submit: Submit, listener: Listener) -> None:
        self.listen(submit.id, listener)
        self._command.submits.append(submit)
        self._wake.set()

    def listen(self, identity: str, listener: Listener) -> None:
        """Also hear what this node says of a request that another node hands to it."""
        self.listeners[identity] = listener
        self.placed += 1

    def forget(self, identity: str) -> None:
        """Nothing more is expected of it here."""
        self.listeners.pop(identity, None)

    def abort(self, identity: str) -> None:
        if self.listeners.pop(identity, None) is not None and self.alive:
            self._command.aborts.append(identity)
            self._wake.set()

    def view(self) -> NodeView:
        info, load = self.info, self.load
        in_blocks = (load.blocks_owned + load.blocks_reserved) * info.block_tokens
        return NodeView(
            info.id,
            info.role,
            max(self.outstanding_tokens, load.waiting_tokens),
            max(len(self.listeners), load.running + load.waiting),
            info.max_num_seqs,
            max(self.kv_tokens, in_blocks),
            max(1, (info.num_blocks - 1) * info.block_tokens),
            self.placed,
        )

    async def run(self) -> None:
        """Dials until the registry has dropped the node and its stream has ended."""
        tries = 0
        while self.is_listed:
            try:
                tries = 0 if await self._hold() else tries
            except (*PEER_FAILURES, ValueError) as error:  # ValueError: a delta's tokens are no ids
                level = logging.WARNING if self.alive else logging.DEBUG
                log.log(level, "node %s: %s", self.info.id, str(error) or "no sign of life")
            finally:
                self._end()
            await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
            tries += 1

    async def _hold(self) -> bool:
        """One stream, from its start to its end. True when the node was alive on it."""
        channel = connect(self.info.address)
        self._command = Command(self._router)
        self._wake.clear()
        try:
            async with ATTACH.open(channel) as stream:
                await stream.send_message(Command(self._router))
                writer = asyncio.ensure_future(self._write(stream))
                try:
                    while (report := await self._next(stream)) is not None:
                        self._take(report)
                finally:
                    writer.cancel()
                return self.alive
        finally:
            channel.close()

    async def _next(self, stream: Any) -> Report | None:
        async with asyncio.timeout(self._timeout_s):
            report: Report | None = await stream.recv_message()
            return report

    async def _write(self, stream: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            command, self._command = self._command, Command(self._router)
            for part in _parts(command):
                await stream.send_message(part)

    def _take(self, report: Report) -> None:
        if report.load is not None:
            was_ready, self.load = self.is_ready, report.load
            self.alive = True
            if self.load.state == "stuck":
                self._give_up("is stuck")
            if self.is_ready != was_ready:
                self._changed(self)
        for delta in report.deltas:
            listener = self.listeners.get(delta.id)
            if listener is not None:
                listener.delta(self, delta)
            elif delta.tokens and not delta.finish:  # it was over here before it began there
                self._command.aborts.append(delta.id)
                self._wake.set()

    def _end(self) -> None:
        was_alive, self.alive = self.alive, False
        self.outstanding_tokens = self.kv_tokens = 0
        self._changed(self)
        self._give_up("is lost" if was_alive and not self.is_left else "")

    def _give_up(self, what: str) -> None:
        """All requests on the node go on elsewhere. Over a stream that lives, the node hears of it."""
        listeners, self.listeners = self.listeners, {}
        if what and (listeners or not self.alive):
            log.warning("node %s %s with %d requests on it", self.info.id, what, len(listeners))
        if self.alive:
            self._command.aborts += listeners
            self._wake.set()
        for listener in listeners.values():
            listener.lost(self)


class Fleet:
    def __init__(self, router: str, registry: Registry, mode: str, timeout_s: float) -> None:
        self.router = router
        self.prefixes = PrefixIndex()
        self._registry = registry
        self._mode = mode
        self._timeout_s = timeout_s
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

    def usable(self) -> tuple[list[Link], list[Link]]:
        """Prefill and decode nodes that may be placed on, all of one fingerprint: only these can exchange KV."""
        ready = [link for link in self._links.values() if link.is_ready]
        decode = [link for link in ready if link.info.role == "decode"]
        prefill = [link for link in ready if link.info.role == "prefill" and self._mode != "colocated"]
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
        return {"mode": self._mode, "registry": registry, "nodes": nodes, **totals}

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
        self._news.set()

    def _dial(self, info: NodeInfo) -> None:
        link = self._links[info.id] = Link(self.router, info, self._timeout_s, self._link_changed)
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


def _parts(command: Command) -> Iterator[Command]:
    """A command in messages that stay below the cap: aborts first, then the submits, by the bytes of their tokens."""
    part, size = Command(command.router, aborts=command.aborts), 0
    for submit in command.submits:
        if size > MAX_COMMAND_BYTES:
            yield part
            part, size = Command(command.router), 0
        part.submits.append(submit)
        size += len(submit.tokens)
    yield part


def _of(fingerprint: str, links: Sequence[Link]) -> list[Link]:
    return [link for link in links if link.info.fingerprint == fingerprint]
