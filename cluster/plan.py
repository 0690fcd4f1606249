"""Plans a local cluster: checks the settings of `baton up` on this machine, and lists the processes to start."""

import errno
import random
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shared.api_client import base_url
from shared.config.settings import (
    EVERY_ADDRESS,
    NOT_ZERO,
    VLLM_VARIABLES,
    ComputingSettings,
    Engines,
    EngineSettings,
    EngineUrl,
    Host,
    Names,
    NodeSettings,
    Port,
    ProxySettings,
    RouterSettings,
    ServingSettings,
    Settings,
    flag_of,
    setting,
    variable_of,
)
from shared.errors import ConfigError
from shared.lifecycle import python_path
from shared.model_files import DEMO_MODEL, resolve

ROUTER = "router"
OF_ONE_MODEL = ("lora_modules", "speculative_config")  # settings that do not apply to nodes of --more-models
# Number of times that a waiting OpenMP thread spins before it sleeps. This many spins take a few µs; the default takes
# milliseconds. If several processes share a core, a spinning thread may take CPU time from the thread it waits for.
SPIN = "1000"


def parse_devices(value: str | Iterable[str]) -> tuple[str, ...]:
    """Parse a list of GPUs such as "cuda:0,cuda:1", or "" for none. Raises ValueError if the list is invalid."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    if names == [""]:
        return ()
    for name in names:
        if not re.fullmatch(r"cuda:(0|[1-9]\d?)", name, re.ASCII):
            raise ValueError(f"{name!r} is not a GPU: must be a list such as cuda:0,cuda:1")
    if len(set(names)) < len(names):
        raise ValueError("must name each GPU once; if there are more nodes than GPUs, nodes share GPUs")
    return tuple(names)


Devices = Annotated[tuple[str, ...], BeforeValidator(parse_devices)]
# Settings that have no effect on vLLM servers, so they are refused together with --engines.
OF_OUR_NODES = {"devices", "more_models"} | (
    ComputingSettings.model_fields.keys()
    - {*ServingSettings.model_fields, *ProxySettings.model_fields, "cpus", "kv_directory"}
)


class LocalSettings(ServingSettings, ComputingSettings, EngineSettings):
    """The cluster"""

    needed: ClassVar[tuple[str, ...]] = ()  # no setting is required; the default model is the demo model

    model: str = setting("", "Model: a directory, or a hub id such as Qwen/Qwen3-0.6B.", "the demo model")
    prefill: int = Field(default=1, ge=0, le=256, description="Number of prefill nodes; 0: co-located.")
    decode: Annotated[int, Field(ge=0, le=256), NOT_ZERO] = setting(
        0, "Number of decode nodes.", "1, or with --mode colocated 1 + --prefill"
    )
    devices: Devices = setting(
        (), "GPUs, as in cuda:0,cuda:1, assigned in turn to prefill nodes, then decode nodes.", "--device for all"
    )
    engines: Engines = setting(
        (), "URLs of running vLLM or SGLang servers, separated by commas; each becomes a node.", "start nodes"
    )
    steps_sockets: Names = setting(
        (), "For each of --engines, the Unix socket on which vLLM's plugin reports its steps.", "no steps"
    )
    registry_host: Host = Field(default="127.0.0.1", description="Address that nodes join at.")
    registry_port: Port = setting(0, "Port that nodes join at.", "any free port")

    @model_validator(mode="after")
    def _check_node_timeout(self) -> "LocalSettings":
        if self.node_timeout_s <= 2 * self.heartbeat_s:
            raise ValueError("--node-timeout-s must be over twice --heartbeat-s, otherwise live nodes count as lost")
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> "LocalSettings":
        if self.engines and not self.model:
            raise ValueError("--engines: give --model too, the directory or hub id of the model that the servers have")
        if self.engines and (others := self.model_fields_set & OF_OUR_NODES):
            flags = ", ".join(sorted(map(flag_of, others)))
            raise ValueError(f"--engines: each server becomes one node with its own settings; leave out {flags}")
        if self.engines and (self.num_nodes()[1] < 1 or self.decode not in {0, self.num_nodes()[1]}):
            raise ValueError(
                f"--prefill and --decode: must add up to {len(self.engines)}, the number of --engines; the first "
                "engines become the prefill nodes"
            )
        if len(self.steps_sockets) not in {0, len(self.engines)}:
            raise ValueError("--steps-sockets: give one socket for each of --engines")
        if self.engines and self.ttft_slo_ms and not self.steps_sockets:
            raise ValueError("--ttft-slo-ms: needs --steps-sockets, because TTFT is predicted from the servers' steps")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> "LocalSettings":
        if self.devices and self.device not in {"auto", "cuda"}:
            raise ValueError(
                f"--devices {','.join(self.devices)}: sets where nodes compute; leave out --device {self.device}"
            )
        if len(self.devices) > self.num_all_nodes():
            raise ValueError(
                f"--devices {','.join(self.devices)}: there are only {self.num_all_nodes()} nodes; name fewer GPUs, "
                "or give --prefill and --decode"
            )
        if self.kv_channel == "pool":
            num_prefill = self.num_nodes()[0]
            decode = Counter(self.places()[num_prefill:])
            if shared := [device for device, count in decode.items() if count > 1]:
                raise ValueError(
                    f"--kv-channel pool: only one decode node per device can share its pool; {shared[0]} has several"
                )
            if alone := [device for device in self.places()[:num_prefill] if device not in decode]:
                raise ValueError(f"--kv-channel pool: the prefill node on {alone[0]} needs a decode node on {alone[0]}")
        return self

    def places(self) -> list[str]:
        """Return the devices of the nodes: prefill nodes first, then decode nodes, then the nodes of --more-models."""
        devices = self.devices or (self.device,)
        return [devices[number % len(devices)] for number in range(self.num_all_nodes())]

    def num_all_nodes(self) -> int:
        return sum(self.num_nodes()) + len(self.more_models)

    def num_nodes(self) -> tuple[int, int]:
        """Return the number of prefill nodes and the number of decode nodes that serve `model`."""
        if self.engines:
            prefill = self.prefill if "prefill" in self.model_fields_set and self.mode != "colocated" else 0
            return prefill, len(self.engines) - prefill
        if self.mode == "colocated":
            return 0, self.decode or 1 + self.prefill
        return self.prefill, self.decode or 1


class RaySettings(LocalSettings):
    """The cluster on Ray"""

    host: Host = setting("0.0.0.0", "Address that all processes listen on.")
    port: Annotated[int, Field(ge=1, le=65535)] = setting(8000, "Port of the API.")
    registry_host: Host = setting("0.0.0.0", "Address that nodes join at.")
    registry_port: Annotated[int, Field(ge=1, le=65535)] = setting(8001, "Port that nodes join at.")
    routers: Annotated[int, Field(ge=1, le=64)] = setting(
        1, "Number of routers. Router n listens at --port + 2n, and nodes join it at --registry-port + 2n."
    )
    placement: Literal["spread", "label", "gpu"] = setting(
        "spread",
        "Where processes run: spread: on all hosts; label: on hosts with the Ray label baton.role=router, prefill or "
        "decode; gpu: each node on a host with a free GPU.",
    )

    @model_validator(mode="after")
    def _check_placement(self) -> "RaySettings":
        if self.devices:
            raise ValueError("--devices: Ray assigns the GPUs; use --placement gpu")
        return self


class DoctorSettings(LocalSettings):
    """The checks"""

    url: Annotated[str, AfterValidator(base_url)] = setting(
        "", "URL of a running cluster to check instead.", "check small clusters on this machine"
    )
    api_key: str = Field(default="", repr=False, description="Admin key for the cluster of --url.")
    engine: EngineUrl = setting("", "URL of a vLLM server to check instead; see docs/engines.md.", "none")
    peer: EngineUrl = setting("", "URL of a second vLLM server, which exchanges KV with --engine.", "none")

    @model_validator(mode="after")
    def _check_peer(self) -> "DoctorSettings":
        if self.peer and not self.engine:
            raise ValueError("--peer: needs --engine, the URL of the first vLLM server")
        return self


@dataclass(frozen=True, slots=True)
class Child:
    """A process to start. `environment` is added to the variables that the process inherits (see `inherited`)."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


def plan(settings: LocalSettings, cores: Sequence[int]) -> list[Child]:
    """Return the processes of the router and the nodes. Nodes share `cores`. `settings.model` must be a directory."""
    sizes = zip(("prefill", "decode"), settings.num_nodes(), strict=True)
    nodes: list[tuple[str, str, dict[str, object]]] = [
        (role, f"{role}-{number}", {}) for role, size in sizes for number in range(size)
    ]
    for text in settings.more_models:  # each of these models has one node, which computes prompts and decodes
        model, _, directory = text.partition("=")
        other = {"model": directory, "served_model_name": model, "max_model_len": 0} | dict.fromkeys(OF_ONE_MODEL, "")
        base = f"decode-{re.sub('[^A-Za-z0-9_.-]', '-', model)[:40]}"
        names = chain([base], (f"{base}-{number}" for number in count(2)))
        nodes.append(("decode", next(name for name in names if all(name != node[1] for node in nodes)), other))
    places = settings.places()
    children = [_child(ROUTER, "router", _part(settings, RouterSettings, {}), num_threads=1)]
    host = "127.0.0.1" if settings.registry_host in EVERY_ADDRESS else settings.registry_host
    registry = settings.registry or f"{host}:{settings.registry_port}"
    if settings.engines:
        sockets = settings.steps_sockets or [""] * len(nodes)
        return children + [
            _proxy(settings, role, name, registry, {"engine": engine, "steps_socket": path})
            for (role, name, _), engine, path in zip(nodes, settings.engines, sockets, strict=True)
        ]
    for (role, name, other), cpus, device in zip(nodes, share_out(cores, len(nodes)), places, strict=True):
        num_threads = settings.threads or len(cpus) or 1
        # With Redis as registry, nodes on other machines may have the same names, so a name cannot be an id.
        own = {"id": "" if settings.registry else name, "host": "127.0.0.1", "port": 0, "threads": num_threads}
        own |= {"device": device, "gpu_memory_utilization": settings.gpu_memory_utilization / places.count(device)}
        node = _part(settings, NodeSettings, own | {"registry": registry} | other)
        children.append(_child(name, f"{role}_node", node.model_copy(update={"cpus": cpus}), num_threads))
    return children


def _proxy(settings: LocalSettings, role: str, name: str, registry: str, of_engine: dict[str, str]) -> Child:
    own: dict[str, object] = {"id": "" if settings.registry else name, "host": "127.0.0.1", "port": 0, "role": role}
    for field in ("max_num_seqs", "stuck_s"):  # a proxy's defaults differ from those of our nodes
        if field not in settings.model_fields_set:
            own[field] = ProxySettings.model_fields[field].default
    own |= {"registry": registry} | of_engine
    return _child(name, "proxy_node", _part(settings, ProxySettings, own), num_threads=1)


def share_out(cores: Sequence[int], num_nodes: int) -> list[tuple[int, ...]]:
    """Return a group of adjacent cores for each node, or empty groups if there are fewer cores than nodes."""
    if len(cores) < num_nodes:
        return [()] * num_nodes
    ends = [len(cores) * number // num_nodes for number in range(num_nodes + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(ends)]


def checked(settings: LocalSettings) -> LocalSettings:
    """Check the settings, the model's files and the ports. Return the settings with the model's directory and with free
    ports.

    Raises ConfigError if a node or the router could not start with the settings. The error names the wrong setting.
    """
    settings = with_model(settings)
    if not settings.engines:
        _check_nodes(settings)
    update: dict[str, object] = {
        "more_models": tuple(_checked_model(text, settings) for text in settings.more_models),
    }
    update["port"] = port = _free_port("port", settings.host, settings.port, settings.registry_port)
    if not settings.registry:
        update["registry_port"] = _free_port("registry_port", settings.registry_host, settings.registry_port, port)
        if update["registry_port"] == port:
            raise ConfigError(f"--registry-port {port}: is the same as --port; choose another port")
    return settings.model_copy(update=update)


def with_model(settings: LocalSettings) -> LocalSettings:
    """Return the settings with the model's directory and name. Raises ConfigError if a file cannot be used."""
    try:
        directory = resolve(settings.model) if settings.model else DEMO_MODEL
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from None
    _check_files(settings)
    if not (directory / "tokenizer.json").exists():
        raise ConfigError(f"--model {directory}: contains no tokenizer.json")
    # A downloaded model is served under its hub id, because the name of its directory is a hash.
    is_downloaded = bool(settings.model) and not Path(settings.model).expanduser().is_dir()
    name = settings.served_model_name or (settings.model if is_downloaded else "")
    return settings.model_copy(update={"model": str(directory.resolve()), "served_model_name": name})


def _checked_model(text: str, settings: LocalSettings) -> str:
    """Check an entry NAME=MODEL of --more-models. Return NAME=DIRECTORY with the path of the model's directory."""
    name, _, model = text.partition("=")
    try:
        directory = resolve(model).resolve()
        _check_nodes(settings.model_copy(update={"model": str(directory), "lora_modules": ()}))
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"--more-models {name}: {str(error).removeprefix('--model: ')}") from None
    return f"{name}={directory}"


def _check_nodes(settings: LocalSettings) -> None:
    """Run the checks that nodes make when they start, except those that need torch. Raises ConfigError."""
    from engine.options import BuildOptions, check_channel, check_options

    places = settings.places()
    pools = Counter(places[settings.num_nodes()[0] :] if settings.kv_channel == "pool" else places)
    try:
        for place in dict.fromkeys(places):
            options = BuildOptions.from_settings(settings, device=place)
            check_options(options, pools[place])
            check_channel(settings.kv_channel, options)
    except ValueError as error:
        flag = "--devices" if settings.devices else "--device"
        text = str(error).replace(f"--device {place}", f"{flag} {place}")
        raise ConfigError(text if text.startswith("--") else f"--model: {text}") from None


def _check_files(settings: LocalSettings) -> None:
    """Read the files of secrets and keys, and find the parsers, as the processes do when they start. Raises
    ConfigError."""
    from router.http.certificate import Certificate
    from router.text.tool_syntax import find_syntax
    from shared.rpc.tls import read_identity

    find_syntax(None, settings.tool_call_parser, settings.reasoning_parser)
    if settings.cluster_secret_file:
        read_identity(settings.cluster_secret_file)
    if settings.api_keys_file or settings.api_keys:
        from router.http.auth import ApiKeys

        ApiKeys(settings.api_keys_file, settings.api_keys)
    if settings.ssl_certfile:
        Certificate(settings.ssl_certfile, settings.ssl_keyfile).check()


SettingsKind = TypeVar("SettingsKind", bound=Settings)


def _part(settings: LocalSettings, kind: type[SettingsKind], own: dict[str, object]) -> SettingsKind:
    """Return the settings of one process. The settings in `own` are added to the common settings, or override them."""
    common = {name: getattr(settings, name) for name in kind.model_fields if name in LocalSettings.model_fields}
    return kind(**(common | own))


def _child(name: str, module: str, settings: Settings, num_threads: int) -> Child:
    environment = {**settings.environment(), "OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    return Child(name, (sys.executable, "-P", "-m", module), environment)


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child: without variables that are settings, and with Baton's PYTHONPATH."""
    settings = {
        variable_of(name) for kind in (LocalSettings, NodeSettings, ProxySettings) for name in kind.model_fields
    }
    settings |= set(VLLM_VARIABLES.values())
    kept = {name: value for name, value in environment.items() if name not in settings}
    if "OMP_WAIT_POLICY" not in kept:
        kept.setdefault("GOMP_SPINCOUNT", SPIN)
    return kept | {"PYTHONPATH": python_path(kept)}


def _free_port(name: str, host: str, port: int, taken: int = 0) -> int:
    """Return `port` or, if it is 0, any free port except `taken`. Raises ConfigError if `port` is in use.

    If `port` is 0, first try ports below the range that the system uses for outgoing connections, because an outgoing
    connection could take a port in that range before the router listens on it.
    """
    if port == 0:
        for candidate in random.sample([each for each in range(20_000, 32_000) if each != taken], 20):
            with suppress(ConfigError):
                return _free_port(name, host, candidate)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            given = f"{flag_of(name)} {port}" if is_taken else f"{flag_of(name.replace('port', 'host'))} {host}"
            text = f"{given}: cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(f"{text}; choose another port, or 0 for any" if is_taken else text) from None
        return int(probe.getsockname()[1])
