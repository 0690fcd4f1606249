"""The status of the cluster for `/v1/status`."""

from collections.abc import Iterable
from typing import Any

from router.metrics.request_metrics import SloTargets
from router.nodes.load import attribute
from shared.rpc.messages import NodeInfo, NodeStats

INFO = ("id", "role", "address", "fingerprint", "block_bytes", "block_tokens")
STATS = (
    *("running", "waiting", "steps", "prompt_tokens", "generated_tokens", "preemptions", "handoffs", "handoffs_failed"),
    *("blocks_moved", "bytes_moved", "channels", "channel_fallbacks", "records_dropped", "overruns", "rows_corrupt"),
)
BLOCKS = ("free", "cached", "owned", "reserved", "quarantined", "total")


def node_status(info: NodeInfo, stats: NodeStats, alive: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {name: getattr(info, name) for name in INFO} | {
        name: getattr(stats, name) for name in STATS
    }
    return shown | {
        "state": stats.state if alive else "lost",
        "alive": alive,
        "blocks": {name: getattr(stats, f"blocks_{name}") for name in BLOCKS},
        "facts": info.attributes,
        "cost": stats.cost or None,
        "breach": stats.ledger_error,
    }


def promised(ttft_slo_ms: float, nodes: Iterable[NodeInfo]) -> SloTargets:
    """Return the SLO targets: the router's for the first token, the strictest decode node's for the other tokens."""
    tbt_ms = [slo for info in nodes if info.role == "decode" and (slo := attribute(info, "tbt_slo_ms", 0.0)) > 0]
    return SloTargets(ttft_slo_ms / 1000, min(tbt_ms, default=0.0) / 1000)
