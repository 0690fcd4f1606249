"""Test one incarnation of a proxy node against a stub engine: the messages that its router gets for each event."""

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.router_sessions import RouterSessions
from proxy_node import node
from shared.rpc.messages import SetRoleRequest
from tests.node.harness import RouterLine, UnreadLine, submission
from tests.proxy_node.harness import INFO, PROMPT, WAIT_S, running
from tests.proxy_node.vllm_stub import NUM_BLOCKS, VOCABULARY, answer


async def test_tokens_arrive_once_with_a_finish_and_the_events_of_the_request() -> None:
    async with running(tokens_per_event=3) as here:
        here.line.submit(submission("a", PROMPT, 40), submission("b", [9] * 50, 40))
        await here.until(lambda: here.line.finishes("a") and here.line.finishes("b"))
        assert here.line.tokens("a") == answer(PROMPT, 40)
        assert here.line.tokens("b") == answer([9] * 50, 40)
        positions = [(delta.position, len(delta.tokens) // 4) for delta in here.line.deltas if delta.id == "a"]
        assert all(at + count == following for (at, count), (following, _) in pairwise(positions))
        await here.line.ends("a", "b")
        assert here.line.kinds("a") == ["queued", "first", "ended"]


async def test_a_retry_continues_after_the_tokens_so_far() -> None:
    whole = answer(PROMPT, 30)
    async with running() as here:
        here.line.submit(submission("a", PROMPT + whole[:11], 30, num_prompt=len(PROMPT)))
        await here.until(lambda: here.line.finishes("a"))
        assert here.line.tokens("a") == whole[11:]
        assert here.line.deltas[0].position == 11


@pytest.mark.parametrize(
    ("fault", "words", "retry"),
    [
        ("refuse_503", "refused", True),
        ("truncate", "ended early", True),
        ("error_event", "internal", False),
        ("bad_json", "malformed", True),
    ],
)
async def test_a_healthy_engine_that_fails_a_request_fails_only_this_one(fault: str, words: str, retry: bool) -> None:
    async with running(**{fault: 1}) as here:
        here.line.submit(submission("a", PROMPT, 20))
        await here.until(lambda: here.line.errors())
        [(error, is_retried)] = here.line.errors()
        assert words in error
        assert is_retried == retry
        here.line.submit(submission("b", PROMPT, 20))
        await here.until(lambda: here.line.finishes("b"))
        assert here.line.tokens("b") == answer(PROMPT, 20)
        assert not here.node.lost.done()


async def test_a_failed_request_is_retried_if_the_engine_may_be_dead() -> None:
    async with running(error_event=1) as here:
        here.stub.set({"metrics_s": 30.0, "is_unhealthy": True})
        here.line.submit(submission("a", PROMPT, 20))
        await here.until(here.line.errors)
        assert [retry for _, retry in here.line.errors()] == [True]


async def test_an_abort_closes_the_connection_and_another_router_cannot_abort() -> None:
    async with running(token_s=0.01) as here:
        here.line.submit(submission("a", PROMPT, 5000))
        await here.until(lambda: here.line.tokens("a"))
        stranger = RouterLine("stranger")
        stranger.say_hello()
        stranger.abort("a")
        task = asyncio.ensure_future(here.node.attach(stranger))
        await here.until(lambda: stranger.updates)
        assert here.stub.running == 1
        here.line.abort("a")
        await here.until(lambda: here.stub.dropped == 1)
        assert not here.line.errors()
        task.cancel()


async def test_the_end_of_a_router_drops_its_requests() -> None:
    async with running(token_s=0.01) as here:
        here.line.submit(*(submission(str(index), [5 + index], 5000) for index in range(5)))
        await here.until(lambda: here.stub.running == 5)
        here.line.hang_up()
        await here.until(lambda: here.stub.dropped == 5)


async def test_a_router_that_does_not_read_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RouterSessions", partial(RouterSessions, max_unread=20))
    async with running(token_s=0.01) as here:
        unread = UnreadLine("other")
        unread.say_hello()
        unread.submit(submission("a", PROMPT, 5000), submission("b", PROMPT, 5000))
        await asyncio.wait_for(here.node.attach(unread), WAIT_S)
        await here.until(lambda: here.stub.dropped == 2)


@pytest.mark.parametrize("knob", ["", "is_unhealthy"])
async def test_a_lost_engine_is_reported_once_as_the_node_and_never_as_a_failed_request(knob: str) -> None:
    """The router then counts the loss of a node, instead of a failure of each request."""
    async with running(token_s=0.01) as here:
        here.line.submit(*(submission(str(index), [5 + index], 5000) for index in range(5)))
        await here.until(lambda: all(here.line.tokens(str(index)) for index in range(5)))
        if knob:
            here.stub.set({knob: True, "truncate": 1})
        else:
            await here.stop()
        reason = await asyncio.wait_for(asyncio.shield(here.node.lost), WAIT_S)
        assert reason
        await here.until(lambda: any(update.stats and update.stats.state == "stuck" for update in here.line.updates))
        assert here.line.errors() == []
        if knob:
            await here.until(lambda: here.stub.running == 0)


async def test_an_engine_that_is_silent_with_requests_is_stuck_and_a_slow_one_is_not() -> None:
    async with running(stuck_s=4.0, token_s=0.01, metrics_s=8.0) as here:
        here.line.submit(submission("a", PROMPT, 500))  # for 5 s, no metrics arrive, but tokens do
        await here.until(lambda: here.line.finishes("a"))
        assert not here.node.lost.done()
        here.line.submit(submission("b", PROMPT, 5000))
        await here.until(lambda: here.line.tokens("b"))
        here.stub.set({"is_stalled": True})
        assert "no progress" in await asyncio.wait_for(asyncio.shield(here.node.lost), WAIT_S)


async def test_an_engine_that_computes_a_long_prompt_is_not_stuck() -> None:
    async with running(stuck_s=2.0, prompt_s=4.0) as here:
        here.line.submit(submission("a", PROMPT, 20))
        await here.until(lambda: here.node.lost.done() or here.line.finishes("a"))
        assert not here.node.lost.done()


async def test_three_malformed_answers_are_the_end_of_a_node() -> None:
    async with running(bad_json=3) as here:
        here.line.submit(*(submission(str(index), [5 + index], 20) for index in range(3)))
        assert "malformed" in await asyncio.wait_for(asyncio.shield(here.node.lost), WAIT_S)


@pytest.mark.parametrize("knobs", [{"truncate": 3}, {"abort": 3}, {"key": "rotated"}], ids=str)
async def test_an_engine_that_answers_no_request_is_lost_although_it_is_healthy(knobs: dict[str, Any]) -> None:
    async with running() as here:
        here.stub.set(knobs)
        here.line.submit(*(submission(str(index), [5 + index], 20) for index in range(3)))
        assert "refused or gave up" in await asyncio.wait_for(asyncio.shield(here.node.lost), WAIT_S)
        assert all(retry for _, retry in here.line.errors())


async def test_overload_and_single_failures_are_no_reason_to_leave() -> None:
    async with running(refuse_429=4, refuse_503=4) as here:
        here.line.submit(*(submission(str(index), PROMPT, 20) for index in range(8)))
        await here.until(lambda: len(here.line.errors()) == 8)
        for index in range(4):
            here.stub.set({"abort": 1})
            here.line.submit(submission(f"bad {index}", PROMPT, 20))
            await here.until(lambda index=index: here.is_over(f"bad {index}"))
            here.line.submit(submission(f"good {index}", PROMPT, 20))
            await here.until(lambda index=index: here.line.finishes(f"good {index}"))
        assert not here.node.lost.done()


async def test_a_draining_node_finishes_its_requests_and_hands_back_the_rest() -> None:
    async with running(token_s=0.01) as here:
        here.line.submit(submission("short", PROMPT, 20), submission("long", PROMPT, 5000))
        await here.until(lambda: here.line.tokens("long"))
        draining = asyncio.ensure_future(here.node.end(1.0))
        await here.until(lambda: any(update.stats and update.stats.state == "draining" for update in here.line.updates))
        here.line.submit(submission("new", PROMPT, 20))
        assert await draining == 1
        assert here.line.finishes("short") == ["length"]
        assert {(delta.id, delta.retry) for delta in here.line.deltas if delta.error} == {("new", True), ("long", True)}


async def test_bad_submits_are_refused_with_the_field_and_reach_no_engine() -> None:
    async with running() as here:
        calls = len(here.stub.calls)
        here.line.submit(
            submission("vocabulary", [VOCABULARY]),
            submission("length", PROMPT, 9000),
            submission("grammar", PROMPT, grammar="start: /a/"),
            submission("handoff", PROMPT, decode_node="127.0.0.1:9"),
            submission("adapter", PROMPT, adapter="d"),
        )
        await here.until(lambda: len(here.line.errors()) == 5)
        errors = {delta.id: (delta.error, delta.retry) for delta in here.line.deltas}
        assert "vocabulary of 2048" in errors["vocabulary"][0]
        assert "max_tokens" in errors["length"][0]
        assert "structured output" in errors["grammar"][0]
        assert "decode_node" in errors["handoff"][0]
        assert errors["adapter"][1], "another node may have the adapter"
        assert not any(retry for name, (_, retry) in errors.items() if name != "adapter")
        assert len(here.stub.calls) == calls


async def test_statistics_are_those_of_the_engine() -> None:
    async with running(token_s=0.01) as here:
        here.line.submit(submission("a", PROMPT, 5000))
        await here.until(lambda: here.node.stats().blocks_owned)
        stats = here.node.stats()
        assert (stats.running, stats.preemptions, stats.cache_queries) == (1, 2, 48)
        assert stats.blocks_owned + stats.blocks_free == stats.blocks_total == NUM_BLOCKS - 1
        assert stats.incarnation_id == INFO.incarnation_id
        assert "no KV connector" in (await here.node.set_role(SetRoleRequest("prefill"))).error
        assert not (await here.node.set_role(SetRoleRequest("decode"))).error


ACTIONS = st.lists(st.tuples(st.sampled_from(["submit", "abort", "fault", "wait"]), st.integers(0, 5)), max_size=16)
FAULTS = ("truncate", "error_event", "refuse_503", "abort", "bad_id", "refuse_429")


@given(ACTIONS, st.booleans())
@settings(max_examples=15)
def test_any_interleaving_gives_each_request_one_end_and_no_token_twice(
    actions: list[tuple[str, int]], dies: bool
) -> None:
    asyncio.run(_interleave(actions, dies))


async def _interleave(actions: list[tuple[str, int]], dies: bool) -> None:
    async with running(token_s=0.001) as here:
        submitted: dict[str, list[int]] = {}
        aborted = set()
        for number, (action, value) in enumerate(actions):
            if action == "submit":
                prompt = [5 + number, value]
                submitted[f"r{number}"] = prompt
                here.line.submit(submission(f"r{number}", prompt, 12))
            elif action == "abort" and submitted:
                aborted.add(name := list(submitted)[value % len(submitted)])
                here.line.abort(name)
            elif action == "fault":
                here.stub.set({FAULTS[value]: 1})
            else:
                await asyncio.sleep(0.002 * value)
        if dies:
            await here.stop()
        await here.until(
            lambda: here.node.lost.done() or all(here.is_over(each) for each in submitted.keys() - aborted)
        )
        await asyncio.sleep(0.01)
        for name, prompt in submitted.items():
            tokens = here.line.tokens(name)
            assert tokens == answer(prompt, 12)[: len(tokens)]
            ends = [each for each in here.line.deltas if each.id == name and (each.finish or each.error)]
            assert len(ends) <= 1
            assert not any(each.finish for each in ends) or len(tokens) == 12
        if dies and not here.node.lost.done():
            await asyncio.wait_for(asyncio.shield(here.node.lost), WAIT_S)
        await here.until(lambda: here.stub.running == 0)
