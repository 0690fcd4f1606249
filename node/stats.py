"""What a node reports about itself: whether it accepts requests, and its `NodeInfo` for the registry."""

import logging
import os
import platform
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from engine.startup import EngineComponents
from node.output_publisher import OutputPublisher
from scheduler.budget import Budget
from scheduler.geometry import Geometry
from scheduler.role import Role
from shared.config.settings import EVERY_ADDRESS, NodeSettings
from shared.lifecycle import in_container
from shared.registry import RESOLVE_INTERVAL_S
from shared.resolver import is_address
from shared.rpc.connection import host_and_port
from shared.rpc.messages import NodeInfo
from shared.version import package_version

log = logging.getLogger("baton.node")
ATTRIBUTES = (  # settings that `NodeInfo.attributes` contains
    "policy",
    "max_num_batched_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "speculative_config",
)


@dataclass(slots=True)
class NodeState:
    """Whether the node accepts requests, and the reason if it does not. Used on the event loop."""

    info: NodeInfo  # replaced with a new one when the node drains, changes its role or gets its address
    publisher: OutputPublisher
    is_stuck: bool = False

    @property
    def name(self) -> str:
        """The value of `NodeStats.state`."""
        if self.is_stuck:
            return "stuck"
        return "breached" if self.publisher.ledger_error else self.info.state

    @property
    def refusal(self) -> str:
        """The reason why new requests are rejected; "" if they are accepted."""
        if self.info.state != "ready":
            return "this node is draining"
        if self.is_stuck:
            return "this node is stuck"
        error = self.publisher.ledger_error
        return error and f"this node's block ledger is broken: {error}"


def describe(
    settings: NodeSettings,
    role: Role,
    components: EngineComponents,
    budget: Budget,
    incarnation_id: str,
    shared_pool_owner: str = "",
) -> NodeInfo:
    """Build the node's `NodeInfo`, without the address, which is set once the RPC server listens.

    `shared_pool_owner` is the incarnation id of the decode node in whose KV pool this node computes.
    """
    layout = components.layout
    geometry = Geometry(layout.block_tokens, components.groups)
    return NodeInfo(
        id=settings.id or _default_id(role),
        incarnation_id=incarnation_id,
        role=role.name,
        address="",
        model=settings.model,
        fingerprint=components.fingerprint,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_blocks=1 + geometry.capacity(layout.num_blocks, settings.max_num_batched_tokens, components.max_model_len),
        max_model_len=components.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        version=package_version(),
        attributes=_attributes(settings, components, budget),
        shared_pool_owner=shared_pool_owner,
        adapters=components.adapters,
    )


def _default_id(role: Role) -> str:
    """Return a name that no other node has. A restarted container keeps the name, which ends with its host name."""
    name = f"{role.name}-{socket.gethostname()}"
    is_main_process = 1 in (os.getpid(), os.getppid())  # with `init`, the main process is the child of process 1
    return name if in_container() and is_main_process else f"{name}-{os.getpid()}"


def advertised(settings: NodeSettings) -> str:
    """Return the host at which others reach this node.

    A node that listens on every address advertises the local address from which it reaches the registry. The address
    family is that of `settings.host`. Waits until the name of the registry resolves, because the routers may start
    later. Raises ValueError if there is no route to the registry.
    """
    if settings.advertise or settings.host not in EVERY_ADDRESS:
        return settings.advertise or settings.host
    if "://" in settings.registry:
        registry = urlsplit(settings.registry)
        host, port = registry.hostname or "localhost", registry.port or 6379
    else:
        host, port = host_and_port(settings.registry)
    is_logged = False
    while True:
        try:
            return _route_to(host, port, socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
        except OSError as error:
            other = "0.0.0.0" if ":" in settings.host else "::"
            problem = (
                f"--host {settings.host}: no route to --registry {host} ({error.strerror}): set --advertise to an "
                f"address at which others reach this node, or try --host {other}"
            )
            if is_address(host) or not isinstance(error, socket.gaierror):
                raise ValueError(problem) from None
        if not is_logged:
            log.warning("%s; waiting until the name resolves", problem)
        is_logged = True
        time.sleep(RESOLVE_INTERVAL_S)


def _route_to(host: str, port: int, family: socket.AddressFamily) -> str:
    """Return the local address from which packets to the host are sent. Raises OSError if there is no route."""
    target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # selects a source address; no packet is sent
        return str(probe.getsockname()[0])


def _attributes(settings: NodeSettings, components: EngineComponents, budget: Budget) -> dict[str, str]:
    """Return the settings that compared nodes must share, and the settings that placement uses."""
    return {
        **components.attributes,
        **{name: str(getattr(settings, name)) for name in ATTRIBUTES},
        "cpus": str(len(os.sched_getaffinity(0))),
        "max_step_tokens": str(budget.ceiling),
        "tbt_slo_ms": f"{settings.tbt_slo_ms:g}",
        "prefix_caching": str(settings.enable_prefix_caching).lower(),
        "python": platform.python_version(),
    }
