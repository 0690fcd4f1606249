"""How `/v1/status` and `/metrics` show the nodes."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.messages import Load, NodeInfo

NodeRow = tuple[NodeInfo, Load, bool]
Family = GaugeMetricFamily | CounterMetricFamily
LABELS = ("engine", "role", "model_name")


def _usage(load: Load) -> float:
    used = load.blocks_owned + load.blocks_reserved + load.blocks_quarantined
    return used / load.blocks_total if load.blocks_total else 0.0


# vLLM's names where it has one, so that its boards work; ours where it has none.
GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests that wait for room.", lambda load: load.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", _usage),
    ("baton:kv_blocks_free", "Empty KV blocks.", lambda load: load.blocks_free),
    ("baton:kv_blocks_cached", "KV blocks kept as prefix cache only.", lambda load: load.blocks_cached),
    ("baton:kv_blocks_owned", "KV blocks of requests.", lambda load: load.blocks_owned),
    ("baton:kv_blocks_reserved", "KV blocks that a peer is writing.", lambda load: load.blocks_reserved),
    ("baton:kv_blocks_quarantined", "KV blocks that a peer may still write.", lambda load: load.blocks_quarantined),
)
COUNTERS: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda load: load.cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.cache_hits),
    ("vllm:num_preemptions", "Requests preempted.", lambda load: load.preemptions),
    ("baton:steps", "Forward passes.", lambda load: load.steps),
    ("baton:prompt_tokens_computed", "Prompt tokens computed.", lambda load: load.prompt_tokens),
    ("baton:tokens_generated", "Tokens generated.", lambda load: load.generated_tokens),
    ("baton:handoffs", "Requests handed to a decode node.", lambda load: load.handoffs),
    ("baton:handoffs_failed", "Handoffs that ended without a commit.", lambda load: load.handoffs_failed),
    ("baton:kv_blocks_moved", "KV blocks pushed to decode nodes.", lambda load: load.blocks_moved),
    ("baton:kv_transfer_bytes", "Bytes pushed to decode nodes.", lambda load: load.bytes_moved),
    ("baton:channel_fallbacks", "Peers reached over a slower KV channel.", lambda load: load.channel_fallbacks),
)


class NodeMetrics:
    """A prometheus collector over what the nodes last said."""

    def __init__(self, nodes: Callable[[], list[NodeRow]], model_name: str) -> None:
        self._nodes = nodes
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        rows = self._nodes()
        for name, text, read in GAUGES:
            yield self._filled(GaugeMetricFamily(name, text, labels=LABELS), rows, read)
        for name, text, read in COUNTERS:
            yield self._filled(CounterMetricFamily(name, text, labels=LABELS), rows, read)
        alive = GaugeMetricFamily("baton:node_alive", "Whether the node's stream lives.", labels=LABELS)
        for info, _, is_alive in rows:
            alive.add_metric(self._labels(info), float(is_alive))
        yield alive

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return info.id, info.role, self._model_name

    def _filled(self, family: Family, rows: list[NodeRow], read: Callable[[Load], float]) -> Family:
        for info, load, _ in rows:
            family.add_metric(self._labels(info), read(load))
        return family


def node_status(info: NodeInfo, load: Load, alive: bool) -> dict[str, object]:
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
    }
