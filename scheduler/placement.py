"""Placement: chooses the nodes for a request by the load of the nodes and the prefixes sent to each node."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from scheduler.disaggregate import LatencyEstimate, NodeView, choose, local_estimate, remote_estimate

# With more nodes than this, a decision considers two random nodes and the best prefix match (power of two choices,
# Mitzenmacher 2001), so that the cost of a decision does not grow with the cluster.
SCAN_LIMIT = 16
NO_NODES: tuple[str, ...] = ()
NOTHING: Mapping[str, int] = {}
Node = TypeVar("Node")


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes chosen for a request. If `prefill` is None, the decode node computes the prompt itself.

    `reason` explains the choice. An estimate is None if the node's step-time model is not known.
    """

    prefill: str | None
    decode: str
    reason: str
    local: LatencyEstimate | None = None
    remote: LatencyEstimate | None = None

    @property
    def estimate(self) -> LatencyEstimate | None:
        """The estimate for the alternative that was chosen, local or remote."""
        return self.local if self.prefill is None else self.remote


class PrefixIndex:
    """Records the nodes to which each prefix block was sent. The nodes may since have evicted the blocks.

    The router owns one index and calls it from the router's event loop. To limit memory, the index has two generations
    of up to `max_blocks / 2` blocks. When the young generation is full, it replaces the old one, whose entries are
    dropped unless they were recorded again. This takes a third of the time of an LRU list, which would have to update
    the links between entries.
    """

    def __init__(self, max_blocks: int = 200_000) -> None:
        self._max_young = max(1, max_blocks // 2)
        # Block hash -> nodes. Most adjacent blocks share one tuple object, which makes comparisons fast.
        self._young: dict[bytes, tuple[str, ...]] = {}
        self._old: dict[bytes, tuple[str, ...]] = {}

    def record(self, hashes: Sequence[bytes], *nodes: str) -> None:
        """Record that blocks with these hashes were sent to `nodes`. Keep the last `SCAN_LIMIT` nodes of each block."""
        before, after = NO_NODES, nodes
        for name in hashes:
            known = self._holders(name)
            if known is not before:
                before, after = known, (*(node for node in known if node not in nodes), *nodes)[-SCAN_LIMIT:]
            self._young[name] = after
        if len(self._young) > self._max_young:
            self._young, self._old = {}, self._young

    def _holders(self, name: bytes) -> tuple[str, ...]:
        return self._young.get(name) or self._old.get(name, NO_NODES)

    def overlap(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks of `hashes` were sent to each node, in ascending order of this number."""
        depth: dict[str, int] = {}
        leading = before = self._holders(hashes[0]) if hashes else NO_NODES
        for index, name in enumerate(hashes):
            holders = self._holders(name)
            if holders is not before:
                depth.update((node, index) for node in leading if node not in holders)
                leading, before = tuple(node for node in leading if node in holders), holders
            if not leading:
                break
        depth.update((node, len(hashes)) for node in leading)
        return depth

    def forget(self, node: str) -> None:
        """Remove a node that has left the cluster. This scans the whole index."""
        others: dict[tuple[str, ...], tuple[str, ...]] = {}
        for generation in (self._young, self._old):
            for name, holders in generation.items():
                if node in holders:
                    if holders not in others:
                        others[holders] = tuple(other for other in holders if other != node)
                    generation[name] = others[holders]


def candidates(request_id: str, nodes: Sequence[Node], prefix_match: Node | None) -> Sequence[Node]:
    """Return the nodes that a placement decision considers.

    If there are at most `SCAN_LIMIT` nodes, all are considered. Otherwise, the candidates are `prefix_match` (the node
    with the longest prefix match) and two nodes drawn by a hash of `request_id`.
    """
    if len(nodes) <= SCAN_LIMIT:
        return nodes
    draw = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest())
    drawn = [nodes[draw % len(nodes)], nodes[(draw >> 32) % len(nodes)]]
    return drawn if prefix_match is None else [*drawn, prefix_match]


def place(
    num_tokens: int,
    prefill_nodes: Sequence[NodeView],
    decode_nodes: Sequence[NodeView],
    cached_tokens: Mapping[str, int],
    disaggregate: str = "always",
    encoded_tokens: Mapping[str, int] = NOTHING,
) -> Placement | None:
    """Choose the prefill node with the least work and the decode node with the most room.

    Return None if there are no nodes. All given nodes are considered; the caller limits their number with `candidates`.
    `cached_tokens` maps a node id to the number of prefix tokens that this node probably has cached. `disaggregate` is
    "always", "never" or "auto". "auto" compares the chosen pair of nodes with a decode node that computes the prompt
    itself. That node is either the chosen decode node or the node with the longest prefix match, whichever is predicted
    to be faster. `encoded_tokens` maps a node id to the work, in tokens, that this node saves because it has already
    encoded images of the prompt.
    """
    generating = decode_nodes or prefill_nodes
    if not generating:
        return None
    saved = encoded_tokens.get
    decode = min(generating, key=lambda node: _decode_load(node, num_tokens, cached_tokens, saved(node.id, 0)))
    prefill_nodes = [node for node in prefill_nodes if node.shared_pool_owner in {"", decode.incarnation_id}]
    if not decode_nodes or not prefill_nodes or disaggregate == "never":
        reason = "no_decode_node" if not decode_nodes else "never" if prefill_nodes else "no_prefill_node"
        return Placement(None, decode.id, reason, _local(decode, None, num_tokens, cached_tokens))
    prefill = min(prefill_nodes, key=lambda node: _prefill_work(node, num_tokens, cached_tokens, saved(node.id, 0)))
    cached = cached_tokens.get(prefill.id, 0)
    remote = remote_estimate(prefill, num_tokens, cached, cached_tokens.get(decode.id, 0))
    prefix_match = max(generating, key=lambda node: cached_tokens.get(node.id, 0))
    alone, local = min(
        ((node, _local(node, prefill, num_tokens, cached_tokens)) for node in (decode, prefix_match)),
        key=lambda pair: _total(pair[1]),
    )
    is_local, reason = choose(remote, local) if disaggregate == "auto" else (False, "disaggregated")
    if is_local and prefill.stale:  # without requests, the prefill node would keep its stale model
        is_local, reason = False, "stale_model"
    if is_local:
        return Placement(None, alone.id, reason, local, remote)
    return Placement(prefill.id, decode.id, reason, local, remote)


def _local(
    node: NodeView, teacher: NodeView | None, num_tokens: int, cached_tokens: Mapping[str, int]
) -> LatencyEstimate | None:
    cost = teacher.cost if teacher is not None else None
    return local_estimate(node, cost, num_tokens, cached_tokens.get(node.id, 0))


def _total(estimate: LatencyEstimate | None) -> float:
    return estimate.total_s if estimate is not None else inf


def _prefill_work(
    node: NodeView, num_tokens: int, cached_tokens: Mapping[str, int], saved_tokens: int
) -> tuple[int, int, int]:
    """Return the sort key of a prefill node. It begins with the number of tokens that the node has to compute until the
    end of this prompt."""
    work = node.outstanding_tokens + num_tokens - min(num_tokens, cached_tokens.get(node.id, 0)) - saved_tokens
    return work, node.running, node.placed


def _decode_load(
    node: NodeView, num_tokens: int, cached_tokens: Mapping[str, int], saved_tokens: int
) -> tuple[float, int, int]:
    """Return the sort key of a decode node. It begins with the larger of two shares that would be in use with this
    request: the share of the KV memory, and the share of the batch slots."""
    new_tokens = num_tokens - min(num_tokens, cached_tokens.get(node.id, 0))
    memory = (node.kv_tokens + node.outstanding_tokens + new_tokens) / node.kv_capacity_tokens
    places = (node.running + 1) / node.max_num_seqs
    return max(memory, places), node.outstanding_tokens - saved_tokens, node.placed
