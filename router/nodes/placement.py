"""Chooses nodes for the router, and computes the capacity of its pool.

The code here needs no connections, clocks or event loops, so a simulator can use it for simulated nodes.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, Protocol, TypeVar

from router.nodes.load import kv_capacity_tokens, step_tokens
from scheduler.disaggregate import NodeView
from scheduler.placement import NOTHING, Placement, PrefixIndex, candidates, place
from shared.rpc.messages import NodeInfo

PROMPTS_PER_NODE = 2  # number of prompts to keep queued on a node, even if they are long
SPARE_REQUESTS = 8  # a node gets one more request for every 8 that it can run, so that it is never idle
# The cost of fetching an image's features from another node, as a multiple of the cost of computing the image's tokens.
# Requests with the same image therefore share a node if the nodes are about equally busy.
FETCH_COST = 1
BACKLOG_STEPS = 16  # queued prompts should fill this many steps of a node, about one or two seconds


class PoolCapacity(NamedTuple):
    """The numbers of requests and tokens that all nodes together should hold at once."""

    requests: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0  # tokens of prompts that are not computed yet
    prompts: int = 0  # number of uncomputed prompts that are admitted regardless of their length


class PlacementCandidate(NamedTuple):
    """The placement of a token sequence, and the hashes of the sequence's blocks."""

    placement: Placement
    hashes: list[bytes]
    cached_tokens: int  # length of the cached prefix on the node that computes the prompt


class RoutableNode(Protocol):
    """A node that takes requests."""

    @property
    def info(self) -> NodeInfo: ...
    def view(self) -> NodeView: ...


Routable = TypeVar("Routable", bound=RoutableNode)


def capacity_of(prefill: Iterable[NodeInfo], decode: Iterable[NodeInfo]) -> PoolCapacity:
    """Return the capacity of these nodes, including room for queued prompts that take a second or two to compute."""
    prefill, decode = list(prefill), list(decode)
    generating = decode or prefill
    return PoolCapacity(
        requests=sum(info.max_num_seqs * (SPARE_REQUESTS + 1) // SPARE_REQUESTS + 2 for info in generating),
        kv_tokens=sum(map(kv_capacity_tokens, generating)),
        prompt_tokens=sum(BACKLOG_STEPS * step_tokens(info) for info in prefill + decode),
        prompts=PROMPTS_PER_NODE * len(prefill + decode),
    )


def needs_peer(info: NodeInfo) -> bool:
    """Return whether the node can only compute prompts or only generate, like each server of an SGLang pair."""
    return "no" in {info.attributes.get("computes_prompts"), info.attributes.get("generates")}


class RoutableNodes(Generic[Routable]):
    """The nodes with one fingerprint that take requests, by role. The pool creates new lists only when a node changes,
    so that the time to choose nodes does not grow with the number of nodes."""

    def __init__(self, prefill: list[Routable], decode: list[Routable]) -> None:
        self.prefill, self.decode = prefill, decode
        self.is_paired = any(needs_peer(node.info) for node in (*prefill, *decode))
        self._by_name = {node.info.id: node for node in (*prefill, *decode)}
        self.missing_role = "" if (prefill and decode) or not self.is_paired else "decode" if prefill else "prefill"
        # Length of the longest request that fits on every node, and of the longest that fits on any generating node.
        self.least_kv_tokens = min((kv_capacity_tokens(node.info) for node in (*prefill, *decode)), default=0)
        self.most_kv_tokens = max((kv_capacity_tokens(node.info) for node in decode or prefill), default=0)
        self._has_shared_pools = any(node.info.shared_pool_owner for node in prefill)

    def __contains__(self, node: Routable) -> bool:
        return self._by_name.get(node.info.id) is node

    def encoder(self, digest: bytes) -> Routable:
        """Return the node that encodes the image with this digest for all nodes.

        The node is chosen by rendezvous hashing (Thaler and Ravishankar 1998) among the nodes that compute prompts. All
        routers therefore choose the same node without communication. If a node joins or leaves, few images move."""
        nodes = self.prefill or self.decode
        return max(nodes, key=lambda node: blake2b(node.info.id.encode(), key=digest).digest())

    def choose(
        self,
        identity: str,
        num_tokens: int,
        hashes: list[bytes],
        prefixes: PrefixIndex,
        disaggregate: str,
        *,
        among: tuple[list[Routable], list[Routable]] | None = None,
        avoid: Container[str] = (),
        encoded: Mapping[str, int] = NOTHING,
    ) -> PlacementCandidate | None:
        """Choose the nodes for a sequence of `num_tokens` tokens. Return None if there are no nodes.

        `hashes` are the hashes of the sequence's full blocks. `among` lists the prefill and decode nodes that may be
        chosen; the default is all nodes. A cached prefix does not make a node in `avoid` a candidate. `encoded` maps
        each node that encodes images of the sequence to the number of these images' tokens."""
        prefill, decode = among or (self.prefill, self.decode)
        if not (prefill or decode):
            return None
        block_tokens = (prefill or decode)[0].info.block_tokens
        cached = {name: depth * block_tokens for name, depth in prefixes.overlap(hashes).items()}
        saved = {name: FETCH_COST * tokens for name, tokens in encoded.items()}
        matches = [name for name in reversed(cached) if name not in avoid]  # the longest match first
        if saved:
            spared = Counter(cached) + Counter(saved)
            matches = [name for name, _ in spared.most_common() if name not in avoid]
        decode_views = self._views(identity, decode, matches)
        if self._has_shared_pools:  # a prefill node in a shared pool can hand off only to the pool's owner
            owners = {"", *(view.incarnation_id for view in decode_views)}
            prefill = [node for node in prefill if node.info.shared_pool_owner in owners]
        prefill_views = self._views(identity, prefill, matches)
        may_choose = "always" if self.is_paired else disaggregate
        placement = place(num_tokens, prefill_views, decode_views, cached, may_choose, saved)
        assert placement is not None
        return PlacementCandidate(placement, hashes, cached.get(placement.prefill or placement.decode, 0))

    def _views(self, identity: str, nodes: Sequence[Routable], matches: Sequence[str]) -> list[NodeView]:
        """Return views of the nodes to consider: a few nodes, and the first node in `matches` that may be chosen."""
        known = (self._by_name[name] for name in matches if name in self._by_name)
        role = nodes[0].info.role if nodes else ""
        is_whole = nodes is self.prefill or nodes is self.decode
        prefix_match = next((node for node in known if node.info.role == role and (is_whole or node in nodes)), None)
        return [node.view() for node in candidates(identity, nodes, prefix_match)]
