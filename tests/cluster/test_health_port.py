"""Test the health port of prefill and decode nodes in a cluster: each status, the metrics, and a flood of connections."""

import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.traffic import Load
from tests.cluster.harness import Cluster, cluster, expected, free_port, probe, prompt_of, wait_for

NODES = "prefill-0", "decode-0"


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    own: dict[str, dict[str, object]] = {name: {"health_port": free_port()} for name in (*NODES, "decode-1")}
    own["decode-1"] |= {"failpoint": "engine.step:20=hang", "allow_failpoints": "true", "stuck_s": 1}
    with cluster(1, 1, own=own, node_timeout_s=30, push_timeout_s=30) as running:
        yield running


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def test_a_node_reports_its_own_metrics_as_the_router_does(running: Cluster) -> None:
    prompt = prompt_of(1, 100)
    assert running.complete(prompt, 8) == expected(prompt, 8)
    running.settled()
    routers = samples(running.metrics())
    for name in NODES:
        status, text = probe(running, name, "/metrics")
        assert status == 200
        own = samples(text)
        mine = {key: value for key, value in own.items() if ("engine", name) in key[1]}
        assert {"vllm:kv_cache_usage_perc", "vllm:num_requests_running", "baton_steps_total"} <= {
            key[0] for key in mine
        }
        assert mine == {key: routers[key] for key in mine}
        assert any(key[0] == "process_resident_memory_bytes" for key in own)
        assert {dict(key[1])["engine"] for key in own if dict(key[1]).get("engine")} == {name}
    assert probe(running, "prefill-0", "/v1/status")[0] == 404


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_connections_and_garbage_at_the_health_port_do_not_disturb_serving(running: Cluster, count: int) -> None:
    rubbish = [b"", b"GET /hea", b"GET /metrics HTTP/1.1\r\n\r\n", bytes(range(256)) * 8, b"GET /" + b"a" * 3000]
    held = deque[socket.socket]()
    with Load([running.url], running.model, 2) as load:
        for number in range(count):
            port = running.own[NODES[number % 2]]["health_port"]
            held.append(socket.create_connection(("127.0.0.1", port), timeout=30))
            with suppress(ConnectionError):
                held[-1].sendall(rubbish[number % len(rubbish)])
            if len(held) > 300:
                held.popleft().close()
        answers = [probe(running, name, path) for name in NODES for path in ("/health", "/ready")]
    for connection in held:
        connection.close()
    assert answers == [(200, "ok\n")] * 4
    assert load.failures() == []
    counts = running.status()["requests"]
    assert counts["moved"] == counts["retried"] == 0, "no node was taken for lost"


def test_a_node_is_ready_while_a_router_is_connected_and_it_does_not_drain(running: Cluster) -> None:
    running.send_signal("router", signal.SIGKILL)
    running.processes["router"].wait()
    for name in NODES:
        wait_for(lambda name=name: probe(running, name, "/ready")[0] == 503, f"{name} is not ready")
        assert "no router" in probe(running, name, "/ready")[1]
        assert probe(running, name, "/health")[0] == 200
    running.start("router")
    running.ready()
    for name in NODES:
        wait_for(lambda name=name: probe(running, name, "/ready")[0] == 200, f"{name} is ready again")
    with running.streaming([prompt_of(2, 30)], 4000):
        running.send_signal("decode-0", signal.SIGTERM)
        wait_for(lambda: probe(running, "decode-0", "/ready") == (503, "this node is draining\n"), "it drains")
        assert probe(running, "decode-0", "/health")[0] == 200
    running.processes["decode-0"].wait(60)
    running.start("decode-0")
    running.ready()


def test_a_node_whose_engine_hangs_is_neither_healthy_nor_ready_until_it_exits(running: Cluster) -> None:
    unhealthy = set[str]()
    for _ in range(10):  # a busy machine may not run a probe in the 0.2 s between the hang and the exit
        running.start("decode-1")
        running.ready()
        assert probe(running, "decode-1", "/health")[0] == 200
        with Load([running.url], running.model, 4) as load:
            while running.processes["decode-1"].poll() is None:
                status, text = probe(running, "decode-1", "/health")
                if status == 503:
                    unhealthy.add(text)
                    assert probe(running, "decode-1", "/ready")[0] in {503, 0}
                time.sleep(0.02)
        assert load.failures() == []
        assert running.processes["decode-1"].poll() == 70
        if unhealthy:
            break
    assert unhealthy == {"the engine has failed or makes no progress\n"}
