from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from compare.arms import parse_arm, parse_arms
from compare.endpoint import Endpoint, EndpointError, is_idle
from compare.load.outcome import LoadRecording, Outcome
from compare.run.equivalence import check_parity, different_answers, different_tokens, facts_of, work_differences
from dashboard.routes import MAX_LAST_S
from tests.compare.reports import recording

ARMS = parse_arms(["colocated:2", "disaggregated:1p1d"])


def status(*nodes: dict[str, Any]) -> dict[str, Any]:
    usual = {"fingerprint": "abc", "block_tokens": 16, "block_bytes": 64, "blocks": {"total": 100}, "facts": {}}
    usual |= {"alive": True}
    return {"nodes": [usual | node for node in nodes]}


def facts_by_arm(first: dict[str, str], second: dict[str, str]) -> dict[str, dict[str, str]]:
    return {ARMS[0].name: first, ARMS[1].name: second}


def test_facts_are_those_of_all_nodes_that_are_alive():
    nodes = {"facts": {"dtype": "float32", "torch": "2"}}, {"facts": {"dtype": "bfloat16"}}
    nodes += ({"facts": {"dtype": "float16"}, "alive": False},)
    facts = facts_of(Endpoint("http://x"), status(*nodes))
    assert (facts["dtype"], facts["torch"]) == ("bfloat16 | float32", "2 | unknown")
    assert (facts["num_blocks"], facts["devices"]) == ("100", "2")


def test_an_undeclared_difference_forbids_the_comparison():
    assert check_parity(ARMS, facts_by_arm({"dtype": "float32"}, {"dtype": "float32"})).problems == []
    found = check_parity(ARMS, facts_by_arm({"num_blocks": "100"}, {"num_blocks": "120"}))
    assert not found.equal
    assert found.problems == ["not comparable: num_blocks differs (colocated:2: 100, disaggregated:1p1d: 120)"]
    assert not check_parity(ARMS, facts_by_arm({"torch": "2.13"}, {})).equal
    assert check_parity(ARMS, facts_by_arm({"torch": "2.13"}, {"torch": "2.14"}), ["torch"]).equal


def test_only_settings_that_differ_between_arms_are_declared():
    arms = [parse_arm("colocated:2"), parse_arm("colocated:2@prefill_first,max_num_batched_tokens=64")]
    one = {"policy": "stall_free", "max_num_batched_tokens": "512", "max_step_tokens": "512", "threads": "1"}
    other = {"policy": "prefill_first", "max_num_batched_tokens": "64", "max_step_tokens": "64", "threads": "1"}
    found = check_parity(arms, {arms[0].name: one, arms[1].name: other})
    assert found.equal
    differing = [fact["fact"] for fact in found.facts if not fact["equal"]]
    assert differing == ["policy", "max_num_batched_tokens", "max_step_tokens"]
    arms = parse_arms(["colocated:2", "disaggregated:1p1d"], ["max_num_seqs=8"])
    assert not check_parity(arms, facts_by_arm({"max_num_seqs": "8"}, {"max_num_seqs": "9"})).equal


def test_a_stack_other_than_baton_cannot_be_verified():
    facts = facts_by_arm(facts_of(Endpoint("http://x"), status({})), facts_of(Endpoint("http://y"), None))
    assert any("engine" in problem for problem in check_parity(ARMS, facts).problems)


def test_different_answers_are_listed():
    assert different_answers({"a": [[1, 2], [3]], "b": [[1, 2], [3]]}) == []
    lines = different_answers({"a": [[1, 2], [3]], "b": [[1, 2], [4]]})
    assert lines == ["b answers greedy prompt 1 with [4]..., a with [3]..."]


def test_idle_means_nothing_running_and_all_blocks_free():
    blocks = {"free": 3, "cached": 1, "owned": 0, "reserved": 0, "quarantined": 0}
    node = {"alive": True, "running": 0, "waiting": 0, "blocks": blocks}
    assert is_idle({"requests": {"running": 0}, "nodes": [node]})
    assert not is_idle({"requests": {"running": 1}, "nodes": [node]})
    assert not is_idle({"requests": {"running": 0}, "nodes": [node | {"waiting": 1}]})
    assert not is_idle({"requests": {"running": 0}, "nodes": [node | {"blocks": blocks | {"reserved": 1}}]})


# ---- equal answers -------------------------------------------------------------------------------------------------


def test_every_request_that_two_arms_finished_is_compared():
    assert different_tokens({"a": recording([1], [2, 3]), "b": recording([1], [2, 3])}) == (2, [])
    count, different = different_tokens({"a": recording([1], [2, 3]), "b": recording([1], [2, 4]), "c": recording([1])})
    assert count == 2
    assert different == [{"index": 1, "arms": ["a", "b"]}]
    assert different_tokens({"a": recording([1]), "b": recording([2], error="timeout")}) == (0, [])


def with_lengths(*counts: tuple[int, int]) -> LoadRecording:
    """Return a recording. `counts` has each request's number of prompt tokens and number of answer tokens."""
    return LoadRecording(
        outcomes=[
            Outcome(index, f"r{index}", 0.0, token_s=[0.1] * answer, finish="stop", prompt_tokens=prompt)
            for index, (prompt, answer) in enumerate(counts)
        ]
    )


PROMPTS = "not the same work: 1 of 2 prompts have different lengths in the arms"
ANSWERS = "answers have different lengths in the arms, by"


@pytest.mark.parametrize(
    ("one", "other", "problem", "note"),
    [
        ([(10, 20)], [(10, 20)], "", ""),
        ([(0, 20)], [(10, 20)], "", ""),  # an arm that does not report the number of prompt tokens
        ([(10, 20), (11, 20)], [(10, 20), (12, 20)], PROMPTS, ""),
        ([(10, 20)] * 2, [(10, 20), (10, 15)], f"not the same work: 1 of 2 {ANSWERS} 12.5% of the tokens", ""),
        ([(10, 20), (10, 15)], [(10, 15), (10, 20)], f"not the same work: 2 of 2 {ANSWERS} 25.0% of the tokens", ""),
        ([(10, 500)] * 2, [(10, 500), (10, 501)], "", f"1 of 2 {ANSWERS} 0.1% of the tokens"),
    ],
)
def test_arms_must_do_the_same_work(
    one: list[tuple[int, int]], other: list[tuple[int, int]], problem: str, note: str
) -> None:
    """`one` and `other` have each request's number of prompt tokens and number of answer tokens."""
    ours, theirs = with_lengths(*one), with_lengths(*other)
    assert work_differences([{"a": ours, "b": theirs}, {}]) == (problem, note)
    for outcome in theirs.outcomes:
        outcome.error = "timeout"
    assert work_differences([{"a": ours, "b": theirs}]) == ("", ""), "failed requests are not compared"


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"choices": [], "data": [{}]}', '{"choices": 1, "data": 1}'])
async def test_an_answer_that_is_not_openai_is_an_error_of_the_endpoint(body: str) -> None:
    async def answer(_: object) -> web.Response:
        return web.Response(text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        endpoint = Endpoint(str(server.make_url("")))
        with pytest.raises(EndpointError, match="answers without a completion"):
            await endpoint.complete([1], 1, "")
        with pytest.raises(EndpointError, match="is it an OpenAI API"):
            await endpoint.connect()
        await endpoint.close()


async def test_a_period_may_be_longer_than_the_longest_trace() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=200 if float(request.query["last"].removesuffix("s")) <= MAX_LAST_S else 400)

    app = web.Application()
    app.router.add_get("/trace", answer)
    async with TestServer(app) as server:
        endpoint = Endpoint(str(server.make_url("")))
        assert await endpoint.trace(MAX_LAST_S + 100) == b""
        await endpoint.close()


async def test_the_status_has_the_nodes_and_counts_of_the_measured_model_only() -> None:
    requests = {"a": {"running": 0}, "b": {"running": 7}}
    nodes = [{"id": "0", "model": "a"}, {"id": "1", "model": "b"}]
    models = {name: {"requests": counts} for name, counts in requests.items()}
    answers = {
        "/v1/models": {"data": [{"id": "a"}, {"id": "b"}]},
        "/v1/status": {"nodes": nodes, "requests": {"running": 7}, "models": models},
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers[request.path])

    app = web.Application()
    app.router.add_get("/v1/{path:.*}", answer)
    async with TestServer(app) as server:
        endpoint = Endpoint(str(server.make_url("")))
        await endpoint.connect()
        status = await endpoint.status()
        assert (status["nodes"], status["requests"]) == (nodes[:1], requests["a"])
        await endpoint.close()


def test_only_prompts_that_fit_every_arm_are_compared() -> None:
    assert different_answers({"long": [[1], [2]], "short": [[1]]}) == []
    assert len(different_answers({"short": [[1]], "long": [[3], [2]]})) == 1
