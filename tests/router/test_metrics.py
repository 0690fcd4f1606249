import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.http.asgi import ANONYMOUS, SCOPE_KEY, ResponseWriter
from router.metrics.request_metrics import RequestMetrics, SlidingCounts, SlidingPercentiles, SloTargets, slo_targets
from shared.errors import UnavailableError
from shared.rpc.messages import NodeInfo
from tests.router.scrape import samples_of


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---- the last minute -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2), st.integers(1, 9)), max_size=40), st.floats(0, 90))
def test_sliding_counts_hold_the_last_minute_and_at_most_a_slice_less(steps, wait):
    clock = Clock()
    sliding, added = SlidingCounts(clock), []
    for pause, key, amount in steps:
        clock.now += pause
        sliding.add(key, amount)
        added.append((clock.now, key, amount))
    clock.now += wait
    totals = sliding.totals()
    for key in range(3):
        recent = sum(amount for at, i, amount in added if i == key and at > clock.now - 55 + 1e-6)
        any_time = sum(amount for at, i, amount in added if i == key and at >= clock.now - 60 - 1e-6)
        assert recent <= totals[key] <= any_time


@given(st.lists(st.floats(2e-5, 1000), min_size=1, max_size=200))
@settings(max_examples=50)
def test_percentiles_are_right_to_three_percent_and_expire(values):
    clock = Clock()
    window = SlidingPercentiles(clock)
    for value in values:
        window.observe(value)
    read = window.read_ms()
    assert read["n"] == len(values)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        exact_ms = 1000 * sorted(values)[math.ceil(share * len(values)) - 1]
        assert read[name] == pytest.approx(exact_ms, rel=0.03, abs=0.001)
    clock.now += 61
    window.observe(0.0)
    assert window.read_ms() == {"p50": 0.0, "p99": 0.0, "n": 1}
    clock.now += 61
    assert window.read_ms() == {"p50": None, "p99": None, "n": 0}


# ---- what clients see ------------------------------------------------------------------------------------------------


def metrics_of(slo: SloTargets, gaps: list[float], reason: str = "length", arrived: float = 0.0) -> RequestMetrics:
    """Record one sample. Token i arrives gaps[i] seconds after the previous token, or after the request if i is 0."""
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


@pytest.mark.parametrize(
    ("gaps", "reason", "attainment"),
    [
        ([0.5, *[0.01] * 200], "length", 1.0),
        ([1.5, *[0.01] * 200], "length", 0.0),  # the first token was late
        ([0.5, *[0.01] * 198, 0.2, 0.2], "length", 1.0),  # only 2 of 200 gaps exceed the limit
        ([0.5, *[0.01] * 197, 0.2, 0.2, 0.2], "length", 0.0),
        ([0.5, 0.2], "stop", 0.0),
        ([0.5, 0.01], "error", 0.0),
        ([0.5, 0.01], "abort", None),  # the client left while the SLO was met: not counted
        ([0.5, 0.2], "abort", 0.0),  # the client left after a stall
    ],
)
def test_the_slo_limits_the_first_token_and_the_99th_percentile_of_gaps(gaps, reason, attainment):
    metrics = metrics_of(SloTargets(1.0, 0.1), gaps, reason)
    assert metrics.attainment() == attainment
    assert (("baton_slo_attainment_ratio", "model_name=tiny") in shown(metrics)) is (attainment is not None)
    assert metrics.latency()["slo"] == {"ttft_ms": 1000, "tbt_ms": 100, "attainment": attainment}


def test_a_client_that_disconnects_after_a_late_first_token_counts_as_missed():
    metrics = RequestMetrics("tiny", lambda: SloTargets(1.0, 0.0), Clock())
    for waited in (0.5, 1.5):
        metrics.ended(metrics.pace(10.0), "abort", 10.0 + waited)
    assert metrics.attainment() == 0.0
    assert shown(metrics)["baton_slo_requests_total", "met=no", "model_name=tiny"] == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_unfinished_sample_is_counted_by_its_reason_without_latency(reason):
    seen = shown(metrics_of(SloTargets(1.0), [0.1, 0.2], reason))
    assert seen["vllm:request_success_total", f"finished_reason={reason}", "model_name=tiny"] == 1
    for name in ("vllm:e2e_request_latency_seconds_count", "vllm:request_generation_tokens_count"):
        assert seen[name, "model_name=tiny"] == 0


@given(
    st.lists(st.tuples(st.floats(0, 8), st.sampled_from(["stop", "length", "error", "refused", "abort"])), max_size=40)
)
def test_the_totals_are_rates_of_ten_seconds_and_counts_of_a_minute(ends):
    clock = Clock()
    metrics, ended = RequestMetrics("tiny", clock=clock), []
    for pause, reason in ends:
        clock.now += pause
        pace = metrics.pace(clock.now)
        metrics.accepted(7, 9)
        metrics.tokens(pace, 3, clock.now)
        metrics.ended(pace, reason, clock.now)
        ended.append((int(clock.now), reason))
    totals, now = metrics.totals(), int(clock.now)
    recent = [reason for at, reason in ended if now - 10 <= at < now]
    minute = [reason for at, reason in ended if at > now - 60]
    assert totals == {
        "requests_per_s": len(recent) / 10,
        "prompt_tokens_per_s": 7 * len(recent) / 10,
        "generated_tokens_per_s": 3 * len(recent) / 10,
        "refused_per_s": recent.count("refused") / 10,
        "failed_per_s": recent.count("error") / 10,
        "refused": minute.count("refused"),
        "failed": minute.count("error"),
        "finished": minute.count("stop") + minute.count("length"),
    }


def test_the_status_shows_latencies_of_the_last_minute():
    latency = metrics_of(SloTargets(), [0.4, 0.1, *[0.02] * 98]).latency()
    assert latency["ttft_ms"] == {"p50": pytest.approx(400, rel=0.03), "p99": pytest.approx(400, rel=0.03), "n": 1}
    assert latency["tbt_ms"]["p50"] == pytest.approx(20, rel=0.03)
    assert latency["tbt_ms"]["n"] == 99
    assert latency["ttst_ms"]["p99"] == pytest.approx(100, rel=0.03)


def test_the_strictest_decode_node_sets_the_slo_between_tokens():
    slos = [("prefill", "5"), ("decode", "50.0"), ("decode", ""), ("decode", "40"), ("decode", "garbled")]
    nodes = [
        NodeInfo("n", "b", role, "h:1", "m", "f", 16, 64, 9, 512, 8, attributes={"tbt_slo_ms": slo})
        for role, slo in slos
    ]
    assert slo_targets(500, nodes) == SloTargets(0.5, 0.04)
    assert slo_targets(0, []) == SloTargets()


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
async def test_the_access_line_states_how_the_response_ended(caplog, does, status, outcome):
    async def send(_message: dict) -> None:
        pass

    caplog.set_level("INFO", "baton.access")
    scope = {"type": "http", "path": "/v1/completions", "headers": [], SCOPE_KEY: ANONYMOUS}
    reply = ResponseWriter(scope, send)
    reply.name("cmpl-1")
    arguments = {"events": [b"data"], "fail": [UnavailableError("no node")], "json": [{}], "end": []}
    for what in does:
        await getattr(reply, what)(*arguments[what])
    reply.log()
    (line,) = caplog.messages
    assert line.startswith(f"request=cmpl-1 path=/v1/completions status={status} outcome={outcome} duration_ms=")
