"""Placement: which nodes take a request. Pure, over the router's own ledger of what it has sent where."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from scheduler.disaggregate import Estimate, NodeView, choose, local_estimate, remote_estimate

# Above this many nodes a decision looks at two of them and at the best prefix match (power of two choices,
# Mitzenmacher 2001), so that its cost does not grow with the cluster.
SCAN_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode node computes the prompt itself, for `reason`."""

    prefill: str | None
    decode: str
    reason: str
    local: Estimate | None = None  # where step-time models are known
    remote: Estimate | None = None

    @property
    def estimate(self) -> Estimate | None:
        """Of the way that was chosen."""
        return self.local if self.prefill is None else self.remote


class PrefixIndex:
    """Which nodes were sent which prefix blocks: bounded, least recently used forgotten. A hint, never a promise."""

    def __init__(self, max_blocks: int = 200_000) -> None:
        self._max_blocks = max_blocks
        self._nodes: OrderedDict[bytes, dict[str, None]] = OrderedDict()

    def record(self, hashes: Sequence[bytes], node: str) -> None:
        for name in hashes:
            self._nodes.setdefault(name, {})[node] = None
            self._nodes.move_to_end(name)
        while len(self._nodes) > self._max_blocks:
            self._nodes.popitem(last=False)

    def overlap(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each node was sent."""
        depth: dict[str, int] = {}
        for index, name in enumerate(hashes):
            nodes = [node for node in self._nodes.get(name, ()) if depth.get(node, 0) == index]
            if not nodes:
                break
            for node in nodes:
                depth[node] = index + 1
        return depth

    def forget(self, node: str) -> None:
        """The node is gone and its cache with it. Walks the index: rare."""
        for nodes in self._nodes.values():
            nodes.pop(node, None)


def place(
    request_id: str,
    num_tokens: int,
    prefill_nodes: Sequence[NodeView],
    decode_nodes: Sequence[NodeView],
    cached_tokens: Mapping[str, int],
    disaggregate: str = "always",
) -> Placement | None:
    """The prefill node that would finish the prompt first and the decode node with the most room; None: nobody lives.

    `cached_tokens`: prefix tokens that each node probably holds. `disaggregate`: "always" | "never" | "auto", which
    compares that pair with that decode node alone, and with the one that has most of the prompt already
    (scheduler.disaggregate).
    """
    generating = decode_nodes or prefill_nodes
    if not generating:
        return None
    candidates = _candidates(request_id, generating, cached_tokens)
    decode = min(candidates, key=lambda node: _decode_load(node, num_tokens, cached_tokens))
    if not decode_nodes or not prefill_nodes or disaggregate == "never":
        reason = "no_decode_node" if not decode_nodes else "never" if prefill_nodes else "no_prefill_node"
        return Placement(None, decode.id, reason, _local(decode, None, num_tokens, cached_tokens))
    prefill = min(
        _candidates(request_id, prefill_nodes, cached_tokens),
        key=lambda node: _prefill_work(node, num_tokens, cached_tokens),
    )
    cached = cached_tokens.get(prefill.id, 0)
    remote = remote_estimate(prefill, num_tokens, cached, cached_tokens.get(decode.id, 0))
    knower = max(candidates, key=lambda node: cached_tokens.get(node.id, 0))
    alone, local = min(
        ((node, _local(node, prefill, num_tokens, cached_tokens)) for node in (decode, knower)),
        key=lambda pair: _total(pair[1]),
    )
    is_local, reason = choose(remote, local) if disaggregate == "auto" else (False, "disaggregated")
    if is_local and prefill.stale:  # taken for too slow, it would never be measured again
        is_local, reason = False, "stale_model"
    if is_local:
        return Placement(None, alone.id, reason, local, remote)
    return Placement(prefill.id, decode.id, reason, local, remote)


def _local(
    node: NodeView, teacher: NodeView | None, num_tokens: int, cached_tokens: Mapping[str, int]
) -> Estimate | None:
    cost = teacher.cost if teacher is not None else None
    return local_estimate(node, cost, num_tokens, cached_tokens.get(node.id, 0))


def _total(estimate: Estimate | None) -> float:
    return estimate.total_s if estimate is not None else inf


def _prefill_work(node: NodeView, num_tokens: int, cached_tokens: Mapping[str, int]) -> tuple[int, int, int]:
    """Tokens that the node computes until this prompt is done."""
    work = node.outstanding_tokens + num_tokens - min(num_tokens, cached_tokens.get(node.id, 0))
    return work, node.running, node.placed


def _decode_load(node: NodeView, num_tokens: int, cached_tokens: Mapping[str, int]) -> tuple[float, int, int]:
    """Share of the scarcer of memory and batch places in use once the request is there, prompt work included."""
    new_tokens = num_tokens - min(num_tokens, cached_tokens.get(node.id, 0))
    memory = (node.kv_tokens + node.outstanding_tokens + new_tokens) / node.kv_capacity_tokens
    places = (node.running + 1) / node.max_num_seqs
    return max(memory, places), node.outstanding_tokens, node.placed


def _candidates(request_id: str, nodes: Sequence[NodeView], cached_tokens: Mapping[str, int]) -> Sequence[NodeView]:
    if len(nodes) <= SCAN_LIMIT:
        return nodes
    draw = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest())
    first, second = draw % len(nodes), (draw >> 32) % len(nodes)
    best = max(nodes, key=lambda node: cached_tokens.get(node.id, 0))
    return [nodes[first], nodes[second], best]
