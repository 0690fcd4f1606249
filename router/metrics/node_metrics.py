"""Prometheus metrics from the dispatcher's status and from the latest reports of the nodes.

The time series of nodes that have left are dropped. Each label's value is a node id, a role or a value of a fixed set.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.metrics import LABELS, NodeRow, labels_of, metric_family, stats_families
from shared.rpc.messages import NodeInfo

ROLES, STATES = ("prefill", "decode"), ("ready", "draining", "breached", "stuck", "lost")
MAX_REASONS = 64  # maximum number of placement reasons that are exported as labels
# Maps the key of a count in the dispatcher's status to the name and the help text of its metric.
COUNTS = {
    "moved": ("baton_request_migrations_total", "Failed attempts, which are retried unless a limit forbids it."),
    "retried": ("baton_requests_retried_total", "Attempts that failed although no node was lost."),
    "paused": ("baton_client_backpressure_total", "Attempts ended because a client did not read."),
}
QUEUE = (
    ("baton_queue_requests", "Samples queued in the router.", "queue", "requests"),
    ("baton_queue_tokens", "Prompt and answer tokens queued in the router.", "queue", "tokens"),
)


@dataclass(frozen=True, slots=True)
class MetricSource:
    """One model's metrics: `nodes` lists its nodes, and `status` returns its dispatcher's status."""

    model_name: str
    nodes: Callable[[], list[NodeRow]]
    status: Callable[[], Mapping[str, Any]]


class NodeMetrics(Collector):
    """A Prometheus collector of the nodes' last reported stats and of the dispatchers' status. All methods run on the
    event loop."""

    def __init__(self, sources: Sequence[MetricSource]) -> None:
        self._sources = sources
        self._models: dict[str, str] = {}  # the name of each node's model, by node id

    def _rows(self) -> list[NodeRow]:
        """Return the nodes of all models."""
        listed = [(source.model_name, source.nodes()) for source in self._sources]
        self._models = {info.id: name for name, rows in listed for info, _, _ in rows}
        return [row for _, rows in listed for row in rows]

    def _model_of(self, node: str) -> str:
        if node not in self._models:
            self._rows()
        return self._models.get(node, self._sources[0].model_name)

    def collect(self) -> Iterable[Metric]:
        rows = self._rows()
        for source in self._sources:
            yield from stats_families(source.nodes(), source.model_name)
        yield self._of_nodes(
            "baton_node_alive", "Whether the node's stream is connected.", [(info, up) for info, _, up in rows]
        )
        states = Counter(
            (info.role, stats.state if up else "lost", self._model_of(info.id)) for info, stats, up in rows
        )
        models = [source.model_name for source in self._sources]
        pools = [(key, states[key]) for key in product(ROLES, STATES, models)]
        text = "Nodes of a role, by state. A lost node is counted for ten minutes."
        yield metric_family("baton_pool_nodes", text, ["role", "state", "model_name"], pools)
        yield from self._from_status()

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return labels_of(info, self._model_of(info.id))

    def _of_nodes(self, name: str, text: str, values: Iterable[tuple[NodeInfo, float]]) -> Metric:
        return metric_family(name, text, LABELS, ((self._labels(info), value) for info, value in values))

    def _from_status(self) -> Iterable[Metric]:
        statuses = [(source.model_name, source.status()) for source in self._sources]
        placements = [
            ((model, reason), count)
            for model, status in statuses
            for reason, count in list(status["placements"].items())[:MAX_REASONS]
        ]
        text = "Attempts, by placement reason."
        yield metric_family("baton_placements_total", text, ["model_name", "reason"], placements)
        inexact = [
            ((model, why), count)
            for model, status in statuses
            for why, count in status.get("inexact_retries", {}).items()
        ]
        text = "Attempts that may have continued an answer with different tokens, by reason."
        yield metric_family("baton_inexact_retries_total", text, ["model_name", "why"], inexact)
        counts = [(name, text, "requests", key) for key, (name, text) in COUNTS.items()]
        for name, text, part, key in (*counts, *QUEUE):
            values = [((model,), status.get(part, {}).get(key, 0)) for model, status in statuses]
            yield metric_family(name, text, ["model_name"], values)
