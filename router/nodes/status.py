"""How `/v1/status` shows the cluster."""

from collections.abc import Iterable
from typing import Any

from router.history.bottleneck import bottleneck
from router.history.history import NodeActivity, RequestHistory
from router.metrics.request_metrics import RequestMetrics, SloTargets
from shared.rpc.messages import NodeInfo, NodeStats


def node_status(info: NodeInfo, load: NodeStats, alive: bool) -> dict[str, object]:
    return {
        "id": info.id,
        "role": info.role,
        "address": info.address,
        "state": load.state if alive else "lost",
        "alive": alive,
        "fingerprint": info.fingerprint,
        "running": load.running,
        "waiting": load.waiting,
        "blocks": {
            "free": load.blocks_free,
            "cached": load.blocks_cached,
            "owned": load.blocks_owned,
            "reserved": load.blocks_reserved,
            "quarantined": load.blocks_quarantined,
            "total": load.blocks_total,
        },
        "block_bytes": info.block_bytes,
        "block_tokens": info.block_tokens,
        "steps": load.steps,
        "prompt_tokens": load.prompt_tokens,
        "generated_tokens": load.generated_tokens,
        "preemptions": load.preemptions,
        "handoffs": load.handoffs,
        "handoffs_failed": load.handoffs_failed,
        "blocks_moved": load.blocks_moved,
        "bytes_moved": load.bytes_moved,
        "channels": load.channels,
        "channel_fallbacks": load.channel_fallbacks,
        "facts": info.attributes,
        "cost": load.cost or None,
        "records_dropped": load.records_dropped,
        "overruns": load.overruns,
        "rows_corrupt": load.rows_corrupt,
        "breach": load.ledger_error,
    }


def whole_status(status: dict[str, Any], records: RequestHistory, requests: RequestMetrics) -> dict[str, Any]:
    """`/v1/status`: what dispatch says, what nodes did in the last seconds, what clients had in the last minute."""
    nodes = [
        node | {"clock_offset_ms": records.offset_ms(node["id"])} | _activity(records.activity(node["id"]))
        for node in status["nodes"]
    ]
    whole = status | {"nodes": nodes, "latency": requests.latency()}
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
    """What clients may expect: the router's own word on the first token, the strictest decode node's on the rest."""
    told = [info.attributes.get("tbt_slo_ms", "0") for info in nodes if info.role == "decode"]
    tbt_ms = [value for text in told if (value := _number(text)) > 0]
    return SloTargets(ttft_slo_ms / 1000, min(tbt_ms, default=0.0) / 1000)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
