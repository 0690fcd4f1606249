"""The state that a node reports: whether it accepts requests, and its `NodeInfo` for the registry."""

import os
import platform
from dataclasses import dataclass

from engine.startup import EngineComponents
from node.identity import default_id
from node.output_publisher import OutputPublisher
from scheduler.budget import Budget
from scheduler.geometry import Geometry
from scheduler.role import Role
from shared.config.settings import NodeSettings
from shared.model_files import served_name
from shared.rpc.messages import NodeInfo
from shared.version import package_version

ATTRIBUTES = (  # settings that `NodeInfo.attributes` contains
    "policy",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "max_num_partial_prefills",
    "speculative_config",
)


@dataclass(slots=True)
class NodeState:
    """Whether the node accepts requests and, if not, why. Used on the event loop."""

    info: NodeInfo  # replaced with a new one when the node drains, changes its role or gets its address
    publisher: OutputPublisher
    is_stuck: bool = False

    @property
    def name(self) -> str:
        """The value of `NodeStats.state`."""
        if self.is_stuck:
            return "stuck"
        return "breached" if self.publisher.ledger_error else self.info.state

    def refusal(self, *, is_handoff: bool = False) -> str:
        """Return the reason why new requests are rejected; "" if they are accepted.

        A draining node accepts handoffs, because routers placed these requests on the node before it drained.
        """
        if self.info.state != "ready" and not is_handoff:
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
    """Build the node's `NodeInfo` without the address, which is set later, when the RPC server listens.

    `shared_pool_owner` is the incarnation id of the decode node in whose KV pool this node computes.
    """
    layout = components.layout
    geometry = Geometry(layout.block_tokens, components.groups)
    return NodeInfo(
        id=settings.id or default_id(role.name),
        incarnation_id=incarnation_id,
        role=role.name,
        address="",
        model=served_name(settings.model, settings.served_model_name),
        fingerprint=components.fingerprint,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        num_blocks=1 + geometry.capacity(layout.num_blocks, budget.ceiling, components.max_model_len),
        max_model_len=components.max_model_len,
        max_num_seqs=components.max_num_seqs,
        version=package_version(),
        attributes=_attributes(settings, components, budget),
        shared_pool_owner=shared_pool_owner,
        adapters=components.adapters,
    )


def _attributes(settings: NodeSettings, components: EngineComponents, budget: Budget) -> dict[str, str]:
    """Return the settings and versions that must be equal on nodes that are compared, and those that placement uses."""
    return {
        **components.attributes,
        **{name: str(getattr(settings, name)) for name in ATTRIBUTES},
        "max_num_seqs": str(components.max_num_seqs),
        "images": str(components.images is not None).lower(),
        "cpus": str(len(os.sched_getaffinity(0))),
        "max_step_tokens": str(budget.ceiling),
        "tbt_slo_ms": f"{settings.tbt_slo_ms:g}",
        "recurrent": str(any(group.kind == "state" for group in components.groups)).lower(),
        "prefix_caching": str(settings.enable_prefix_caching).lower(),
        "python": platform.python_version(),
    }
