"""Prometheus metrics from the dispatcher's status and from the latest reports of the nodes.

The time series of nodes that have left are dropped. Label values are node ids, roles and members of fixed sets.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.metrics.request_metrics import metric_family
from shared.config.speculation import MAX_SPECULATIVE_TOKENS
from shared.rpc.messages import NodeInfo, NodeStats

NodeRow = tuple[NodeInfo, NodeStats, bool]
LABELS = ("engine", "role", "model_name")
ROLES, STATES = ("prefill", "decode"), ("ready", "draining", "breached", "stuck", "lost")
MAX_REASONS = 64  # maximum number of placement reasons that are exported as labels


def _usage(stats: NodeStats) -> float:
    used = stats.blocks_owned + stats.blocks_reserved + stats.blocks_quarantined
    return used / stats.blocks_total if stats.blocks_total else 0.0


# Metrics from the nodes' stats: the name, the value (an attribute or a function of the stats) and the help text. A
# metric that vLLM also has keeps vLLM's name, so that vLLM's dashboards work.
STATS: tuple[tuple[str, str | Callable[[NodeStats], float], str], ...] = (
    ("vllm:num_requests_running", "running", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "waiting", "Requests waiting for blocks or a slot."),
    ("vllm:kv_cache_usage_perc", _usage, "Share of KV blocks in use, from 0 to 1."),
    ("vllm:gpu_cache_usage_perc", _usage, "Alias of vllm:kv_cache_usage_perc, which vLLM's published dashboard uses."),
    ("baton_waiting_tokens", "waiting_tokens", "Prompt tokens of waiting requests."),
    ("baton_kv_blocks_free", "blocks_free", "Free KV blocks."),
    ("baton_kv_blocks_cached", "blocks_cached", "KV blocks that only the prefix cache holds."),
    ("baton_kv_blocks_owned", "blocks_owned", "KV blocks owned by requests."),
    ("baton_kv_blocks_reserved", "blocks_reserved", "KV blocks reserved for an incoming handoff."),
    ("baton_kv_blocks_quarantined", "blocks_quarantined", "KV blocks withheld because a peer may still write to them."),
    ("baton_kv_ledger_broken", lambda stats: bool(stats.ledger_error), "1 if the block ledger is inconsistent."),
    ("vllm:prefix_cache_queries_total", "cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits_total", "cache_hits", "Prompt tokens found in the prefix cache."),
    ("vllm:num_preemptions_total", "preemptions", "Requests preempted."),
    ("vllm:nixl_num_failed_transfers_total", "handoffs_failed", "Handoffs that ended without a commit."),
    ("vllm:spec_decode_num_drafts_total", "num_drafts", "Decodes that verified guessed tokens."),
    ("vllm:spec_decode_num_draft_tokens_total", "draft_tokens", "Guessed tokens that were verified."),
    ("vllm:spec_decode_num_accepted_tokens_total", "accepted_tokens", "Guessed tokens that were right."),
    ("baton_images_encoded_total", "images_encoded", "Images that the vision module encoded."),
    ("baton_images_cached_total", "images_cached", "Images whose features were still in memory."),
    ("baton_steps_total", "steps", "Steps run."),
    ("baton_prompt_tokens_computed_total", "prompt_tokens", "Prompt tokens computed."),
    ("baton_tokens_generated_total", "generated_tokens", "Tokens generated."),
    ("baton_handoffs_total", "handoffs", "Requests handed to a decode node."),
    ("baton_kv_blocks_moved_total", "blocks_moved", "KV blocks pushed to decode nodes."),
    ("baton_kv_transfer_bytes_total", "bytes_moved", "Bytes pushed to decode nodes."),
    ("baton_channel_fallbacks_total", "channel_fallbacks", "Peers connected over a slower KV channel than configured."),
    ("baton_kv_rows_corrupt_total", "rows_corrupt", "KV rows that failed their checksum."),
    ("baton_records_dropped_total", "records_dropped", "Step records and events that a node dropped before sending."),
)
# Metrics from the request counts in the dispatcher's status: the name and the help text, by the key of the count.
COUNTS = {
    "moved": ("baton_request_migrations_total", "Attempts migrated to another node."),
    "refused": ("baton_requests_rejected_total", "Requests refused before any node received them."),
    "retried": ("baton_requests_retried_total", "Attempts retried without the loss of a node."),
    "paused": ("baton_client_backpressure_total", "Attempts ended because a client did not read."),
}


class NodeMetrics(Collector):
    """A Prometheus collector of nodes' last reported stats and of the dispatcher's status. Runs on the event loop."""

    def __init__(
        self, nodes: Callable[[], list[NodeRow]], model_name: str, status: Callable[[], Mapping[str, Any]]
    ) -> None:
        """`nodes` lists the known nodes; `status` returns the dispatcher's status."""
        self._nodes = nodes
        self._model_name = model_name
        self._status = status

    def collect(self) -> Iterable[Metric]:
        rows = self._nodes()
        alive = [row for row in rows if row[2]]  # the gauges of a lost node are stale
        for name, value, text in STATS:
            shown = rows if name.endswith("_total") else alive
            yield self._of_nodes(name, text, [(info, _value(stats, value)) for info, stats, _ in shown])
        yield self._accepted_per_pos(rows)
        yield self._of_nodes(
            "baton_node_alive", "Whether the node's stream is connected.", [(info, up) for info, _, up in rows]
        )
        states = Counter((info.role, stats.state if up else "lost") for info, stats, up in rows)
        pools = [((role, state, self._model_name), states[role, state]) for role in ROLES for state in STATES]
        text = "Nodes of a role, by state. A lost node is counted for ten minutes."
        yield metric_family("baton_pool_nodes", text, ["role", "state", "model_name"], pools)
        yield from self._from_status()

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return info.id, info.role, self._model_name

    def _of_nodes(self, name: str, text: str, values: Iterable[tuple[NodeInfo, float]]) -> Metric:
        return metric_family(name, text, LABELS, ((self._labels(info), value) for info, value in values))

    def _accepted_per_pos(self, rows: Iterable[NodeRow]) -> Metric:
        counts = [
            ((*self._labels(info), str(place)), float(count))
            for info, stats, _ in rows
            for place, count in enumerate(stats.accepted_per_pos[:MAX_SPECULATIVE_TOKENS])
        ]
        text = "Guessed tokens that were right, by place in the guess."
        return metric_family("vllm:spec_decode_num_accepted_tokens_per_pos_total", text, (*LABELS, "position"), counts)

    def _from_status(self) -> Iterable[Metric]:
        status, model = self._status(), (self._model_name,)
        placements = [((*model, reason), count) for reason, count in list(status["placements"].items())[:MAX_REASONS]]
        text = "Attempts, by placement reason."
        yield metric_family("baton_placements_total", text, ["model_name", "reason"], placements)
        values = [(name, text, status["requests"].get(key, 0)) for key, (name, text) in COUNTS.items()]
        queue = status.get("queue", {})
        values += [
            ("baton_queue_requests", "Samples queued in the router.", queue.get("requests", 0)),
            ("baton_queue_tokens", "Prompt and answer tokens queued in the router.", queue.get("tokens", 0)),
        ]
        for name, text, value in values:
            yield metric_family(name, text, ["model_name"], [(model, value)])


def _value(stats: NodeStats, value: str | Callable[[NodeStats], float]) -> float:
    return float(getattr(stats, value) if isinstance(value, str) else value(stats))
