"""A node that computes nothing: its requests get a token each whenever it is told to, by a node's own messages."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from node.router_stream import RouterStream
from shared.registry import StreamAnnouncer
from shared.rpc.messages import NodeInfo, NodeStats, RouterCommand, SubmitRequest, TokenDelta, pack_ids
from shared.rpc.methods import ATTACH, RpcServer

WINDOW = 16  # tokens of a stream on their way, at most: a rate that is too high becomes the highest possible
HEARTBEAT_S = 0.5


@dataclass(slots=True)
class Row:
    """One request, at the node and at its client. Times are monotonic."""

    submit: SubmitRequest
    sent: list[float] = field(default_factory=list)
    num_received: int = 0


class PacedNode:
    """A decode node that gives each of its requests one token a turn."""

    def __init__(self, name: str, token_ids: list[int], rows: dict[str, Row]) -> None:
        """`rows` gets its requests, by the name that their clients know."""
        self._name = name
        self._all_rows = rows
        self._rows: list[Row] = []
        self._outbox = RouterStream()
        self._packed = [pack_ids([token]) for token in token_ids]
        self._server = RpcServer({ATTACH: self._attach})
        self._steps = 0

    async def join(self, registry: str) -> StreamAnnouncer:
        port = await self._server.start("127.0.0.1", 0)
        boot = secrets.token_hex(16)
        sizes = (64, 1 << 20, 1 << 20, 1 << 20, 4096)  # block tokens and bytes, blocks, longest row, requests
        info = NodeInfo(self._name, boot, "decode", f"127.0.0.1:{port}", "model", "paced", *sizes)
        announcer = StreamAnnouncer(registry, HEARTBEAT_S)
        await announcer.start(info)
        return announcer

    async def _attach(self, stream: Any) -> None:
        hello: RouterCommand = await stream.recv_message()
        assert hello.router
        self._outbox = RouterStream(stats=NodeStats())
        self._outbox.wake.set()
        tasks = [asyncio.ensure_future(work) for work in (self._outbox.write(stream), self._beat())]
        try:
            async for command in stream:
                for submit in command.submits:
                    self._rows.append(Row(submit))
                    self._all_rows[submit.id.split("-")[1]] = self._rows[-1]
                if command.aborts:  # all streams end together
                    self._rows.clear()
        finally:
            for task in tasks:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._outbox.stats = NodeStats(steps=self._steps, running=len(self._rows))
            self._outbox.wake.set()

    def turn(self) -> None:
        """The next token of every request whose client keeps up."""
        now, deltas = time.monotonic(), self._outbox.deltas
        for row in self._rows:
            if (position := len(row.sent)) - row.num_received < WINDOW and position < row.submit.max_tokens:
                row.sent.append(now)
                deltas.append(TokenDelta(row.submit.id, position, self._packed[position % len(self._packed)]))
        self._steps += 1
        self._outbox.wake.set()
