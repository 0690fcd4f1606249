"""Test that a draft model changes no answer, that its guesses are always right if it equals the target model, and that
its KV lives as long as the KV of the target model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from sys import getrefcount

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.random_model import random_decoder
from engine.batch import KEPT_ROWS, BlockRows
from engine.draft_model import CATCH_UP, DraftModel
from engine.kv_pool import KVPool, PrivateMemory
from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.models.spec import AttentionSpec, LayerSpec, MlpSpec
from engine.runner import SliceOutput, TorchRunner
from scheduler.drafters import Speculation
from scheduler.request import Request, Slice, Step
from scheduler.scheduler import StepLimits
from shared.rpc.messages import SamplingParams
from tests.engine.build import CONFIG, CPU, GREEDY, VOCABULARY, device_code, every_backend, thinned
from tests.engine.nodes import Node, requests_of, run_together

torch.set_num_threads(1)
__all__ = ["every_backend"]  # a fixture
PLAIN = LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(20))
SMALL = LayerSpec(AttentionSpec(2, 1, 8), MlpSpec(12))
WINDOWS = tuple(LayerSpec(AttentionSpec(4, 2, 16, window=size), MlpSpec(20)) for size in (0, 7, 7, 7, 0))
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1, temperature=0.9),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(seed=3, top_k=8, presence_penalty=0.5, logprobs=1),
    SamplingParams(seed=4, temperature=1.3, logit_bias={5: 2.0}),
]


def model_of(*layers: LayerSpec, seed: int = 0) -> Decoder:
    return random_decoder(replace(CONFIG, layers=layers), torch.float32, CPU, seed=seed, deviation=0.3)


def drafting(node: Node, model: Decoder, num_tokens: int = 4) -> DraftModel:
    """Let the node guess with a draft model."""
    layout, places = node.pool.layout, kv_places(model.config)
    own = replace(layout, kv_heads=model.config.num_kv_heads, layers=places.row_layers, head_dim=model.config.head_dim)
    pool = KVPool(own, PrivateMemory(np.zeros((own.num_blocks, own.block_bytes), np.uint8)), places)
    pool.tensor.fill_(torch.nan)
    runner = TorchRunner(model, pool, *device_code(model, pool), CPU)
    drafter = DraftModel(runner, layout.block_tokens, node.scheduler.geometry.attention[0].rows)
    node.scheduler.speculation = Speculation(drafter, num_tokens)
    return drafter


def answers_of(model: Decoder, rows: Sequence[Request]) -> list[list[int]]:
    return run_together(rows, Node(model, StepLimits(), 6, 4))


@pytest.mark.parametrize(
    ("every_backend", "layers"),
    [
        pytest.param("torch", (PLAIN, PLAIN), id="torch-plain", marks=pytest.mark.exhaustive),
        pytest.param("torch", WINDOWS, id="torch-windows", marks=pytest.mark.exhaustive),
        pytest.param("numba", (PLAIN, PLAIN), id="numba-plain"),
        pytest.param("numba", WINDOWS, id="numba-windows"),
    ],
    indirect=["every_backend"],
)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 9),
    budget=st.integers(5, 64),
    block_tokens=st.sampled_from([1, 4, 16]),
    tight=st.booleans(),
    shared=st.booleans(),
    handed_over=st.booleans(),
)
def test_a_draft_model_changes_no_answer(
    layers: tuple[LayerSpec, ...],
    seed: int,
    budget: int,
    block_tokens: int,
    tight: bool,
    shared: bool,
    handed_over: bool,
) -> None:
    model, limits = model_of(*layers), StepLimits(max_num_batched_tokens=budget)
    here, there = (Node(model, limits, 1.5 if tight else 6, block_tokens) for _ in range(2))
    drafting(here, model_of(SMALL, seed=1))
    expected = answers_of(model, requests_of(seed, shared, SAMPLINGS))
    assert run_together(requests_of(seed, shared, SAMPLINGS), here, there if handed_over else None) == expected
    assert not here.scheduler.audit()


@pytest.mark.parametrize(("tight", "handed_over"), thinned(product([False, True], repeat=2), 3))
def test_a_model_that_drafts_for_itself_is_always_right(handed_over: bool, tight: bool) -> None:
    """Guesses are also right after a preemption, a hit in the prefix cache or a handoff, and after guesses that no step
    verified."""
    model, drafted, preemptions = model_of(PLAIN, PLAIN), 0, 0
    for seed in range(4):
        room = 1.5 if tight else 6
        here, there = (Node(model, StepLimits(max_num_batched_tokens=20), room, 1 if tight else 4) for _ in range(2))
        drafting(here, model)
        expected = answers_of(model, requests_of(seed, not tight, SAMPLINGS))
        assert run_together(requests_of(seed, not tight, SAMPLINGS), here, there if handed_over else None) == expected
        counters = here.scheduler.counters
        assert counters.accepted_tokens == counters.draft_tokens
        drafted += counters.draft_tokens
        preemptions += counters.preemptions
    assert drafted > 20
    assert (preemptions > 0) == tight


def test_a_shared_prefix_is_computed_once_by_the_draft_model() -> None:
    model = model_of(PLAIN, PLAIN)
    node = Node(model, StepLimits(), 6, 4)
    drafter = drafting(node, model)
    sizes: list[int] = []
    inner = drafter.runner.run

    def run(step: Step) -> list[SliceOutput]:
        sizes.extend(slice_.count for slice_ in step.slices)
        return inner(step)

    drafter.runner.run = run
    for row in requests_of(0, True, [GREEDY, GREEDY]):
        run_together([row], node)
    assert max(sizes) >= 16
    assert sum(size >= 16 for size in sizes) == 1, sizes


def test_a_long_text_is_caught_up_in_pieces_before_the_first_guess() -> None:
    model = model_of(PLAIN)
    model.config = replace(model.config, max_position_embeddings=2048)
    length = 2 * CATCH_UP + 40
    node = Node(model, StepLimits(max_num_batched_tokens=4096), 2, 16, longest=length + 30)
    drafter = drafting(node, model)
    row = Request("r", [at % VOCABULARY for at in range(length)], length, 20, sampling=GREEDY)
    node.scheduler.add(row)
    drafted = []
    while node.scheduler.has_work:
        before = node.scheduler.counters.draft_tokens
        node.step()
        drafted.append(node.scheduler.counters.draft_tokens - before)
    assert drafted[:3] == [0, 0, 0]
    assert sum(drafted) > 0
    assert drafter.pass_s > 0


def test_a_pooled_request_does_not_end_the_guesses_for_other_requests() -> None:
    model = model_of(PLAIN)
    node = Node(model, StepLimits(max_num_batched_tokens=8), 6, 4)
    drafter, sampling = drafting(node, model), replace(GREEDY, pooling="mean")
    # The last chunk has one token, as a decode has.
    run_together([Request("r", list(range(9)), 9, 1, sampling=sampling, needs_prompt_logprobs=True)], node)
    assert not drafter.has_failed
    run_together(requests_of(0, False, [GREEDY]), node)
    assert node.scheduler.counters.accepted_tokens > 0


def test_a_failing_draft_model_ends_only_the_guesses() -> None:
    model = model_of(PLAIN, PLAIN)
    node = Node(model, StepLimits(), 6, 4)
    drafter = drafting(node, model)
    passes = iter(range(5))

    def run(step: Step) -> list[SliceOutput]:
        next(passes)  # raises StopIteration after five passes
        return TorchRunner.run(drafter.runner, step)

    drafter.runner.run = run
    assert run_together(requests_of(3, False, SAMPLINGS), node) == answers_of(model, requests_of(3, False, SAMPLINGS))
    assert 0 < node.scheduler.counters.draft_tokens < 40


def test_the_tables_of_mirrors_are_dropped() -> None:
    """Mirrors never end, unlike requests, so `BlockRows` must limit how many tables it keeps."""
    rows, mirrors = BlockRows(), [Request(str(at), [0], 1, 1, tables=[[1]]) for at in range(2 * KEPT_ROWS)]
    for mirror in mirrors:
        rows.tables([Slice(mirror, 0, 1, True, 0)], 4)
    assert sum(getrefcount(mirror.tables[0]) > 2 for mirror in mirrors) <= KEPT_ROWS + 2
