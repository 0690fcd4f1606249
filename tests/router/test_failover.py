"""Test failover: which nodes are avoided, which work is repeated, and how many retries and deaths are allowed."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch import dispatcher as dispatch_module
from router.dispatch.failover import BURST_S, MAX_RETRY_WAIT_S, RETRIES_PER_S, RETRY_SHARE, RetryBudget
from router.nodes import pool as fleet_module
from router.nodes.health import EJECT_S, MAX_EJECT_S, MAX_FAILURES, OutlierDetector
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import TokenDelta
from tests.router.simulated import ANSWER, Stage, collect, generated, no_pauses, settle, stage, token, tokens_of

__all__ = ["no_pauses"]

# ---- which node is at fault, and which node still holds the prompt's KV ----------------------------------------------


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_the_loss_of_a_node_may_be_noticed_after_the_failed_handoff(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The surviving node reports first that the handoff failed. That report alone does not show which node died."""
    monkeypatch.setattr(dispatch_module, "NEWS_S", 30.0)
    here = stage("p0 p1 d0 d1")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    if victim == "decode":
        p.send(TokenDelta(submit.id, error="handoff: /baton.Decode/Commit: Connection lost", retry=True))
    else:
        d.send(TokenDelta(submit.id, error="handoff: the prefill node is gone", retry=True))
    await settle()
    assert len(here.sent()) == 1, "the router waits for a change of a node"
    (d if victim == "decode" else p).die()
    await settle()
    again, other, _ = here.attempt(1)
    if victim == "decode":
        assert again is p
        assert other is not d
    else:
        assert again is not p
    assert here.counts()["retried"] == 0, "the loss of a node is not counted as a retry"
    await run.close()
    here.check_over()


@pytest.mark.parametrize("lost", ["p0 d0", "d0 p0"])
@pytest.mark.parametrize("back", ["p0", "d0"])
async def test_after_the_loss_of_every_node_the_first_that_returns_gets_the_request(lost: str, back: str) -> None:
    here = stage("p0 d0", max_attempts=3)
    run = await here.submit()
    for name in lost.split():
        here.nodes[name].fall_silent()
        await settle()
    assert len(here.sent()) == 2
    node = here.nodes[back]
    node.revive()
    await settle()
    computes, generates, submit = here.attempt(2)
    assert (computes, generates) == (node, node)
    node.send(*generated(submit.id))
    assert tokens_of(await collect(run)) == ANSWER
    assert here.counts()["moved"] == 2
    here.check_over()


# ---- a request that kills nodes --------------------------------------------------------------------------------------


async def killed(here: Stage, num_generated: list[int], dies: Any) -> Any:
    """Submit a request. In attempt i, the node generates `num_generated[i]` tokens. Then call `dies` with the node."""
    run = await here.submit()
    position = 0
    for number, count in enumerate(num_generated):
        _, d, submit = here.attempt(number)
        for _ in range(count):
            d.send(token(submit.id, position))
            position += 1
        dies(d)
        await settle()
    return run


@pytest.mark.parametrize(
    ("num_generated", "together_s", "crashes"),
    [([0, 0], 0.0, 2), ([2, 0, 0], 0.0, 2), ([0, 0, 0], 60.0, 3)],
    ids=["at its prompt", "at its third token", "two at the same time and a third"],
)
async def test_a_request_that_crashed_nodes_is_not_retried(
    num_generated: list[int], together_s: float, crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.dispatch.failover.TOGETHER_S", together_s)
    here = stage("d0 d1 d2 d3", max_attempts=9)
    run = await killed(here, num_generated, lambda d: d.die())
    with pytest.raises(RequestError, match=f"{crashes} nodes died") as caught:
        await collect(run)
    assert (caught.value.code, caught.value.status) == ("poison", 422)
    assert len(here.sent()) == len(num_generated)
    here.check_over()


@pytest.mark.parametrize(
    ("num_generated", "dies"),
    [
        ([2, 0], lambda d: d.die()),
        ([0, 1], lambda d: d.die()),
        ([0, 0], lambda d: (d.die(), d.revive())),
        ([0, 0], lambda d: d.fall_silent()),
        ([0, 0], lambda d: d.die()),
        ([0, 0], lambda d: (setattr(d.stats, "state", "draining"), d.die())),
    ],
    ids=[
        "the first node produced tokens",
        "the second node produced tokens",
        "only connections were lost",
        "silent nodes",
        "two nodes died at the same time",
        "draining nodes",
    ],
)
async def test_two_losses_that_the_request_did_not_cause_do_not_end_it(num_generated: list[int], dies: Any) -> None:
    here = stage("d0 d1 d2 d3", max_attempts=9)
    run = await killed(here, num_generated, dies)
    _, d, submit = here.attempt(2)
    d.send(*generated(submit.id, sum(num_generated)))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


# ---- the retry budget ------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(acts=st.lists(st.tuples(st.sampled_from(["request", "retry", "retry"]), st.floats(0, 2)), max_size=200))
def test_retries_stay_within_the_budget(acts: list[tuple[str, float]]) -> None:
    budget, now, num_requests = RetryBudget(), 0.0, 0
    retries: list[float] = []
    refusals: list[float] = []
    for act, after_s in acts:
        now += after_s
        if act == "request":
            num_requests += 1
            budget.requested()
            continue
        try:
            retries.append(now + budget.take(now))
        except UnavailableError as refused:
            refusals.append(refused.retry_after_s)
    assert all(wait_s > MAX_RETRY_WAIT_S for wait_s in refusals)
    for number, at in enumerate(sorted(retries), 1):
        assert number <= RETRIES_PER_S * (BURST_S + at) + RETRY_SHARE * num_requests + 1e-6


def test_retries_wait_for_an_exhausted_budget() -> None:
    budget = RetryBudget()
    at_once = 0
    while budget.take(0.0) == 0.0:
        at_once += 1
    assert at_once == RETRIES_PER_S * BURST_S
    assert 0 < budget.take(0.0) <= 1.0
    assert budget.take(100.0) == 0.0
    waits = [budget.take(100.0) for _ in range(int(RETRIES_PER_S * (BURST_S + MAX_RETRY_WAIT_S)) - 1)]
    assert waits == sorted(waits)
    with pytest.raises(UnavailableError, match="Too many requests fail"):
        budget.take(100.0)


async def test_retries_on_a_busy_cluster_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatch.failover.MAX_RETRY_WAIT_S", 0.0)
    here = stage("d0 d1", max_attempts=9)
    for node in here.nodes.values():
        node.info.max_num_seqs = node.info.num_blocks = 1000
    here.fleet.notify()
    runs = [await here.submit(name=f"r{number}") for number in range(40)]
    num_sent = 0
    while len(here.sent()) > num_sent:
        num_sent = len(here.sent())
        for name, submit in here.sent():
            here.nodes[name].send(TokenDelta(submit.id, error="this node has 8192 requests: no more fit", retry=True))
        await settle()
    assert 40 + 30 <= num_sent <= 40 + 45, "each request is sent once, and retried within the budget"
    for run in runs:
        with pytest.raises(UnavailableError, match="fail on the nodes at once"):
            await collect(run)
    assert not any(here.fleet.outliers[name].times for name in here.nodes), "a busy node is not ejected"
    here.check_over()


# ---- nodes that fail -------------------------------------------------------------------------------------------------


def test_each_ejection_is_longer_until_the_node_is_healthy_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.nodes.health.EJECT_S", EJECT_S)  # undo the fixture's change
    monkeypatch.setattr("router.nodes.health.MAX_EJECT_S", MAX_EJECT_S)
    detector, now, times = OutlierDetector(), 0.0, []
    for _ in range(9):
        detector.died(now)
        times.append(detector.ejected_until - now)
        assert detector.is_ejected(now)
        now = detector.ejected_until + 5.0
        assert not detector.is_ejected(now)
    assert times == [min(MAX_EJECT_S, EJECT_S * 2**number) for number in range(9)]
    now += 61.0
    assert detector.is_forgotten(now)
    detector.died(now)
    assert detector.ejected_until - now == EJECT_S


def test_consecutive_failures_eject_a_node() -> None:
    detector = OutlierDetector()
    for number in range(MAX_FAILURES - 1):
        assert not detector.failed(float(number))
    detector.succeeded()
    assert not detector.failed(4.0)
    assert not any(detector.failed(20.0 * number) for number in range(1, 9)), "the failures are too far apart"
    assert not detector.is_forgotten(200.0)
    assert detector.is_forgotten(221.0), "failures are forgotten after a minute"
    fresh = OutlierDetector()
    assert [fresh.failed(0.1 * number) for number in range(MAX_FAILURES)] == [False] * (MAX_FAILURES - 1) + [True]
    assert fresh.is_ejected(1.0)
    assert not fresh.failed(1.5), "the count restarts after an ejection"


async def test_an_ejected_node_gets_no_requests_unless_all_are_ejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.nodes.health.EJECT_S", 1.0)
    here = stage("d0 d1")
    here.d0.die()
    here.d0.revive()
    await settle()
    assert here.fleet.routable()[1] == [here.d1]
    here.d1.die()
    assert here.fleet.routable()[1] == [here.d0], "every node is ejected"
    here.d1.revive()
    assert sorted(link.info.id for link in here.fleet.routable()[1]) == ["d0", "d1"], "every node is ejected"
    await asyncio.sleep(1.1)
    assert len(here.fleet.routable()[1]) == 2


@pytest.mark.parametrize(("names", "ejected"), [("d0 d1", "d1"), ("p0 d0 p1 d1", "p1")])
async def test_a_group_with_only_an_ejected_node_of_a_role_gets_no_requests_while_another_works(
    names: str, ejected: str
) -> None:
    here = stage(names)
    for name, node in here.nodes.items():
        attributes = {"computes_prompts": "no"} if "p0" in here.nodes and name.startswith("d") else {}
        node.info = replace(node.info, attributes=attributes, fingerprint=name[1:])
    here.nodes[ejected].die()
    here.nodes[ejected].revive()
    runs = [await here.submit(name=f"r{number}") for number in range(20)]
    assert not here.nodes[ejected].submits
    here.d0.die()
    await settle()
    assert len(here.nodes[ejected].submits) == 20, "no other group can generate"
    for run in runs:
        await run.close()
    here.check_over()


async def test_decode_nodes_compute_prompts_while_all_prefill_nodes_of_their_group_are_ejected() -> None:
    here = stage("p0 d0 p1 d1", disaggregate="always")
    here.p1.info, here.d1.info = (replace(each.info, fingerprint="new") for each in (here.p1, here.d1))
    here.p1.die()
    here.p1.revive()
    runs = [await here.submit(name=f"r{number}") for number in range(20)]
    assert not here.p1.submits
    assert here.p0.submits
    assert here.d1.submits
    for run in runs:
        await run.close()
    here.check_over()


async def test_requests_that_end_at_a_stop_string_show_that_their_nodes_work() -> None:
    here = stage("p0 " + " ".join(f"d{number}" for number in range(12)), disaggregate="always")
    for number in range(MAX_FAILURES):
        run = await here.submit(name=f"r{number}")
        run.enough(0)
        here.p0.send(TokenDelta(f"r{number}.0.0", error="handoff: no", retry=True))
        await settle()
        (decode,) = (each for each in here.nodes.values() if f"r{number}.0.1" in each.listeners and each is not here.p0)
        decode.send(TokenDelta(f"r{number}.0.1", handed_off=True), token(f"r{number}.0.1", 1))
        here.p0.send(token(f"r{number}.0.1", 0))
        await collect(run)
    assert not here.fleet.outliers["p0"].times
    here.check_over()


async def test_a_node_that_comes_back_gets_few_requests_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    here = stage("d0 d1")
    now = [1000.0]
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: now[0])
    for node in here.nodes.values():
        node.alive_since = 1.0
    d1 = here.d1
    d1.alive_since = now[0]
    here.fleet.connection_changed(d1)
    runs = []
    for number in range(6):
        here.d0.load.kv_tokens = 3000  # so that placement by load would choose the returned node
        runs.append(await here.submit(name=f"r{number}"))
    assert len(d1.submits) == 1
    now[0] += 5.0
    for number in range(6, 12):
        here.d0.load.kv_tokens = 3000
        runs.append(await here.submit(name=f"r{number}"))
    assert len(d1.submits) == 5, "half of the requests that it can run, and one more"
    now[0] += 6.0
    here.d0.load.kv_tokens = 3000
    runs.append(await here.submit(name="last"))
    assert d1.submits[-1].id == "last.0.0"
    monkeypatch.undo()
    for run in runs:
        await run.close()
