"""Test clusters of a router, two proxy nodes and two stub engines, as clients see them: every process may end, freeze and
come back, and every answer is whole and has the same tokens."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import DEMO, ROOT, Cluster, ForkedProcess, cluster, completion, free_port, wait_for
from tests.proxy_node.vllm_stub import answer

NODES = ("decode-0", "decode-1")
LENGTH = 250
TIMES = int(os.environ.get("BATON_ENGINE_KILLS", "1"))  # of each case


class Engines:
    """The stub engines of a cluster, one for each node."""

    def __init__(self, directory: Path) -> None:
        self.ports = {name: free_port() for name in NODES}
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}
        self._directory = directory
        self.processes: dict[str, ForkedProcess] = {}

    def start(self, name: str) -> None:
        knobs = json.dumps({"token_s": 0.01})
        flags = ["--port", str(self.ports[name]), "--knobs", knobs]
        log = self._directory / f"engine-{name}.log"
        self.processes[name] = ForkedProcess("tests.proxy_node.vllm_stub", flags, dict(os.environ), log)

    def set(self, name: str, **knobs: Any) -> None:
        request = urllib.request.Request(f"{self.urls[name]}/knobs", json.dumps(knobs).encode())
        urllib.request.urlopen(request, timeout=60).close()

    def calls(self, name: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.urls[name]}/calls", timeout=60) as found:
            return list(json.load(found))

    def answers(self, name: str) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.urls[name]}/version", timeout=5) as found:
            return bool(found.status == 200)
        return False

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait(60)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Engines]]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    for name in NODES:
        engines.start(name)
    try:
        with cluster(0, 2, engines=engines.urls, stuck_s=2.0, secret=True) as running:
            yield running, engines
    finally:
        engines.close()


def incarnations(running: Cluster) -> dict[str, str]:
    return {name: node["address"] for name, node in running.nodes().items() if node["alive"]}


@contextmanager
def streams(running: Cluster, prompts: list[list[int]], count: int) -> Iterator[None]:
    """Stream all prompts. The block begins when each has a token; afterwards, each answer must be whole and right."""
    begun = [threading.Event() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = [
            pool.submit(running.stream, prompt, count, lambda seen, event=event: seen and event.set())
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun), "a stream did not begin"
        yield
        assert [each.result() for each in found] == [answer(prompt, count) for prompt in prompts]


def test_an_unmodified_router_serves_engines(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    prompt = list(range(100, 140))
    assert running.complete(prompt, 30) == answer(prompt, 30)
    body = completion(running.model, prompt, 20, n=3, logprobs=2)
    choices = running.post("/v1/completions", body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [answer(prompt, 20)] * 3
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [20] * 3
    text = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5})
    assert text["usage"]["completion_tokens"] == 5
    node = running.nodes()["decode-0"]
    assert node["facts"]["engine"] == "vllm 0.32.0"
    assert node["facts"]["resumes"] == "greedy, seeded"
    assert node["facts"]["engine_url"] == engines.urls["decode-0"]


def test_what_an_engine_cannot_do_is_a_400_that_says_so(served: tuple[Cluster, Engines]) -> None:
    running, _ = served
    for field in ({"prompt_logprobs": 1}, {"response_format": {"type": "json_object"}}, {"bad_words": ["x"]}):
        with pytest.raises(urllib.error.HTTPError) as failure:
            running.post("/v1/completions", completion(running.model, [5, 6], 5, **field))
        assert failure.value.code == 400
        assert "vLLM servers" in json.load(failure.value)["error"]["message"]


def test_a_client_that_leaves_stops_the_engine(served: tuple[Cluster, Engines]) -> None:
    running, engines = served

    def num_running() -> int:
        return sum(int(node["running"]) for node in running.nodes().values())

    with running.send(completion(running.model, [7, 8], 5000, stream=True)) as connection:
        assert connection.recv(1000)
        wait_for(lambda: num_running() == 1, "the request runs")
    wait_for(lambda: num_running() == 0, "the request was dropped")
    assert all(engines.answers(name) for name in NODES)


Act = Callable[[Cluster, Engines, str], None]


def kill_engine(_: Cluster, engines: Engines, name: str) -> None:
    engines.processes[name].send_signal(signal.SIGKILL)
    engines.processes[name].wait(60)


def freeze_engine(_: Cluster, engines: Engines, name: str) -> None:
    engines.processes[name].send_signal(signal.SIGSTOP)


def silence_engine(_: Cluster, engines: Engines, name: str) -> None:
    """What vLLM does at SIGTERM: the engine dies, and its server keeps silent streams open."""
    engines.set(name, is_stalled=True)


def break_engine(_: Cluster, engines: Engines, name: str) -> None:
    """What vLLM does when its engine's process dies: every request fails, and the server is unhealthy."""
    engines.set(name, is_unhealthy=True, error_event=1000)


def slow_metrics(_: Cluster, engines: Engines, name: str) -> None:
    engines.set(name, metrics_s=20.0)


def kill_proxy(running: Cluster, _: Engines, name: str) -> None:
    running.send_signal(name, signal.SIGKILL)
    running.processes[name].wait(60)


def freeze_proxy(running: Cluster, _: Engines, name: str) -> None:
    running.send_signal(name, signal.SIGSTOP)


def kill_both(running: Cluster, engines: Engines, name: str) -> None:
    kill_engine(running, engines, name)
    kill_proxy(running, engines, name)


def drain_proxy(running: Cluster, _: Engines, name: str) -> None:
    running.send_signal(name, signal.SIGTERM)


def repair(running: Cluster, engines: Engines, name: str) -> None:
    """Bring a node back after any of these."""
    if engines.processes[name].poll() is not None:
        engines.start(name)
    engines.processes[name].send_signal(signal.SIGCONT)
    wait_for(lambda: engines.answers(name), "the engine answers")
    engines.set(name, is_stalled=False, is_unhealthy=False, error_event=0, metrics_s=0.0)
    running.send_signal(name, signal.SIGCONT)
    if running.processes[name].poll() is not None:
        running.start(name)
    wait_for(lambda: running.alive("router") == set(NODES), f"{name} is back")


ACTS = [
    kill_engine, freeze_engine, silence_engine, break_engine, slow_metrics, kill_proxy, freeze_proxy, kill_both, drain_proxy,
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_no_client_sees_the_loss_of_an_engine_or_of_its_proxy(served: tuple[Cluster, Engines], act: Act) -> None:
    running, engines = served
    for round_ in range(TIMES):
        name = NODES[round_ % 2]
        prompts = [[100 + index, round_, *range(30)] for index in range(6)]
        with streams(running, prompts, LENGTH):
            act(running, engines, name)
            running.complete([3, 4, 5], 3)  # new requests are served meanwhile
        if act is drain_proxy:
            running.processes[name].wait(60)
        repair(running, engines, name)
        prompt = [9, round_, *range(40)]
        assert running.complete(prompt, 20) == answer(prompt, 20)


def test_an_engine_that_comes_back_is_a_new_incarnation(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    before = incarnations(running)
    kill_engine(running, engines, "decode-0")
    wait_for(lambda: running.alive("router") == {"decode-1"}, "the node is lost")
    assert running.processes["decode-0"].poll() is None, "its proxy waits for it"
    repair(running, engines, "decode-0")
    after = incarnations(running)
    assert after["decode-0"] != before["decode-0"]
    assert after["decode-1"] == before["decode-1"]


def test_without_any_engine_requests_wait_and_then_go_on(served: tuple[Cluster, Engines]) -> None:
    running, engines = served
    with streams(running, [[11, 12, 13]], LENGTH):
        for name in NODES:
            kill_engine(running, engines, name)
        for name in NODES:
            engines.start(name)
    wait_for(lambda: running.alive("router") == set(NODES), "the nodes are back")


# ---- the command -----------------------------------------------------------------------------------------------------


def run_proxy(engine: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "baton", "proxy", "--model", str(DEMO), "--engine", engine, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_an_engine_that_cannot_serve_ends_the_command_with_the_reason(served: tuple[Cluster, Engines]) -> None:
    _, engines = served
    engines.set("decode-1", max_model_len=4096)
    shorter = run_proxy(engines.urls["decode-1"])
    engines.set("decode-1", max_model_len=8192)
    assert shorter.returncode == 2
    assert "--max-model-len 4096" in shorter.stderr
    malformed = run_proxy("127.0.0.1:8000")
    assert malformed.returncode == 2
    assert "--engine '127.0.0.1:8000': must be the URL of a vLLM server" in malformed.stderr
    assert len(malformed.stderr.splitlines()) == 1


def test_baton_up_starts_a_proxy_for_each_engine(served: tuple[Cluster, Engines]) -> None:
    _, engines = served
    port = free_port()
    command = [
        sys.executable, "-m", "baton", "up", "--model", str(DEMO), "--port", str(port),
        "--engines", ",".join(engines.urls.values()),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "complete:" in line:
                    break
            assert "complete: vLLM servers, 0 prefill and 2 decode" in lines[-1], "".join(lines)
            body = json.dumps(completion("model", [5, 6, 7], 12)).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as found:
                assert json.load(found)["choices"][0]["token_ids"] == answer([5, 6, 7], 12)
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    assert process.returncode == 0
