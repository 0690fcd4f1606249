"""Clusters of a router, proxy nodes and stub engines, and the faults of their processes."""

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.harness import DEMO, Cluster, ForkedProcess, cluster, completion, free_port, refusal, wait_for
from tests.proxy_node.vllm_stub import answer

TIMES = int(os.environ.get("BATON_ENGINE_KILLS", "1"))  # repetitions of each case
LENGTH = 250


class Engines:
    """The stub engines of a cluster: one for each node, all with the same `knobs`. With `in_pairs`, each engine has
    only the role of its node."""

    def __init__(self, directory: Path, names: Sequence[str], kind: str = "vllm", **knobs: Any) -> None:
        self.ports = {name: free_port() for name in names}
        self.in_pairs = knobs.pop("in_pairs", False)
        self.steps = {name: str(directory / name) for name in names} if knobs.pop("reports_steps", False) else {}
        self.knobs = {"token_s": 0.01} | knobs
        self.kind = kind
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}
        self._directory = directory
        self.processes: dict[str, ForkedProcess] = {}

    def start(self, name: str) -> None:
        own = {"disaggregation_mode": name.partition("-")[0]} if self.in_pairs else {}
        own |= {"steps_socket": self.steps[name]} if self.steps else {}
        flags = ["--port", str(self.ports[name]), "--knobs", json.dumps(self.knobs | own)]
        log = self._directory / f"engine-{name}.log"
        self.processes[name] = ForkedProcess(f"tests.proxy_node.{self.kind}_stub", flags, dict(os.environ), log)

    def refusal(self, engine: str, *flags: str) -> str:
        """Run `baton proxy` for the engine at this URL, which it must refuse. Return its output."""
        return refusal("baton", ["proxy", "--model", str(DEMO), "--engine", engine, *flags], self._directory)

    def set(self, name: str, **knobs: Any) -> None:
        request = urllib.request.Request(f"{self.urls[name]}/knobs", json.dumps(knobs).encode())
        urllib.request.urlopen(request, timeout=60).close()

    def get(self, name: str, path: str) -> Any:
        with urllib.request.urlopen(f"{self.urls[name]}/{path}", timeout=60) as found:
            return json.load(found)

    def answers(self, name: str) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.urls[name]}/version", timeout=5) as found:
            return bool(found.status == 200)
        return False

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait(60)


@contextmanager
def serving(
    directory: Path, names: Sequence[str], kind: str = "vllm", settings: dict[str, Any] | None = None, **knobs: Any
) -> Iterator[tuple[Cluster, Engines]]:
    """Run a cluster with a node and an engine for each of `names`, which have the form ROLE-NUMBER."""
    engines = Engines(directory, names, kind, **knobs)
    try:
        for name in names:
            engines.start(name)
        counts = (sum(name.startswith(role) for name in names) for role in ("prefill", "decode"))
        own: dict[str, dict[str, object]] = {name: {"health_port": free_port()} for name in names}
        for name, path in engines.steps.items():
            own[name]["steps_socket"] = path
        options: dict[str, Any] = {
            "engine_kind": kind,
            "stuck_s": 6.0,
            "node_timeout_s": 6.0,
            "secret": True,
            "own": own,
        }
        options |= settings or {}
        with cluster(*counts, engines=engines.urls, **options) as running:
            yield running, engines
    finally:
        engines.close()


@contextmanager
def streams(running: Cluster, prompts: list[list[int]], count: int) -> Iterator[None]:
    """Stream all prompts. The `with` block begins when each stream has received a token. After the block, check that
    each answer is complete and right."""
    bodies = [completion(running.model, prompt, count) for prompt in prompts]
    with running.answering("/v1/completions", bodies, [answer(prompt, count) for prompt in prompts]):
        yield


Act = Callable[[Cluster, Engines, str], None]


def kill_engine(_: Cluster, engines: Engines, name: str) -> None:
    engines.processes[name].send_signal(signal.SIGKILL)
    engines.processes[name].wait(60)


def freeze_engine(_: Cluster, engines: Engines, name: str) -> None:
    engines.processes[name].send_signal(signal.SIGSTOP)


def silence_engine(_: Cluster, engines: Engines, name: str) -> None:
    """Do what vLLM does at SIGTERM: the engine dies, and its server keeps the streams open but sends nothing."""
    engines.set(name, is_stalled=True)


def break_engine(_: Cluster, engines: Engines, name: str) -> None:
    """Do what vLLM does when its engine's process dies: every request fails, and the server is unhealthy."""
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
    """Bring a node back after any of these faults."""
    if engines.processes[name].poll() is not None:
        engines.start(name)
    engines.processes[name].send_signal(signal.SIGCONT)
    wait_for(lambda: engines.answers(name), "the engine answers")
    engines.set(name, is_stalled=False, is_unhealthy=False, error_event=0, metrics_s=0.0)
    running.send_signal(name, signal.SIGCONT)
    if running.processes[name].poll() is not None:
        running.start(name)
    wait_for(lambda: running.alive("router") == set(engines.urls), f"{name} is back")


def lose(running: Cluster, engines: Engines, act: Act, name: str, round_: int) -> None:
    """Inject a fault into a node while it streams. Every answer must be complete and right, and the node must serve
    again after its repair."""
    prompts = [[100 + index, round_, *range(30)] for index in range(6)]
    with streams(running, prompts, LENGTH):
        act(running, engines, name)
        running.complete([3, 4, 5], 3)  # new requests are served in the meantime
    if act is drain_proxy:
        running.processes[name].wait(60)
    repair(running, engines, name)
    prompt = [9, round_, *range(40)]
    assert running.complete(prompt, 20) == answer(prompt, 20)


ACTS = [
    kill_engine, freeze_engine, kill_proxy, silence_engine, break_engine, slow_metrics, drain_proxy, freeze_proxy, kill_both,
]  # fmt: skip
