"""An exchange: one accepted request with dispatch, from submitting its prompts to the last word of every sample."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.answer import Said, Sample
from router.generation import Answers, Dispatcher, Generation, Piece
from router.metrics import RequestMetrics
from router.order import Order
from router.text import Tokenizer
from shared.messages import Logprobs

MERGED_PIECES = 64  # held between several prompts' answers and a client that reads slowly


class AskedPrompt:
    """One prompt of the request and its samples. What is said waits until all prompt logprobs are there."""

    def __init__(self, number: int, order: Order, tokenizer: Tokenizer) -> None:
        body, generation = order.body, order.generations[number]
        self.generation: Generation = generation
        self.text = order.texts[number]
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.samples = [
            Sample(
                number * generation.n + index,
                generation,
                tokenizer,
                stops=body.stop,
                include_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
            )
            for index in range(generation.n)
        ]
        self._held: list[Piece] = []

    def ready(self, piece: Piece) -> list[Piece]:
        """Takes a piece; returns those that may be told now."""
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        if self.generation.sampling.prompt_logprobs is None:
            return [piece]
        if piece.index == 0:
            self.prompt_logprobs += piece.prompt_logprobs
        self._held.append(piece)
        if len(self.prompt_logprobs) < len(self.generation.prompt) - 1:
            return []
        ready, self._held = self._held, []
        return ready


class Exchange:
    """Runs once. Whatever happens, when `said` is closed every node is told to stop and every sample is counted."""

    def __init__(self, order: Order, tokenizer: Tokenizer, metrics: RequestMetrics, arrived: float) -> None:
        """`arrived` is when the request did, on the monotonic clock."""
        self.order = order
        self.prompts = [AskedPrompt(number, order, tokenizer) for number in range(len(order.generations))]
        self.num_prompt_tokens = sum(len(prompt.generation.prompt) for prompt in self.prompts)
        self._metrics = metrics
        self._started = arrived
        self._last_token: dict[int, float] = {}
        self._open = {sample.index: sample for prompt in self.prompts for sample in prompt.samples}
        self._tokens_said = 0

    @property
    def num_generated(self) -> int:
        return self._tokens_said

    @property
    def num_cached(self) -> int:
        return sum(prompt.cached_tokens for prompt in self.prompts)

    async def said(self, dispatcher: Dispatcher) -> AsyncGenerator[tuple[AskedPrompt, Sample, Said], None]:
        """Everything said, as it comes. Raises Rejected and Unavailable. The caller closes it (`aclosing`)."""
        answers: list[Answers] = []
        why_open = "abort"
        try:
            for prompt in self.prompts:
                answers.append(await dispatcher.submit(prompt.generation))
                self._metrics.accepted(len(prompt.generation.prompt))
            async with aclosing(merged(answers)) as pieces:
                async for number, piece in pieces:
                    prompt = self.prompts[number]
                    for ready in prompt.ready(piece):
                        sample = prompt.samples[ready.index]
                        if sample.finish is not None:
                            continue
                        said = self._hear(sample, ready)
                        if sample.finish is not None and ready.finish is None:
                            answers[number].cancel(ready.index)
                        yield prompt, sample, said
                    if not self._open:
                        return
            raise AssertionError(f"{self.order.id}: dispatch ended before {len(self._open)} samples did")
        except Exception:
            why_open = "error"
            raise
        finally:
            for sample in self._open.values():
                self._metrics.ended(why_open, sample.num_tokens, time.monotonic() - self._started)
            for each in answers:
                await each.close()

    def _hear(self, sample: Sample, piece: Piece) -> Said:
        said = sample.hear(piece)
        now = time.monotonic()
        if said.tokens:
            before = self._last_token.get(sample.index)
            if before is None:
                self._metrics.time_to_first_token.observe(now - self._started)
            else:
                self._metrics.token_gap(now - before)
            self._last_token[sample.index] = now
            self._tokens_said += len(said.tokens)
            self._metrics.generation_tokens.inc(len(said.tokens))
        if sample.finish is not None:
            del self._open[sample.index]
            self._metrics.ended(sample.finish, sample.num_tokens, now - self._started)
        return said


async def merged(answers: Sequence[Answers]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all answers as they come, each with its answers' place. The first failure ends it and is raised."""
    if len(answers) == 1:
        async for piece in answers[0]:
            yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(MERGED_PIECES)

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
