"""The answers of a node's health port: whether the node is alive, whether it can take requests, and its metrics."""

from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from node.node import Node
from shared.health import Answer
from shared.metrics import stats_families

OK: Answer = (HTTPStatus.OK, "ok\n")


class NodeProbes(Collector):
    """Reports the state of a node to an orchestrator. Runs on the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def pages(self) -> Mapping[str, Callable[[], Answer]]:
        return {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}

    def _health(self) -> Answer:
        node = self._node
        if node.state.is_stuck or node.fatal_error.done():  # set by the watchdog or the engine; the process exits soon
            return HTTPStatus.SERVICE_UNAVAILABLE, "the engine has failed or makes no progress\n"
        return OK

    def _ready(self) -> Answer:
        problem = self._node.state.refusal
        if not problem and not self._node.sessions.num_routers:  # routers connect when the first steps have run
            problem = "no router is connected to this node"
        return (HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n") if problem else OK

    def _metrics(self) -> Answer:
        return HTTPStatus.OK, generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        info = self._node.state.info
        return stats_families([(info, self._node.stats(), True)], info.model)
