"""Test that the tokens of a request do not depend on the decisions of the real scheduler. The tests vary the budget,
the block size, the policy, the other requests, cache hits, preemption, and the pool in which the KV of a prompt is
computed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import random_decoder
from engine.models.decoder import Decoder
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec
from scheduler.drafters import Speculation
from scheduler.policy import POLICIES, Policy
from scheduler.request import Request
from scheduler.scheduler import StepLimits
from shared.rpc.messages import SamplingParams
from tests.engine.build import CONFIG, CPU, every_backend
from tests.engine.nodes import Guesses, Node, requests_of, run_together

torch.set_num_threads(1)
__all__ = ["every_backend"]  # a fixture
LONGEST = 44
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
    # A block takes one row in one group of layers, and two rows in the other.
    "windows": (WINDOW, WINDOW, ATTENTION, WINDOW, WINDOW),
    "only windows": (WINDOW, WINDOW),
    "states": (DELTA, ATTENTION, DELTA),
    "states and windows": (WINDOW, DELTA, ATTENTION),
}


@cache
def model_of(kind: str) -> Decoder:
    return random_decoder(replace(CONFIG, layers=KINDS[kind]), torch.float32, CPU, deviation=0.3)


def run_alone(model: Decoder, rows: Sequence[Request]) -> list[list[int]]:
    return [run_together([row], Node(model, StepLimits(), 1, 1))[0] for row in rows]


# Torch takes five times as long as numba. The kind "states and windows" has all kinds of layers.
@pytest.mark.parametrize(
    ("every_backend", "kind"),
    [
        *[("numba", kind) for kind in KINDS],
        *[pytest.param("torch", kind, marks=pytest.mark.exhaustive) for kind in KINDS if kind != "states and windows"],
        ("torch", "states and windows"),
    ],
    indirect=["every_backend"],
)
@settings(max_examples=12)
@given(
    budget=st.integers(4, 64),
    block_tokens=st.sampled_from([1, 4, 16]),
    tight=st.booleans(),
    shared=st.booleans(),
    handed_over=st.booleans(),
    rightness=st.sampled_from([0.0, 0.8, 1.0, None]),
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
    rightness: float | None,
    policy: Policy,
    seed: int,
) -> None:
    limits, model = StepLimits(max_num_batched_tokens=budget, max_num_partial_prefills=2), model_of(kind)
    if not policy.chunked:  # each prompt must then fit into one step
        limits = replace(limits, max_num_batched_tokens=max(budget, LONGEST))
    alone, speculation = run_alone(model, requests_of(seed, shared, SAMPLINGS)), None
    if rightness is not None and not any(isinstance(layer.mixer, DeltaSpec) for layer in KINDS[kind]):
        rows = [row.tokens + tokens for row, tokens in zip(requests_of(seed, shared, SAMPLINGS), alone, strict=True)]
        speculation = Speculation(Guesses(seed, rightness, rows), 4)
    # In a tight pool, running requests are preempted.
    here, there = (Node(model, limits, 1.5 if tight else 5, block_tokens, policy, speculation) for _ in range(2))
    assert run_together(requests_of(seed, shared, SAMPLINGS), here, there if handed_over else None) == alone
    for node in (here, there):
        assert not node.scheduler.audit()
        assert node.scheduler.ledger().owned == 0


@pytest.mark.parametrize("kind", ["attention", "states"])  # not "windows": such requests release blocks
def test_a_tight_pool_really_preempts(kind: str) -> None:
    here = Node(model_of(kind), StepLimits(max_num_batched_tokens=64), 1.5, 1, POLICIES["stall_free"])
    run_together(requests_of(0, False, SAMPLINGS), here, None)
    assert here.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_found_in_the_cache(kind: str) -> None:
    here = Node(model_of(kind), StepLimits(max_num_batched_tokens=64), 5, 4, POLICIES["stall_free"])
    for row in requests_of(0, True, SAMPLINGS):
        here.scheduler.add(row)
        while here.scheduler.has_work:
            here.step()
    assert here.scheduler.counters.cache_hits >= 16
