"""The simulated router's view of the requests, the nodes, and the links between nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from engine.emulation import LinkSpeed
from router.dispatch.admission import QueueEntry
from router.nodes.load import LoadCharge, NodeLoad
from scheduler.disaggregate import NodeView
from scheduler.request import Request
from shared.rpc.messages import NodeInfo, NodeStats
from simulator.node import SimulatedNode


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request and its history. Times are seconds of the virtual clock.

    `hashes` are the hashes of the prompt's full blocks; equal hashes mean equal prefixes. `spans` records when the
    generated tokens were sampled. A span has the node, the number of the step that sampled the span's first token, and
    the index of this token. Each following step of the node sampled one more token of the span.
    """

    id: str
    at_s: float
    num_prompt: int
    max_tokens: int
    hashes: list[bytes]
    tokens: Sequence[int] = ()  # tokens of the prompt; empty if their values do not matter
    spans: list[tuple[SimulatedNode, int, int]] = field(default_factory=list)
    finish_s: float = inf  # when the client received the last token
    error: str = ""
    num_generated: int = 0
    num_cached: int = 0  # tokens of the prompt that the computing node had cached
    entry: QueueEntry | None = None
    charge: LoadCharge | None = None
    nodes: "tuple[RoutedNode, ...]" = ()  # the prefill node if there is one, and the decode node
    rows: dict[str, Request] = field(default_factory=dict)  # the request in each node's scheduler, by the node's name
    shift: int = -(2**62)  # the sequence's length minus the step's number; this difference is constant within a span
    is_over: bool = False

    @property
    def attempt(self) -> str:
        """The id of the request's only attempt, by which nodes identify the request."""
        return f"{self.id}.0.0"

    def token_s(self, answer_s: float, ends: dict[SimulatedNode, list[float]]) -> list[float]:
        """Return the times at which the client received the tokens. `ends` has the end times of each node's steps."""
        lasts = [first for *_, first in self.spans[1:]] + [self.num_generated]
        return [
            end_s + answer_s
            for (node, step, first), last in zip(self.spans, lasts, strict=False)
            for end_s in ends[node][step : step + last - first]
        ]


class RoutedNode:
    """A node as the router sees it: its description, its load, and its last report."""

    def __init__(self, info: NodeInfo, node: SimulatedNode, clock: Callable[[], float], link: "TransferLink") -> None:
        self.info, self.node, self.link = info, node, link
        self.load = NodeLoad(clock)
        self.stats = NodeStats()
        self.num_requests = 0

    def view(self) -> NodeView:
        return self.load.view(self.info, self.stats, self.num_requests)

    def report(self, stats: NodeStats) -> None:
        self.load.read_stats(stats, has_stepped=stats.steps != self.stats.steps)
        self.stats = stats


class TransferLink:
    """The link of one prefill node. It carries one push at a time; other pushes wait in the order of their arrival."""

    def __init__(self, speed: LinkSpeed, block_bytes: int, push_s: float) -> None:
        """`push_s` is the time that a push takes for checksums, in addition to its time on the link."""
        self.speed, self.push_s = speed, push_s
        self._block_s = block_bytes / speed.bytes_per_s
        self._free_at_s = 0.0
        self.num_blocks = self.num_handoffs = 0  # what the link has carried so far

    def push(self, now_s: float, num_blocks: int) -> float:
        """Queue a push, and return the time at which it ends."""
        self.num_blocks += num_blocks
        self._free_at_s = max(now_s, self._free_at_s) + self.speed.latency_s + num_blocks * self._block_s
        return self._free_at_s + self.push_s
