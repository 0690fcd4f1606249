"""Prometheus metrics from the dispatcher's status and from the latest reports of the nodes.

The time series of nodes that have left are dropped. Label values are node ids, roles and members of fixed sets.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.metrics import LABELS, NodeRow, labels_of, metric_family, stats_families
from shared.rpc.messages import NodeInfo

ROLES, STATES = ("prefill", "decode"), ("ready", "draining", "breached", "stuck", "lost")
MAX_REASONS = 64  # maximum number of placement reasons that are exported as labels
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
        yield from stats_families(rows, self._model_name)
        yield self._of_nodes(
            "baton_node_alive", "Whether the node's stream is connected.", [(info, up) for info, _, up in rows]
        )
        states = Counter((info.role, stats.state if up else "lost") for info, stats, up in rows)
        pools = [((role, state, self._model_name), states[role, state]) for role in ROLES for state in STATES]
        text = "Nodes of a role, by state. A lost node is counted for ten minutes."
        yield metric_family("baton_pool_nodes", text, ["role", "state", "model_name"], pools)
        yield from self._from_status()

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return labels_of(info, self._model_name)

    def _of_nodes(self, name: str, text: str, values: Iterable[tuple[NodeInfo, float]]) -> Metric:
        return metric_family(name, text, LABELS, ((self._labels(info), value) for info, value in values))

    def _from_status(self) -> Iterable[Metric]:
        status, model = self._status(), (self._model_name,)
        placements = [((*model, reason), count) for reason, count in list(status["placements"].items())[:MAX_REASONS]]
        text = "Attempts, by placement reason."
        yield metric_family("baton_placements_total", text, ["model_name", "reason"], placements)
        inexact = [((*model, why), count) for why, count in status.get("inexact_retries", {}).items()]
        text = "Attempts that may have continued an answer with other tokens, by reason."
        yield metric_family("baton_inexact_retries_total", text, ["model_name", "why"], inexact)
        values = [(name, text, status["requests"].get(key, 0)) for key, (name, text) in COUNTS.items()]
        queue = status.get("queue", {})
        values += [
            ("baton_queue_requests", "Samples queued in the router.", queue.get("requests", 0)),
            ("baton_queue_tokens", "Prompt and answer tokens queued in the router.", queue.get("tokens", 0)),
        ]
        for name, text, value in values:
            yield metric_family(name, text, ["model_name"], [(model, value)])
