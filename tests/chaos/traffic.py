"""The requests of a chaos run, and a client that checks every token of the answers and times every gap.

Request number i is the same in every run. Prompts have 20 to 6,000 tokens; some requests have two samples, some have a
temperature, and some are chats. The hash model's answer depends on the prompt alone, so the client can compute it.
"""

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from shared.clock import now_ns
from tests.cluster.harness import DEMO_VOCABULARY, expected

TIMEOUT_S = 90.0  # longest wait for data
LONG_TOKENS, TALKATIVE_TOKENS = 6000, 200


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. A chat sends the numbers of `prompt` as the text of its message."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    is_chat: bool = False

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "n": self.n, "stream": True}
        body |= {"temperature": self.temperature, "seed": self.index, "ignore_eos": True, "return_token_ids": True}
        if self.is_chat:
            words = " ".join(map(str, self.prompt))
            return body | {"messages": [{"role": "user", "content": words}]}
        return body | {"prompt": list(self.prompt)}


@lru_cache(maxsize=4096)
def ask(index: int) -> Ask:
    """Return request number `index`. The index is the seed, so every call returns the same request."""
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
def answer(prompt: tuple[int, ...], count: int) -> list[int]:
    return expected(list(prompt), count)


@dataclass(slots=True)
class Outcome:
    """The result of a request. `lost` is the error that the client received, such as a truncated stream."""

    ask: Ask
    id: str = ""
    lost: str = ""
    is_unequal: bool = False
    began_ns: int = 0
    ended_ns: int = 0
    gap_ns: tuple[int, int] = (0, 0)  # begin and end of the longest wait for a token, as Unix times
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by sample
    prompt: tuple[int, ...] = ()  # the prompt that the answer reports

    @property
    def gap_s(self) -> float:
        return (self.gap_ns[1] - self.gap_ns[0]) / 1e9


def run(url: str, model: str, asked: Ask) -> Outcome:
    """Send a request and read its stream to the end. The outcome contains the error of the request, if any."""
    outcome = Outcome(asked)
    run_into(outcome, url, model)
    return outcome


def run_into(outcome: Outcome, url: str, model: str) -> None:
    """Like `run`, for callers that read the outcome while tokens arrive."""
    asked = outcome.ask
    outcome.began_ns, outcome.prompt = now_ns(), asked.prompt
    try:
        _stream(url, asked.body(model), outcome)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        outcome.lost = f"{type(error).__name__}: {error}"
    outcome.ended_ns = now_ns()


def _stream(url: str, body: dict[str, Any], outcome: Outcome) -> None:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
    path = "/v1/chat/completions" if outcome.ask.is_chat else "/v1/completions"
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answered = connection.getresponse()
        if answered.status != 200:
            raise ValueError(f"status {answered.status}: {answered.read(300).decode(errors='replace')}")
        _read(answered, outcome)
    finally:
        connection.close()


def _read(stream: http.client.HTTPResponse, outcome: Outcome) -> None:
    last_ns = outcome.began_ns
    finished = 0
    while line := stream.readline():
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]\n":
            if finished != outcome.ask.n:
                raise ValueError(f"[DONE] after {finished} of {outcome.ask.n} samples")
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(f"error event: {event['error']}")
        outcome.id = event["id"]
        choice = event["choices"][0]
        outcome.prompt = tuple(choice.get("prompt_token_ids") or event.get("prompt_token_ids") or outcome.prompt)
        if tokens := choice.get("token_ids"):
            outcome.tokens.setdefault(choice["index"], []).extend(tokens)
            at_ns = now_ns()
            outcome.gap_ns = max(outcome.gap_ns, (last_ns, at_ns), key=lambda gap: gap[1] - gap[0])
            last_ns = at_ns
        finished += choice["finish_reason"] is not None
    raise ValueError("the stream ended without [DONE]")


def check(outcome: Outcome) -> None:
    """Compare every token with the answer that the hash model gives."""
    asked = outcome.ask
    right = answer(outcome.prompt, asked.max_tokens)
    received = [outcome.tokens.get(index) for index in range(asked.n)]
    outcome.is_unequal = received != [right] * asked.n or not (asked.is_chat or outcome.prompt == asked.prompt)


class Load:
    """Clients that take requests in order of their numbers and send them one at a time until `finish` is called."""

    def __init__(self, url: str, model: str, clients: int, share: float = 1.0) -> None:
        """`share` is the share of the time in which a client has a request in progress; the client then pauses."""
        self.outcomes: list[Outcome] = []
        self._url, self._model, self._share = url, model, share
        self._next = 0
        self._last: int | None = None  # set by `finish`
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, name=f"client-{n}") for n in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self, count: int) -> list[Outcome]:
        """Send requests until at least `count` have been sent, wait until all have ended, and check the answers."""
        with self._lock:
            self._last = count
        for thread in self._threads:
            thread.join()
        for outcome in self.outcomes:  # checked only now, because checks would disturb the timing of streams
            if not outcome.lost:
                check(outcome)
        return self.outcomes

    def _client(self) -> None:
        while True:
            with self._lock:
                if self._last is not None and self._next >= self._last:
                    return
                index, self._next = self._next, self._next + 1
            outcome = run(self._url, self._model, ask(index))
            while outcome.lost.startswith("ConnectionRefusedError") and self._last is None:
                time.sleep(0.05)  # the router is restarting
                outcome = run(self._url, self._model, ask(index))
            self.outcomes.append(outcome)  # list.append is atomic
            if self._share < 1.0:
                time.sleep((outcome.ended_ns - outcome.began_ns) / 1e9 * (1 / self._share - 1))
