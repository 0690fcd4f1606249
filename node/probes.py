"""The pages of a node's health port: whether the node is alive, whether it can take requests, and its metrics."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shared.config.settings import JoiningSettings
from shared.health import Answer, HealthServer
from shared.lifecycle import listen
from shared.metrics import stats_families
from shared.rpc.messages import NodeInfo, NodeStats

OK: Answer = (HTTPStatus.OK, "ok\n")


class NodeProbes(Collector):
    """Reports the state of a node to an orchestrator. Runs on the event loop.

    `stats` returns the node's description and statistics, or None if they are not known yet. `failure` returns why the
    node's process must be restarted, or "". `refusal` returns why the node takes no requests, or "".
    """

    def __init__(
        self,
        stats: Callable[[], tuple[NodeInfo, NodeStats] | None],
        failure: Callable[[], str],
        refusal: Callable[[], str],
    ) -> None:
        self._stats, self._failure, self._refusal = stats, failure, refusal
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def serve(self, settings: JoiningSettings, cleanup: AsyncExitStack) -> None:
        """Serve the health port, if one is set, until `cleanup`. Raises OSError if the port cannot be opened."""
        if settings.health_port:
            server = HealthServer(self.pages())
            await listen(server.start, settings.host, settings.health_port, "--health-port")
            cleanup.push_async_callback(server.close)

    def pages(self) -> Mapping[str, Callable[[], Answer]]:
        return {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}

    def _health(self) -> Answer:
        return _unless(self._failure())

    def _ready(self) -> Answer:
        return _unless(self._refusal())

    def _metrics(self) -> Answer:
        return HTTPStatus.OK, generate_latest(self._registry).decode()

    def collect(self) -> Iterable[Metric]:
        if (found := self._stats()) is None:
            return []
        return stats_families([(*found, True)], found[0].model)


def _unless(problem: str) -> Answer:
    return (HTTPStatus.SERVICE_UNAVAILABLE, f"{problem}\n") if problem else OK
