"""Nodes that run the hash model in the test's process, and the router's end of the stream to a node."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decode_node.receiver import HandoffReceiver
from engine.hash_model import LANES, HashRunner, expected_tokens
from node.active_requests import RequestRules
from node.node import Node
from scheduler.geometry import UNIFORM, Group
from scheduler.request import Request, Slice, Step
from scheduler.role import Role
from scheduler.scheduler import Scheduler, StepLimits
from shared.kv.memory import HostMemory
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    NodeInfo,
    NodeUpdate,
    RequestEvent,
    RouterCommand,
    SamplingParams,
    StepRecord,
    SubmitRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)

BLOCK_TOKENS, VOCABULARY = 4, 97
ROW_BYTES = BLOCK_TOKENS * LANES * 8
GREEDY = SamplingParams(temperature=0.0)
ROUTER = "router"


@pytest.fixture
def quiet() -> Iterator[None]:
    """Hide the tracebacks that the code logs for injected errors."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def expected(prompt: list[int], count: int, groups: tuple[Group, ...] = UNIFORM) -> list[int]:
    return expected_tokens(prompt, count, VOCABULARY, groups=groups)


def submission(
    name: str = "r", prompt: list[int] | None = None, max_tokens: int = 4, router: str = ROUTER, **more: Any
) -> SubmitRequest:
    tokens = prompt or [5, 6, 7]
    given = {"tokens": pack_ids(tokens), "num_prompt": len(tokens), "max_tokens": max_tokens, "sampling": GREEDY}
    return SubmitRequest(name, router, **(given | more))


def compute_prompt(rows: NDArray[np.uint8], prompt: list[int], blocks: list[int]) -> None:
    """Fill `blocks` with the KV of a prompt."""
    request = Request("reference", list(prompt), len(prompt), 1, tables=[blocks])
    HashRunner(rows, BLOCK_TOKENS, VOCABULARY).run(Step(0, [Slice(request, 0, len(prompt), True, 0)], []))


@dataclass
class RouterLine:
    """The router's end of the stream between a router and a node, in memory."""

    name: str = ROUTER
    commands: asyncio.Queue[RouterCommand | None] = field(default_factory=asyncio.Queue)  # None: the end
    updates: list[NodeUpdate] = field(default_factory=list)
    on_delta: Callable[[TokenDelta], None] = lambda _: None

    # ---- called by the node ----

    async def recv_message(self) -> RouterCommand | None:
        return await self.commands.get()

    def __aiter__(self) -> "RouterLine":
        return self

    async def __anext__(self) -> RouterCommand:
        command = await self.commands.get()
        if command is None:
            raise StopAsyncIteration
        return command

    async def send_message(self, update: NodeUpdate) -> None:
        self.updates.append(update)
        for delta in update.deltas:
            self.on_delta(delta)

    # ---- called by the test ----

    def say_hello(self) -> None:
        self.commands.put_nowait(RouterCommand(self.name))

    def submit(self, *submits: SubmitRequest) -> None:
        self.commands.put_nowait(RouterCommand(self.name, list(submits)))

    def abort(self, *names: str) -> None:
        self.commands.put_nowait(RouterCommand(self.name, aborts=list(names)))

    def hang_up(self) -> None:
        self.commands.put_nowait(None)

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for update in self.updates for delta in update.deltas]

    @property
    def steps(self) -> list[StepRecord]:
        return [step for update in self.updates for step in update.steps]

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas if delta.id == name for token in unpack_ids(delta.tokens)]

    def finishes(self, name: str) -> list[str]:
        return [delta.finish for delta in self.deltas if delta.id == name and delta.finish]

    def errors(self) -> list[tuple[str, bool]]:
        return [(delta.error, delta.retry) for delta in self.deltas if delta.error]

    def events(self, name: str | None = None) -> list[RequestEvent]:
        return [event for update in self.updates for event in update.events if name in {None, event.id}]

    def kinds(self, name: str) -> list[str]:
        return [event.kind for event in sorted(self.events(name), key=lambda event: event.at_ns)]

    async def ends(self, *names: str) -> None:
        def all_ended() -> bool:
            return all(any(event.kind == "ended" for event in self.events(name)) for name in names)

        assert await wait_until(all_ended, 5.0), self.events()


class UnreadLine(RouterLine):
    """A router that does not read its stream."""

    async def send_message(self, update: Any) -> None:
        await asyncio.Event().wait()


@dataclass
class HashNode:
    """A node with its role adapter, its scheduler and its memory."""

    node: Node
    adapter: Any
    scheduler: Scheduler
    memory: HostMemory

    def is_empty(self) -> bool:
        """Return whether the node holds no request and no resource of a request."""
        ledger = self.scheduler.ledger()
        is_free = ledger.free + ledger.cached == ledger.total and not self.scheduler.requests
        return is_free and not self.node.requests and self.node.requests.num_tokens == 0 and self.adapter.is_idle

    async def empty(self, timeout_s: float = 20.0) -> None:
        assert await wait_until(self.is_empty, timeout_s, 0.005), (self.node.stats(), self.scheduler.requests)
        assert self.scheduler.audit() == ""


def hash_node(
    role: Role,
    factories: Mapping[str, Callable[[Node, HostMemory], Any]] | None = None,
    *,
    num_blocks: int = 64,
    memory: HostMemory | None = None,
    incarnation_id: str = "",
    runner: HashRunner | None = None,
    limits: StepLimits | None = None,
    rules: RequestRules | None = None,
    max_routers: int = 64,
    max_unread: int = 100_000,
    heartbeat_s: float = 0.05,
    max_model_len: int = 512,
    groups: tuple[Group, ...] = UNIFORM,
) -> HashNode:
    """Build a node, but do not start it. Without `factories`, its role adapter is a receiver without KV channels."""
    memory = memory or HostMemory(num_blocks, ROW_BYTES)
    limits = limits or StepLimits(max_num_batched_tokens=8)
    scheduler = Scheduler(limits, memory.num_rows, BLOCK_TOKENS, groups=groups)
    identity = incarnation_id or secrets.token_hex(16)
    sizes = (BLOCK_TOKENS, ROW_BYTES, memory.num_rows, max_model_len, 64)
    info = NodeInfo(f"{role.name}-0", identity, role.name, "h:1", "m", "print", *sizes)
    runner = runner or HashRunner(memory.rows, BLOCK_TOKENS, VOCABULARY, groups)
    makers = factories or {role.name: lambda node, memory: HandoffReceiver(node, memory, [], 1.0)}
    node = Node(
        info,
        scheduler,
        runner,
        rules or RequestRules(VOCABULARY),
        lambda node, role: makers[role.name](node, memory),
        heartbeat_s,
        max_routers=max_routers,
        max_unread=max_unread,
    )
    node.take_role(role)
    return HashNode(node, node.role, scheduler, memory)


@asynccontextmanager
async def attached(here: HashNode, line: RouterLine | None = None) -> AsyncIterator[RouterLine]:
    """Run the node's engine, and attach a router to the node."""
    line = line or RouterLine()
    here.node.start()
    session = here.node.tasks.start(here.node.attach(line))
    line.say_hello()
    assert await wait_until(lambda: here.node.sessions.is_attached(line.name), 5.0)
    try:
        yield line
    finally:
        line.hang_up()
        await session
        await here.node.close_adapters()
        await here.node.close()
