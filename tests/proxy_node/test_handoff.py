"""Test the handoff of a prompt between two proxy nodes with stub engines. As vLLM does, the engines answer with wrong
tokens if KV is read twice or after its lease has ended."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy_node.connectors import NixlParams
from shared.rpc.messages import AcceptRequest, RouterCommand, SamplingParams, SetRoleRequest, SubmitRequest
from tests.node.harness import ROUTER, submission
from tests.proxy_node.harness import WAIT_S, Running, running
from tests.proxy_node.vllm_stub import answer

PROMPT = list(range(50, 90))
PARAMS: dict[str, Any] = {  # recorded from vLLM 0.32
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
    "remote_engine_id": "8d0e", "remote_request_id": "cmpl-r-0", "remote_host": "127.0.0.1", "remote_port": 5701,
    "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 33, "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}  # fmt: skip


@asynccontextmanager
async def pair(
    lease_s: float = 30.0, resumes: str = "greedy, seeded", **knobs: Any
) -> AsyncIterator[tuple[Running, Running]]:
    """A prefill and a decode node. `knobs` apply to both engines."""
    knobs |= {"connector": "nixl"}
    options: dict[str, Any] = {"lease_s": lease_s, "resumes": resumes}
    async with (
        running(role="prefill", **options, **knobs) as prefill,
        running(role="decode", **options, **knobs) as decode,
    ):
        prefill.stub.set({"lease_s": lease_s})
        yield prefill, decode


def handed(decode: Running, name: str, count: int, **more: Any) -> SubmitRequest:
    return submission(name, PROMPT, count, decode_node=decode.address, **more)


def answer_of(prefill: Running, decode: Running, name: str) -> list[int]:
    """Put the tokens of both nodes in order, as a router does. Raises AssertionError if a token comes twice."""
    deltas = [
        delta for line in (prefill.line, decode.line) for delta in line.deltas if delta.id == name and delta.tokens
    ]
    tokens: list[int] = []
    for delta in sorted(deltas, key=lambda delta: delta.position):
        assert delta.position == len(tokens), "a token came twice, or is missing"
        tokens += [int.from_bytes(delta.tokens[at : at + 4], "little") for at in range(0, len(delta.tokens), 4)]
    return tokens


async def test_a_prompt_is_computed_by_one_engine_and_its_answer_by_the_other() -> None:
    async with pair() as (prefill, decode):
        prefill.line.submit(handed(decode, "a", 30))
        await decode.until(lambda: decode.line.finishes("a"))
        assert answer_of(prefill, decode, "a") == answer(PROMPT, 30)
        assert prefill.line.tokens("a") == answer(PROMPT, 1), "the router has the first token before the handoff"
        assert any(delta.handed_off for delta in decode.line.deltas)
        assert prefill.stub.handoffs["read"] == 1
        assert prefill.node.stats().handoffs == 1
        await prefill.line.ends("a")
        assert [event.reason for event in prefill.line.events("a") if event.kind == "ended"] == ["handed_off"]
        await decode.until(lambda: decode.node.stats().bytes_moved)
        body = decode.stub.calls[-1]
        assert (body["prompt"], body["max_tokens"]) == (PROMPT, 30)


async def test_logprobs_and_draws_are_those_of_one_engine() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, logprobs=2)
    async with pair() as (prefill, decode):
        prefill.line.submit(handed(decode, "a", 20, sampling=sampling))
        await decode.until(lambda: decode.line.finishes("a"))
        assert answer_of(prefill, decode, "a") == answer(PROMPT, 20, "seed 5")
        rows = [row for line in (prefill.line, decode.line) for delta in line.deltas for row in delta.logprobs]
        assert [row.token for row in rows] == answer(PROMPT, 20, "seed 5")


async def test_where_draws_do_not_repeat_the_first_token_is_that_of_the_decode_engine() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    async with pair(resumes="greedy", resumes_seeded=False) as (prefill, decode):
        prefill.line.submit(handed(decode, "a", 20, sampling=sampling))
        await decode.until(lambda: decode.line.finishes("a"))
        assert prefill.line.tokens("a") == []
        assert len(decode.line.tokens("a")) == 20


async def test_a_different_first_token_is_a_failed_handoff() -> None:
    async with pair() as (prefill, decode):
        prefill.stub.set({"other_token": 1})
        prefill.line.submit(handed(decode, "a", 20))
        await decode.until(lambda: decode.line.errors())
        [(error, retry)] = decode.line.errors()
        assert error == "handoff: the engines sampled different first tokens"
        assert retry
        assert decode.line.tokens("a") == []


@pytest.mark.parametrize(("count", "stop"), [(1, False), (9, True)])
async def test_an_answer_of_one_token_needs_no_handoff(count: int, stop: bool) -> None:
    first = answer(PROMPT, 1)
    stops = first[0].to_bytes(4, "little") if stop else b""
    async with pair() as (prefill, decode):
        prefill.line.submit(handed(decode, "a", count, stop_tokens=stops))
        await prefill.until(lambda: prefill.line.finishes("a"))
        assert prefill.line.finishes("a") == ["stop" if stop else "length"]
        assert prefill.line.tokens("a") == first
        assert decode.stub.calls == []
        assert len(prefill.stub.leases) == stop  # with max_tokens 1, no KV is kept


async def test_kv_that_may_have_expired_is_not_used() -> None:
    """The decode engine is too slow. The request fails before the lease ends, and the retry computes the prompt
    again."""
    async with pair(lease_s=1.0) as (prefill, decode):
        decode.stub.set({"read_s": 3.0})
        prefill.line.submit(handed(decode, "a", 20))
        await decode.until(lambda: decode.line.errors())
        assert decode.line.errors() == [
            ("handoff: no token came in time, and the lease of the KV may have ended", True)
        ]
        decode.stub.set({"read_s": 0.0})
        prefill.line.submit(handed(decode, "b", 20))
        await decode.until(lambda: decode.line.finishes("b"))
        assert answer_of(prefill, decode, "b") == answer(PROMPT, 20)
        assert decode.stub.calls[0]["kv_transfer_params"] != decode.stub.calls[1]["kv_transfer_params"]
        assert prefill.stub.handoffs["misused"] == 0


async def test_a_failed_read_is_a_failed_handoff_of_healthy_engines() -> None:
    async with pair(lease_s=1.0) as (prefill, decode):
        decode.stub.set({"no_kv": 1})
        prefill.line.submit(handed(decode, "a", 20))
        await decode.until(lambda: decode.line.errors())
        [(error, retry)] = decode.line.errors()
        assert error.startswith("handoff: ")
        assert retry
        assert not decode.node.lost.done()


async def test_the_proxies_refuse_what_they_cannot_hand_over() -> None:
    async with pair() as (prefill, decode):
        prefill.line.submit(submission("nobody", PROMPT, 9, decode_node="127.0.0.1:9"))
        await prefill.until(lambda: prefill.line.errors())
        assert prefill.line.errors()[0][0].startswith("handoff: ")
        assert prefill.node.stats().handoffs_failed == 1
        good = AcceptRequest(submission("a", PROMPT, 9), json.dumps(PARAMS).encode(), 1000)
        calls = len(decode.stub.calls)
        for words, message in [
            ("KV transfer parameters", replace(good, params=b"[]")),
            ("KV transfer parameters", replace(good, params=b"{" * 100_000)),
            ("KV transfer parameters", replace(good, params=b"\xff")),
            ("router is not connected", replace(good, request=submission("a", PROMPT, 9, router="stranger"))),
            ("vocabulary", replace(good, request=submission("a", [9999], 9))),
        ]:
            assert words in (await decode.node.accept(message)).error
        assert "does not decode" in (await prefill.node.accept(good)).error
        assert len(decode.stub.calls) == calls, "nothing reached the engine"
        decode.stub.set({"token_s": 0.05})
        decode.line.submit(submission("a", PROMPT, 900))
        await decode.until(lambda: decode.line.tokens("a"))
        assert "already on this node" in (await decode.node.accept(good)).error


@pytest.mark.parametrize(
    "name", sorted(PARAMS.keys() - {"do_remote_decode", "dcp_size", "pp_size", "remote_blocks_expiry_time"})
)
@given(
    st.one_of(st.none(), st.floats(), st.just([None]), st.just({}), st.just(-1), st.just("x" * 300), st.just([["a"]]))
)
def test_malformed_params_are_refused_before_an_engine_sees_them(name: str, value: object) -> None:
    assert NixlParams.read(PARAMS) == PARAMS
    with pytest.raises(ValueError, match="KV transfer parameters"):
        NixlParams.read(PARAMS | {name: value})
    with pytest.raises(ValueError, match="KV transfer parameters"):
        NixlParams.read(json.dumps(PARAMS | {name: value}).encode())


def test_the_first_malformed_number_of_a_long_list_ends_the_check() -> None:
    """A description of each of a million malformed numbers would take seconds and gigabytes."""
    for blocks in ([[-1, -1]], [[-1], [-1]]):
        with pytest.raises(ValidationError) as failure:
            NixlParams.model_validate(PARAMS | {"remote_block_ids": blocks})
        assert failure.value.error_count() == 1


async def test_a_lost_prefill_engine_does_not_fail_handed_over_answers() -> None:
    async with pair(token_s=0.01) as (prefill, decode):
        prefill.line.submit(handed(decode, "a", 200))
        await decode.until(lambda: decode.line.tokens("a"))
        await prefill.stop()
        await asyncio.wait_for(asyncio.shield(prefill.node.lost), WAIT_S)
        await decode.until(lambda: decode.line.finishes("a"))
        assert answer_of(prefill, decode, "a") == answer(PROMPT, 200)


async def test_a_draining_node_still_accepts_the_handoffs_of_requests_that_it_was_given_before() -> None:
    async with pair(token_s=0.01) as (prefill, decode):
        draining = asyncio.ensure_future(decode.node.drain(60.0, "shutting down"))
        await asyncio.sleep(0)
        decode.line.commands.put_nowait(RouterCommand(ROUTER, has_requests=True, has_seen_drain=True))
        decode.line.submit(submission("new", PROMPT, 20))
        prefill.line.submit(handed(decode, "a", 30))
        await decode.until(lambda: decode.line.finishes("a"))
        assert answer_of(prefill, decode, "a") == answer(PROMPT, 30)
        assert [(delta.id, delta.error) for delta in decode.line.deltas if delta.error] == [
            ("new", "this node is draining")
        ]
        decode.line.commands.put_nowait(RouterCommand(ROUTER, has_requests=False, has_seen_drain=True))
        assert await draining == 0


async def test_a_node_changes_its_role_without_a_word_to_its_engine() -> None:
    async with pair(token_s=0.01) as (prefill, decode):
        switching = asyncio.ensure_future(decode.node.set_role(SetRoleRequest("prefill", 5.0)))
        assert "draining" in (await _soon(decode, SetRoleRequest("prefill"))).error
        assert not (await switching).error
        assert not (await prefill.node.set_role(SetRoleRequest("decode"))).error
        assert (prefill.node.info.role, decode.node.info.role, decode.node.info.state) == ("decode", "prefill", "ready")
        decode.line.submit(handed(prefill, "a", 20))
        await prefill.until(lambda: prefill.line.finishes("a"))
        assert answer_of(decode, prefill, "a") == answer(PROMPT, 20)


async def _soon(here: Running, message: SetRoleRequest) -> Any:
    await asyncio.sleep(0)
    return await here.node.set_role(message)


ACTIONS = st.lists(st.tuples(st.sampled_from(["submit", "abort", "fault", "wait"]), st.integers(0, 5)), max_size=14)
FAULTS = ("no_kv", "refuse_429", "truncate", "refuse_503", "error_event", "bad_id")


@given(ACTIONS, st.sampled_from(["", "prefill", "decode"]))
@settings(max_examples=12)
def test_any_interleaving_of_handoffs_uses_kv_once_and_ends_each_request_once(
    actions: list[tuple[str, int]], dies: str
) -> None:
    asyncio.run(_interleave(actions, dies))


async def _interleave(actions: list[tuple[str, int]], dies: str) -> None:
    async with pair(token_s=0.001, lease_s=20.0) as (prefill, decode):
        submitted: list[str] = []
        aborted = set()
        for number, (action, value) in enumerate(actions):
            if action == "submit":
                submitted.append(f"r{number}")
                prefill.line.submit(handed(decode, f"r{number}", 12))
            elif action == "abort" and submitted:
                aborted.add(name := submitted[value % len(submitted)])
                prefill.line.abort(name)
                decode.line.abort(name)
            elif action == "fault":
                (prefill if value % 2 else decode).stub.set({FAULTS[value]: 1})
            else:
                await asyncio.sleep(0.002 * value)
        if dies:
            await (prefill if dies == "prefill" else decode).stop()

        def over(name: str) -> bool:
            ends = prefill.line.kinds(name).count("ended"), decode.line.kinds(name).count("ended")
            handed_off = any(event.reason == "handed_off" for event in prefill.line.events(name))
            return bool(ends[1]) or (bool(ends[0]) and not handed_off)

        def lost() -> bool:
            return prefill.node.lost.done() or decode.node.lost.done()

        await decode.until(lambda: lost() or all(over(name) for name in submitted if name not in aborted))
        for name in submitted:
            tokens = answer_of(prefill, decode, name) if name not in aborted else []
            assert tokens == answer(PROMPT, 12)[: len(tokens)]
            ends = [
                each for line in (prefill.line, decode.line) for each in line.deltas if each.id == name and each.finish
            ]
            assert len(ends) <= 1
            assert not ends or name in aborted or len(tokens) == 12
        used = [json.dumps(body["kv_transfer_params"]) for body in decode.stub.calls if body.get("kv_transfer_params")]
        assert len(set(used)) == len(used), "params were used twice"
        assert prefill.stub.handoffs["misused"] == 0
