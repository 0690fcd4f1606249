"""Test the metrics of a router that has a dashboard, and the Grafana boards that show them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from dashboard.metrics import RecordMetrics
from dashboard.routes import Dashboard
from dashboard.trace import BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER
from router.dispatch.admission import AdmissionQueue
from router.metrics.node_metrics import MetricSource, NodeMetrics
from router.metrics.request_metrics import RequestMetrics, SlidingCounts, SloTargets
from router.metrics.scaling import ScalingSignals
from router.nodes.load import node_status
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from router.text.grammar_check import GrammarChecker
from scheduler.cost import CostModel
from shared.clock import now_ns
from shared.registry import Registry
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord
from tests.dashboard.world import World, info
from tests.router.scrape import samples_of

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "baton.json"
# The metrics that vLLM's published board queries (examples/online_serving/prometheus_grafana/grafana.json).
VLLM_BOARD = {
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum"),
    *("vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    *("vllm:time_per_output_token_seconds_bucket", "vllm:time_per_output_token_seconds_sum"),
    *("vllm:time_per_output_token_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum"),
    *("vllm:time_to_first_token_seconds_count", "vllm:gpu_cache_usage_perc", "vllm:request_prompt_tokens_bucket"),
    *("vllm:request_generation_tokens_bucket", "vllm:request_success_total", "vllm:request_queue_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    "vllm:request_max_num_generation_tokens_sum",
}


# ---- records ---------------------------------------------------------------------------------------------------


class Nodes:
    """Two nodes, a router's records of them, and all metrics of that router."""

    def __init__(self) -> None:
        self.rows = [(info("p0", role="prefill"), NodeStats(blocks_owned=25, blocks_total=100), True)]
        self.rows += [(info("d0", role="decode"), NodeStats(records_dropped=3, accepted_per_pos=[4, 2]), True)]
        self.records = Dashboard()
        self.requests = RequestMetrics("tiny", lambda: SloTargets(1.0, 1.0))
        self.status = {
            "nodes": [],
            "placements": {"long": 2},
            "inexact_retries": {"seeded": 1},
            "requests": {"moved": 1},
        }
        self.registry = CollectorRegistry()
        self.registry.register(self.requests)
        self.record_metrics = RecordMetrics(
            [MetricSource("tiny", lambda: self.rows, lambda: self.status)], self.records
        )
        self.records.subscribe(self.record_metrics)
        self.registry.register(self.record_metrics)

    def report(self, node: NodeInfo, *steps: StepRecord, events: tuple[RequestEvent, ...] = (), load=None) -> None:
        self.records.node_updated(node, NodeUpdate(stats=load, steps=list(steps), events=list(events)))

    def sample(self, name: str, engine: str, role: str) -> float:
        return samples_of(self.registry)[name, f"engine={engine}", "model_name=tiny", f"role={role}"]


def test_the_size_prediction_error_and_interference_of_steps_are_exported():
    nodes = Nodes()
    decode = nodes.rows[1][0]
    model = CostModel(overhead=0.001, per_decode=0.0005)  # a step of only 4 decodes takes 3 ms
    start = now_ns() - 1_000_000_000
    mixed = StepRecord(1, start, 8000, 1000, 10_000, prefill_tokens=60, num_prefills=1, num_decodes=4)
    alone = StepRecord(2, start + 10_000_000, 3000, num_decodes=4)
    nodes.report(decode, mixed, alone, load=NodeStats(cost=model.packed()))
    labels = ("d0", "decode")
    assert nodes.sample("baton_interference_seconds_total", *labels) == pytest.approx(4 * 0.006)
    assert nodes.sample("vllm:iteration_tokens_total_sum", *labels) == 68
    assert nodes.sample("vllm:iteration_tokens_total_count", *labels) == 2
    assert nodes.sample("baton_step_prediction_error_ratio_count", *labels) == 1  # the other step had no prediction
    assert nodes.sample("baton_step_prediction_error_ratio_sum", *labels) == pytest.approx(1 / 9)
    assert nodes.sample("baton_node_busy_ratio", *labels) == pytest.approx(0.0011)
    assert samples_of(nodes.registry)["baton_pool_busy_ratio", "model_name=tiny", "role=prefill"] == 0


def test_pushes_and_reservations_are_exported_until_their_node_leaves():
    nodes = Nodes()
    prefill = nodes.rows[0][0]
    events = (
        RequestEvent("cmpl-1-0.0.0", "reserving", 1, 30_000, peer="d0"),
        RequestEvent("cmpl-1-0.0.0", "transfer", 2, 4_000, bytes=5000, count=2, peer="d0"),
    )
    nodes.report(prefill, events=events)
    assert nodes.sample("baton_decode_admission_wait_seconds_sum", "p0", "prefill") == 0.03
    assert nodes.sample("vllm:nixl_xfer_time_seconds_sum", "p0", "prefill") == 0.004
    assert nodes.sample("vllm:nixl_bytes_transferred_sum", "p0", "prefill") == 5000
    assert nodes.sample("vllm:kv_cache_usage_perc", "p0", "prefill") == 0.25
    assert nodes.sample("baton_records_dropped_total", "d0", "decode") == 3
    del nodes.rows[0]
    nodes.records.node_lost("p0")
    assert not [key for key in samples_of(nodes.registry) if "engine=p0" in key]
    nodes.rows.append((info("p0", "new", "prefill"), NodeStats(), True))
    assert nodes.sample("vllm:nixl_xfer_time_seconds_sum", "p0", "prefill") == 0


def test_a_handoff_passes_through_sglangs_queues():
    world = World()
    world.records.accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "r")
    for node, kind, *queues in (
        ("prefill-0", "queued"),
        ("prefill-0", "admitted", BOOTSTRAP),
        ("decode-0", "queued", BOOTSTRAP, PREALLOC),
        ("prefill-0", "reserving", TRANSFER),
        ("prefill-0", "transfer", TRANSFER),
        ("prefill-0", "first", INFLIGHT, TRANSFER),
        ("decode-0", "received", INFLIGHT),
        ("prefill-0", "committed", INFLIGHT),
        ("prefill-0", "ended"),
        ("decode-0", "ended"),
    ):
        world.event(node, kind, 1)
        expected = {(f"{'decode' if 'decode' in queue else 'prefill'}-0", queue): 1 for queue in queues}
        assert world.records.handoff_queues() == expected, kind


def test_an_attempt_that_failed_or_is_colocated_is_in_no_queue():
    world = World()
    world.records.accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "r")
    world.event("prefill-0", "admitted", 1)
    world.records.placed("cmpl-a-0.0.1", None, "decode-0", "r")  # the prefill node was lost
    for kind in ("queued", "admitted", "first"):
        world.event("decode-0", kind, 2, "cmpl-a-0.0.1")
    assert not world.records.handoff_queues()


def test_right_guesses_are_counted_by_their_place():
    seen = samples_of(Nodes().registry)
    labels = ("engine=d0", "model_name=tiny")
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [seen[name, *labels, f"position={place}", "role=decode"] for place in (0, 1)] == [4, 2]


def test_a_lost_node_exports_counters_but_no_gauges():
    rows = [(info("p0", role="prefill"), NodeStats(running=5, steps=7), False)]
    metrics = CollectorRegistry()
    status = {"placements": {}, "requests": {}}
    metrics.register(NodeMetrics([MetricSource("tiny", lambda: rows, lambda: status)]))
    text = generate_latest(metrics).decode()
    assert 'vllm:num_requests_running{engine="p0"' not in text
    assert 'baton_steps_total{engine="p0",model_name="tiny",role="prefill"} 7.0' in text
    assert 'baton_node_alive{engine="p0",model_name="tiny",role="prefill"} 0.0' in text


def test_the_status_shows_the_activity_of_nodes_and_latencies():
    nodes = Nodes()
    start = now_ns() - 500_000_000
    step = StepRecord(
        1, start, 200_000, budget=256, reason="tbt", prefill_tokens=96, num_prefills=2, num_decodes=4, running=6
    )
    nodes.report(nodes.rows[1][0], step, load=NodeStats(cost=[0.1] * 7, records_dropped=3))
    status = nodes.status | {"nodes": [node_status(*row) for row in nodes.rows]}
    whole = nodes.records.extend_status(status | {"latency": nodes.requests.latency()})
    prefill, decode = whole["nodes"]
    assert (decode["steps_per_s"], decode["tokens_per_s"], decode["busy"]) == (0.1, 10.0, 0.02)
    assert decode["batch"] == {"tokens": 100, "prefills": 2, "decodes": 4}
    assert (decode["budget"], decode["budget_reason"], decode["records_dropped"]) == (256, "tbt", 3)
    assert (prefill["busy"], prefill["facts"], prefill["cost"]) == (0.0, {"adapters": "none"}, None)
    assert whole["latency"]["window_s"] == 60
    assert isinstance(whole["summary"], str)
    json.dumps(whole, allow_nan=False)


def test_the_phases_of_a_request_are_exported_as_vllms_times():
    nodes = Nodes()
    phases = {"router": 1, "prefill_queue": 20, "prefill": 300, "transfer_exposed": 4}
    phases |= {"decode_queue": 5, "decode": 600, "interference": 7}
    nodes.record_metrics.observe_phases("tiny", phases, {"busy_ms": 30, "hidden_ms": 26, "exposed_ms": 4})
    nodes.record_metrics.observe_phases("tiny", None, None)  # as for co-located requests with several samples
    seen = {
        name: value for (name, *labels), value in samples_of(nodes.registry).items() if name.endswith("_sum") and value
    }
    assert seen == {
        "vllm:request_queue_time_seconds_sum": pytest.approx(0.020),
        "vllm:request_prefill_time_seconds_sum": pytest.approx(0.300),
        "vllm:request_decode_time_seconds_sum": pytest.approx(0.616),
        "vllm:request_inference_time_seconds_sum": pytest.approx(0.916),
        "baton_kv_transfer_busy_seconds_sum": pytest.approx(0.030),
        "baton_kv_transfer_hidden_seconds_sum": pytest.approx(0.026),
        "baton_kv_transfer_exposed_seconds_sum": pytest.approx(0.004),
    }


# ---- boards ----------------------------------------------------------------------------------------------------------


def exported() -> set[str]:
    nodes = Nodes()
    nodes.report(nodes.rows[0][0], StepRecord(1, now_ns(), 1000))
    metrics = nodes.requests
    metrics.ended(metrics.pace(0.0), "error", 0.5)
    metrics.used("acme", 1, 1, 1)
    nodes.registry.register(GrammarChecker())
    pool = NodePool("router", Registry(), "disaggregated", 2.5, RouterObserver())
    nodes.registry.register(ScalingSignals(pool, AdmissionQueue(), SlidingCounts(), "tiny"))
    return {key[0] for key in samples_of(nodes.registry)}


def test_every_metric_of_vllms_published_board_is_exported():
    assert exported() >= VLLM_BOARD


def test_the_documentation_names_every_metric_that_is_exported_and_no_other():
    text = (BOARD.parents[3] / "docs" / "observability.md").read_text()
    named = set(re.findall(r"`((?:vllm:|baton_|gen_ai_)\w{2,})`", text))
    assert named == {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}


def test_the_nodes_of_both_roles_are_counted_by_state_also_without_nodes():
    nodes = Nodes()

    def counted() -> dict[tuple[str, str], float]:
        seen = {key: value for key, value in samples_of(nodes.registry).items() if key[0] == "baton_pool_nodes"}
        return {(role.partition("=")[2], state.partition("=")[2]): value for (_, _, role, state), value in seen.items()}

    nodes.rows = []
    assert set(counted().values()) == {0}
    assert {role for role, state in counted() if state == "ready"} == {"prefill", "decode"}
    nodes.rows = [(info("p0", role="prefill"), NodeStats(), True)]
    nodes.rows.append((info("d0", role="decode"), NodeStats("draining"), True))
    nodes.rows.append((info("d1", role="decode"), NodeStats(), False))
    found = {key: value for key, value in counted().items() if value}
    assert found == {("prefill", "ready"): 1, ("decode", "draining"): 1, ("decode", "lost"): 1}
    alive = samples_of(nodes.registry)["baton_node_alive", "engine=d1", "model_name=tiny", "role=decode"]
    assert alive == 0


def test_renamed_metrics_keep_their_old_names_for_a_release():
    nodes = Nodes()
    nodes.requests.refused()
    seen = samples_of(nodes.registry)
    for name, alias, value in (
        ("baton_request_migrations_total", "baton_requests_moved_total", 1),
        ("baton_requests_rejected_total", "baton_requests_refused_total", 1),
        ("baton_client_backpressure_total", "baton_requests_paused_total", 0),
        ("baton_node_records_dropped_total", "baton_records_malformed_total", 0),
    ):
        assert seen[name, "model_name=tiny"] == seen[alias, "model_name=tiny"] == value


def test_every_metric_of_our_board_is_exported():
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked_for = {name for query in queries for name in re.findall(r"(?:vllm:|baton_)\w+", query)}
    assert len(queries) > 40
    assert asked_for <= exported()
    rules = yaml.safe_load((BOARD.parents[2] / "alerts.yml").read_text())["groups"][0]["rules"]
    alerts = {rule["alert"]: set(re.findall(r"(?:vllm:|baton_)\w+", rule["expr"])) for rule in rules}
    assert set().union(*alerts.values()) <= exported()
    assert {name for name, names in alerts.items() if not names} == {"BatonRouterDown", "BatonNoRouter"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
