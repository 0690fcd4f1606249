"""Test the defining property of each policy under random traffic. There are enough blocks, so that only the policy
limits the steps."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies import pages
from scheduler.policy import POLICIES
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepLimits
from tests.scheduler.drive import Driver, request

BUDGET = 24
seeds = given(st.integers(0, 2**32))


@dataclass
class Seen:
    """A step, and the state of the requests before it was scheduled."""

    step: Step
    decoding: set[str]  # running requests with one token left to compute
    behind: dict[str, int]  # tokens left to compute, by request; requests that receive KV are left out
    here: set[str]  # requests that were running or receiving KV

    @property
    def members(self) -> set[str]:
        return {piece.request.id for piece in self.step.slices}

    @property
    def prompts(self) -> set[str]:
        return {name for name, count in self.behind.items() if count > 1}


def watch(name: str, seed: int, receive_kv: float = 0.0) -> Iterator[Seen]:
    """Serve random requests without common prefixes. Yield every step."""
    rng = random.Random(seed)
    limits = StepLimits(BUDGET, max_num_seqs=20, long_prefill_token_threshold=rng.choice([0, 10]), tile_tokens=4)
    driver = Driver(scheduler := Scheduler(limits, 1000, 4, POLICIES[name]))
    todo = [
        request(
            f"r{index}",
            [100 + index] * rng.randrange(2, 70),
            rng.randrange(2, 25),
            receive_kv=rng.random() < receive_kv,
        )
        for index in range(12)
    ]
    while todo or scheduler.has_work or driver.receiving:
        while todo and rng.random() < 0.3:
            scheduler.add(todo.pop())
        behind = {
            r.id: r.num_tokens - r.num_scheduled
            for r in scheduler.requests.values()
            if r.state in {RequestState.RUNNING, RequestState.WAITING} and not r.receive_kv
        }
        decoding = {r.id for r in scheduler.running if behind[r.id] == 1}
        here = {
            r.id for r in scheduler.requests.values() if r.state in {RequestState.RUNNING, RequestState.RECEIVING_KV}
        }
        num_steps = len(driver.steps)
        driver.iterate()
        assert driver.idle < 3 or not scheduler.requests
        if len(driver.steps) > num_steps:
            yield Seen(driver.steps[-1], decoding, behind, here)
    assert not scheduler.requests
    assert scheduler.counters.preemptions == 0


@seeds
def test_decode_maximal_computes_one_chunk_of_one_prompt_and_all_decodes(seed: int) -> None:
    for seen in watch("decode_maximal", seed, receive_kv=0.2):
        assert seen.decoding <= seen.members
        assert seen.step.work.num_prefills == bool(seen.prompts)


@seeds
def test_split_fuse_fills_every_step_while_there_is_prompt_work(seed: int) -> None:
    for seen in watch("split_fuse", seed):
        assert seen.step.work.tokens == min(BUDGET, sum(seen.behind.values()))


@pytest.mark.parametrize("name", ["prefill_chunks_first", "prefill_first", "static"])
@seeds
def test_with_prompts_first_decodes_pause_while_there_is_a_prompt(name: str, seed: int) -> None:
    for seen in watch(name, seed, receive_kv=0.2):
        work = seen.step.work
        assert not (work.num_prefills and work.num_decodes) or not seen.decoding & seen.members
        if name != "static" and seen.prompts:
            assert work.num_prefills > 0


@pytest.mark.parametrize("name", ["prefill_first", "whole_prompt_mixed", "decode_first"])
@seeds
def test_whole_prompts_are_computed_in_one_step(name: str, seed: int) -> None:
    for seen in watch(name, seed):
        assert all(piece.count == seen.behind[piece.request.id] for piece in seen.step.slices)
        over = [piece.count for piece in seen.step.slices if piece.count > 1]
        assert len(over) <= 1 or seen.step.work.tokens <= BUDGET, "a prompt may exceed the budget only if it is alone"


@seeds
def test_orca_lets_a_whole_prompt_join_the_decodes_at_once(seed: int) -> None:
    for seen in watch("whole_prompt_mixed", seed):
        assert seen.decoding <= seen.members
        assert seen.prompts & seen.members or not seen.prompts


@seeds
def test_decode_first_computes_no_prompt_while_anything_decodes(seed: int) -> None:
    for seen in watch("decode_first", seed, receive_kv=0.2):
        assert not seen.decoding or (seen.decoding <= seen.members and not seen.step.work.num_prefills)


@seeds
def test_a_static_batch_is_admitted_at_once_and_closed_until_it_ends(seed: int) -> None:
    batch: set[str] = set()
    for seen in watch("static", seed, receive_kv=0.3):
        batch = seen.here or batch
        newcomers = seen.members - seen.here
        assert not newcomers or not seen.here
        if seen.step.work.num_decodes and not newcomers:
            assert not [name for name in seen.here & seen.behind.keys() if seen.behind[name] > 1]


def test_a_static_batch_may_be_larger_than_a_step() -> None:
    driver = Driver(scheduler := Scheduler(StepLimits(8, max_num_seqs=4), 200, 4, POLICIES["static"]))
    rows = [request(f"r{index}", [index + 3] * 20, 5) for index in range(6)]
    for row in rows:
        scheduler.add(row)
    driver.iterate()
    assert [row.state for row in rows] == [RequestState.RUNNING] * 4 + [RequestState.WAITING] * 2
    driver.finish()


@pytest.mark.parametrize("name", POLICIES)
def test_requests_that_receive_kv_are_admitted_during_decodes_or_after_their_batch(name: str) -> None:
    driver = Driver(scheduler := Scheduler(StepLimits(BUDGET), 200, 4, POLICIES[name]))
    scheduler.add(stream := request("stream", [3, 4, 5], 60))
    for _ in range(5):
        driver.iterate()
    scheduler.add(received := request("received", [6] * 30, 5, receive_kv=True))
    driver.iterate()
    assert received.state is (RequestState.WAITING if POLICIES[name].together else RequestState.RECEIVING_KV)
    driver.finish()
    assert stream.state is received.state is RequestState.DONE


@pytest.mark.parametrize("name", ["decode_first", "static"])
def test_a_preempted_request_is_not_starved_by_requests_that_receive_kv(name: str) -> None:
    driver = Driver(scheduler := Scheduler(StepLimits(BUDGET), 24, 4, POLICIES[name]))
    rows: list[Request] = []
    for index in range(3):
        rows.append(request(f"r{index}", [index + 3] * 12, 50))
        scheduler.add(rows[-1])
    iterations = 0
    while any(row.state is not RequestState.DONE for row in rows):
        if iterations % 4 == 0:
            scheduler.add(request(f"received {iterations}", [iterations + 9] * 12, 20, receive_kv=True))
        driver.iterate()
        iterations += 1
        assert iterations < 1500, "starved"
    assert scheduler.counters.preemptions > 0


def test_the_policy_pages_are_up_to_date() -> None:
    stale = [path.name for path, text in pages().items() if path.read_text() != text]
    assert not stale, "run python -m benchmarks policies"
