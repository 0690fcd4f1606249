"""Test proxy nodes of SGLang servers, against a stub of their API. No proxy node has been tested with a real SGLang."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy_node.probe import resumes
from proxy_node.sglang import SglangEngine, generate_body
from proxy_node.vllm import VllmEngine
from proxy_node.wire import EngineFailure
from shared.errors import ConfigError
from shared.rpc.messages import SamplingParams, SubmitRequest, pack_ids
from tests.proxy_node.clusters import Act, freeze_engine, kill_engine, lose, serving
from tests.proxy_node.sglang_stub import SglangStub
from tests.proxy_node.vllm_stub import VOCABULARY, answer

PROMPT = list(range(40, 80))
NODES = ("decode-0", "decode-1")


@asynccontextmanager
async def engine_at(**knobs: Any) -> AsyncIterator[tuple[SglangEngine, SglangStub]]:
    stub = SglangStub(**knobs)
    async with AsyncExitStack() as stack:
        engine = SglangEngine(await stack.enter_async_context(stub.serve()), "", VOCABULARY)
        await stack.enter_async_context(engine.open())
        yield engine, stub


def submission(max_tokens: int, stop: int | None = None, **sampling: Any) -> SubmitRequest:
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    stops = pack_ids([] if stop is None else [stop])
    return SubmitRequest("r", "router", b"", len(PROMPT), max_tokens, params, stop_tokens=stops, salt=b"\xffs")


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_answers_are_whole_whether_or_not_events_repeat_them(is_incremental: bool) -> None:
    expected = answer(PROMPT, 30)
    async with engine_at(is_incremental=is_incremental) as (engine, _):
        for submit, count, finish in (
            (submission(30, logprobs=2), 30, "length"),
            (submission(30, stop=expected[11], logprobs=0), 1 + expected.index(expected[11]), "stop"),
        ):
            tokens, logprobs = [], []
            async with aclosing(engine.generate(submit, PROMPT)) as outputs:
                async for output in outputs:
                    tokens += output.tokens
                    logprobs += output.logprobs
            assert (tokens, output.finish) == (expected[:count], finish)
            assert [(row.token, row.logprob, row.rank) for row in logprobs] == [
                (token, -1.5, 2 if submit.sampling.logprobs else 1) for token in tokens
            ]
        resumed = await engine.collect(submission(30), PROMPT + expected[:10])
        assert resumed == expected[10:]


async def test_an_engine_describes_itself_and_its_load() -> None:
    async with engine_at(resumes_seeded=False) as (engine, stub):
        facts = await engine.describe()
        assert (facts.kind, facts.version, facts.block_tokens, facts.num_blocks) == ("sglang", "0.5.23", 16, 4096)
        assert (await resumes(engine), facts.connector, facts.role) == ("greedy", "", "")
        stub.running = 3
        first = await engine.metrics()
        assert first["num_requests_running"] == 3
        stub.set({"has_metrics": False})
        assert (await engine.metrics()) == {"iteration_tokens_total_count": first["iteration_tokens_total_count"] + 1}
        stub.set({"is_unhealthy": True})
        with pytest.raises(EngineFailure):
            await engine.metrics()
        assert await engine.is_gone()


async def test_a_server_that_restarts_without_its_mode_works_alone() -> None:
    async with engine_at(disaggregation_mode="prefill") as (engine, stub):
        assert (await engine.describe()).role == "prefill"
        assert engine.offer()
        stub.set({"disaggregation_mode": "null"})
        assert (await engine.describe()).role == ""
        assert engine.offer() is None
        assert await engine.collect(submission(5), PROMPT) == answer(PROMPT, 5)


async def test_a_server_of_another_kind_is_refused() -> None:
    async with engine_at() as (engine, _):
        vllm = VllmEngine(engine.url, "", VOCABULARY)
        async with vllm.open():
            with pytest.raises(ConfigError, match="not a server of vLLM"):
                await vllm.describe()


@pytest.mark.parametrize(
    ("fault", "retry", "suspicious"), [("truncate", True, True), ("error_event", False, True), ("abort", True, False)]
)
async def test_a_failed_answer_says_whether_another_node_may_succeed(fault: str, retry: bool, suspicious: bool) -> None:
    async with engine_at(**{fault: 1}) as (engine, _):
        with pytest.raises(EngineFailure) as failure:
            await engine.collect(submission(30), PROMPT)
        assert (failure.value.retry, failure.value.is_suspicious) == (retry, suspicious)


def test_the_fields_of_a_request_are_those_of_sglang() -> None:
    submit = submission(30, temperature=0.7, top_k=0, seed=5, logit_bias={7: 1.5}, logprobs=3)
    submit.min_tokens = 4
    body = generate_body(submit, [*PROMPT, 9, 9])
    params = body["sampling_params"]
    assert body["input_ids"] == [*PROMPT, 9, 9]
    assert (params["max_new_tokens"], params["min_new_tokens"], params["top_k"]) == (28, 2, -1)
    assert (params["sampling_seed"], params["logit_bias"], body["extra_key"]) == (5, {"7": 1.5}, "ff73")
    assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 3)
    with pytest.raises(ValueError, match="allowed_token_ids"):
        SglangEngine("", "", VOCABULARY).generate(submission(3, allowed_tokens=pack_ids([1])), PROMPT)


@pytest.mark.parametrize("act", [kill_engine, pytest.param(freeze_engine, marks=pytest.mark.exhaustive)])
def test_no_client_sees_the_loss_of_a_replica(tmp_path: Path, act: Act) -> None:
    with serving(tmp_path, NODES, "sglang") as (running, engines):
        assert running.nodes()["decode-0"]["facts"]["engine"] == "sglang 0.5.23"
        lose(running, engines, act, NODES[0], 0)
