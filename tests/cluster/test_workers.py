"""Test a router with several worker processes: a killed worker loses only its own streams, the metrics of the workers
are summed, and a drain of the router waits for all workers."""

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cluster.secret import new_pem
from tests.cluster.harness import (
    DEMO,
    ROOT,
    START_S,
    Cluster,
    cluster,
    completion,
    events,
    expected,
    free_port,
    prompt_of,
    refusal,
    wait_for,
)

NUM_STREAMS, LENGTH = 16, 1500


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    """A router with two workers. The first test counts all requests, and the last one stops the router."""
    with cluster(0, 1, workers=2, mode="colocated") as running:
        wait_for(lambda: all_see(running), "every worker sees the node")
        yield running


def all_see(running: Cluster) -> bool:
    """Return whether the status shows the node on 20 new connections in a row, which reach both workers."""
    return all(running.alive("router") == {"decode-0"} for _ in range(20))


def processes_at(running: Cluster, port: int) -> list[psutil.Process]:
    """Return the child processes of the router that listen on a port."""
    found = psutil.Process(running.processes["router"].pid).children()
    return [
        each
        for each in found
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in each.net_connections())
    ]


def outcome(connection: socket.socket, prompt: list[int]) -> str:
    """Read a streamed answer to its end. Return "right", "wrong" or "cut"."""
    connection.settimeout(START_S)
    try:
        with connection, connection.makefile("rb") as answer:
            tokens = [token for event in events(answer) for token in event["choices"][0].get("token_ids") or []]
    except (OSError, ValueError):
        return "cut"
    return "right" if tokens == expected(prompt, LENGTH) else "wrong"


def clients_of(worker: psutil.Process, ports: set[int]) -> set[int]:
    """Return those of the clients' ports that are connected to this worker."""
    found = worker.net_connections()
    return {one.raddr.port for one in found if one.status == psutil.CONN_ESTABLISHED} & ports


def test_the_answers_and_metrics_of_all_workers_are_those_of_one_router(running: Cluster) -> None:
    prompts = [prompt_of(seed, 20 + seed) for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: running.complete(prompt, 5), prompts)) == [
            expected(prompt, 5) for prompt in prompts
        ]
    seen = running.metric_sums()
    assert seen["vllm:generation_tokens_total"] == 24 * 5
    assert seen["vllm:prompt_tokens_total"] == sum(map(len, prompts))
    assert seen["vllm:request_success_total"] == seen["vllm:e2e_request_latency_seconds_count"] == 24
    assert seen["baton_node_alive"] == 1, "metrics of nodes are not summed"
    status = running.status()
    assert len(status["workers"]) == 2
    assert status["requests"]["total"] == 24
    rows = running.get("/v1/requests?limit=100")["requests"]
    assert len(rows) == 24
    assert [row["accepted_ms"] for row in rows] == sorted((row["accepted_ms"] for row in rows), reverse=True)
    assert all(running.get(f"/v1/requests/{row['id']}/timeline")["id"] == row["id"] for row in rows)
    assert running.get("/load") == {"server_load": 0}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        running.get("/v1/requests?limit=0")


def test_a_killed_worker_loses_only_its_streams_and_is_started_again(running: Cluster) -> None:
    workers = processes_at(running, running.port)
    assert len(workers) == 2
    prompts = [prompt_of(seed, 30) for seed in range(NUM_STREAMS)]
    connections = [running.send(completion(running.model, prompt, LENGTH, stream=True)) for prompt in prompts]
    ports = [connection.getsockname()[1] for connection in connections]
    served: list[set[int]] = []

    def is_accepted() -> bool:
        served[:] = [clients_of(worker, set(ports)) for worker in workers]
        return set.union(*served) == set(ports)

    wait_for(is_accepted, "each stream is at a worker")
    assert all(served), "connections are spread over the workers"
    workers[0].kill()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        outcomes = dict(zip(ports, pool.map(outcome, connections, prompts), strict=True))
    assert "wrong" not in outcomes.values()
    assert {port for port, result in outcomes.items() if result == "cut"} <= served[0]
    wait_for(lambda: len(processes_at(running, running.port)) == 2, "the worker is back")
    assert [running.stream(prompt, 10) for prompt in prompts] == [expected(prompt, 10) for prompt in prompts]
    wait_for(lambda: len(running.status()["workers"]) == 2, "both workers answer")
    assert "starting it again" in running.log("router")


def test_a_killed_registry_interrupts_no_request_and_nodes_join_again(running: Cluster) -> None:
    port = running.registry_port
    (registry,) = processes_at(running, port)
    with running.streaming([prompt_of(seed, 30) for seed in range(4)], 1000):
        registry.kill()
        assert running.complete([5, 6, 7], 5) == expected([5, 6, 7], 5)
    running.start("decode-1")
    running.ready()
    wait_for(lambda: running.alive("router") == {"decode-0", "decode-1"}, "a new node joins")


def test_sigterm_drains_all_workers(running: Cluster) -> None:
    children = psutil.Process(running.processes["router"].pid).children(recursive=True)
    worker, _ = processes_at(running, running.port)
    with running.streaming([prompt_of(seed, 30) for seed in range(8)], 500):
        worker.send_signal(signal.SIGTERM)  # systemd and Slurm signal all processes, so a worker may get two signals
        running.send_signal("router", signal.SIGTERM)
    assert running.processes["router"].wait(60) == 0
    wait_for(lambda: not any(each.is_running() for each in children), "no process is left")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", running.port), timeout=5)


def test_the_workers_divide_the_limit_of_requests() -> None:
    with cluster(0, 1, workers=2, mode="colocated", max_concurrent_requests=5) as running:
        wait_for(lambda: all_see(running), "every worker sees the node")
        body = completion(running.model, [5, 6, 7], 8000, stream=True)
        connections = [running.send(body) for _ in range(20)]
        try:
            lines = [connection.recv(12) for connection in connections]
            accepted = lines.count(b"HTTP/1.1 200")
            assert lines.count(b"HTTP/1.1 429") == 20 - accepted
            assert 1 <= accepted <= 5
            assert running.metric_sums()["baton_requests_rejected_total"] == 20 - accepted
        finally:
            for connection in connections:
                connection.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--workers 2 --responses-store memory", "redis://"),
        ("--workers 0", "--workers"),
        ("--workers 8 --max-concurrent-requests 4", "--max-concurrent-requests 4: must be at least 8"),
    ],
)
def test_settings_that_workers_cannot_share_are_refused(tmp_path: Path, flags: str, words: str) -> None:
    assert words in refusal("router", ["--model", str(DEMO), "--port", "0", *flags.split()], tmp_path)


def test_workers_serve_https_and_merge_their_metrics_without_it(tmp_path: Path) -> None:
    pem, port = new_pem(), free_port()
    (tmp_path / "both.pem").write_bytes(pem)
    context = ssl.create_default_context(cadata=pem[pem.index(b"-----BEGIN CERTIFICATE") :].decode())
    context.check_hostname = False
    flags = ["--workers", "2", "--registry-port", str(free_port()), "--ssl-certfile", str(tmp_path / "both.pem")]
    command = [sys.executable, "-m", "router", "--model", str(DEMO), "--port", str(port), *flags]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as router:

        def metrics() -> str:
            with contextlib.suppress(OSError):
                return str(urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=context).read())
            return ""

        try:
            wait_for(metrics, "the router serves HTTPS")
            assert all("vllm:num_requests_running" in metrics() for _ in range(8))
        finally:
            router.terminate()
        assert router.wait(60) == 0
