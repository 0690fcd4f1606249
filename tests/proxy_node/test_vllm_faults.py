"""Test two real vLLM servers under load, with 50 faults. Each fault ends or freezes a server, a proxy node or the
connections of a proxy node, and is repaired. During 25 faults, the servers are a prefill and a decode engine. During
the other 25, they are replicas. A second test injects each kind of fault into replicas of a Qwen3 with random weights.

Each server takes a minute to start and uses 2 GB. The test takes half an hour on an idle machine. `BATON_PEER_VLLM=…
pytest -m exhaustive -s tests/proxy_node/test_vllm_faults.py` prints every fault; benchmarks/peers/install.sh installs
the interpreter.
"""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.chaos.proxy import NONE, PARTITION, Proxy, Relays
from tests.cluster.harness import DEMO, Cluster, completion, free_port, wait_for
from tests.proxy_node.vllm import NIXL, VLLM, VllmServer, change_role, names_of, random_qwen3, served

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not VLLM, reason="BATON_PEER_VLLM names no interpreter")]
ADVERTISED = "127.0.0.7"
LENGTH = 400
TIMEOUTS = {"stuck_s": 10.0, "node_timeout_s": 5.0}  # long enough for a busy machine
SAMPLED = {"temperature": 1.0, "seed": 3}


class Stage:
    """The processes and connections that a fault concerns."""

    def __init__(self, running: Cluster, servers: dict[str, VllmServer], relays: dict[str, Proxy]) -> None:
        self.running, self.servers, self.relays = running, servers, relays

    def kill_server(self, name: str) -> None:
        os.kill(self.servers[name].process.pid, signal.SIGKILL)

    def terminate_server(self, name: str) -> None:
        os.kill(self.servers[name].process.pid, signal.SIGTERM)

    def kill_engine_core(self, name: str) -> None:
        children = psutil.Process(self.servers[name].process.pid).children(recursive=True)
        [core] = [each for each in children if "EngineCore" in "".join(each.cmdline())]
        core.kill()

    def freeze_server(self, name: str) -> None:
        os.killpg(self.servers[name].process.pid, signal.SIGSTOP)

    def kill_proxy(self, name: str) -> None:
        self.running.send_signal(name, signal.SIGKILL)

    def freeze_proxy(self, name: str) -> None:
        self.running.send_signal(name, signal.SIGSTOP)

    def cut_connections(self, name: str) -> None:
        self.relays[name].reset()

    def silence_connections(self, name: str) -> None:
        self.relays[name].harm = PARTITION

    def repair(self, fault: "Fault", name: str, role: str) -> None:
        """Bring a node back after a fault, in this role."""
        running = self.running
        if fault in RESTARTS:
            self.servers[name] = self.servers[name].restarted()
        os.killpg(self.servers[name].process.pid, signal.SIGCONT)
        running.send_signal(name, signal.SIGCONT)
        self.relays[name].harm = NONE
        if running.processes[name].poll() is not None:
            running.start(name)
        wait_for(lambda: running.alive("router") == set(self.servers), f"{name} is back")
        if running.nodes()[name]["role"] != role:
            change_role(running, name, role)


Fault = Callable[[Stage, str], None]
RESTARTS = (Stage.kill_server, Stage.terminate_server, Stage.kill_engine_core)
FAULTS: tuple[Fault, ...] = (
    *RESTARTS, *(Stage.freeze_server, Stage.kill_proxy, Stage.freeze_proxy, Stage.cut_connections) * 4,
    *(Stage.silence_connections,) * 6,
)  # fmt: skip


class Load:
    """Threads that stream greedy answers, and a thread that requests sampled answers. Every answer is checked.

    Without `is_sampled`, all answers are greedy: the tokens that vLLM samples from a model of random weights depend on
    the batch.
    """

    def __init__(self, running: Cluster, *, is_sampled: bool) -> None:
        self._running = running
        self._prompts = [[(37 * index + length) % 2000 for index in range(length)] for length in (5, 40, 130, 300, 700)]
        self._whole = [running.complete(prompt, LENGTH) for prompt in self._prompts]
        self._sampled = running.complete(self._prompts[1], LENGTH, **SAMPLED)
        self.problems: list[str] = []
        self.answers = self.inexact = 0
        self.gap_s = 0.0
        self._stopped = threading.Event()
        self._numbers = itertools.count()
        works = (self._stream, self._stream, self._stream, self._sample if is_sampled else self._stream)
        self._threads = [threading.Thread(target=self._repeat, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            try:
                work()
                self.answers += 1
            except Exception as error:  # noqa: BLE001 - any error is a problem
                self.problems.append(f"{type(error).__name__}: {error}")

    def _stream(self) -> None:
        index = next(self._numbers) % len(self._prompts)
        last = 0.0

        def seen(_: int) -> None:
            nonlocal last
            now = time.monotonic()
            self.gap_s = max(self.gap_s, now - (last or now))
            last = now

        if self._running.stream(self._prompts[index], LENGTH, seen) != self._whole[index]:
            raise AssertionError(f"answer {index} has other tokens")

    def _sample(self) -> None:
        body = completion(self._running.model, self._prompts[1], LENGTH, **SAMPLED)
        answer = self._running.post("/v1/completions", body)
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == LENGTH
        if tokens != self._sampled:
            rows = self._running.get("/v1/requests?limit=100")["requests"]
            [row] = [row for row in rows if row["id"] == answer["id"]]
            assert row["exact"] is False, "an answer with other tokens is not marked"
            self.inexact += 1

    def end(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(300)


@contextmanager
def under_load(roles: Sequence[str], model: Path = DEMO) -> Iterator[tuple[Stage, Load]]:
    """Start a server with a proxy node for each role, and load. At the end, check that no request failed."""
    names = names_of(roles)
    with Relays() as made:
        ports = {name: free_port() for name in names}
        relays = {name: made.between(ADVERTISED, port) for name, port in ports.items()}
        own = {name: {"advertise": ADVERTISED, "port": port} for name, port in ports.items()}
        flags = ("--kv-transfer-config", NIXL) if "prefill" in roles else ()
        with served(roles, *flags, model=model, own=own, **TIMEOUTS) as (running, servers):
            load = Load(running, is_sampled=model == DEMO)
            try:
                yield Stage(running, servers, relays), load
            finally:
                load.end()
            status = running.status()
    moved = status["requests"]["moved"]
    print(f"{load.answers} answers, {moved} moved, {load.inexact} inexact, longest gap {load.gap_s:.1f} s")
    assert load.problems == []
    assert moved > 0
    assert sum(status["inexact_retries"].values()) >= load.inexact


def disturb(stage: Stage, load: Load, fault: Fault, name: str, role: str) -> None:
    """Inject a fault into a node, check that requests are answered meanwhile, and repair the node."""
    began, before, running = time.monotonic(), load.answers, stage.running
    fault(stage, name)
    if fault is not Stage.cut_connections:
        wait_for(lambda: name not in running.alive("router"), f"{name} is lost")
    lost_s = time.monotonic() - began
    wait_for(lambda: load.answers >= before + 2, "requests are answered meanwhile")
    stage.repair(fault, name, role)
    wait_for(lambda now=load.answers: load.answers >= now + 2, "requests are answered afterwards")
    print(f"{fault.__name__} {name} as {role}: lost after {lost_s:.1f} s, gap {load.gap_s:.1f} s", flush=True)
    assert load.problems == []


@pytest.mark.timeout(7200)
def test_no_client_sees_any_of_fifty_faults() -> None:
    drawn = random.Random(25)
    with under_load(["prefill", "decode"]) as (stage, load):
        for half, prefill_role in enumerate(("prefill", "decode")):
            roles = {"prefill-0": prefill_role, "decode-0": "decode"}
            if half:
                change_role(stage.running, "prefill-0", "decode")
            faults = [(fault, list(roles)[(number // 4 + number + half) % 2]) for number, fault in enumerate(FAULTS)]
            drawn.shuffle(faults)
            for fault, name in faults:
                disturb(stage, load, fault, name, roles[name])
        assert load.answers > 100
        assert stage.running.status()["requests"]["moved"] > len(FAULTS)


@pytest.mark.timeout(3600)
def test_no_client_sees_faults_of_replicas_of_another_family(tmp_path: Path) -> None:
    with under_load(["decode", "decode"], random_qwen3(tmp_path)) as (stage, load):
        for number, fault in enumerate(dict.fromkeys(FAULTS)):
            disturb(stage, load, fault, f"decode-{number % 2}", "decode")
