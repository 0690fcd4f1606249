"""A dispatcher that answers every request with a script of tokens."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from router.dispatch.requests import GenerationRequest, ModelCard, TokenStream
from router.http.app import build_app
from router.http.generation import ModelParts
from router.nodes.connection import ANY_VERSION
from shared.errors import UnavailableError
from shared.rpc.messages import Logprobs, TokenDelta, pack_ids

EOS = 2
MODEL = ModelCard("tiny", max_model_len=200, vocab_size=330, eos_ids=frozenset({EOS}), created=7)
Script = Callable[[GenerationRequest, int], list[int]]


def app_of(dispatcher: Any, tokenizer: Any, model: ModelCard, **options: Any) -> Starlette:
    """Return the app of a router with one model. `options` are arguments of `build_app`."""
    return build_app([ModelParts(dispatcher, tokenizer, model)], **options)


def scored(token: int) -> Logprobs:
    return Logprobs(token, -0.5, 1, [token, token + 1, token + 2], [-0.5, -1.5, float("-inf")])


class ScriptedAnswers:
    """The answers to one request. Each sample's stream yields the tokens of a script, and ends like a node's stream."""

    def __init__(self, owner: "ScriptedDispatcher", request: GenerationRequest) -> None:
        self.owner = owner
        self.request = request
        self.cancelled: list[int] = []  # indices of the samples whose streams were closed early
        self.closed = 0
        self.gone = asyncio.Event()
        self.num_deltas = 0

    async def stream(self, index: int) -> TokenStream:
        owner, request = self.owner, self.request
        if request.sampling.pooling:
            await self._wait()
            yield TokenDelta(f"{request.id}.{index}.0", finish="length", vector=owner.vector)
            return
        row = owner.script(request, index)[: request.max_tokens]
        position, finish = len(request.generated), ""
        while not finish:
            await self._wait()
            tokens = row[position : position + owner.tokens_per_piece]
            for place, token in enumerate(tokens):
                if token in request.stop_tokens and position + place + 1 >= request.min_tokens:
                    tokens, finish = tokens[: place + 1], "stop"
                    break
            if not finish and position + len(tokens) >= len(row):
                finish = "length"
            delta = TokenDelta(f"{request.id}.{index}.0", position, pack_ids(tokens), finish=finish)
            # Another sample finds the prompt that the first sample has computed.
            delta.cached_tokens = 0 if position else len(request.prompt) if index else owner.cached_tokens
            if request.sampling.logprobs is not None:
                delta.logprobs = [scored(token) for token in tokens]
            if request.sampling.prompt_logprobs is not None and index == position == 0:
                delta.prompt_logprobs = [scored(token) for token in request.prompt[1:]][: owner.num_prompt_logprobs]
            position += len(tokens)
            try:
                yield delta
            except GeneratorExit:
                self.cancelled.append(index)
                raise

    async def _wait(self) -> None:
        owner, number = self.owner, self.num_deltas
        self.num_deltas += 1
        if owner.fails_after is not None and number >= owner.fails_after:
            raise UnavailableError("the node is gone", retry_after_s=3)
        if owner.hangs_after is not None and number >= owner.hangs_after:
            owner.hanging.release()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


class ScriptedDispatcher:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.fails_after: int | None = None  # number of deltas of a request before its streams fail
        self.hangs_after: int | None = None  # number of deltas of a request before its streams hang
        self.hanging = asyncio.Semaphore(0)  # released once by each stream that hangs
        self.refuses: Exception | None = None  # the error that `admit` raises
        self.tokens_per_piece = 1
        self.cached_tokens = 0
        self.num_prompt_logprobs: int | None = None  # how many prompt logprobs an answer has; None: all
        self.vector = b""  # the embedding or score that answers a pooled request
        self.version = ANY_VERSION  # the version of the nodes that answer
        self.is_ready = True
        self.empty_pool = "none"  # a role without nodes
        self.known_adapters: dict[str, str] = {}
        self.new_adapters: dict[str, str] = {}  # `learn_adapters` makes these known
        self.answers: list[ScriptedAnswers] = []
        self.num_refused = 0

    def count_refused(self) -> None:
        self.num_refused += 1

    @asynccontextmanager
    async def admit(self, request: GenerationRequest) -> AsyncIterator[list[TokenStream]]:
        if self.refuses is not None:
            raise self.refuses
        if self.version != ANY_VERSION:
            request.version = self.version
        answers = ScriptedAnswers(self, request)
        self.answers.append(answers)
        streams = [answers.stream(index) for index in range(request.n)]
        try:
            yield streams
        finally:
            answers.closed += 1
            answers.gone.set()
            for stream in streams:
                await stream.aclose()

    def status(self) -> dict[str, Any]:
        alive = {"id": "d0", "alive": True, "running": 3, "waiting": 2}
        nodes = [alive, {"id": "d1", "alive": False, "running": 9, "waiting": 9}]
        return {"router": "router-1", "nodes": nodes, "queue": {"requests": 4}}

    def adapters(self) -> dict[str, str]:
        return self.known_adapters

    async def learn_adapters(self) -> None:
        self.known_adapters |= self.new_adapters

    def ready(self, role: str = "") -> bool:
        return self.is_ready and role != self.empty_pool


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """Serve the app with uvicorn on loopback, and provide the server and its port."""
    server = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="warning", lifespan="off", **options))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()
