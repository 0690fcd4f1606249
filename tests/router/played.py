"""A router's dispatch over nodes that are played: the fleet is the real one, its links have no streams."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from router.dispatch import dispatcher as dispatch_module
from router.dispatch.dispatcher import Dispatcher, DispatchRules, GenerationRun
from router.dispatch.requests import GenerationRequest, SampleDelta
from router.history.history import RequestHistory
from router.nodes import health as standing
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from shared.registry import EmbeddedRegistry
from shared.rpc.messages import NodeInfo, NodeUpdate, SamplingParams, SubmitRequest, TokenDelta, pack_ids

PROMPT = list(range(10, 19))
ANSWER = list(range(50, 57))


class Heard(RequestHistory):
    """Keeps what it is told of attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.placements: list[tuple[str, str | None, str, str, float, float]] = []
        self.moves: list[tuple[str, str]] = []

    def placed(
        self, attempt: str, prefill: str | None, decode: str, reason: str, local_s: float = 0.0, remote_s: float = 0.0
    ) -> None:
        self.placements.append((attempt, prefill, decode, reason, local_s, remote_s))

    def migrated(self, attempt: str, why: str) -> None:
        self.moves.append((attempt, why))


class Played(NodeConnection):
    """A node whose words are the test's; it keeps what it was sent."""

    def __init__(self, fleet: NodePool, name: str) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        info = NodeInfo(name, name, role, f"{name}:1", "m", "print", 4, 64, 1000, 512, 8)
        super().__init__("router", info, 1.0, fleet._connection_changed, fleet._records)
        self.is_alive = True
        self.submits: list[SubmitRequest] = []
        self.aborts: list[str] = []

    def submit(self, submit: SubmitRequest, listener: Any) -> None:
        self.submits.append(submit)
        super().submit(submit, listener)

    def abort(self, identity: str) -> None:
        if identity in self.listeners:
            self.aborts.append(identity)
        super().abort(identity)

    def say(self, *deltas: TokenDelta) -> None:
        self._process(NodeUpdate(list(deltas)))

    def die(self) -> None:
        self._end()

    def revive(self) -> None:
        self.is_alive = True
        self._on_change(self)


@dataclass
class Stage:
    fleet: NodePool
    dispatch: Dispatcher
    nodes: dict[str, Played]
    records: Heard

    def __getattr__(self, name: str) -> Played:
        return self.nodes[name]

    async def submit(
        self,
        n: int = 1,
        max_tokens: int = len(ANSWER),
        name: str = "r",
        deadline: float | None = None,
        tenant: str = "",
        priority: int = 0,
        **sampling: Any,
    ) -> GenerationRun:
        generation = GenerationRequest(
            name,
            list(PROMPT),
            max_tokens,
            SamplingParams(temperature=0.0, **sampling),
            n=n,
            deadline=deadline,
            tenant=tenant,
            priority=priority,
        )
        run = await self.dispatch.submit(generation)
        await turns()
        return run

    def sent(self) -> list[tuple[str, SubmitRequest]]:
        return [(name, submit) for name, node in self.nodes.items() for submit in node.submits]

    def attempt(self, number: int, sample: int = 0) -> tuple[Played, Played, SubmitRequest]:
        """Who computes the prompt of this attempt, who generates, and what was sent."""
        identity = f"r.{sample}.{number}"
        ((name, submit),) = [(name, submit) for name, submit in self.sent() if submit.id == identity]
        where = submit.decode_node.partition(":")[0] or name
        return self.nodes[name], self.nodes[where], submit

    def counts(self) -> dict[str, int]:
        requests: Any = self.dispatch.status()["requests"]
        return dict(requests)

    def check_over(self) -> None:
        """Nothing of any request is left in the router, and the counts add up."""
        for name, node in self.nodes.items():
            ledger = (node.outstanding_tokens, node.outstanding_pairs, node.kv_tokens, node.prefilling)
            assert (name, ledger, node.listeners) == (name, (0, 0, 0, 0), {})
        held = self.dispatch._queue._admission
        assert (held.held_requests, held.held_tokens, held.owed_tokens, held.owed_prompts) == (0, 0, 0, 0)
        assert (held.queued_requests, held.queued_tokens, self.dispatch._queue._waiting) == (0, 0, {})
        counts = self.counts()
        assert counts["running"] == 0
        assert counts["total"] == sum(counts[name] for name in ("finished", "cancelled", "failed", "refused"))


def stage(names: str = "p0 d0", max_attempts: int = 3, **rules: Any) -> Stage:
    records = Heard()
    fleet = NodePool("router", EmbeddedRegistry("router", "127.0.0.1", 0), "disaggregated", 1.0, records)
    nodes = {name: Played(fleet, name) for name in names.split()}
    fleet._connections.update(nodes)
    return Stage(fleet, Dispatcher(fleet, "m", DispatchRules(max_attempts, **rules), records), nodes, records)


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def collect(run: GenerationRun) -> list[SampleDelta]:
    async with asyncio.timeout(5):
        return [piece async for piece in run]


def tokens_of(pieces: list[SampleDelta], index: int = 0) -> list[int]:
    return [token for piece in pieces if piece.index == index for token in piece.tokens]


def token(identity: str, position: int, **fields: Any) -> TokenDelta:
    finish = "length" if position == len(ANSWER) - 1 else ""
    return TokenDelta(identity, position, pack_ids([ANSWER[position]]), finish=finish, **fields)


def generated(identity: str, start: int = 0) -> list[TokenDelta]:
    return [token(identity, position) for position in range(start, len(ANSWER))]


@pytest.fixture(autouse=True, scope="module")
def no_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch_module, "RETRY_PAUSE_S", 0.0)
        patch.setattr(dispatch_module, "NEWS_S", 0.0)
        patch.setattr(standing, "EJECT_S", 1e6)  # longer than any test: who died is back when a test says so
        patch.setattr(standing, "MAX_EJECT_S", 1e6)
        yield
