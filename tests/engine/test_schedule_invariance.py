"""Test that the tokens of a request do not depend on what the real scheduler decides: not on budget, block size,
policy, other requests, cache hits or preemption, nor on the pool in which the prompt's KV was computed."""

from collections.abc import Sequence
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.runner import TorchRunner
from scheduler.policy import POLICIES, Policy
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler, StepLimits
from shared.rpc.messages import SamplingParams
from tests.engine.build import VOCABULARY, every_backend, model_fixture, torch_runner

torch.set_num_threads(1)
__all__ = ["every_backend", "model_fixture"]  # fixtures
LONGEST = 44
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(seed=3, top_k=8, frequency_penalty=0.3),
]


class Node:
    """A scheduler, a runner, and a pool whose unwritten memory is NaN."""

    def __init__(self, model: Decoder, limits: StepLimits, num_blocks: int, block_tokens: int, policy: Policy) -> None:
        self.scheduler = Scheduler(limits, num_blocks, block_tokens, policy)
        self.runner: TorchRunner
        self.pool: KVPool
        self.runner, self.pool, _ = torch_runner(model, num_blocks, block_tokens)

    def step(self) -> None:
        step = self.scheduler.schedule()
        if step.slices:
            self.scheduler.update(step, [output.token for output in self.runner.run(step)])


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
        node = Node(model, StepLimits(), 1 + LONGEST, 1, POLICIES["stall_free"])
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
                held = row.num_computed // here.scheduler.block_tokens
                for source, target in zip(sending.tables[0][held:], row.tables[0][held:], strict=True):
                    here.pool.tensor[target] = there.pool.tensor[source]
                here.scheduler.kv_received(row, sending.tokens[-1])
                there.scheduler.release(sending)
                pending.remove(pair)
        if all(row.state is RequestState.DONE for row in rows):
            break
    return answers(rows)


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
    model: Decoder,
    budget: int,
    block_tokens: int,
    tight: bool,
    shared: bool,
    handed_over: bool,
    policy: Policy,
    seed: int,
) -> None:
    # A tight pool has room for one and a half requests, so that running requests are preempted.
    num_blocks = 2 + -(-LONGEST // block_tokens) * (3 if tight else 10) // 2
    limits = StepLimits(max_num_batched_tokens=budget, max_num_partial_prefills=2)
    here, there = (Node(model, limits, num_blocks, block_tokens, policy) for _ in range(2))
    together = run_together(requests_of(seed, shared), here, there if handed_over else None)
    assert together == run_alone(model, requests_of(seed, shared))


def test_a_tight_pool_really_preempts(model: Decoder) -> None:
    here = Node(model, StepLimits(max_num_batched_tokens=64), 2 + LONGEST * 3 // 2, 1, POLICIES["stall_free"])
    run_together(requests_of(0, False), here, None)
    assert here.scheduler.counters.preemptions > 0
