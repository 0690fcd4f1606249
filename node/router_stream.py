"""What goes to one router over its standing stream: deltas at once, the load at each heartbeat, records now and then.

A router that reads nothing costs bounded memory: it loses records first, and counts as gone when deltas pile up.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from scheduler.request import Request
from shared.clock import now_ns
from shared.rpc.messages import NodeStats, NodeUpdate, RequestEvent, StepRecord, TokenDelta
from shared.rpc.methods import STREAM_ENDED

MAX_DELTAS = 1000  # of one message: with 20 logprobs each they stay far below the cap
MAX_STEPS = 64  # of one message: with 4,096 members each they stay far below it
MAX_EVENTS = 2000
MAX_RECORDS = 8192  # of each kind, untold


@dataclass(slots=True)
class RouterStream:
    deltas: list[TokenDelta] = field(default_factory=list)
    stats: NodeStats | None = None
    steps: list[StepRecord] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[str, Request] = field(default_factory=dict)  # of this router, unfinished
    read_timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.Timeout(None))  # of its stream

    def record(self, steps: list[StepRecord], events: list[RequestEvent]) -> int:
        """Takes what was recorded. Returns how many of the oldest had to go for it."""
        self.steps += steps
        self.events += events
        dropped = 0
        for rows in (self.steps, self.events):
            excess = max(0, len(rows) - MAX_RECORDS)
            del rows[:excess]
            dropped += excess
        self.wake.set()
        return dropped

    async def write(self, stream: Any) -> None:
        """Sends what comes, until it is cancelled or the stream has ended."""
        with suppress(*STREAM_ENDED):
            while True:
                await self.wake.wait()
                self.wake.clear()
                await self._send_pending(stream)

    async def _send_pending(self, stream: Any) -> None:
        deltas, self.deltas = self.deltas, []
        for first in range(0, len(deltas), MAX_DELTAS):
            await stream.send_message(NodeUpdate(deltas[first : first + MAX_DELTAS]))
        load, self.stats = self.stats, None
        if load is not None:
            load.sent_ns = now_ns()
            await stream.send_message(NodeUpdate([], load))
        if self.events or self.steps:
            await stream.send_message(self._records())
            if self.events or self.steps:
                self.wake.set()

    def _records(self) -> NodeUpdate:
        """The next message of records, one between any two of deltas. Events go before the steps that they name."""
        if self.events:
            events, self.events = self.events[:MAX_EVENTS], self.events[MAX_EVENTS:]
            return NodeUpdate(events=events)
        steps, self.steps = self.steps[:MAX_STEPS], self.steps[MAX_STEPS:]
        return NodeUpdate(steps=steps)
