"""Test that the manifests of deploy/kubernetes build, match the published schemas and fit together."""

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from compare.arms import parse_arm
from compare.planning.deployment import kustomize_component
from tests.cluster.harness import ROOT
from tests.deploy.manifests import Object, build, problems

FOLDER = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).with_name("schemas")  # of other projects' resources; only the fields that we use are allowed
pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl, which builds the manifests")
HAS_VALIDATE = importlib.util.find_spec("kubernetes_validate") is not None
VERSIONS = ("1.30", "1.37")


def is_foreign(item: Object) -> bool:
    """Return whether another project defines this kind of resource. Its CRD must then be installed."""
    return item["apiVersion"] not in {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1", "autoscaling/v2"}


ALL = [path for kind in ("overlays", "components") for path in sorted((FOLDER / kind).iterdir())]
every = pytest.mark.parametrize("folder", ALL, ids=lambda folder: folder.name)


@every
def test_every_overlay_and_component_fits_together(folder: Path) -> None:
    assert problems(build(folder)) == []


@every
def test_resources_of_other_projects_match_their_schemas(folder: Path) -> None:
    for item in build(folder):
        if is_foreign(item):
            jsonschema_rs.validate(json.loads((SCHEMAS / f"{item['kind'].lower()}.json").read_text()), item)


@pytest.mark.parametrize("name", ["colocated:4@max_num_seqs=64", "disaggregated:1p3d@tbt_slo_ms=20,disaggregate=auto"])
def test_an_overlay_takes_the_numbers_and_settings_of_a_plan(name: str, tmp_path: Path) -> None:
    arm = parse_arm(name)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "kustomization.yaml").write_text(kustomize_component(arm))
    components = [os.path.relpath(FOLDER / "components" / "colocated", tmp_path)] if not arm.prefill else []
    overlay = {"resources": [os.path.relpath(FOLDER / "base", tmp_path)], "components": [*components, "plan"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    objects = build(tmp_path)
    assert problems(objects) == []
    counts = {each["metadata"]["name"]: each["spec"]["replicas"] for each in objects if each["kind"] == "Deployment"}
    assert counts == {"baton-router": 2, "baton-decode": arm.decode} | ({"baton-prefill": 1} if arm.prefill else {})
    settings = {key: value for each in objects if each["kind"] == "ConfigMap" for key, value in each["data"].items()}
    expected = {"BATON_MODE": arm.mode} | {f"BATON_{key.upper()}": value for key, value in arm.settings.items()}
    assert expected.items() <= settings.items()


@pytest.mark.skipif(not HAS_VALIDATE, reason="no kubernetes-validate: pip install '.[deploy]'")
@every
def test_resources_of_kubernetes_match_its_schemas(folder: Path) -> None:
    import kubernetes_validate

    for item in build(folder):
        for version in VERSIONS:
            if not is_foreign(item):
                kubernetes_validate.validate(item, version, strict=True)


def change(kind: str, name: str, keys: str, value: Any, objects: list[Object]) -> None:
    """Set a value in an object. `keys` is its path, with slashes. The names of generated objects end with a hash."""
    names = {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}
    item: Any = names.get(name) or next(names[each] for each in names if each.rpartition("-")[0] == name)
    *path, last = keys.split("/")
    for key in path:
        item = item[int(key) if key.isdecimal() else key]
    item[last] = value


POD = "spec/template/spec"
BOX = f"{POD}/containers/0"
FAULTS: list[tuple[Callable[[list[Object]], None], str]] = [
    (partial(change, "Service", "baton", "spec/selector", {"app": "baton"}), "Service/baton: spec.selector selects no pod"),
    (partial(change, "Service", "baton", "spec/ports", [{"port": 80, "targetPort": "web"}]), "has no port web"),
    (partial(change, "PodDisruptionBudget", "baton-decode", "spec/selector/matchLabels", {"app": "x"}), "PodDisruptionBudget/baton-decode: spec.selector selects 0"),
    (partial(change, "PodDisruptionBudget", "baton-router", "spec/minAvailable", 2), "no pod of Deployment/baton-router can be evicted"),
    (partial(change, "Deployment", "baton-decode", f"{POD}/terminationGracePeriodSeconds", 39), "Deployment/baton-decode: terminationGracePeriodSeconds 39 must be at least 40"),
    (partial(change, "Deployment", "baton-router", f"{POD}/terminationGracePeriodSeconds", 314), "Deployment/baton-router: terminationGracePeriodSeconds 314 must be at least 315"),
    (partial(change, "ConfigMap", "baton-node", "data/BATON_COLOUR", "red"), "BATON_COLOUR is not a setting"),
    (partial(change, "ConfigMap", "baton", "data/BATON_DRAIN_TIMEOUT_S", "soon"), "BATON_DRAIN_TIMEOUT_S 'soon'"),
    (partial(change, "Service", "baton-routers", "spec/publishNotReadyAddresses", False), "baton-routers must be a headless Service"),
    (partial(change, "ConfigMap", "baton-node", "data/BATON_REGISTRY", "baton-routers:8000"), "routers do not listen for nodes at baton-routers:8000"),
    (partial(change, "Deployment", "baton-decode", "spec/replicas", 0), "needs at least one decode"),
    (partial(change, "Deployment", "baton-decode", "spec/progressDeadlineSeconds", 1800), "progressDeadlineSeconds 1800: a pod may take 1800 s"),
    (partial(change, "Deployment", "baton-prefill", f"{POD}/enableServiceLinks", True), "Deployment/baton-prefill: enableServiceLinks"),
    (partial(change, "ConfigMap", "baton-node", "data/BATON_HEALTH_PORT", "7005"), "BATON_HEALTH_PORT 7005: the container declares no such port"),
    (partial(change, "Deployment", "baton-decode", f"{BOX}/livenessProbe/httpGet/port", "http"), "livenessProbe: the container has no port http"),
    (partial(change, "Deployment", "baton-decode", f"{BOX}/startupProbe/httpGet/path", "/ready"), "startupProbe: /ready would restart the pod"),
    (partial(change, "Deployment", "baton-decode", f"{BOX}/envFrom", [{"configMapRef": {"name": "baton"}}]), "BATON_PORT 0"),
    (partial(change, "Deployment", "baton-router", f"{BOX}/volumeMounts/0/readOnly", False), "/run/secret is not a read-only secret"),
    (partial(change, "Deployment", "baton-router", f"{BOX}/securityContext/readOnlyRootFilesystem", False), "rights that it does not need"),
    (partial(change, "NetworkPolicy", "baton-node", "spec/ingress/0/ports", [{"port": 7000}]), "pods of baton alone must reach BATON_KV_PORT 7002"),
    (partial(change, "NetworkPolicy", "baton-router", "spec/ingress/1/from", []), "pods of baton alone must reach BATON_REGISTRY_PORT 8001"),
]  # fmt: skip


POOL_FAULTS: list[tuple[Callable[[list[Object]], None], str]] = [
    (partial(change, "InferencePool", "baton", "spec/selector/matchLabels", {"app.kubernetes.io/name": "baton"}), "does not select the routers alone"),
    (partial(change, "InferencePool", "baton", "spec/targetPorts", [{"number": 80}]), "spec.targetPorts 80: the routers listen on 8000"),
    (partial(change, "InferencePool", "baton", "spec/endpointPickerRef/name", "picker"), "there is no Service picker with port 9002"),
    (partial(change, "HTTPRoute", "baton", "spec/rules/0/backendRefs/0/name", "pool"), "there is no InferencePool pool"),
    (partial(change, "Deployment", "baton-picker", f"{BOX}/env/1/value", "baton:8000"), "BATON_ROUTERS: baton:8000 must be a headless Service"),
    (partial(change, "Deployment", "baton-picker", f"{BOX}/env/1/value", ""), "BATON_ROUTERS: : must be a headless Service"),
    (partial(change, "Deployment", "baton-picker", f"{POD}/terminationGracePeriodSeconds", 314), "Deployment/baton-picker: terminationGracePeriodSeconds 314 must be at least 315"),
    (partial(change, "Deployment", "baton-picker", f"{BOX}/env/3/value", "30"), "BATON_DRAIN_TIMEOUT_S: routers have 300"),
    (partial(change, "Deployment", "baton-picker", f"{BOX}/lifecycle", {}), "Deployment/baton-picker: lifecycle.preStop"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "message"), POOL_FAULTS, ids=[message for _, message in POOL_FAULTS])
def test_a_fault_planted_in_the_pool_is_found(plant: Callable[[list[Object]], None], message: str) -> None:
    objects = build(FOLDER / "components" / "inference-pool")
    plant(objects)
    assert any(message in line for line in problems(objects)), problems(objects)


@pytest.mark.parametrize(("plant", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_a_planted_fault_is_found(plant: Callable[[list[Object]], None], message: str) -> None:
    objects = build(FOLDER / "overlays" / "demo")
    plant(objects)
    assert any(message in line for line in problems(objects)), problems(objects)


def test_a_rollout_that_ends_all_nodes_at_once_is_found() -> None:
    objects = build(FOLDER / "overlays" / "h200-8b")
    for role in ("prefill", "decode"):
        change("Deployment", f"baton-{role}", "spec/replicas", 1, objects)
    assert problems(objects) == [
        "the nodes: rollingUpdate.maxUnavailable: a change of a setting ends all nodes at the same time"
    ]


def test_a_fault_of_an_autoscaler_is_found() -> None:
    objects = build(FOLDER / "components" / "autoscaling")
    change("ScaledObject", "baton-decode", "spec/minReplicaCount", 0, objects)
    change("ScaledObject", "baton-decode", "spec/triggers/0/metadata/ignoreNullValues", "true", objects)
    change("ScaledObject", "baton-prefill", "spec/scaleTargetRef/name", "prefill", objects)
    change("Deployment", "baton-router", "spec/replicas", 2, objects)
    assert [line.split(": ")[:2] for line in problems(objects)] == [
        ["ScaledObject/baton-decode", "ignoreNullValues"],
        ["ScaledObject/baton-decode", "the least number of pods must be at least 1"],
        ["ScaledObject/baton-prefill", "spec.scaleTargetRef"],
        ["Deployment/baton-router", "spec.replicas"],
    ]
