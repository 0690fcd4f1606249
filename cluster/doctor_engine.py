"""The checks of `baton doctor --engine`: whether a vLLM server can be a node, and whether two servers can exchange KV.

The checks send about thirty short requests. The servers must have no other traffic.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from cluster.plan import DoctorSettings
from proxy_node.client import EngineFacts, read_key
from proxy_node.connectors import NIXL_CONFIG
from proxy_node.probe import connector, deadline, resumes
from proxy_node.vllm import VllmEngine
from proxy_node.wire import probe_request
from router.text.tokenizer import Tokenizer
from shared.model_files import DEMO_MODEL, read_limits, resolve
from shared.rpc.messages import SubmitRequest

Check = Callable[[], Awaitable[str]]
LENGTH = 24  # tokens of an answer
IDLE_S = 10.0
TEXTS = (
    "Hello", " leading and trailing ", "two\nlines\n\n", "\ttabs\t", "MiXeD CaSe", "it's, isn't it?", "12345 67.89",
    "Grüße aus Köln", "naïve café", "Привет, мир", "こんにちは世界", "你好，世界", "مرحبا", "🙂🚀", "e\u0301",
    "a" * 100, "def f(x):\n    return x", '{"a": [1, 2]}', "https://a.example/b?c=d", "<|endoftext|>",
)  # fmt: skip


@asynccontextmanager
async def engine_checks(settings: DoctorSettings) -> AsyncIterator[list[tuple[str, Check]]]:
    """Provide the checks of `--engine` and `--peer`, each with its name. Raises ValueError or OSError for bad files."""
    directory = resolve(settings.model) if settings.model else DEMO_MODEL
    max_len, vocab_size = read_limits(directory)
    key = read_key(settings.engine_api_key_file)
    tokenizer = Tokenizer.load(directory, vocab_size)
    async with AsyncExitStack() as cleanup:
        servers = []
        for url in filter(None, (settings.engine, settings.peer)):
            server = VllmEngine(url, key, vocab_size)
            await cleanup.enter_async_context(server.open())
            servers.append(EngineExaminer(server, settings.max_model_len or max_len, tokenizer))
        checks = [check for server in servers for check in server.checks()]
        if len(servers) == 2:
            there, back = partial(hands_over, *servers), partial(hands_over, *reversed(servers))
            checks += [("same KV", partial(same_kv, *servers)), ("handoff", there), ("handoff back", back)]
        yield [(name, deadline()(check)) for name, check in checks]  # a check of a frozen server would never end


class EngineExaminer:
    """Examines one server. The first check sets `facts`, which the other checks need."""

    facts: EngineFacts

    def __init__(self, engine: VllmEngine, max_model_len: int, tokenizer: Tokenizer) -> None:
        self.engine, self._max_model_len, self._tokenizer = engine, max_model_len, tokenizer

    def checks(self) -> list[tuple[str, Check]]:
        found = (self.server, self.tokens, self.answers, self.cancels, self.salts)
        return [(check.__name__, check) for check in found]

    async def server(self) -> str:
        self.facts = facts = await self.engine.describe()
        self.engine.check_length(facts, self._max_model_len)
        blocks = f"{facts.num_blocks} blocks of {facts.block_tokens} tokens"
        return f"{self.engine.url}: vLLM {facts.version}, {facts.model}, {facts.max_model_len} positions, {blocks}"

    async def tokens(self) -> str:
        """Check that the server has the same tokenizer as the router, which encodes the prompts."""
        for text in TEXTS:
            if (found := await self.engine.tokenize(text)) != self._tokenizer.encode(text):
                raise ValueError(f"{text!r} has the ids {found[:8]}… on the server, others in --model: give its model")
        return f"{len(TEXTS)} texts have the same ids as in --model"

    async def answers(self) -> str:
        found = await resumes(self.engine)
        if "greedy" not in found:
            raise ValueError("greedy answers do not repeat: clients would see other tokens after a failover")
        return f"answers repeat and can be resumed: {found}"

    async def cancels(self) -> str:
        request, prompt = self.request(1, num=min(1000, self._max_model_len - LENGTH))
        async with aclosing(self.engine.generate(request, prompt)) as outputs:
            await anext(outputs)
        if await self.value("num_requests_running", lambda running: not running):
            raise ValueError(f"a request still runs {IDLE_S:g} s after its connection was closed")
        return "a request ends when its connection is closed"

    async def salts(self) -> str:
        """Check that prefixes are cached, and that tenants do not share them."""
        request, prompt = self.request(4)
        hits = []
        for salt in (request.salt, request.salt, secrets.token_bytes(16)):
            before = await self.value("prefix_cache_hits_total")
            await self.engine.collect(replace(request, salt=salt), prompt)
            hits.append(await self.value("prefix_cache_hits_total") - before)
        if hits[2]:
            raise ValueError(f"{hits[2]:g} tokens were shared between two salts: tenants share a cache")
        if not hits[1]:
            raise ValueError("prefix caching is off, so retries compute prompts again: use --enable-prefix-caching")
        return f"a request with the same salt reused {hits[1]:g} tokens of a prefix, one with another salt none"

    def request(self, num_blocks: int, num: int = LENGTH) -> tuple[SubmitRequest, list[int]]:
        """Return a request for `num` tokens, and its random prompt, which fills `num_blocks` blocks if these fit."""
        size = max(1, min(num_blocks * self.facts.block_tokens + 1, self._max_model_len - num))
        prompt = [secrets.randbelow(self.engine.vocab_size) for _ in range(size)]
        return replace(probe_request(prompt, num, temperature=0.0), salt=secrets.token_bytes(16)), prompt

    async def value(self, name: str, is_expected: Callable[[float], bool] = lambda _: True) -> float:
        """Read a metric until `is_expected` accepts its value, for at most IDLE_S seconds. Return the last value."""
        now = asyncio.get_running_loop().time
        end = now() + IDLE_S
        while True:
            value = (await self.engine.metrics()).get(name, 0.0)
            if is_expected(value) or now() > end:
                return value
            await asyncio.sleep(0.1)


async def same_kv(one: EngineExaminer, other: EngineExaminer) -> str:
    """Check that the KV of two servers has the same layout, and that both have a connector."""
    for name in ("version", "model", "block_tokens", "cache_dtype"):
        if (a := getattr(one.facts, name)) != (b := getattr(other.facts, name)):
            raise ValueError(f"{name} is {a} on {one.engine.url}, {b} on {other.engine.url}: it must be the same")
    for each in (one, other):
        if not await connector(each.engine):
            raise ValueError(
                f"{each.engine.url} has no KV connector: start it with --kv-transfer-config '{NIXL_CONFIG}'"
            )
    return "both have the NIXL connector and the same KV layout"


async def hands_over(prefill: EngineExaminer, decode: EngineExaminer) -> str:
    """Check that KV moves from `prefill` to `decode`, and that `prefill` alone would give the same answer."""
    request, prompt = prefill.request(4)
    before = await decode.value("nixl_bytes_transferred_sum")
    _, params = await prefill.engine.prefill(request, prompt, None)
    if await decode.engine.collect(request, prompt, params) != await prefill.engine.collect(request, prompt):
        raise ValueError("the answer after a handoff differs from that of one server")
    await decode.engine.collect(*decode.request(1, num=2))  # makes the server update its metrics
    moved = await decode.value("nixl_bytes_transferred_sum", lambda value: value > before) - before
    if moved <= 0:
        raise ValueError(f"no KV moved: {decode.engine.url} computed the prompt itself")
    return f"{moved:,.0f} bytes moved to {decode.engine.url} for {len(prompt)} tokens, with the same answer"
