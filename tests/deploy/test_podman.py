"""Test the pods of deploy/kubernetes/overlays/demo with `podman kube play`: several routers by name, without Redis.

Podman supports Deployments and ConfigMaps, but not Services, probes or the DownwardAPI. The test gives the routers the
name of the headless Service as a network alias, omits the probes, and sets the values that Kubernetes would take from
the pod.
"""

import copy
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.secret import new_pem
from tests.chaos.traffic import Load
from tests.cluster.harness import ROOT, wait_for
from tests.deploy.manifests import Object, build
from tests.deploy.remote import RETRIED, RouterClient, is_lost, kill

IMAGE = "localhost/baton"
OVERLAY = ROOT / "deploy" / "kubernetes" / "overlays" / "demo"
FAST = {"BATON_RUNNER": "hash", "BATON_NUM_BLOCKS": "4096", "BATON_LOG_FORMAT": "text"}  # settings of nodes
# Podman needs these settings on machines whose limits cannot be raised or that have no systemd.
SETTINGS = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[network]
network_backend = "netavark"
"""


def missing() -> str:
    if absent := [name for name in ("podman", "kubectl", "ip") if not shutil.which(name)]:
        return f"no {', '.join(absent)}: apt-get install podman runc catatonit conmon netavark aardvark-dns iproute2"
    if os.geteuid() != 0:
        return "podman needs root for a network with names"
    inspect = ["podman", "image", "inspect", "--format", "{{.Created.Unix}}", IMAGE]
    created = subprocess.run(inspect, check=False, capture_output=True, text=True).stdout
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [path for name in kept for path in (ROOT / name, *(ROOT / name).rglob("*.py")) if path.is_file()]
    newest = max(path.stat().st_mtime for path in sources)
    return "" if created and int(created) > newest else f"no image of this version: podman build -t {IMAGE} ."


pytestmark = pytest.mark.skipif(bool(why := missing()), reason=why)


class Pods:
    """The pods of the overlay, on a separate network."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.network = place.name
        (place / "containers.conf").write_text(SETTINGS)
        self.environment = os.environ | {"CONTAINERS_CONF": str(place / "containers.conf")}
        self.objects = build(OVERLAY)
        self.played: list[Path] = []
        self.counts: dict[str, int] = {}
        self.settings = dict(FAST)  # settings of the nodes that are added next

    def podman(self, *words: object, check: bool = True) -> str:
        command = ["podman", *map(str, words)]
        done = subprocess.run(command, env=self.environment, check=False, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def start(self) -> None:
        self.podman("network", "create", self.network)
        (self.place / "secret").mkdir()
        (self.place / "secret" / "cluster").write_bytes(new_pem())
        self.add("router")
        self.pin_address()
        for role in ("router", "prefill", "decode"):
            self.add(role)

    def pin_address(self) -> None:
        """Keep the MAC address of the bridge.

        Otherwise, the bridge takes the lowest MAC address of its ports. If the pod with that port is removed, the other
        pods send to the old address until their ARP entries expire. This machine receives nothing from them for about
        45 s.
        """
        bridge = self.podman("network", "inspect", "--format", "{{.NetworkInterface}}", self.network).strip()
        address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
        subprocess.run(["ip", "link", "set", "dev", bridge, "address", address], check=True)

    def add(self, role: str) -> str:
        """Start one more pod of a Deployment, and return its name."""
        number = self.counts[role] = self.counts.get(role, -1) + 1
        maps = copy.deepcopy([item for item in self.objects if item["kind"] == "ConfigMap"])
        for item in maps:
            if "BATON_KV_CHANNEL" in item["data"]:
                item["data"] |= self.settings
            if "BATON_MODE" in item["data"]:
                item["data"] |= {"BATON_DISAGGREGATE": "always"}
        deployment = next(
            item
            for item in self.objects
            if item["metadata"]["name"] == f"baton-{role}" and item["kind"] == "Deployment"
        )
        pod = self.pod(deployment, f"baton-{role}-{number}")
        aliases = f"{self.network}:alias=baton-routers" if role == "router" else self.network
        self.play([*maps, pod], pod["metadata"]["name"], "--network", aliases)
        return str(pod["metadata"]["name"])

    def pod(self, deployment: Object, name: str) -> Object:
        spec = copy.deepcopy(deployment["spec"]["template"]["spec"])
        container = spec["containers"][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe, None)
        for volume, mount in product(spec["volumes"], container["volumeMounts"]):
            if volume.pop("secret", None):  # podman 4.3 does not decode secrets
                volume["hostPath"] = {"path": str(self.place / "secret"), "type": "Directory"}
            elif mount["name"] == volume["name"]:  # podman 4.3 shares emptyDir volumes of equal names between pods
                mount["name"] = volume["name"] = f"{name}-{volume['name']}"
        container.pop("ports")  # podman would publish them on this machine
        container |= {"image": IMAGE, "imagePullPolicy": "Never"}
        # Without BATON_ADVERTISE, a node advertises the address from which it connects to the routers.
        container["env"] = [{"name": "BATON_ID", "value": name}] if "env" in container else []
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}

    def play(self, objects: list[Object], name: str, *flags: str) -> None:
        path = self.place / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all(objects))
        self.played.append(path)
        self.podman("kube", "play", *flags, path)

    def inspect(self, name: str) -> Any:
        return json.loads(self.podman("inspect", f"{name}-baton"))[0]

    def address(self, name: str) -> str:
        pod = json.loads(self.podman("pod", "inspect", name))
        infra = json.loads(self.podman("inspect", pod["InfraContainerID"]))[0]
        return str(infra["NetworkSettings"]["Networks"][self.network]["IPAddress"])

    def router(self, number: int) -> RouterClient:
        return RouterClient(f"http://{self.address(f'baton-router-{number}')}:8000")

    def kill(self, name: str) -> tuple[int, int]:
        """Kill the process of a pod, and wait until podman has restarted it. Return the times around the kill."""
        before = self.inspect(name)["State"]["Pid"]
        killed = kill(before)
        wait_for(lambda: self.inspect(name)["State"]["Pid"] not in {0, before}, f"{name} starts again")
        return killed

    def remove(self, name: str) -> int:
        """End a pod as Kubernetes does, by SIGTERM and its grace period, and return the exit status."""
        spec = yaml.safe_load((self.place / f"{name}.yaml").read_text().rpartition("---")[2])["spec"]
        container = f"{name}-baton"
        if hook := spec["containers"][0].get("lifecycle"):
            self.podman("exec", container, *hook["preStop"]["exec"]["command"])
        self.podman("stop", "--time", spec["terminationGracePeriodSeconds"], container)
        status = self.inspect(name)["State"]["ExitCode"]
        self.podman("pod", "rm", "--force", name)
        return int(status)

    def close(self) -> None:
        for path in self.played:
            self.podman("pod", "rm", "--force", "--time", 0, path.stem, check=False)
        self.podman("network", "rm", "--force", self.network, check=False)


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        running = Pods(Path(directory))
        try:
            running.start()
            yield running
        finally:
            running.close()


@pytest.fixture(scope="module")
def routers(pods: Pods) -> list[RouterClient]:
    found = [pods.router(0), pods.router(1)]
    wait_for_nodes(found, decode=1)
    return found


def wait_for_nodes(routers: list[RouterClient], decode: int, prefill: int = 1) -> None:
    for router in routers:
        router.wait_for_nodes(prefill=prefill, decode=decode)


def load(routers: list[RouterClient], **options: Any) -> Load:
    return Load([router.url for router in routers], "model", 4, 60, **options)


def test_two_routers_by_name_lose_no_request_when_the_process_of_a_pod_is_killed(
    pods: Pods, routers: list[RouterClient]
) -> None:
    with load(routers) as requests:
        wait_for(lambda: len(requests.outcomes) > 10, "requests end")
        pods.kill("baton-decode-0")
        wait_for_nodes(routers, decode=1)
    assert requests.failures() == []


@pytest.mark.exhaustive
def test_scaling_down_loses_no_request_and_a_killed_router_only_its_streams(
    pods: Pods, routers: list[RouterClient]
) -> None:
    with load(routers) as requests:
        for _ in range(20):
            added = pods.add("decode")
            wait_for_nodes(routers, decode=2)
            assert pods.remove(added) == 0, "the node did not drain"
    assert requests.failures() == []

    with load(routers, refusals=RETRIED) as requests:
        wait_for(lambda: len(requests.outcomes) > 10, "requests end")
        killed = pods.kill("baton-router-1")
        wait_for_nodes(routers, decode=1)
    assert [outcome.lost for outcome in requests.outcomes if is_lost(outcome, killed)] == []


@pytest.mark.exhaustive
def test_a_rolling_update_of_both_roles_loses_no_request(pods: Pods, routers: list[RouterClient]) -> None:
    old = [(role, name) for role in ("prefill", "decode") for name in (f"baton-{role}-0", pods.add(role))]
    wait_for_nodes(routers, prefill=2, decode=2)
    pods.settings["BATON_NUM_BLOCKS"] = "4000"
    with load(routers) as requests:
        for role, name in old:  # as a Deployment does with maxSurge 0 and maxUnavailable 1
            assert pods.remove(name) == 0, "the node did not drain"
            pods.add(role)
            wait_for_nodes(routers, prefill=2, decode=2)
    assert requests.failures() == []
    assert {node["blocks"]["total"] for node in routers[0].status()["nodes"] if node["alive"]} <= {3999, 4000}
