"""Test pairs of SGLang servers, prefill and decode, against a stub of their protocol. No proxy node has been
tested with a real SGLang."""

import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from proxy_node.connectors import BootstrapParams
from proxy_node.sglang import SglangEngine
from shared.rpc.messages import AcceptRequest, SamplingParams, SubmitRequest
from tests.cluster.harness import Cluster, completion, wait_for
from tests.engine.build import thinned
from tests.node.harness import submission
from tests.proxy_node.clusters import Act, Engines, freeze_engine, kill_engine, kill_proxy, lose, repair, serving
from tests.proxy_node.harness import Running, running
from tests.proxy_node.sglang_stub import SglangStub
from tests.proxy_node.vllm_stub import answer

PROMPT = list(range(50, 90))
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
BOOTSTRAP = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}


@asynccontextmanager
async def pair(**knobs: Any) -> AsyncIterator[tuple[Running, Running]]:
    options: dict[str, Any] = {"kind": (SglangStub, SglangEngine)} | knobs
    async with (
        running(role="prefill", disaggregation_mode="prefill", **options) as prefill,
        running(role="decode", disaggregation_mode="decode", **options) as decode,
    ):
        yield prefill, decode


def handed(decode: Running, name: str, count: int, **more: Any) -> SubmitRequest:
    return submission(name, PROMPT, count, decode_node=decode.address, **more)


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_the_answer_is_that_of_one_server(is_incremental: bool) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, logprobs=2)
    async with pair(is_incremental=is_incremental) as (prefill, decode):
        expected = answer(PROMPT, 12, "seed 5")
        stops = expected[0].to_bytes(4, "little")
        for name, count, options in (("a", 12, {}), ("b", 1, {}), ("c", 9, {"stop_tokens": stops})):
            prefill.line.submit(handed(decode, name, count, sampling=sampling, min_tokens=0, **options))
            await decode.until(lambda name=name: decode.line.finishes(name))
            await prefill.line.ends(name)
            assert decode.line.tokens(name) == expected[: 12 if name == "a" else 1]
        assert not prefill.line.deltas
        rows = [row.token for delta in decode.line.deltas for row in delta.logprobs]
        assert rows == [*expected, expected[0], expected[0]]
        assert decode.line.finishes("b") + decode.line.finishes("c") == ["length", "stop"]
        assert [event.reason for event in prefill.line.events("a") if event.kind == "ended"] == ["handed_off"]
        assert (prefill.node.stats().handoffs, prefill.node.stats().handoffs_failed) == (3, 0)
        bodies = [here.stub.calls[0] for here in (prefill, decode)]
        assert len({body["bootstrap_room"] for body in bodies}) == 1
        assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [1, 12]
        assert len(set(decode.stub.used_rooms)) == 3
        assert not prefill.stub.aborted | decode.stub.aborted, "only requests that are given up are aborted"


@pytest.mark.parametrize("fault", ["refuse_503", "no_transfer", "cut_prompt"])
async def test_a_failed_prefill_ends_the_wait_of_the_decode_server_at_once(fault: str) -> None:
    """Without an abort, the decode server would wait for 300 s, or generate from incomplete KV."""
    async with pair() as (prefill, decode):
        prefill.stub.set({fault: 1})
        prefill.line.submit(handed(decode, "a", 20))
        await prefill.until(prefill.line.errors)
        decode.line.abort("a")  # as a router does after the error
        await decode.until(lambda: decode.stub.aborted and not decode.stub.num_waiting)
        assert not decode.line.deltas
        [(error, retry)] = prefill.line.errors()
        assert error.startswith("handoff: ") is (fault == "no_transfer")
        assert retry is (fault != "cut_prompt")
        assert prefill.node.stats().handoffs_failed == (fault == "no_transfer")
        assert not prefill.node.lost.done()
        prefill.line.submit(handed(decode, "b", 20))
        await decode.until(lambda: decode.line.finishes("b"))
        assert decode.line.tokens("b") == answer(PROMPT, 20)


async def test_an_abort_reaches_both_servers_while_they_wait_for_each_other() -> None:
    async with pair() as (prefill, decode):
        prefill.line.submit(handed(decode, "a", 900))
        await decode.until(lambda: decode.line.tokens("a"))
        decode.stub.set({"is_stalled": True})
        prefill.line.submit(submission("b", PROMPT, 20, decode_node="127.0.0.1:9"))
        await prefill.until(lambda: prefill.line.errors())
        assert len(prefill.stub.calls) == 1, "the prefill server does not wait for a decode node that is not there"
        prefill.stub.set({"token_s": 60.0})
        prefill.line.submit(handed(decode, "c", 20))
        await decode.until(lambda: decode.stub.num_waiting and prefill.stub.num_waiting)
        for name in ("a", "c"):
            prefill.line.abort(name)
            decode.line.abort(name)
        await decode.until(lambda: not decode.stub.num_waiting and not prefill.stub.num_waiting)
        await decode.until(lambda: len(decode.stub.aborted) == 2)
        assert not decode.line.errors()


async def test_an_abort_may_reach_the_decode_node_before_the_handoff() -> None:
    """A prefill node hands over late, for example after a freeze, when the router has already given up the request."""
    async with pair() as (prefill, decode):
        decode.line.abort("a")
        await decode.until(decode.line.commands.empty)
        prefill.line.submit(handed(decode, "a", 20))
        await prefill.until(lambda: prefill.line.errors() or decode.stub.calls)
        assert not decode.stub.calls


async def test_a_decode_server_that_gets_no_kv_fails_the_handoff() -> None:
    async with pair(waiting_s=0.5) as (prefill, decode):
        prefill.stub.set({"lost_push": 1})
        prefill.line.submit(handed(decode, "a", 20))
        await decode.until(lambda: decode.line.errors())
        [(error, retry)] = decode.line.errors()
        assert error.startswith("handoff: ") and "TimeoutError" in error and retry  # noqa: PT018
        await prefill.stop()
        prefill.line.submit(handed(decode, "b", 20))
        await prefill.until(lambda: prefill.node.lost.done())
        decode.line.abort("b")  # as a router does when it notices the loss of the node
        await decode.until(lambda: not decode.stub.num_waiting)


async def test_a_server_of_a_pair_does_not_work_alone() -> None:
    async with pair() as (prefill, decode):
        for here, role in ((prefill, "prefill"), (decode, "decode")):
            here.line.submit(submission("a", PROMPT, 9))
            await here.until(here.line.errors)
            [(error, retry)] = here.line.errors()
            assert "without bootstrap room id" in error and not retry  # noqa: PT018
            engine = SglangEngine(here.url, "", 2048, "10.0.0.1")
            async with engine.open():
                facts = await engine.describe()
            assert (facts.role, facts.connector, facts.resumes) == (role, "sglang mooncake", "greedy, seeded")
            assert (engine.offer() or {}).get("bootstrap_host") == ("10.0.0.1" if role == "prefill" else None)


async def test_the_proxies_refuse_what_they_cannot_hand_over() -> None:
    assert BootstrapParams.read(BOOTSTRAP) == BOOTSTRAP
    for wrong in (
        None, [], {}, BOOTSTRAP | {"rid": "x"}, BOOTSTRAP | {"bootstrap_host": ""}, BOOTSTRAP | {"bootstrap_port": "1"},
        BOOTSTRAP | {"bootstrap_port": 70_000}, BOOTSTRAP | {"bootstrap_room": 0}, BOOTSTRAP | {"bootstrap_room": 2**63},
        BOOTSTRAP | {"bootstrap_room": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="KV transfer parameters"):
            BootstrapParams.read(wrong)
    async with pair() as (prefill, decode):
        message = AcceptRequest(submission("a", PROMPT, 9), b'{"do_remote_prefill": true}', 1000)
        assert "bootstrap_host" in (await decode.node.accept(message)).error
        limited = SamplingParams(temperature=0.0, allowed_tokens=bytes(4))
        prefill.line.submit(replace(handed(decode, "b", 9), sampling=limited))
        await prefill.until(prefill.line.errors)
        assert "allowed_token_ids" in prefill.line.errors()[0][0]
        assert decode.stub.calls == []


# ---- clusters ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Engines]]:
    with serving(tmp_path_factory.mktemp("engines"), NODES, "sglang", in_pairs=True) as cluster:
        yield cluster


def pairs(engines: Engines, name: str) -> dict[str, int]:
    found: dict[str, int] = engines.get(name, "pairs")
    return found


def test_prompts_are_computed_by_one_server_and_answers_by_the_other(served: tuple[Cluster, Engines]) -> None:
    cluster, _ = served
    for index in range(6):
        prompt = [index, *range(60)]
        assert cluster.complete(prompt, 12) == answer(prompt, 12)
    body = completion(cluster.model, PROMPT, 20, n=2, logprobs=2)
    choices = cluster.post("/v1/completions", body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [answer(PROMPT, 20)] * 2
    wait_for(lambda: cluster.status()["handoffs"] >= 8, "each sample is handed off")
    assert cluster.status()["placements"].keys() == {"disaggregated"}
    facts = [cluster.nodes()[name]["facts"] for name in ("prefill-0", "decode-0")]
    assert [each["connector"] for each in facts] == ["sglang mooncake"] * 2
    assert (facts[0]["generates"], facts[1]["computes_prompts"]) == ("no", "no")


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
@pytest.mark.parametrize("act", thinned([kill_engine, freeze_engine, kill_proxy], 2), ids=lambda act: act.__name__)
def test_no_client_sees_the_loss_of_either_side(served: tuple[Cluster, Engines], act: Act, name: str) -> None:
    cluster, engines = served
    lose(cluster, engines, act, name, 0)
    for each in NODES:
        wait_for(lambda each=each: pairs(engines, each)["waiting"] == 0, "no server waits for another")
        assert pairs(engines, each)["reused"] == 0


@pytest.mark.parametrize("fault", ["refuse_503", "no_transfer", "lost_push"])
def test_no_client_sees_a_failed_handoff(served: tuple[Cluster, Engines], fault: str) -> None:
    cluster, engines = served
    for name in NODES:
        engines.set(name, waiting_s=5.0 if fault == "lost_push" else 300.0)
    for name in NODES[:2]:
        engines.set(name, **{fault: 1})
    for index in range(4):
        prompt = [700 + index, *range(30)]
        assert cluster.complete(prompt, 12) == answer(prompt, 12)
    for name in NODES:
        wait_for(lambda name=name: pairs(engines, name)["waiting"] == 0, "no server waits")


def test_without_prefill_nodes_requests_are_refused_until_one_is_back(served: tuple[Cluster, Engines]) -> None:
    cluster, engines = served
    for name in NODES[:2]:
        kill_engine(cluster, engines, name)
    wait_for(lambda: cluster.alive("router") == set(NODES[2:]), "the prefill nodes are lost")
    with pytest.raises(urllib.error.HTTPError) as failure:
        cluster.complete(PROMPT, 5)
    assert failure.value.code == 503
    assert '"no_prefill_node"' in failure.value.read().decode()
    engines.start("prefill-1")
    repair(cluster, engines, "prefill-0")
    assert cluster.complete(PROMPT, 5) == answer(PROMPT, 5)


@pytest.mark.parametrize(
    ("mode", "role"), thinned([("decode", "prefill"), ("prefill", "decode"), ("null", "prefill")], 3)
)
def test_the_role_must_be_that_of_the_server(served: tuple[Cluster, Engines], mode: str, role: str) -> None:
    _, engines = served
    engines.set("decode-0", disaggregation_mode=mode)
    found = engines.refusal(engines.urls["decode-0"], "--engine-kind", "sglang", "--role", role)
    engines.set("decode-0", disaggregation_mode="decode")
    assert f"--disaggregation-mode {role}" in found
