"""Converts a validated body to generation requests, whose tokens fit the model's context."""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

from router.dispatch.admission import deadline_error
from router.dispatch.requests import GenerationRequest, ModelCard
from router.http.asgi import ANONYMOUS, Identity
from router.http.bodies import ChatBody, CompletionBody, GenerateBody, TokenizeBody
from router.http.messages import image_urls, plain_messages
from router.http.tools import call_grammar, check_tools, enforces_calls
from router.text.answer_grammar import after_reasoning, prompt_end
from router.text.grammar_check import GrammarChecker
from router.text.images import ImageReader, placed
from router.text.tokenizer import Tokenizer
from shared.errors import RequestError, UnavailableError
from shared.fair_threads import FairThreads
from shared.limits import GREEDY_BELOW
from shared.rpc.messages import Media, SamplingParams, ThinkingBudget, pack_ids

COMPLETION_TOKENS = 16  # default of `max_tokens` for completions, as in OpenAI and vLLM
ADMITTED_SAMPLES = 8  # maximum number of samples that are admitted at once
AT_ONCE = 8192  # a text of this many characters takes about 1 ms to encode; a longer text is encoded on a thread
_CONTEXT = "This model's maximum context length is"  # as in OpenAI's errors; clients such as litellm search for it
ENCODE_S = 10.0  # time limit for work on a thread, including the time until a thread is free
THREADS = FairThreads(min(8, len(os.sched_getaffinity(0)) + 1), "requests")  # shared by all models of the router

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def run_in_thread(
    tenant: str, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Run `work` on a thread, so that it does not delay other requests. Tenants share the threads fairly.

    Raises RequestError after ENCODE_S seconds, or UnavailableError if the work has not begun by then.
    """
    future = THREADS.submit(tenant, work, *args, **kwargs)
    try:
        async with asyncio.timeout(ENCODE_S):
            return await asyncio.wrap_future(future)
    except TimeoutError:
        if future.cancelled():
            text = "Too many of your requests are being parsed or tokenized; try again soon."
            raise UnavailableError(text, status=429) from None
        raise RequestError("Parsing or tokenizing this request takes too long; send a shorter one.") from None


@asynccontextmanager
async def before(deadline: float | None) -> AsyncIterator[None]:
    """Cancel the body of the `with` block at a request's deadline, and raise UnavailableError."""
    timeout = asyncio.timeout(None if deadline is None else deadline - time.monotonic())
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise deadline_error() from None


async def build_requests(
    body: CompletionBody | ChatBody,
    model: ModelCard,
    tokenizer: Tokenizer,
    request_id: str,
    traceparent: str = "",
    identity: Identity = ANONYMOUS,
    deadline: float | None = None,
    grammars: GrammarChecker | None = None,
    adapter: str = "",
    images: ImageReader | None = None,
) -> list[GenerationRequest]:
    """Return the requests for each prompt, with at most ADMITTED_SAMPLES samples each. Raises RequestError if a token
    id is not in the vocabulary, if the tokens do not fit the model's context, or if `grammars` refuses the grammar of
    the answers."""
    check_ids(body.stop_token_ids, model, "stop_token_ids")
    sampling = _sampling(body, model)
    check_ids(list(sampling.logit_bias), model, "logit_bias")
    if (allowed := body.allowed_token_ids) is not None:
        check_ids(allowed, model, "allowed_token_ids")
        sampling.allowed_tokens = pack_ids(allowed)
    if body.bad_words:
        sampling.bad_words = await run_in_thread(identity.tenant, _spellings, body.bad_words, model, tokenizer)
    prompts, media = await _encoded(body, model, tokenizer, images, identity.tenant)
    checker = grammars or GrammarChecker()
    grammar = await _grammar(body, model, checker, tokenizer, identity.tenant)
    if isinstance(body, ChatBody):
        if has_calls := enforces_calls(body):
            _check_can_end(body, model, "tools")
            grammar = await checker.threads.run(identity.tenant, call_grammar, body, tokenizer, checker)
        if grammar:
            grammar = after_reasoning(grammar, tokenizer, prompts[0], has_channels=has_calls)
    ignores_eos = body.ignore_eos and not grammar
    stop_tokens = frozenset(body.stop_token_ids) | (frozenset() if ignores_eos else model.eos_ids)
    salt = cache_namespace(identity.tenant, body.cache_salt, adapter)
    return [
        GenerationRequest(
            id=f"{request_id}-{number}",
            prompt=prompt,
            max_tokens=_max_tokens(body, len(prompt), model),
            # With a grammar and `ignore_eos`, the answer ends only where the grammar allows no other token.
            min_tokens=_max_tokens(body, len(prompt), model) if grammar and body.ignore_eos else body.min_tokens,
            stop_tokens=stop_tokens,
            sampling=replace(sampling, thinking=_thinking(body, prompt, model, tokenizer)),
            n=min(body.n - first, ADMITTED_SAMPLES),
            first_sample=first,
            salt=salt,
            speculative=body.speculative,
            adapter=adapter,
            priority=identity.allowed_priority(body.priority),
            traceparent=traceparent,
            tenant=identity.tenant,
            deadline=deadline,
            grammar=grammar,
            media=media,
        )
        for number, prompt in enumerate(prompts)
        for first in range(0, body.n, ADMITTED_SAMPLES)
    ]


async def _grammar(
    body: GenerateBody, model: ModelCard, checker: GrammarChecker, tokenizer: Tokenizer, tenant: str
) -> str:
    """Return the grammar that the answers must match, or "" if any answer is allowed."""
    constraint = body.constraint()
    if constraint is None:
        return ""
    _check_can_end(body, model, constraint.param)
    return await checker.threads.run(tenant, constraint.grammar, checker, tokenizer)


def _check_can_end(body: GenerateBody, model: ModelCard, param: str) -> None:
    if not (model.eos_ids or body.stop_token_ids):
        text = "This model has no stop token. An answer with a grammar needs one to end: set `stop_token_ids`."
        raise RequestError(text, param)


def cache_namespace(tenant: str, cache_salt: str | None, adapter: str = "") -> bytes:
    """Return the salt that the router and the nodes use for this client's entries in the prefix cache.

    Tenants do not share cached prefixes, because the duration of a request would reveal another tenant's prompts.
    Requests of one tenant share cached prefixes only if they have the same `cache_salt` and LoRA adapter, because KV
    depends on the adapter.
    """
    parts = [tenant.encode(), *([] if cache_salt is None else [cache_salt.encode()])]
    parts += [b"lora", adapter.encode()] if adapter else []
    return hashlib.sha256(b"".join(len(part).to_bytes(4) + part for part in parts)).digest() if any(parts) else b""


def check_ids(ids: list[int], model: ModelCard, param: str) -> None:
    """Raise RequestError if an id is not in the model's vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
        raise RequestError(f"Token ids in `{param}` must be from 0 to {model.vocab_size - 1}.", param)


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, tenant: str) -> list[int]:
    """Return the token ids of a text. A long text is encoded on a worker thread."""
    if len(text) <= AT_ONCE:
        return tokenizer.encode(text, add_special_tokens)
    return await run_in_thread(tenant, tokenizer.encode, text, add_special_tokens)


async def encode_chat(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, images: ImageReader | None, tenant: str
) -> tuple[list[int], list[Media]]:
    """Return the token ids of a conversation, and its images. `images` is None if the model takes no images."""
    media: list[Media] = []
    if urls := image_urls(body.messages or ()):
        if images is None:
            text = "this model takes no images, or its directory has no preprocessor_config.json; send text only"
            raise RequestError(f"`{urls[0][0]}`: {text}.", urls[0][0], "unsupported_parameter")
        media = await images.read(urls, tenant)
    tokens = await run_in_thread(
        tenant,
        tokenizer.encode_chat,
        plain_messages(body.messages or (), tokenizer.syntax.id_form),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        arguments=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens is True,
        tools=[tool.plain() for tool in body.tools],
        image_markers=images.rules.markers if images is not None and media else None,
    )
    return (placed(tokens, media, images.rules) if images is not None and media else tokens), media


async def _encoded(
    body: CompletionBody | ChatBody, model: ModelCard, tokenizer: Tokenizer, images: ImageReader | None, tenant: str
) -> tuple[list[list[int]], list[Media]]:
    """Return the token ids of each prompt, and the images of a conversation."""
    media: list[Media] = []
    if isinstance(body, ChatBody):
        check_tools(body, tokenizer.syntax)
        texts = [each.content for each in body.messages if isinstance(each.content, str)]
        least = sum(map(tokenizer.least_tokens, texts)) if body.truncate_prompt_tokens is None else 0
        if least >= model.max_model_len:  # a stored conversation may be so long that encoding it takes minutes
            raise _too_long(f"at least {least}", model, "messages")
        tokens, media = await encode_chat(tokenizer, body, images, tenant)
        param, prompts = "messages", [tokens]
        if media and body.truncate_prompt_tokens is not None:
            text = "`truncate_prompt_tokens` is not supported with images; omit it and send fewer messages."
            raise RequestError(text, "truncate_prompt_tokens", "unsupported_parameter")
    else:
        param, prompts = "prompt", []
        for prompt in body.prompts:
            await asyncio.sleep(0)  # let other requests run between the prompts
            is_text = isinstance(prompt, str)
            least = tokenizer.least_tokens(prompt) if is_text and body.truncate_prompt_tokens is None else 0
            if least >= model.max_model_len:
                raise _too_long(f"at least {least}", model, param)
            prompts.append(await encode(tokenizer, prompt, body.add_special_tokens, tenant) if is_text else prompt)
    for ids in prompts:
        if not ids:
            raise RequestError("The prompt has no tokens.", param)
        check_ids(ids, model, param)
    return [_truncated(ids, body, model) for ids in prompts], media


def _truncated(prompt: list[int], body: GenerateBody, model: ModelCard) -> list[int]:
    """Return the last tokens of the prompt, as many as `truncate_prompt_tokens` allows. The default is all tokens."""
    limit = body.truncate_prompt_tokens
    if limit == -1:  # leave room for the answer
        default = 1 if isinstance(body, ChatBody) else COMPLETION_TOKENS
        limit = max(1, model.max_model_len - max(body.token_limit or default, body.min_tokens))
    return prompt if limit is None else prompt[-limit:]


def _thinking(
    body: CompletionBody | ChatBody, prompt: list[int], model: ModelCard, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """Return the limit on the reasoning in the answers to a prompt, or None for no limit. As in vLLM, it also covers
    reasoning in the prompt that the answer continues. Raises RequestError if a reasoning marker is not one token."""
    if body.thinking_token_budget in {None, -1}:
        return None
    reasoning, tools = tokenizer.syntax.reasoning, tokenizer.syntax.tools
    markers = [] if reasoning is None else [reasoning.start, reasoning.end]
    markers += tools.opens if tools is not None and tools.ends_reasoning else ()
    found = [tokenizer.token_id(name) for name in markers]
    ids = [token for token in found if token is not None and token < model.vocab_size]
    if reasoning is None or len(ids) < len(markers):
        text = "`thinking_token_budget` requires a model whose reasoning begins and ends with a token."
        raise RequestError(text, "thinking_token_budget", "unsupported_parameter")
    if prompt_end(tokenizer, prompt).endswith(reasoning.end):
        return None
    backward = prompt[::-1]
    distances = {backward.index(token): token for token in ids if token in backward}
    latest = min(distances, default=-1)
    begin = len(prompt) if reasoning.is_implicit and isinstance(body, ChatBody) else -1
    begin = len(prompt) - latest if distances.get(latest) == ids[0] else begin
    return ThinkingBudget(body.thinking_token_budget or 0, ids[0], pack_ids(ids[1:]), begin)


def _spellings(words: list[str], model: ModelCard, tokenizer: Tokenizer) -> list[bytes]:
    """Return the packed token ids of each word, encoded without a space before it. If a space changes the first token
    of the word, but not the number of tokens, also return the encoding with the space. This is vLLM's rule."""
    spellings = []
    for word in words:
        first = tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
        later = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not first or not later:
            raise RequestError("`bad_words` has a word without tokens.", "bad_words")
        check_ids(first, model, "bad_words")
        spellings.append(pack_ids(first))
        if later[0] != first[0] and len(later) == len(first):
            spellings.append(pack_ids(later))
    return spellings


def _max_tokens(body: GenerateBody, num_prompt: int, model: ModelCard) -> int:
    """Return the maximum number of tokens to generate. As in vLLM, it is at most the rest of the context. Raises
    RequestError if the prompt or `min_tokens` does not fit, or if the client's limit exceeds the whole context."""
    context, param = model.max_model_len, "messages" if isinstance(body, ChatBody) else "prompt"
    if num_prompt >= context:
        raise _too_long(str(num_prompt), model, param)
    rest, limit = context - num_prompt, body.token_limit
    if limit is None:
        limit = rest if isinstance(body, ChatBody) else min(rest, max(COMPLETION_TOKENS, body.min_tokens))
    limit = max(limit, 1)  # if the client requests 0 tokens, `OutputProcessor` drops the token
    if limit > context or body.min_tokens > rest:
        wanted, name = (limit, "max_tokens") if limit > context else (body.min_tokens, "min_tokens")
        raise RequestError(
            f"{_CONTEXT} {context} tokens; you requested {num_prompt + wanted}: "
            f"{num_prompt} in the prompt and {wanted} to generate. At most {rest} can be generated.",
            name,
            "context_length_exceeded",
        )
    return min(limit, rest)


def _too_long(num_tokens: str, model: ModelCard, param: str) -> RequestError:
    """Return the error for a prompt that does not fit. Its end is Anthropic's text, at which coding agents compact a
    conversation."""
    most = model.max_model_len - 1
    end = f"the prompt is too long: {num_tokens} tokens > {most} maximum"
    return RequestError(f"{_CONTEXT} {most + 1} tokens, including the answer; {end}", param, "context_length_exceeded")


def _sampling(body: CompletionBody | ChatBody, model: ModelCard) -> SamplingParams:
    """Return the sampling parameters. If the client gave no seed, choose one here, so that a retry on another node
    continues with the same tokens."""
    body = body.model_copy(update={key: model.sampling[key] for key in model.sampling.keys() - body.model_fields_set})
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionBody) and body.echo and prompt_logprobs is None:
        prompt_logprobs = body.logprobs
    has_images = isinstance(body, ChatBody) and bool(image_urls(body.messages))
    # Each sample sends the images to a node, and each group computes the whole prompt for its logprobs.
    if body.n > ADMITTED_SAMPLES and (has_images or prompt_logprobs is not None):
        raise RequestError(f"`n` can be at most {ADMITTED_SAMPLES} with images or logprobs of the prompt.", "n")
    return SamplingParams(
        temperature=body.temperature if body.temperature >= GREEDY_BELOW else 0.0,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        seed=secrets.randbits(63) if body.seed in {None, -1} else body.seed % 2**64,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        logprobs=body.num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )
