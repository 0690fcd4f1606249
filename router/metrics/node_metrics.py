"""Metrics of nodes for Prometheus, from their last reported stats, and of the dispatcher.

The series of a node that left are dropped. Label values are node ids, roles and members of fixed sets.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.rpc.messages import NodeInfo, NodeStats

NodeRow = tuple[NodeInfo, NodeStats, bool]
LABELS = ("engine", "role", "model_name")
MAX_REASONS = 64  # of placements, exported as labels


def _usage(load: NodeStats) -> float:
    used = load.blocks_owned + load.blocks_reserved + load.blocks_quarantined
    return used / load.blocks_total if load.blocks_total else 0.0


# Gauges have vLLM's names if vLLM has them, so that its dashboards work.
GAUGES: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests waiting for blocks or a slot.", lambda load: load.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", _usage),
    ("vllm:gpu_cache_usage_perc", "Alias of vllm:kv_cache_usage_perc, which vLLM's published dashboard uses.", _usage),
    ("baton_waiting_tokens", "Prompt tokens of waiting requests.", lambda load: load.waiting_tokens),
    ("baton_kv_blocks_free", "Free KV blocks.", lambda load: load.blocks_free),
    ("baton_kv_blocks_cached", "KV blocks that only the prefix cache holds.", lambda load: load.blocks_cached),
    ("baton_kv_blocks_owned", "KV blocks owned by requests.", lambda load: load.blocks_owned),
    ("baton_kv_blocks_reserved", "KV blocks reserved for an incoming handoff.", lambda load: load.blocks_reserved),
    (
        "baton_kv_blocks_quarantined",
        "KV blocks withheld because a peer may still write to them.",
        lambda load: load.blocks_quarantined,
    ),
    ("baton_kv_ledger_broken", "1 if the block ledger is inconsistent.", lambda load: bool(load.ledger_error)),
)
COUNTERS: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda load: load.cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.cache_hits),
    ("vllm:num_preemptions", "Requests preempted.", lambda load: load.preemptions),
    ("vllm:nixl_num_failed_transfers", "Handoffs that ended without a commit.", lambda load: load.handoffs_failed),
    ("baton_steps", "Steps run.", lambda load: load.steps),
    ("baton_prompt_tokens_computed", "Prompt tokens computed.", lambda load: load.prompt_tokens),
    ("baton_tokens_generated", "Tokens generated.", lambda load: load.generated_tokens),
    ("baton_handoffs", "Requests handed to a decode node.", lambda load: load.handoffs),
    ("baton_kv_blocks_moved", "KV blocks pushed to decode nodes.", lambda load: load.blocks_moved),
    ("baton_kv_transfer_bytes", "Bytes pushed to decode nodes.", lambda load: load.bytes_moved),
    (
        "baton_channel_fallbacks",
        "Peers connected over a slower KV channel than configured.",
        lambda load: load.channel_fallbacks,
    ),
    ("baton_kv_rows_corrupt", "KV rows that failed their checksum.", lambda load: load.rows_corrupt),
    (
        "baton_records_dropped",
        "Step records and events that a node dropped before sending them.",
        lambda load: load.records_dropped,
    ),
)
# Counters from the dispatcher's status: the key, the name, the alias that is kept for one release, and the help text.
STATUS_COUNTERS = (
    ("moved", "baton_request_migrations", "baton_requests_moved", "Attempts migrated to another node."),
    (
        "refused",
        "baton_requests_rejected",
        "baton_requests_refused",
        "Requests rejected for a too long predicted wait.",
    ),
    ("retried", "baton_requests_retried", "", "Attempts retried without the loss of a node."),
    ("paused", "baton_client_backpressure", "baton_requests_paused", "Attempts ended because a client did not read."),
)


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
        alive_rows = [row for row in rows if row[2]]  # the gauges of a lost node are stale
        for name, text, read in GAUGES:
            yield self._filled(GaugeMetricFamily(name, text, labels=LABELS), alive_rows, read)
        for name, text, read in COUNTERS:
            yield self._filled(CounterMetricFamily(name, text, labels=LABELS), rows, read)
        alive = GaugeMetricFamily("baton_node_alive", "Whether the node's stream is connected.", labels=LABELS)
        for info, _, is_alive in rows:
            alive.add_metric(self._labels(info), float(is_alive))
        yield alive
        yield from self._from_status()

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return info.id, info.role, self._model_name

    def _filled(self, family: Any, rows: list[NodeRow], read: Callable[[NodeStats], float]) -> Metric:
        for info, load, _ in rows:
            family.add_metric(self._labels(info), read(load))
        filled: Metric = family
        return filled

    def _from_status(self) -> Iterable[Metric]:
        status = self._status()
        placements = CounterMetricFamily(
            "baton_placements", "Attempts, by placement reason.", labels=["model_name", "reason"]
        )
        for reason, count in list(status["placements"].items())[:MAX_REASONS]:
            placements.add_metric([self._model_name, reason], count)
        yield placements
        counts: Mapping[str, int] = status["requests"]
        for key, name, alias, text in STATUS_COUNTERS:
            for each, shown in ((name, text), (alias, f"Deprecated alias of {name}_total.")):
                if each:
                    counter = CounterMetricFamily(each, shown, labels=["model_name"])
                    counter.add_metric([self._model_name], counts.get(key, 0))
                    yield counter
        queue: Mapping[str, int] = status.get("queue", {})
        for what, text in (("requests", "Samples"), ("tokens", "Prompt and answer tokens")):
            gauge = GaugeMetricFamily(f"baton_queue_{what}", f"{text} queued in the router.", labels=["model_name"])
            gauge.add_metric([self._model_name], queue.get(what, 0))
            yield gauge
