"""Limits on the requests that routers and prefill nodes submit to a node.

Each range is at least as wide as the range that the HTTP API allows, so a request that passed the router's checks also
passes the node's checks. Without these checks, a value out of range would reach arithmetic on the engine's thread,
where it could break other requests.
"""

import re
from collections.abc import Sequence

from shared.grammar import MAX_GRAMMAR_BYTES
from shared.limits import (
    INT32_MAX,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
)
from shared.rpc.messages import Media, SamplingParams, SubmitRequest, unpack_ids

MAX_ID, MAX_SALT_BYTES = 256, 256
MAX_STOP_TOKENS = 4096  # maximum number of stop tokens of the request and of the model together
ADDRESS = re.compile(r"[\w.:%\[\]-]{1,255}:\d{1,5}", re.ASCII)
POOLINGS = ("", "last", "mean", "logits")
TINY = 5e-324  # the smallest positive float
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (TINY, 1),
    "top_k": (0, INT32_MAX),
    "min_p": (0, 1),
    "seed": (-(2**63), 2**64 - 1),
    "repetition_penalty": (TINY, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def check_submit(submit: SubmitRequest, max_model_len: int, vocab_size: int) -> list[int]:
    """Check a request and return its token ids. Raises ValueError, which names the field, if a value is out of
    range."""
    tokens, stop_tokens = unpack_ids(submit.tokens), unpack_ids(submit.stop_tokens)
    _check("number of tokens", len(tokens), 1, max_model_len)
    _check("num_prompt", submit.num_prompt, 1, len(tokens))
    _check("max_tokens", submit.max_tokens, 1, max_model_len)
    if max(tokens) >= vocab_size:
        raise ValueError(f"token id {max(tokens)} is beyond the vocabulary of {vocab_size}")
    _check("num_prompt and max_tokens together", submit.num_prompt + submit.max_tokens, 2, max_model_len)
    _check("min_tokens", submit.min_tokens, 0, INT32_MAX)
    _check("priority", submit.priority, -INT32_MAX, INT32_MAX)
    _check("length of id", len(submit.id), 1, MAX_ID)
    _check("length of traceparent", len(submit.traceparent), 0, MAX_ID)
    if submit.decode_node and not ADDRESS.fullmatch(submit.decode_node):
        raise ValueError(f"decode_node is {submit.decode_node!r:.40}: it must be host:port")
    _check("length of adapter", len(submit.adapter), 0, MAX_ID)
    _check("length of salt", len(submit.salt), 0, MAX_SALT_BYTES)
    _check("number of stop_tokens", len(stop_tokens), 0, MAX_STOP_TOKENS)
    _check("length of grammar", len(submit.grammar), 0, MAX_GRAMMAR_BYTES)
    check_media(submit.media, submit.num_prompt)
    _check_sampling(submit.sampling, vocab_size)
    if submit.sampling.pooling not in POOLINGS or (submit.sampling.pooling and submit.max_tokens != 1):
        raise ValueError(f"pooling is {submit.sampling.pooling!r:.40}: it must be one of {POOLINGS}, with max_tokens 1")
    return tokens


def check_media(media: Sequence[Media], num_prompt: int) -> None:
    """Raise ValueError if an image is malformed, or if the images do not fit, in order, into `num_prompt` tokens."""
    _check("number of media", len(media), 0, MAX_IMAGES)
    _check("bytes of media", sum(len(one.pixels) for one in media), 0, MAX_IMAGE_BYTES)
    first, has_pixels = 0, any(one.pixels for one in media)
    for one in media:
        _check("media.rows", one.rows, 1, num_prompt)
        _check("media.columns", one.columns, 1, num_prompt)
        _check("media.offset", one.offset, first, num_prompt - one.rows * one.columns)
        _check("length of media.digest", len(one.digest), 16, MAX_SALT_BYTES)
        if one.encoder and not ADDRESS.fullmatch(one.encoder):
            raise ValueError(f"media.encoder is {one.encoder!r:.40}: it must be host:port")
        _check("media.width", one.width, 1, INT32_MAX)
        size = 3 * one.width * one.height if has_pixels else 0
        _check("length of media.pixels", len(one.pixels), size, size)
        first = one.offset + one.rows * one.columns


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(sampling, name)
        if value is not None:
            _check(f"sampling.{name}", value, low, high)
    _check("number of sampling.logit_bias", len(sampling.logit_bias), 0, MAX_LOGIT_BIASES)
    for token, bias in sampling.logit_bias.items():
        _check("token of sampling.logit_bias", token, 0, vocab_size - 1)
        _check("value of sampling.logit_bias", bias, -100, 100)
    _check("token of sampling.allowed_tokens", max(unpack_ids(sampling.allowed_tokens), default=0), 0, vocab_size - 1)
    _check("number of sampling.bad_words", len(sampling.bad_words), 0, 2 * MAX_BAD_WORDS)
    for word in sampling.bad_words:
        ids = unpack_ids(word)
        _check("length of sampling.bad_words", len(ids), 1, 4 * MAX_BAD_WORD_CHARACTERS)
        _check("token of sampling.bad_words", max(ids), 0, vocab_size - 1)
    if (thinking := sampling.thinking) is not None:
        ends = unpack_ids(thinking.ends)
        _check("sampling.thinking.num_tokens", thinking.num_tokens, 0, INT32_MAX)
        _check("sampling.thinking.begin", thinking.begin, -1, INT32_MAX)
        _check("sampling.thinking.start", thinking.start, 0, vocab_size - 1)
        _check("number of sampling.thinking.ends", len(ends), 1, MAX_STOP_TOKENS)
        _check("token of sampling.thinking.ends", max(ends), 0, vocab_size - 1)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ValueError(f"{name} is {value!r:.40}: it must be from {low} to {high}")
