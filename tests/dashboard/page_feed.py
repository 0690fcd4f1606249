"""A small router that serves the page and generated traffic (`/events`, requests, steps). The times are those of the
real clock, and the random numbers have a fixed seed."""

import asyncio
import itertools
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dashboard.bottleneck import bottleneck
from dashboard.routes import page_routes

ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
TBT_SLO_MS = 25.0
TICK_S = 0.1
LOST = {"id": "decode-2", "role": "decode", "state": "lost", "alive": False, "reason": "It ended its connection."}
PHASES = ("router", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference")


class Feed:
    """The generated state of the router. Each node runs `steps_per_s` steps per second."""

    def __init__(self, steps_per_s: float = 40.0, seed: int = 0) -> None:
        self.random = Random(seed)
        self.steps_per_s = steps_per_s
        self.numbers = dict.fromkeys(ROLES, 0)
        self.began_ms = time.time() * 1e3
        self.ends = dict.fromkeys(ROLES, self.began_ms)
        self.requests: dict[str, dict[str, Any]] = {}
        self.lost_ms: float | None = None  # when decode-2 was lost; None if it was not lost
        self.is_gone = False  # if true, streams end and new streams are refused, as if the router had died

    def status(self) -> dict[str, Any]:
        nodes = [self._node(name, role) for name, role in ROLES.items()]
        nodes += [LOST | {"since_ms": self.lost_ms}] if self.lost_ms is not None else []
        wave = math.sin(time.time() / 5)
        latency = {"window_s": 60, "slo": {"ttft_ms": 450.0, "tbt_ms": TBT_SLO_MS}}
        for name, p50, p99 in (("ttft", 180, 420), ("tbt", 11.2, 27.5), ("ttst", 14.1, 38.2)):
            latency[f"{name}_ms"] = {"p50": p50 + wave, "p99": p99 + 4 * wave, "n": 640}
        running = {"running": sum(one["ended_ms"] is None for one in self.requests.values())}
        status = {"model": "stories", "mode": "disaggregated", "nodes": nodes, "requests": running, "latency": latency}
        status |= {"router": {"version": "0.1.0", "started_ms": self.began_ms - 7.5e6, "max_model_len": 2048}}
        totals = {"requests_per_s": 2.0, "prompt_tokens_per_s": 2400.0, "generated_tokens_per_s": 128.4, "queued": 14}
        totals |= {"running": 24, "refused_per_s": 0.9, "refused": 9, "failed_per_s": 0.0, "failed": 0, "finished": 111}
        return status | {"summary": bottleneck(status), "totals": totals, "events": self.node_events()}

    def node_events(self) -> list[dict[str, Any]]:
        rows = [(self.began_ms, "joined", name, f"{name} joined as a {role} node.") for name, role in ROLES.items()]
        if self.lost_ms is not None:
            rows.append((self.lost_ms, "lost", LOST["id"], f"{LOST['id']} is lost: {LOST['reason']}"))
        columns = ("time_ms", "kind", "node", "text")
        return [{"number": number} | dict(zip(columns, row, strict=True)) for number, row in enumerate(rows)]

    def _node(self, name: str, role: str) -> dict[str, Any]:
        busy, is_prefill = self.random.uniform(0.9, 0.97), role == "prefill"
        owned = self.random.randint(300, 500)
        return {
            "id": name,
            "role": role,
            "state": "ready",
            "alive": True,
            "running": 6,
            "waiting": 7 if is_prefill else 0,
            "blocks": {"free": 900 - owned, "cached": 80, "owned": owned, "reserved": 30, "quarantined": 0, "total": 1010},
            "steps": self.numbers[name],
            "steps_per_s": self.steps_per_s,
            "tokens_per_s": 2200.0,
            "busy": busy if is_prefill else busy - 0.6,
            "batch": {"tokens": 512 if is_prefill else 8, "prefills": int(is_prefill), "decodes": 0 if is_prefill else 8},
            "budget": 512,
            "budget_reason": "fixed",
        }  # fmt: skip

    def steps(self, name: str, until_ms: float) -> list[list[Any]]:
        """Return the node's forward passes since the last call, up to `until_ms`."""
        rows: list[list[Any]] = []
        mean = 1000 / self.steps_per_s
        while self.ends[name] < until_ms:
            mixed = ROLES[name] == "decode" and self.random.random() < 0.05
            tokens = self.random.choice([128, 256, 512]) if ROLES[name] == "prefill" or mixed else 0
            decodes = self.random.randint(4, 12) if ROLES[name] == "decode" else 0
            duration = mean * self.random.uniform(0.6, 0.8) * (2.5 if mixed else 1)
            number, start = self.numbers[name], self.ends[name]
            rows.append([number, start, duration, 0.4, duration, 512, "fixed", int(tokens > 0), tokens, decodes,
                         decodes * 300, 0, decodes, 0, 500, 80, 400, 30])  # fmt: skip
            self.numbers[name] += 1
            self.ends[name] += duration + mean * 0.3
        return rows

    def earlier(self, name: str) -> list[list[Any]]:
        """Return the node's forward passes in the ten seconds before this feed began. Their numbers are negative."""
        tokens = (1, 256, 0) if ROLES[name] == "prefill" else (0, 0, 8)
        starts = range(-10_000, 0, 100)
        return [[start // 100, self.began_ms + start, 20.0, 0.4, 0, 512, "fixed", *tokens, 0, 0] for start in starts]

    def next_request(self, now: float) -> dict[str, Any]:
        index = len(self.requests)
        phases = dict(zip(PHASES, (1.2, 40.0, 110.0, 6.5, 2.0, 480.0, 33.0), strict=True))
        done = index % 5 != 0
        one = {
            "id": f"cmpl-{self.random.getrandbits(128):032x}",
            "state": "finished" if done else "transfer",
            "prompt_tokens": 1200 + index,
            "generated_tokens": 64 if done else 1,
            "cached_tokens": 256,
            "prefill": f"prefill-{index % 2}",
            "decode": f"decode-{index % 2}",
            "reason": "least predicted time",
            "predicted_ms": {"local": 240.0, "remote": 160.0},
            "accepted_ms": now - 673,
            "first_token_ms": now - 521,
            "second_token_ms": now - 505 if done else None,
            "last_token_ms": now if done else now - 521,
            "ended_ms": now if done else None,
            "finish": "length" if done else None,
            "attempts": 1,
            "transfer": {"bytes": 9 << 20, "busy_ms": 31.0, "hidden_ms": 24.5, "exposed_ms": 6.5, "channel": "shm"},
            "phases_ms": phases if done else None,
            "traceparent": "",
        }
        self.requests[one["id"]] = one
        return one

    def timeline(self, name: str) -> dict[str, Any] | None:
        one = self.requests.get(name)
        if one is None:
            return None
        prefill, decode, spans = one["prefill"], one["decode"], []
        for kind, node, start, length, tokens, cause in (
            ("wait", "", 0, 1.2, 0, "router"), ("queued", prefill, 1.2, 40, 0, "prefill queue"),
            ("chunk", prefill, 41, 37, 512, ""), ("chunk", prefill, 78, 36, 512, ""), ("chunk", prefill, 114, 37, 176, ""),
            ("transfer", prefill, 80, 79, 0, ""), ("wait", decode, 151, 6.5, 0, "transfer"),
            ("wait", decode, 157.5, 2, 0, "block reservation"), ("decode", decode, 159.5, 240, 32, ""),
            ("wait", decode, 399.5, 33, 0, "behind a prompt chunk"), ("decode", decode, 432.5, 240, 31, ""),
        ):  # fmt: skip
            at = one["accepted_ms"] + start
            times = {"start_ms": at, "end_ms": at + length}
            spans.append({"kind": kind, "node": node, **times, "tokens": tokens, "cause": cause})
        return one | {"spans": spans}

    async def events(self) -> AsyncIterator[str]:
        tick = 0
        while not self.is_gone:
            now = time.time() * 1e3
            if tick % 10 == 0:
                yield event("status", self.status())
            for name in ROLES:
                yield event("steps", {"node": name, "steps": self.steps(name, now)})
            if tick % 5 == 0:
                one = self.next_request(now)
                yield event("requests", {"requests": [one]})
            tick += 1
            await asyncio.sleep(TICK_S)


def event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def build_feed(feed: Feed) -> Starlette:
    async def events(_: Request) -> Response:
        if feed.is_gone:
            return Response(status_code=503)
        return StreamingResponse(feed.events(), media_type="text/event-stream")

    async def requests(_: Request) -> Response:
        return JSONResponse({"requests": list(reversed(feed.requests.values()))[:100]})

    async def timeline(request: Request) -> Response:
        found = feed.timeline(request.path_params["id"])
        return JSONResponse(found, 200) if found else Response(status_code=404)

    async def steps(request: Request) -> Response:
        name = request.query_params["node"]
        return JSONResponse({"node": name, "steps": feed.earlier(name)})

    async def step(request: Request) -> Response:
        name, number = request.path_params["node"], request.path_params["number"]
        members = [{"id": f"cmpl-{index}", "start": 700 + index, "count": 1, "kind": "decode"} for index in range(3)]
        members.append({"id": "cmpl-9", "start": 0, "count": 512, "kind": "chunk"})
        return JSONResponse({"node": name, "number": number, "members": members})

    async def status(_: Request) -> Response:
        return JSONResponse(feed.status())

    routes = [
        Route("/events", events),
        Route("/v1/status", status),
        Route("/v1/requests", requests),
        Route("/v1/requests/{id}/timeline", timeline),
        Route("/v1/steps", steps),
        Route("/v1/steps/{node}/{number:int}", step),
    ]

    async def chat(request: Request) -> Response:
        body = await request.json()
        if request.headers.get("authorization") != "Bearer key":
            error = {"message": "The queue is full.", "code": "overloaded"}
            return JSONResponse({"error": error}, 429, {"retry-after": "1"})
        return StreamingResponse(words(body["messages"]), media_type="text/event-stream")

    async def words(messages: list[dict[str, str]]) -> AsyncIterator[str]:
        """Send a word every tick: as many as the conversation has messages, or endlessly if the last is "forever"."""
        name, endless = next(reversed(feed.requests)), messages[-1]["content"] == "forever"
        for number in itertools.count() if endless else range(len(messages)):
            choice = {"index": 0, "delta": {"content": f"word{number} "}, "finish_reason": None}
            yield f"data: {json.dumps({'id': name, 'choices': [choice]})}\n\n"
            await asyncio.sleep(TICK_S)
        end = {"choices": [], "usage": {"completion_tokens": len(messages)}}
        yield f"data: {json.dumps({'id': name} | end)}\n\ndata: [DONE]\n\n"

    routes.append(Route("/v1/chat/completions", chat, methods=["POST"]))
    return Starlette(routes=[*routes, *page_routes()])


@contextmanager
def serving(feed: Feed) -> Iterator[str]:
    """Serve the feed at a free port from a thread, and yield its URL."""
    config = uvicorn.Config(build_feed(feed), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        feed.is_gone = True
        server.should_exit = True
        thread.join()
