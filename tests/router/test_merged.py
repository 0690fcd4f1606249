"""Test that the metrics and the status of a router with several workers are merged correctly."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from router.http.whole_router import WholeRouter
from router.metrics.merged import MergedMetrics, merged_requests, merged_status
from router.metrics.request_metrics import RequestMetrics, SloTargets, Snapshot
from shared.errors import UnavailableError
from shared.metrics import metric_family


def text_of(*families: Any) -> str:
    class Listed:
        def collect(self) -> list[Any]:
            return list(families)

    registry = CollectorRegistry()
    registry.register(Listed())  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def values_of(text: str) -> dict[tuple[str, ...], float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def merged(texts: list[str]) -> dict[tuple[str, ...], float]:
    return values_of(generate_latest(MergedMetrics(texts)).decode())


@given(st.lists(st.lists(st.floats(0, 100), max_size=20), min_size=1, max_size=4))
def test_the_requests_of_all_workers_are_counted_as_by_one(latencies: list[list[float]]) -> None:
    def metrics(rows: list[float]) -> str:
        now = 0.0
        seen = RequestMetrics("m", lambda: SloTargets(50.0), lambda: now)
        for latency_s in rows:
            seen.accepted(7, 9)
            seen.tokens(seen.pace(0.0), 1, latency_s)
        return generate_latest(Snapshot(seen)).decode()

    one = values_of(metrics([latency for rows in latencies for latency in rows]))
    many = merged([metrics(rows) for rows in latencies])
    assert many.keys() == one.keys()
    assert all(abs(many[key] - value) < 1e-6 * max(1, value) for key, value in one.items())


def test_metrics_of_nodes_are_not_summed_and_a_restarted_worker_does_not_lower_them() -> None:
    def text(steps: float, ready: float, queued: float, handoffs: float) -> str:
        labels = ("engine", "role", "model_name")
        node = ("d0", "decode", "m")
        return text_of(
            metric_family("vllm:iteration_tokens_total", "", labels, [(node, steps)]),
            metric_family("baton_pool_nodes", "", ("role", "state"), [(("decode", "ready"), ready)]),
            GaugeMetricFamily("baton_queue_requests", "", value=queued),
            metric_family("baton_num_decode_transfer_queue_reqs", "", labels, [(node, handoffs)]),
            CounterMetricFamily("baton_slo_attainment_ratio", "", value=queued / 10),
        )

    seen = merged([text(5, 1, 2, 3), text(90, 1, 4, 1)])
    by_name = {key[0]: value for key, value in seen.items()}
    assert by_name["vllm:iteration_tokens_total"] == 90
    assert by_name["baton_pool_nodes"] == 1
    assert by_name["baton_queue_requests"] == 6
    assert by_name["baton_num_decode_transfer_queue_reqs"] == 4


def status_of(router: str, queued: int, p99: float | None, attainment: float) -> dict[str, Any]:
    return {
        "router": {"id": router},
        "nodes": [{"id": "d0"}],
        "requests": {"total": 3},
        "placements": {router: 1},
        "inexact_retries": {},
        "queue": {"requests": queued, "tokens": 10},
        "totals": {"requests_per_s": 1.5, "running": 7, "queued": queued + 2},
        "latency": {"window_s": 60.0, "ttft_ms": {"p99": p99, "n": 2}, "slo": {"attainment": attainment}},
    }


def test_a_status_has_the_sum_of_the_requests_and_the_latency_of_the_slowest_worker() -> None:
    status = merged_status([status_of("a", 1, None, 1.0), status_of("b", 4, 80.0, 0.5)])
    assert status["workers"] == ["a", "b"]
    assert status["requests"] == {"total": 6}
    assert status["placements"] == {"a": 1, "b": 1}
    assert status["queue"] == {"requests": 5, "tokens": 20}
    assert status["totals"] == {"requests_per_s": 3.0, "running": 7, "queued": 7}
    assert status["latency"] == {"window_s": 60.0, "ttft_ms": {"p99": 80.0, "n": 4}, "slo": {"attainment": 0.5}}
    assert status["nodes"] == [{"id": "d0"}]


def test_the_latest_requests_of_all_workers_are_listed_newest_first() -> None:
    pages = [{"requests": [{"accepted_ms": at} for at in times]} for times in ((9, 4), (7, 1))]
    assert [row["accepted_ms"] for row in merged_requests(pages, 3)["requests"]] == [9, 7, 4]


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/load", "/v1/requests", "/v1/requests/{id}/timeline"])
async def test_if_no_worker_answers_the_router_is_unavailable(tmp_path: Path, path: str) -> None:
    (route,) = WholeRouter([tmp_path / "none"], 0).routes([path])
    request = Request({"type": "http", "path": path, "query_string": b"", "headers": []})
    with pytest.raises(UnavailableError, match="No worker"):
        await route.endpoint(request)
