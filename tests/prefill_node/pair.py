"""A prefill and a decode node in one process, joined by real RPCs and a real KV channel, under a router made by hand."""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode_node.receiver import HandoffReceiver
from engine.hash_model import HashRunner, expected_tokens
from engine.runner import SliceOutput
from node.node import Node
from prefill_node.sender import HandoffSender
from scheduler.request import Step
from scheduler.role import DECODE, PREFILL, Role
from scheduler.scheduler import Scheduler, StepLimits
from shared.kv.channel import KVChannel
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from shared.lifecycle import wait_until
from shared.rpc.messages import (
    NodeInfo,
    NodeUpdate,
    RouterCommand,
    SamplingParams,
    SubmitRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from shared.rpc.methods import RpcServer
from tests.engine.test_records import Line

BLOCK_TOKENS, LAYERS, VOCABULARY = 4, 2, 97
ROW_BYTES = BLOCK_TOKENS * LAYERS * 8
ROUTER = "router"


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, layers=LAYERS, vocab_size=VOCABULARY)


@dataclass
class Wire(Line):
    """A router's end of a standing stream, which hears every delta."""

    hear: Callable[[TokenDelta], None] = lambda _: None

    async def send_message(self, report: NodeUpdate) -> None:
        for delta in report.deltas:
            self.hear(delta)


@dataclass
class Sent:
    """A request, and what the nodes said of it."""

    prompt: list[int]
    max_tokens: int
    tokens: dict[int, int] = field(default_factory=dict)  # by position
    finish: str = ""
    errors: list[TokenDelta] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.finish or self.errors)

    def row(self) -> list[int]:
        """The tokens without a gap from the first; raises AssertionError when they are not what must come."""
        row = [self.tokens[at] for at in range(len(self.tokens)) if at in self.tokens]
        assert row == expected(self.prompt, self.max_tokens)[: len(row)]
        return row


@dataclass
class Pair:
    prefill: Node
    decode: Node
    courier: HandoffSender
    receiver: HandoffReceiver
    channels: list[KVChannel]  # the writer's and the receiver's
    memories: list[HostMemory]
    address: str = ""
    wires: list[Wire] = field(default_factory=list)
    sent: dict[str, Sent] = field(default_factory=dict)

    def hear(self, delta: TokenDelta) -> None:
        sent = self.sent[delta.id]
        for at, token in enumerate(unpack_ids(delta.tokens), delta.position):
            if sent.tokens.setdefault(at, token) != token:
                sent.tokens[at] = -1  # told twice, and not the same: `row` finds it
        sent.finish = sent.finish or delta.finish
        if delta.error:
            sent.errors.append(delta)
            self.abort(delta.id)  # as a router does: nothing of it goes on anywhere

    def submit(self, identity: str, prompt: list[int], max_tokens: int, local: bool = False) -> Sent:
        """To the prefill node, for the decode node; `local`: to the decode node alone."""
        self.sent[identity] = Sent(prompt, max_tokens)
        to = "" if local else self.address
        greedy = SamplingParams(temperature=0.0)
        submit = SubmitRequest(identity, ROUTER, pack_ids(prompt), len(prompt), max_tokens, greedy, decode_node=to)
        self.wires[local].commands.put_nowait(RouterCommand(ROUTER, [submit]))
        return self.sent[identity]

    def abort(self, *identities: str) -> None:
        for wire in self.wires:
            wire.commands.put_nowait(RouterCommand(ROUTER, aborts=list(identities)))

    def is_empty(self) -> bool:
        for node in (self.prefill, self.decode):
            ledger = node._scheduler.ledger()
            if ledger.free + ledger.cached != ledger.total or node.active.router_of or node._scheduler.requests:
                return False
        peers = self.courier._peers._peers.values()
        return not (
            self.courier._outgoing
            or self.receiver._waiting
            or len(self.receiver._table)
            or any(peer.reservations or peer.num_waiting for peer in peers)
        )

    async def empty(self, timeout_s: float = 20.0) -> None:
        """Waits until nothing of any request is anywhere, and looks at every block."""
        assert await wait_until(self.is_empty, timeout_s, 0.005), [
            (node.info.role, node._scheduler.ledger(), list(node.active.router_of))
            for node in (self.prefill, self.decode)
        ]
        for node in (self.prefill, self.decode):
            assert node._scheduler.pool.audit([]) == ""
            assert (node.active.num_tokens, node.active._sizes) == (0, {})
            assert not any(outbox.requests for outbox in node.sessions.streams.values())


class SlowRunner(HashRunner):
    """Its steps take `step_s` longer: there is a time between chunks."""

    step_s = 0.0

    def run(self, step: Step) -> list[SliceOutput]:
        time.sleep(self.step_s)
        return super().run(step)


def _node(role: Role, boot: str, memory: HostMemory, step_s: float) -> Node:
    num_blocks = memory.num_rows
    scheduler = Scheduler(StepLimits(max_num_batched_tokens=8), num_blocks, BLOCK_TOKENS)
    info = NodeInfo(role.name, boot, role.name, "", "m", "print", BLOCK_TOKENS, ROW_BYTES, num_blocks, 512, 64)
    runner = SlowRunner(memory.rows, BLOCK_TOKENS, LAYERS, VOCABULARY)
    runner.step_s = step_s
    return Node(info, role, scheduler, runner, 0.2, VOCABULARY)


async def _channel(kind: str, memory: HostMemory, boot: str, lost: Any, directory: Path) -> KVChannel:
    if kind == "shm":
        return await ShmChannel.start(memory, boot, lost, directory)
    return await TcpChannel.start(memory, boot, lambda _: None, "127.0.0.1")


@asynccontextmanager
async def pair(
    kind: str,
    directory: Path,
    prefill_blocks: int = 64,
    decode_blocks: int = 64,
    reserve_s: float = 20.0,
    step_s: float = 0.0,
) -> AsyncIterator[Pair]:
    memories = [HostMemory(prefill_blocks, ROW_BYTES), HostMemory(decode_blocks, ROW_BYTES)]
    boots = [secrets.token_hex(16) for _ in range(2)]
    made: list[HandoffReceiver] = []
    channels = [
        await _channel(kind, memory, boot, lambda writer: made[0].on_writer_lost(writer), directory)
        for memory, boot in zip(memories, boots, strict=True)
    ]
    nodes = [
        _node(role, boot, memory, step_s) for role, boot, memory in zip((PREFILL, DECODE), boots, memories, strict=True)
    ]
    courier = HandoffSender(nodes[0], memories[0], channels[:1], reserve_s)
    receiver = HandoffReceiver(nodes[1], memories[1], channels[1:], reserve_s)
    made.append(receiver)
    here = Pair(nodes[0], nodes[1], courier, receiver, channels, memories)
    server = RpcServer(receiver.handlers())
    here.address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with AsyncExitStack() as cleanup:
        for end in (*nodes, *channels, server, courier):
            cleanup.push_async_callback(end.close)
        for node in nodes:
            node.start()
        for side in (courier, receiver):
            side.start()
        for node in nodes:
            wire = Wire(hear=here.hear)
            here.wires.append(wire)
            node.tasks.start(node.attach(wire))
            wire.commands.put_nowait(RouterCommand(ROUTER))
        assert await wait_until(lambda: all(node.sessions.streams for node in nodes), 5.0)
        yield here
        for wire in here.wires:
            wire.commands.put_nowait(None)
