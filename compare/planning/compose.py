"""The compose file that starts the recommended cluster, to be used together with docker-compose.yml."""

import json
from collections.abc import Mapping
from typing import Any

from compare.arms import Arm
from shared.config.settings import PREFIX, ComputingSettings, ServingSettings

COMMAND = "docker compose {}-f docker-compose.yml -f compose.override.yml up --build"


def compose_override(arm: Arm) -> str:
    """Return the text of the file, whose first line is the command to use it. After the comments, it is JSON, which is
    also YAML."""
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


def _environment(settings: Mapping[str, str], of: Any) -> dict[str, str]:
    return {f"{PREFIX}{name.upper()}": value for name, value in settings.items() if name in of.model_fields}
