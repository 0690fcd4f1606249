"""A client of one stack. It calls the stack's OpenAI API and, if the stack is Baton, reads the router's records."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import httpx

from shared.api_client import bearer, verification, with_fix

REQUEST_TIMEOUT_S = 60.0
IDLE_POLL_S = 0.2
# A stack counts as idle after this many consecutive polls without a new step: 1.6 s. A shorter time could miss steps:
# nodes report at most twice a second, and proxies read the counters of vLLM servers at most twice a second.
IDLE_POLLS = 8
SUMMARIES = 4000  # a router keeps at most this many summaries
STEPS = 65_536  # a router keeps at most this many steps of each node
MAX_TRACE_S = 3600.0  # a router refuses requests for longer traces

Document = dict[str, Any]


class EndpointError(Exception):
    """The stack does not answer, or its answer is unexpected. The message is one line."""


class Endpoint:
    """Client of one stack, used on one event loop. Methods that send requests raise EndpointError if a request fails.

    `connect` sets `is_baton`, `model` and `max_model_len` (0 if unknown).
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.is_baton = False
        self.model = ""
        self.max_model_len = 0
        # Ignore proxy settings, because a proxy would add its own delay.
        self._client = httpx.AsyncClient(
            timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=verification(url), headers=bearer(api_key)
        )

    async def connect(self) -> None:
        """Determine which model the stack serves and whether it is Baton."""
        models = (await self._json("/v1/models")).get("data") or []
        if not models:
            raise EndpointError(f"{self.url}/v1/models lists no model; is it an OpenAI API?")
        try:
            self.model, self.max_model_len = models[0]["id"], models[0].get("max_model_len") or 0
        except (LookupError, TypeError):
            raise EndpointError(f"{self.url}/v1/models does not list models; is it an OpenAI API?") from None
        with contextlib.suppress(EndpointError):
            self.is_baton = "nodes" in await self.status()

    async def status(self) -> Document:
        """Return the router's status. If the router serves several models, omit the nodes and counts of the others."""
        status = await self._json("/v1/status")
        if self.model in status.get("models", ()):
            status |= status["models"][self.model]
            status["nodes"] = [node for node in status["nodes"] if node["model"] == self.model]
        return status

    async def requests(self) -> list[Document]:
        """Return the summaries of the latest requests, newest first."""
        return list((await self._json(f"/v1/requests?limit={SUMMARIES}"))["requests"])

    async def timeline(self, identity: str) -> Document:
        return await self._json(f"/v1/requests/{identity}/timeline")

    async def steps(self, node: str, since_ms: float) -> list[Document]:
        """Return the node's steps since a Unix time, oldest first. Each step maps names of columns to values."""
        answer = await self._json(f"/v1/steps?node={node}&since_ms={since_ms:.3f}&limit={STEPS}")
        return [dict(zip(answer["fields"], row, strict=True)) for row in answer["steps"]]

    async def trace(self, last_s: float) -> bytes:
        """Return a trace of the last `last_s` seconds, but at most MAX_TRACE_S seconds, in Chrome's format."""
        return (await self._send("GET", f"/trace?last={min(last_s, MAX_TRACE_S):.0f}s")).content

    async def complete(self, prompt: Sequence[int], max_tokens: int, salt: str) -> list[int]:
        """Return the token ids of a greedy answer of `max_tokens` tokens. Without ids, return the bytes of its text."""
        body: Document = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True} | ({"cache_salt": salt} if self.is_baton else {})
        answer = await self._send("POST", "/v1/completions", json=body)
        try:
            choice = answer.json()["choices"][0]
            return list(choice.get("token_ids") or (choice.get("text") or "").encode())
        except (ValueError, LookupError, TypeError, AttributeError):
            raise EndpointError(f"{answer.url} answers without a completion: {answer.text[:200]!r}") from None

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until no request runs, no block is in use and no node runs steps. Return False after the timeout."""
        deadline = time.monotonic() + timeout_s
        seen, still = -1, 0
        while time.monotonic() < deadline:
            status = await self.status()
            steps = sum(node["steps"] for node in status["nodes"])
            still = still + 1 if is_idle(status) and steps == seen else 0
            seen = steps
            if still >= IDLE_POLLS:
                return True
            await asyncio.sleep(IDLE_POLL_S)
        return False

    async def close(self) -> None:
        await self._client.aclose()

    async def _json(self, path: str) -> Document:
        try:
            answer = (await self._send("GET", path)).json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EndpointError(f"{self.url}{path} does not answer with a JSON object; is it an OpenAI API?")
        return answer

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = await self._client.request(method, self.url + path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError(f"nothing answers at {self.url}: {with_fix(error)}") from None
        if answer.is_error:
            fix = "; check --api-key and BATON_API_KEY" if answer.status_code == 401 else ""
            raise EndpointError(f"{answer.url} answers with status {answer.status_code}: {answer.text[:200]}{fix}")
        return answer


def is_external(node: Document) -> bool:
    """Return whether a node is a vLLM server. Such servers transfer KV among themselves, without Baton."""
    return "engine_url" in (node.get("facts") or {})


def alive_nodes(status: Document) -> list[Document]:
    """Return the nodes that are alive. A router's status also lists the nodes that were lost or have left."""
    return [node for node in status["nodes"] if node["alive"]]


def is_idle(status: Document) -> bool:
    """Return whether no request runs and no block is in use. Cached blocks do not count as in use."""
    nodes = alive_nodes(status)
    blocks = [node["blocks"] for node in nodes]
    return (
        not status["requests"]["running"]
        and not any(node["running"] + node["waiting"] for node in nodes)
        and not any(block["owned"] + block["reserved"] + block["quarantined"] for block in blocks)
    )
