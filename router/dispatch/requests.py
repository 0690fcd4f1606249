"""What the rim hands to dispatch and gets back: token ids in, token ids out. Neither text nor HTTP is known here."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from shared.rpc.messages import Logprobs, SamplingParams


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
    """One prompt and how to continue it, `n` times. Checked: every id is below the vocabulary, everything fits.

    Sample i is drawn with a seed that dispatch derives from `sampling.seed` and i.
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
    deadline: float | None = None  # on the monotonic clock, in seconds: when nobody waits for it any more


@dataclass(slots=True)
class SampleDelta:
    """What one step did for sample `index`: its next tokens, in order, none lost and none twice.

    `logprobs` has one entry a token when they were asked for. `prompt_logprobs` covers the prompt from its second
    token on, in order, and comes with pieces of sample 0 only. A sample's last piece has `finish`, "stop" (its
    last token is one of `stop_tokens`) or "length", and may hold no tokens. `cached_tokens` is how many of the
    prompt's tokens were found in a prefix cache; 0 where it is not known yet.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish: str | None = None
    cached_tokens: int = 0


class TokenStream(Protocol):
    """The pieces of all samples of one generation, as they come; ends when every sample finished or was cancelled."""

    def __aiter__(self) -> AsyncIterator[SampleDelta]: ...

    async def __anext__(self) -> SampleDelta:
        """Raises Unavailable when the generation cannot be completed."""

    def cancel(self, index: int) -> None:
        """This sample is over for the client: no more pieces of it. Does not wait, and may be repeated."""

    async def close(self) -> None:
        """Cancels whatever still runs, on every node. May be repeated."""


class GenerationBackend(Protocol):
    """Everything behind the rim."""

    async def submit(self, generation: GenerationRequest) -> TokenStream:
        """Raises Rejected or Unavailable; returns once the generation is accepted, not when it runs."""

    def status(self) -> dict[str, object]:
        """What `/v1/status` shows; JSON types only."""

    def ready(self) -> bool:
        """Whether a generation submitted now would find a node."""
