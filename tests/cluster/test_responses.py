"""Test that a stored response survives the death of any process: no event is lost or repeated, and no token differs."""

import asyncio
import contextlib
import json
import random
import signal
import urllib.error
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis

from tests.cluster.harness import Cluster, RedisServer, cluster, wait_for
from tests.engine.build import thinned

PATH = "/v1/responses"
Event = dict[str, Any]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two routers, two prefill nodes and two decode nodes with one Redis, which is also the store of responses."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        server.start()
        with redis.Redis(port=server.port) as client:
            wait_for(lambda: answers(client), "Redis answers")
        options: dict[str, Any] = {"routers": 2, "responses_store": server.url, "max_attempts": 20, "node_timeout_s": 5}
        options["max_num_batched_tokens"] = 64  # so that a prompt takes several steps
        with cluster(2, 2, server.url, **options) as running:
            yield running


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def body(seed: int, **fields: Any) -> dict[str, Any]:
    """Return a request whose answer depends on the seed, so that answers of different requests differ."""
    text = f"Story {seed}: " + "once upon a time " * 40
    given = {"input": text, "max_output_tokens": 400, "ignore_eos": True, "seed": seed}
    return given | {"temperature": 1.0, "background": True} | fields


def parse(line: str) -> Event | None:
    return json.loads(line[6:]) if line.startswith("data: ") else None


async def follow(urls: list[str], response_id: str, until: int | None = None) -> list[Event]:
    """Return the events of a response up to event number `until`, or all of them. After the loss of a router, resume
    on another router. Each connection requests the events after the last one that arrived."""
    events: list[Event] = []
    chance = random.Random(response_id)
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(timeout=PATIENCE_S, verify=False) as client:
        while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed"):
            query = f"?stream=true&starting_after={len(events) - 1}" if events else "?stream=true"
            try:
                async with client.stream("GET", f"{chance.choice(urls)}{PATH}/{response_id}{query}") as stream:
                    async for line in stream.aiter_lines():
                        if (event := parse(line)) is not None:
                            assert event["type"] != "error", event
                            assert event["sequence_number"] == len(events), "an event is lost or repeated"
                            events.append(event)
                            if until is not None and len(events) > until:
                                return events
            except httpx.HTTPError:
                await asyncio.sleep(0.05)
    return events


async def create(url: str, fields: dict[str, Any]) -> str:
    async with httpx.AsyncClient(timeout=PATIENCE_S, verify=False) as client:
        answer = await client.post(url + PATH, json=fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


def text_of(events: list[Event]) -> str:
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    response = events[-1]["response"]
    assert response["status"] == "incomplete", response
    assert response["usage"]["output_tokens"] == 400
    assert response["output"][0]["content"][0]["text"] == deltas
    return deltas


async def timeline_of(running: Cluster, router: str, response_id: str) -> dict[str, Any]:
    """Wait until nodes compute the response, and return its timeline."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(urllib.error.HTTPError):  # the request has not begun
                timeline = await asyncio.to_thread(running.get, f"/v1/requests/{response_id}/timeline", router)
                if timeline["prefill"] and timeline["decode"]:
                    return timeline
            await asyncio.sleep(0.005)


async def survives(running: Cluster, number: int, role: str) -> int:
    """Start three responses on two routers, kill the process of this role that serves the first response, and check
    every event of each response. Return the number of events."""
    urls = list(running.urls.values())
    routers, chance = list(running.urls), random.Random(number)
    seeds = [3 * number + index for index in range(3)]
    undisturbed = [await create(urls[index % 2], body(seed)) for index, seed in enumerate(seeds)]
    wanted = [text_of(events) for events in await asyncio.gather(*(follow(urls, name) for name in undisturbed))]
    names = [await create(urls[(number + index) % 2], body(seed)) for index, seed in enumerate(seeds)]
    owner, begun = routers[number % 2], list[Event]()
    timeline = await timeline_of(running, owner, names[0])
    victim = owner if role == "router" else timeline[role]
    if role == "prefill":
        await asyncio.sleep(chance.uniform(0, 0.1))
    else:
        begun = await follow([running.urls[owner]], names[0], until=chance.randrange(3, 100))
    running.send_signal(victim, signal.SIGKILL)
    streams = await asyncio.gather(*(follow(urls, name) for name in names))
    assert streams[0][: len(begun)] == begun
    assert [text_of(events) for events in streams] == wanted
    assert await follow(urls, names[0]) == streams[0], "all readers get the same events"
    await asyncio.to_thread(restart, running, victim)
    return sum(map(len, streams))


@contextlib.asynccontextmanager
async def load(running: Cluster, streams: int) -> AsyncIterator[None]:
    """Keep this number of completions in progress, even if their router is killed."""

    async def stream(number: int) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(timeout=PATIENCE_S, verify=False) as client:
            while True:
                given = {"prompt": f"Load {chance.random()}", "max_tokens": 100, "ignore_eos": True, "stream": True}
                with contextlib.suppress(httpx.HTTPError):
                    async with client.stream(
                        "POST", chance.choice(list(running.urls.values())) + "/v1/completions", json=given
                    ) as answer:
                        await answer.aread()
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    yield
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def restart(running: Cluster, name: str) -> None:
    running.processes[name].wait()
    running.start(name)
    running.ready()


ROLES = ("router", "prefill", "decode")


@pytest.mark.parametrize("number", thinned([0, 1, 2, 3, 4, 5], 3))
async def test_a_response_survives_the_death_of_a_process(running: Cluster, number: int) -> None:
    async with load(running, 2):
        await survives(running, number, ROLES[number // 2])


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
async def test_responses_survive_200_deaths(running: Cluster) -> None:
    counts, num_events = Counter[str](), 0
    async with load(running, 4):
        for number in range(200):
            role = ROLES[number % 3]
            num_events += await survives(running, 100 + number, role)
            counts[role] += 1
            print(
                f"{sum(counts.values())} deaths {dict(counts)}: {num_events} events, none lost or repeated", flush=True
            )


async def test_a_router_that_stops_hands_its_responses_over(running: Cluster) -> None:
    urls = list(running.urls.values())
    name = await create(urls[0], body(999))
    await follow(urls, name, until=5)
    running.send_signal("router", signal.SIGTERM)
    first = text_of(await follow(urls, name))
    await asyncio.to_thread(restart, running, "router")
    assert text_of(await follow(urls, await create(urls[0], body(999)))) == first
