"""Placement: which nodes take a request. Pure, over the router's own ledger of what it has sent where."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from scheduler.disaggregate import LatencyEstimate, NodeView, choose, local_estimate, remote_estimate

# Above this many nodes a decision looks at two of them and at the best prefix match (power of two choices,
# Mitzenmacher 2001), so that its cost does not grow with the cluster.
SCAN_LIMIT = 16
NOBODY: tuple[str, ...] = ()
Node = TypeVar("Node")


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode node computes the prompt itself, for `reason`."""

    prefill: str | None
    decode: str
    reason: str
    local: LatencyEstimate | None = None  # where step-time models are known
    remote: LatencyEstimate | None = None

    @property
    def estimate(self) -> LatencyEstimate | None:
        """Of the way that was chosen."""
        return self.local if self.prefill is None else self.remote


class PrefixIndex:
    """Which nodes were sent which prefix blocks: bounded, what was not sent for long forgotten. A hint, not a promise.

    Two generations of at least `max_blocks / 2` blocks: whatever was sent during a generation outlives it by one. That
    costs a third of a list in order of use, which touches its neighbours' memory for every block.
    """

    def __init__(self, max_blocks: int = 200_000) -> None:
        self._max_young = max(1, max_blocks // 2)
        # Block -> who was sent it. Neighbouring blocks mostly share one tuple, and are compared by it alone.
        self._young: dict[bytes, tuple[str, ...]] = {}
        self._old: dict[bytes, tuple[str, ...]] = {}

    def record(self, hashes: Sequence[bytes], *nodes: str) -> None:
        """All of `hashes` were sent to all of `nodes`. Of each block the latest `SCAN_LIMIT` nodes are known."""
        before, after = NOBODY, nodes
        for name in hashes:
            known = self._holders(name)
            if known is not before:
                before, after = known, (*(node for node in known if node not in nodes), *nodes)[-SCAN_LIMIT:]
            self._young[name] = after
        if len(self._young) > self._max_young:
            self._young, self._old = {}, self._young

    def _holders(self, name: bytes) -> tuple[str, ...]:
        return self._young.get(name) or self._old.get(name, NOBODY)

    def overlap(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `hashes` that each node was sent, the fewest first."""
        depth: dict[str, int] = {}
        leading = before = self._holders(hashes[0]) if hashes else NOBODY
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
        """The node is gone and its cache with it. Walks the index: rare."""
        others: dict[tuple[str, ...], tuple[str, ...]] = {}
        for generation in (self._young, self._old):
            for name, holders in generation.items():
                if node in holders:
                    if holders not in others:
                        others[holders] = tuple(other for other in holders if other != node)
                    generation[name] = others[holders]


def candidates(request_id: str, nodes: Sequence[Node], knower: Node | None) -> Sequence[Node]:
    """Whom a decision looks at: a few nodes all, of many two drawn ones and the `knower` of the longest prefix."""
    if len(nodes) <= SCAN_LIMIT:
        return nodes
    draw = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest())
    drawn = [nodes[draw % len(nodes)], nodes[(draw >> 32) % len(nodes)]]
    return drawn if knower is None else [*drawn, knower]


def place(
    num_tokens: int,
    prefill_nodes: Sequence[NodeView],
    decode_nodes: Sequence[NodeView],
    cached_tokens: Mapping[str, int],
    disaggregate: str = "always",
) -> Placement | None:
    """The prefill node that would finish the prompt first and the decode node with the most room; None: nobody lives.

    Looks at every node that it is given: see `candidates`.
    `cached_tokens`: prefix tokens that each node probably holds. `disaggregate`: "always" | "never" | "auto", which
    compares that pair with that decode node alone, and with the one that has most of the prompt already
    (scheduler.disaggregate).
    """
    generating = decode_nodes or prefill_nodes
    if not generating:
        return None
    decode = min(generating, key=lambda node: _decode_load(node, num_tokens, cached_tokens))
    prefill_nodes = [node for node in prefill_nodes if node.shared_pool_owner in {"", decode.incarnation_id}]
    if not decode_nodes or not prefill_nodes or disaggregate == "never":
        reason = "no_decode_node" if not decode_nodes else "never" if prefill_nodes else "no_prefill_node"
        return Placement(None, decode.id, reason, _local(decode, None, num_tokens, cached_tokens))
    prefill = min(prefill_nodes, key=lambda node: _prefill_work(node, num_tokens, cached_tokens))
    cached = cached_tokens.get(prefill.id, 0)
    remote = remote_estimate(prefill, num_tokens, cached, cached_tokens.get(decode.id, 0))
    knower = max(generating, key=lambda node: cached_tokens.get(node.id, 0))
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
) -> LatencyEstimate | None:
    cost = teacher.cost if teacher is not None else None
    return local_estimate(node, cost, num_tokens, cached_tokens.get(node.id, 0))


def _total(estimate: LatencyEstimate | None) -> float:
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
