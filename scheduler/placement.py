"""Placement: which nodes take a request. Pure, over the router's own ledger of what it has sent where."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Above this many nodes a decision looks at two of them and at the best prefix match (power of two choices,
# Mitzenmacher 2001), so that its cost does not grow with the cluster.
SCAN_LIMIT = 16


@dataclass(slots=True)
class NodeView:
    """What placement knows of a live node. Tokens are counted from what the router sent and the node told."""

    id: str
    role: str
    outstanding_tokens: int = 0  # prompt tokens sent there and not computed yet
    running: int = 0
    max_num_seqs: int = 1
    kv_tokens: int = 0  # tokens whose KV is or will be there
    kv_capacity_tokens: int = 1
    placed: int = 0  # requests ever sent there: among equals, whose turn it is


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode node computes the prompt itself, for `reason`."""

    prefill: str | None
    decode: str
    reason: str


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
) -> Placement | None:
    """The prefill node that would finish the prompt first and the decode node with the most room; None: nobody lives.

    `cached_tokens`: prefix tokens that each node probably holds.
    """
    generating = decode_nodes or prefill_nodes
    if not generating:
        return None
    decode = min(
        _candidates(request_id, generating, cached_tokens),
        key=lambda node: _decode_load(node, num_tokens, cached_tokens),
    )
    if not decode_nodes:
        return Placement(None, decode.id, "no_decode_node")
    if not prefill_nodes:
        return Placement(None, decode.id, "no_prefill_node")
    prefill = min(
        _candidates(request_id, prefill_nodes, cached_tokens),
        key=lambda node: _prefill_work(node, num_tokens, cached_tokens),
    )
    return Placement(prefill.id, decode.id, "disaggregated")


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
