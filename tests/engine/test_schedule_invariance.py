"""Test that the tokens of a request do not depend on what the real scheduler decides: not on budget, block size,
policy, other requests, cache hits or preemption, nor on the pool in which the prompt's KV was computed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import random_decoder
from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec
from engine.runner import TorchRunner
from prefill_node.sender import OutgoingHandoff
from scheduler.geometry import Geometry
from scheduler.policy import POLICIES, Policy
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler, StepLimits
from shared.rpc.messages import SamplingParams, SubmitRequest
from tests.engine.build import CONFIG, CPU, VOCABULARY, device_code, every_backend, layout_of, pool_of

torch.set_num_threads(1)
__all__ = ["every_backend"]  # a fixture
LONGEST = 44
SUBMIT = SubmitRequest("", "", b"", 0, 0, SamplingParams())
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(seed=3, top_k=8, frequency_penalty=0.3),
]


DELTA = LayerSpec(DeltaSpec(1, 2, 4, 8, 3), MlpSpec(20))
ATTENTION, WINDOW = (LayerSpec(AttentionSpec(4, 2, 16, window=size), MlpSpec(20)) for size in (0, 7))
KINDS = {
    "attention": (ATTENTION, ATTENTION),
    "windows": (WINDOW, WINDOW, ATTENTION, WINDOW, WINDOW),  # two groups; a block has a row and two rows
    "only windows": (WINDOW, WINDOW),
    "states": (DELTA, ATTENTION, DELTA),
    "states and windows": (WINDOW, DELTA, ATTENTION),
}


@cache
def model_of(kind: str) -> Decoder:
    return random_decoder(replace(CONFIG, layers=KINDS[kind]), torch.float32, CPU, deviation=0.3)


class Node:
    """A scheduler, a runner, and a pool whose unwritten memory is NaN. The pool has room for `num_requests`."""

    def __init__(
        self, model: Decoder, limits: StepLimits, num_requests: float, block_tokens: int, policy: Policy
    ) -> None:
        one = layout_of(model, 2, block_tokens)
        groups = kv_places(model.config, one.block_bytes).groups
        rows = Geometry(block_tokens, groups).rows_for(LONGEST, min(LONGEST, limits.max_num_batched_tokens))
        layout = replace(one, num_blocks=2 + int(num_requests * rows))
        self.scheduler = Scheduler(limits, layout.num_blocks, block_tokens, policy, groups=groups, state_interval=8)
        self.pool = pool_of(model, layout, kv_places(model.config, layout.block_bytes))
        self.runner = TorchRunner(model, self.pool, *device_code(model, self.pool), CPU)

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step.slices:
            self.scheduler.update(step, [output.tokens for output in self.runner.run(step)])


def requests_of(seed: int, shared: bool) -> list[Request]:
    rng = Random(seed)
    stem = [rng.randrange(VOCABULARY) for _ in range(16)]
    rows = []
    for index, sampling in enumerate(SAMPLINGS):
        prompt = stem[: 16 * shared] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 16))]
        rows.append(Request(f"r{index}", prompt, len(prompt), 12, sampling=sampling))
    return rows


def answers(rows: Sequence[Request]) -> list[list[int]]:
    assert all(row.state is RequestState.DONE for row in rows)
    return [row.tokens[row.num_prompt :] for row in rows]


def run_alone(model: Decoder, rows: Sequence[Request]) -> list[list[int]]:
    for row in rows:
        node = Node(model, StepLimits(), 1, 1, POLICIES["stall_free"])
        node.scheduler.add(row)
        while node.scheduler.has_work:
            node.step()
    return answers(rows)


def run_together(rows: Sequence[Request], here: Node, there: Node | None) -> list[list[int]]:
    """Run all requests on `here`. If `there` is given, compute the prompts on `there` and copy their KV to `here`."""
    pending: list[tuple[Request, Request]] = []
    for row in rows:
        if there is None:
            here.scheduler.add(row)
        else:
            sending = Request(row.id, list(row.tokens), row.num_prompt, row.max_tokens, sampling=row.sampling)
            sending.send_kv = row.receive_kv = True
            there.scheduler.add(sending)
            here.scheduler.add(row)
            pending.append((sending, row))
    for _ in range(2000):
        if there is not None:
            there.step()
        here.step()
        for pair in list(pending):
            sending, row = pair
            if sending.state is RequestState.SENDING_KV and row.state is RequestState.RECEIVING_KV:
                assert there is not None
                handoff = OutgoingHandoff(SUBMIT, sending, row.num_prompt, here.scheduler.geometry)
                handoff.grant(row.num_computed // here.scheduler.block_tokens, row.reserved)
                for source, target in zip(handoff.sources(len(row.reserved)), row.reserved, strict=True):
                    here.pool.tensor[target] = there.pool.tensor[source]
                here.scheduler.kv_received(row, sending.tokens[-1])
                there.scheduler.release(sending)
                pending.remove(pair)
        if all(row.state is RequestState.DONE for row in rows):
            break
    return answers(rows)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(
    budget=st.integers(4, 64),
    block_tokens=st.sampled_from([1, 4, 16]),
    tight=st.booleans(),
    shared=st.booleans(),
    handed_over=st.booleans(),
    policy=st.sampled_from(list(POLICIES.values())),
    seed=st.integers(0, 9),
)
def test_tokens_do_not_depend_on_the_decisions_of_the_scheduler(
    kind: str,
    budget: int,
    block_tokens: int,
    tight: bool,
    shared: bool,
    handed_over: bool,
    policy: Policy,
    seed: int,
) -> None:
    limits, model = StepLimits(max_num_batched_tokens=budget, max_num_partial_prefills=2), model_of(kind)
    if not policy.chunked:  # a prompt is then computed in a step of any size
        limits = replace(limits, max_num_batched_tokens=max(budget, LONGEST))
    # In a tight pool, running requests are preempted.
    here, there = (Node(model, limits, 1.5 if tight else 5, block_tokens, policy) for _ in range(2))
    together = run_together(requests_of(seed, shared), here, there if handed_over else None)
    assert together == run_alone(model, requests_of(seed, shared))
    for node in (here, there):
        assert not node.scheduler.audit()
        assert node.scheduler.ledger().owned == 0


@pytest.mark.parametrize("kind", ["attention", "states"])  # with windows, requests shrink
def test_a_tight_pool_really_preempts(kind: str) -> None:
    here = Node(model_of(kind), StepLimits(max_num_batched_tokens=64), 1.5, 1, POLICIES["stall_free"])
    run_together(requests_of(0, False), here, None)
    assert here.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_found_in_the_cache(kind: str) -> None:
    here = Node(model_of(kind), StepLimits(max_num_batched_tokens=64), 5, 4, POLICIES["stall_free"])
    for row in requests_of(0, True):
        here.scheduler.add(row)
        while here.scheduler.has_work:
            here.step()
    assert here.scheduler.counters.cache_hits >= 16
