"""The status of the cluster for `/v1/status`."""

from collections.abc import Iterable
from dataclasses import dataclass

from router.metrics.request_metrics import SloTargets
from shared.rpc.messages import NodeInfo, NodeStats


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    kind: str
    state: str


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The nodes of the pool, and the totals of all handoffs, including those of nodes that have left."""

    mode: str
    registry: RegistryStatus
    nodes: list[dict[str, object]]  # see `node_status`
    handoffs: int
    blocks_moved: int
    bytes_moved: int


def node_status(info: NodeInfo, stats: NodeStats, alive: bool) -> dict[str, object]:
    return {
        "id": info.id,
        "role": info.role,
        "address": info.address,
        "state": stats.state if alive else "lost",
        "alive": alive,
        "fingerprint": info.fingerprint,
        "running": stats.running,
        "waiting": stats.waiting,
        "blocks": {
            "free": stats.blocks_free,
            "cached": stats.blocks_cached,
            "owned": stats.blocks_owned,
            "reserved": stats.blocks_reserved,
            "quarantined": stats.blocks_quarantined,
            "total": stats.blocks_total,
        },
        "block_bytes": info.block_bytes,
        "block_tokens": info.block_tokens,
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "preemptions": stats.preemptions,
        "handoffs": stats.handoffs,
        "handoffs_failed": stats.handoffs_failed,
        "blocks_moved": stats.blocks_moved,
        "bytes_moved": stats.bytes_moved,
        "channels": stats.channels,
        "channel_fallbacks": stats.channel_fallbacks,
        "facts": info.attributes,
        "cost": stats.cost or None,
        "records_dropped": stats.records_dropped,
        "overruns": stats.overruns,
        "rows_corrupt": stats.rows_corrupt,
        "breach": stats.ledger_error,
    }


def promised(ttft_slo_ms: float, nodes: Iterable[NodeInfo]) -> SloTargets:
    """Return the SLO targets: the router's for the first token, the strictest decode node's for the other tokens."""
    values = [info.attributes.get("tbt_slo_ms", "0") for info in nodes if info.role == "decode"]
    tbt_ms = [value for text in values if (value := _number(text)) > 0]
    return SloTargets(ttft_slo_ms / 1000, min(tbt_ms, default=0.0) / 1000)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
