"""Requests a few answers from an engine before its node joins. The answers show whether the engine follows the
protocol, and whether the engine can repeat and resume answers.

When an engine computes logprobs for the first time, it compiles code, which takes up to a minute on a CPU. The probe
therefore requests logprobs, so that no client has to wait for the compilation.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy_node.client import EngineClient
from proxy_node.connectors import NIXL
from proxy_node.wire import EngineFailure, probe_request
from shared.errors import ConfigError

LENGTH, RESUMED = 16, 8  # an answer has LENGTH tokens; the probe resumes it after its first RESUMED tokens
SAMPLED = {"temperature": 2.0, "seed": 20_477}
PROBE_S = 180.0


@asynccontextmanager
async def deadline() -> AsyncIterator[None]:
    """Raise EngineFailure if the code in the `with` block takes longer than PROBE_S.

    Requests for tokens have no timeout of their own. A server that has just been restarted may accept such a
    request and never answer it.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            yield
    except TimeoutError:
        raise EngineFailure(f"no answer within {PROBE_S:g} s") from None


async def resumes(engine: EngineClient, known: str = "") -> str:
    """Return the kinds of sampling whose answers the engine resumes: "greedy, seeded", "seeded", "greedy" or "none".

    To resume an answer means to generate the same remaining tokens, given the prompt and the first tokens. Answers that
    cannot be repeated count as not resumed. If `known` is given, return it, and request only one token. An engine that
    works only in a pair has such a known value, because it cannot generate a whole answer alone.

    Raises ConfigError if the engine cannot serve as a node, and EngineFailure if it fails.
    """
    prompt = [(7 * number + 3) % engine.vocab_size for number in range(LENGTH)]
    try:
        await engine.collect(probe_request([engine.vocab_size - 1], 1, temperature=0.0), [engine.vocab_size - 1])
    except EngineFailure as failure:
        if failure.status != 400:
            raise
        text = f"its vocabulary is not that of --model, which has {engine.vocab_size} tokens"
        raise ConfigError(f"--engine {engine.url}: {text} (it says: {failure})") from None
    if known:
        return known
    found = []
    for name, sampling in (("greedy", {"temperature": 0.0, "logprobs": 1}), ("seeded", SAMPLED)):
        request = probe_request(prompt, LENGTH, **sampling)
        whole = await engine.collect(request, prompt)
        if len(whole) != LENGTH:
            raise ConfigError(f"--engine {engine.url}: its answers contain no token ids; {engine.needs}")
        again = await engine.collect(request, prompt)
        rest = await engine.collect(request, prompt + whole[:RESUMED])
        if again == whole and rest == whole[RESUMED:]:
            found.append(name)
    return ", ".join(found) or "none"


async def connector(engine: EngineClient) -> str:
    """Return the name of the engine's KV connector, or "" if it has none. Raises the same errors as `resumes`."""
    prompt = [engine.vocab_size - 1]
    try:
        _, params = await engine.prefill(probe_request(prompt, 2, temperature=0.0), prompt, None)
    except EngineFailure as failure:
        if failure.fault != "malformed":
            raise
        text = f"its KV connector is not NixlConnector in the transfer mode pull ({failure})"
        raise ConfigError(f"--engine {engine.url}: {text}; start it with another --kv-transfer-config") from None
    return NIXL if params is not None else ""
