"""An exchange: one accepted request with dispatch, from submitting its prompts to the last word of every sample."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from router.dispatch.requests import GenerationBackend, GenerationRequest, SampleDelta, TokenStream
from router.history.history import RequestHistory
from router.http.output import OutputProcessor, TextDelta
from router.http.parsing import ParsedRequest
from router.metrics.request_metrics import RequestMetrics
from router.text.tokenizer import Tokenizer
from shared.errors import UnavailableError
from shared.rpc.messages import Logprobs

SETTLE_DELAY_S = 1.0  # after its last word, until what its nodes recorded of a request is here
MERGED_PIECES = 16  # held between several prompts' answers and a client that reads slowly


class PromptState:
    """One prompt of the request and its samples. What is said waits until all prompt logprobs are there."""

    def __init__(self, number: int, order: ParsedRequest, tokenizer: Tokenizer) -> None:
        body, generation = order.body, order.generations[number]
        self.generation: GenerationRequest = generation
        self.text = order.texts[number]
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.samples = [
            OutputProcessor(
                number * generation.n + index,
                generation,
                tokenizer,
                stops=body.stop,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
            )
            for index in range(generation.n)
        ]
        self._held: list[SampleDelta] = []

    def ready(self, piece: SampleDelta) -> list[SampleDelta]:
        """Takes a piece; returns those that may be told now. Raises Unavailable when they wait in vain."""
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        if self.generation.sampling.prompt_logprobs is None:
            return [piece]
        if piece.index == 0:
            self.prompt_logprobs += piece.prompt_logprobs
        self._held.append(piece)
        if len(self.prompt_logprobs) < len(self.generation.prompt) - 1:
            if piece.index == 0 and piece.finish is not None:
                raise UnavailableError("A node left out the prompt's logprobs.", status=500, code="no_prompt_logprobs")
            return []
        ready, self._held = self._held, []
        return ready


class RequestSession:
    """Runs once. Whatever happens, when `said` is closed every node is told to stop and every sample is counted."""

    def __init__(
        self,
        order: ParsedRequest,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        records: RequestHistory,
        arrived: float,
    ) -> None:
        """`arrived` is when the request did, on the monotonic clock."""
        self.order = order
        self.prompts = [PromptState(number, order, tokenizer) for number in range(len(order.generations))]
        self.num_prompt_tokens = sum(len(prompt.generation.prompt) for prompt in self.prompts)
        self._metrics = metrics
        self._records = records
        self._arrived = arrived
        self._open = {sample.index: sample for prompt in self.prompts for sample in prompt.samples}
        self._timings = {index: metrics.pace(arrived) for index in self._open}

    @property
    def num_generated(self) -> int:
        return sum(pace.num_tokens for pace in self._timings.values())

    @property
    def ttft_s(self) -> float | None:
        """Until the first token of any sample."""
        return min((ttft_s for pace in self._timings.values() if (ttft_s := pace.ttft_s) is not None), default=None)

    @property
    def num_cached(self) -> int:
        return sum(prompt.cached_tokens for prompt in self.prompts)

    def log_fields(self) -> dict[str, object]:
        """For the access line: what was asked, what was told and how fast, and the nodes that it was last placed on."""
        prefill, decode = self._records.placed_on(self.order.id)
        ttft_ms = None if self.ttft_s is None else round(1000 * self.ttft_s, 1)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached,
            "tokens": self.num_generated,
            "ttft_ms": ttft_ms,
            "prefill": prefill,
            "decode": decode,
        }

    async def deltas(
        self, dispatcher: GenerationBackend
    ) -> AsyncGenerator[tuple[PromptState, OutputProcessor, TextDelta], None]:
        """Everything said, as it comes. Raises Rejected and Unavailable. The caller closes it (`aclosing`)."""
        answers: list[TokenStream] = []
        why_open = "abort"
        try:
            for prompt in self.prompts:
                generation = prompt.generation
                waited_s = time.monotonic() - self._arrived
                self._records.accepted(
                    self.order.id, len(generation.prompt), generation.n, generation.traceparent, waited_s
                )
                answers.append(await dispatcher.submit(generation))
                self._metrics.accepted(len(generation.prompt), generation.max_tokens)
            async with aclosing(merged(answers)) as pieces:
                async for number, piece in pieces:
                    prompt = self.prompts[number]
                    for ready in prompt.ready(piece):
                        sample = prompt.samples[ready.index]
                        if sample.finish is not None:
                            continue
                        said = self._process(sample, ready)
                        if sample.finish is not None and ready.finish is None:
                            answers[number].cancel(ready.index)
                        yield prompt, sample, said
                        self._record_sent(sample, said)
                    if not self._open:
                        await asyncio.sleep(0)  # the last token leaves with this turn of the loop, not behind the rest
                        return
            raise AssertionError(f"{self.order.id}: dispatch ended before {len(self._open)} samples did")
        except Exception:
            why_open = "error"
            raise
        finally:
            async with AsyncExitStack() as closing:  # of all of them, whatever fails here
                for each in answers:
                    closing.push_async_callback(each.close)
                for index in list(self._open):
                    self._ended(index, why_open, time.monotonic())
                asyncio.get_running_loop().call_later(
                    SETTLE_DELAY_S, record_settled, self.order.id, self._records, self._metrics
                )

    def _process(self, sample: OutputProcessor, piece: SampleDelta) -> TextDelta:
        said = sample.process(piece)
        if said.tokens:
            self._metrics.tokens(self._timings[sample.index], len(said.tokens), time.monotonic())
        return said

    def _record_sent(self, sample: OutputProcessor, said: TextDelta) -> None:
        """Written to the client's connection: making bytes of it was the router's time too."""
        if said.tokens:
            self._records.output(self.order.id, sample.index, len(said.tokens))
        if sample.finish is not None:
            self._ended(sample.index, sample.finish, time.monotonic())

    def _ended(self, index: int, how: str, now: float) -> None:
        del self._open[index]
        self._metrics.ended(self._timings[index], how, now)
        self._records.ended(self.order.id, index, how)


def record_settled(identity: str, records: RequestHistory, metrics: RequestMetrics) -> None:
    if (summary := records.summary(identity)) is not None:
        metrics.settled(summary)


async def merged(answers: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, SampleDelta], None]:
    """Pieces of all answers as they come, each with its answers' place. The first failure ends it and is raised."""
    if len(answers) == 1:
        async for piece in answers[0]:
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, SampleDelta | Exception | None]] = asyncio.Queue(MERGED_PIECES)

    async def feed(number: int) -> None:
        try:
            async for piece in answers[number]:
                await queue.put((number, piece))
            await queue.put((number, None))
        except Exception as error:  # noqa: BLE001 - not handled here, raised where the pieces are read
            await queue.put((number, error))

    feeds = [asyncio.create_task(feed(number)) for number in range(len(answers))]
    try:
        num_open = len(feeds)
        while num_open:
            number, heard = await queue.get()
            if isinstance(heard, Exception):
                raise heard
            if heard is None:
                num_open -= 1
            else:
                yield number, heard
    finally:
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)
