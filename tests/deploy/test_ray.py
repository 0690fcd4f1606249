"""Test `baton ray` on a Ray cluster of three hosts, which all run on this machine."""

import errno
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from tests.chaos.traffic import Load
from tests.cluster.harness import free_port, wait_for
from tests.deploy.remote import RETRIED, RouterClient, free_ports, is_lost, kill

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: pip install '.[ray]'"),
    pytest.mark.filterwarnings("ignore"),  # warnings of Ray
]
ROLES = ("router", "prefill", "decode")
ROW = re.compile(r"^(\S+) +(\S+) +process (\d+) +(.+), (\d+) restarts$", re.MULTILINE)


class RayCluster:
    """A Ray cluster of three hosts, each with the label of one role, and the command `baton ray`."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.port = free_ports(4)  # two ports for each router
        self.routers = [RouterClient(f"http://127.0.0.1:{self.port + more}") for more in (0, 2)]
        self.ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "labels": {"baton.role": "router"}})
        self.hosts: dict[str, Any] = {role: self.add(role) for role in ROLES[1:]}
        self.ray.wait_for_nodes()
        settings = {"RUNNER": "hash", "NUM_BLOCKS": 4096, "THREADS": 1, "DISAGGREGATE": "always"}
        self.environment = os.environ | {f"BATON_{name}": str(value) for name, value in settings.items()}
        self.environment["RAY_ADDRESS"] = self.ray.address

    def add(self, role: str) -> Any:
        return self.ray.add_node(num_cpus=2, labels={"baton.role": role})

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        baton = str(Path(sys.executable).with_name("baton"))
        return subprocess.run([baton, "ray", *words], env=self.environment, check=False, capture_output=True, text=True)

    def up(self, *flags: str) -> str:
        ports = ("--port", str(self.port), "--registry-port", str(self.port + 1))
        done = self.command("up", "--routers", "2", *ports, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pids(self) -> dict[str, int]:
        """Return the process id of each running part."""
        return {row[0]: int(row[2]) for row in ROW.findall(self.command("status").stdout)}

    def address_of(self, node: str) -> str:
        return str(next(each["address"] for each in self.routers[0].status()["nodes"] if each["id"] == node))

    def wait_for_restart(self, part: str, old: int) -> None:
        wait_for(lambda: self.pids().get(part, old) != old, f"{part} starts again", 120)
        self.wait_for_nodes(prefill=1, decode=1)

    def wait_for_nodes(self, **counts: int) -> None:
        for router in self.routers:
            router.wait_for_nodes(**counts)


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayCluster]:
    running = RayCluster()
    try:
        yield running
    finally:
        running.command("down")
        running.ray.shutdown()


def load(hosts: RayCluster, least: int, urls: Sequence[str] = (), **options: Any) -> Load:
    return Load(urls or [router.url for router in hosts.routers], "model", 4, least, **options)


def test_a_killed_node_starts_again_without_a_lost_request_and_down_leaves_nothing_behind(hosts: RayCluster) -> None:
    hosts.up("--placement", "label")
    hosts.wait_for_nodes(prefill=1, decode=1)
    with load(hosts, 40) as requests:
        wait_for(lambda: len(requests.outcomes) > 10, "requests end")
        before = hosts.address_of("decode-0")
        kill(hosts.pids()["decode-0"])
        wait_for(lambda: hosts.address_of("decode-0") != before, "decode-0 starts again", 120)
        hosts.wait_for_nodes(prefill=1, decode=1)
    assert requests.failures() == []
    hosts.up("--placement", "label", "--decode", "2")
    hosts.wait_for_nodes(prefill=1, decode=2)
    parts = hosts.pids()
    assert len(parts) == 5
    assert hosts.command("down").returncode == 0
    wait_for(lambda: not any(map(psutil.pid_exists, parts.values())), "all parts ended", 60)
    assert "baton ray up" in hosts.command("status").stderr


@pytest.mark.exhaustive
def test_the_loss_of_an_actor_a_host_and_a_router_loses_only_streams_of_that_router(hosts: RayCluster) -> None:
    hosts.up("--placement", "label")
    hosts.wait_for_nodes(prefill=1, decode=1)
    with load(hosts, 40) as requests:
        wait_for(lambda: len(requests.outcomes) > 10, "requests end")
        old = hosts.pids()["prefill-0"]
        psutil.Process(old).parent().kill()  # the worker process of the Ray actor
        hosts.wait_for_restart("prefill-0", old)
        old = hosts.pids()["decode-0"]
        raylet = psutil.Process(old).parent().parent()
        victim = hosts.hosts["decode"]
        assert victim.all_processes["raylet"][0].process.pid == raylet.pid
        hosts.hosts["decode"] = hosts.add("decode")  # a host that replaces the victim
        hosts.ray.remove_node(victim, allow_graceful=False)
        hosts.wait_for_restart("decode-0", old)
    assert requests.failures() == []

    first, second = (router.url for router in hosts.routers)
    with load(hosts, 40, urls=[first]) as ours, load(hosts, 40, urls=[second, first], refusals=RETRIED) as theirs:
        wait_for(lambda: len(theirs.outcomes) > 10, "requests end")
        killed = kill(old := hosts.pids()["router-1"])
        hosts.wait_for_restart("router-1", old)
    assert ours.failures() == []
    assert [outcome.lost for outcome in theirs.outcomes if is_lost(outcome, killed)] == []
    assert hosts.command("down").returncode == 0


@pytest.mark.exhaustive
def test_a_process_with_invalid_settings_is_not_started_again_until_the_next_up(hosts: RayCluster) -> None:
    hosts.environment["BATON_KV_DIRECTORY"] = "/proc/none"  # nodes refuse this value, and routers accept it
    try:
        assert "serving" not in hosts.up()
        wait_for(lambda: "ended with status 2" in hosts.command("status").stdout, "a node ends")
    finally:
        del hosts.environment["BATON_KV_DIRECTORY"]
    hosts.up()
    hosts.wait_for_nodes(prefill=1, decode=1)
    assert hosts.command("down").returncode == 0


def test_a_process_survives_a_full_disk_and_leaves_no_file_when_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster import ray as module
    from cluster.plan import Child

    write, faults, routers = Path.write_text, [1], {"0": MagicMock()}

    def write_text(path: Path, text: str) -> int:
        if faults:
            faults.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module, "_actors", lambda _: dict(routers))
    monkeypatch.setattr(module.ray, "get", lambda *_, **__: "10.0.0.1")
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    child = Child("decode-0", (sys.executable, "-c", program), {})
    supervisor = module.Supervisor(child, b"secret", "routers-", 8001)
    try:
        wait_for(lambda: bool(supervisor.status()["process"]), "the process starts at the second try")
        process = psutil.Process(supervisor.status()["process"])
        faults.extend([1, 2, 3])
        routers["1"] = MagicMock()
        registry = Path(process.environ()["BATON_REGISTRY"].removeprefix("file:"))
        wait_for(lambda: registry.read_text().split() == ["10.0.0.1:8001", "10.0.0.1:8003"], "both routers")
        assert not faults
        assert process.status() != psutil.STATUS_ZOMBIE
    finally:
        supervisor.drain()
        supervisor.kill()  # the process ignores SIGTERM
    assert supervisor.has_ended()
    assert not registry.parent.exists()


def test_a_model_that_does_not_exist_is_refused(hosts: RayCluster) -> None:
    done = hosts.command("up", "/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "baton ray up: --model: model '/nowhere' is neither" in done.stderr


@pytest.mark.exhaustive
def test_a_host_that_no_process_can_have_is_named(hosts: RayCluster) -> None:
    done = hosts.command("up", "--placement", "gpu", "--cluster", "other", "--port", str(free_port()))
    assert done.returncode == 1
    assert "decode-0: not started within 30 s: it needs a host with a free GPU" in done.stderr
    assert hosts.command("down", "--cluster", "other").returncode == 0
