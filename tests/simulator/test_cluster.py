"""Test simulated clusters: results do not depend on skipping, times add up, and nothing is left after a run."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from engine.emulation import Residuals
from scheduler.cost import StepWork
from simulator.cluster import TIMEOUT, ClusterPlan, SimulatedCluster
from simulator.routed import SimulatedRequest
from tests.simulator.clusters import COST, DEVICE, TIMES, cluster_plan, request, serve, traffic

RESIDUALS = Residuals(0.004, (1.0, 1.1)), Residuals(0.02, (0.9, 1.3))
PLANS = {
    "colocated": cluster_plan(0, 2),
    "disaggregated": cluster_plan(1, 2),
    "auto": cluster_plan(2, 1, disaggregate="auto"),
    "slo": cluster_plan(0, 2, tbt_slo_ms=8.0),
    "small": cluster_plan(1, 1, num_blocks=64, max_queue_s=600),
    "prefill_first": cluster_plan(0, 2, policy="prefill_first"),
    "varying": cluster_plan(1, 2, replace(DEVICE, residuals=(0.9, 1.0, 1.3), prefill_residuals=RESIDUALS)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_skipping_decodes_changes_no_placement_and_no_time(plan: ClusterPlan) -> None:
    results = []
    is_small = plan is PLANS["small"]
    for skips in (False, True):
        requests = traffic(3, answers=(300,), longest=60) if is_small else traffic(3)
        cluster = serve(plan, requests, skips=skips)
        ends = cluster.ends()
        placed = [[node.info.id for node in each.nodes] for each in requests]
        results.append((placed, [each.token_s(TIMES.answer_s, ends) for each in requests]))
        assert [each.error for each in requests] == [""] * len(requests)
        assert [len(times) for times in results[-1][1]] == [each.max_tokens for each in requests]
        assert sum(node.node.scheduler.counters.cache_hits for node in cluster.nodes) > 0
        if is_small:
            assert sum(node.node.scheduler.counters.preemptions for node in cluster.nodes) > 0
    (placed, times), (other_placed, other_times) = results
    assert placed == other_placed
    assert np.concatenate(times) == pytest.approx(np.concatenate(other_times), abs=1e-9)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_skipping_decodes_changes_nothing_if_chunks_leave_one_token(num_nodes: int) -> None:
    plan, results = cluster_plan(0, num_nodes, max_num_batched_tokens=64, max_num_seqs=16), []
    for skips in (False, True):
        random = Random(num_nodes)
        requests = [request(n, n / 40, range(n, n + 1 + 64 * random.randrange(1, 9)), 80) for n in range(60)]
        ends = serve(plan, requests, skips=skips).ends()
        results.append([each.token_s(TIMES.answer_s, ends) for each in requests])
    assert np.array(results[1]) == pytest.approx(np.array(results[0]), abs=1e-9)


@pytest.mark.parametrize("skips", [False, True])
def test_the_router_learns_that_a_prompt_is_computed_if_a_chunk_leaves_one_token(skips: bool) -> None:
    cluster = SimulatedCluster(cluster_plan(0, 1, max_num_batched_tokens=64), skips=skips)
    cluster.begin([request(0, 0.0, range(65), 500)])
    cluster.events.run(0.5)
    assert cluster.num_open == 1
    assert (cluster.nodes[0].load.outstanding_tokens, cluster.queue.pending_prefills) == (0, 0)


def test_the_times_of_a_colocated_request_add_up() -> None:
    one = request(0, 0.5, range(100), 3)
    cluster = serve(cluster_plan(0, 1), [one])
    step_s = COST.overhead + COST.per_token * COST.knee_tokens + TIMES.step_s + TIMES.slice_s
    prompt_s = step_s + COST.per_pair * 5050
    decodes_s = [step_s + COST.per_decode + COST.per_context * context for context in (101, 102)]
    first_s = 0.5 + TIMES.request_s + TIMES.rpc_s + prompt_s + TIMES.answer_s
    expected = np.cumsum([first_s, *decodes_s])
    assert one.token_s(TIMES.answer_s, cluster.ends()) == pytest.approx(expected)
    assert one.finish_s == pytest.approx(expected[-1])


def test_the_times_of_a_handoff_add_up() -> None:
    one = request(0, 0.0, range(100), 2)
    cluster = serve(cluster_plan(1, 1), [one])
    first_s, second_s = one.token_s(TIMES.answer_s, cluster.ends())
    blocks_s = 7 * 16 * DEVICE.kv_bytes_per_token / DEVICE.link.bytes_per_s
    decode_s = COST.seconds(StepWork(num_decodes=1, decode_context=101)) + TIMES.step_s + TIMES.slice_s
    push_s = DEVICE.link.latency_s + blocks_s + TIMES.push_s
    assert second_s - first_s == pytest.approx(push_s + TIMES.rpc_s + decode_s)


def test_pushes_of_one_prefill_node_share_its_link() -> None:
    slow = replace(DEVICE, link=replace(DEVICE.link, bytes_per_s=1e8))  # a block takes 16 ms, a prompt 0.1 s
    gaps = []
    for num_prefill in (1, 2):
        requests = [request(number, 0.0, range(number, number + 96), 2) for number in range(2)]
        ends = serve(cluster_plan(num_prefill, 1, slow), requests).ends()
        gaps.append(sorted(float(np.diff(each.token_s(0.0, ends))[0]) for each in requests))
    alone_s = 6 * 16 * DEVICE.kv_bytes_per_token / 1e8
    assert gaps[0][1] - gaps[0][0] > 0.9 * alone_s
    assert gaps[1][1] - gaps[1][0] < 0.1 * alone_s


def test_chunks_are_pushed_while_later_chunks_are_computed() -> None:
    one = request(0, 0.0, range(2000), 2)
    ends = serve(cluster_plan(1, 1), [one]).ends()
    whole_s = 125 * 16 * DEVICE.kv_bytes_per_token / DEVICE.link.bytes_per_s
    assert np.diff(one.token_s(0.0, ends))[0] < whole_s


def test_steps_are_as_long_as_the_slo_allows_from_the_start() -> None:
    """The simulated node knows its step times. A live node reaches steps of this length after a while."""
    requests = [request(0, 0.0, range(9), 400), request(1, 0.5, range(9, 2009), 2)]
    ends = serve(cluster_plan(0, 1, tbt_slo_ms=8.0), requests).ends()
    assert requests[1].token_s(TIMES.answer_s, ends)[0] - 0.5 < 0.06
    assert np.diff(requests[0].token_s(0.0, ends)).max() == pytest.approx(0.9 * 0.008, rel=0.01)


def outcomes(requests: list[SimulatedRequest]) -> set[str]:
    return {each.error.partition(":")[0] for each in requests}


def test_requests_that_cannot_be_served_end_with_an_error() -> None:
    huge = [request(0, 0.0, range(4096), 10)]
    serve(cluster_plan(0, 1), huge)
    assert "does not fit" in huge[0].error
    late = traffic(1, count=100, rate=1000.0)
    serve(cluster_plan(1, 1), late, timeout_s=0.5)
    assert outcomes(late) == {"", TIMEOUT}
    refused = traffic(1, count=400, rate=1000.0)
    serve(cluster_plan(0, 1, max_queue_s=0.3), refused)
    assert {"", "refused"} <= outcomes(refused)
    strict = traffic(1, count=100, rate=300.0)
    serve(cluster_plan(0, 1, ttft_slo_ms=20.0), strict)
    assert outcomes(strict) == {"", "refused"}


def test_many_queued_requests_are_refused_one_after_another() -> None:
    plan = cluster_plan(0, 8, max_num_seqs=64, ttft_slo_ms=20.0, max_queue_s=600, max_queued_tokens=10**9)
    running = [request(n, 0.0, [n], 1000) for n in range(600)]
    refused = [request(n, 0.1, range(3000), 50) for n in range(600, 1600)]
    serve(plan, running + refused)
    assert outcomes(refused) == {"refused"}
