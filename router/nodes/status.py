"""The status of the cluster for `/v1/status`."""

from collections.abc import Iterable, Mapping
from typing import Any

from dashboard.bottleneck import bottleneck
from dashboard.history import NodeActivity, RequestHistory
from router.metrics.request_metrics import RequestMetrics, SloTargets
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


def whole_status(status: Mapping[str, Any], records: RequestHistory, requests: RequestMetrics) -> dict[str, Any]:
    """Return the document of `/v1/status`. It has the dispatcher's status, the activity of each node in the last
    seconds, and the latencies of the last minute."""
    nodes = [
        node | {"clock_offset_ms": records.offset_ms(node["id"])} | _activity(records.activity(node["id"]))
        for node in status["nodes"]
    ]
    whole = dict(status) | {"nodes": nodes, "latency": requests.latency()}
    return whole | {"summary": bottleneck(whole)}


def _activity(activity: NodeActivity | None) -> dict[str, object]:
    if activity is None:
        batch = {"tokens": 0, "prefills": 0, "decodes": 0}
        return {"steps_per_s": 0.0, "tokens_per_s": 0.0, "busy": 0.0, "batch": batch, "budget": 0, "budget_reason": ""}
    last = activity.last
    return {
        "steps_per_s": round(activity.steps_per_s, 1),
        "tokens_per_s": round(activity.tokens_per_s, 1),
        "busy": round(activity.busy, 6),
        "batch": {
            "tokens": last.prefill_tokens + last.num_decodes,
            "prefills": last.num_prefills,
            "decodes": last.num_decodes,
        },
        "budget": last.budget,
        "budget_reason": activity.reason,
    }


def promised(ttft_slo_ms: float, nodes: Iterable[NodeInfo]) -> SloTargets:
    """Return the SLO targets: the router's for the first token, the strictest decode node's for the other tokens."""
    tbt_ms = [slo for info in nodes if info.role == "decode" and (slo := attribute(info, "tbt_slo_ms", 0.0)) > 0]
    return SloTargets(ttft_slo_ms / 1000, min(tbt_ms, default=0.0) / 1000)
