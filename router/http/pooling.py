"""Embeddings and scores: POST /v1/embeddings of OpenAI, and /v1/rerank and /v1/score of vLLM.

Each text, or pair of texts, becomes a generation request. The nodes compute the prompt of this request, and generate no
tokens.
"""

import asyncio
import math
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from secrets import token_hex
from time import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from router.dispatch.requests import GenerationRequest
from router.http.asgi import ResponseWriter
from router.http.bodies import Body, CacheSalt, CompletionBody, Priority, Prompt, TemplateArguments, Truncation, listed
from router.http.generation import GenerationService
from router.http.messages import StrictModel
from router.http.parsing import THREADS, before, cache_namespace, check_ids, encode, run_in_thread
from router.http.responses import dump
from shared.errors import RequestError, UnavailableError
from shared.limits import INT32_MAX
from shared.rpc.messages import SamplingParams, pack_ids

MAX_INPUTS = 2048  # as in OpenAI's API
AT_ONCE, AT_ONCE_TOKENS = 64, 65_536  # how many prompts and tokens of one HTTP request are computed at once
PAIRS_AT_ONCE = 16  # how many pairs a thread encodes in one turn
MORE_BYTES = 32 << 20
# All pooling requests use this body, because the classes for generation need a body with the parameters of generation.
# `max_tokens` must be at least 1, but the client gets no token.
ONE_TOKEN = CompletionBody(prompt=[0], max_tokens=1, temperature=0.0)

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class PoolingBody(Body):
    """The parameters that requests for embeddings and requests for scores share."""

    more_bytes: ClassVar[int] = MORE_BYTES
    cache_salt: CacheSalt | None = None
    priority: Priority = 0
    truncate_prompt_tokens: Truncation | None = None


def _check_input(value: object) -> object:
    """Check all forms of `input` together, because pydantic's own message would explain only one of them."""

    def is_prompt(one: object) -> bool:
        return isinstance(one, str) or (isinstance(one, list) and all(type(each) is int and each >= 0 for each in one))

    if is_prompt(value) and value:
        return value
    if isinstance(value, list) and 0 < len(value) <= MAX_INPUTS and all(one and is_prompt(one) for one in value):
        return value
    text = f"must be an input (a string or a list of token ids, not empty) or a list of 1 to {MAX_INPUTS} inputs"
    raise PydanticCustomError("input", text)


class EmbeddingBody(PoolingBody):
    """POST /v1/embeddings."""

    input: Annotated[
        Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
        BeforeValidator(_check_input),
    ]
    add_special_tokens: bool = True
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def inputs(self) -> list[Any]:
        """The texts or lists of token ids."""
        return listed(self.input)


class PairBody(PoolingBody):
    """The parameters that /v1/rerank and /v1/score share. `instruction` is for rerankers whose template supports it."""

    expected: ClassVar[Mapping[str, str]] = dict(Body.expected) | dict.fromkeys(
        ("text_1", "text_2", "queries", "documents"),
        f"must have 1 to {MAX_INPUTS} texts that are not empty, or, for rerank, objects with `text`",
    )
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    instruction: Text | None = None
    use_activation: bool = True


class RerankDocument(StrictModel):
    """A document that is given as an object, not as a string."""

    text: Text


class RerankBody(PairBody):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    return_documents: bool = True
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0


class ScoreBody(PairBody):
    """POST /v1/score. `queries` is another name for `text_1`, and `documents` is another name for `text_2`."""

    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None
    queries: Text | Texts | None = None
    documents: Text | Texts | None = None

    @model_validator(mode="after")
    def _pairs_up(self) -> "ScoreBody":
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, name) is None) == (getattr(self, other) is None):
                raise RequestError(f"Give either `{name}` or `{other}`.", name)
        left, right = self.sides
        if len(left) not in {1, len(right)}:
            first, second = "text_1" if self.queries is None else "queries", "text_2" if self.text_2 else "documents"
            raise RequestError(f"`{first}` must have one text, or as many as `{second}`.", first)
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The first texts and the second texts of the pairs. A single first text is paired with every second text."""
        given = self.text_1 or self.queries or [], self.text_2 or self.documents or []
        left, right = ([one] if isinstance(one, str) else one for one in given)
        return left, right


class PoolingApi:
    """The handlers of embeddings and scores."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._rule = generation.model.pooling

    async def embeddings(self, body: EmbeddingBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/embeddings."""
        self._check_embeds()
        tenant = reply.identity.tenant
        async with before(reply.deadline):
            prompts = [
                await self._encoded(text, body, "input", tenant, body.add_special_tokens) for text in body.inputs
            ]
        name = f"embd-{token_hex(16)}"
        vectors = await self._vectors(prompts, body, name, reply)
        if body.dimensions is not None and body.dimensions > len(vectors[0]):
            raise RequestError(f"`dimensions` must be at most {len(vectors[0])}.", "dimensions")

        def encoded() -> bytes:  # on a thread, because many embeddings take seconds to format
            shown = (_shown(self._finished(vector, body.dimensions), body) for vector in vectors)
            data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(shown)]
            return dump(self._list(name, body, data, prompts)).encode()

        await reply.encoded_json(await THREADS.run(tenant, encoded))

    async def score(self, body: ScoreBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/score."""
        name, (left, right) = f"score-{token_hex(16)}", body.sides
        scores, prompts = await self._scores(left, right, body, name, reply)
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        await reply.json(self._list(name, body, data, prompts))

    async def rerank(self, body: RerankBody, reply: ResponseWriter) -> None:
        """Handle POST /v1/rerank. The most relevant documents come first."""
        name = f"rerank-{token_hex(16)}"
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        scores, prompts = await self._scores([body.query], texts, body, name, reply)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in order
        ]
        model = self._generation.name_for(body)
        await reply.json({"id": name, "model": model, "usage": _usage(prompts), "results": results})

    def _check_embeds(self) -> None:
        if self._rule.kind == "logits":
            raise RequestError("This model is a reranker; use /v1/rerank or /v1/score.", "model")
        if not self._rule.kind:
            raise RequestError(self._rule.refusal, "model")

    async def _scores(
        self, left: list[str], right: list[str], body: PairBody, name: str, reply: ResponseWriter
    ) -> tuple[list[float], list[list[int]]]:
        """Return the score of each pair, and the prompts. For an embedding model, the score is the cosine of the two
        vectors."""
        tenant = reply.identity.tenant
        if self._rule.kind != "logits":
            self._check_embeds()
            if body.instruction or body.chat_template_kwargs:
                param = "instruction" if body.instruction else "chat_template_kwargs"
                raise RequestError(f"`{param}` is for rerankers; this is an embedding model.", param)
            async with before(reply.deadline):
                prompts = [await self._encoded(text, body, "documents", tenant) for text in (*left, *right)]
            found = await self._vectors(prompts, body, name, reply)
            firsts = found[: len(left)] * (len(right) if len(left) == 1 else 1)
            pairs = zip(firsts, found[len(left) :], strict=True)
            return await THREADS.run(tenant, lambda: [_cosine(*pair) for pair in pairs]), prompts
        if body.truncate_prompt_tokens is not None:
            text = "`truncate_prompt_tokens` would cut the end of a reranker's template; shorten the documents."
            raise RequestError(text, "truncate_prompt_tokens")
        queries = left * (len(right) if len(left) == 1 else 1)
        async with before(reply.deadline):
            prompts = await self._paired([*zip(queries, right, strict=True)], body, tenant)
        logits = [one[0] - sum(one[1:]) for one in await self._vectors(prompts, body, name, reply)]
        return [_sigmoid(one) if body.use_activation else one for one in logits], prompts

    async def _paired(self, pairs: list[tuple[str, str]], body: PairBody, tenant: str) -> list[list[int]]:
        """Return a reranker's prompt for each pair of a query and a document. Its chat template takes messages with the
        roles `query` and `document`."""
        tokenizer, room = self._generation.tokenizer, self._generation.model.max_model_len - 1

        def encoded(query: str, document: str) -> list[int]:
            if (least := tokenizer.least_tokens(query) + tokenizer.least_tokens(document)) > room:
                raise self._too_long(f"at least {least}", "documents")
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            if body.instruction is not None:
                messages.insert(0, {"role": "system", "content": body.instruction})
            ids = tokenizer.encode_chat(
                messages, add_generation_prompt=self._rule.prompts, arguments=body.chat_template_kwargs
            )
            return self._fitting(ids, "documents")

        def encoded_all(some: list[tuple[str, str]]) -> list[list[int]]:
            return [encoded(*pair) for pair in some]

        rows: list[list[int]] = []
        for first in range(0, len(pairs), PAIRS_AT_ONCE):
            rows += await run_in_thread(tenant, encoded_all, pairs[first : first + PAIRS_AT_ONCE])
        return rows

    async def _encoded(
        self, text: Any, body: PoolingBody, param: str, tenant: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of an input. If the input is truncated, the special tokens at its end are kept."""
        await asyncio.sleep(0)  # let other requests run between the inputs
        tokenizer, room = self._generation.tokenizer, self._generation.model.max_model_len - 1
        if not isinstance(text, str):
            ids = list(text)
        elif body.truncate_prompt_tokens is None and (least := tokenizer.least_tokens(text)) > room:
            raise self._too_long(f"at least {least}", param)
        else:
            ids = await encode(tokenizer, text, add_special_tokens, tenant)
        limit = body.truncate_prompt_tokens
        limit = room if limit == -1 else limit
        if limit is not None and len(ids) > limit:
            kept = _common_end(ids, tokenizer.encode("") if isinstance(text, str) and add_special_tokens else [])
            kept = min(kept, limit)
            ids = ids[: limit - kept] + ids[len(ids) - kept :]
        return self._fitting(ids, param)

    def _fitting(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise RequestError("The input has no tokens.", param)
        check_ids(ids, self._generation.model, param)
        if len(ids) >= self._generation.model.max_model_len:
            raise self._too_long(str(len(ids)), param)
        return ids

    def _too_long(self, num_tokens: str, param: str) -> RequestError:
        room = self._generation.model.max_model_len - 1
        return RequestError(f"An input has {num_tokens} tokens; at most {room} fit.", param, "context_length_exceeded")

    async def _vectors(
        self, prompts: Sequence[list[int]], body: PoolingBody, name: str, reply: ResponseWriter
    ) -> list["array[float]"]:
        """Return the vector of each prompt. Raises RequestError or UnavailableError if any prompt fails."""
        reply.name(name)
        reply.log_fields = {"prompts": len(prompts), "prompt_tokens": sum(map(len, prompts))}
        identity, adapter = reply.identity, self._generation.adapter_of(body)
        sampling = SamplingParams(0.0, pooling=self._rule.kind, allowed_tokens=pack_ids(self._rule.tokens))
        slots = asyncio.Semaphore(max(1, min(AT_ONCE, AT_ONCE_TOKENS // max(map(len, prompts)))))

        async def compute(number: int, prompt: list[int]) -> "array[float]":
            request = GenerationRequest(
                f"{name}-{number}",
                prompt,
                1,
                sampling,
                salt=cache_namespace(identity.tenant, body.cache_salt, adapter),
                priority=identity.allowed_priority(body.priority),
                adapter=adapter,
                traceparent=reply.traceparent,
                tenant=identity.tenant,
                deadline=reply.deadline,
            )
            async with slots:
                return await self._vector(request, reply.arrived, is_new=number == 0)

        tasks = [asyncio.create_task(compute(*each)) for each in enumerate(prompts)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _vector(self, request: GenerationRequest, arrived: float, *, is_new: bool) -> "array[float]":
        output, vector = self._generation.output(ONE_TOKEN, request.id, [request], arrived), array("f")
        async with self._generation.deltas(output, is_new=is_new) as deltas:
            async for _, delta in deltas:
                vector.frombytes(delta.vector)
        if not vector:
            raise UnavailableError("A node returned no vector; it may run another version of Baton.", status=500)
        return vector

    def _finished(self, vector: "array[float]", dimensions: int | None) -> "array[float]":
        """Return the first `dimensions` numbers of a vector (Matryoshka embeddings). If the model normalizes its
        vectors, normalize the result."""
        cut = vector[:dimensions]
        length = math.hypot(*cut) if self._rule.normalizes else 1.0
        return array("f", [one / length for one in cut]) if length not in {0.0, 1.0} else cut

    def _list(self, name: str, body: Body, data: list[Any], prompts: list[list[int]]) -> dict[str, Any]:
        model = self._generation.name_for(body)
        found = {"id": name, "object": "list", "created": int(time()), "model": model}
        return found | {"data": data, "usage": _usage(prompts)}


def _shown(vector: "array[float]", body: EmbeddingBody) -> list[float] | str:
    """Return a vector in the requested format: numbers, or base64 of little-endian float32."""
    return vector.tolist() if body.encoding_format == "float" else b64encode(vector.tobytes()).decode()


def _common_end(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the longest common suffix of the two sequences."""
    pairs = zip(reversed(ids), reversed(others), strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))


def _usage(prompts: Sequence[list[int]]) -> dict[str, int]:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def _cosine(left: "array[float]", right: "array[float]") -> float:
    lengths = math.hypot(*left) * math.hypot(*right)
    return sum(one * other for one, other in zip(left, right, strict=True)) / lengths if lengths else 0.0


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
