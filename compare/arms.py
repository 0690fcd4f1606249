"""The arms of a comparison, parsed from text such as `disaggregated:1p1d@prefill_first`.

An `Arm` only describes a stack; `compare.run.deployments` starts the stack's processes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic import TypeAdapter

from shared.config.settings import ComputingSettings, EngineSettings, ServingSettings, resolve
from shared.errors import ConfigError

GRAMMAR = "colocated:N or disaggregated:XpYd, with @policy,setting=value after it"
TOPOLOGY = re.compile(r"(colocated):(\d{1,3})|(disaggregated):(\d{1,3})p(\d{1,3})d", re.ASCII)
# The comparison sets these settings itself, to the same values for all arms.
RESERVED = frozenset(
    {"model", "mode", "host", "port", "registry", "registry_host", "registry_port", "cluster", "served_model_name"}
    | {"more_models", "cpus", "emulate", "id", "log_level", "log_format", "drain_timeout_s"}
    | {"ssl_certfile", "ssl_keyfile"}
)


class ArmSettings(ServingSettings, ComputingSettings, EngineSettings):
    """All settings that an arm may set for its router and its nodes."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the compared stacks: its number of nodes in each role, and the settings of its router and nodes.

    Each node has one device.
    """

    name: str
    prefill: int
    decode: int
    settings: Mapping[str, str] = field(default_factory=dict)  # values as text, keyed by field name of ArmSettings
    url: str = ""  # set only for a running stack, whose `prefill` and `decode` are 0 until a client has connected

    @property
    def devices(self) -> int:
        return self.prefill + self.decode

    @property
    def mode(self) -> str:
        return "disaggregated" if self.prefill else "colocated"

    @property
    def policy(self) -> str:
        return self.settings.get("policy", ArmSettings.model_fields["policy"].default)

    def flags(self) -> list[str]:
        """Return the flags of `baton up` for this arm's topology and settings."""
        flags = ["--mode", self.mode, "--decode", str(self.decode)]
        flags += ["--prefill", str(self.prefill)] if self.prefill else []
        for name, value in self.settings.items():
            flag, is_switch = name.replace("_", "-"), ArmSettings.model_fields[name].annotation is bool
            if is_switch:
                flags.append(f"--{flag}" if TypeAdapter(bool).validate_python(value) else f"--no-{flag}")
            else:
                flags += [f"--{flag}", value]
        return flags

    def document(self) -> dict[str, object]:
        """Return the arm's entry in report.json."""
        numbers = {"devices": self.devices, "prefill": self.prefill, "decode": self.decode}
        return {"name": self.name, **numbers, "policy": self.policy, "settings": dict(self.settings)}


def parse_arm(text: str, common: Mapping[str, str] = {}) -> Arm:
    """Parse one arm. The settings in `text` override `common`. Raises a ConfigError that names the wrong part."""
    topology, _, tail = text.partition("@")
    match = TOPOLOGY.fullmatch(topology)
    if match is None:
        raise ConfigError(f"--arms {text}: {topology!r} is not an arm; write {GRAMMAR}")
    prefill, decode = (int(match[4]), int(match[5])) if match[3] else (0, int(match[2]))
    if decode < 1 or (match[3] and prefill < 1):
        raise ConfigError(f"--arms {text}: an arm needs at least one device for each role; write {GRAMMAR}")
    # A disaggregated arm disaggregates every request, unless its settings let the router decide per request.
    split = {"disaggregate": "always"} if prefill else {}
    return Arm(text, prefill, decode, split | dict(common) | parse_settings(f"--arms {text}", tail))


def parse_settings(source: str, text: str) -> dict[str, str]:
    """Parse "policy,setting=value,...". Raises ConfigError, whose message begins with `source`."""
    settings: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        name, value = (name.strip().replace("-", "_"), value.strip()) if equals else ("policy", part)
        if name in RESERVED:
            raise ConfigError(f"{source}: {name} is set by the comparison, equally for all arms")
        if name in settings:
            raise ConfigError(f"{source}: {name} is given twice")
        settings[name] = value
    try:
        resolve(ArmSettings, settings, {})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return settings


def parse_arms(
    texts: Sequence[str], common: Sequence[str] = (), *, unequal: bool = False, has_control: bool = False
) -> list[Arm]:
    """Parse the arms. `common` are settings of all arms, each as SETTING=VALUE. Raises ConfigError if there are fewer
    than two arms and no control, if two arms are equal, or if their numbers of devices differ and `unequal` is not set.
    """
    if any("=" not in text for text in common):
        raise ConfigError("--set: write SETTING=VALUE, as in --set max_num_seqs=32")
    shared = parse_settings("--set", ",".join(common))
    arms = [parse_arm(text, shared) for text in texts]
    if len(arms) < 2 and not has_control:
        raise ConfigError("--arms: a comparison needs two arms or more; to compare one with itself, add --control")
    for number, arm in enumerate(arms):
        if arm.name in {other.name for other in arms[:number]}:
            raise ConfigError(f"--arms {arm.name}: is given twice; to compare an arm with itself, use --control")
    for one, other in pairwise(arms):
        if one.devices != other.devices and not unequal:
            raise ConfigError(
                f"--arms: {one.name} has {one.devices} devices and {other.name} {other.devices}; "
                "give all arms the same number, or add --unequal"
            )
    return arms


def copy_of(arm: Arm) -> Arm:
    """Return the negative control: a copy of the arm that runs as a separate stack."""
    return Arm(f"{arm.name} (control)", arm.prefill, arm.decode, arm.settings, arm.url)


def cores_of(arms: Sequence[Arm], cores: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each arm. On a CPU, a device is a set of cores, and all arms use sets of the same size.

    Raises ConfigError if there are fewer cores than devices, because nodes that share a core slow each other down.
    """
    num_devices = max(arm.devices for arm in arms)
    per_device = len(cores) // num_devices
    if per_device == 0:
        raise ConfigError(
            f"--arms: {num_devices} devices need {num_devices} cores, but only {len(cores)} are available; "
            "use fewer devices, or --on emulated"
        )
    return {arm.name: tuple(cores[: per_device * arm.devices]) for arm in arms}
