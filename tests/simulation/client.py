"""A client of the simulated router. It checks every token of its stream, and it may read slowly or disconnect early."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from router.dispatch.requests import GenerationRequest, TokenStream, merge
from shared.errors import RequestError, UnavailableError
from shared.lifecycle import wait_until
from shared.rpc.messages import SamplingParams, unpack_ids
from tests.simulation.hosts import RouterHost
from tests.simulation.scenario import RequestPlan

EXPECTED_STATUSES = {422, 429, 500, 503, 504}


class Piece(NamedTuple):
    index: int
    tokens: list[int]
    finish: str | None


async def _pieces(index: int, stream: TokenStream) -> AsyncGenerator[Piece, None]:
    async for delta in stream:
        yield Piece(index, unpack_ids(delta.tokens), delta.finish or None)


class Client:
    """One client. `outcome` is "" at first, then "finished", "cancelled", "failed", or "lost" if its router died."""

    def __init__(self, world: Any, plan: RequestPlan) -> None:
        self.world = world
        self.plan = plan
        self.outcome = ""
        self.why = ""
        self.host: RouterHost | None = None
        self.started_in: Any = None  # the router's process
        self._received: dict[int, list[int]] = {index: [] for index in range(plan.n)}
        self._finished: set[int] = set()
        self._pieces = 0
        self._is_accepted = False

    def has_received(self, index: int) -> bool:
        return bool(self._received[index])

    async def run(self) -> None:
        """Wait for the arrival time and a running router, then start the request there."""
        plan = self.plan
        await asyncio.sleep(plan.arrives_s)
        router = self.world.router
        await wait_until(lambda: router.is_up and router.dispatch is not None, 60.0, 0.1)
        self.host = router
        self.started_in = self.host.process
        self.host.run(self._ask())

    async def _ask(self) -> None:
        """Run the request. This task belongs to the router's process."""
        plan = self.plan
        deadline = None if plan.deadline_s is None else time.monotonic() + plan.deadline_s
        generation = GenerationRequest(
            plan.id, list(plan.prompt), plan.max_tokens, SamplingParams(temperature=0.0), stop_tokens=plan.stop_tokens,
            n=plan.n, salt=plan.salt, priority=plan.priority, deadline=deadline,
        )  # fmt: skip
        try:
            assert self.host is not None
            assert self.host.dispatch is not None
            async with self.host.dispatch.admit(generation) as streams:
                self._is_accepted = True
                try:
                    async with asyncio.timeout(plan.cancels_after_s):
                        await self._read(streams)
                except TimeoutError:
                    self._end("cancelled")
        except (UnavailableError, RequestError) as error:
            self._failed(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            self.world.violate(f"{plan.id}: an unexpected error: {error!r}")
            raise
        if not self.outcome:
            self._end("finished")
            self._check_whole()

    async def _read(self, streams: Sequence[TokenStream]) -> None:
        samples = [_pieces(index, stream) for index, stream in enumerate(streams)]
        async with aclosing(merge(samples)) as pieces:
            async for piece in pieces:
                self._receive(piece)
                if self.plan.cancels_at is not None and self._pieces > self.plan.cancels_at:
                    self._end("cancelled")
                    return
                if self.plan.reads_slowly_s:
                    await asyncio.sleep(self.plan.reads_slowly_s)

    def _receive(self, piece: Piece) -> None:
        self._pieces += 1
        plan, received = self.plan, self._received[piece.index]
        self.world.note(f"{plan.id}.{piece.index} receives {piece.tokens} {piece.finish or ''}")
        if piece.index in self._finished:
            self.world.violate(f"{plan.id}.{piece.index} receives {piece.tokens} after its end")
        received += piece.tokens
        if received != plan.expected[: len(received)]:
            self.world.violate(f"{plan.id}.{piece.index} received {received}, the expected tokens are {plan.expected}")
        if piece.finish is not None:
            self._finished.add(piece.index)
            is_stop = bool(received) and received[-1] in plan.stop_tokens
            if piece.finish != ("stop" if is_stop else "length"):
                self.world.violate(f"{plan.id}.{piece.index} ended with {piece.finish} after {received}")

    def _check_whole(self) -> None:
        for index, received in self._received.items():
            if received != self.plan.expected or index not in self._finished:
                self.world.violate(f"{self.plan.id}.{index} ended with {received} of {self.plan.expected}")

    def _failed(self, error: UnavailableError | RequestError) -> None:
        self._end("failed", str(error.message))
        scenario = self.world.scenario
        if error.status not in EXPECTED_STATUSES:
            self.world.violate(f"{self.plan.id}: status {error.status}: {error.message}")
        elif error.status in {429, 504} and self.plan.deadline_s is not None:  # the deadline cannot be met
            self.world.reached("client: deadline")
        elif scenario.is_outage and not self._is_accepted:
            self.world.reached("client: rejected in an outage")
        elif scenario.is_lossless and not scenario.raises:
            self.world.violate(f"{self.plan.id} failed although a node could serve it: {error.message}")

    def _end(self, outcome: str, why: str = "") -> None:
        self.outcome, self.why = outcome, why
        self.world.reached(f"client: {outcome}")
        self.world.note(f"{self.plan.id} {outcome} {why}")
