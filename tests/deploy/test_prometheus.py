"""Test the alerts, the Grafana board and the scrape configuration of deploy/ with series of two routers."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.metrics import STATS
from tests.cluster.harness import ROOT
from tests.deploy.manifests import build

ALERTS = ROOT / "deploy" / "alerts.yml"
BOARD = ROOT / "deploy" / "grafana" / "dashboards" / "baton.json"
PER_NODE = {
    *(name for name, _, _ in STATS),
    "baton_node_alive",
    "baton_node_busy_ratio",
    "baton_interference_seconds_total",
}
METRIC = re.compile(r"(?:vllm:|baton_)\w+")
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: apt-get install prometheus")


def check(place: Path, **test: Any) -> None:
    """Run a unit test of Prometheus rules."""
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "30s", "tests": [{"interval": "1m", **test}]}
    (place / "test.yml").write_text(json.dumps(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", place / "test.yml"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def alert(name: str, severity: str, summary: str) -> dict[str, Any]:
    fired = {"exp_labels": {"severity": severity}, "exp_annotations": {"summary": summary}}
    return {"eval_time": "10m", "alertname": name, "exp_alerts": [fired]}


@needs_promtool
@pytest.mark.parametrize("series", [[], [{"series": 'up{job="baton",instance="a:8000"}', "values": "0x10"}]])
def test_an_alert_reports_that_no_router_answers_even_if_none_is_found(series: list[Any], tmp_path: Path) -> None:
    expected = alert("BatonNoRouter", "critical", "No router answers.")
    check(tmp_path, input_series=series, alert_rule_test=[expected])


@needs_promtool
def test_a_router_that_drains_for_300_s_is_not_reported_as_down(tmp_path: Path) -> None:
    series = [
        {"series": 'up{job="baton",instance="a:8000"}', "values": "1x20"},
        {"series": 'up{job="baton",instance="b:8000"}', "values": "1x5 0x5 stale"},
        {"series": 'up{job="baton",instance="c:8000"}', "values": "1x10 0x10"},
    ]
    labels = {"severity": "critical", "job": "baton", "instance": "c:8000"}
    down = {"exp_labels": labels, "exp_annotations": {"summary": "Router c:8000 does not answer."}}
    expected = [
        {"eval_time": time, "alertname": "BatonRouterDown", "exp_alerts": alerts}
        for time, alerts in (("10m", []), ("11m", []), ("18m", [down]))
    ]
    check(tmp_path, input_series=series, alert_rule_test=expected)


@needs_promtool
def test_refused_requests_of_all_routers_count(tmp_path: Path) -> None:
    """Each of two routers refuses 0.075 requests per second, and the limit is 0.1."""
    name = 'baton_requests_rejected_total{job="baton",model_name="m",instance="%s:8000"}'
    series = [{"series": name % router, "values": "0+4.5x10"} for router in "ab"]
    summary = "The cluster refuses 0.15 requests per second: add nodes."
    check(tmp_path, input_series=series, alert_rule_test=[alert("BatonRequestsRefused", "warning", summary)])


@needs_promtool
def test_the_board_counts_a_node_once_although_two_routers_export_its_metrics(tmp_path: Path) -> None:
    queries = [
        target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
        for panel in json.loads(BOARD.read_text())["panels"]
        for target in panel.get("targets", [])
    ]
    queries = [query for query in queries if PER_NODE.issuperset(METRIC.findall(query))]
    assert len(queries) > 15
    labels = 'engine="d0",role="decode",model_name="m",job="baton"'
    series = [
        {"series": f'{name}{{{labels},instance="{router}:8000"}}', "values": "0+60x10"}
        for name in sorted({name for query in queries for name in METRIC.findall(query)})
        for router in "ab"
    ]

    def expectation(query: str) -> dict[str, Any]:
        by = re.search(r"by \((\w+)\)", query)
        assert by is not None, f"{query}: two routers would draw the same line"
        labels = {"engine": '{engine="d0"}', "role": '{role="decode"}'}[by[1]]
        value = 600 if "rate(" not in query else 1
        return {"expr": query, "eval_time": "10m", "exp_samples": [{"labels": labels, "value": value}]}

    check(tmp_path, input_series=series, promql_expr_test=[expectation(query) for query in queries])


@needs_promtool
@pytest.mark.parametrize(("needed", "pods"), [((2.2, 2.1), 5), ((7 / 3, 7 / 3, 7 / 3), 7), ((0.3,) * 10, 3)])
def test_autoscalers_round_the_sum_of_the_needed_nodes_up(needed: tuple[float, ...], pods: int, tmp_path: Path) -> None:
    """Kubernetes itself rounds up only if the sum exceeds the number of pods by more than 10 %."""
    path = ROOT / "deploy" / "kubernetes" / "components" / "autoscaling" / "scaledobjects.yaml"
    queries = {
        item["metadata"]["name"].removeprefix("baton-"): item["spec"]["triggers"][0]["metadata"]["query"]
        for item in yaml.safe_load_all(path.read_text())
        if item["kind"] == "ScaledObject"
    }
    assert queries.keys() == {"prefill", "decode"}
    series = [
        {"series": f'baton_needed_nodes{{namespace="baton",role="{role}",pod="{number}"}}', "values": f"{value}x10"}
        for role in queries
        for number, value in enumerate(needed)
    ]
    samples = [{"labels": "{}", "value": pods}]
    expected = [{"expr": query, "eval_time": "5m", "exp_samples": samples} for query in queries.values()]
    check(tmp_path, input_series=series, promql_expr_test=expected)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl, which builds the manifests")
def test_prometheus_scrapes_only_the_routers_under_the_job_of_the_alerts() -> None:
    objects = build(ROOT / "deploy" / "kubernetes" / "components" / "monitoring")
    (monitor,) = [item["spec"] for item in objects if item["kind"] == "PodMonitor"]
    labels = monitor["selector"]["matchLabels"]
    assert labels["app.kubernetes.io/component"] == "router", "the routers export the metrics of all nodes"
    jobs = {labels[monitor["jobLabel"]]}
    jobs |= {
        each["job_name"] for each in yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert jobs == set(re.findall(r'job="([^"]*)"', ALERTS.read_text()))
