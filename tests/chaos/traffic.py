"""The requests of a chaos run, and a client that checks every token and measures every gap between tokens.

Request number i is the same in every run. Prompts have 20 to 6,000 tokens; some requests have two samples, some have a
temperature, and some are chats. The hash model's answer depends on the prompt alone, so the client can compute the
expected answer.
"""

import http.client
import json
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any, Self
from urllib.parse import urlsplit

from scheduler.geometry import UNIFORM, Group
from shared.clock import now_ns
from tests.cluster.harness import DEMO_VOCABULARY, events, expected, prompt_of

TIMEOUT_S = 90.0  # longest wait for data
LONG_TOKENS, TALKATIVE_TOKENS = 6000, 200


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. A chat sends the numbers in `prompt` as the text of its message. `fields` are added to the body."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    is_chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "n": self.n, "stream": True}
        body |= {"temperature": self.temperature, "seed": self.index, "ignore_eos": True, "return_token_ids": True}
        if self.is_chat:
            words = " ".join(map(str, self.prompt))
            return body | {"messages": [{"role": "user", "content": words}]} | self.fields
        return body | {"prompt": list(self.prompt)} | self.fields


@lru_cache(maxsize=4096)
def ask(index: int) -> Ask:
    """Return request number `index`. The same index always gives the same request."""
    rng = random.Random(index)
    length = rng.choices((rng.randint(20, 200), rng.randint(200, 1500), rng.randint(1500, 4000)), (65, 25, 10))[0]
    max_tokens = rng.randint(5, 60)
    match index % 20:
        case 7:
            return Ask(index, _tokens(rng, LONG_TOKENS), 20)
        case 13:
            return Ask(index, _tokens(rng, 300), TALKATIVE_TOKENS)
        case 3 | 11:
            return Ask(index, _tokens(rng, length), max_tokens, n=2)
        case 5 | 15:
            return Ask(index, _tokens(rng, length), max_tokens, temperature=0.8)
        case 9:
            return Ask(index, _tokens(rng, min(length, 300)), max_tokens, is_chat=True)
    return Ask(index, _tokens(rng, length), max_tokens)


def _tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, DEMO_VOCABULARY) for _ in range(length))


@lru_cache(maxsize=4096)
def answer(prompt: tuple[int, ...], max_tokens: int, groups: tuple[Group, ...] = UNIFORM) -> list[int]:
    return expected(list(prompt), max_tokens, groups)


def short(index: int) -> Ask:
    """Return a request with a prompt of 10, 40 or 300 tokens and an answer of 5 tokens."""
    return Ask(index, tuple(prompt_of(index, (10, 40, 300)[index % 3])), 5)


@dataclass(slots=True)
class Outcome:
    """The result of a request. `lost` is the error that the client received, such as a truncated stream."""

    ask: Ask
    id: str = ""
    lost: str = ""
    is_unequal: bool = False
    began_ns: int = 0
    ended_ns: int = 0
    arrivals_ns: "array[int]" = field(default_factory=lambda: array("q"))  # Unix times at which tokens arrived
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by sample
    prompt: tuple[int, ...] = ()  # the prompt that the answer reports

    @property
    def gap_ns(self) -> tuple[int, int]:
        """Return the start and the end of the longest wait for a token. The wait for the first token counts too."""
        return max(pairwise([self.began_ns, *self.arrivals_ns]), key=lambda gap: gap[1] - gap[0], default=(0, 0))

    @property
    def gap_s(self) -> float:
        return (self.gap_ns[1] - self.gap_ns[0]) / 1e9

    def check(self, expected: list[list[int]]) -> None:
        """Compare the tokens of each sample with the expected tokens. Set `is_unequal` if a token differs."""
        received = [self.tokens.get(index) for index in range(self.ask.n)]
        self.is_unequal = received != expected or not (self.ask.is_chat or self.prompt == self.ask.prompt)


def hash_answers(outcome: Outcome, groups: tuple[Group, ...] = UNIFORM) -> list[list[int]]:
    """Return the expected tokens of each sample: the hash model's answer, which depends on the prompt alone."""
    return [answer(outcome.prompt, outcome.ask.max_tokens, groups)] * outcome.ask.n


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    """Return one line for each request that was lost or got a wrong token."""
    return [
        f"request {outcome.ask.index} ({outcome.id}): {outcome.lost or 'wrong tokens'}"
        for outcome in outcomes
        if outcome.lost or outcome.is_unequal
    ]


def run(url: str, model: str, outcome: Outcome) -> Outcome:
    """Send the request of `outcome` and read its stream to the end. The tokens or the error are added to `outcome`."""
    outcome.began_ns, outcome.prompt = now_ns(), outcome.ask.prompt
    try:
        _stream(url, outcome.ask.body(model), outcome)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        outcome.lost = f"{type(error).__name__}: {error}"
    outcome.ended_ns = now_ns()
    return outcome


def _stream(url: str, body: dict[str, Any], outcome: Outcome) -> None:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", outcome.ask.path, json.dumps(body), {"content-type": "application/json"})
        answered = connection.getresponse()
        if answered.status != 200:
            raise ValueError(f"status {answered.status}: {answered.read(300).decode(errors='replace')}")
        _read(answered, outcome)
    finally:
        connection.close()


def _read(stream: http.client.HTTPResponse, outcome: Outcome) -> None:
    finished = 0
    for event in events(stream):
        outcome.id = event["id"]
        choice = event["choices"][0]
        outcome.prompt = tuple(choice.get("prompt_token_ids") or event.get("prompt_token_ids") or outcome.prompt)
        if tokens := choice.get("token_ids"):
            outcome.tokens.setdefault(choice["index"], []).extend(tokens)
            outcome.arrivals_ns.append(now_ns())
        finished += choice["finish_reason"] is not None
    if finished != outcome.ask.n:
        raise ValueError(f"[DONE] after {finished} of {outcome.ask.n} samples")


class Load:
    """A context manager that runs clients. Each client sends one request at a time: the next of `asks(0)`, `asks(1)`, …

    The requests rotate over `urls`. A request that fails with one of `refusals` is retried at the next URL. A client
    has a request in progress for `share` of the time, and pauses for the rest. On exit, the manager waits until `least`
    requests have been sent and all requests have ended, and then checks the answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        clients: int,
        least: int = 0,
        *,
        share: float = 1.0,
        refusals: tuple[str, ...] = ("ConnectionRefusedError",),
        asks: Callable[[int], Ask] = ask,
        answers: Callable[[Outcome], list[list[int]]] = hash_answers,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._urls, self._model, self._least, self._share = urls, model, least, share
        self._refusals, self._asks, self._answers = refusals, asks, answers
        self._next = 0
        self._is_over = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, name=f"client-{n}") for n in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
        for outcome in self.outcomes:  # checked only now, because checks would disturb the timing of streams
            if not outcome.lost:
                outcome.check(self._answers(outcome))

    def failures(self) -> list[str]:
        return failures(self.outcomes)

    def _client(self) -> None:
        while True:
            with self._lock:
                if self._is_over and self._next >= self._least:
                    return
                index, self._next = self._next, self._next + 1
            for attempt in count(index):
                outcome = run(self._urls[attempt % len(self._urls)], self._model, Outcome(self._asks(index)))
                if self._is_over or outcome.id or not outcome.lost.startswith(self._refusals):
                    break
                time.sleep(0.05)  # the router is restarting
            self.outcomes.append(outcome)  # list.append is atomic
            if self._share < 1.0:
                time.sleep((outcome.ended_ns - outcome.began_ns) / 1e9 * (1 / self._share - 1))
