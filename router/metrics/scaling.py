"""The metric `baton_needed_nodes`: how many nodes of each role the router's own requests need."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.dispatch.admission import AdmissionQueue
from router.metrics.request_metrics import SlidingCounts
from router.nodes.connection import NodeConnection
from router.nodes.pool import NodePool
from router.scaling import WINDOW_S, Demand, capability_of, load_of_decode, load_of_prefill, needed, recent_rate
from scheduler.cost import CostModel
from shared.metrics import metric_family
from shared.rpc.messages import NodeInfo

ROLES = ("prefill", "decode")
NUM_SLICES, NUM_RECENT = 12, 3  # how many complete slices of 5 s cover WINDOW_S and RECENT_S
NEW_S = 60.0  # the step-time models of nodes younger than this are used only if there are no older nodes


@dataclass(eq=False)
class ScalingSignals(Collector):
    """Computes how many nodes are needed, from the queue, the pool and the arrivals of the last minute.

    `arrivals` counts the prompt tokens that arrive ("prompt"), the prompt tokens found in a prefix cache ("cached"),
    and the samples that arrive ("samples").
    """

    pool: NodePool
    queue: AdmissionQueue
    arrivals: SlidingCounts
    model_name: str
    ttft_slo_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    @property
    def num_routers(self) -> int:
        """The number of routers and router workers that share the nodes, as reported by the nodes."""
        return max((stats.num_routers for _, stats, alive in self.pool.nodes() if alive), default=1) or 1

    def present(self) -> dict[str, int]:
        """Return the number of nodes of each role that take requests."""
        return dict(zip(ROLES, map(len, self.pool.routable()), strict=True))

    def needed(self) -> dict[str, float]:
        """Return the number of nodes of each role that this router's requests need."""
        nodes = dict(zip(ROLES, self.pool.routable(), strict=True))
        demand, routers = self._demand(), self.num_routers
        can = {role: capability_of(self._known(each), demand.request_kv_tokens) for role, each in nodes.items()}
        computing = "prefill" if nodes["prefill"] else "decode"
        prompts = load_of_prefill(demand, can[computing], self.ttft_slo_s)
        decodes = load_of_decode(demand, can["decode"]) if nodes["decode"] else None
        if computing == "decode" and decodes is not None:
            decodes, prompts = decodes + (prompts or 0.0), None  # decode nodes also compute the prompts
        loads = {"prefill": prompts, "decode": decodes}
        return {role: needed(loads[role], len(each) / routers, routers) for role, each in nodes.items()}

    def _demand(self) -> Demand:
        arrived, recent = self.arrivals.totals(NUM_SLICES), self.arrivals.totals(NUM_RECENT)
        queue = self.queue
        return Demand(
            prompt_tokens_per_s=max(0, arrived["prompt"] - arrived["cached"]) / WINDOW_S,
            recent_prompt_tokens_per_s=recent_rate(max(0, recent["prompt"] - recent["cached"]), recent["samples"]),
            queued_prompt_tokens=queue.pending_prefill_tokens + queue.queued_prompt_tokens,
            requests=queue.held_requests,
            queued_requests=queue.queued_requests,
            request_kv_tokens=queue.held_tokens / max(1, queue.held_requests),
            expected_requests=arrived["samples"] / WINDOW_S * queue.mean_stay_s,
            recent_expected_requests=recent_rate(recent["samples"], recent["samples"]) * queue.mean_stay_s,
        )

    def _known(self, nodes: list[NodeConnection]) -> list[tuple[NodeInfo, CostModel | None]]:
        before = self.clock() - NEW_S
        old = [each for each in nodes if each.alive_since <= before]
        return [(each.info, each.load.cost) for each in old or nodes]

    def collect(self) -> Iterable[Metric]:
        values = [((role, self.model_name), value) for role, value in self.needed().items()]
        text = "Number of nodes of a role that the requests of this router need; add up the values of all routers."
        yield metric_family("baton_needed_nodes", text, ["role", "model_name"], values)
