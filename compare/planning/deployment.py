"""Generates the files that start the recommended cluster.

One file extends docker-compose.yml for Docker Compose; the other extends deploy/kubernetes/base for Kubernetes. Both
files begin with comments, followed by JSON, which is valid YAML.
"""

import json
from collections.abc import Mapping
from typing import Any

from compare.arms import Arm
from shared.config.settings import PREFIX, ComputingSettings, ServingSettings

COMMAND = "docker compose {}-f docker-compose.yml -f compose.override.yml up --build"


def compose_override(arm: Arm) -> str:
    """Return the text of a compose file, whose first line is the command to use it."""
    node = {"environment": _environment(arm.settings, ComputingSettings)}
    router = {"BATON_MODE": arm.mode, **_environment(arm.settings, ServingSettings)}
    replicas = {"prefill": arm.prefill, "decode": arm.decode} if arm.prefill else {"colocated": arm.decode}
    services: dict[str, Any] = {"router": {"environment": router}}
    for name in ("prefill", "decode", "colocated"):
        count = replicas.get(name, 0)
        if count or name != "colocated":  # without its profile, the service "colocated" is not started
            services[name] = {"deploy": {"replicas": count}} | (node if count else {})
    command = COMMAND.format("" if arm.prefill else "--profile colocated ")
    note = "Replicas share their environment. On a host with several GPUs, use `baton up --devices` instead."
    return f"# {arm.name}: {command}\n# {note}\n" + json.dumps({"services": services}, indent=2) + "\n"


def kustomize_component(arm: Arm) -> str:
    """Return the kustomization.yaml of a component. An overlay of the base must list this component last."""
    settings = {
        "baton-router": {"BATON_MODE": arm.mode, **_environment(arm.settings, ServingSettings)},
        "baton-node": _environment(arm.settings, ComputingSettings),
    }
    replicas = [{"name": "baton-decode", "count": arm.decode}]
    if arm.prefill:
        replicas.append({"name": "baton-prefill", "count": arm.prefill})
    component: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "replicas": replicas,
        "configMapGenerator": [
            {"name": name, "behavior": "merge", "literals": [f"{key}={value}" for key, value in values.items()]}
            for name, values in settings.items()
            if values
        ],
    }
    note = "Add the folder of this file to the `components` of an overlay" + (
        "." if arm.prefill else ", after deploy/kubernetes/components/colocated."
    )
    return f"# {arm.name}: {note}\n" + json.dumps(component, indent=2) + "\n"


def _environment(settings: Mapping[str, str], of: Any) -> dict[str, str]:
    return {f"{PREFIX}{name.upper()}": value for name, value in settings.items() if name in of.model_fields}
