"""The HTTP client of one server. A subclass for each kind of server implements the server's API."""

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from proxy_node.connectors import TransferParams
from proxy_node.health import Fault
from proxy_node.wire import EngineFailure, EngineOutput, EventReader, garbage, next_token_only
from shared.errors import ConfigError
from shared.rpc.messages import SubmitRequest

CONNECT_S = 2.0
HEALTH_S = 1.0
ANSWER_S = 10.0  # timeout of answers that need no computation
MAX_ANSWER_BYTES = 8 << 20
Params = dict[str, Any] | None
Outputs = AsyncGenerator[EngineOutput, None]


def read_key(file: str) -> str:
    """Return the API key in a file, or "" if no file is given. Raises OSError if the file cannot be read."""
    return Path(file).read_text().strip() if file else ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The properties that an engine reports."""

    model: str
    version: str
    max_model_len: int
    block_tokens: int
    num_blocks: int
    block_bytes: int  # 1 if not known
    cache_dtype: str
    kind: str = "vllm"
    role: str = ""  # "prefill" or "decode" if the server can have only this role; "": any role
    connector: str | None = None  # "": no connector; None: not reported, so `probe.connector` has to find out
    resumes: str = ""  # as returned by `probe.resumes`; set only if the server needs a second server to generate

    def fingerprint(self, connector: str) -> str:
        """Return a digest that is equal for engines that can exchange KV."""
        row = (self.kind, self.version, self.model, str(self.block_tokens), self.cache_dtype, connector)
        return hashlib.blake2b("\0".join(row).encode(), digest_size=16).hexdigest()


class EngineClient(ABC):
    """Calls one server. Enter the context manager `open` first. A call that fails raises EngineFailure.

    Each call has its own connection, because a server may close an idle connection while a request is sent on it. That
    request would get no answer, and could not be repeated safely.
    """

    program: str  # the name of the server's program, for messages
    needs: str  # says which versions of the server can be used
    transfer: type[TransferParams]  # the parameters of a handoff
    probe_params: Params = None  # with these parameters, `generate` needs no other engine

    def __init__(
        self, url: str, key: str, vocab_size: int, host: str = "", end_tokens: frozenset[int] = frozenset()
    ) -> None:
        """Set up the client. If `url` has a loopback address, other engines reach the server at the address `host`.
        `end_tokens` are the end tokens of the model."""
        self.url, self.vocab_size, self.host, self.end_tokens = url, vocab_size, host, end_tokens
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, trust_env=False, read_bufsize=1 << 18
        ) as self._session:
            yield

    # ---- what each kind of server implements --------------------------------------------------------------------

    @abstractmethod
    async def describe(self) -> EngineFacts:
        """Ask the server for its properties. Raises ConfigError, with the fix, if the server cannot be used."""

    @abstractmethod
    async def metrics(self) -> dict[str, float]:
        """Return the server's metrics, with the names that vLLM gives them."""

    @abstractmethod
    def generate(self, submit: SubmitRequest, tokens: list[int], params: Params = None) -> Outputs:
        """Yield the tokens that continue `tokens`. The last output has `finish`. To abort, close the iterator.

        With `params`, the engine exchanges the KV of `tokens` with another engine. Raises ValueError at once if the
        server does not support the request.
        """

    async def prefill(self, submit: SubmitRequest, tokens: list[int], offer: Params) -> tuple[EngineOutput, Params]:
        """Compute the KV of `tokens` for another engine. Return the next token, and the parameters with which the other
        engine reads the KV. If there is an `offer`, push the KV to the other engine instead.

        If there is no `offer` and the answer ends with this token, `finish` of the output is set.
        """
        async with aclosing(self.generate(next_token_only(submit, tokens), tokens, offer)) as outputs:
            return await anext(outputs), None

    def check(self, submit: SubmitRequest) -> None:
        """Raise ValueError, which names the field, if the engine cannot take the request."""
        sampling = submit.sampling
        unsupported = {
            "structured output": submit.grammar,
            "images": submit.media,
            "prompt_logprobs": sampling.prompt_logprobs is not None,
            "bad_words": sampling.bad_words,
            "thinking_token_budget": sampling.thinking,
            "embeddings": sampling.pooling,
        }
        for name, is_given in unsupported.items():
            if is_given:
                raise ValueError(f"{name}: not available on nodes that are vLLM or SGLang servers; omit it")

    def check_length(self, facts: EngineFacts, max_model_len: int) -> None:
        """Raise ConfigError if the engine's maximum length is below the router's, because the engine would silently
        truncate answers."""
        if facts.max_model_len < max_model_len:
            raise ConfigError(
                f"--engine {self.url}: its maximum length is {facts.max_model_len} tokens, but --model allows "
                f"{max_model_len}: start it with a larger --max-model-len, or Baton with --max-model-len "
                f"{facts.max_model_len}"
            )

    def offer(self) -> Params:
        """Return the parameters of a new handoff if the engine pushes KV, otherwise None.

        Pass these parameters to `prefill` of the engine that pushes KV. The decode engine gets them before, and waits.
        """
        return None

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Raise ConfigError if the code in the `with` block fails to read the server's properties. Such a failure means
        that the server is of another kind."""
        no_server = f"--engine {self.url}: this is not a server of {self.program}"
        try:
            yield
        except (LookupError, TypeError, ValueError):
            raise ConfigError(f"{no_server}; {self.needs}") from None
        except EngineFailure as failure:
            if failure.status == 404:
                raise ConfigError(f"{no_server} ({failure}); {self.needs}") from None
            raise

    # ---- calls --------------------------------------------------------------------------------------------------

    async def is_gone(self) -> bool | None:
        """Return True if the server refuses connections or reports that its engine is dead. Return False if it reports
        that its engine is alive. Return None if its answer is late or has another status."""
        try:
            await self.fetch("GET", "/health", timeout_s=HEALTH_S)
        except EngineFailure as failure:
            return True if failure.is_suspicious and failure.status in {0, 503} else None
        return False

    async def get(self, path: str) -> str:
        return (await self.fetch("GET", path, timeout_s=ANSWER_S)).decode("utf-8", "replace")

    async def fetch(self, method: str, path: str, timeout_s: float | None = None, **options: Any) -> bytes:
        """Send a request, and return the answer's body. Raises EngineFailure, also for over MAX_ANSWER_BYTES bytes."""
        body = b""
        async with self.call(method, path, timeout_s, **options) as answer:
            while more := await answer.content.read(1 << 16):
                body += more
                if len(body) > MAX_ANSWER_BYTES:
                    raise garbage("it is too long")
        return body

    async def stream(self, path: str, submit: SubmitRequest, body: dict[str, Any], reader: EventReader) -> Outputs:
        """Send a request, and yield what the answer's events contain."""
        async with self.call("POST", path, json=body, headers=headers_of(submit)) as answer:
            if answer.content_type != "text/event-stream":
                raise garbage(f"its type is {answer.content_type}")
            async for data in answer.content.iter_any():
                output = reader.feed(data)
                if output.tokens or output.finish:
                    yield output
                if output.finish:
                    return
        raise EngineFailure("the engine's answer ended early", is_suspicious=True, fault="refused")

    async def collect(self, submit: SubmitRequest, tokens: list[int], params: Params = None) -> list[int]:
        """Return all tokens with which the engine continues `tokens`. By default, this works without another engine."""
        found: list[int] = []
        async with aclosing(self.generate(submit, tokens, params or self.probe_params)) as outputs:
            async for output in outputs:
                found += output.tokens
        return found

    @asynccontextmanager
    async def call(
        self, method: str, path: str, timeout_s: float | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and provide the answer. Errors of the request and of the `with` block become EngineFailure."""
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


def headers_of(submit: SubmitRequest) -> dict[str, str]:
    return {"X-Request-Id": submit.id} | ({"traceparent": submit.traceparent} if submit.traceparent else {})


async def _words(answer: aiohttp.ClientResponse) -> str:
    """Return the error message of an answer: from JSON in the format of OpenAI's API, otherwise the answer's text."""
    text = (await answer.content.read(1 << 16)).decode("utf-8", "replace")
    try:
        found = json.loads(text)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, Mapping) else error)[:400]
    except (ValueError, KeyError, AttributeError, RecursionError):
        return text[:200]


def _refused(path: str, status: int, words: str) -> EngineFailure:
    text = f"{path}: status {status}: {words}"
    if status in {401, 403}:
        text += "; set --engine-api-key-file to a file with the engine's API key"
    if status == 400:
        return EngineFailure(words, retry=False, status=status)
    fault: Fault | None = "refused" if status in {401, 403, 404} else None
    return EngineFailure(text, is_suspicious=status >= 500, fault=fault, status=status)
