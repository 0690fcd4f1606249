"""The interface between the HTTP handlers and the dispatcher. It deals with token ids only, not with text or HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from router.nodes.connection import ANY_VERSION, ModelVersion
from shared.errors import BatonError
from shared.rpc.messages import Media, SamplingParams, TokenDelta

Item = TypeVar("Item")
MERGED_ITEMS = 16  # maximum number of items buffered between the streams and their reader


@dataclass(slots=True, frozen=True)
class PoolingRule:
    """How a model produces a vector. `kind` is a value of `SamplingParams.pooling`. If `kind` is "", the model produces
    no vector, and `refusal` is the reason.

    A reranker (`kind` "logits") has one or two `tokens`. Its score is the logit of the first token, minus the logit of
    the second token if there is one.
    """

    kind: str = ""
    refusal: str = ""
    normalizes: bool = False  # the vector is divided by its Euclidean length
    tokens: tuple[int, ...] = ()
    prompts: bool = False  # whether the template of a reranker ends with the generation prompt


@dataclass(slots=True, frozen=True)
class ModelCard:
    """The model that a cluster serves. `max_model_len` is the maximum number of tokens of the prompt and the answer
    together."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_ids: frozenset[int]
    created: int = 0  # Unix time in seconds, for /v1/models
    pooling: PoolingRule = PoolingRule(refusal="This model is neither an embedding model nor a reranker.")
    # Default values of the sampling parameters that a request omits.
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class GenerationRequest:
    """One prompt and the parameters of its `n` samples. The request is valid: every token id is in the vocabulary, and
    the prompt and the answer fit the model's context. All samples are admitted at once, so the many samples of a client
    are divided into several requests with the same id and prompt, each of which continues at sample `first_sample`. The
    dispatcher derives the seed of a sample from `sampling.seed` and the sample's number."""

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    n: int = 1
    first_sample: int = 0
    salt: bytes = b""
    priority: int = 0  # smaller numbers run first
    share_prefix: bool = True
    speculative: bool = True
    traceparent: str = ""  # W3C trace context of the client's request
    adapter: str = ""  # digest of a LoRA adapter
    grammar: str = ""  # the answers match this grammar (see `shared.grammar`)
    media: Sequence[Media] = ()  # images of the prompt, in order
    generated: tuple[int, ...] = ()  # tokens that sample 0 already had when this router took over the request
    is_accepted: bool = False  # another router accepted the request, so this router queues it instead of refusing it
    tenant: str = ""  # the owner of the client's API key, or "" if no keys are set
    deadline: float | None = None  # on the monotonic clock, in seconds
    nodes: tuple[str | None, str | None] = (None, None)  # ids of the prefill and decode node of sample 0's last attempt
    version: ModelVersion = ANY_VERSION  # model and code version of the decode node that was chosen last


def is_refusal(error: Exception, request: GenerationRequest) -> bool:
    """Return whether the error is a refusal of the request before any node received it. A timeout is no refusal."""
    return isinstance(error, BatonError) and error.status != 504 and request.nodes == (None, None)


TokenStream = AsyncGenerator[TokenDelta, None]
"""The tokens of one sample. Each delta continues the one before; no token is lost or repeated.

The first delta of sample 0 has all `prompt_logprobs`; no other delta has any. Only the first delta of a sample
has `cached_tokens`. The last delta may have no tokens; its `finish` is "stop" if the last token is in `stop_tokens`,
and "length" otherwise. The stream raises RequestError or UnavailableError if the sample cannot be completed.
"""


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams as they arrive. Stop at the first error and raise it."""
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
            for task in feeds:  # cancel the other tasks now, because the reader may be slow to read the error
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
