"""What a node says of itself: where others reach it, what it holds, and what shapes its speed."""

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from engine.options import EngineComponents
from scheduler.budget import Budget
from scheduler.role import Role
from shared.config.settings import EVERY_ADDRESS, NodeSettings
from shared.rpc.messages import NodeInfo
from shared.rpc.methods import host_and_port


def advertised(settings: NodeSettings) -> str:
    """Where others reach this node. Listening on every address, it is the one towards the registry, of the kind that
    is listened on. Raises ValueError where there is none."""
    if settings.advertise or settings.host not in EVERY_ADDRESS:
        return settings.advertise or settings.host
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    if "://" in settings.registry:
        registry = urlsplit(settings.registry)
        host, port = registry.hostname or "localhost", registry.port or 6379
    else:
        host, port = host_and_port(settings.registry)
    try:
        place = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        other = "0.0.0.0" if family is socket.AF_INET6 else "::"
        raise ValueError(
            f"--host {settings.host}: no way leads from there to --registry {host} ({error.strerror}): say with "
            f"--advertise where others reach this node, or try --host {other}"
        ) from None


def describe(
    settings: NodeSettings, role: Role, computer: EngineComponents, budget: Budget, boot: str, pool_of: str
) -> NodeInfo:
    """Whose address is still to come. `pool_of`: the decode node in whose pool it computes, by its boot."""
    layout = computer.layout
    return NodeInfo(
        id=settings.id or f"{role.name}-{socket.gethostname()}-{os.getpid()}",
        incarnation_id=boot,
        role=role.name,
        address="",
        model=settings.model,
        fingerprint=computer.fingerprint,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_blocks=layout.num_blocks,
        max_model_len=computer.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        version=_version(),
        attributes=_facts(settings, computer, budget),
        shared_pool_owner=pool_of,
    )


def _facts(settings: NodeSettings, computer: EngineComponents, budget: Budget) -> dict[str, str]:
    """What else must be equal for two nodes to be compared, and what placement reckons with."""
    return computer.attributes | {
        "policy": settings.policy,
        "cpus": str(len(os.sched_getaffinity(0))),
        "max_num_batched_tokens": str(settings.max_num_batched_tokens),
        "max_step_tokens": str(budget.ceiling),
        "max_num_seqs": str(settings.max_num_seqs),
        "tbt_slo_ms": f"{settings.tbt_slo_ms:g}",
        "long_prefill_token_threshold": str(settings.long_prefill_token_threshold),
        "max_num_partial_prefills": str(settings.max_num_partial_prefills),
        "prefix_caching": str(settings.enable_prefix_caching).lower(),
        "python": platform.python_version(),
    }


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return ""
