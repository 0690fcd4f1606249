"""The load and the speed of one node as placement sees them, and the node's status for `/v1/status`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from scheduler.cost import MAX_COEFFICIENT, CostModel, pairs_of
from scheduler.disaggregate import NodeView
from shared.rpc.messages import NodeInfo, NodeStats

STALE_S = 30.0  # after this time without a step or a request, a node's step-time model is not trusted
LEARNT_PROMPT_TOKENS = 4096  # tokens that a node must compute before its step-time model is trusted for prompts

# The fields in `/v1/status`.
INFO = ("id", "role", "address", "fingerprint", "block_bytes", "block_tokens", "num_blocks")
STATS = (
    *("running", "waiting", "steps", "prompt_tokens", "generated_tokens", "preemptions", "handoffs", "handoffs_failed"),
    *("blocks_moved", "bytes_moved", "channels", "channel_fallbacks", "records_dropped", "overruns", "rows_corrupt"),
    *("images_encoded", "images_cached", "images_fetched"),
)
BLOCKS = ("free", "cached", "owned", "reserved", "quarantined", "total")


@dataclass(slots=True)
class NodeLoad:
    """The work that this router has sent to a node, and the speed that the node reports.

    Each `NodeConnection` owns a `NodeLoad`. Attempts change the counters; placement reads them through `view`. The
    counters are more recent than the node's own reports, of which at most two arrive in a second. `clock` is the
    monotonic clock in seconds.
    """

    clock: Callable[[], float]
    outstanding_tokens: int = 0  # prompt tokens sent to the node that are not computed yet
    outstanding_pairs: int = 0  # query-key pairs of the outstanding tokens
    kv_tokens: int = 0  # tokens whose KV is, or will be, on the node
    prefilling: int = 0  # requests that will generate on the node once their prompt is computed
    num_placed: int = 0  # number of attempts placed on the node so far
    cost: CostModel | None = None  # the step-time model of the node
    push_s: float = 0.0  # constant part of the time of a KV push, in seconds
    byte_s: float = 0.0  # additional time of a KV push for each byte, in seconds
    last_active: float = field(init=False)  # when the node last ran a step or got a request

    def __post_init__(self) -> None:
        self.last_active = self.clock()

    def read_stats(self, stats: NodeStats, has_stepped: bool) -> None:
        """Read the node's speed from its stats. Ignore invalid values, and remove an invalid cost from `stats`."""
        self.cost = CostModel.unpacked(stats.cost)
        if self.cost is None:
            stats.cost = []
        is_valid = len(stats.transfer) == 2 and all(0 <= number < MAX_COEFFICIENT for number in stats.transfer)
        self.push_s, self.byte_s = stats.transfer if is_valid else (0.0, 0.0)
        if has_stepped:
            self.last_active = self.clock()

    def count_placement(self) -> None:
        self.num_placed += 1
        self.last_active = self.clock()

    def clear(self) -> None:
        """Reset the counters of outstanding work, because the stream to the node has ended."""
        self.outstanding_tokens = self.outstanding_pairs = self.kv_tokens = self.prefilling = 0

    @property
    def is_stale(self) -> bool:
        """Whether the node has been idle for too long to trust its step-time model."""
        return self.clock() - self.last_active > STALE_S

    def view(self, info: NodeInfo, stats: NodeStats, num_requests: int) -> NodeView:
        """Return the values that placement reads. `num_requests` counts this router's requests on the node."""
        capacity, rows = kv_capacity_tokens(info), max(1, stats.blocks_total or info.num_blocks - 1)
        return NodeView(
            id=info.id,
            role=info.role,
            outstanding_tokens=max(self.outstanding_tokens, stats.waiting_tokens),
            running=max(num_requests, stats.running + stats.waiting),
            max_num_seqs=info.max_num_seqs,
            kv_tokens=max(self.kv_tokens, (stats.blocks_owned + stats.blocks_reserved) * capacity // rows),
            kv_capacity_tokens=capacity,
            placed=self.num_placed,
            outstanding_pairs=self.outstanding_pairs,
            decode_context=stats.blocks_owned * capacity // rows,
            budget_tokens=step_tokens(info),
            tbt_slo_s=attribute(info, "tbt_slo_ms", 0) / 1000,
            cost=self.cost,
            cost_is_learnt=stats.prompt_tokens >= LEARNT_PROMPT_TOKENS,
            push_s=self.push_s,
            byte_s=self.byte_s,
            token_bytes=info.block_bytes * rows // capacity,
            prefilling=self.prefilling,
            incarnation_id=info.incarnation_id,
            shared_pool_owner=info.shared_pool_owner,
            stale=self.is_stale,
        )


class LoadCharge:
    """The load that one attempt adds to its nodes. The load includes the prompt's tokens until the prompt is computed,
    and the tokens of the KV until the attempt ends. Attempts of one request on one node share the prompt's KV."""

    def __init__(
        self, prefill: NodeLoad | None, decode: NodeLoad, num_tokens: int, cached: int, may_add: int,
        num_shared: int = 0, sharers: Counter[int] | None = None,
    ) -> None:  # fmt: skip
        """Charge a sequence of `num_tokens` tokens. The node that computes the prompt probably has `cached` of these
        tokens in its prefix cache. `may_add` is the maximum number of tokens that the attempt may generate.
        `sharers` counts the attempts of the request on each node. Attempts on the same node share the KV of the first
        `num_shared` tokens."""
        self._computing, self._decode = prefill or decode, decode
        self.prompt_tokens = max(0, num_tokens - cached)
        self._pairs = pairs_of(num_tokens - self.prompt_tokens, self.prompt_tokens)
        self._kv_tokens, self._num_shared = num_tokens - num_shared + may_add // 2, num_shared
        self._sharers = Counter[int]() if sharers is None else sharers
        self._add_prompt(1)
        decode.kv_tokens += 0 if self._sharers[id(decode)] else num_shared
        self._sharers[id(decode)] += 1
        decode.kv_tokens += self._kv_tokens
        self.is_prompt_computed = False

    def prompt_computed(self) -> None:
        """Remove the prompt from the outstanding work. Later calls do nothing."""
        if not self.is_prompt_computed:
            self.is_prompt_computed = True
            self._add_prompt(-1)

    def end(self) -> None:
        """Remove the whole charge. Must be called once."""
        self.prompt_computed()
        self._sharers[id(self._decode)] -= 1
        self._decode.kv_tokens -= self._kv_tokens + (0 if self._sharers[id(self._decode)] else self._num_shared)

    def _add_prompt(self, sign: int) -> None:
        self._computing.outstanding_tokens += sign * self.prompt_tokens
        self._computing.outstanding_pairs += sign * self._pairs
        self._decode.prefilling += sign


def step_tokens(info: NodeInfo) -> int:
    """Return the maximum number of tokens in a step of the node."""
    return int(attribute(info, "max_step_tokens", 512))


def kv_capacity_tokens(info: NodeInfo) -> int:
    """Return the length of the longest request that fits in the node's KV pool."""
    return max(1, (info.num_blocks - 1) * info.block_tokens)


def attribute(info: NodeInfo, name: str, default: float) -> float:
    """Return a number from the node's attributes, or `default` if it is missing or invalid."""
    try:
        value = float(info.attributes[name])
    except (KeyError, ValueError):
        return default
    return value if 0 < value < 1e9 else default


def node_status(info: NodeInfo, stats: NodeStats, alive: bool) -> dict[str, Any]:
    """Return a node's entry in `/v1/status`. A node that is not `alive` has the state "lost"."""
    shown: dict[str, Any] = {name: getattr(info, name) for name in INFO}
    shown |= {name: getattr(stats, name) for name in STATS}
    adapters = ",".join(f"{name}={digest[:12]}" for name, digest in sorted(info.adapters.items()))
    return shown | {
        "state": stats.state if alive else "lost",
        "alive": alive,
        "reported_ms": stats.sent_ns // 10**6,
        "blocks": {name: getattr(stats, f"blocks_{name}") for name in BLOCKS},
        "facts": info.attributes | {"adapters": adapters or "none"},
        "cost": stats.cost or None,
        "breach": stats.ledger_error,
    }
