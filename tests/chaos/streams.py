"""Clients that stream one answer after another and time every token while a test disturbs the cluster."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from tests.cluster.harness import DEMO_VOCABULARY, Cluster, completion

PROMPT_TOKENS, ANSWER_TOKENS = 200, 64


@dataclass(slots=True)
class StreamTimings:
    """The results of all clients together."""

    gaps_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_answers: int = 0


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def timings_during(running: Cluster, work: Callable[[], object], clients: int = 8) -> StreamTimings:
    """Stream answers while `work` runs on a thread. Return the timings once `work` and the last stream have ended."""
    timings = StreamTimings()
    asyncio.run(_listen(running, work, clients, timings))
    return timings


async def _listen(running: Cluster, work: Callable[[], object], clients: int, timings: StreamTimings) -> None:
    over = asyncio.Event()
    async with aiohttp.ClientSession(running.url, headers=running.headers) as session, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(_client(session, running.model, random.Random(number), timings, over))
        try:
            await asyncio.to_thread(work)
        finally:
            over.set()


async def _client(
    session: aiohttp.ClientSession, model: str, rng: random.Random, timings: StreamTimings, over: asyncio.Event
) -> None:
    while not over.is_set():
        prompt = [rng.randrange(3, DEMO_VOCABULARY) for _ in range(PROMPT_TOKENS)]
        try:
            await _answer(session, completion(model, prompt, ANSWER_TOKENS, stream=True), timings)
            timings.num_answers += 1
        except (aiohttp.ClientError, OSError, ValueError) as error:
            timings.failed.append(f"{type(error).__name__}: {error}")


async def _answer(session: aiohttp.ClientSession, body: dict[str, object], timings: StreamTimings) -> None:
    last: float | None = None
    async with session.post("/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {await answer.text()}")
        async for line in answer.content:
            if line == b"data: [DONE]\n":
                return
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b'data: {"error"'):
                raise ValueError(line.decode())
            now = time.monotonic()
            if last is not None:
                timings.gaps_s.append(now - last)
            last = now
    raise ValueError("the stream ended without [DONE]")
