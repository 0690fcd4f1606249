"""Computes how many nodes of each role a router's requests need, for autoscalers and for `--rebalance`.

The functions are pure. A router knows only its own requests, so an autoscaler adds up the numbers that all routers
compute. For the same reason, a router compares the load of its requests with its share of the nodes, not with all
nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import median

from router.nodes.load import attribute, kv_capacity_tokens, step_tokens
from scheduler.cost import CostModel, StepWork, pairs_of
from shared.rpc.messages import NodeInfo

WINDOW_S = 60.0  # the rate of arrivals is averaged over this time
RECENT_S = 15.0  # while requests are queued, the rate over this shorter time is used too
QUEUE_S = 10.0  # without an SLO for the first token, queued prompts should be computed within this time
KV_TARGET = 0.85  # maximum share of a node's KV capacity that requests should use
SURVIVORS = 0.8  # a node may be removed only if the load would use at most this share of the remaining nodes
STEADY_S = 60.0  # how long one role must need more nodes, and the other role fewer, before a node changes its role
FLIP_S = 300.0  # minimum time between two changes of roles


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of one router."""

    prompt_tokens_per_s: float = 0.0  # rate over the last minute, excluding tokens found in a prefix cache
    recent_prompt_tokens_per_s: float = 0.0  # rate over the last RECENT_S seconds (see `recent_rate`)
    queued_prompt_tokens: float = 0.0  # prompt tokens that are not computed yet
    requests: float = 0.0  # number of requests in progress
    queued_requests: float = 0.0
    request_kv_tokens: float = 0.0  # mean number of tokens that a request holds in the KV cache
    # By Little's law: the rate of arrivals over the last minute, multiplied by the mean time that a request runs.
    expected_requests: float = 0.0
    recent_expected_requests: float = 0.0  # the same product, with the rate over the last RECENT_S seconds


@dataclass(frozen=True, slots=True)
class NodeCapability:
    """The capability of a typical node of a role. `prompt_tokens_per_s` is 0 while it is unknown."""

    prompt_tokens_per_s: float = 0.0
    kv_tokens: float = 1.0
    requests: float = 1.0


def capability_of(nodes: Sequence[tuple[NodeInfo, CostModel | None]], context: float) -> NodeCapability:
    """Return the median capability of the nodes. `context` is the mean length of a request, in tokens."""
    if not nodes:
        return NodeCapability()
    rates = [_prompt_rate(info, cost) for info, cost in nodes if cost is not None]
    return NodeCapability(
        median(rates) if rates else 0.0,
        median(kv_capacity_tokens(info) for info, _ in nodes),
        median(_most_requests(info, cost, context) for info, cost in nodes),
    )


def _prompt_rate(info: NodeInfo, cost: CostModel) -> float:
    """Return the number of prompt tokens per second that a node computes if each step consists of one full chunk."""
    tokens = step_tokens(info)
    seconds = cost.seconds(StepWork(1, tokens, pairs_of(0, tokens)))
    return tokens / seconds if seconds > 0 else 0.0


def _most_requests(info: NodeInfo, cost: CostModel | None, context: float) -> int:
    """Return how many requests a node can decode within its SLO for the time between tokens. The result is at least
    1."""
    slo_s = attribute(info, "tbt_slo_ms", 0.0) / 1000
    if cost is None or not slo_s:
        return info.max_num_seqs
    low, high = 1, info.max_num_seqs  # search for the largest number of requests whose step is short enough
    while low < high:
        middle = (low + high + 1) // 2
        work = StepWork(num_decodes=middle, decode_context=round(middle * context))
        low, high = (middle, high) if cost.seconds(work) <= slo_s else (low, middle - 1)
    return low


def recent_rate(total: float, count: int) -> float:
    """Convert a `total` that was counted over RECENT_S seconds to a rate per second. Over so short a time, the rate is
    noisy. It is therefore reduced by two standard deviations of `count` Poisson arrivals."""
    return total / RECENT_S * max(0.0, 1 - 2 / sqrt(count)) if count else 0.0


def load_of_prefill(demand: Demand, node: NodeCapability, wait_s: float = 0.0) -> float | None:
    """Return how many nodes are needed to compute the prompts, or None if the speed of the nodes is unknown.

    When the load rises, the queue grows before the mean rate of arrivals over a minute rises. The result therefore also
    depends on the rate that would empty the queue within `wait_s` seconds (0 means QUEUE_S). This rate is limited to
    the recent rate of arrivals, because the present queue will be empty by the time that new nodes have started."""
    rate = node.prompt_tokens_per_s
    if not rate:
        return None
    to_do = demand.queued_prompt_tokens / (wait_s or QUEUE_S)
    return max(demand.prompt_tokens_per_s, min(to_do, demand.recent_prompt_tokens_per_s)) / rate


def load_of_decode(demand: Demand, node: NodeCapability) -> float:
    """Return how many nodes are needed to hold and decode the requests.

    By Little's law, the number of requests in progress is the rate of arrivals multiplied by the time that a request
    runs. Queued requests count only up to the number that this law gives for the recent rate (see `load_of_prefill`).
    """
    waiting = min(demand.requests + demand.queued_requests, demand.recent_expected_requests)
    requests = max(demand.requests, demand.expected_requests, waiting)
    return requests * max(1 / node.requests, demand.request_kv_tokens / (KV_TARGET * node.kv_tokens))


def needed(load: float | None, present: float, routers: int = 1) -> float:
    """Return the number of nodes that a load needs. `present` is this router's share (nodes / `routers`).

    The result rises as soon as the load exceeds `present`. It falls by this router's share of one node at a
    time, and only if the load is at most SURVIVORS times the remaining share. A constant load gives a constant result.
    """
    one = 1.0 / routers
    if load is None:
        return present
    if load > present:
        return load
    return present - one if present > one and load <= SURVIVORS * (present - one) else present


class RebalanceClock:
    """Decides when a node changes its role. A change is due when, for STEADY_S, one role has needed more nodes and
    the other role has needed fewer.

    `update` is called about once a second. A role keeps at least one node.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._wanted = ""  # the role that needs more nodes
        self._since = 0.0
        self._flipped_at = -FLIP_S

    def update(self, needed: dict[str, float], present: dict[str, int]) -> str:
        """Return the role that one node of the other role should take now, or "" if no node should change."""
        now, wanted = self._clock(), ""
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            if ceil(needed[role]) > present[role] and needed[other] <= present[other] - 1 and present[other] > 1:
                wanted = role
        if wanted != self._wanted:
            self._wanted, self._since = wanted, now
        if not wanted or now - self._since < STEADY_S or now - self._flipped_at < FLIP_S:
            return ""
        self._flipped_at, self._since = now, now
        return wanted
