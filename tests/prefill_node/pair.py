"""A prefill node and a decode node in one process, with real RPCs, a real KV channel and an in-memory router."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_node.receiver import HandoffReceiver
from engine.hash_model import HashRunner
from engine.runner import SliceOutput
from node.node import Node
from prefill_node.decode_peers import HandoffTiming
from prefill_node.sender import HandoffSender
from scheduler.geometry import UNIFORM, Group
from scheduler.request import Step
from scheduler.role import DECODE, PREFILL
from shared.kv.channel import KVChannel
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from shared.rpc.messages import TokenDelta, unpack_ids
from tests.node.harness import (
    BLOCK_TOKENS,
    ROW_BYTES,
    VOCABULARY,
    HashNode,
    RouterLine,
    attached,
    expected,
    hash_node,
    submission,
)
from tests.shared.rpc import serving


class ForwardingChannel:
    """A channel that forwards all calls to another channel. Tests override `push`."""

    def __init__(self, inner: KVChannel) -> None:
        self.inner = inner
        self.name, self.fenced = inner.name, inner.fenced

    def reachable(self, descriptor: bytes) -> bool:
        return self.inner.reachable(descriptor)

    async def push(
        self, descriptor: bytes, reservation_id: bytes, source: Sequence[int], target: Sequence[int]
    ) -> None:
        await self.inner.push(descriptor, reservation_id, source, target)


@dataclass
class Sent:
    """A request, and the tokens and errors that the nodes sent for it."""

    prompt: list[int]
    max_tokens: int
    groups: tuple[Group, ...] = UNIFORM
    tokens: dict[int, int] = field(default_factory=dict)  # by position
    finish: str = ""
    errors: list[TokenDelta] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.finish or self.errors)

    def row(self) -> list[int]:
        """Check that all tokens are right, and return them."""
        row = [self.tokens[at] for at in range(len(self.tokens)) if at in self.tokens]
        assert row == expected(self.prompt, self.max_tokens, self.groups)[: len(row)]
        return row


@dataclass
class Pair:
    prefill: HashNode
    decode: HashNode
    address: str  # of the decode node
    lines: list[RouterLine]
    groups: tuple[Group, ...]
    sent: dict[str, Sent] = field(default_factory=dict)

    def on_delta(self, delta: TokenDelta) -> None:
        sent = self.sent[delta.id]
        for at, token in enumerate(unpack_ids(delta.tokens), delta.position):
            if sent.tokens.setdefault(at, token) != token:
                sent.tokens[at] = -1  # sent twice with different values: `row` fails on the -1
        sent.finish = sent.finish or delta.finish
        if delta.error:
            sent.errors.append(delta)
            self.abort(delta.id)  # on both nodes, as a router does

    def submit(self, name: str, prompt: list[int], max_tokens: int, local: bool = False) -> Sent:
        """Submit a request to the prefill node, which hands it off. If `local`, submit it only to the decode node."""
        self.sent[name] = Sent(prompt, max_tokens, self.groups)
        self.lines[local].submit(submission(name, prompt, max_tokens, decode_node="" if local else self.address))
        return self.sent[name]

    def abort(self, *names: str) -> None:
        for line in self.lines:
            line.abort(*names)

    def is_empty(self) -> bool:
        return self.prefill.is_empty() and self.decode.is_empty()

    async def empty(self) -> None:
        """Wait until both nodes have released all requests, and audit every block."""
        await self.prefill.empty()
        await self.decode.empty()

    def assert_alive(self) -> None:
        for here in (self.prefill, self.decode):
            assert not here.node.fatal_error.done()


class SlowRunner(HashRunner):
    """A runner whose steps take `step_s` longer, so that there is time between chunks."""

    step_s = 0.0

    def run(self, step: Step) -> list[SliceOutput]:
        time.sleep(self.step_s)
        return super().run(step)


def _runner(memory: HostMemory, step_s: float, groups: tuple[Group, ...]) -> SlowRunner:
    runner = SlowRunner(memory.rows, BLOCK_TOKENS, VOCABULARY, groups)
    runner.step_s = step_s
    return runner


async def open_channel(kind: str, memory: HostMemory, name: str, lost: Any, directory: Path) -> KVChannel:
    if kind == "shm":
        return ShmChannel(memory, name, lost, directory, 60.0)
    return TcpChannel(memory, name, lambda _: None, "127.0.0.1", patience_s=60.0)


CALM = HandoffTiming(call_s=60.0)  # for a machine on which a process may stand still for some seconds


@asynccontextmanager
async def pair(
    kind: str,
    directory: Path,
    prefill_blocks: int = 64,
    decode_blocks: int = 64,
    reserve_s: float = 20.0,
    step_s: float = 0.0,
    timing: HandoffTiming | None = None,
    wrap: Callable[[KVChannel, HostMemory], Any] = lambda channel, _: channel,
    groups: tuple[Group, ...] = UNIFORM,
) -> AsyncIterator[Pair]:
    """Start a pair of nodes. The prefill node uses the channel that `wrap(channel, decode_memory)` returns."""
    memories = [HostMemory(prefill_blocks, ROW_BYTES), HostMemory(decode_blocks, ROW_BYTES)]
    names = [secrets.token_hex(16) for _ in range(2)]
    receivers: list[HandoffReceiver] = []
    async with AsyncExitStack() as cleanup:
        channels = [
            await open_channel(kind, memory, name, lambda writer: receivers[0].on_writer_lost(writer), directory)
            for memory, name in zip(memories, names, strict=True)
        ]
        for channel in channels:
            cleanup.push_async_callback(channel.close)

        def make_sender(node: Node, memory: HostMemory) -> HandoffSender:
            return HandoffSender(node, memory, [wrap(channels[0], memories[1])], reserve_s, timing or CALM)

        def make_receiver(node: Node, memory: HostMemory) -> HandoffReceiver:
            receivers.append(HandoffReceiver(node, memory, channels[1:], reserve_s))
            return receivers[0]

        prefill, decode = (
            hash_node(
                role,
                {role.name: make},
                memory=memory,
                incarnation_id=name,
                runner=_runner(memory, step_s, groups),
                groups=groups,
                heartbeat_s=0.2,
            )
            for role, make, memory, name in zip(
                (PREFILL, DECODE), (make_sender, make_receiver), memories, names, strict=True
            )
        )
        _, address = await cleanup.enter_async_context(serving(receivers[0].handlers))
        here = Pair(prefill, decode, address, [RouterLine(), RouterLine()], groups)
        for end, line in zip((prefill, decode), here.lines, strict=True):
            line.on_delta = here.on_delta
            await cleanup.enter_async_context(attached(end, line))
        yield here
