"""The routers that are attached: a standing stream each, commands in, deltas, load and records out of its outbox.

A router whose stream ends, or that reads nothing, takes its requests with it.
"""

import asyncio
import logging
from typing import Any, Protocol

from engine.outbox import Outbox
from engine.records import Recorder
from shared.messages import Command, Delta, Load, Submit
from shared.serve import Tasks, until

log = logging.getLogger("baton.node")
MAX_OUTBOX = 100_000  # deltas that a router may leave unread before it counts as gone
MAX_ROUTERS = 64
FLUSH_S = 0.1  # between two tellings of what was recorded
LAST_WORDS_S = 0.2  # for a node that ends


class Served(Protocol):
    """What routers command, and are told at each heartbeat."""

    def submit(self, router: str, submit: Submit) -> None: ...

    def withdraw(self, router: str, identity: str) -> None: ...

    def abort(self, identity: str) -> None: ...

    def load(self) -> Load: ...


class Routers:
    def __init__(self, node: Served, tasks: Tasks, recorder: Recorder) -> None:
        self.outboxes: dict[str, Outbox] = {}
        self.dropped = 0  # records that a router, or no router, was told
        self._node = node
        self._tasks = tasks
        self._recorder = recorder

    async def attach(self, stream: Any) -> None:
        """Serves `ATTACH`: commands in, reports out, until either side ends."""
        hello: Command | None = await stream.recv_message()
        if hello is None or (len(self.outboxes) >= MAX_ROUTERS and hello.router not in self.outboxes):
            return
        router, outbox = hello.router, Outbox(load=self._node.load())
        outbox.wake.set()
        self._drop(router)  # its stream of before
        self.outboxes[router] = outbox
        writer = self._tasks.start(outbox.write(stream))
        try:
            async with outbox.hearing:
                async for command in stream:
                    for identity in command.aborts:
                        self._node.withdraw(router, identity)
                    for submit in command.submits:
                        self._node.submit(router, submit)
        except TimeoutError:
            return  # it was dropped: to hear the end of its stream, it has to read
        finally:
            writer.cancel()
            if self.outboxes.get(router) is outbox:
                self._forget(router)

    def send(self, router: str, *deltas: Delta) -> None:
        """To a router that is not attached: nothing."""
        outbox = self.outboxes.get(router)
        if outbox is None:
            return
        outbox.deltas.extend(deltas)
        outbox.wake.set()
        if len(outbox.deltas) > MAX_OUTBOX:
            log.error("router %s reads nothing: dropped with its requests", router)
            self._drop(router)

    def tell_load(self) -> None:
        load = self._node.load()
        for outbox in self.outboxes.values():
            outbox.load = load
            outbox.wake.set()

    async def tell_all(self) -> None:
        """Waits a moment for the last words to be on their way."""
        await until(lambda: not any(outbox.deltas for outbox in self.outboxes.values()), LAST_WORDS_S)

    async def flush(self) -> None:
        """Every router is told everything that is recorded: whose a request is shows in its id."""
        while True:
            await asyncio.sleep(FLUSH_S)
            steps, events = self._recorder.take()
            if not steps and not events:
                continue
            if not self.outboxes:
                self.dropped += len(steps) + len(events)
            for outbox in self.outboxes.values():
                self.dropped += outbox.record(steps, events)

    def _drop(self, router: str) -> None:
        """Ends its stream, if it has one."""
        if router in self.outboxes:
            outbox = self._forget(router)
            outbox.hearing.reschedule(asyncio.get_running_loop().time())

    def _forget(self, router: str) -> Outbox:
        """Its requests find their outbox there, so they go first."""
        for identity in list(self.outboxes[router].requests):
            self._node.abort(identity)
        return self.outboxes.pop(router)
