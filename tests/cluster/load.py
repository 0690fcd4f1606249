"""Clients that stream answers and check every token while a test disturbs the cluster."""

import http.client
import json
import random
import threading
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Self

from tests.cluster.harness import Cluster, completion, expected

REFUSED = (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected)


def streamed(url: str, body: dict[str, object]) -> list[int]:
    """Return the tokens of one stream. Raises AssertionError if the stream has an error event."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += event["choices"][0].get("token_ids") or []
    return tokens


class Load:
    """A context manager that runs `clients` threads, each of which sends requests to the routers in rotation. With
    `retries`, a request whose connection is refused is sent to the next router; other errors are not retried. The exit
    raises AssertionError if a request has failed or if no request was answered."""

    def __init__(self, running: Cluster, clients: int = 2, max_tokens: int = 5, *, retries: bool = False) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self.num_refused = 0
        self._running = running
        self._max_tokens = max_tokens
        self._retries = retries
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
        if kind is None:
            assert not self.failures, f"{len(self.failures)} failed, {self.num_answers} did not: {self.failures[0]}"
            assert self.num_answers

    def _ask(self, seed: int) -> None:
        rng, urls = random.Random(seed), list(self._running.urls.values())
        for turn in range(seed, 1_000_000):
            if self._stop.is_set():
                return
            prompt = [rng.randrange(3, 2048) for _ in range(rng.choice((10, 40, 300)))]
            try:
                order = urls[turn % len(urls) :] + urls[: turn % len(urls)]
                assert self._answer(order, prompt) == expected(prompt, self._max_tokens)
                self.num_answers += 1
            except (OSError, HTTPException, AssertionError) as error:
                self.failures.append(f"client {seed}, {len(prompt)} tokens: {error!r}")
            self._stop.wait(0.05)

    def _answer(self, urls: Sequence[str], prompt: list[int]) -> list[int]:
        for url in urls[:-1] if self._retries else ():
            try:
                return self._stream(url, prompt)
            except OSError as error:
                if not isinstance(getattr(error, "reason", error), REFUSED):
                    raise
                self.num_refused += 1
        return self._stream(urls[-1] if self._retries else urls[0], prompt)

    def _stream(self, url: str, prompt: list[int]) -> list[int]:
        return streamed(url, completion(self._running.model, prompt, self._max_tokens, stream=True))
