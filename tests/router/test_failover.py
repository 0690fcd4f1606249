"""Failover: which node is blamed, which work is repeated, and how many retries and node deaths a request may cause."""

import asyncio
import signal
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch import dispatcher as dispatch_module
from router.dispatch.failover import BURST_S, MAX_RETRY_WAIT_S, RETRIES_PER_S, RETRY_SHARE, RetryBudget
from router.nodes.health import EJECT_S, MAX_EJECT_S, MAX_FAILURES, OutlierDetector
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import TokenDelta
from tests.cluster.harness import cluster, expected, wait_for
from tests.router.played import ANSWER, Stage, collect, generated, no_pauses, stage, token, tokens_of, turns

__all__ = ["no_pauses"]

# ---- which node is at fault, and which node still holds the prompt's KV ----------------------------------------------


async def test_when_the_decode_node_dies_the_prompt_goes_back_to_the_node_that_holds_it() -> None:
    here = stage("p0 p1 d0 d1")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    other = here.p1 if p is here.p0 else here.p0
    p.load.outstanding_tokens += 5000  # so that placement by load would choose the other node
    p.say(token(submit.id, 0))
    d.say(TokenDelta(submit.id, 1, handed_off=True), token(submit.id, 1))
    d.die()
    await turns()
    again, elsewhere, submit = here.attempt(1)
    assert (again, elsewhere is d, other.submits) == (p, False, [])
    p.say(token(submit.id, 2))
    elsewhere.say(TokenDelta(submit.id, 3, handed_off=True), *generated(submit.id, 3))
    assert tokens_of(await collect(run)) == ANSWER
    p.load.outstanding_tokens -= 5000
    here.check_over()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_the_news_of_who_died_may_come_after_the_failed_handoff(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The surviving node reports first that the handoff failed. That report alone does not show which node died."""
    monkeypatch.setattr(dispatch_module, "NEWS_S", 30.0)
    here = stage("p0 p1 d0 d1")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    if victim == "decode":
        p.say(TokenDelta(submit.id, error="handoff: /baton.Decode/Commit: Connection lost", retry=True))
    else:
        d.say(TokenDelta(submit.id, error="handoff: the prefill node is gone", retry=True))
    await turns()
    assert len(here.sent()) == 1, "it waits for the news"
    (d if victim == "decode" else p).die()
    await turns()
    again, elsewhere, _ = here.attempt(1)
    if victim == "decode":
        assert again is p
        assert elsewhere is not d
    else:
        assert again is not p
    assert here.counts()["retried"] == 0, "a node died: that is no retry"
    await run.close()
    here.check_over()


async def test_a_handoff_that_fails_between_two_living_nodes_is_tried_with_another_decode_node_then_another_prefill_node() -> (
    None
):
    here = stage("p0 p1 d0 d1 d2", max_attempts=9)
    run = await here.submit()
    pairs = []
    for number in range(3):
        p, d, submit = here.attempt(number)
        pairs.append((p.info.id, d.info.id))
        p.say(TokenDelta(submit.id, error="handoff: checksums differ", retry=True))
        await turns()
    first, second, third = pairs
    assert first[0] == second[0] != third[0], "the blocks are there, until the node itself is the likelier cause"
    assert len({first[1], second[1], third[1]}) == 3
    assert here.counts()["retried"] == 3
    await run.close()
    here.check_over()


@pytest.mark.parametrize("lost", ["p0 d0", "d0 p0"])
@pytest.mark.parametrize("back", ["p0", "d0"])
async def test_when_every_node_is_lost_the_first_that_is_back_takes_the_request(lost: str, back: str) -> None:
    here = stage("p0 d0", max_attempts=3)
    run = await here.submit()
    for name in lost.split():
        here.nodes[name].fall_silent()
        await turns()
    assert len(here.sent()) == 2, "the node that was left got it too"
    node = here.nodes[back]
    node.revive()
    await turns()
    computes, generates, submit = here.attempt(2)
    assert (computes, generates) == (node, node)
    node.say(*generated(submit.id))
    assert tokens_of(await collect(run)) == ANSWER
    assert here.counts()["moved"] == 2
    here.check_over()


# ---- a request that kills nodes --------------------------------------------------------------------------------------


async def killed(here: Stage, said: list[int], dies: Any) -> Any:
    """Submit one request to decode nodes alone. The node of attempt i generates `said[i]` tokens, then dies."""
    run = await here.submit()
    position = 0
    for number, count in enumerate(said):
        _, d, submit = here.attempt(number)
        for _ in range(count):
            d.say(token(submit.id, position))
            position += 1
        dies(d)
        await turns()
    return run


@pytest.mark.parametrize("said", [[0, 0], [2, 0, 0]], ids=["its prompt kills", "its third token kills"])
async def test_a_request_under_which_two_nodes_died_is_not_tried_again(said: list[int]) -> None:
    here = stage("d0 d1 d2 d3", max_attempts=9)
    run = await killed(here, said, lambda d: d.die())
    with pytest.raises(RequestError, match="2 nodes died") as caught:
        await collect(run)
    assert (caught.value.code, caught.value.status) == ("poison", 422)
    assert len(here.sent()) == len(said)
    here.check_over()


@pytest.mark.parametrize(
    ("said", "dies"),
    [
        ([2, 0], lambda d: d.die()),
        ([0, 1], lambda d: d.die()),
        ([0, 0], lambda d: (d.die(), d.revive())),
        ([0, 0], lambda d: d.fall_silent()),
        ([0, 0], lambda d: (setattr(d.stats, "state", "draining"), d.die())),
    ],
    ids=[
        "the first had told of it",
        "it got on in between",
        "only connections were lost",
        "they fell silent",
        "they were draining",
    ],
)
async def test_two_losses_that_the_request_can_hardly_have_caused_do_not_end_it(said: list[int], dies: Any) -> None:
    here = stage("d0 d1 d2 d3", max_attempts=9)
    run = await killed(here, said, dies)
    _, d, submit = here.attempt(2)
    d.say(*generated(submit.id, sum(said)))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_who_only_waits_for_room_on_a_node_that_dies_is_not_its_cause() -> None:
    here = stage("p0 d0 d1 d2", max_attempts=9)
    run = await here.submit()
    for number in range(2):
        _, d, _ = here.attempt(number)
        d.die()
        await turns()
    p, d, submit = here.attempt(2)
    p.say(token(submit.id, 0))
    d.say(*generated(submit.id, 1))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


# ---- the retry budget ------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(acts=st.lists(st.tuples(st.sampled_from(["request", "retry", "retry"]), st.floats(0, 2)), max_size=200))
def test_retries_are_never_more_than_a_tenth_of_the_requests_and_three_a_second(acts: list[tuple[str, float]]) -> None:
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


def test_a_budget_that_is_spent_makes_retries_wait_and_comes_back() -> None:
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


# ---- nodes that fail -------------------------------------------------------------------------------------------------


def test_a_node_that_flaps_is_left_out_for_longer_and_longer_and_forgiven_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.nodes.health.EJECT_S", EJECT_S)  # undo the fixture's change
    monkeypatch.setattr("router.nodes.health.MAX_EJECT_S", MAX_EJECT_S)
    standing, now, times = OutlierDetector(), 0.0, []
    for _ in range(9):
        standing.died(now)
        times.append(standing.ejected_until - now)
        assert standing.is_ejected(now)
        now = standing.ejected_until + 5.0
        assert not standing.is_ejected(now)
    assert times == [min(MAX_EJECT_S, EJECT_S * 2**number) for number in range(9)]
    now += 61.0
    assert standing.is_forgotten(now)
    standing.died(now)
    assert standing.ejected_until - now == EJECT_S


def test_failures_in_a_row_count_as_a_death_and_one_success_forgives_them() -> None:
    standing = OutlierDetector()
    for number in range(MAX_FAILURES - 1):
        assert not standing.failed(float(number))
    standing.succeeded()
    assert not standing.failed(4.0)
    assert not any(standing.failed(20.0 * number) for number in range(1, 9)), "too far apart"
    assert not standing.is_forgotten(200.0)
    assert standing.is_forgotten(221.0), "also one whose last word was a failure"
    fresh = OutlierDetector()
    assert [fresh.failed(0.1 * number) for number in range(MAX_FAILURES)] == [False] * (MAX_FAILURES - 1) + [True]
    assert fresh.is_ejected(1.0)
    assert not fresh.failed(1.5), "they are counted anew"


async def test_a_node_that_died_gets_nothing_for_a_while_and_the_last_one_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.nodes.health.EJECT_S", 0.2)
    here = stage("d0 d1")
    here.d0.die()
    here.d0.revive()
    await turns()
    assert here.fleet.routable()[1] == [here.d1]
    here.d1.die()
    assert here.fleet.routable()[1] == [here.d0], "it is the last one"
    here.d1.revive()
    assert sorted(link.info.id for link in here.fleet.routable()[1]) == ["d0", "d1"], "or both are out"
    await asyncio.sleep(0.25)
    assert len(here.fleet.routable()[1]) == 2


# ---- real processes --------------------------------------------------------------------------------------------------


def test_a_decode_node_that_dies_or_freezes_is_noticed_in_time_and_its_prompt_is_not_computed_again() -> None:
    """Print the longest gaps that clients see. The limits on them allow for a fully loaded test machine."""
    own: dict[str, dict[str, object]] = {
        "decode-0": {"failpoint": "decode.token:20=kill", "allow_failpoints": True},
        "decode-1": {"failpoint": "decode.token:20=stop", "allow_failpoints": True},
    }
    with cluster(prefill=1, decode=3, own=own, heartbeat_s=0.5, num_blocks=2048) as running:
        gaps: dict[str, float] = {}
        num_streams = 0
        while len(gaps) < 2:  # each stream goes to the decode node that has had the fewest
            assert num_streams < 9
            prompt = [7 + (num_streams + place) % 2000 for place in range(2000)]
            times: list[float] = []
            answer = running.stream(prompt, 60, lambda _, times=times: times.append(time.monotonic()))
            assert answer == expected(prompt, 60)
            num_streams += 1
            gap_s = max(later - earlier for earlier, later in pairwise(times))
            if running.processes["decode-0"].poll() is not None:
                gaps.setdefault("kill", gap_s)
            if not running.nodes().get("decode-1", {"alive": True})["alive"]:
                gaps.setdefault("freeze", gap_s)
        moved = running.settled()["requests"]["moved"]
        wait_for(lambda: running.status()["handoffs"] == num_streams + moved, "every move is one more push")
        time.sleep(1.0)  # two heartbeats
        computed = sum(node["prompt_tokens"] for node in running.nodes().values())
        assert computed <= num_streams * 2000 + moved * (60 + 16), "a block at most, and what was generated since"
        print(f"longest gap of a stream: {gaps}, {moved} moves of {num_streams} streams")
        assert gaps["kill"] < 0.2 + 5.0
        assert gaps["freeze"] < 3.0 + 5.0
        running.send_signal("decode-1", signal.SIGCONT)
        wait_for(lambda: running.nodes()["decode-1"]["alive"], "the frozen node is back")
        running.idle()


async def test_a_cluster_that_is_busy_everywhere_is_not_asked_again_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            here.nodes[name].say(TokenDelta(submit.id, error="this node has 8192 requests: no more fit", retry=True))
        await turns()
    assert 40 + 30 <= num_sent <= 40 + 45, "each once, and what the budget allows"
    for run in runs:
        with pytest.raises(UnavailableError, match="fail on the nodes at once"):
            await collect(run)
    assert not any(here.fleet.outliers[name].times for name in here.nodes), "being busy is no failure"
    here.check_over()
