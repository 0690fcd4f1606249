"""What a node reports about itself: `NodeInfo` when it joins the registry, `NodeStats` at each heartbeat."""

import os
import platform
import socket
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from engine.components import EngineComponents
from engine.runner import Runner
from node.output_publisher import OutputPublisher
from node.recorder import StepRecorder
from node.router_sessions import RouterSessions
from scheduler.budget import Budget
from scheduler.request import RequestState
from scheduler.role import Role
from scheduler.scheduler import Scheduler
from shared.config.settings import EVERY_ADDRESS, NodeSettings
from shared.rpc.messages import NodeInfo, NodeStats
from shared.rpc.methods import host_and_port


@dataclass(slots=True)
class NodeState:
    """Whether the node takes requests, and why not. Belongs to the event loop."""

    info: NodeInfo  # replaced when the node drains, changes its role or learns its address
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
        """The reason why new requests are rejected; empty when they are accepted."""
        if self.info.state != "ready":
            return "this node is draining"
        if self.is_stuck:
            return "this node is stuck"
        error = self.publisher.ledger_error
        return error and f"this node's block ledger is broken: {error}"


@dataclass(slots=True)
class HandoffCounters:
    """Counts of handoffs since the process started, in both roles; the fields are those of `NodeStats`."""

    handoffs: int = 0
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)
    channel_fallbacks: int = 0
    transfer: list[float] = field(default_factory=list)
    rows_corrupt: int = 0


@dataclass(frozen=True, slots=True)
class StatsCollector:
    """Collects `NodeStats` on the event loop from the objects that count.

    Reads only numbers of the scheduler and the runner, which belong to the engine's thread.
    """

    state: NodeState
    scheduler: Scheduler
    runner: Runner
    sessions: RouterSessions
    recorder: StepRecorder
    counters: HandoffCounters

    def collect(self) -> NodeStats:
        snapshot = self.state.publisher.snapshot
        ledger, steps, cost, handoffs = snapshot.ledger, self.scheduler.counters, self.scheduler.cost, self.counters
        requests = tuple(self.scheduler.requests.values())
        return NodeStats(
            state=self.state.name,
            running=snapshot.running,
            waiting=snapshot.waiting,
            waiting_tokens=sum(
                len(request.tokens)
                for request in requests
                if request.state is RequestState.WAITING and not request.receive_kv
            ),
            blocks_free=ledger.free,
            blocks_cached=ledger.cached,
            blocks_owned=ledger.owned,
            blocks_reserved=ledger.reserved,
            blocks_quarantined=ledger.quarantined,
            blocks_total=ledger.total,
            steps=steps.steps,
            prompt_tokens=steps.prompt_tokens,
            generated_tokens=steps.generated_tokens,
            cache_queries=steps.cache_queries,
            cache_hits=steps.cache_hits,
            preemptions=steps.preemptions,
            handoffs=handoffs.handoffs,
            handoffs_failed=handoffs.handoffs_failed,
            blocks_moved=handoffs.blocks_moved,
            bytes_moved=handoffs.bytes_moved,
            channels=dict(handoffs.channels),
            channel_fallbacks=handoffs.channel_fallbacks,
            cost=cost.packed() if cost is not None else [],
            transfer=list(handoffs.transfer),
            records_dropped=self.sessions.dropped_records + self.recorder.dropped,
            overruns=self.runner.overruns,
            rows_corrupt=handoffs.rows_corrupt,
            ledger_error=self.state.publisher.ledger_error,
            incarnation_id=self.state.info.incarnation_id,
        )


def describe(
    settings: NodeSettings,
    role: Role,
    components: EngineComponents,
    budget: Budget,
    incarnation_id: str,
    shared_pool_owner: str = "",
) -> NodeInfo:
    """Build the node's `NodeInfo`; its address is filled in once the RPC server is bound.

    `shared_pool_owner` is the incarnation id of the decode node in whose KV pool this node computes.
    """
    layout = components.layout
    return NodeInfo(
        id=settings.id or f"{role.name}-{socket.gethostname()}-{os.getpid()}",
        incarnation_id=incarnation_id,
        role=role.name,
        address="",
        model=settings.model,
        fingerprint=components.fingerprint,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_blocks=layout.num_blocks,
        max_model_len=components.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        version=_version(),
        attributes=_attributes(settings, components, budget),
        shared_pool_owner=shared_pool_owner,
    )


def advertised(settings: NodeSettings) -> str:
    """Return the host at which others reach this node.

    A node that listens on every address advertises the one that routes to the registry, in the same address family.
    Raises ValueError when there is none.
    """
    if settings.advertise or settings.host not in EVERY_ADDRESS:
        return settings.advertise or settings.host
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    if "://" in settings.registry:
        registry = urlsplit(settings.registry)
        host, port = registry.hostname or "localhost", registry.port or 6379
    else:
        host, port = host_and_port(settings.registry)
    try:
        target = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # selects a source address; no packet is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        other = "0.0.0.0" if family is socket.AF_INET6 else "::"
        raise ValueError(
            f"--host {settings.host}: no route to --registry {host} ({error.strerror}): set --advertise to an address "
            f"at which others reach this node, or try --host {other}"
        ) from None


def _attributes(settings: NodeSettings, components: EngineComponents, budget: Budget) -> dict[str, str]:
    """Return the settings that must be equal for two nodes to be compared, and those that placement uses."""
    return components.attributes | {
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
