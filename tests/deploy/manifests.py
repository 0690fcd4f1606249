"""Build the Kubernetes manifests of `deploy/kubernetes`, and find parts that do not fit together."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from shared.config.settings import NodeSettings, PickerSettings, RouterSettings, Settings, resolve, variable_of
from shared.errors import ConfigError

Object = dict[str, Any]
KINDS: dict[str, type[Settings]] = {"router": RouterSettings, "prefill": NodeSettings, "decode": NodeSettings}
KINDS["picker"] = PickerSettings
PORTS = {"router": ("port", "registry_port"), "prefill": ("port", "kv_port", "health_port")}
PORTS |= {"decode": PORTS["prefill"], "picker": ("port",)}
PEER_PORTS = {"router": ("registry_port",), "prefill": ("port", "kv_port"), "decode": ("port", "kv_port")}
PEER_PORTS["picker"] = ()
KNOWN = {variable_of(name) for kind in KINDS.values() for name in kind.model_fields}
KNOWN |= {"BATON_URL", "BATON_API_KEY"}  # of commands in a pod that call a router
FIELDS = {"metadata.name": "baton-decode-0", "status.podIP": "10.0.0.1"}  # example values of the downward API
EXTERNAL = {("Secret", "baton-cluster"), ("PersistentVolumeClaim", "baton-model")}  # the operator creates them
EXIT_S = 10  # how long a pod may take to end after its drain


def build(folder: Path) -> list[Object]:
    """Return the objects of an overlay, or of the base with a component."""
    return list(yaml.safe_load_all(_built(folder)))


@lru_cache
def _built(folder: Path) -> str:
    with tempfile.TemporaryDirectory() as place:
        if folder.parent.name == "components":
            base, component = (os.path.relpath(path, place) for path in (folder.parents[1] / "base", folder))
            overlay = {"resources": [base], "components": [component]}
            (Path(place) / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
            folder = Path(place)
        return subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True, text=True).stdout


def problems(objects: list[Object]) -> list[str]:
    """Return one line, with the object and the key, for each part of a cluster that does not fit the others."""
    found = Manifests(objects)
    checks = (
        found.references,
        found.services,
        found.scalers,
        found.budgets,
        found.pods,
        found.settings,
        found.registry,
        found.drains,
        found.pool,
        found.policies,
        found.roles,
        found.rollouts,
    )
    return [line for check in checks for line in check()]


def name_of(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a selector (matchLabels and matchExpressions with In) selects an object with these labels."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ()))


class Manifests:
    """The objects of one cluster. Each method yields the problems of one kind."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.names = {(item["kind"], item["metadata"]["name"]) for item in objects} | EXTERNAL
        self.workloads = [item for item in objects if item["kind"] == "Deployment"]

    def of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def selected(self, selector: Object) -> list[Object]:
        return [item for item in self.workloads if matches(selector, item["spec"]["template"]["metadata"]["labels"])]

    def baton(self) -> Iterator[tuple[Object, str, Object, dict[str, str]]]:
        """Yield the workloads of Baton, each with its role, its container and its environment."""
        for item in self.workloads:
            container = item["spec"]["template"]["spec"]["containers"][0]
            if (role := container["args"][0]) in KINDS:
                yield item, role, container, self.environment(container)

    def environment(self, container: Object) -> dict[str, str]:
        maps = {item["metadata"]["name"]: item["data"] for item in self.of_kind("ConfigMap")}
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= maps.get(source["configMapRef"]["name"], {})
        for each in container.get("env", ()):
            found[each["name"]] = (
                each["value"] if "value" in each else FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return found

    def references(self) -> Iterator[str]:
        for item in self.workloads:
            pod = item["spec"]["template"]["spec"]
            used = [("ConfigMap", each["configMapRef"]["name"]) for each in pod["containers"][0].get("envFrom", ())]
            used += [("Secret", each["secret"]["secretName"]) for each in pod["volumes"] if "secret" in each]
            claims = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
            used += [("PersistentVolumeClaim", each["claimName"]) for each in claims]
            for kind, name in used:
                if (kind, name) not in self.names:
                    yield f"{name_of(item)}: there is no {kind}/{name}"

    def services(self) -> Iterator[str]:
        for item in self.of_kind("Service"):
            selected = self.selected({"matchLabels": item["spec"]["selector"]})
            if not selected:
                yield f"{name_of(item)}: spec.selector selects no pod"
            for workload in selected:
                ports = {port["name"] for port in workload["spec"]["template"]["spec"]["containers"][0]["ports"]}
                for port in item["spec"]["ports"]:
                    if port["targetPort"] not in ports:
                        yield f"{name_of(item)}: spec.ports: {name_of(workload)} has no port {port['targetPort']}"
        for item in self.of_kind("HTTPRoute"):
            for each in (backend for rule in item["spec"]["rules"] for backend in rule["backendRefs"]):
                if each.get("kind") == "InferencePool":
                    if ("InferencePool", each["name"]) not in self.names:
                        yield f"{name_of(item)}: backendRefs: there is no InferencePool {each['name']}"
                    continue
                found = [service for service in self.of_kind("Service") if service["metadata"]["name"] == each["name"]]
                if not any(port["port"] == each["port"] for service in found for port in service["spec"]["ports"]):
                    yield f"{name_of(item)}: backendRefs: there is no Service {each['name']} with port {each['port']}"
        for item in self.of_kind("PodMonitor"):
            for workload in self.selected(item["spec"]["selector"]) or [None]:
                ports = (
                    [port["name"] for port in workload["spec"]["template"]["spec"]["containers"][0]["ports"]]
                    if workload
                    else []
                )
                if any(endpoint["port"] not in ports for endpoint in item["spec"]["podMetricsEndpoints"]):
                    yield f"{name_of(item)}: spec.podMetricsEndpoints: no pod has the port"

    def scalers(self) -> Iterator[str]:
        """An autoscaler must find its Deployment and keep at least one pod. The Deployment must not set a number of
        replicas."""
        workloads = {item["metadata"]["name"]: item["spec"] for item in self.workloads}
        for item in self.of_kind("ScaledObject") + self.of_kind("HorizontalPodAutoscaler"):
            spec, name = item["spec"], item["spec"]["scaleTargetRef"]["name"]
            if name not in workloads:
                yield f"{name_of(item)}: spec.scaleTargetRef: there is no Deployment/{name}"
            elif "replicas" in workloads[name]:
                yield f"Deployment/{name}: spec.replicas: `kubectl apply` would undo what {name_of(item)} decides"
            for trigger in spec.get("triggers", ()):
                if trigger["metadata"].get("ignoreNullValues") != "false":
                    yield f"{name_of(item)}: ignoreNullValues: without data, KEDA would remove pods"
            if min(spec.get("minReplicaCount", 1), spec.get("minReplicas", 1)) < 1:
                yield f"{name_of(item)}: the least number of pods must be at least 1"

    def budgets(self) -> Iterator[str]:
        covered = set()
        for item in self.of_kind("PodDisruptionBudget"):
            selected = self.selected(item["spec"]["selector"])
            covered |= {name_of(workload) for workload in selected}
            if len(selected) != 1:
                yield f"{name_of(item)}: spec.selector selects {len(selected)} workloads instead of one"
            elif item["spec"].get("minAvailable", 0) >= selected[0]["spec"].get("replicas", 2):
                yield f"{name_of(item)}: spec.minAvailable: no pod of {name_of(selected[0])} can be evicted"
        for item, *_ in self.baton():
            if name_of(item) not in covered:
                yield f"{name_of(item)}: has no PodDisruptionBudget"

    def pods(self) -> Iterator[str]:
        for item in self.workloads:
            template, where = item["spec"]["template"], name_of(item)
            pod, container = template["spec"], template["spec"]["containers"][0]
            if not matches(item["spec"]["selector"], template["metadata"]["labels"]):
                yield f"{where}: spec.selector does not select its own pods"
            if pod.get("enableServiceLinks", True):
                yield f"{where}: enableServiceLinks: variables of the Service baton would override settings"
            if pod.get("automountServiceAccountToken", True):
                yield f"{where}: automountServiceAccountToken: the pod gets a token for the API server"
            rights = container.get("securityContext", {})
            if not (pod["securityContext"].get("runAsNonRoot") and rights.get("readOnlyRootFilesystem")
                    and rights.get("capabilities") == {"drop": ["ALL"]} and rights.get("allowPrivilegeEscalation") is False):  # fmt: skip
                yield f"{where}: securityContext: the container has rights that it does not need"
            ports = {port["name"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = next(iter(container.get(probe, {}).keys() & {"httpGet", "tcpSocket"}), None)
                if port is not None and container[probe][port]["port"] not in ports:
                    yield f"{where}: {probe}: the container has no port {container[probe][port]['port']}"
                if probe != "readinessProbe" and container.get(probe, {}).get("httpGet", {}).get("path") == "/ready":
                    yield f"{where}: {probe}: /ready would restart the pod because of other pods; use /health"
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            if limits.get("nvidia.com/gpu") != requests.get("nvidia.com/gpu"):
                yield f"{where}: resources: limits and requests of nvidia.com/gpu differ"

    def settings(self) -> Iterator[str]:
        for item, role, container, environment in self.baton():
            where, pod = name_of(item), item["spec"]["template"]["spec"]
            unknown = sorted(name for name in environment if name.startswith("BATON_") and name not in KNOWN)
            yield from (f"{where}: {name} is not a setting" for name in unknown)
            try:
                settings: Any = resolve(
                    KINDS[role], {}, {name: environment[name] for name in environment if name not in unknown}
                )[0]
            except ConfigError as error:
                yield f"{where}: {error}"
                continue
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1]
            if role in ("router", "picker") and not float(hook):
                yield f"{where}: lifecycle.preStop: a Service still sends connections after SIGTERM"
            least = float(hook) + settings.drain_timeout_s + EXIT_S
            if (grace := pod.get("terminationGracePeriodSeconds", 30)) < least:
                yield f"{where}: terminationGracePeriodSeconds {grace} must be at least {least:g}: the drain and {EXIT_S} s"
            declared = {port["containerPort"] for port in container["ports"]}
            for name in PORTS[role]:
                if getattr(settings, name) not in declared:
                    yield f"{where}: {variable_of(name)} {getattr(settings, name)}: the container declares no such port"
            if not hasattr(settings, "cluster_secret_file"):
                continue
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            folder = str(Path(settings.cluster_secret_file).parent)
            secrets = {volume["name"] for volume in pod["volumes"] if "secret" in volume}
            if mounts.get(folder, {}).get("name") not in secrets or not mounts[folder].get("readOnly"):
                yield f"{where}: BATON_CLUSTER_SECRET_FILE: {folder} is not a read-only secret"

    def registry(self) -> Iterator[str]:
        """Nodes must also find routers that are not ready: a router becomes ready only when a node has joined."""
        services = {item["metadata"]["name"]: item["spec"] for item in self.of_kind("Service")}
        shared = {environment.get("BATON_REGISTRY", "") for _, role, _, environment in self.baton() if role == "router"}
        for item, role, _, environment in self.baton():
            address = environment.get("BATON_REGISTRY", "127.0.0.1:8001")
            if role == "picker":
                continue
            if role == "router" or "://" in address:
                if role != "router" and address not in shared:
                    yield f"{name_of(item)}: BATON_REGISTRY: the routers use another registry"
                continue
            name, _, port = address.rpartition(":")
            service = services.get(name, {"ports": []})
            if service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
                yield f"{name_of(item)}: BATON_REGISTRY: {name} must be a headless Service with publishNotReadyAddresses"
            if int(port) not in {each["port"] for each in service["ports"]} or shared != {""}:
                yield f"{name_of(item)}: BATON_REGISTRY: routers do not listen for nodes at {name}:{port}"

    def drains(self) -> Iterator[str]:
        """When a picker ends, answers are cut, so a picker must wait for them at least as long as the routers do."""
        times = {role: environment.get("BATON_DRAIN_TIMEOUT_S", "30") for _, role, _, environment in self.baton()}
        if "picker" in times and float(times["picker"]) < float(times["router"]):
            yield f"Deployment/baton-picker: BATON_DRAIN_TIMEOUT_S: routers have {times['router']}"

    def pool(self) -> Iterator[str]:
        """A pool and its picker must have the same routers, and the gateway must find the picker."""
        services = {item["metadata"]["name"]: item["spec"] for item in self.of_kind("Service")}
        ports = {
            name_of(item): environment.get("BATON_PORT")
            for item, role, _, environment in self.baton()
            if role == "router"
        }
        for item in self.of_kind("InferencePool"):
            spec, where = item["spec"], name_of(item)
            if {name_of(each) for each in self.selected(spec["selector"])} != ports.keys():
                yield f"{where}: spec.selector does not select the routers alone"
            numbers = [str(port["number"]) for port in spec["targetPorts"]]
            if set(numbers) != set(ports.values()):
                yield f"{where}: spec.targetPorts {', '.join(numbers)}: the routers listen on {', '.join(map(str, ports.values()))}"
            picker = spec["endpointPickerRef"]
            found = services.get(picker["name"], {"ports": []})
            if picker["port"]["number"] not in {port["port"] for port in found["ports"]}:
                yield f"{where}: endpointPickerRef: there is no Service {picker['name']} with port {picker['port']['number']}"
            for workload, role, _, environment in self.baton():
                name, _, port = environment.get("BATON_ROUTERS", "").rpartition(":")
                if role == "picker" and (services.get(name, {}).get("clusterIP") != "None" or port not in numbers):
                    yield f"{name_of(workload)}: BATON_ROUTERS: {name}:{port} must be a headless Service with the pool's port"

    def policies(self) -> Iterator[str]:
        """The pods of a cluster must reach each other, and no other pod may reach their internal ports."""
        for item, role, _, environment in self.baton():
            labels = item["spec"]["template"]["metadata"]["labels"]
            policies = [
                policy["spec"]
                for policy in self.of_kind("NetworkPolicy")
                if matches(policy["spec"]["podSelector"], labels)
            ]
            rules = [rule for policy in policies for rule in policy["ingress"]]
            for variable in map(variable_of, PEER_PORTS[role]):
                peers = [
                    rule.get("from")
                    for rule in rules
                    if int(environment.get(variable, 0)) in {port["port"] for port in rule["ports"]}
                ]
                if peers != [[{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "baton"}}}]]:
                    yield f"{name_of(item)}: NetworkPolicy: pods of baton alone must reach {variable} {environment.get(variable, 0)}"

    def roles(self) -> Iterator[str]:
        found = {role: item["spec"].get("replicas", 1) for item, role, *_ in self.baton()}
        mode = {
            environment.get("BATON_MODE", "disaggregated")
            for _, role, _, environment in self.baton()
            if role == "router"
        }
        for role in ("router", "decode", *(["prefill"] if mode == {"disaggregated"} else [])):
            if found.get(role, 0) < 1:
                yield f"Deployment/baton-{role}: spec.replicas: mode {', '.join(mode)} needs at least one {role}"

    def rollouts(self) -> Iterator[str]:
        """A change of a setting replaces the pods of all Deployments at once. At least one node must always remain."""
        remaining = 0
        for item, role, container, _ in self.baton():
            spec = item["spec"]
            if role in ("prefill", "decode"):
                remaining += spec.get("replicas", 1) - spec["strategy"]["rollingUpdate"]["maxUnavailable"]
            probe, deadline_s = container.get("startupProbe", {}), spec.get("progressDeadlineSeconds", 600)
            if probe and deadline_s <= (start_s := probe["periodSeconds"] * probe["failureThreshold"]):
                yield f"{name_of(item)}: progressDeadlineSeconds {deadline_s}: a pod may take {start_s} s to start"
        if remaining < 1:
            yield "the nodes: rollingUpdate.maxUnavailable: a change of a setting ends all nodes at the same time"
