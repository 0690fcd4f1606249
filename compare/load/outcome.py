"""The recording of one run of the load generator, with an outcome for every scheduled request.

Tokens are counted in the most reliable way that the server supports: by their ids, by logprobs, by the usage in each
event, or as one token per event. Times are seconds since the run's start on the client's monotonic clock.
"""

import json
import random
import sys
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = "timeout"  # value of `Outcome.error` after a timeout
TBT_OF = ("p99", "max", "mean")
COUNTS = ("ids", "logprobs", "usage", "events")  # how tokens are counted, most reliable first
MAX_LINE = 16 << 20  # maximum bytes of one event, to bound the memory; an event that echoes a prompt is smaller
WORDS = ("of", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")  # one token each


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Latency limits that a request must meet, in milliseconds; 0 means no limit.

    `tbt_ms` limits one statistic of the gaps between a request's tokens. `tbt_of` names it: the 99th percentile
    ("p99"), the maximum ("max") or the mean ("mean", also called TPOT). Raises ValueError if a limit is invalid.
    """

    ttft_ms: float = 0.0
    tbt_ms: float = 0.0
    tbt_of: str = "p99"

    def __post_init__(self) -> None:
        for name, limit in (("ttft_ms", self.ttft_ms), ("tbt_ms", self.tbt_ms)):
            if not isinstance(limit, (int, float)) or not 0 <= limit <= sys.float_info.max:
                raise ValueError(f"slo: {name} is {limit!r}; it must be milliseconds, or 0 for no limit")
        if self.tbt_of not in TBT_OF:
            raise ValueError(f"slo: tbt_of is {self.tbt_of!r}; it must be {', '.join(TBT_OF[:-1])} or {TBT_OF[-1]}")


@dataclass(slots=True)
class Outcome:
    """One request as observed by the client. If `finish` is set and `error` is empty, it finished; otherwise it failed.

    `token_s` has one time per token. Tokens that arrived in one read have the same time. `tokens` has the token ids,
    and is empty if the endpoint does not return them.
    """

    index: int  # position among the run's arrivals
    id: str  # the router's id of the request; "" until the first event
    scheduled_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    token_s: MutableSequence[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""  # TIMEOUT, or a message of one line
    prompt_tokens: int = 0
    max_tokens: int = 0
    ended_s: float | None = None  # when the answer ended, or when the client gave up
    slo: LatencySlo | None = None  # overrides the SLO of the run

    @property
    def finished(self) -> bool:
        return bool(self.finish) and not self.error


@dataclass(slots=True)
class LoadRecording:
    """A run as observed by the client. `problems` has the reasons not to use it. A run without problems is valid."""

    started_unix_ns: int = 0  # Unix time of second 0 of the run, to match the router's records
    outcomes: list[Outcome] = field(default_factory=list)
    counted: str = "ids"  # how tokens were counted: "ids", "logprobs", "usage" or "events"
    problems: list[str] = field(default_factory=list)


# ---- requests and their streams --------------------------------------------------------------------------------------


def body_of(model: str, prompt: Sequence[int], max_tokens: int, send: str, salt: str) -> bytes:
    """Return the body of a greedy request for exactly `max_tokens` tokens.

    If `send` is "text", each id becomes a common word, and the body has only OpenAI's fields. `salt` then decides
    which word each id becomes, so that prompts with different salts share no prefix in a cache.
    """
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if send == "ids":
        body |= {"prompt": list(prompt), "ignore_eos": True, "return_token_ids": True}
        body |= {"cache_salt": salt} if salt else {}
    else:
        words = random.Random(salt).sample(WORDS, len(WORDS))
        body["prompt"] = " ".join(words[token % len(words)] for token in prompt)
    return json.dumps(body, separators=(",", ":")).encode()


def worst_count(counts: Iterable[str]) -> str:
    """Return the least reliable of the given ways to count tokens."""
    return max(counts, key=COUNTS.index, default="ids")


class CompletionReader:
    """Fills in an outcome from the bytes of its stream. `exact`: the answer must have exactly `max_tokens` tokens."""

    def __init__(self, outcome: Outcome, *, exact: bool) -> None:
        self.counted = "ids"
        self.is_done = False  # the server sent [DONE]; it may keep the connection open
        self._outcome = outcome
        self._exact = exact
        self._rest = bytearray()
        self._num_reported: int | None = None  # number of completion tokens, as last reported by the server

    def feed(self, piece: bytes, now_s: float) -> None:
        """Process bytes that were read at `now_s`. Raises ValueError if they are not from a stream of completions."""
        if self._outcome.first_byte_s is None:
            self._outcome.first_byte_s = now_s
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    self.is_done = True
                    self._outcome.ended_s = now_s
                elif data:
                    self._event(json.loads(data), now_s)
        elif len(self._rest) > MAX_LINE:
            raise ValueError(f"a line of over {MAX_LINE} bytes")

    def _event(self, event: dict[str, Any], now_s: float) -> None:
        outcome = self._outcome
        if error := event.get("error"):
            outcome.error = _message(error)
            return
        outcome.id = outcome.id or str(event.get("id") or "")
        if usage := event.get("usage"):
            self._num_reported = usage.get("completion_tokens")
            outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
        for choice in event.get("choices") or ():
            num_new = self._num_new(choice, running=bool(usage))
            if len(outcome.token_s) + num_new > outcome.max_tokens:
                raise ValueError(f"more than the {outcome.max_tokens} requested tokens")
            outcome.token_s += [now_s] * num_new
            outcome.finish = choice.get("finish_reason") or outcome.finish

    def _num_new(self, choice: dict[str, Any], *, running: bool) -> int:
        """Count the new tokens of a choice in the most reliable way available."""
        logprobs = choice.get("logprobs") or {}
        if isinstance(ids := choice.get("token_ids"), list):
            self._outcome.tokens += ids
            return len(ids)
        if tokens := logprobs.get("tokens"):
            self.counted = worst_count((self.counted, "logprobs"))
            return len(tokens)
        # Once events were counted as one token each, do not return to counting by usage: the total would become
        # correct, and `close` could not notice that an event had several tokens.
        if running and self._num_reported is not None and self.counted != "events":
            self.counted = worst_count((self.counted, "usage"))
            return max(0, self._num_reported - len(self._outcome.token_s))
        if not choice.get("text"):
            return 0
        self.counted = "events"
        return 1

    def refuse(self, status: int, answer: bytes) -> None:
        """Record an error response."""
        try:
            message = _message(json.loads(answer)["error"])
        except (ValueError, KeyError, TypeError):
            message = answer[:200].decode("utf-8", "replace")
        self._outcome.error = f"HTTP {status}: {message}"

    def close(self) -> None:
        """Record the end of the stream, and an error if tokens are missing."""
        outcome = self._outcome
        if outcome.error:
            return
        num_tokens, reported = len(outcome.token_s), self._num_reported
        expected = outcome.max_tokens if self._exact else reported
        if not outcome.finish:
            outcome.error = f"the stream broke off after {num_tokens} tokens"
        elif not num_tokens:
            outcome.error = "the answer has no tokens"
        elif self.counted == "events" and num_tokens < (reported or expected or 0):
            outcome.error = f"bundled: {reported or expected} tokens in {num_tokens} events"
        elif expected not in {None, num_tokens} or reported not in {None, num_tokens}:
            outcome.error = f"{num_tokens} of {outcome.max_tokens} requested tokens arrived"


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
