"""The HTTP client of one vLLM server."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from proxy_node.connectors import PREFILL_PARAMS, check_params
from proxy_node.wire import (
    EngineFailure,
    EngineMetrics,
    EngineOutput,
    EventReader,
    completion_body,
    garbage,
    read_choice,
    read_metrics,
)
from shared.errors import ConfigError
from shared.rpc.messages import SubmitRequest

CONNECT_S = 2.0
HEALTH_S = 1.0
ANSWER_S = 10.0  # timeout of answers that need no computation
MAX_ANSWER_BYTES = 8 << 20
Params = dict[str, Any] | None
NEEDS = "Baton needs a vLLM server of version 0.19 or newer"


def read_key(file: str) -> str:
    """Return the API key in a file, or "" without a file. Raises OSError."""
    return Path(file).read_text().strip() if file else ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The properties that an engine reports."""

    model: str
    version: str
    max_model_len: int
    block_tokens: int
    num_blocks: int
    block_bytes: int  # 1: not known
    cache_dtype: str

    def fingerprint(self, connector: str) -> str:
        """Return a digest that is equal for engines that can exchange KV."""
        row = ("vllm", self.version, self.model, str(self.block_tokens), self.cache_dtype, connector)
        return hashlib.blake2b("\0".join(row).encode(), digest_size=16).hexdigest()


class VllmEngine:
    """Calls one vLLM server. Each call has its own connection, because a server that closes an idle connection while a
    request is sent drops the request without an answer, and a request must not be repeated. `open` must be entered
    first.

    Calls raise EngineFailure.
    """

    def __init__(self, url: str, key: str, vocab_size: int) -> None:
        self.url, self.vocab_size = url, vocab_size
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = ""
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, trust_env=False, read_bufsize=1 << 18
        ) as self._session:
            yield

    # ---- the server ---------------------------------------------------------------------------------------------

    async def describe(self) -> EngineFacts:
        """Ask the server for its properties. Raises ConfigError, which says how to fix it, if it cannot be used."""
        try:
            card = json.loads(await self._get("/v1/models"))["data"][0]
            self._model, max_model_len = str(card["id"]), int(card["max_model_len"])
            version = str(json.loads(await self._get("/version"))["version"])
        except (LookupError, TypeError, ValueError):
            raise ConfigError(f"--engine {self.url}: is no vLLM server; {NEEDS}") from None
        except EngineFailure as failure:
            if failure.status == 404:
                raise ConfigError(f"--engine {self.url}: is no vLLM server ({failure}); {NEEDS}") from None
            raise
        metrics = await self.metrics()
        if metrics.num_engines > 1:
            raise ConfigError(f"--engine {self.url}: has {metrics.num_engines} data-parallel engines; start one each")
        try:
            cache = metrics.cache
            block_tokens, num_blocks = int(cache["block_size"]), int(cache["num_gpu_blocks"])
            size = cache.get("kv_cache_memory_bytes", "")
            block_bytes = max(1, int(size) // num_blocks) if size.isdigit() else 1
        except (KeyError, ValueError):
            raise ConfigError(f"--engine {self.url}: /metrics lacks vllm:cache_config_info; {NEEDS}") from None
        dtype = cache.get("cache_dtype", "")
        return EngineFacts(self._model, version, max_model_len, block_tokens, num_blocks, block_bytes, dtype)

    async def metrics(self) -> EngineMetrics:
        return read_metrics((await self._get("/metrics")).decode("utf-8", "replace"))

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text by the server's tokenizer."""
        body = {"model": self._model, "prompt": text}
        async with self._call("POST", "/tokenize", timeout_s=ANSWER_S, json=body) as answer:
            return list(json.loads(await _read(answer, MAX_ANSWER_BYTES))["tokens"])

    async def is_gone(self) -> bool:
        """Return whether the server refuses connections or says that its engine is dead. A slow one is not gone."""
        try:
            async with asyncio.timeout(HEALTH_S), self._session.get(f"{self.url}/health", allow_redirects=False) as got:
                return got.status == 503
        except TimeoutError:
            return False
        except (aiohttp.ClientError, OSError):
            return True

    async def _get(self, path: str) -> bytes:
        async with self._call("GET", path, timeout_s=ANSWER_S) as answer:
            return await _read(answer, MAX_ANSWER_BYTES)

    # ---- requests -----------------------------------------------------------------------------------------------

    def generate(
        self, submit: SubmitRequest, tokens: list[int], params: dict[str, Any] | None = None
    ) -> AsyncIterator[EngineOutput]:
        """Yield the tokens that continue `tokens`, until an output has `finish`. To abort, close the iterator. With
        `params`, the engine reads the KV of `tokens` from another engine.

        Raises ValueError at once if vLLM does not support the request.
        """
        return self._stream(submit, completion_body(submit, tokens, self._model, params))

    async def prefill(
        self, submit: SubmitRequest, tokens: list[int], *, keeps: bool = True
    ) -> tuple[EngineOutput, Params]:
        """Compute `tokens`. Return the next token, and the parameters with which another engine reads the KV, or None
        if the engine does not keep it or has no connector. Raises ValueError if an engine cannot take the request."""
        body = completion_body(submit, tokens, self._model, PREFILL_PARAMS if keeps else None)
        body |= {"max_tokens": 1, "min_tokens": min(1, body["min_tokens"]), "stream": False}
        async with self._call("POST", "/v1/completions", json=body, headers=_headers(submit)) as answer:
            try:
                found = json.loads(await _read(answer, MAX_ANSWER_BYTES))
                output = read_choice(found["choices"][0], self.vocab_size, body["logprobs"] or 0)
                if len(output.tokens) != 1:
                    raise ValueError(f"{len(output.tokens)} tokens instead of one")
                params = found.get("kv_transfer_params")
                return output, None if params is None else check_params(params)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise garbage(f"{type(error).__name__}: {error}"[:200]) from None

    async def _stream(self, submit: SubmitRequest, body: dict[str, Any]) -> AsyncIterator[EngineOutput]:
        reader = EventReader(len(body["prompt"]), body["max_tokens"], self.vocab_size, body["logprobs"] or 0)
        async with self._call("POST", "/v1/completions", json=body, headers=_headers(submit)) as answer:
            if answer.content_type != "text/event-stream":
                raise EngineFailure(f"the engine answers with {answer.content_type}", is_garbage=True)
            async for data in answer.content.iter_any():
                output = reader.feed(data)
                if output.tokens or output.finish:
                    yield output
                if output.finish:
                    return
        raise EngineFailure("the engine's answer ended early", is_suspicious=True)

    async def collect(self, submit: SubmitRequest, tokens: list[int]) -> list[int]:
        """Return all tokens that continue `tokens`."""
        found: list[int] = []
        async with aclosing(self.generate(submit, tokens)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                found += output.tokens
        return found

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, timeout_s: float | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. Errors of the request, and of the code that reads the answer, become EngineFailure."""
        url = f"{self.url}{path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, allow_redirects=False, **options) as answer,
            ):
                if answer.status != 200:
                    raise _refused(path, answer.status, await _words(answer))
                yield answer
        except TimeoutError:
            raise EngineFailure(f"{path}: no answer within {timeout_s or CONNECT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise EngineFailure(f"{path}: {text:.200}", is_suspicious=True) from None


def _headers(submit: SubmitRequest) -> dict[str, str]:
    return {"X-Request-Id": submit.id} | ({"traceparent": submit.traceparent} if submit.traceparent else {})


async def _read(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    body = b""
    while more := await answer.content.read(1 << 16):
        body += more
        if len(body) > limit:
            raise EngineFailure("the answer is too long", is_garbage=True)
    return body


async def _words(answer: aiohttp.ClientResponse) -> str:
    """Return the message of an error in the format of OpenAI's API."""
    text = (await answer.content.read(1 << 16)).decode("utf-8", "replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, Mapping) else error)[:400]
    except (ValueError, KeyError, AttributeError):
        return text[:200]


def _refused(path: str, status: int, words: str) -> EngineFailure:
    text = f"{path}: status {status}: {words}"
    if status in {401, 403}:
        text += "; set --engine-api-key-file to a file with the engine's API key"
    if status == 400:
        return EngineFailure(words, retry=False, status=status)
    return EngineFailure(text, is_suspicious=status >= 500, status=status)
