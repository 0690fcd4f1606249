"""The dispatcher over simulated nodes. Whatever fails, a client gets each token once, and all resources are released.

The node pool is real; only its nodes are simulated, without streams.
"""

import asyncio
from array import array
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.dispatch import dispatcher as dispatch_module
from router.dispatch.requests import GenerationRequest, merge
from router.nodes import health as standing
from router.nodes import load as load_module
from scheduler.cost import CostModel
from scheduler.prefix import block_hashes
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import Logprobs, NodeStats, SamplingParams, TokenDelta, pack_ids, unpack_ids
from tests.router.played import (
    ANSWER,
    PROMPT,
    Played,
    Reader,
    Stage,
    collect,
    generated,
    no_pauses,
    stage,
    token,
    tokens_of,
    turns,
)

__all__ = ["no_pauses"]  # a fixture that every test here uses


# ---- one attempt ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(data=st.data())
def test_words_of_both_nodes_in_any_order_doubled_or_late_give_the_tokens_in_order(data: st.DataObject) -> None:
    async def play() -> None:
        here = stage()
        run = await here.submit()
        p0, d0, submit = here.attempt(0)
        words = [(p0, token(submit.id, 0, cached_tokens=4)), (d0, TokenDelta(submit.id, 1, handed_off=True))]
        words += [(d0, delta) for delta in generated(submit.id, 1)]
        words += data.draw(st.lists(st.sampled_from(words), max_size=6))
        words = data.draw(st.permutations(words))
        first_of_decode = [node for node, _ in words].index(d0)
        late = data.draw(st.integers(first_of_decode + 1, len(words)))
        words.insert(late, (p0, TokenDelta(submit.id, error="handoff: it did not hear", retry=True)))
        for node, delta in words:
            node.say(delta)
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
        pieces = await collect(run)
        assert tokens_of(pieces) == ANSWER
        assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert [piece.delta.cached_tokens for piece in pieces] == [4] + [0] * (len(pieces) - 1)
        assert (p0.aborts, d0.aborts) == ([], [])
        here.check_over()

    asyncio.run(play())


async def test_a_request_over_at_its_first_token_needs_no_word_of_the_decode_node() -> None:
    here = stage()
    run = await here.submit(max_tokens=1)
    here.p0.say(TokenDelta("r.0.0", 0, pack_ids([5]), finish="length"))
    here.d0.say(TokenDelta("r.0.0", error="handoff: the prefill node stopped", retry=True))
    assert [(piece.tokens, piece.finish) for piece in await collect(run)] == [([5], "length")]
    here.check_over()


async def test_a_finish_may_come_without_tokens() -> None:
    here = stage("d0")
    run = await here.submit()
    here.d0.say(TokenDelta("r.0.0", 0, pack_ids([5])), TokenDelta("r.0.0", 1, finish="stop"))
    assert [(piece.tokens, piece.finish) for piece in await collect(run)] == [([5], None), ([], "stop")]
    here.check_over()


# ---- failures ---------------------------------------------------------------------------------------------------

FAULTS = ("p_lost", "d_lost", "p_error", "d_error", "p_handoff")
PROGRESS = ("", "token", "land", "token land", "land token", "land token token", "token land token")


@dataclass
class Play:
    """One request over three prefill and three decode nodes, and the expected state of its current attempt."""

    here: Stage = field(default_factory=lambda: stage("p0 p1 p2 d0 d1 d2", max_attempts=30))
    number: int = 0
    base: int = 0  # tokens that the client received before this attempt
    told: int = 0
    landed: bool = False
    failed: set[str] = field(default_factory=set)  # nodes that failed in any attempt so far
    handed: set[str] = field(default_factory=set)  # prefill nodes whose handoff failed
    out: set[str] = field(default_factory=set)  # nodes that died and came back: placement prefers others
    gone: list[Played] = field(default_factory=list)  # nodes that died during this attempt

    def usable(self, role: str) -> set[str]:
        names = {f"{role}{number}" for number in range(3)}
        return names - self.out or names

    def check_attempt(self) -> None:
        p, d, submit = self.here.attempt(self.number)
        assert unpack_ids(submit.tokens) == PROMPT + ANSWER[: self.base]
        assert (submit.num_prompt, submit.max_tokens) == (len(PROMPT), len(ANSWER))
        assert d.load.kv_tokens == len(PROMPT) + self.base + (len(ANSWER) - self.base) // 2
        self.landed = p is d
        assert self.landed is (self.usable("p") <= self.failed), "a decode node alone, where all others failed"
        assert self.landed or p.info.id in self.usable("p") - self.failed
        assert d.info.id in (self.usable("d") - self.failed or self.usable("d"))

    def advance(self, act: str) -> None:
        """Report the next token or the end of the handoff, if that can happen now."""
        p, d, submit = self.here.attempt(self.number)
        is_first = self.told == self.base
        if act == "land" and not self.landed:
            self.landed = True
            d.say(TokenDelta(submit.id, handed_off=True))
        elif act == "token" and (is_first or self.landed) and not (is_first and p in self.gone):
            (p if is_first else d).say(token(submit.id, self.told))
            self.told += 1

    async def fail(self, act: str) -> None:
        p, d, submit = self.here.attempt(self.number)
        who, how = (p if act.startswith("p") else d), act.partition("_")[2]
        if how == "lost":
            who.die()
            who.revive()
            self.gone.append(who)
            self.out.add(who.info.id)
        else:
            who.say(TokenDelta(submit.id, error="handoff: no" if how == "handoff" else "no", retry=True))
        await turns()
        if who is not d and self.landed and (self.told > self.base or how != "lost"):
            return  # the attempt no longer needs this node
        for node in (p, d):
            is_told = submit.id in node.aborts
            assert is_told is (node not in self.gone), "whoever may still work on it is told to stop"
        self.failed.add(d.info.id if how == "handoff" else who.info.id)
        if how == "handoff" and p is not d:
            if p.info.id in self.handed or self.usable("d") <= self.failed:
                self.failed.add(p.info.id)
            self.handed.add(p.info.id)
        self.number, self.base = self.number + 1, self.told
        self.gone.clear()
        self.check_attempt()
        if p is not d and p.info.id in self.usable("p") - self.failed:
            assert self.here.attempt(self.number)[0] is p, "it has the prompt's KV"


@settings(max_examples=200)
@given(script=st.lists(st.tuples(st.sampled_from(PROGRESS), st.sampled_from(FAULTS)), min_size=1, max_size=8))
@example(script=[("token land", "p_lost"), ("token", "d_lost")])
@example(script=[("", "d_lost"), ("", "d_lost"), *[("", "p_handoff")] * 5])
def test_whatever_fails_and_when_each_token_is_told_once_and_all_is_given_back(script: list[tuple[str, str]]) -> None:
    async def play() -> None:
        it = Play()
        run = await it.here.submit()
        it.check_attempt()
        acts = [act for progress, fault in script for act in (*progress.split(), fault)]
        for act in [*acts, "land", *["token"] * len(ANSWER)]:
            if it.told == len(ANSWER):
                break
            if act in FAULTS:
                await it.fail(act)
            else:
                it.advance(act)
        assert tokens_of(await collect(run)) == ANSWER
        assert it.here.counts()["moved"] == it.number
        it.here.check_over()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standing, "MAX_FAILURES", 100)  # so that failed handoffs eject no node
        asyncio.run(play())


async def test_a_request_is_given_up_after_its_last_attempt() -> None:
    here = stage("p0 d0", max_attempts=2)
    run = await here.submit()
    for number in range(2):
        here.attempt(number)[0].say(TokenDelta(f"r.0.{number}", error="handoff: no", retry=True))
        await turns()
    with pytest.raises(UnavailableError, match="after 2 attempts") as caught:
        await collect(run)
    assert caught.value.status == 503
    assert (here.counts()["failed"], len(here.sent())) == (1, 2)
    here.check_over()


async def test_a_first_token_that_was_lost_with_the_prefill_node_is_generated_anew() -> None:
    """The prefill node committed the handoff, and died before the router received its first token."""
    here = stage("p0 p1 d0 d1")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    d.say(TokenDelta(submit.id, handed_off=True), *generated(submit.id, 1)[:2])
    p.die()
    d.say(*generated(submit.id, 3))
    await turns()
    p, d, submit = here.attempt(1)
    p.say(token(submit.id, 0))
    d.say(*generated(submit.id, 1))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


@pytest.mark.parametrize("reason", ["internal", "numerical", "no_token"])
async def test_a_model_that_fails_on_a_request_is_a_server_error_and_not_tried_elsewhere(reason: str) -> None:
    here = stage("p0 d0 d1")
    run = await here.submit()
    here.p0.say(TokenDelta("r.0.0", error=reason))
    with pytest.raises(UnavailableError, match=reason) as caught:
        await collect(run)
    assert (caught.value.status, len(here.sent())) == (500, 1)
    here.check_over()


async def test_what_a_node_finds_wrong_with_a_request_is_the_clients_error() -> None:
    here = stage()
    run = await here.submit(n=2)
    here.p0.say(token("r.0.0", 0))
    here.d0.say(TokenDelta("r.0.0", 1, handed_off=True))
    await turns()
    here.d0.say(TokenDelta("r.1.0", error="beyond the vocabulary"))
    with pytest.raises(RequestError, match="beyond the vocabulary"):
        await collect(run)
    assert "r.0.0" in here.d0.aborts, "its other samples are over too"
    assert (here.counts()["failed"], here.counts()["cancelled"]) == (1, 1)
    here.check_over()


async def test_who_finds_no_node_is_told_so_and_under_way_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "WAIT_NEW_S", 0.02)
    here = stage("d0")
    run = await here.submit()
    here.d0.say(*[token("r.0.0", position) for position in range(3)])
    here.d0.die()
    await turns()
    with pytest.raises(UnavailableError, match="No node"):
        await Reader(here.dispatch, GenerationRequest("late", PROMPT, 4, SamplingParams())).admitted()
    assert not here.dispatch.ready()
    here.d0.revive()
    await turns()
    here.d0.say(*generated("r.0.1", 3))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_a_request_under_way_does_not_wait_for_a_node_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "WAIT_UNDER_WAY_S", 0.02)
    here = stage("d0")
    run = await here.submit()
    here.d0.die()
    with pytest.raises(UnavailableError, match="No node"):
        await collect(run)
    assert here.counts()["failed"] == 1
    here.check_over()


async def test_while_no_node_can_take_a_request_nothing_counts_as_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    here = stage("p0 d0", max_attempts=1)
    with monkeypatch.context() as patch:
        patch.setattr(here.fleet, "choose", lambda *_: None)
        run = await here.submit()
        for _ in range(3):
            for change in (here.d0.fall_silent, here.d0.revive):
                change()
                await turns()
    assert here.sent() == []
    here.p0.fall_silent()
    await turns()
    here.d0.say(*generated("r.0.0"))
    assert tokens_of(await collect(run)) == ANSWER
    assert here.counts()["moved"] == 0
    here.check_over()


def logprobs(*tokens: int) -> list[Logprobs]:
    return [Logprobs(token, -1.0, 1) for token in tokens]


@pytest.mark.parametrize("chunks_before", [0, 1, 2])
async def test_prompt_logprobs_are_told_once_whole_though_an_attempt_failed_midway(chunks_before: int) -> None:
    here = stage("p0 p1 p2 d0")
    run = await here.submit(prompt_logprobs=1)
    chunks = [logprobs(*PROMPT[1:4]), logprobs(*PROMPT[4:8]), logprobs(*PROMPT[8:])]
    for number, count in ((0, chunks_before), (1, 2)):
        p, _, submit = here.attempt(number)
        assert submit.sampling.prompt_logprobs == 1
        p.say(*[TokenDelta(submit.id, prompt_logprobs=chunk) for chunk in chunks[:count]])
        if number == 0:
            p.die()
            await turns()
    p.say(token("r.0.1", 0, prompt_logprobs=chunks[2]))
    here.d0.die()
    here.d0.revive()
    await turns()
    p, _, submit = here.attempt(2)
    assert submit.sampling.prompt_logprobs is None, "they were told with the first token"
    p.say(token(submit.id, 1))
    here.d0.say(TokenDelta(submit.id, prompt_logprobs=chunks[0]))  # it was preempted, and computes the prompt again
    here.d0.say(*generated(submit.id, 2))
    pieces = await collect(run)
    assert tokens_of(pieces) == ANSWER
    assert [entry.token for entry in pieces[0].delta.prompt_logprobs] == PROMPT[1:]
    assert not any(piece.delta.prompt_logprobs for piece in pieces[1:])
    here.check_over()


# ---- samples ----------------------------------------------------------------------------------------------------


async def test_further_samples_start_when_the_first_is_home_and_go_there_alone() -> None:
    here = stage("p0 d0 d1")
    run = await here.submit(n=3, prompt_logprobs=0)
    assert [submit.id for _, submit in here.sent()] == ["r.0.0"]
    p0, home, first = here.attempt(0)
    p0.say(token("r.0.0", 0))
    await turns()
    assert len(here.sent()) == 1, "the prompt's KV is not at the decode node yet"
    home.say(TokenDelta("r.0.0", 1, handed_off=True))
    await turns()
    siblings = [here.attempt(0, sample) for sample in (1, 2)]
    for node, _, submit in siblings:
        assert (node, submit.decode_node, submit.sampling.prompt_logprobs) == (home, "", None)
    assert len({submit.sampling.seed for _, _, submit in [(p0, home, first), *siblings]}) == 3
    assert all(0 <= submit.sampling.seed < 2**63 for _, _, submit in siblings)
    home.say(*generated("r.0.0", 1), *generated("r.2.0"), *generated("r.1.0"))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(3)] == [ANSWER] * 3
    assert here.counts()["finished"] == 3
    here.check_over()


async def test_a_sample_retried_keeps_its_seed_and_siblings_of_a_dead_home_go_elsewhere() -> None:
    here = stage("p0 d0 d1")
    run = await here.submit(n=2, seed=7)
    _, home, first = here.attempt(0)
    here.p0.say(token("r.0.0", 0))
    home.say(TokenDelta("r.0.0", 1, handed_off=True))
    await turns()
    home.die()
    await turns()
    for sample, seed in ((0, first.sampling.seed), (1, here.attempt(0, 1)[2].sampling.seed)):
        p, d, submit = here.attempt(1, sample)
        assert (p, submit.sampling.seed) == (here.p0, seed)
        assert d is not home
        start = len(unpack_ids(submit.tokens)) - len(PROMPT)
        p.say(token(submit.id, start))
        d.say(*generated(submit.id, start + 1))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(2)] == [ANSWER, ANSWER]
    here.check_over()


async def test_cancelling_one_sample_ends_it_on_every_node_and_leaves_the_others() -> None:
    here = stage()
    run = await here.submit(n=3)
    run.enough(0)
    run.enough(2)
    here.p0.say(token("r.0.0", 0))
    await turns()
    assert ("r.0.0" in here.p0.aborts, "r.0.0" in here.d0.aborts) == (True, True)
    for sample in (1, 2):
        p, d, submit = here.attempt(0, sample)
        p.say(token(submit.id, 0))
        await turns()
        if sample == 2:
            assert submit.id in d.aborts
        else:
            d.say(*generated(submit.id, 1))
    pieces = await collect(run)
    assert [tokens_of(pieces, index) for index in range(3)] == [ANSWER[:1], ANSWER, ANSWER[:1]]
    assert (here.counts()["total"], here.counts()["finished"]) == (3, 3), "a sample closed by its client is finished"
    here.check_over()


@pytest.mark.parametrize("landed", [False, True])
async def test_closing_ends_every_sample_on_every_node_that_was_named(landed: bool) -> None:
    here = stage()
    run = await here.submit(n=2)
    if landed:
        here.p0.say(token("r.0.0", 0))
        here.d0.say(TokenDelta("r.0.0", 1, handed_off=True))
        await turns()
    await run.close()
    await run.close()
    assert (here.p0.aborts, sorted(here.d0.aborts)) == (["r.0.0"], ["r.0.0", "r.1.0"] if landed else ["r.0.0"])
    here.d0.say(*generated("r.0.0", 1))  # late, so it changes nothing
    assert all(piece.index == 0 for piece in await collect(run))
    here.check_over()


async def test_a_sample_that_its_home_refuses_is_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of the first sample began to drain, but the router does not know that before the next heartbeat."""
    monkeypatch.setattr("router.dispatch.dispatcher.RETRY_PAUSE_S", 0.0)
    here = stage("d0 d1")
    run = await here.submit(n=2)
    home, _, _ = here.attempt(0)
    home.say(token("r.0.0", 0))
    await turns()
    for number in range(3):
        at, _, submit = here.attempt(number, 1)
        if at is not home:
            break
        at.say(TokenDelta(submit.id, error="this node is draining", retry=True))
        await turns()
    assert at is not home
    await run.close()


async def test_what_is_cancelled_before_it_began_ends_too() -> None:
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
        # With this number of prompt tokens, the router trusts the cost model.
        here.nodes[name].report(NodeStats(cost=cost.packed(), prompt_tokens=100_000))


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
async def test_a_prompt_goes_where_the_mode_or_the_prediction_says_and_fails_over_in_each(mode: str) -> None:
    here = stage("p0 d0 d1", disaggregate=mode)
    learn(here, p0=SLOW, d0=QUICK, d1=QUICK)
    run = await here.submit()
    computes, generates, submit = here.attempt(0)
    reason = {"auto": "local_sooner", "always": "disaggregated", "never": "never"}[mode]
    assert (computes is generates) is (mode != "always")
    assert here.dispatch.status()["placements"] == {reason: 1}
    attempt, prefill, decode, told, local_s, remote_s = here.records.placements[0]
    assert (attempt, prefill, decode, told) == (
        submit.id,
        "p0" if mode == "always" else None,
        generates.info.id,
        reason,
    )
    assert local_s == pytest.approx(0.001 + 1e-5 * len(PROMPT))
    assert remote_s == (0.0 if mode == "never" else pytest.approx(1.0))
    generates.die()
    await turns()
    computes, generates, submit = here.attempt(1)
    (computes if computes is not generates else generates).say(token(submit.id, 0))
    generates.say(TokenDelta(submit.id, handed_off=True), *generated(submit.id, 1))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_a_request_whose_first_token_would_be_late_is_refused_and_one_under_way_never() -> None:
    here = stage("p0 p1 d0", disaggregate="always", ttft_slo_s=1.5)
    run = await here.submit()
    p, d, submit = here.attempt(0)
    p.say(token(submit.id, 0))
    learn(here, p0=CostModel(overhead=4.0), p1=CostModel(overhead=4.0), d0=QUICK)
    with pytest.raises(UnavailableError, match="predicted in 4000 ms, later than the 1500 ms") as caught:
        await collect(await here.submit())
    assert (caught.value.status, caught.value.retry_after_s) == (429, pytest.approx(2.5))
    assert here.counts()["refused"] == 1
    p.die()
    await turns()
    p, d, submit = here.attempt(1)
    p.say(token(submit.id, 1))
    d.say(TokenDelta(submit.id, handed_off=True), *generated(submit.id, 2))
    assert tokens_of(await collect(run)) == ANSWER
    learn(here, p0=SLOW, p1=SLOW)
    await (await here.submit()).close()
    counts = here.counts()
    assert [counts[how] for how in ("total", "finished", "cancelled", "failed", "refused")] == [3, 1, 1, 0, 1]
    here.check_over()


async def test_a_node_taken_for_too_slow_is_measured_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "STALE_S", 1e9)  # longer than any stall of the test machine
    here = stage("p0 d0", disaggregate="auto", ttft_slo_s=1.5)
    learn(here, p0=CostModel(overhead=90.0), d0=CostModel(overhead=80.0))
    with pytest.raises(UnavailableError, match="predicted in 80000 ms"):
        await collect(await here.submit())
    monkeypatch.setattr(load_module, "STALE_S", -1.0)
    run = await here.submit()
    computes, generates, _ = here.attempt(0)
    assert (computes, generates) == (here.p0, here.d0), "the prefill node too, which is predicted to be slower"
    monkeypatch.setattr(load_module, "STALE_S", 1e9)
    with pytest.raises(UnavailableError, match="predicted in 80000 ms"):
        await collect(await here.submit())
    await run.close()
    assert here.dispatch.status()["placements"] == {"stale_model": 1}
    here.check_over()


async def test_only_what_is_decoded_counts_as_decodes() -> None:
    here = stage("p0 d0", disaggregate="always")
    run = await here.submit()
    p, d, submit = here.attempt(0)
    assert (d.view().running, d.view().num_decodes) == (1, 0), "its prompt is still computed"
    p.say(token(submit.id, 0))
    d.say(TokenDelta(submit.id, handed_off=True))
    assert (d.view().running, d.view().num_decodes) == (1, 1)
    await run.close()
    here.check_over()


async def test_a_request_that_nodes_move_on_with_progress_is_not_given_up_for_it() -> None:
    here = stage("d0 d1", max_attempts=2)
    run = await here.submit()
    last = len(ANSWER) - 1
    for number in range(last):
        _, d, submit = here.attempt(number)
        d.say(token(submit.id, number), TokenDelta(submit.id, error="becomes a prefill node", retry=True))
        await turns()
    assert here.counts()["moved"] == last
    _, d, submit = here.attempt(last)
    d.say(token(submit.id, last))
    assert tokens_of(await collect(run)) == ANSWER
    here.check_over()


async def test_one_prompt_that_is_refused_ends_what_was_begun_of_the_others() -> None:
    here = stage("p0 d0", disaggregate="always", ttft_slo_s=1.5)
    learn(here, p0=SLOW, d0=QUICK)
    sampling = SamplingParams(temperature=0.0)
    requests = [GenerationRequest(f"r-{number}", list(PROMPT), 7, sampling) for number in range(2)]

    async def read() -> None:
        async with (
            here.dispatch.admit(requests[0]) as first,
            here.dispatch.admit(requests[1]) as second,
            aclosing(merge([*first, *second])) as deltas,
        ):
            await anext(deltas)

    with pytest.raises(UnavailableError, match="predicted in 2000 ms"):
        await read()
    assert here.p0.aborts == here.d0.aborts == ["r-0.0.0"]
    assert (here.counts()["refused"], here.counts()["cancelled"]) == (1, 1)
    here.check_over()


async def test_in_a_large_fleet_a_prompt_finds_a_node_that_holds_it_and_nobody_who_is_not_usable() -> None:
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
    assert len(decode) > 30, "equals are drawn"
    assert placed({"p7"})[0] == {"p8"}, "who knows the next most"
    here.p7.die()
    assert placed(set())[0] == {"p8"}
    here.p8.info = replace(here.p8.info, state="draining")
    here.fleet.notify()
    here.d3.die()
    prefill, decode = placed(set())
    assert len(prefill) > 20
    assert not prefill & {"p7", "p8"}
    assert "d3" not in decode


async def test_in_a_large_fleet_a_prefill_node_hands_over_only_to_the_node_in_whose_pool_it_computes() -> None:
    here = stage(" ".join(f"{role}{number}" for role in "pd" for number in range(40)))
    for number in range(40):
        here.nodes[f"p{number}"].info = replace(here.nodes[f"p{number}"].info, shared_pool_owner=f"d{number}")
    for number in range(50):
        proposal = here.fleet.choose(f"r{number}", array("i", PROMPT), b"", (), "always")
        assert proposal is not None
        assert proposal.placement.prefill == proposal.placement.decode.replace("d", "p")
