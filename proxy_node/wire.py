"""Translates a router's request into a request for vLLM's `/v1/completions`, and reads the events of vLLM's answer.

Nothing here does I/O. The fields are named as in vLLM 0.19 and newer. The field `return_token_ids` makes answers
contain token ids.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from proxy_node.health import Fault
from shared.rpc.messages import Logprobs, SamplingParams, SubmitRequest, unpack_ids

MAX_EVENT_BYTES = 1 << 20  # maximum size of an event, not counting the prompt's ids, which the first event repeats
ID_BYTES = 12  # a token id in JSON takes fewer bytes than this
FINISHES = {"stop": "stop", "length": "length", "repetition": "stop"}
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"),
)
METRIC = re.compile(r"^(\w+):(\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(eq=False)
class EngineFailure(Exception):
    """The engine did not compute a request."""

    reason: str
    retry: bool = True  # whether another node may succeed
    is_suspicious: bool = False  # whether the engine may be gone
    fault: Fault | None = None  # the kind of failure, if it shows that the engine does not work
    status: int = 0  # the HTTP status if the engine refused the request

    def __str__(self) -> str:
        return self.reason


def garbage(reason: str) -> EngineFailure:
    return EngineFailure(f"the engine's answer is malformed: {reason}", fault="malformed")


@contextmanager
def reading() -> Iterator[None]:
    """Raise EngineFailure if the code in the `with` block fails because the engine's answer is malformed."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise garbage(f"{type(error).__name__}: {error}"[:200]) from None


# ---- to the engine ---------------------------------------------------------------------------------------------------


def completion_body(
    submit: SubmitRequest, tokens: Sequence[int], model: str, params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body of the request that continues `tokens` (the prompt and the tokens generated so far).

    `params` are the parameters of the KV connector, if any.
    """
    sampling, done = submit.sampling, len(tokens) - submit.num_prompt
    # Send all sampling parameters, because the model may have other defaults.
    body: dict[str, Any] = {name: getattr(sampling, name) for name in SAMPLING}
    body |= {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": max(1, submit.max_tokens - done),
        "min_tokens": max(0, submit.min_tokens - done),
        # `stop_tokens` include those of the model, unless the client sets `ignore_eos`.
        "stop_token_ids": unpack_ids(submit.stop_tokens),
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # so that logprobs name tokens by their ids
    }
    if params is not None:
        body["kv_transfer_params"] = params
    if sampling.temperature > 0:
        body["seed"] = sampling.seed % 2**63
    if sampling.allowed_tokens:
        body["allowed_token_ids"] = sorted(set(unpack_ids(sampling.allowed_tokens)))
    if salt := cache_salt(submit):
        body["cache_salt"] = salt
    return body


def cache_salt(submit: SubmitRequest) -> str:
    """Return the salt for the request's prefixes in the engine's cache, in hex digits. Requests share cached
    prefixes only if their salts are equal."""
    return (submit.salt if submit.share_prefix else submit.salt + b"\0" + submit.id.encode()).hex()


def next_token_only(submit: SubmitRequest, tokens: Sequence[int]) -> SubmitRequest:
    """Return the request that generates only the token after `tokens`."""
    count = len(tokens) - submit.num_prompt + 1
    return replace(submit, max_tokens=count, min_tokens=min(submit.min_tokens, count))


def probe_request(tokens: list[int], max_tokens: int, **sampling: Any) -> SubmitRequest:
    """Return a request that this process makes for itself. Clients do not share its cached prompt."""
    salt = b"baton-probe"
    return SubmitRequest("probe", "", b"", len(tokens), max_tokens, SamplingParams(**sampling), salt=salt)


# ---- from the engine -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineOutput:
    """The next tokens of an answer, with the logprobs of each token if they were requested."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: str = ""  # "stop" or "length" if these are the last tokens of the answer


class EventReader:
    """Reads the server-sent events of one answer from its HTTP body, which may arrive in arbitrary pieces."""

    def __init__(self, num_prompt: int, max_tokens: int, vocab_size: int, num_logprobs: int = 0) -> None:
        """`max_tokens` is the largest number of tokens that the answer may have."""
        self._limit = MAX_EVENT_BYTES + ID_BYTES * num_prompt
        self._left, self._vocab_size, self.num_logprobs = max_tokens, vocab_size, num_logprobs
        self._rest = b""

    def feed(self, data: bytes) -> EngineOutput:
        """Return the contents of the events that are now complete, as one output. Raises EngineFailure."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > self._limit or any(len(line) > self._limit for line in lines):
            raise garbage(f"an event is longer than {self._limit} bytes")
        output = EngineOutput()
        with reading():
            for line in lines:
                if line.startswith(b"data: {") and not output.finish:
                    event = json.loads(line[6:])
                    check_error(event)
                    self.add(output, event)
                elif line.strip() not in {b"", b"data: [DONE]"} and not line.startswith((b":", b"data: {")):
                    raise garbage(f"{line[:40]!r} is not an event")
        return output

    def add(self, output: EngineOutput, event: dict[str, Any]) -> None:
        """Add the contents of an event, or of an answer that is not streamed, to `output`.

        Raises EngineFailure if the engine gave up the request, and ValueError, TypeError, LookupError or AttributeError
        for a malformed event.
        """
        for choice in event["choices"]:
            tokens = self.checked(choice.get("token_ids") or [])
            output.tokens += tokens
            if tokens and choice.get("logprobs") is not None:
                output.logprobs += read_logprobs(choice["logprobs"], tokens, self.num_logprobs)
            if (finish := choice.get("finish_reason")) is not None:
                if finish not in FINISHES:
                    raise EngineFailure(
                        f"the engine ended the request: {finish!s:.40}", fault="refused" if finish == "abort" else None
                    )
                output.finish = FINISHES[finish]

    def checked(self, tokens: list[int]) -> list[int]:
        """Return the next tokens. Raises ValueError if a token is invalid or if there are too many tokens."""
        if any(type(token) is not int or not 0 <= token < self._vocab_size for token in tokens):
            raise ValueError(f"a token id is not an integer below {self._vocab_size}")
        self._left -= len(tokens)
        if self._left < 0:
            raise ValueError("there are more tokens than requested")
        return tokens


def check_error(event: dict[str, Any]) -> None:
    """Raise EngineFailure if the event reports an error."""
    if (error := event.get("error")) is not None:
        if error.get("code") == 400:  # vLLM reports some bad requests in the stream
            raise EngineFailure(f"{error.get('message')!s:.200}", retry=False, status=400)
        raise EngineFailure(f"the engine failed: {error.get('message')!s:.200}", retry=False, is_suspicious=True)


def read_logprobs(entry: dict[str, Any], tokens: Sequence[int], num_top: int) -> list[Logprobs]:
    """Return the logprobs of `tokens`. Raises ValueError, TypeError or LookupError for a malformed entry."""
    rows = []
    for token, logprob, top in zip(tokens, entry["token_logprobs"], entry["top_logprobs"], strict=True):
        found = {int(name.removeprefix("token_id:")): float(value) for name, value in (top or {}).items()}
        rows.append(likeliest(token, float(logprob), found, num_top))
    return rows


def likeliest(token: int, logprob: float, top: dict[int, float], num_top: int) -> Logprobs:
    """Return the logprobs of a token, with the `num_top` likeliest tokens of `top`, best first.

    The APIs do not state ranks. A token that is not among the likeliest tokens gets the rank after the last of them.
    """
    best = sorted(top.items(), key=lambda pair: -pair[1])[:num_top]
    ids = [identity for identity, _ in best]
    rank = 1 + ids.index(token) if token in ids else 1 + len(ids)
    return Logprobs(token, logprob, rank, ids, [value for _, value in best])


# ---- metrics ---------------------------------------------------------------------------------------------------------


def read_metrics(text: str, prefix: str = "vllm") -> dict[str, float]:
    """Parse the text of `/metrics`. Return the values, keyed by the name without its prefix, or by NAME:SOURCE if there
    is a label `source`. Add up all other series of a metric."""
    values: dict[str, float] = {}
    for own_prefix, metric, labels, value in METRIC.findall(text):
        if own_prefix != prefix or metric.endswith(("_bucket", "_created")):
            continue
        source = dict(LABEL.findall(labels)).get("source", "")
        name = f"{metric}:{source}" if source else metric
        with suppress(ValueError):
            if math.isfinite(number := float(value)):
                values[name] = values.get(name, 0.0) + number
    return values


def read_labels(text: str, metric: str) -> list[dict[str, str]]:
    """Return the labels of each series of a metric in the text of `/metrics`."""
    return [dict(LABEL.findall(labels)) for _, name, labels, _ in METRIC.findall(text) if name == metric]
