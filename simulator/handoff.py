"""Simulated handoffs. They reserve, push and commit in the same order as `prefill_node.sender.HandoffSender`."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from engine.emulation import ServingTimes
from simulator.events import EventQueue
from simulator.node import TOKEN
from simulator.routed import RoutedNode, SimulatedRequest

LINK = "emulated"  # the name of the channel in records


class HandoffCluster(Protocol):
    """The parts of a cluster that a handoff uses."""

    events: EventQueue
    times: ServingTimes

    def add(
        self, request: SimulatedRequest, node: RoutedNode, handoff: "SimulatedHandoff | None", *, receives: bool = False
    ) -> None: ...
    def abort(self, request: SimulatedRequest, node: RoutedNode) -> None: ...
    def prompt_computed(self, request: SimulatedRequest) -> None: ...
    def on_handoff(self, handoff: "SimulatedHandoff", kind: str, began_s: float, **fields: Any) -> None: ...


class SimulatedHandoff:
    """The handoff of one request. It reserves blocks at the request's first step, pushes the full blocks of each chunk
    while the next chunk is computed, and commits after the last push and the first token."""

    def __init__(
        self, cluster: HandoffCluster, request: SimulatedRequest, prefill: RoutedNode, decode: RoutedNode
    ) -> None:
        self.cluster, self.request, self.prefill, self.decode = cluster, request, prefill, decode
        self.num_held = 0  # number of the prompt's blocks that the decode node had cached
        self.num_pushed = 0
        self._num_blocks: int | None = None  # number of blocks to push; None until the decode node has reserved them
        self._num_computed, self._began_s = 0, 0.0
        self.is_cancelled = self._has_begun = self._is_busy = self._has_first = False

    def begin(self) -> None:
        """Reserve blocks at the request's first step. Later calls do nothing."""
        if not self._has_begun:
            self._has_begun, self._began_s = True, self.cluster.events.now
            self._after_call(self.cluster.add, self.request, self.decode, self, receives=True)

    def reserved(self, num_held: int, num_blocks: int) -> None:
        """Process the decode node's reply: it already had `num_held` blocks, and has reserved `num_blocks` more."""
        self.num_held, self._num_blocks = num_held, num_blocks
        self.cluster.on_handoff(self, "reserving", self._began_s)
        self._proceed()

    def progress(self, num_computed: int, *, has_first: bool) -> None:
        """Process a step, after which `num_computed` tokens of the prompt have KV. `has_first` is true if the step
        sampled the first token."""
        self._num_computed, self._has_first = num_computed, self._has_first or has_first
        self._proceed()

    def cancel(self) -> None:
        """Stop, because the request ended at its first token."""
        self.is_cancelled = True
        self.cluster.abort(self.request, self.decode)

    def _proceed(self) -> None:
        if self._is_busy or self._num_blocks is None or self.is_cancelled or self.request.is_over:
            return
        size, num_prompt = self.prefill.info.block_tokens, self.request.num_prompt
        done = -(-num_prompt // size) if self._num_computed >= num_prompt else self._num_computed // size
        if (count := done - self.num_held - self.num_pushed) > 0:
            self._is_busy, now = True, self.cluster.events.now
            self.cluster.events.at(self.prefill.link.push(now, count), self._pushed, count, now)
        elif self.num_pushed == self._num_blocks and self._has_first:
            self._is_busy = True
            self._after_call(self._commit)

    def _pushed(self, count: int, began_s: float) -> None:
        self.num_pushed += count
        moved = {"count": count, "bytes": count * self.prefill.info.block_bytes, "channel": LINK}
        self.cluster.on_handoff(self, "transfer", began_s, **moved)
        if self.num_pushed == self._num_blocks:
            self._answered()
        else:  # the checksums of these blocks are sent and acknowledged before the next push
            self._after_call(self._after_call, self._answered)

    def _answered(self) -> None:
        self._is_busy = False
        self._proceed()

    def _commit(self) -> None:
        """Let the decode node continue the request. The router is notified, and the prefill node frees its blocks."""
        if self.request.is_over:
            return
        row = self.request.rows[self.decode.info.id]
        self.decode.node.post(lambda scheduler: scheduler.kv_received(row, TOKEN))
        self._after_call(self.cluster.prompt_computed, self.request)
        self.cluster.on_handoff(self, "received", self.cluster.events.now)
        self._after_call(self._committed, self.cluster.events.now)
        self.cluster.abort(self.request, self.prefill)

    def _committed(self, began_s: float) -> None:
        self.prefill.link.num_handoffs += 1
        self.cluster.on_handoff(self, "committed", began_s)
        self.cluster.on_handoff(self, "ended", self.cluster.events.now, reason="handed_off")

    def _after_call(self, function: Callable[..., object], *args: Any, **more: Any) -> None:
        self.cluster.events.at(self.cluster.events.now + self.cluster.times.rpc_s, partial(function, *args, **more))
