"""A fake server of streamed completions. A request's model name, such as "hangs", selects the server's behavior."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


def _event(model: str, tokens: list[int], finish: str | None) -> bytes:
    choice = {"index": 0, "text": " w" * len(tokens), "finish_reason": finish, "logprobs": None}
    if model not in {"no-ids", "no-ids-bundled", "logprobs"}:
        choice["token_ids"] = tokens
    if model == "logprobs":
        choice["logprobs"] = {"tokens": [" w"] * len(tokens)}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


class FakeServer:
    """Records the body of each request, and answers with a token every `gap_s` seconds."""

    def __init__(self, gap_s: float) -> None:
        self.bodies: list[dict[str, object]] = []
        self._gap_s = gap_s

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"authorization": request.headers.get("Authorization")})
        model, count = body["model"], body["max_tokens"] - (body["model"] == "short")
        if model == "full":
            return web.json_response({"error": {"message": "too many requests"}}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if model == "hangs":
            await asyncio.sleep(30)
        if model == "garbled":
            await response.write(b"data: [1]\n\n")
        step = 2 if "bundled" in model else 1
        for first in range(0, count, step):
            if model == "breaks" and first:
                request.transport.close()
                return response
            finish = "length" if first + step >= count else None
            event = _event(model, list(range(first, min(count, first + step))), finish)
            await response.write(event[:20])  # in two pieces, because a read may end anywhere in an event
            await response.write(event[20:])
            await asyncio.sleep(self._gap_s)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await response.write(b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        if model == "stays":
            await asyncio.sleep(30)
        if model == "leaves":
            await asyncio.sleep(0.1)
            request.transport.close()
        return response


@asynccontextmanager
async def serving(gap_s: float = 0.002) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """Run a fake server. Yield its URL and the list of request bodies."""
    server = FakeServer(gap_s)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", server.bodies
    finally:
        await runner.cleanup()
