"""A real dispatcher and a real node pool. The nodes are simulated by the test, and have no network streams."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from router.dispatch import dispatcher as dispatcher_module
from router.dispatch.admission import AdmissionQueue
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.requests import GenerationRequest, TokenStream, merge
from router.dispatch.rules import DispatchRules
from router.nodes import health
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from shared.registry import EmbeddedRegistry
from shared.rpc.messages import (
    Media,
    NodeInfo,
    NodeStats,
    NodeUpdate,
    SamplingParams,
    SubmitRequest,
    TokenDelta,
    pack_ids,
    unpack_ids,
)

PROMPT = list(range(10, 19))
ANSWER = list(range(50, 57))


class AttemptLog(RouterObserver):
    """An observer that records the placements that the dispatcher reports."""

    def __init__(self) -> None:
        self.placements: list[tuple[str, str | None, str, str, float, float]] = []

    def placed(
        self, attempt: str, prefill: str | None, decode: str, reason: str, local_s: float = 0.0, remote_s: float = 0.0
    ) -> None:
        self.placements.append((attempt, prefill, decode, reason, local_s, remote_s))


class SimulatedNode(NodeConnection):
    """A simulated node. It records the router's commands. Tests call `send`, `report` or `die` to act as the node."""

    def __init__(self, pool: NodePool, name: str, observer: RouterObserver) -> None:
        role = "prefill" if name.startswith("p") else "decode"
        info = NodeInfo(name, name, role, f"{name}:1", "m", "print", 4, 64, 1000, 512, 8)
        super().__init__("router", info, 1.0, pool.connection_changed, observer)
        self.pool = pool
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

    def send(self, *deltas: TokenDelta) -> None:
        self.process(NodeUpdate(list(deltas)))

    def report(self, stats: NodeStats) -> None:
        self.process(NodeUpdate(stats=stats))

    def die(self) -> None:
        self.stream_ended()

    def fall_silent(self) -> None:
        self.stream_ended(is_silent=True)

    def revive(self) -> None:
        self.is_alive = True
        self.pool.connection_changed(self)


@dataclass
class Piece:
    """A delta of the sample `index`. `tokens` are the token ids in the delta."""

    index: int
    delta: TokenDelta

    @property
    def tokens(self) -> list[int]:
        return unpack_ids(self.delta.tokens)

    @property
    def finish(self) -> str | None:
        return self.delta.finish or None


class Reader:
    """The client of one request. If `slowly` is set, the client reads at most one piece ahead of `anext`."""

    def __init__(self, dispatcher: Dispatcher, request: GenerationRequest, *, slowly: bool = False) -> None:
        self.pieces: list[Piece] = []
        self._dispatcher = dispatcher
        self._request = request
        self._enough: set[int] = set()
        self._slowly = slowly
        self._wanted = asyncio.Semaphore(0)
        self._news = asyncio.Event()
        self._admitted = asyncio.Event()
        self._num_given = 0
        self.task = asyncio.create_task(self._read())
        self.task.add_done_callback(lambda _: self._over())

    async def admitted(self) -> None:
        """Wait until the request is admitted. If the request is refused, raise the error."""
        await self._admitted.wait()
        if self.task.done():
            self.task.result()

    def enough(self, index: int) -> None:
        """Close this sample's stream after its next delta, as the API does when it finds a stop string."""
        self._enough.add(index)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def __anext__(self) -> Piece:
        self._wanted.release()
        async with asyncio.timeout(5):
            while len(self.pieces) == self._num_given and not self.task.done():
                self._news.clear()
                await self._news.wait()
        if len(self.pieces) == self._num_given:
            self.task.result()
            raise StopAsyncIteration
        self._num_given += 1
        return self.pieces[self._num_given - 1]

    async def rest(self) -> list[Piece]:
        """Return all pieces that `anext` has not returned yet. If the request failed, raise its error."""
        self._slowly = False
        self._wanted.release()
        async with asyncio.timeout(5):
            await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()
        return self.pieces[self._num_given :]

    def _over(self) -> None:
        self._admitted.set()
        self._news.set()

    async def _read(self) -> None:
        async with self._dispatcher.admit(self._request) as streams:
            self._admitted.set()
            samples = [self._sample(index, stream) for index, stream in enumerate(streams)]
            async with aclosing(merge(samples)) as pieces:
                async for piece in pieces:
                    self.pieces.append(piece)
                    self._news.set()
                    if self._slowly:
                        await self._wanted.acquire()

    async def _sample(self, index: int, stream: TokenStream) -> AsyncGenerator[Piece, None]:
        async for delta in stream:
            yield Piece(index, delta)
            if index in self._enough:
                await stream.aclose()
                return


@dataclass
class Stage:
    fleet: NodePool
    queue: AdmissionQueue
    dispatch: Dispatcher
    nodes: dict[str, SimulatedNode]
    records: AttemptLog

    def __getattr__(self, name: str) -> SimulatedNode:
        return self.nodes[name]

    async def submit(
        self,
        n: int = 1,
        max_tokens: int = len(ANSWER),
        name: str = "r",
        deadline: float | None = None,
        tenant: str = "",
        priority: int = 0,
        slowly: bool = False,
        media: Sequence[Media] = (),
        first_sample: int = 0,
        **sampling: Any,
    ) -> Reader:
        request = GenerationRequest(
            name,
            list(PROMPT),
            max_tokens,
            SamplingParams(**{"temperature": 0.0} | sampling),
            n=n,
            deadline=deadline,
            tenant=tenant,
            priority=priority,
            media=media,
            first_sample=first_sample,
        )
        reader = Reader(self.dispatch, request, slowly=slowly)
        await reader.admitted()
        await settle()
        return reader

    def sent(self) -> list[tuple[str, SubmitRequest]]:
        return [(name, submit) for name, node in self.nodes.items() for submit in node.submits]

    def attempt(self, number: int, sample: int = 0) -> tuple[SimulatedNode, SimulatedNode, SubmitRequest]:
        """Return the node that computes the attempt's prompt, the node that generates tokens, and the SubmitRequest."""
        identity = f"r.{sample}.{number}"
        ((name, submit),) = [(name, submit) for name, submit in self.sent() if submit.id == identity]
        where = submit.decode_node.partition(":")[0] or name
        return self.nodes[name], self.nodes[where], submit

    def counts(self) -> dict[str, int]:
        return dict(self.dispatch.status()["requests"])

    def check_over(self) -> None:
        """Check that the router keeps no state of any request, and that its counts add up."""
        for name, node in self.nodes.items():
            load = node.load
            ledger = (load.outstanding_tokens, load.outstanding_pairs, load.kv_tokens, load.prefilling)
            assert (name, ledger, node.listeners) == (name, (0, 0, 0, 0), {})
        queue = self.queue
        assert (queue.held_requests, queue.held_tokens, queue.queued_requests, queue.queued_tokens) == (0, 0, 0, 0)
        counts = self.counts()
        assert counts["running"] == 0
        assert counts["total"] == sum(counts[name] for name in ("finished", "cancelled", "failed", "refused"))


def stage(
    names: str = "p0 d0",
    max_attempts: int = 3,
    max_queue_s: float = 30.0,
    max_queued_tokens: int = 0,
    ttft_slo_s: float = 0.0,
    disaggregate: str = "auto",
    exact_retries: bool = False,
) -> Stage:
    log = AttemptLog()
    queue = AdmissionQueue(max_queue_s, max_queued_tokens)
    pool = NodePool("router", EmbeddedRegistry("127.0.0.1", 0), "disaggregated", 1.0, log, queue.resize)
    nodes = {name: SimulatedNode(pool, name, log) for name in names.split()}
    for node in nodes.values():
        pool.connections[node.info.id] = node
    pool.notify()
    rules = DispatchRules(max_attempts, disaggregate, ttft_slo_s, exact_retries)
    return Stage(pool, queue, Dispatcher(pool, queue, "m", rules, log), nodes, log)


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def collect(reader: Reader) -> list[Piece]:
    return await reader.rest()


def tokens_of(pieces: list[Piece], index: int = 0) -> list[int]:
    return [token for piece in pieces if piece.index == index for token in piece.tokens]


def token(identity: str, position: int, **fields: Any) -> TokenDelta:
    finish = "length" if position == len(ANSWER) - 1 else ""
    return TokenDelta(identity, position, pack_ids([ANSWER[position]]), finish=finish, **fields)


def generated(identity: str, start: int = 0) -> list[TokenDelta]:
    return [token(identity, position) for position in range(start, len(ANSWER))]


@pytest.fixture(autouse=True, scope="module")
def no_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher_module, "RETRY_PAUSE_S", 0.0)
        patch.setattr(dispatcher_module, "NEWS_S", 0.0)
        patch.setattr(health, "EJECT_S", 1e6)  # longer than any test, so that no ejection ends during a test
        patch.setattr(health, "MAX_EJECT_S", 1e6)
        yield
