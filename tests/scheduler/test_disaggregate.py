"""Test where a prompt is computed: the right choices in many situations, and changes that must not reverse a choice."""

from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cost import CostModel, StepWork
from scheduler.disaggregate import LatencyEstimate, NodeView, choose, local_estimate, remote_estimate
from scheduler.placement import Placement, place

# 4.6 ms to read the weights, then 20 us per token: about Llama-3.1-8B on an H200.
H200 = CostModel(0.0, 2e-5, 230.0, 9e-10, 3e-8, 8e-6)
LINK = {"push_s": 5e-4, "byte_s": 1 / 11e9, "token_bytes": 131_072}


def prefill_node(**fields: Any) -> NodeView:
    values: dict[str, Any] = {"budget_tokens": 2048, "cost": H200, "max_num_seqs": 256, "kv_capacity_tokens": 880_000}
    return NodeView("p0", "prefill", **(values | LINK | fields))


def decode_node(decodes: int = 0, context: int = 1000, **fields: Any) -> NodeView:
    return replace(prefill_node(), id="d0", role="decode", running=decodes, decode_context=decodes * context, **fields)


def placed(prompt: int, p: NodeView, d: NodeView, cached: dict[str, int] | None = None) -> Placement:
    found = place(prompt, [p], [d], cached or {}, "auto")
    assert found is not None
    return found


SITUATIONS = [
    # situation, prompt tokens, fields of the prefill node, fields of the decode node, cached tokens, reason
    ("a short prompt, no decodes", 100, {}, {}, {}, "local_sooner"),
    ("a long prompt, no decodes", 8000, {}, {}, {}, "local_sooner"),
    ("a long prompt, many decodes", 8000, {}, {"decodes": 128}, {}, "remote_sooner"),
    ("tokens below the knee are nearly free", 20, {}, {"decodes": 8}, {}, "local_sooner"),
    ("a prompt cached at the decode node", 8000, {}, {"decodes": 64}, {"d0": 7990}, "local_sooner"),
    ("a prompt cached at both, many decodes", 8000, {"byte_s": 0.0, "push_s": 0.0}, {"decodes": 128},
     {"d0": 7000, "p0": 7990}, "remote_sooner"),
    ("a queue at the prefill node", 3000, {"outstanding_tokens": 200_000}, {"decodes": 8}, {}, "prefill_overloaded"),
    ("queues at both", 3000, {"outstanding_tokens": 100_000}, {"decodes": 8, "outstanding_tokens": 100_000}, {},
     "remote_sooner"),
    ("a slow link and few decodes", 2000, {"byte_s": 1e-9}, {"decodes": 2}, {}, "local_sooner"),
    ("an SLO that leaves no room", 2000, {}, {"decodes": 64, "tbt_slo_s": 0.007}, {}, "keeps_tbt"),
    ("an SLO with room, and a queue elsewhere", 2000, {"outstanding_tokens": 20_000, "byte_s": 0.0}, {"decodes": 64, "tbt_slo_s": 0.05},
     {}, "prefill_overloaded"),
    ("an SLO with little room", 8000, {}, {"decodes": 64, "tbt_slo_s": 0.010}, {}, "remote_sooner"),
    ("no model of the prefill node", 100, {"cost": None}, {}, {}, "no_prediction"),
    ("no model of the decode node", 100, {}, {"cost": None}, {}, "no_prediction"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "p", "d", "cached", "reason"), [row[1:] for row in SITUATIONS], ids=[row[0] for row in SITUATIONS]
)
def test_each_situation_has_its_choice(
    prompt: int, p: dict[str, Any], d: dict[str, Any], cached: dict[str, int], reason: str
) -> None:
    found = placed(prompt, prefill_node(**p), decode_node(**d), cached)
    is_local = reason in {"local_sooner", "prefill_overloaded"}
    assert (found.reason, found.prefill, found.decode) == (reason, None if is_local else "p0", "d0")
    assert found.estimate is (found.local if is_local else found.remote)


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_fixed_mode_is_obeyed_and_the_latencies_are_still_predicted(mode: str) -> None:
    for decodes in (0, 128):
        for prompt in (10, 8000):
            found = place(prompt, [prefill_node()], [decode_node(decodes)], {}, mode)
            assert found is not None
            assert (found.prefill, found.reason) == (("p0", "disaggregated") if mode == "always" else (None, "never"))
            assert found.estimate is not None
            assert found.estimate.first_token_s > 0


def test_seconds_are_those_of_the_steps_that_the_model_predicts() -> None:
    found = placed(5000, prefill_node(outstanding_tokens=100, outstanding_pairs=5050), decode_node(8))
    assert found.remote is not None
    chunks = [StepWork(1, 2048), StepWork(1, 2048), StepWork(1, 904)]
    pairs = 5000 * 5001 // 2
    assert found.remote.compute_s == pytest.approx(sum(map(H200.seconds, chunks)) + H200.per_pair * pairs)
    assert found.remote.wait_s == pytest.approx(H200.seconds(StepWork(1, 100, 5050)))
    assert found.remote.transfer_s == pytest.approx(5e-4 + 904 * 131_072 / 11e9)
    mixed = [
        replace(work, num_decodes=8, decode_context=8000)
        for work in (StepWork(1, 2040), StepWork(1, 2040), StepWork(1, 920))
    ]
    assert found.local is not None
    assert found.local.compute_s == pytest.approx(sum(map(H200.seconds, mixed)) + H200.per_pair * pairs)
    alone = H200.seconds(StepWork(num_decodes=8, decode_context=8000))
    assert found.local.harm_s == pytest.approx(8 * (found.local.compute_s - 3 * alone))


def test_a_link_slower_than_the_prefill_adds_its_whole_time() -> None:
    slow = remote_estimate(prefill_node(byte_s=1e-8), 8192, 0, 0)
    assert slow is not None
    last_s = H200.per_token * 2048 + H200.per_pair * (6144 * 2048 + 2048 * 2049 // 2)
    hidden_s = slow.compute_s - last_s
    assert slow.transfer_s == pytest.approx(4 * 5e-4 + 8192 * 131_072 * 1e-8 - hidden_s)


def test_a_decode_node_without_prompts_is_predicted_from_the_prefill_nodes_model() -> None:
    decodes_only = CostModel(4.6e-3, 0.0, 0.0, 0.0, 3e-8, 8e-6)  # fitted to decodes alone, so that prompts seem free
    for decodes in (0, 64):
        view = decode_node(decodes, cost=decodes_only, cost_is_learnt=False)
        taught, knowing = local_estimate(view, H200, 4000, 0), local_estimate(decode_node(decodes), H200, 4000, 0)
        assert taught is not None
        assert knowing is not None
        assert taught.compute_s == pytest.approx(knowing.compute_s, rel=0.01)


def test_without_prefill_nodes_the_decode_node_is_predicted_from_its_own_model() -> None:
    found = place(1000, [], [decode_node()], {}, "auto")
    assert found is not None
    assert found.estimate is not None
    assert found.estimate.first_token_s == pytest.approx(H200.seconds(StepWork(1, 1000, 1000 * 1001 // 2)))


views = st.builds(
    lambda running, context, tokens, slo: decode_node(running, context, outstanding_tokens=tokens, tbt_slo_s=slo),
    st.integers(0, 200), st.integers(1, 4000), st.integers(0, 30_000), st.sampled_from([0.0, 0.008, 0.02, 0.05]),
)  # fmt: skip
prompts = st.integers(1, 20_000)


def is_local(prompt: int, p: NodeView, d: NodeView) -> bool:
    return placed(prompt, p, d).prefill is None


@given(prompts, st.integers(0, 100_000), st.integers(0, 100_000), views)
def test_a_longer_prefill_queue_never_attracts_a_prompt(prompt: int, queue: int, more: int, d: NodeView) -> None:
    short, long = (prefill_node(outstanding_tokens=tokens) for tokens in (queue, queue + more))
    assert not is_local(prompt, short, d) or is_local(prompt, long, d)


@given(prompts, st.integers(0, 50_000), views)
def test_more_prompts_waiting_at_the_decode_node_never_attract_another(prompt: int, more: int, d: NodeView) -> None:
    p, busier = prefill_node(outstanding_tokens=5000), replace(d, outstanding_tokens=d.outstanding_tokens + more)
    assert is_local(prompt, p, d) or not is_local(prompt, p, busier)


@given(prompts, st.floats(1.0, 100.0), views)
def test_a_slower_link_never_attracts_a_prompt(prompt: int, factor: float, d: NodeView) -> None:
    fast, slow = prefill_node(), prefill_node(byte_s=LINK["byte_s"] * factor, push_s=LINK["push_s"] * factor)
    assert not is_local(prompt, fast, d) or is_local(prompt, slow, d)


@given(prompts, st.integers(0, 200), st.floats(0.005, 0.05))
def test_a_local_prompt_is_predicted_to_keep_the_slo(prompt: int, decodes: int, slo_s: float) -> None:
    """If a prompt is predicted to keep the SLO, the predicted mean time of its steps is within the SLO."""
    view = decode_node(decodes, tbt_slo_s=slo_s)
    estimate = local_estimate(view, H200, prompt, 0)
    assert estimate is not None
    if estimate.keeps_tbt and decodes:
        alone_s = H200.seconds(StepWork(num_decodes=decodes, decode_context=view.decode_context))
        assert alone_s <= slo_s
        steps = ceil(prompt / 2048)
        while (steps + 1) * alone_s < estimate.compute_s and estimate.compute_s / steps > slo_s * 1.05:
            steps += 1
        assert estimate.compute_s / steps <= slo_s * 1.05


def test_where_decodes_alone_miss_the_slo_prompts_still_progress_by_the_floor_of_each_step() -> None:
    estimate = local_estimate(decode_node(64, tbt_slo_s=0.001), H200, 160, 0)
    assert estimate is not None
    assert not estimate.keeps_tbt
    alone_s = H200.seconds(StepWork(num_decodes=64, decode_context=64_000))
    assert 10 * alone_s <= estimate.compute_s < 11 * alone_s, "ten steps of 16 tokens"


def test_a_prefill_node_that_was_idle_for_long_is_measured_again() -> None:
    assert placed(100, prefill_node(), decode_node()).reason == "local_sooner"
    found = placed(100, prefill_node(stale=True), decode_node(stale=True))
    assert (found.prefill, found.reason) == ("p0", "stale_model")


def test_requests_whose_prompts_are_not_computed_yet_are_not_delayed_by_another() -> None:
    assert placed(3000, prefill_node(), decode_node(64)).reason == "remote_sooner"
    assert placed(3000, prefill_node(), decode_node(64, prefilling=64)).reason == "local_sooner"


def test_ties_and_unknowns_go_to_the_prefill_node() -> None:
    same = LatencyEstimate(0.1, 0.2)
    assert choose(same, same) == (False, "remote_sooner")
    assert choose(None, same) == choose(same, None) == (False, "no_prediction")


def test_a_local_prompt_is_placed_on_the_decode_node_with_the_longest_prefix() -> None:
    nodes = [decode_node(2), replace(decode_node(4), id="d1")]
    found = place(8000, [prefill_node()], nodes, {"d1": 7900}, "auto")
    assert found is not None
    assert (found.prefill, found.decode, found.reason) == (None, "d1", "local_sooner")
