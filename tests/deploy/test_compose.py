"""Test docker-compose.yml with real Docker: two routers without Redis, while processes and containers are killed."""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shared.clock import now_ns
from tests.chaos.traffic import Load
from tests.cluster.harness import ROOT, wait_for
from tests.deploy.remote import RETRIED, RouterClient, is_lost

PORTS = "18100-18109"
NODES = {"prefill": 2, "decode": 2}
# The hash model (engine/hash_model.py) starts quickly. The many retries are for busy machines.
OVERRIDE: dict[str, Any] = {
    name: {"environment": {"BATON_RUNNER": "hash", "BATON_NUM_BLOCKS": "4096"}} for name in NODES
} | {"router": {}}
for service in OVERRIDE.values():
    service["healthcheck"] = {"retries": 100}
START_S = 600.0


@cache
def has_engine() -> bool:
    command = ["docker", "info"]
    return bool(shutil.which("docker")) and not subprocess.run(command, check=False, capture_output=True).returncode


class Compose:
    """One project of docker-compose.yml, whose nodes run the hash model."""

    def __init__(self, override: Path) -> None:
        self.project = f"baton-test-{secrets.token_hex(4)}"
        override.write_text(json.dumps({"services": OVERRIDE}))
        self._files = ("-f", "docker-compose.yml", "-f", str(override))

    def docker(self, *words: str) -> str:
        environment = os.environ | {"BATON_PUBLISH": f"127.0.0.1:{PORTS}"}
        done = subprocess.run(
            ["docker", *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def compose(self, *words: str) -> str:
        return self.docker("compose", "-p", self.project, *self._files, *words)

    def up(self, routers: int = 2, **nodes: int) -> None:
        """Start or stop containers until each kind has the given number, and wait until all nodes have joined."""
        nodes = NODES | nodes
        counts = [f"{name}={count}" for name, count in ({"router": routers} | nodes).items()]
        self.compose("up", "-d", "--wait", "--no-recreate", *(word for each in counts for word in ("--scale", each)))
        assert len(self.routers()) == routers
        self.wait(**nodes)

    def routers(self) -> dict[str, RouterClient]:
        """Return the running routers by the name of their containers."""
        rows = [json.loads(line) for line in self.compose("ps", "router", "--format", "json").splitlines()]
        ports = {row["Name"]: max(one["PublishedPort"] for one in row["Publishers"]) for row in rows}
        return {name: RouterClient(f"http://127.0.0.1:{port}") for name, port in sorted(ports.items()) if port}

    def wait(self, **nodes: int) -> None:
        for router in self.routers().values():
            router.wait_for_nodes(START_S, **(NODES | nodes))

    def load(self, urls: Sequence[str], clients: int) -> Load:
        return Load(urls, "model", clients, 12, share=0.5, refusals=RETRIED)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    running = Compose(tmp_path_factory.mktemp("compose") / "override.json")
    try:
        running.compose("build")
        running.up()
        yield running
    finally:
        running.compose("down", "-v", "--remove-orphans")
        label = ("--filter", f"label=com.docker.compose.project={running.project}")
        assert "".join(running.docker(kind, "ls", "-q", *label) for kind in ("container", "volume", "network")) == ""


pytestmark = [pytest.mark.skipif(not has_engine(), reason="no Docker engine answers"), pytest.mark.timeout(2400)]


def test_a_killed_process_is_started_again_without_a_lost_request(running: Compose) -> None:
    assert all(router.status()["registry"]["kind"] == "embedded" for router in running.routers().values()), "no Redis"
    first, second = running.routers().values()
    with running.load([first.url, second.url], 3) as load:
        running.compose("exec", "-T", "decode", "sh", "-c", "kill -9 -1")
        wait_for(lambda: first.ready_nodes()["decode"] == 1, "the loss is seen")
        running.wait()  # Docker restarts the container of a process that crashes
    assert load.failures() == []


@pytest.mark.exhaustive
def test_killed_containers_and_scaling_of_nodes_and_routers_lose_no_request(running: Compose) -> None:
    first, second = running.routers().values()
    with running.load([first.url, second.url], 3) as load:
        killed = f"{running.project}-prefill-2"
        running.docker("kill", killed)
        wait_for(lambda: first.ready_nodes()["prefill"] == 1, "the loss is seen")
        running.docker("start", killed)
        running.wait()
        running.up(decode=1)
        running.up(routers=3, decode=1)
        running.up()
    assert load.failures() == []


@pytest.mark.exhaustive
def test_only_the_streams_of_a_killed_router_are_lost(running: Compose) -> None:
    (_, first), (name, second) = running.routers().items()
    with running.load([first.url], 2) as ours, running.load([second.url, first.url], 2) as theirs:
        wait_for(lambda: len(theirs.outcomes) > 4, "requests end")
        before = now_ns()
        running.docker("kill", name)
        killed = before, now_ns()
        running.docker("start", name)
        wait_for(lambda: name in running.routers(), "the router runs again")
        running.wait()
    assert ours.failures() == []
    assert [outcome.lost for outcome in theirs.outcomes if is_lost(outcome, killed)] == []
