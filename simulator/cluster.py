"""A simulated cluster. It admits and places requests with the router's classes, and simulates nodes and transfers."""

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from engine.emulation import Emulation
from router.dispatch.admission import AdmissionQueue, AdmissionRefusedError, QueueEntry
from router.dispatch.rules import DispatchRules
from router.nodes.load import LoadCharge, kv_capacity_tokens
from router.nodes.placement import RoutableNodes, capacity_of
from scheduler.budget import budget_of
from scheduler.cost import CostModel
from scheduler.geometry import Geometry
from scheduler.placement import Placement, PrefixIndex
from scheduler.policy import POLICIES
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import NodeInfo, NodeStats
from simulator.events import EventQueue
from simulator.handoff import LINK, SimulatedHandoff
from simulator.node import SimulatedNode, StepTimes, Stretch
from simulator.routed import RoutedNode, SimulatedRequest, TransferLink

if TYPE_CHECKING:  # pydantic is not available in a browser
    from shared.config.settings import ComputingSettings, ServingSettings

# Settings that `NodeInfo.attributes` contains.
ATTRIBUTES = ("policy", "max_num_batched_tokens", "long_prefill_token_threshold")
TIMEOUT, REFUSED, TOO_LARGE = "timeout", "refused", "the request does not fit into the KV cache"


@contextmanager
def paused_gc() -> Iterator[None]:
    """Turn off garbage collection, because a run creates no reference cycles, and each collection would visit all
    requests."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster to simulate.

    `prefill` and `decode` are the numbers of nodes in each role. `serving` has the settings of the router, and
    `computing` has the settings of the nodes. All nodes emulate `device`.
    """

    prefill: int
    decode: int
    serving: "ServingSettings"
    computing: "ComputingSettings"
    device: Emulation

    @property
    def block_tokens(self) -> int:
        return self.computing.block_size or self.device.block_tokens

    @property
    def num_blocks(self) -> int:
        """The number of blocks of each node, including the dummy block."""
        return self.computing.num_blocks or 1 + self.device.kv_tokens // self.block_tokens

    @property
    def max_num_seqs(self) -> int:
        return self.computing.max_num_seqs or self.device.max_num_seqs

    @property
    def kv_tokens(self) -> int:
        """The length of the longest request that a node can hold."""
        capacity = Geometry(self.block_tokens).capacity(self.num_blocks, self.computing.max_num_batched_tokens)
        return capacity * self.block_tokens

    @property
    def cost(self) -> CostModel:
        """The step-time model that a live node would learn: the costs of the device, plus the time of the host."""
        device, times = self.device, self.device.times
        overhead, per_decode = device.cost.overhead + times.step_s, device.cost.per_decode + times.slice_s
        return replace(device.cost, overhead=overhead, per_decode=per_decode)


class SimulatedCluster:
    """A router and its nodes on one virtual clock. `run` serves requests and sets their results.

    The router admits and places every request with the objects of the real router. Nodes report their state at every
    heartbeat. Nodes do not fail, so a request is never retried: it ends when it is refused or times out.
    """

    def __init__(self, plan: ClusterPlan, *, skips: bool = True, seed: int = 0) -> None:
        """If `skips` is false, every step is simulated separately, which is slower. `seed` determines the random
        variations in the durations of steps."""
        self.plan, self.times = plan, plan.device.times
        self.events, self._cost = EventQueue(), plan.cost.packed()
        serving = plan.serving
        self.queue = AdmissionQueue(serving.max_queue_s, serving.max_queued_tokens)
        self.rules = DispatchRules(disaggregate=serving.disaggregate, ttft_slo_s=serving.ttft_slo_ms / 1000)
        roles = ["prefill"] * plan.prefill + ["decode"] * plan.decode
        self.nodes = [self._node(role, number, skips, f"{seed} {number}") for number, role in enumerate(roles)]
        self._by_name = {node.info.id: node for node in self.nodes}
        self.routable = RoutableNodes(self.nodes[: plan.prefill], self.nodes[plan.prefill :])
        self.prefixes = PrefixIndex()
        self._waiting: dict[QueueEntry, SimulatedRequest] = {}
        self._granted: deque[QueueEntry] = deque()  # entries to place; the first one is being placed
        self.num_open = 0  # requests that have not ended, including the next one to arrive
        self._timeout_s = inf
        infos = [[node.info for node in pool] for pool in (self.routable.prefill, self.routable.decode)]
        self.queue.resize(capacity_of(*infos), 0.0)

    def _node(self, role: str, number: int, skips: bool, seed: str) -> RoutedNode:
        plan, settings, device = self.plan, self.plan.computing, self.plan.device
        size = plan.block_tokens
        limits = StepLimits(
            settings.max_num_batched_tokens,
            plan.max_num_seqs,
            settings.long_prefill_token_threshold,
            settings.max_num_partial_prefills,
        )
        budget = budget_of(settings.max_num_batched_tokens, settings.tbt_slo_ms / 1000, is_fitted=True)
        scheduler = Scheduler(limits, plan.num_blocks, size, POLICIES[settings.policy], budget)
        scheduler.cost = plan.cost
        times = StepTimes(
            device.cost, self.times.step_s, self.times.slice_s, device.residuals, device.prefill_residuals, seed
        )
        name = f"{role}-{number if role == 'prefill' else number - plan.prefill}"
        info = NodeInfo(
            id=name,
            incarnation_id=name,
            role=role,
            address=name,
            model=device.name,
            fingerprint="",
            block_tokens=size,
            block_bytes=size * device.kv_bytes_per_token,
            num_blocks=1 + plan.kv_tokens // size,
            max_model_len=settings.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            attributes={
                **{name: str(getattr(settings, name)) for name in ATTRIBUTES},
                "device": f"simulated {device.name}",
                "max_num_seqs": str(plan.max_num_seqs),
                "max_step_tokens": str(budget.ceiling),
                "tbt_slo_ms": f"{settings.tbt_slo_ms:g}",
            },
        )
        node = SimulatedNode(name, self.events, scheduler, times, self, skips=skips)
        link = TransferLink(device.link, size * device.kv_bytes_per_token, self.times.push_s)
        return RoutedNode(info, node, lambda: self.events.now, link)

    # ---- a run --------------------------------------------------------------------------------------------------

    def run(self, requests: Iterable[SimulatedRequest], timeout_s: float = inf) -> None:
        """Serve requests, given in the order of their arrival, until all have ended. A request ends at the latest
        `timeout_s` after its arrival. Call this method only once."""
        with paused_gc():
            self.begin(requests, timeout_s)
            self.events.run()

    def begin(self, requests: Iterable[SimulatedRequest], timeout_s: float = inf) -> None:
        """Schedule the first arrival and the heartbeats, so that `events.run` serves the requests. The arguments are
        those of `run`."""
        self._timeout_s = timeout_s
        arrivals = iter(requests)
        if (first := next(arrivals, None)) is None:
            return
        self.num_open = 1
        # Heartbeats are spread, because real nodes do not report at the same times.
        for number, node in enumerate(self.nodes):
            node.report(self.stats(node))
            phase_s = self.plan.computing.heartbeat_s * (number + 1) / len(self.nodes)
            self.events.at(phase_s, self._heartbeat, node)
        self.events.at(first.at_s + self.times.request_s, self._arrive, first, arrivals)

    def ends(self) -> dict[SimulatedNode, list[float]]:
        """Return, for each node, the times in seconds at which its steps ended."""
        return {node.node: node.node.times.ends(node.node.log) for node in self.nodes}

    def _heartbeat(self, node: RoutedNode) -> None:
        if not self.num_open:
            return
        now, stats = self.events.now, self.stats(node)
        self.events.at(now + self.times.rpc_s, node.report, stats)
        self.events.at(now + self.plan.computing.heartbeat_s, self._heartbeat, node)

    def stats(self, node: RoutedNode) -> NodeStats:
        """Return the stats that a node reports at a heartbeat."""
        stats, link = node.node.stats(), node.link
        stats.handoffs, stats.blocks_moved = link.num_handoffs, link.num_blocks
        stats.bytes_moved = link.num_blocks * node.info.block_bytes
        stats.channels = {"decode": LINK} if link.num_blocks else {}
        stats.cost = self._cost
        stats.transfer = [link.push_s + link.speed.latency_s, 1 / link.speed.bytes_per_s]
        return stats

    # ---- the router ---------------------------------------------------------------------------------------------

    def _arrive(self, request: SimulatedRequest, arrivals: "Iterable[SimulatedRequest]") -> None:
        if (following := next(iter(arrivals), None)) is not None:
            self.num_open += 1
            self.events.at(following.at_s + self.times.request_s, self._arrive, following, arrivals)
        now = self.events.now
        self.on_accepted(request)
        if request.num_prompt + request.max_tokens > kv_capacity_tokens(self.nodes[-1].info):
            self._close(request, TOO_LARGE)
            return
        entry = self.queue.entry(request.num_prompt, request.max_tokens, now)
        self._waiting[entry] = request
        try:
            granted = self.queue.offer(entry, now)
        except AdmissionRefusedError as error:
            del self._waiting[entry]
            self._close(request, f"{REFUSED}: {error}")
            return
        request.entry = entry
        self._start(granted)
        if not entry.is_granted and entry.expires < request.at_s + self._timeout_s:
            self.events.at(entry.expires, self._expire, request)
        if self._timeout_s < inf:
            self.events.at(request.at_s + self._timeout_s, self._time_out, request)

    def _start(self, granted: Iterable[QueueEntry]) -> None:
        """Place the requests of these entries. If a request is refused, its slot may be granted to other entries. A
        nested call of this method then adds them to `_granted`, and the outermost call places them."""
        is_placing = bool(self._granted)
        self._granted += granted
        while self._granted and not is_placing:
            entry = self._granted[0]
            self._place(self._waiting.pop(entry), entry)
            self._granted.popleft()

    def _place(self, request: SimulatedRequest, entry: QueueEntry) -> None:
        hashes = request.hashes
        found = self.routable.choose(
            request.attempt, request.num_prompt, hashes, self.prefixes, self.rules.disaggregate
        )
        assert found is not None
        placement = found.placement
        decode = self._by_name[placement.decode]
        prefill = self._by_name[placement.prefill] if placement.prefill is not None else None
        try:
            self.rules.check_slo(placement, is_stale=(prefill or decode).load.is_stale)
        except AdmissionRefusedError as error:
            self._close(request, f"{REFUSED}: {error}")
            return
        self.queue.credit_prefix_hit(entry, found.cached_tokens)
        request.nodes = (decode,) if prefill is None else (prefill, decode)
        self.prefixes.record(hashes, *(node.info.id for node in request.nodes))
        loads = None if prefill is None else prefill.load, decode.load
        request.charge = LoadCharge(*loads, request.num_prompt, found.cached_tokens, request.max_tokens)
        for node in request.nodes:
            node.load.count_placement()
            node.num_requests += 1
        self.on_placed(request, placement)
        handoff = None if prefill is None else SimulatedHandoff(self, request, prefill, decode)
        self.events.at(self.events.now + self.times.rpc_s, self.add, request, prefill or decode, handoff)

    def _expire(self, request: SimulatedRequest) -> None:
        if request.entry in self._waiting:
            self._close(request, "the request waited too long in the queue")

    def _time_out(self, request: SimulatedRequest) -> None:
        if not request.is_over:
            self._close(request, TIMEOUT)

    def prompt_computed(self, request: SimulatedRequest) -> None:
        """Update the router when it learns that a decode node has the KV of the prompt."""
        if request.is_over or request.charge is None or request.entry is None:
            return
        if not request.charge.is_prompt_computed:
            request.charge.prompt_computed()
            self._start(self.queue.prompt_computed(request.entry, self.events.now))

    def _close(self, request: SimulatedRequest, error: str = "") -> None:
        """End a request, on every node that still runs it, and free its slot."""
        request.is_over, request.error, request.finish_s = True, error, self.events.now
        self.num_open -= 1
        if request.charge is not None:
            request.charge.end()
        for node in request.nodes:
            node.num_requests -= 1
            if error:
                node.node.settle()
                self.abort(request, node)
        request.num_generated = max((row.num_generated for row in request.rows.values()), default=0)
        request.rows = {}
        if request.entry is not None:
            self._waiting.pop(request.entry, None)
            self._start(self.queue.release(request.entry, request.num_generated, self.events.now))
        self.on_closed(request)

    # ---- the nodes ----------------------------------------------------------------------------------------------

    def add(
        self, request: SimulatedRequest, node: RoutedNode, handoff: SimulatedHandoff | None, *, receives: bool = False
    ) -> None:
        """Let a node add the request to its scheduler. With a handoff, the node sends the KV of the prompt or, if
        `receives` is set, receives it."""
        if request.is_over or (handoff is not None and handoff.is_cancelled):
            return
        tokens = list(request.tokens) or [0] * request.num_prompt
        sends = handoff is not None and not receives
        row = Request(
            request.attempt, tokens, request.num_prompt, request.max_tokens, receive_kv=receives, send_kv=sends
        )
        row.hashes, row.sampling = list(request.hashes), (request, handoff)
        request.rows[node.info.id] = row
        received_s = self.events.now

        def add_row(scheduler: Scheduler) -> None:
            scheduler.add(row)
            self.on_added(node, row, received_s)

        node.node.post(add_row)

    def abort(self, request: SimulatedRequest, node: RoutedNode) -> None:
        """Send a node the command to end the request, if it runs there."""
        if (row := request.rows.get(node.info.id)) is not None:
            self.events.at(self.events.now + self.times.rpc_s, node.node.post, lambda scheduler: scheduler.abort(row))

    # ---- hooks for records -------------------------------------------------------------------------------------

    def on_accepted(self, request: SimulatedRequest) -> None:
        """Called when the router has accepted a request."""

    def on_placed(self, request: SimulatedRequest, placement: Placement) -> None:
        """Called when the router has chosen the nodes of a request."""

    def on_closed(self, request: SimulatedRequest) -> None:
        """Called when a request has ended."""

    def on_added(self, node: RoutedNode, row: Request, received_s: float) -> None:
        """Called when a node that received a request at `received_s` has given it to its scheduler."""

    def on_handoff(self, handoff: SimulatedHandoff, kind: str, began_s: float, **fields: Any) -> None:
        """Called when an event of a handoff has occurred. `kind` and `fields` are those of a `RequestEvent`."""

    # ---- NodeListener -------------------------------------------------------------------------------------------

    def on_receiving(self, node: SimulatedNode, requests: list[Request]) -> None:
        for row in requests:
            _, handoff = row.sampling
            held, reserved = row.num_computed // node.scheduler.block_tokens, len(row.reserved)
            self.events.at(self.events.now + self.times.rpc_s, handoff.reserved, held, reserved)

    def on_scheduled(self, node: SimulatedNode, step: Step) -> None:
        for slice_ in step.slices:
            if slice_.request.send_kv:
                slice_.request.sampling[1].begin()
        self._begin_spans(node, step.decodes, step.number)

    def on_stretch(self, node: SimulatedNode, steps: Stretch) -> None:
        self._begin_spans(node, node.scheduler.running, steps.number)

    def _begin_spans(self, node: SimulatedNode, rows: Sequence[Request], number: int, num_new: int = 1) -> None:
        """Begin a span for each request that samples a token in step `number` but sampled none in the step before.
        `num_new` is the number of tokens that this step has yet to add to each sequence: 0 if the step has ended."""
        for row in rows:
            request, shift = row.sampling[0], len(row.tokens) + num_new - number
            if shift != request.shift or request.spans[-1][0] is not node:
                request.shift = shift
                request.spans.append((node, number, row.num_generated + num_new - 1))
                request.num_cached = max(request.num_cached, row.num_cached)

    def on_outputs(self, node: SimulatedNode, step: Step, outputs: Sequence[StepOutput]) -> None:
        now = self.events.now
        self._begin_spans(node, [output.request for output in outputs if output.tokens], step.number, num_new=0)
        for row, _, tokens, finish, _ in outputs:
            request, handoff = row.sampling
            if row.send_kv:
                handoff.cancel() if finish else handoff.progress(row.num_computed, has_first=bool(tokens))
            if finish:
                self.events.at(now + self.times.answer_s, self._finish, request)
            elif tokens and not row.send_kv and not request.charge.is_prompt_computed:
                self.events.at(now + self.times.answer_s, self.prompt_computed, request)

    def on_ended(self, node: SimulatedNode, outputs: list[StepOutput]) -> None:
        for output in outputs:
            self.events.at(self.events.now + self.times.answer_s, self._finish, output.request.sampling[0])

    def _finish(self, request: SimulatedRequest) -> None:
        if not request.is_over:
            self._close(request)
