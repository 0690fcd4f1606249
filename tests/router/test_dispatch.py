"""Test the dispatcher: after any failure, a client gets each token once, and all resources are released.

The node pool is real; only its nodes are simulated, and they have no network streams.
"""

import asyncio
import gc
from array import array
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.dispatch import dispatcher as dispatch_module
from router.dispatch.attempt import AdmittedRequest
from router.dispatch.requests import GenerationRequest
from router.nodes import health as health_module
from router.nodes import load as load_module
from scheduler.cost import CostModel
from scheduler.prefix import block_hashes
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import Logprobs, Media, NodeStats, SamplingParams, TokenDelta, pack_ids, unpack_ids
from tests.router.simulated import (
    ANSWER,
    PROMPT,
    Reader,
    SimulatedNode,
    Stage,
    collect,
    generated,
    no_pauses,
    settle,
    stage,
    token,
    tokens_of,
)

__all__ = ["no_pauses"]  # a fixture that every test here uses


# ---- one attempt ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_deltas_in_any_order_repeated_or_late_give_the_tokens_in_order(data: st.DataObject) -> None:
    async def play() -> None:
        here = stage()
        run = await here.submit()
        p0, d0, submit = here.attempt(0)
        deltas = [(p0, token(submit.id, 0, cached_tokens=4)), (d0, TokenDelta(submit.id, 1, handed_off=True))]
        deltas += [(d0, delta) for delta in generated(submit.id, 1)]
        deltas += data.draw(st.lists(st.sampled_from(deltas), max_size=6))
        deltas = data.draw(st.permutations(deltas))
        first_of_decode = [node for node, _ in deltas].index(d0)
        late = data.draw(st.integers(first_of_decode + 1, len(deltas)))
        deltas.insert(late, (p0, TokenDelta(submit.id, error="handoff: no answer", retry=True)))
        for node, delta in deltas:
            node.send(delta)
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
        pieces = await collect(run)
        assert tokens_of(pieces) == ANSWER
        assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert [piece.delta.cached_tokens for piece in pieces] == [4] + [0] * (len(pieces) - 1)
        assert (p0.aborts, d0.aborts) == ([], [])
        here.check_over()

    asyncio.run(play())


async def test_a_request_of_one_token_needs_no_decode_node() -> None:
    here = stage()
    run = await here.submit(max_tokens=1)
    here.p0.send(TokenDelta("r.0.0", 0, pack_ids([5]), finish="length"))
    here.d0.send(TokenDelta("r.0.0", error="handoff: the prefill node stopped", retry=True))
    assert [(piece.tokens, piece.finish) for piece in await collect(run)] == [([5], "length")]
    here.check_over()


async def test_a_finish_may_come_without_tokens() -> None:
    here = stage("d0")
    run = await here.submit()
    here.d0.send(TokenDelta("r.0.0", 0, pack_ids([5])), TokenDelta("r.0.0", 1, finish="stop"))
    assert [(piece.tokens, piece.finish) for piece in await collect(run)] == [([5], None), ([], "stop")]
    here.check_over()


async def test_a_finished_request_is_freed_without_a_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        here = stage("d0")
        run = await here.submit()
        here.d0.send(TokenDelta("r.0.0", 0, pack_ids([5]), finish="stop"))
        await collect(run)
        del run
        await settle()
        assert not any(type(each) is AdmittedRequest for each in gc.get_objects())
    finally:
        gc.enable()


# ---- failures ---------------------------------------------------------------------------------------------------

FAULTS = ("p_lost", "d_lost", "p_error", "d_error", "p_handoff")
PROGRESS = ("", "token", "hand_off", "token hand_off", "hand_off token", "hand_off token token", "token hand_off token")


@dataclass
class Play:
    """A request to three prefill and three decode nodes, and the expected state of its current attempt."""

    here: Stage = field(default_factory=lambda: stage("p0 p1 p2 d0 d1 d2", max_attempts=30))
    number: int = 0
    base: int = 0  # tokens that the client received before this attempt
    delivered: int = 0
    is_handed_off: bool = False
    failed: set[str] = field(default_factory=set)  # nodes that failed in any attempt so far
    handoff_failed: set[str] = field(default_factory=set)  # prefill nodes whose handoff failed
    returned: set[str] = field(default_factory=set)  # nodes that died and came back; placement prefers other nodes
    gone: list[SimulatedNode] = field(default_factory=list)  # nodes that died during this attempt

    def usable(self, role: str) -> set[str]:
        names = {f"{role}{number}" for number in range(3)}
        return names - self.returned or (names if role == "d" else set())  # decode nodes can compute prompts

    def check_attempt(self) -> None:
        p, d, submit = self.here.attempt(self.number)
        assert unpack_ids(submit.tokens) == PROMPT + ANSWER[: self.base]
        assert (submit.num_prompt, submit.max_tokens) == (len(PROMPT), len(ANSWER))
        assert d.load.kv_tokens == len(PROMPT) + self.base + (len(ANSWER) - self.base) // 2
        self.is_handed_off = p is d
        assert self.is_handed_off is (self.usable("p") <= self.failed), "prefill nodes are preferred"
        assert self.is_handed_off or p.info.id in self.usable("p") - self.failed
        assert d.info.id in (self.usable("d") - self.failed or self.usable("d"))

    def advance(self, act: str) -> None:
        """Let a node report the next token or the end of the handoff, if a node could report this now."""
        p, d, submit = self.here.attempt(self.number)
        is_first = self.delivered == self.base
        if act == "hand_off" and not self.is_handed_off:
            self.is_handed_off = True
            d.send(TokenDelta(submit.id, handed_off=True))
        elif act == "token" and (is_first or self.is_handed_off) and not (is_first and p in self.gone):
            (p if is_first else d).send(token(submit.id, self.delivered))
            self.delivered += 1

    async def fail(self, act: str) -> None:
        p, d, submit = self.here.attempt(self.number)
        failed, how = (p if act.startswith("p") else d), act.partition("_")[2]
        if how == "lost":
            failed.die()
            failed.revive()
            self.gone.append(failed)
            self.returned.add(failed.info.id)
        else:
            failed.send(TokenDelta(submit.id, error="handoff: no" if how == "handoff" else "no", retry=True))
        await settle()
        if failed is not d and self.is_handed_off and (self.delivered > self.base or how != "lost"):
            return  # the attempt no longer needs this node
        for node in (p, d):
            assert (submit.id in node.aborts) is (node not in self.gone), "every live node of the attempt aborts it"
        self.failed.add(d.info.id if how == "handoff" else failed.info.id)
        if how == "handoff" and p is not d:
            if p.info.id in self.handoff_failed or self.usable("d") <= self.failed:
                self.failed.add(p.info.id)
            self.handoff_failed.add(p.info.id)
        self.number, self.base = self.number + 1, self.delivered
        self.gone.clear()
        self.check_attempt()
        if p is not d and p.info.id in self.usable("p") - self.failed:
            assert self.here.attempt(self.number)[0] is p, "the prefill node that has the prompt's KV is chosen again"


@settings(max_examples=200)
@given(script=st.lists(st.tuples(st.sampled_from(PROGRESS), st.sampled_from(FAULTS)), min_size=1, max_size=8))
@example(script=[("token hand_off", "p_lost"), ("token", "d_lost")])
@example(script=[("", "d_lost"), ("", "d_lost"), *[("", "p_handoff")] * 5])
def test_after_any_failures_each_token_is_delivered_once_and_all_resources_are_released(
    script: list[tuple[str, str]],
) -> None:
    async def play() -> None:
        it = Play()
        run = await it.here.submit()
        it.check_attempt()
        acts = [act for progress, fault in script for act in (*progress.split(), fault)]
        for act in [*acts, "hand_off", *["token"] * len(ANSWER)]:
            if it.delivered == len(ANSWER):
                break
            if act in FAULTS:
                await it.fail(act)
            else:
                it.advance(act)
        assert tokens_of(await collect(run)) == ANSWER
        assert it.here.counts()["moved"] == it.number
        it.here.check_over()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health_module, "MAX_FAILURES", 100)  # so that failed handoffs eject no node
        asyncio.run(play())


async def test_a_request_fails_after_its_last_attempt() -> None:
    here = stage("p0 d0", max_attempts=2)
    run = await here.submit()
    for number in range(2):
        here.attempt(number)[0].send(TokenDelta(f"r.0.{number}", error="handoff: no", retry=True))
        await settle()
    with pytest.raises(UnavailableError, match="after 2 attempts") as caught:
        await collect(run)
    assert caught.value.status == 503
    assert (here.counts()["failed"], len(here.sent())) == (1, 2)
    here.check_over()


async def test_a_first_token_that_was_lost_with_the_prefill_node_is_generated_again() -> None:
    """The prefill node dies after it has committed the handoff, and before the router has received the first token."""
    here = stage("p0 p1 d0 d1")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    d.send(TokenDelta(submit.id, handed_off=True), *generated(submit.id, 1)[:2])
    p.die()
    d.send(*generated(submit.id, 3))
    await settle()
    p, d, submit = here.attempt(1)
    p.send(token(submit.id, 0))
    d.send(*generated(submit.id, 1))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_a_request_whose_parameters_allow_no_token_is_refused_without_a_retry() -> None:
    here = stage("p0 d0 d1")
    run = await here.submit()
    here.p0.send(TokenDelta("r.0.0", error="no_token"))
    with pytest.raises(RequestError, match="No token is allowed") as caught:
        await collect(run)
    assert (caught.value.status, len(here.sent())) == (400, 1)
    here.check_over()


@pytest.mark.parametrize("reason", ["internal", "numerical"])
async def test_a_failure_of_the_model_is_a_server_error_without_a_retry(reason: str) -> None:
    here = stage("p0 d0 d1")
    run = await here.submit()
    here.p0.send(TokenDelta("r.0.0", error=reason))
    with pytest.raises(UnavailableError, match=reason) as caught:
        await collect(run)
    assert (caught.value.status, len(here.sent())) == (500, 1)
    here.check_over()


async def test_a_request_that_a_node_rejects_is_a_client_error() -> None:
    here = stage()
    run = await here.submit(n=2)
    here.p0.send(token("r.0.0", 0))
    here.d0.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    here.d0.send(TokenDelta("r.1.0", error="beyond the vocabulary"))
    with pytest.raises(RequestError, match="beyond the vocabulary"):
        await collect(run)
    assert "r.0.0" in here.d0.aborts, "the other samples of the request end too"
    assert (here.counts()["failed"], here.counts()["cancelled"]) == (1, 1)
    here.check_over()


async def test_without_nodes_new_requests_fail_and_running_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "WAIT_NEW_S", 0.02)
    here = stage("d0")
    run = await here.submit()
    here.d0.send(*[token("r.0.0", position) for position in range(3)])
    here.d0.die()
    await settle()
    with pytest.raises(UnavailableError, match="No node"):
        await Reader(here.dispatch, GenerationRequest("late", PROMPT, 4, SamplingParams())).admitted()
    assert not here.dispatch.ready()
    here.d0.revive()
    await settle()
    here.d0.send(*generated("r.0.1", 3))
    assert tokens_of(await collect(run)) == ANSWER
    monkeypatch.setattr(dispatch_module, "WAIT_UNDER_WAY_S", 0.02)
    run = await here.submit(name="waiting")
    here.d0.die()
    with pytest.raises(UnavailableError, match="No node"):
        await collect(run)
    assert (here.counts()["finished"], here.counts()["failed"]) == (1, 1)
    here.check_over()


async def test_nodes_that_are_gone_are_not_said_to_be_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "WAIT_NEW_S", 0.02)
    for nodes, code in (("", "starting"), ("d0", "node_lost")):
        here = stage(nodes)
        here.fleet.routable()
        for name in list(here.fleet.connections):
            del here.fleet.connections[name]
        here.fleet.notify()
        with pytest.raises(UnavailableError) as refused:
            await Reader(here.dispatch, GenerationRequest("late", PROMPT, 4, SamplingParams())).admitted()
        assert refused.value.code == code


async def test_waiting_for_a_node_does_not_count_as_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    here = stage("p0 d0", max_attempts=1)
    with monkeypatch.context() as patch:
        patch.setattr(here.fleet, "choose", lambda *_: None)
        run = await here.submit()
        for _ in range(3):
            for change in (here.d0.fall_silent, here.d0.revive):
                change()
                await settle()
    assert here.sent() == []
    here.p0.fall_silent()
    await settle()
    here.d0.send(*generated("r.0.0"))
    assert tokens_of(await collect(run)) == ANSWER
    assert here.counts()["moved"] == 0
    here.check_over()


def logprobs(*tokens: int) -> list[Logprobs]:
    return [Logprobs(token, -1.0, 1) for token in tokens]


@pytest.mark.parametrize("chunks_before", [0, 1, 2])
async def test_prompt_logprobs_are_delivered_once_and_complete_after_a_failure(chunks_before: int) -> None:
    here = stage("p0 p1 p2 d0")
    run = await here.submit(prompt_logprobs=1)
    chunks = [logprobs(*PROMPT[1:4]), logprobs(*PROMPT[4:8]), logprobs(*PROMPT[8:])]
    for number, count in ((0, chunks_before), (1, 2)):
        p, _, submit = here.attempt(number)
        assert submit.sampling.prompt_logprobs == 1
        p.send(*[TokenDelta(submit.id, prompt_logprobs=chunk) for chunk in chunks[:count]])
        if number == 0:
            p.die()
            await settle()
    p.send(token("r.0.1", 0, prompt_logprobs=chunks[2]))
    here.d0.die()
    here.d0.revive()
    await settle()
    p, _, submit = here.attempt(2)
    assert submit.sampling.prompt_logprobs is None, "they were delivered with the first token"
    p.send(token(submit.id, 1))
    here.d0.send(TokenDelta(submit.id, prompt_logprobs=chunks[0]))  # a preempted request computes its prompt again
    here.d0.send(*generated(submit.id, 2))
    pieces = await collect(run)
    assert tokens_of(pieces) == ANSWER
    assert [entry.token for entry in pieces[0].delta.prompt_logprobs] == PROMPT[1:]
    assert not any(piece.delta.prompt_logprobs for piece in pieces[1:])
    here.check_over()


# ---- samples ----------------------------------------------------------------------------------------------------


async def test_further_samples_start_on_the_node_that_has_the_prompts_kv() -> None:
    here = stage("p0 d0 d1")
    run = await here.submit(n=3, prompt_logprobs=0)
    assert [submit.id for _, submit in here.sent()] == ["r.0.0"]
    p0, home, first = here.attempt(0)
    p0.send(token("r.0.0", 0))
    await settle()
    assert len(here.sent()) == 1, "the prompt's KV is not at the decode node yet"
    home.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    siblings = [here.attempt(0, sample) for sample in (1, 2)]
    for node, _, submit in siblings:
        assert (node, submit.decode_node, submit.sampling.prompt_logprobs) == (home, "", None)
    assert len({submit.sampling.seed for _, _, submit in [(p0, home, first), *siblings]}) == 3
    assert all(0 <= submit.sampling.seed < 2**63 for _, _, submit in siblings)
    home.send(*generated("r.0.0", 1), *generated("r.2.0"), *generated("r.1.0"))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(3)] == [ANSWER] * 3
    assert here.counts()["finished"] == 3
    here.check_over()


async def test_further_samples_of_a_recurrent_model_get_the_state_from_the_prefill_node() -> None:
    here = stage("p0 p1 d0 d1")
    for node in here.nodes.values():
        node.info.attributes["recurrent"] = "true"
    run = await here.submit(n=3)
    p0, home, _ = here.attempt(0)
    p0.send(token("r.0.0", 0))
    home.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    for sample in (1, 2):
        node, decode, submit = here.attempt(0, sample)
        assert (node, decode, submit.decode_node) == (p0, home, home.info.address)
    assert p0.load.outstanding_tokens == 2, "8 of 9 tokens are cached for each sample"
    p0.send(token("r.1.0", 0))
    home.send(TokenDelta("r.1.0", 1, handed_off=True), *generated("r.0.0", 1), *generated("r.1.0", 1))
    p0.die()
    await settle()
    node, _, submit = here.attempt(1, 2)
    assert (node, submit.decode_node) == (home, ""), "the prefill node is gone"
    home.send(*generated("r.2.1"))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(3)] == [ANSWER] * 3
    here.check_over()


async def test_samples_count_the_prompt_that_they_share_once() -> None:
    here = stage("d0")
    run = await here.submit(n=3)
    here.d0.send(token("r.0.0", 0))
    await settle()
    shared, own = 8, 1 + len(ANSWER) // 2  # tokens of the prompt, whose last block is not full
    assert here.d0.load.kv_tokens == shared + 3 * own
    here.d0.send(*generated("r.0.0", 1))
    await settle()
    assert here.d0.load.kv_tokens == shared + 2 * own, "the other samples still hold the prompt"
    here.d0.send(*generated("r.1.0"), *generated("r.2.0"))
    await collect(run)
    here.check_over()


async def test_nodes_without_a_prefix_cache_compute_the_same_prompt_again() -> None:
    here = stage("p0 d0", disaggregate="always")
    for node in here.nodes.values():
        node.info.attributes["prefix_caching"] = "false"
    runs = [await here.submit(n=2), await here.submit(name="same")]
    assert (here.p0.load.outstanding_tokens, here.queue.pending_prefill_tokens) == (2 * len(PROMPT), 2 * len(PROMPT))
    here.p0.send(token("r.0.0", 0))
    here.d0.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    assert here.attempt(0, 1)[:2] == (here.p0, here.d0), "the KV of the first sample is of no use to the second"
    for run in runs:
        await run.close()
    here.check_over()


async def test_logprobs_of_a_part_of_the_prompt_do_not_start_further_samples() -> None:
    here = stage("d0 d1")
    run = await here.submit(n=2, prompt_logprobs=0)
    home, _, first = here.attempt(0)
    for start in (1, 5):
        scores = [Logprobs(token, -1.0, 1, [], []) for token in PROMPT[start : start + 4]]
        home.send(TokenDelta(first.id, 0, prompt_logprobs=scores))
        await settle()
        assert len(here.sent()) == 1
        assert (home.load.outstanding_tokens, here.queue.pending_prefill_tokens) == (len(PROMPT), len(PROMPT))
    home.send(token(first.id, 0))
    await settle()
    assert here.attempt(0, 1)[0] is home
    assert (home.load.outstanding_tokens, here.queue.pending_prefill_tokens) == (1, 0), "8 of 9 tokens are cached"
    home.send(*generated("r.0.0", 1), *generated("r.1.0"))
    pieces = await collect(run)
    assert [entry.token for entry in pieces[0].delta.prompt_logprobs] == PROMPT[1:]
    here.check_over()


async def test_further_samples_wait_for_the_prompts_logprobs_because_the_client_does_not_read_them_before() -> None:
    here = stage("p0 d0")
    run = await here.submit(n=2, prompt_logprobs=0)
    here.d0.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    assert len(here.sent()) == 1, "the first token is still on its way, with the logprobs"
    here.p0.send(token("r.0.0", 0, prompt_logprobs=logprobs(*PROMPT[1:])))
    await settle()
    assert here.attempt(0, 1)[0] is here.d0
    here.d0.send(*generated("r.0.0", 1), *generated("r.1.0"))
    await collect(run)
    here.check_over()


async def test_further_samples_get_the_pixels_of_images_that_the_cached_kv_may_not_cover() -> None:
    here = stage("p0 d0 d1")
    run = await here.submit(n=2, media=[Media(0, 1, 3, b"digest", 1, 3, bytes(9))])
    here.p0.send(token("r.0.0", 0))
    _, home, _ = here.attempt(0)
    home.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    node, _, submit = here.attempt(0, 1)
    assert (node, [(one.pixels, one.encoder) for one in submit.media]) == (home, [(bytes(9), here.p0.info.address)])
    home.send(*generated("r.0.0", 1), *generated("r.1.0"))
    await collect(run)
    here.check_over()


async def test_a_request_can_continue_the_samples_of_another() -> None:
    here, seeds = stage("d0 d1"), {}
    for first_sample in (0, 1, 2):
        run = await here.submit(n=2, seed=7, first_sample=first_sample)
        seeds[first_sample] = here.attempt(0, first_sample)[2].sampling.seed
        run.task.cancel()
        await settle()
    assert seeds[2] == (7 + 2 * (seeds[1] - 7)) % 2**63
    assert len(set(seeds.values())) == 3


async def test_after_the_loss_of_their_node_samples_are_retried_with_their_seeds() -> None:
    here = stage("p0 d0 d1")
    run = await here.submit(n=2, seed=7, tenant="acme")
    _, home, first = here.attempt(0)
    here.p0.send(token("r.0.0", 0))
    home.send(TokenDelta("r.0.0", 1, handed_off=True))
    await settle()
    home.die()
    await settle()
    for sample, seed in ((0, first.sampling.seed), (1, here.attempt(0, 1)[2].sampling.seed)):
        p, d, submit = here.attempt(1, sample)
        assert (p, submit.sampling.seed, submit.tenant) == (here.p0, seed, "acme")
        assert d is not home
        start = len(unpack_ids(submit.tokens)) - len(PROMPT)
        p.send(token(submit.id, start))
        d.send(*generated(submit.id, start + 1))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(2)] == [ANSWER, ANSWER]
    here.check_over()


async def test_closing_one_sample_ends_it_on_every_node_and_leaves_the_others() -> None:
    here = stage()
    run = await here.submit(n=3)
    run.enough(0)
    run.enough(2)
    here.p0.send(token("r.0.0", 0))
    await settle()
    assert ("r.0.0" in here.p0.aborts, "r.0.0" in here.d0.aborts) == (True, True)
    for sample in (1, 2):
        p, d, submit = here.attempt(0, sample)
        p.send(token(submit.id, 0))
        await settle()
        if sample == 2:
            assert submit.id in d.aborts
        else:
            d.send(*generated(submit.id, 1))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(3)] == [ANSWER[:1], ANSWER, ANSWER[:1]]
    assert (here.counts()["total"], here.counts()["finished"]) == (3, 3), "a sample closed by its client is finished"
    here.check_over()


@pytest.mark.parametrize("is_handed_off", [False, True])
async def test_closing_a_request_ends_every_sample_on_its_nodes(is_handed_off: bool) -> None:
    here = stage()
    run = await here.submit(n=2)
    if is_handed_off:
        here.p0.send(token("r.0.0", 0))
        here.d0.send(TokenDelta("r.0.0", 1, handed_off=True))
        await settle()
    await run.close()
    await run.close()
    assert (here.p0.aborts, sorted(here.d0.aborts)) == (["r.0.0"], ["r.0.0", "r.1.0"] if is_handed_off else ["r.0.0"])
    here.d0.send(*generated("r.0.0", 1))  # too late to change anything
    assert all(piece.index == 0 for piece in await collect(run))
    here.check_over()


async def test_a_request_cancelled_before_it_is_sent_ends() -> None:
    here = stage()
    async with here.dispatch.admit(GenerationRequest("r", PROMPT, 4, SamplingParams(), n=2)):
        assert here.counts()["running"] == 2
    assert (here.sent(), here.counts()["cancelled"]) == ([], 2)
    here.check_over()


# ---- where a prompt is computed, and which requests are refused -------------------------------------------------

SLOW = CostModel(overhead=1.0)  # 1 s per step
QUICK = CostModel(overhead=0.001, per_token=1e-5)


def learn(here: Stage, **costs: CostModel) -> None:
    for name, cost in costs.items():
        # After this number of prompt tokens, the router trusts the cost model of the node.
        here.nodes[name].report(NodeStats(cost=cost.packed(), prompt_tokens=100_000))


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
async def test_placement_follows_the_mode_or_the_prediction_and_fails_over_in_each(mode: str) -> None:
    here = stage("p0 d0 d1", disaggregate=mode)
    learn(here, p0=SLOW, d0=QUICK, d1=QUICK)
    run = await here.submit()
    computes, generates, submit = here.attempt(0)
    reason = {"auto": "local_sooner", "always": "disaggregated", "never": "never"}[mode]
    assert (computes is generates) is (mode != "always")
    assert here.dispatch.status()["placements"] == {reason: 1}
    attempt, prefill, decode, given_reason, local_s, remote_s = here.records.placements[0]
    assert (attempt, prefill, decode, given_reason) == (
        submit.id,
        "p0" if mode == "always" else None,
        generates.info.id,
        reason,
    )
    assert local_s == pytest.approx(0.001 + 1e-5 * len(PROMPT))
    assert remote_s == (0.0 if mode == "never" else pytest.approx(1.0))
    generates.die()
    await settle()
    computes, generates, submit = here.attempt(1)
    (computes if computes is not generates else generates).send(token(submit.id, 0))
    generates.send(TokenDelta(submit.id, handed_off=True), *generated(submit.id, 1))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


@pytest.mark.parametrize(
    ("small", "max_tokens", "nodes"),
    [
        ("p0", 4, ("p1", "d0")),
        ("p0 p1", 4, ("d0", "d0")),  # the prefill nodes cannot hold the prompt
        ("d0", 4, ("p0", "d1")),
        ("p0 p1 d0", 1, ("d1", "d1")),
        ("p0 d0 d1", 4, ("p1", "d0")),  # no node has room for the answer either, so the nodes decide
    ],
)
async def test_a_request_goes_to_nodes_whose_kv_pools_can_hold_it(
    small: str, max_tokens: int, nodes: tuple[str, str]
) -> None:
    here = stage("p0 p1 d0 d1", disaggregate="always")
    for name in small.split():
        here.nodes[name].info.num_blocks = 3  # 2 blocks of 4 tokens; the prompt has 9
    here.fleet.notify()
    candidate = here.fleet.choose("r", array("i", PROMPT), b"", (), "always", max_len=len(PROMPT) + max_tokens)
    assert candidate is not None
    assert (candidate.placement.prefill or candidate.placement.decode, candidate.placement.decode) == nodes


async def test_a_cached_prefix_on_a_small_node_does_not_attract_a_request_that_it_cannot_hold() -> None:
    here = stage(" ".join(f"d{number}" for number in range(20)))
    here.d7.info.num_blocks = 3
    here.fleet.notify()
    here.fleet.prefixes.record(block_hashes(array("i", PROMPT), 4, b""), "d7")
    run = await here.submit()
    (name, submit) = here.sent()[0]
    assert name != "d7"
    here.nodes[name].send(*generated(submit.id))
    await collect(run)
    here.check_over()


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
async def test_nodes_that_cannot_work_alone_are_placed_in_pairs(mode: str) -> None:
    """SGLang servers cannot work alone: a decode server computes no prompt, even for a second sample or a retry."""
    here = stage("p0 d0 d1", disaggregate=mode)
    learn(here, p0=SLOW, d0=QUICK, d1=QUICK)
    here.p0.info.attributes["generates"] = "no"
    for node in (here.d0, here.d1):
        node.info.attributes["computes_prompts"] = "no"
    here.fleet.notify()
    run = await here.submit(n=2)
    for identity, number in ((0, 0), (1, 0)):
        _, d, submit = here.attempt(number, identity)
        d.send(TokenDelta(submit.id, handed_off=True), token(submit.id, 0))
        await settle()
    d.send(TokenDelta(submit.id, error="handoff: no", retry=True))
    await settle()
    assert here.attempt(1, 1)[0] is here.p0
    for sample, number in ((0, 0), (1, 1)):
        _, d, submit = here.attempt(number, sample)
        d.send(*generated(submit.id, 1))
    await collect(run)
    assert here.dispatch.status()["placements"] == {"disaggregated": 3}
    here.p0.die()
    await settle()
    assert not here.dispatch.ready()
    with pytest.raises(UnavailableError, match="No prefill node is ready") as failure:
        await collect(await here.submit())
    assert failure.value.code == "no_prefill_node"
    here.p0.revive()
    here.d0.die()
    here.d1.die()
    with pytest.raises(UnavailableError) as failure:
        await collect(await here.submit())
    assert failure.value.code == "no_decode_node"
    here.check_over()


async def test_a_new_request_whose_first_token_would_be_late_is_refused() -> None:
    here = stage("p0 p1 d0", disaggregate="always", ttft_slo_s=1.5)
    run = await here.submit()
    p, d, submit = here.attempt(0)
    p.send(token(submit.id, 0))
    learn(here, p0=CostModel(overhead=4.0), p1=CostModel(overhead=4.0), d0=QUICK)
    with pytest.raises(
        UnavailableError, match="predicted time to the first token is 4000 ms, over the limit of 1500 ms"
    ) as caught:
        await collect(await here.submit(n=2))
    assert (caught.value.status, caught.value.retry_after_s) == (429, pytest.approx(2.5))
    assert here.counts()["refused"] == 2, "both samples are refused"
    await (await here.submit(first_sample=8)).close()  # samples 0 to 7 may have been sent already
    p.die()
    await settle()
    p, d, submit = here.attempt(1)
    p.send(token(submit.id, 1))
    d.send(TokenDelta(submit.id, handed_off=True), *generated(submit.id, 2))
    assert tokens_of(await collect(run)) == ANSWER
    learn(here, p0=SLOW, p1=SLOW)
    await (await here.submit()).close()
    counts = here.counts()
    assert [counts[how] for how in ("total", "finished", "cancelled", "failed", "refused")] == [5, 1, 2, 0, 2]
    here.check_over()


async def test_a_node_with_a_stale_model_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "STALE_S", 1e9)  # longer than any stall of the test machine
    here = stage("p0 d0", disaggregate="auto", ttft_slo_s=1.5)
    learn(here, p0=CostModel(overhead=90.0), d0=CostModel(overhead=80.0))
    with pytest.raises(UnavailableError, match="predicted time to the first token is 80000 ms"):
        await collect(await here.submit())
    monkeypatch.setattr(load_module, "STALE_S", -1.0)
    run = await here.submit()
    computes, generates, _ = here.attempt(0)
    assert (computes, generates) == (here.p0, here.d0), "the stale prefill node is measured again"
    monkeypatch.setattr(load_module, "STALE_S", 1e9)
    with pytest.raises(UnavailableError, match="predicted time to the first token is 80000 ms"):
        await collect(await here.submit())
    await run.close()
    assert here.dispatch.status()["placements"] == {"stale_model": 1}
    here.check_over()


async def test_a_request_counts_as_a_decode_after_its_prefill() -> None:
    here = stage("p0 d0", disaggregate="always")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    assert (d.view().running, d.view().num_decodes) == (1, 0), "its prompt is not computed yet"
    p.send(token(submit.id, 0))
    d.send(TokenDelta(submit.id, handed_off=True))
    assert (d.view().running, d.view().num_decodes) == (1, 1)
    await run.close()
    here.check_over()


async def test_migrations_with_progress_do_not_count_as_failures() -> None:
    here = stage("d0 d1", max_attempts=2)
    run = await here.submit()
    last = len(ANSWER) - 1
    for number in range(last):
        _, d, submit = here.attempt(number)
        d.send(token(submit.id, number), TokenDelta(submit.id, error="becomes a prefill node", retry=True))
        await settle()
    assert here.counts()["moved"] == last
    _, d, submit = here.attempt(last)
    d.send(token(submit.id, last))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


def versions(here: Stage, **given: str) -> None:
    """Set the nodes' versions. A version is REVISION or REVISION/BUILD, where REVISION is the model's revision."""
    for name, version in given.items():
        revision, _, build = version.partition("/")
        node = here.nodes[name]
        node.info = replace(node.info, fingerprint=version, attributes={"revision": revision, "build": build})
    here.fleet.notify()


async def lose_nodes(here: Stage, count: int) -> list[SimulatedNode]:
    """Let `count` nodes, one after the other, die after a token of the request. Return the nodes."""
    seen = []
    for number in range(count):
        _, d, submit = here.attempt(number)
        seen.append(d)
        d.send(token(submit.id, number))
        d.die()
        await settle()
    return seen


async def test_a_request_with_tokens_continues_only_on_nodes_with_the_same_revision_of_the_model() -> None:
    here = stage("d0 d1 d2 d3", max_attempts=4)
    versions(here, d0="old", d1="old", d2="new", d3="new")
    run = await here.submit()
    seen = await lose_nodes(here, 2)
    assert len({node.info.id for node in seen}) == 2
    assert len({node.version for node in seen}) == 1
    assert len(here.sent()) == 2, "the request waits, although nodes with another revision are ready"
    seen[0].revive()
    await settle()
    _, d, submit = here.attempt(2)
    assert d is seen[0]
    d.send(*generated(submit.id, 2))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_a_request_without_tokens_may_start_again_on_another_revision_of_the_model() -> None:
    here = stage("d0 d1")
    versions(here, d0="old", d1="new")
    run = await here.submit()
    _, first, _ = here.attempt(0)
    first.die()
    await settle()
    _, second, submit = here.attempt(1)
    assert {first.info.id, second.info.id} == {"d0", "d1"}
    second.send(*generated(submit.id))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_later_samples_may_start_on_another_revision_if_no_node_with_the_first_is_left() -> None:
    """Sample 0 continues on a node that drains, and later on a new node with the same revision."""
    here = stage("d0 d1 d2")
    versions(here, d0="old", d1="new", d2="old")
    for name in ("d1", "d2"):
        here.nodes[name].info = replace(here.nodes[name].info, state="starting")
    here.fleet.notify()
    run = await here.submit(n=2)
    _, first, submit = here.attempt(0)
    assert first.info.id == "d0"
    for name, state in (("d0", "draining"), ("d1", "ready")):
        here.nodes[name].info = replace(here.nodes[name].info, state=state)
    here.fleet.notify()
    first.send(token(submit.id, 0))
    await settle()
    _, second, other = here.attempt(0, sample=1)
    assert second.info.id == "d1"
    first.die()
    await settle()
    assert len(here.sent()) == 2, "sample 0 has tokens of the old revision, so it waits"
    here.nodes["d2"].info = replace(here.nodes["d2"].info, state="ready")
    here.fleet.notify()
    await settle()
    _, third, again = here.attempt(1)
    assert third.info.id == "d2"
    third.send(token(again.id, 1))
    second.send(token(other.id, 0))
    await settle()
    second.die()
    await settle()
    assert len(here.sent()) == 3, "sample 1 has tokens of the new revision, so it waits, too"
    second.revive()
    await settle()
    third.send(*generated(again.id, 2))
    second.send(*generated(here.attempt(1, sample=1)[2].id, 1))
    pieces = await collect(run)
    assert tokens_of(pieces) == tokens_of(pieces, 1) == ANSWER
    here.check_over()


async def test_a_request_with_tokens_stays_on_its_build_while_that_has_nodes() -> None:
    here = stage("d0 d1 d2 d3", max_attempts=6)
    versions(here, d0="m/1", d1="m/1", d2="m/2", d3="m/2")
    run = await here.submit()
    seen = await lose_nodes(here, 3)
    assert len({node.info.id for node in seen}) == 3
    assert seen[0].version == seen[1].version != seen[2].version, "another build only when the first one is gone"
    _, d, submit = here.attempt(3)
    assert d.version == seen[2].version
    d.send(*generated(submit.id, 3))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_in_a_large_pool_a_prompt_is_placed_on_a_routable_node_with_its_prefix() -> None:
    here = stage(" ".join(f"{role}{number}" for role in "pd" for number in range(40)))
    row = array("i", PROMPT * 4)
    here.fleet.prefixes.record(block_hashes(row, 4, b""), "p7")
    here.fleet.prefixes.record(block_hashes(row[:8], 4, b""), "p8")

    def placed(avoid: set[str]) -> tuple[set[str | None], set[str]]:
        proposals = [here.fleet.choose(f"r{number}", row, b"", avoid, "always") for number in range(200)]
        found = [proposal.placement for proposal in proposals if proposal is not None]
        return {placement.prefill for placement in found}, {placement.decode for placement in found}

    prefill, decode = placed(set())
    assert prefill == {"p7"}
    assert len(decode) > 30, "equal nodes are drawn at random"
    assert placed({"p7"})[0] == {"p8"}, "the node with the next longest prefix is chosen"
    here.p7.die()
    assert placed(set())[0] == {"p8"}
    here.p8.info = replace(here.p8.info, state="draining")
    here.fleet.notify()
    here.d3.die()
    prefill, decode = placed(set())
    assert len(prefill) > 20
    assert not prefill & {"p7", "p8"}
    assert "d3" not in decode


async def test_in_a_large_pool_a_prefill_node_hands_off_only_to_the_owner_of_its_pool() -> None:
    here = stage(" ".join(f"{role}{number}" for role in "pd" for number in range(40)))
    for number in range(40):
        here.nodes[f"p{number}"].info = replace(here.nodes[f"p{number}"].info, shared_pool_owner=f"d{number}")
    for number in range(50):
        proposal = here.fleet.choose(f"r{number}", array("i", PROMPT), b"", (), "always")
        assert proposal is not None
        assert proposal.placement.prefill == proposal.placement.decode.replace("d", "p")


# ---- answers of vLLM servers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_retries", [False, True])
@pytest.mark.parametrize(
    ("resumes", "sampling", "why"),
    [
        ("", {"temperature": 1.0}, ""),  # Baton's own nodes
        ("greedy, seeded", {"temperature": 1.0}, ""),
        ("greedy", {}, ""),
        ("greedy", {"temperature": 1.0}, "seeded"),
        ("none", {}, "greedy"),
        ("greedy, seeded", {"presence_penalty": 0.5}, "penalties"),
        ("greedy, seeded", {"frequency_penalty": 0.5}, "penalties"),
    ],
)
async def test_a_retry_that_may_change_the_answer_is_counted_or_refused(
    resumes: str, sampling: dict[str, float], why: str, exact_retries: bool
) -> None:
    here = stage("d0 d1", exact_retries=exact_retries)
    for node in (here.d0, here.d1):
        node.info.attributes |= {"resumes": resumes} if resumes else {}
    run = await here.submit(**sampling)
    _, lost, submit = here.attempt(0)
    lost.send(*generated(submit.id)[:2])
    await settle()
    lost.die()
    await settle()
    if why and exact_retries:
        with pytest.raises(UnavailableError, match=why) as failure:
            await collect(run)
        assert failure.value.code == "not_resumable"
    else:
        _, other, submit = here.attempt(1)
        other.send(*generated(submit.id, 2))
        assert tokens_of(await collect(run)) == ANSWER
        assert here.dispatch.status()["inexact_retries"] == ({why: 1} if why else {})
    here.check_over()


async def test_a_retry_without_tokens_so_far_changes_nothing() -> None:
    here = stage("d0 d1", exact_retries=True)
    for node in (here.d0, here.d1):
        node.info.attributes["resumes"] = "none"
    run = await here.submit()
    here.attempt(0)[1].die()
    await settle()
    _, other, submit = here.attempt(1)
    other.send(*generated(submit.id))
    assert tokens_of(await collect(run)) == ANSWER
    assert here.dispatch.status()["inexact_retries"] == {}
