"""Prometheus metrics from the statistics of nodes. A node exports its own metrics, and the router those of all nodes.

Label values are node ids, roles, positions of guessed tokens, and the name of the model.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.config.speculation import MAX_SPECULATIVE_TOKENS
from shared.rpc.messages import NodeInfo, NodeStats

NodeRow = tuple[NodeInfo, NodeStats, bool]  # the bool says whether the node is alive
LABELS = ("engine", "role", "model_name")


def _usage(stats: NodeStats) -> float:
    used = stats.blocks_owned + stats.blocks_reserved + stats.blocks_quarantined
    return used / stats.blocks_total if stats.blocks_total else 0.0


# For each metric: the name, the value (an attribute or a function of `NodeStats`) and the help text. A metric that vLLM
# also has keeps vLLM's name, so that vLLM's dashboards work.
STATS: tuple[tuple[str, str | Callable[[NodeStats], float], str], ...] = (
    ("vllm:num_requests_running", "running", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "waiting", "Requests waiting for blocks or a slot."),
    ("vllm:kv_cache_usage_perc", _usage, "Share of KV blocks in use, from 0 to 1."),
    ("vllm:gpu_cache_usage_perc", _usage, "Alias of vllm:kv_cache_usage_perc, for vLLM's published dashboard."),
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
    ("baton_images_fetched_total", "images_fetched", "Images whose features another node computed."),
    ("baton_steps_total", "steps", "Steps run."),
    ("baton_prompt_tokens_computed_total", "prompt_tokens", "Prompt tokens computed."),
    ("baton_tokens_generated_total", "generated_tokens", "Tokens generated."),
    ("baton_handoffs_total", "handoffs", "Requests handed to a decode node."),
    ("baton_kv_blocks_moved_total", "blocks_moved", "KV blocks pushed to decode nodes."),
    ("baton_kv_transfer_bytes_total", "bytes_moved", "Bytes pushed to decode nodes."),
    (
        "baton_channel_fallbacks_total",
        "channel_fallbacks",
        "Connections to peers over a slower KV channel, because a faster one did not work.",
    ),
    ("baton_kv_rows_corrupt_total", "rows_corrupt", "KV rows that failed their checksum."),
    ("baton_records_dropped_total", "records_dropped", "Step records and events that a node dropped before sending."),
)


def metric_family(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return a counter if the name ends with "_total", and a gauge otherwise."""
    family = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def labels_of(info: NodeInfo, model_name: str) -> tuple[str, str, str]:
    """Return the values of LABELS."""
    return info.id, info.role, model_name


def stats_families(rows: Sequence[NodeRow], model_name: str) -> Iterable[Metric]:
    """Yield the metrics of the nodes. Omit the gauges of lost nodes, because their values are out of date."""
    for name, value, text in STATS:
        shown = [row for row in rows if row[2] or name.endswith("_total")]
        yield metric_family(
            name, text, LABELS, ((labels_of(info, model_name), _value(stats, value)) for info, stats, _ in shown)
        )
    counts = [
        ((*labels_of(info, model_name), str(place)), float(count))
        for info, stats, _ in rows
        for place, count in enumerate(stats.accepted_per_pos[:MAX_SPECULATIVE_TOKENS])
    ]
    text = "Guessed tokens that were right, by place in the guess."
    yield metric_family("vllm:spec_decode_num_accepted_tokens_per_pos_total", text, (*LABELS, "position"), counts)


def _value(stats: NodeStats, value: str | Callable[[NodeStats], float]) -> float:
    return float(getattr(stats, value) if isinstance(value, str) else value(stats))
