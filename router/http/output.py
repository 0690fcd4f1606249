"""Converts the tokens of one HTTP request's choices to text, and ends choices at stop strings."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.requests import GenerationRequest, TokenStream, is_refusal, merge
from router.http.bodies import ChatBody, GenerateBody
from router.http.tools import answer_parser
from router.metrics.request_metrics import RequestMetrics, SampleTimings
from router.observer import RouterObserver
from router.text.detokenizer import StopStrings
from router.text.tokenizer import Tokenizer
from router.text.tool_parser import AnswerPart, joined, next_number
from shared.errors import UnavailableError
from shared.rpc.messages import Logprobs, TokenDelta, unpack_ids


@dataclass(slots=True)
class TextDelta:
    """The text and tokens that one token delta adds to a choice. Some of the text may belong to tokens of earlier
    deltas, because incomplete characters and possible stop strings are held back."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    is_first: bool = False
    parts: list[AnswerPart] | None = None  # parts of the text; None if the answer is not parsed
    num_reasoning: int = 0  # number of the tokens that are reasoning
    finish: str | None = None  # "stop" or "length" in the choice's last delta
    stop_reason: str | int | None = None  # the stop string or token that ended the choice
    vector: bytes = b""  # the embedding or the logits of a pooling request, as packed float32

    def all_parts(self) -> list[AnswerPart]:
        """Return the parts of the text. A text that is not parsed is one part."""
        if self.parts is not None:
            return self.parts
        return [AnswerPart("content", self.text)] if self.text else []


def merged(deltas: Sequence[TextDelta]) -> TextDelta:
    """Merge successive deltas of one choice into one delta."""
    last = deltas[-1]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        is_first=deltas[0].is_first,
        parts=None if last.parts is None else joined([part for delta in deltas for part in delta.parts or ()]),
        num_reasoning=sum(delta.num_reasoning for delta in deltas),
    )


@dataclass(slots=True)
class PromptOutput:
    """A prompt, and the part of the output that is the same for all its choices."""

    request: GenerationRequest
    first_choice: int = 0
    first: "PromptOutput | None" = None  # the output with the prompt's first samples, if these are further samples
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)  # a sample has tokens
    cached_tokens: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    has_logprobs: asyncio.Event = field(default_factory=asyncio.Event)

    async def take_logprobs(self, delta: TokenDelta, *, is_first_sample: bool) -> None:
        """Store the prompt's logprobs from the first delta of the first sample. For another sample, wait until they are
        stored."""
        if self.request.sampling.prompt_logprobs is None or self.has_logprobs.is_set():
            return
        if not is_first_sample:
            await self.has_logprobs.wait()
            return
        if len(delta.prompt_logprobs) < len(self.request.prompt) - 1:
            raise UnavailableError("A node omitted the prompt's logprobs.", status=500, code="no_prompt_logprobs")
        self.logprobs = delta.prompt_logprobs
        self.has_logprobs.set()


class OutputProcessor:
    """Detokenizes one choice, and searches its text for stop strings. The last delta that it returns sets `finish`."""

    def __init__(
        self, index: int, prompt: PromptOutput, tokenizer: Tokenizer, body: GenerateBody, timings: SampleTimings
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.timings = timings
        self.num_tokens = 0
        self._min_tokens = body.min_tokens
        self._include_stop = body.include_stop_str_in_output
        self._is_empty = body.token_limit == 0  # the client only wants the prompt
        self._parser = answer_parser(body, tokenizer, prompt.request.prompt)
        self._detokenizer = tokenizer.detokenizer(
            prompt.request.prompt,
            skip_special_tokens=body.skip_special_tokens,
            keep_markers=self._parser is not None,
        )
        self._stops = StopStrings(body.stops, include=self._include_stop)
        earlier = body.messages if isinstance(body, ChatBody) else ()
        self._first_call = next_number([call.id for message in earlier for call in message.tool_calls])
        self._is_first = True
        self.has_calls = False  # the answer has tool calls

    def process(self, delta: TokenDelta) -> TextDelta:
        """Return the text that `delta` adds. A stop string ends the choice, and the tokens after it are dropped."""
        if self._is_empty:
            return TextDelta("", is_first=True, finish="length")
        ids = unpack_ids(delta.tokens)
        added = TextDelta("", is_first=self._is_first, vector=delta.vector, parts=None if self._parser is None else [])
        self._is_first = False
        last = len(ids) - 1
        for place, token in enumerate(ids):
            self.num_tokens += 1
            added.tokens.append(token)
            if delta.logprobs:
                added.logprobs.append(delta.logprobs[place])
            if delta.finish == "stop" and place == last and not self._include_stop:
                continue  # the text does not include a stop token
            added.num_reasoning += self._add(added, self._without_stop(self._detokenizer.push((token,))))
            if self._stops.matched is not None:
                break
        if delta.finish and self._stops.matched is None:
            self._add(added, self._without_stop(self._detokenizer.finish()))
        if self._stops.matched is not None:
            added.finish, added.stop_reason = "stop", self._stops.matched
        elif delta.finish:
            added.finish = delta.finish
            self._add(added, self._stops.finish())
            if delta.finish == "stop" and ids:
                added.stop_reason = ids[-1]
        if added.parts is not None and self._parser is not None:
            added.parts = joined(added.parts + (self._parser.finish() if added.finish else []))
            for part in added.parts:
                part.number = self._first_call + part.call
                self.has_calls |= part.kind == "call"
        return added

    def _add(self, added: TextDelta, text: str) -> bool:
        """Add a token's text, and return whether the token is reasoning. The markers do not count as reasoning."""
        added.text += text
        if added.parts is None or self._parser is None:
            return False
        was_reasoning, parts = self._parser.is_reasoning, self._parser.push(text)
        added.parts += parts
        return self._parser.is_reasoning and (was_reasoning or any(part.kind == "reasoning" for part in parts))

    def _without_stop(self, text: str) -> str:
        """Return the text up to the first stop string. Text that may be the beginning of a stop string is held back.
        The first `min_tokens` tokens of the choice are not searched for stop strings."""
        return text if self.num_tokens <= self._min_tokens else self._stops.push(text)


Output = tuple[OutputProcessor, TextDelta]  # a choice, and what one token delta adds to it


class RequestOutput:
    """The choices of one HTTP request: their tokens, their text, and their measurements.

    The request's handler calls `open` once, and sends the client the deltas that `open` provides. After the context of
    `open` has exited, every sample has ended on all nodes, and the metrics and the observer have counted each sample
    exactly once. All methods run on the event loop.
    """

    def __init__(
        self,
        request_id: str,
        body: GenerateBody,
        requests: Sequence[GenerationRequest],
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        observer: RouterObserver,
        arrived: float,
    ) -> None:
        """`arrived` is the time at which the request arrived, on the monotonic clock."""
        self.id = request_id
        self.prompts: list[PromptOutput] = []
        self.choices: list[OutputProcessor] = []
        for request in requests:
            begin = len(self.choices)
            before = self.prompts[-1] if request.first_sample else None
            prompt = PromptOutput(request, begin, before and (before.first or before))
            self.prompts.append(prompt)
            for index in range(begin, begin + request.n):
                self.choices.append(OutputProcessor(index, prompt, tokenizer, body, metrics.pace(arrived)))
        self._num_samples = body.n
        self.num_prompt_tokens = sum(len(prompt.request.prompt) for prompt in self.prompts if prompt.first is None)
        self.num_generated = 0  # tokens that were yielded to the handler
        self.is_refused = False  # the request was refused before any node received it
        self._metrics = metrics
        self._observer = observer
        self._arrived = arrived
        self._interval = body.stream_interval if body.stream else 1
        self._open = {choice.index: choice for choice in self.choices}

    @property
    def num_cached(self) -> int:
        return sum(prompt.cached_tokens for prompt in self.prompts if prompt.first is None)

    @property
    def ttft_s(self) -> float | None:
        """The seconds from the request's arrival to the first token of any choice, or None before that token."""
        return min((ttft_s for each in self.choices if (ttft_s := each.timings.ttft_s) is not None), default=None)

    def log_fields(self) -> dict[str, object]:
        """Return the request's fields for the access log: numbers of tokens, latency, and the nodes of its last
        attempt."""
        prefill, decode = self.prompts[0].request.nodes
        ttft_ms = None if self.ttft_s is None else round(1000 * self.ttft_s, 1)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached,
            "tokens": self.num_generated,
            "ttft_ms": ttft_ms,
            "prefill": prefill,
            "decode": decode,
        }

    @asynccontextmanager
    async def open(self, dispatcher: Dispatcher) -> AsyncIterator[AsyncGenerator[Output, None]]:
        """Admit the prompts, and provide the text of all choices as it arrives. Raises RequestError or
        UnavailableError."""
        streams: list[TokenStream] = []
        outcome, failure = "abort", None
        try:
            async with AsyncExitStack() as admitted:
                for prompt in self.prompts:
                    request = prompt.request
                    waited_s = time.monotonic() - self._arrived
                    size, is_first = len(request.prompt), prompt.first is None
                    if is_first:
                        self._observer.accepted(self.id, size, self._num_samples, request.traceparent, waited_s)
                    streams += await admitted.enter_async_context(dispatcher.admit(request))
                    if is_first:
                        self._metrics.accepted(size, request.max_tokens)
                async with aclosing(self._outputs(streams)) as outputs:
                    yield outputs
        except Exception as error:
            failure = error
            self.is_refused = all(is_refusal(error, prompt.request) for prompt in self.prompts)
            outcome = "refused" if self.is_refused else "error"
            raise
        finally:
            for choice in list(self._open.values()):
                self._ended(choice, outcome, failure)

    async def _outputs(self, streams: Sequence[TokenStream]) -> AsyncGenerator[Output, None]:
        """Yield the text of all choices as it arrives. When the handler asks for the next delta, report the tokens of
        the previous delta as sent."""
        texts = [self._texts(choice, stream) for choice, stream in zip(self.choices, streams, strict=True)]
        outputs = texts[0] if len(texts) == 1 else merge(texts)
        try:
            async for choice, delta in outputs:
                self.num_generated += len(delta.tokens)
                yield choice, delta
                if delta.tokens:
                    self._observer.output(self.id, choice.index, len(delta.tokens))
                if delta.finish is not None:
                    self._ended(choice, delta.finish)
                    if not self._open:
                        await asyncio.sleep(0)  # let the event loop first send the last token
        finally:
            for each in (outputs, *texts):
                await each.aclose()

    async def _texts(self, choice: OutputProcessor, stream: TokenStream) -> AsyncGenerator[Output, None]:
        """Yield the text of one choice. Close its token stream when a stop string ends the choice. Hold tokens back as
        `stream_interval` requires."""
        prompt, is_complete = choice.prompt, False
        held, num_held = list[TextDelta](), 0
        if prompt.first is not None:  # then its KV is cached
            await prompt.first.has_begun.wait()
        async for delta in stream:
            prompt.has_begun.set()
            is_first_sample = choice.index == prompt.first_choice
            await prompt.take_logprobs(delta, is_first_sample=is_first_sample)
            if is_first_sample:  # later samples always find the prompt in the cache, because the first has computed it
                # Cached tokens of the answer, which a retry may find too, do not count.
                cached = min(delta.cached_tokens, len(prompt.request.prompt))
                prompt.cached_tokens = max(prompt.cached_tokens, cached)
            added = choice.process(delta)
            if added.tokens:
                self._metrics.tokens(choice.timings, len(added.tokens), time.monotonic())
            held.append(added)
            num_held += len(added.tokens)
            is_complete = added.finish is not None
            if is_complete or added.is_first or num_held >= self._interval:
                yield choice, merged(held) if len(held) > 1 else added
                held, num_held = [], 0
            if is_complete and not delta.finish:
                await stream.aclose()
                return
        if not is_complete:
            raise AssertionError(f"{self.id}: the dispatcher ended a stream before choice {choice.index} was complete")

    def _ended(self, choice: OutputProcessor, outcome: str, error: Exception | None = None) -> None:
        del self._open[choice.index]
        self._metrics.ended(choice.timings, outcome, time.monotonic())
        self._observer.ended(self.id, choice.index, outcome, error)
