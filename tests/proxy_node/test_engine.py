"""Test the client of an engine against a stub of vLLM's API. With `-m exhaustive` and BATON_PEER_VLLM (see
benchmarks/peers/install.sh), also test it against vLLM itself."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from proxy_node.probe import resumes
from proxy_node.vllm import VllmEngine
from proxy_node.wire import EngineFailure
from shared.errors import ConfigError
from shared.lifecycle import wait_until
from shared.rpc.messages import SamplingParams, SubmitRequest, pack_ids
from tests.proxy_node.vllm import VLLM, vllm_server
from tests.proxy_node.vllm_stub import NUM_BLOCKS, VOCABULARY, VllmStub, answer

PROMPT = list(range(40, 80))
KINDS = ["stub", pytest.param("vllm", marks=[pytest.mark.exhaustive, pytest.mark.skipif(not VLLM, reason="no vLLM")])]


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Any:
    """Yield "" for a stub in the event loop of the test, or the URL of a vLLM server."""
    if request.param == "stub":
        yield ""
        return
    with vllm_server() as url:
        yield url


@asynccontextmanager
async def engine_at(url: str, key: str = "", **knobs: Any) -> AsyncIterator[tuple[VllmEngine, VllmStub]]:
    stub = VllmStub(**knobs)
    async with AsyncExitStack() as stack:
        engine = VllmEngine(url or await stack.enter_async_context(stub.serve()), key, VOCABULARY)
        await stack.enter_async_context(engine.open())
        yield engine, stub


def submission(max_tokens: int, *, stop: int | None = None, salt: bytes = b"", **sampling: Any) -> SubmitRequest:
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    stops = pack_ids([] if stop is None else [stop])
    return SubmitRequest("r", "router", b"", len(PROMPT), max_tokens, params, stop_tokens=stops, salt=salt)


async def outputs_of(engine: VllmEngine, submit: SubmitRequest, tokens: list[int]) -> tuple[list[int], str, list[Any]]:
    found: list[int] = []
    logprobs: list[Any] = []
    async with aclosing(engine.generate(submit, tokens)) as outputs:
        async for output in outputs:
            found += output.tokens
            logprobs += output.logprobs
    return found, output.finish, logprobs


async def test_an_engine_describes_itself_and_answers_token_ids(server: str) -> None:
    async with engine_at(server) as (engine, _):
        facts = await engine.describe()
        assert facts.block_tokens > 0
        assert facts.num_blocks > 1
        assert facts.max_model_len > 100
        assert "greedy" in await resumes(engine)
        whole, finish, _ = await outputs_of(engine, submission(30), PROMPT)
        assert (len(whole), finish) == (30, "length")
        if not server:
            assert whole == answer(PROMPT, 30)
        rest, _, _ = await outputs_of(engine, submission(30), PROMPT + whole[:12])
        assert rest == whole[12:], "a retry continues with the same tokens"
        metrics = await engine.metrics()
        assert metrics["iteration_tokens_total_count"] > 0


async def test_the_capacity_is_the_number_of_tokens_that_fit() -> None:
    async with engine_at("") as (engine, stub):
        for capacity, num_blocks in (("2097152", 131_073), ("1007", 63), ("None", NUM_BLOCKS)):
            stub.set({"capacity": capacity})
            assert (await engine.describe()).num_blocks == num_blocks


async def test_a_stop_token_is_the_last_one(server: str) -> None:
    async with engine_at(server) as (engine, _):
        await engine.describe()
        whole, _, _ = await outputs_of(engine, submission(30), PROMPT)
        stop = next(token for index, token in enumerate(whole) if index >= 5 and token not in whole[:index])
        cut, finish, _ = await outputs_of(engine, submission(30, stop=stop), PROMPT)
        assert (cut, finish) == (whole[: whole.index(stop) + 1], "stop")


async def test_logprobs_come_with_their_tokens(server: str) -> None:
    async with engine_at(server) as (engine, _):
        await engine.describe()
        tokens, _, logprobs = await outputs_of(engine, submission(6, logprobs=3), PROMPT)
        assert [row.token for row in logprobs] == tokens
        for row in logprobs:
            assert row.top_logprobs == sorted(row.top_logprobs, reverse=True)
            assert len(row.top_tokens) == 3
            assert row.token == row.top_tokens[row.rank - 1]
            assert row.logprob == row.top_logprobs[row.rank - 1]
        _, _, logprobs = await outputs_of(engine, submission(2, logprobs=0), PROMPT)
        assert [row.top_tokens for row in logprobs] == [[], []]


async def test_a_seed_repeats_and_another_seed_differs(server: str) -> None:
    async with engine_at(server) as (engine, _):
        await engine.describe()
        sampled = [
            (await outputs_of(engine, submission(20, temperature=1.5, seed=seed), PROMPT))[0] for seed in (1, 1, 2)
        ]
        assert sampled[0] == sampled[1] != sampled[2]


async def test_an_engine_drops_a_request_whose_reader_has_gone(server: str) -> None:
    async with engine_at(server, token_s=0.01) as (engine, stub):
        await engine.describe()
        async with aclosing(engine.generate(submission(1000), PROMPT)) as outputs:
            assert (await anext(outputs)).tokens
        idle = asyncio.get_running_loop().time() + 60
        while (await engine.metrics())["num_requests_running"]:
            assert asyncio.get_running_loop().time() < idle
            await asyncio.sleep(0.05)
        assert server or stub.dropped == 1


async def test_a_bad_request_has_the_words_of_the_engine(server: str) -> None:
    async with engine_at(server) as (engine, _):
        await engine.describe()
        with pytest.raises(EngineFailure, match="vocabulary") as failure:
            await outputs_of(engine, submission(3), [VOCABULARY + 7])
        assert (failure.value.status, failure.value.retry, failure.value.is_suspicious) == (400, False, False)


async def test_resumed_draws_are_recognised_and_answers_that_do_not_repeat() -> None:
    async with engine_at("") as (engine, stub):
        await engine.describe()
        assert await resumes(engine) == "greedy, seeded"
        stub.set({"resumes_seeded": False})
        assert await resumes(engine) == "greedy"
        stub.set({"repeats": False})
        assert await resumes(engine) == "none"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"engines": 2}, "data-parallel"),
        ({"block_size": 0}, "lacks vllm:cache_config_info; Baton needs a vLLM server of version 0.19"),
        ({"token_ids": False}, "no token ids; Baton needs a vLLM server of version 0.19"),
    ],
)
async def test_an_engine_that_cannot_serve_is_refused_with_the_reason(knobs: dict[str, Any], words: str) -> None:
    async with engine_at("", **knobs) as (engine, _):

        async def probe() -> None:
            await engine.describe()
            await resumes(engine)

        with pytest.raises(ConfigError, match=words):
            await probe()


async def test_another_vocabulary_is_refused() -> None:
    async with engine_at("") as (engine, _):
        engine.vocab_size = VOCABULARY + 1
        await engine.describe()
        with pytest.raises(ConfigError, match="vocabulary is not that of --model, which has 2049 tokens"):
            await resumes(engine)


async def test_a_wrong_key_names_the_flag_and_is_not_shown() -> None:
    async with engine_at("", key="wrong") as (engine, stub):
        stub.set({"key": "secret"})
        with pytest.raises(EngineFailure, match="--engine-api-key-file") as failure:
            await engine.describe()
        assert "wrong" not in str(failure.value)
        stub.set({"key": "wrong"})
        assert (await engine.describe()).model == "stub"


@pytest.mark.parametrize(
    ("knob", "retry", "is_suspicious", "fault"),
    [
        ("refuse_503", True, True, None),
        ("refuse_500", True, True, None),
        ("refuse_429", True, False, None),
        ("truncate", True, True, "refused"),
        ("error_event", False, True, None),
        ("abort", True, False, "refused"),
        ("bad_json", True, False, "malformed"),
        ("bad_id", True, False, "malformed"),
        ("bad_type", True, False, "malformed"),
        ("long_line", True, False, "malformed"),
        ("too_many", True, False, "malformed"),
    ],
)
async def test_each_fault_of_an_engine_is_classified(
    knob: str, retry: bool, is_suspicious: bool, fault: str | None
) -> None:
    async with engine_at("", **{knob: 1}) as (engine, _):
        with pytest.raises(EngineFailure) as failure:
            await outputs_of(engine, submission(20), PROMPT)
        found = failure.value
        assert (found.retry, found.is_suspicious, found.fault) == (retry, is_suspicious, fault), found
        tokens, _, _ = await outputs_of(engine, submission(20), PROMPT)
        assert tokens == answer(PROMPT, 20)


async def test_a_slow_engine_is_not_gone_and_a_dead_one_is() -> None:
    stub = VllmStub(metrics_s=30.0)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(stub.serve())
        engine = VllmEngine(url, "", VOCABULARY)
        await stack.enter_async_context(engine.open())
        assert await engine.is_gone() is None
        stub.set({"metrics_s": 0.0})
        assert await engine.is_gone() is False
        stub.set({"is_unhealthy": True})
        assert await engine.is_gone()
    async with (dead := VllmEngine(url, "", VOCABULARY)).open():
        assert await dead.is_gone()
        with pytest.raises(EngineFailure) as failure:
            await dead.metrics()
        assert failure.value.is_suspicious


async def test_a_deeply_nested_error_is_a_failure_of_the_engine() -> None:
    class NestedStub(VllmStub):
        async def _health(self, _: web.Request) -> web.Response:
            return web.Response(status=500, text="[" * 60_000)

    async with NestedStub().serve() as url, (engine := VllmEngine(url, "", VOCABULARY)).open():
        assert await engine.is_gone() is None


async def test_one_engine_may_have_several_descriptions_of_its_cache() -> None:
    """With several API servers, vLLM may keep the metrics of an earlier start in PROMETHEUS_MULTIPROC_DIR."""

    class RestartedStub(VllmStub):
        async def _metrics(self, request: web.Request) -> web.Response:
            text = (await super()._metrics(request)).text or ""
            return web.Response(text=text.replace('num_gpu_blocks="', 'num_gpu_blocks="1') + text)

    async with RestartedStub().serve() as url, (engine := VllmEngine(url, "", VOCABULARY)).open():
        assert (await engine.describe()).block_tokens == 16


async def test_many_requests_run_at_once() -> None:
    async with engine_at("", tokens_per_event=3) as (engine, stub):
        prompts = [[5 + index] * len(PROMPT) for index in range(40)]
        found = await asyncio.gather(*(outputs_of(engine, submission(50), prompt) for prompt in prompts))
        assert [tokens for tokens, _, _ in found] == [answer(prompt, 50) for prompt in prompts]
        assert await wait_until(lambda: stub.running == 0, 60.0)


def test_the_environment_has_no_say_in_how_engines_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert os.environ["http_proxy"]

    async def describe() -> str:
        async with engine_at("") as (engine, _):
            return (await engine.describe()).version

    assert asyncio.run(describe()) == "0.32.0"
