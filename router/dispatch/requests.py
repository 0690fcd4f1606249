"""What the HTTP side and the dispatcher exchange: token ids in, token ids out. Neither text nor HTTP is known here."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shared.rpc.messages import SamplingParams, TokenDelta

Item = TypeVar("Item")
MERGED_ITEMS = 16  # held between several streams and a slow reader


@dataclass(slots=True, frozen=True)
class ModelCard:
    """The model that a cluster serves. `max_model_len` bounds prompt and answer together, in tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    created: int = 0  # Unix time in seconds, for /v1/models


@dataclass(slots=True)
class GenerationRequest:
    """One prompt and how to continue it, `n` times. Validated: every id is in the vocabulary, and everything fits.

    Sample i is drawn with a seed that the dispatcher derives from `sampling.seed` and i.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    n: int = 1
    salt: bytes = b""
    priority: int = 0  # smaller runs first
    share_prefix: bool = True
    traceparent: str = ""  # W3C trace context of the client's request
    tenant: str = ""  # of the client's API key; "" without keys
    deadline: float | None = None  # on the monotonic clock, in seconds


TokenStream = AsyncGenerator[TokenDelta, None]
"""The tokens of one sample: each delta continues the one before, none is lost and none comes twice.

`prompt_logprobs` are complete in the first delta of sample 0 and empty elsewhere; `cached_tokens` is set in the first
delta only. The last delta has `finish`, "stop" (its last token is one of `stop_tokens`) or "length", and may hold no
tokens. Raises RequestError or UnavailableError when the sample cannot be completed.
"""


class StatusReport(Protocol):
    def as_json(self) -> Mapping[str, Any]:
        """Return what `/v1/status` shows; JSON types only."""


class GenerationBackend(Protocol):
    """What the HTTP side needs of the dispatcher."""

    def admit(self, request: GenerationRequest) -> AbstractAsyncContextManager[Sequence[TokenStream]]:
        """Admit a request, and provide the streams of its `n` samples. Raises RequestError or UnavailableError.

        Closing a stream ends its sample: the client has enough of it. Leaving the context ends all of them, at once and
        on every node.
        """

    def status(self) -> StatusReport: ...

    def ready(self) -> bool:
        """Return whether a request admitted now would find a node."""


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams as they arrive. The first error ends it and is raised."""
    if len(streams) == 1:
        async for only in streams[0]:
            yield only
        return
    queue: asyncio.Queue[tuple[Item | None, Exception | None]] = asyncio.Queue(MERGED_ITEMS)

    async def feed(stream: AsyncGenerator[Item, None]) -> None:
        try:
            async for item in stream:
                await queue.put((item, None))
            await queue.put((None, None))
        except Exception as error:  # noqa: BLE001 - raised below, where the items are read
            for task in feeds:  # at once: the reader may be slow
                if task is not asyncio.current_task():
                    task.cancel()
            await queue.put((None, error))

    feeds = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        num_open = len(feeds)
        while num_open:
            item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
