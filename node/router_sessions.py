"""The routers that are attached: a standing stream each, commands in, deltas, load and records out of its outbox.

A router whose stream ends, or that reads nothing, takes its requests with it.
"""

import asyncio
import logging
from typing import Any, Protocol

from node.recorder import StepRecorder
from node.router_stream import RouterStream
from shared.lifecycle import TaskGroup, wait_until
from shared.rpc.messages import NodeStats, RouterCommand, SubmitRequest, TokenDelta

log = logging.getLogger("baton.node")
MAX_OUTBOX = 100_000  # deltas that a router may leave unread before it counts as gone
MAX_ROUTERS = 64
FLUSH_S = 0.1  # between two tellings of what was recorded
LAST_WORDS_S = 0.2  # for a node that ends


class SessionOwner(Protocol):
    """What routers command, and are told at each heartbeat."""

    def submit(self, router: str, submit: SubmitRequest) -> None: ...

    def abort_for_router(self, router: str, identity: str) -> None: ...

    def abort(self, identity: str) -> None: ...

    def stats(self) -> NodeStats: ...


class RouterSessions:
    def __init__(self, node: SessionOwner, tasks: TaskGroup, recorder: StepRecorder) -> None:
        self.streams: dict[str, RouterStream] = {}
        self.dropped = 0  # records that a router, or no router, was told
        self._node = node
        self._tasks = tasks
        self._recorder = recorder

    async def attach(self, stream: Any) -> None:
        """Serves `ATTACH`: commands in, reports out, until either side ends."""
        hello: RouterCommand | None = await stream.recv_message()
        if hello is None or (len(self.streams) >= MAX_ROUTERS and hello.router not in self.streams):
            return
        router, outbox = hello.router, RouterStream(stats=self._node.stats())
        outbox.wake.set()
        self._drop(router)  # its stream of before
        self.streams[router] = outbox
        writer = self._tasks.start(outbox.write(stream))
        try:
            async with outbox.read_timeout:
                async for command in stream:
                    for identity in command.aborts:
                        self._node.abort_for_router(router, identity)
                    for submit in command.submits:
                        self._node.submit(router, submit)
        except TimeoutError:
            return  # it was dropped: to hear the end of its stream, it has to read
        finally:
            writer.cancel()
            if self.streams.get(router) is outbox:
                self._forget(router)

    def send(self, router: str, *deltas: TokenDelta) -> None:
        """To a router that is not attached: nothing."""
        outbox = self.streams.get(router)
        if outbox is None:
            return
        outbox.deltas.extend(deltas)
        outbox.wake.set()
        if len(outbox.deltas) > MAX_OUTBOX:
            log.error("router %s reads nothing: dropped with its requests", router)
            self._drop(router)

    def publish_stats(self) -> None:
        load = self._node.stats()
        for outbox in self.streams.values():
            outbox.stats = load
            outbox.wake.set()

    async def flush_deltas(self) -> None:
        """Waits a moment for the last words to be on their way."""
        await wait_until(lambda: not any(outbox.deltas for outbox in self.streams.values()), LAST_WORDS_S)

    async def publish_records(self) -> None:
        """Every router is told everything that is recorded: whose a request is shows in its id."""
        while True:
            await asyncio.sleep(FLUSH_S)
            steps, events = self._recorder.take()
            if not steps and not events:
                continue
            if not self.streams:
                self.dropped += len(steps) + len(events)
            for outbox in self.streams.values():
                self.dropped += outbox.record(steps, events)

    def _drop(self, router: str) -> None:
        """Ends its stream, if it has one."""
        if router in self.streams:
            outbox = self._forget(router)
            outbox.read_timeout.reschedule(asyncio.get_running_loop().time())

    def _forget(self, router: str) -> RouterStream:
        """Its requests find their outbox there, so they go first."""
        for identity in list(self.streams[router].requests):
            self._node.abort(identity)
        return self.streams.pop(router)
