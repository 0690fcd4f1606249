import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from dashboard.history import RequestHistory
from router.http.asgi import ResponseWriter
from router.http.keys import ANONYMOUS, SCOPE_KEY
from router.metrics.histogram import Histogram, SlidingPercentiles, SlidingWindow
from router.metrics.node_metrics import BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER, HandoffQueues, NodeMetrics
from router.metrics.request_metrics import RequestMetrics, SloTargets
from router.nodes.status import node_status, promised, whole_status
from scheduler.cost import CostModel
from shared.clock import now_ns
from shared.errors import UnavailableError
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord

BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "baton.json"
# What the board that vLLM publishes asks for (examples/online_serving/prometheus_grafana/grafana.json).
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


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def info(name: str, role: str, boot: str = "b", **facts: str) -> NodeInfo:
    return NodeInfo(name, boot, role, "h:1", "tiny", "f", 16, 1024, 100, 2048, 64, attributes=facts)


def samples_of(registry: CollectorRegistry) -> dict[tuple, float]:
    """(name, sorted labels) -> value, as a scrape reads it."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *sorted(f"{key}={value}" for key, value in sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


# ---- tallies ---------------------------------------------------------------------------------------------------------

amounts = st.lists(st.floats(0, 200, allow_subnormal=False), max_size=30)


@given(amounts)
def test_a_histogram_is_the_client_librarys(values):
    bounds = (0.01, 1, 5.5, 100)
    registry, ours = CollectorRegistry(), Histogram(bounds)
    library = LibraryHistogram("h", "Help.", buckets=bounds, registry=registry)
    for value in values:
        library.observe(value)
        ours.observe(value)
    family = HistogramMetricFamily("h", "Help.", labels=[])
    ours.add_to(family, [])
    theirs = {key: value for key, value in samples_of(registry).items() if not key[0].endswith("_created")}
    assert {
        (sample.name, *(f"{k}={v}" for k, v in sample.labels.items())): pytest.approx(sample.value)
        for sample in family.samples
    } == theirs


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2), st.integers(1, 9)), max_size=40), st.floats(0, 90))
def test_sliding_sums_hold_the_last_seconds_and_at_most_a_slice_less(steps, wait):
    clock = Clock()
    sliding, added = SlidingWindow(3, 60.0, num_slices=12, clock=clock), []
    for pause, index, amount in steps:
        clock.now += pause
        sliding.add(index, amount)
        added.append((clock.now, index, amount))
    clock.now += wait
    for index, total in enumerate(sliding.sums()):
        recent = sum(amount for at, i, amount in added if i == index and at > clock.now - 55 + 1e-6)
        any_time = sum(amount for at, i, amount in added if i == index and at >= clock.now - 60 - 1e-6)
        assert recent <= total <= any_time


@given(st.lists(st.floats(2e-5, 1000), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
@settings(max_examples=50)
def test_percentiles_are_right_to_three_percent(values, share):
    window = SlidingPercentiles(60.0, Clock())
    for value in values:
        window.observe(value)
    count, (found,) = window.read(share)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert count == len(values)
    assert abs(found / exact - 1) < 0.03


def test_percentiles_forget_and_have_nothing_to_say_of_nothing():
    clock = Clock()
    window = SlidingPercentiles(60.0, clock)
    window.observe(0.0)
    assert window.read(0.5) == (1, [0.0])
    clock.now += 61
    assert window.read(0.5) == (0, [None])


# ---- what clients see ------------------------------------------------------------------------------------------------


def asked(slo: SloTargets, gaps: list[float], reason: str = "length", arrived: float = 0.0) -> RequestMetrics:
    """One sample: its first token after gaps[0], the others each after theirs."""
    metrics = RequestMetrics("tiny", lambda: slo, Clock())
    pace, now = metrics.pace(arrived), arrived
    metrics.accepted(7, 99)
    for gap in gaps:
        now += gap
        metrics.tokens(pace, 1, now)
    metrics.ended(pace, reason, now)
    return metrics


def shown(metrics: RequestMetrics) -> dict[tuple, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return samples_of(registry)


def test_tokens_are_counted_not_messages():
    metrics = RequestMetrics("tiny", clock=Clock())
    pace = metrics.pace(10.0)
    metrics.tokens(pace, 3, 10.5)
    metrics.tokens(pace, 2, 11.0)
    metrics.ended(pace, "stop", 11.0)
    seen = shown(metrics)
    model = "model_name=tiny"
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert (seen[f"{name}_count", model], seen[f"{name}_sum", model]) == (4, 0.5)
        assert seen[f"{name}_bucket", "le=0.001", model] == 3
    assert seen["vllm:time_to_first_token_seconds_sum", model] == 0.5
    assert seen["gen_ai_server_time_to_first_token_seconds_sum", "gen_ai_request_model=tiny"] == 0.5
    assert seen["baton_second_token_latency_seconds_sum", model] == 0
    assert seen["vllm:request_time_per_output_token_seconds_sum", model] == 0.5 / 4
    assert seen["vllm:generation_tokens_total", model] == 5
    assert seen["vllm:request_success_total", "finished_reason=stop", model] == 1


def test_one_token_has_no_time_per_output_token_and_no_second():
    seen = shown(asked(SloTargets(), [0.5]))
    assert seen["vllm:request_time_per_output_token_seconds_count", "model_name=tiny"] == 0
    assert seen["baton_second_token_latency_seconds_count", "model_name=tiny"] == 0
    assert ("baton_slo_attainment_ratio", "model_name=tiny") not in seen  # no SLO, no share of it


@pytest.mark.parametrize(
    ("gaps", "reason", "attainment"),
    [
        ([0.5, *[0.01] * 200], "length", 1.0),
        ([1.5, *[0.01] * 200], "length", 0.0),  # the first token was late
        ([0.5, *[0.01] * 198, 0.2, 0.2], "length", 1.0),  # 2 gaps of 200 lie beyond the 99th percentile
        ([0.5, *[0.01] * 197, 0.2, 0.2, 0.2], "length", 0.0),
        ([0.5, 0.2], "stop", 0.0),
        ([0.5, 0.01], "error", 0.0),
        ([0.5, 0.01], "abort", None),  # it left while all was well: says nothing
        ([0.5, 0.2], "abort", 0.0),  # it left after a stall
    ],
)
def test_a_sample_is_good_when_its_first_token_and_the_99th_percentile_of_its_gaps_keep_the_slo(
    gaps, reason, attainment
):
    metrics = asked(SloTargets(1.0, 0.1), gaps, reason)
    assert metrics.attainment() == attainment
    assert metrics.latency()["slo"] == {"ttft_ms": 1000, "tbt_ms": 100, "attainment": attainment}


def test_a_client_that_left_after_a_late_first_token_counts_as_missed():
    metrics = RequestMetrics("tiny", lambda: SloTargets(1.0, 0.0), Clock())
    for waited in (0.5, 1.5):
        metrics.ended(metrics.pace(10.0), "abort", 10.0 + waited)
    assert metrics.attainment() == 0.0
    assert shown(metrics)["baton_slo_requests_total", "met=no", "model_name=tiny"] == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_did_not_finish_counts_by_its_reason_and_has_no_latency(reason):
    seen = shown(asked(SloTargets(1.0), [0.1, 0.2], reason))
    assert seen["vllm:request_success_total", f"finished_reason={reason}", "model_name=tiny"] == 1
    for name in ("vllm:e2e_request_latency_seconds_count", "vllm:request_generation_tokens_count"):
        assert seen[name, "model_name=tiny"] == 0


def test_latency_is_the_last_minutes():
    latency = asked(SloTargets(), [0.4, 0.1, *[0.02] * 98]).latency()
    assert latency["ttft_ms"] == {"p50": pytest.approx(400, rel=0.03), "p99": pytest.approx(400, rel=0.03), "n": 1}
    assert latency["tbt_ms"]["p50"] == pytest.approx(20, rel=0.03)
    assert latency["tbt_ms"]["n"] == 99
    assert latency["ttst_ms"]["p99"] == pytest.approx(100, rel=0.03)


def test_the_phases_of_a_request_become_vllms_times():
    metrics = RequestMetrics("tiny", clock=Clock())
    phases = {"router": 1, "prefill_queue": 20, "prefill": 300, "transfer_exposed": 4}
    phases |= {"decode_queue": 5, "decode": 600, "interference": 7}
    metrics.settled({"phases_ms": phases, "transfer": {"busy_ms": 30, "hidden_ms": 26, "exposed_ms": 4}})
    metrics.settled({"phases_ms": None, "transfer": None})  # several samples, computed where they are generated
    seen = {name: value for (name, *labels), value in shown(metrics).items() if name.endswith("_sum") and value}
    assert seen == {
        "vllm:request_queue_time_seconds_sum": pytest.approx(0.020),
        "vllm:request_prefill_time_seconds_sum": pytest.approx(0.300),
        "vllm:request_decode_time_seconds_sum": pytest.approx(0.616),
        "vllm:request_inference_time_seconds_sum": pytest.approx(0.916),
        "baton_kv_transfer_busy_seconds_sum": pytest.approx(0.030),
        "baton_kv_transfer_hidden_seconds_sum": pytest.approx(0.026),
        "baton_kv_transfer_exposed_seconds_sum": pytest.approx(0.004),
    }


def test_the_strictest_live_decode_node_sets_what_is_promised_between_tokens():
    nodes = [info("p", "prefill", tbt_slo_ms="5"), info("a", "decode", tbt_slo_ms="50.0"), info("b", "decode")]
    nodes += [info("c", "decode", tbt_slo_ms="40"), info("d", "decode", tbt_slo_ms="garbled")]
    assert promised(500, nodes) == SloTargets(0.5, 0.04)
    assert promised(0, []) == SloTargets()


# ---- what nodes do ---------------------------------------------------------------------------------------------------


class Nodes:
    """Two nodes, a router's records of them, and all metrics."""

    def __init__(self) -> None:
        self.rows = [(info("p0", "prefill"), NodeStats(blocks_owned=25, blocks_total=100), True)]
        self.rows += [(info("d0", "decode"), NodeStats(records_dropped=3), True)]
        self.records = RequestHistory()
        self.requests = RequestMetrics("tiny", lambda: SloTargets(1.0, 1.0))
        self.status = {"nodes": [], "placements": {"long": 2}, "requests": {"moved": 1, "refused": 4}}
        self.registry = CollectorRegistry()
        self.registry.register(self.requests)
        self.node_metrics = NodeMetrics(lambda: self.rows, "tiny", self.records, lambda: self.status)
        self.records.subscribe(self.node_metrics)
        self.registry.register(self.node_metrics)

    def report(self, node: NodeInfo, *steps: StepRecord, events: tuple[RequestEvent, ...] = (), load=None) -> None:
        self.records.take(node, NodeUpdate(stats=load, steps=list(steps), events=list(events)))

    def sample(self, name: str, engine: str, role: str) -> float:
        return samples_of(self.registry)[name, f"engine={engine}", "model_name=tiny", f"role={role}"]


def test_steps_are_measured_by_their_size_their_prediction_and_their_interference():
    nodes = Nodes()
    decode = nodes.rows[1][0]
    model = CostModel(overhead=0.001, per_decode=0.0005)  # 4 decodes alone: 3 ms
    start = now_ns() - 1_000_000_000
    mixed = StepRecord(1, start, 8000, 1000, 10_000, prefill_tokens=60, num_prefills=1, num_decodes=4)
    alone = StepRecord(2, start + 10_000_000, 3000, num_decodes=4)
    nodes.report(decode, mixed, alone, load=NodeStats(cost=model.packed()))
    labels = ("d0", "decode")
    assert nodes.sample("baton_interference_seconds_total", *labels) == pytest.approx(4 * 0.006)
    assert nodes.sample("vllm:iteration_tokens_total_sum", *labels) == 68
    assert nodes.sample("vllm:iteration_tokens_total_count", *labels) == 2
    assert nodes.sample("baton_step_prediction_error_ratio_count", *labels) == 1  # the other had no prediction
    assert nodes.sample("baton_step_prediction_error_ratio_sum", *labels) == pytest.approx(1 / 9)
    assert nodes.sample("baton_node_busy_ratio", *labels) == pytest.approx(0.0011)
    assert samples_of(nodes.registry)["baton_pool_busy_ratio", "model_name=tiny", "role=prefill"] == 0


def test_pushes_and_waits_for_room_are_measured_and_a_node_that_left_is_dropped():
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
    assert not [key for key in samples_of(nodes.registry) if "engine=p0" in key]
    nodes.rows.append((info("p0", "prefill", boot="new"), NodeStats(), True))
    assert nodes.sample("vllm:nixl_xfer_time_seconds_sum", "p0", "prefill") == 0


P, D = info("p0", "prefill"), info("d0", "decode")
STORY = [  # of one handoff, and where it stands after each event
    (P, "queued", {}),
    (P, "admitted", {("p0", BOOTSTRAP)}),
    (D, "queued", {("p0", BOOTSTRAP), ("d0", PREALLOC)}),
    (P, "reserving", {("d0", TRANSFER)}),
    (P, "transfer", {("d0", TRANSFER)}),
    (P, "first", {("p0", INFLIGHT), ("d0", TRANSFER)}),
    (D, "landed", {("p0", INFLIGHT)}),
    (P, "committed", {("p0", INFLIGHT)}),
    (P, "ended", {}),
    (D, "ended", {}),
]


def test_a_handoff_goes_through_sglangs_queues():
    queues = HandoffQueues()
    for number, (node, kind, stands) in enumerate(STORY):
        queues.event(node, RequestEvent("cmpl-1-0.0.0", kind, number))
        assert set(queues.counts()) == set(stands), kind
    assert queues.num_open == 0


def test_events_of_the_two_nodes_come_in_any_order_and_leave_nothing():
    stories = {node.id: [kind for each, kind, _ in STORY if each is node] for node in (P, D)}
    draw = random.Random(3)
    for order in itertools.islice(iter(lambda: draw.sample([P] * 7 + [D] * 3, 10), None), 50):
        queues, rest = HandoffQueues(), {name: iter(kinds) for name, kinds in stories.items()}
        for node in order:
            queues.event(node, RequestEvent("a", next(rest[node.id]), 0))
        assert queues.counts() == {}


def test_a_prompt_computed_where_it_is_generated_stands_in_no_queue_and_a_lost_node_leaves_none():
    queues = HandoffQueues()
    for kind in ("queued", "admitted", "first"):
        queues.event(D, RequestEvent("a", kind, 0))
    assert queues.counts() == {}
    for node, kind, _ in STORY[:3]:
        queues.event(node, RequestEvent("b", kind, 0))
    queues.lost("p0")
    assert queues.counts() == {("d0", PREALLOC): 1}
    queues.lost("d0")
    assert queues.num_open == 0


def test_the_status_shows_what_nodes_did_and_what_clients_had():
    nodes = Nodes()
    start = now_ns() - 500_000_000
    step = StepRecord(
        1, start, 200_000, budget=256, reason="tbt", prefill_tokens=96, num_prefills=2, num_decodes=4, running=6
    )
    nodes.report(nodes.rows[1][0], step, load=NodeStats(cost=[0.1] * 7, records_dropped=3))
    status = nodes.status | {"nodes": [node_status(*row) for row in nodes.rows]}
    whole = whole_status(status, nodes.records, nodes.requests)
    prefill, decode = whole["nodes"]
    assert (decode["steps_per_s"], decode["tokens_per_s"], decode["busy"]) == (0.1, 10.0, 0.02)
    assert decode["batch"] == {"tokens": 100, "prefills": 2, "decodes": 4}
    assert (decode["budget"], decode["budget_reason"], decode["records_dropped"]) == (256, "tbt", 3)
    assert (prefill["busy"], prefill["facts"], prefill["cost"]) == (0.0, {}, None)
    assert whole["latency"]["window_s"] == 60
    assert isinstance(whole["summary"], str)
    json.dumps(whole, allow_nan=False)


# ---- the access log ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("does", "status", "outcome"),
    [
        ([], 499, "client_gone"),
        (["events"], 200, "client_gone"),
        (["events", "end"], 200, "answered"),
        (["events", "fail"], 200, "UnavailableError"),
        (["fail"], 503, "UnavailableError"),
        (["json"], 200, "answered"),
    ],
)
async def test_the_access_line_says_how_an_answer_ended(caplog, does, status, outcome):
    async def send(_message: dict) -> None:
        pass

    caplog.set_level("INFO", "baton.access")
    scope = {"type": "http", "path": "/v1/completions", "headers": [], SCOPE_KEY: ANONYMOUS}
    reply = ResponseWriter(scope, send, "mine")
    reply.name("cmpl-1")
    arguments = {"events": [b"data"], "fail": [UnavailableError("no node")], "json": [{}], "end": []}
    for what in does:
        await getattr(reply, what)(*arguments[what])
    reply.log()
    (line,) = caplog.messages
    assert line.startswith(f"request=cmpl-1 path=/v1/completions status={status} outcome={outcome} duration_ms=")


# ---- boards ----------------------------------------------------------------------------------------------------------


def exported() -> set[str]:
    nodes = Nodes()
    nodes.report(nodes.rows[0][0], StepRecord(1, now_ns(), 1000))
    metrics = nodes.requests
    metrics.ended(metrics.pace(0.0), "error", 0.5)
    metrics.used("acme", 1, 1, 1)
    return {key[0] for key in samples_of(nodes.registry)}


def test_vllms_published_board_finds_all_it_asks_for():
    assert exported() >= VLLM_BOARD


def test_the_documentation_names_every_metric_that_is_exported_and_no_other():
    text = (BOARD.parents[3] / "docs" / "observability.md").read_text()
    named = set(re.findall(r"`((?:vllm:|baton_|gen_ai_)\w{2,})`", text))
    assert named == {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}


def test_renamed_metrics_keep_their_old_names_for_a_release():
    seen = samples_of(Nodes().registry)
    for name, alias, value in (
        ("baton_request_migrations_total", "baton_requests_moved_total", 1),
        ("baton_requests_rejected_total", "baton_requests_refused_total", 4),
        ("baton_client_backpressure_total", "baton_requests_paused_total", 0),
        ("baton_node_records_dropped_total", "baton_records_malformed_total", 0),
    ):
        assert seen[name, "model_name=tiny"] == seen[alias, "model_name=tiny"] == value


def test_every_query_of_our_board_asks_for_what_is_exported():
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked_for = {name for query in queries for name in re.findall(r"(?:vllm:|baton_)\w+", query)}
    assert len(queries) > 40
    assert asked_for <= exported()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
