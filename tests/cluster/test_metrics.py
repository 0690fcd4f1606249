import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.harness import ROOT, Cluster, cluster, completion, expected, free_port, wait_for

PROMPT = list(range(3, 150))
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    settings = {"log_format": "json", "log_level": "debug", "tbt_slo_ms": 60000, "ttft_slo_ms": 60000}
    with cluster(1, 1, disaggregate="always", **settings) as running:
        assert running.complete(PROMPT, 20) == expected(PROMPT, 20)
        yield running


def lines(running: Cluster, name: str) -> list[dict[str, Any]]:
    text = (running.directory / f"{name}.log").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_metrics_count_a_handoff(running):
    wait_for(lambda: running.metric_sums()["vllm:request_queue_time_seconds_count"] >= 1, "the records of both nodes")
    seen = running.metric_sums()
    assert seen["vllm:generation_tokens_total"] >= 20
    assert seen["vllm:iteration_tokens_total_sum"] >= len(PROMPT) + 19
    assert seen["vllm:nixl_bytes_transferred_sum"] == seen["baton_kv_transfer_bytes_total"] > 0
    for name in ("baton_decode_admission_wait_seconds", "baton_second_token_latency_seconds"):
        assert seen[f"{name}_count"] >= 1
    for part in ("busy", "hidden", "exposed"):
        assert seen[f"baton_kv_transfer_{part}_seconds_count"] >= 1
    assert seen["baton_kv_transfer_hidden_seconds_sum"] <= seen["baton_kv_transfer_busy_seconds_sum"]
    assert seen["baton_slo_attainment_ratio"] == 1.0
    assert seen["baton_placements_total"] >= 1


def test_the_status_shows_the_steps_of_nodes_and_the_latency_of_requests(running):
    running.complete([5, *PROMPT], 20)
    wait_for(lambda: all(node["steps_per_s"] for node in running.status()["nodes"]), "both nodes' steps")
    status = running.status()
    for node in status["nodes"]:
        assert 0 < node["busy"] <= 1
        assert node["budget"] >= node["batch"]["tokens"] > 0
        assert node["facts"]["policy"]
    latency = status["latency"]
    assert latency["slo"] == {"ttft_ms": 60000, "tbt_ms": 60000, "attainment": 1.0}
    assert latency["ttft_ms"]["p50"] <= latency["ttft_ms"]["p99"]
    assert latency["ttst_ms"]["n"] >= 1


def test_one_trace_goes_through_the_answer_and_every_process_log(running):
    body = completion(running.model, [7, *PROMPT], 3)
    headers = {"content-type": "application/json", "traceparent": TRACEPARENT, "x-request-id": "mine"}
    request = urllib.request.Request(running.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["traceparent"] == TRACEPARENT
        identity = json.load(answer)["id"]

    def access() -> list[dict[str, Any]]:
        return [line for line in lines(running, "router") if line["logger"] == "baton.access"]

    wait_for(lambda: any(line["request"] == identity for line in access()), "the access line")
    (line,) = [line for line in access() if line["request"] == identity]
    assert (line["traceparent"], line["status"], line["outcome"]) == (TRACEPARENT, 200, "answered")
    assert (line["prompt_tokens"], line["tokens"]) == (len(PROMPT) + 1, 3)
    assert (line["prefill"], line["decode"]) == ("prefill-0", "decode-0")
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    for name in ("prefill-0", "decode-0"):
        logged = [line for line in lines(running, name) if line.get("traceparent") == TRACEPARENT]
        assert "request received" in {line["message"] for line in logged}
        assert all(line["request"].startswith(identity) and line["node"] == name for line in logged)


def test_a_refused_request_is_logged_without_its_prompt(running):
    with pytest.raises(urllib.error.HTTPError) as refused:
        running.complete([10**9], 3)
    with refused.value as answer:
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", answer.headers["traceparent"])

    def logged() -> set[tuple[object, object]]:
        return {(line.get("status"), line.get("outcome")) for line in lines(running, "router")}

    wait_for(lambda: (400, "RequestError") in logged(), "the refused request's line")
    assert "1000000000" not in (running.directory / "router.log").read_text()


def test_promtool_objects_only_to_the_names_of_vllms_metrics(running):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=running.metrics(),
        text=True,
        capture_output=True,
        timeout=30,
        check=False,
    )
    objections = checked.stderr.splitlines()
    assert objections, "promtool always objects to colons in names"
    assert [line for line in objections if not line.startswith("vllm:")] == []
    # These objections are accepted: colons in names, and the suffix of the histogram vllm:iteration_tokens_total.
    assert [line for line in objections if "':'" not in line and "iteration_tokens_total" not in line] == []


def test_prometheus_scrapes_the_router_and_answers_every_query_of_the_dashboard(running, tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    configuration = (ROOT / "deploy" / "prometheus.yml").read_text()
    head, name, _ = configuration.partition("    dns_sd_configs:\n      - {names: [router], type: A, port: 8000")
    assert name, "in compose, the routers are found by name"
    configuration = head.replace("5s", "200ms") + f'    static_configs: [{{targets: ["127.0.0.1:{running.port}"]}}]\n'
    (tmp_path / "prometheus.yml").write_text(configuration)
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--web.listen-address={address}", f"--config.file={tmp_path}/prometheus.yml"]
    flags += [f"--storage.tsdb.path={tmp_path}/data", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(query: str) -> list[dict[str, Any]]:
        url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:  # Prometheus answers 503 while it starts
                    raise AssertionError(f"{query}: {error.read()!r}") from None
                return []
        except OSError:
            return []

    try:
        wait_for(lambda: any(row["value"][1] == "1" for row in ask("up")), "a scrape that succeeded")
        board = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "baton.json").read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$__rate_interval", "30s").replace("$model", ".*")
                wait_for(lambda query=query: ask(query), f"{panel['title']}: {query}")
        for query in re.findall(r"query: (.+)", (ROOT / "docs" / "scale.md").read_text()):
            assert [float(row["value"][1]) for row in ask(query)] == [1.0], f"docs/scale.md: {query}"
        (generated,) = ask("vllm:generation_tokens_total")
        assert float(generated["value"][1]) >= 20
    finally:
        process.terminate()
        process.wait(20)
