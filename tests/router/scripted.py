"""A generation backend that answers from a script, for tests of the API without nodes."""

import asyncio
from collections.abc import Callable

from router.dispatch.requests import GenerationRequest, ModelCard, SampleDelta
from shared.errors import UnavailableError
from shared.rpc.messages import Logprobs

EOS = 2
MODEL = ModelCard("tiny", max_model_len=200, vocab_size=330, eos_ids=frozenset({EOS}), created=7)
Script = Callable[[GenerationRequest, int], list[int]]


class ScriptedAnswers:
    """Yields every sample's script a token at a time, round robin, and ends samples as a node would."""

    def __init__(self, owner: "ScriptedDispatcher", generation: GenerationRequest) -> None:
        self.owner = owner
        self.generation = generation
        self.rows = {i: owner.script(generation, i)[: generation.max_tokens] for i in range(generation.n)}
        self.told = dict.fromkeys(self.rows, 0)
        self.cancelled: list[int] = []
        self.closed = 0
        self.gone = asyncio.Event()
        self.turn = 0

    def __aiter__(self) -> "ScriptedAnswers":
        return self

    async def __anext__(self) -> SampleDelta:
        if self.owner.fails_after is not None and self.turn >= self.owner.fails_after:
            raise UnavailableError("the node is gone", retry_after_s=3)
        if self.owner.hangs_after is not None and self.turn >= self.owner.hangs_after:
            self.owner.hanging.release()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if not self.told:
            raise StopAsyncIteration
        index = sorted(self.told, key=lambda i: (self.told[i], i))[0]
        self.turn += 1
        return self._piece(index)

    def _piece(self, index: int) -> SampleDelta:
        generation, at = self.generation, self.told[index]
        tokens = self.rows[index][at : at + self.owner.tokens_per_piece]
        for place, token in enumerate(tokens):
            if token in generation.stop_tokens and at + place + 1 >= generation.min_tokens:
                tokens = tokens[: place + 1]
        self.told[index] = at + len(tokens)
        finish = None
        if tokens and tokens[-1] in generation.stop_tokens and self.told[index] >= generation.min_tokens:
            finish = "stop"
        elif self.told[index] >= len(self.rows[index]):
            finish = "length"
        piece = SampleDelta(index, tokens, finish=finish, cached_tokens=0 if at else self.owner.cached_tokens)
        if generation.sampling.logprobs is not None:
            piece.logprobs = [scored(token) for token in tokens]
        if generation.sampling.prompt_logprobs is not None and index == 0:
            rest = generation.prompt[1:]
            half = len(rest) // 2
            piece.prompt_logprobs = [scored(t) for t in (rest[:half] if at == 0 else rest[half:] if at == 1 else [])]
        if finish is not None:
            del self.told[index]
        return piece

    def cancel(self, index: int) -> None:
        self.cancelled.append(index)
        self.told.pop(index, None)

    async def close(self) -> None:
        self.closed += 1
        self.gone.set()
        self.told.clear()


def scored(token: int) -> Logprobs:
    return Logprobs(token, -0.5, 1, [token, token + 1, token + 2], [-0.5, -1.5, float("-inf")])


class ScriptedDispatcher:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.fails_after: int | None = None
        self.hangs_after: int | None = None
        self.hanging = asyncio.Semaphore(0)  # released by all answers that wait for ever
        self.refuses: Exception | None = None
        self.tokens_per_piece = 1
        self.cached_tokens = 0
        self.is_ready = True
        self.answers: list[ScriptedAnswers] = []

    async def submit(self, generation: GenerationRequest) -> ScriptedAnswers:
        if self.refuses is not None:
            raise self.refuses
        self.answers.append(ScriptedAnswers(self, generation))
        return self.answers[-1]

    def status(self) -> dict[str, object]:
        return {"nodes": []}

    def ready(self) -> bool:
        return self.is_ready
