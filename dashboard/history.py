"""The router's bounded record of the nodes' steps and of the latest requests.

Nodes stamp their records with the clock of their host. The clock's offset is estimated from the node's latest
heartbeats, as the smallest difference between the arrival and the sending of a heartbeat. The estimate is too large by
that heartbeat's latency, which is a fraction of a millisecond on a local network. Only offsets over 1 ms are corrected.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from dashboard.step_ring import StepRing, members_of
from dashboard.trace import CHUNK, AttemptSpan, RequestTrace, TraceEvent
from router.observer import RouterObserver
from scheduler.cost import CostModel
from shared.clock import now_ns
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord

MAX_REQUESTS = 4000
MAX_NODES = 256
GONE_NS = 900 * 10**9  # after this time without an update, a node is dropped when another node joins
MAX_TEXT = 200  # maximum characters of a name that a node sends
HEARTBEATS = 128  # number of latest heartbeats from which a clock's offset is estimated
OFFSET_NS = 1_000_000  # a smaller offset is ignored
MAX_NS = 2**62
WINDOW_NS = 10 * 10**9  # a node's activity is measured over the last WINDOW_NS


@dataclass(slots=True, frozen=True)
class HistoryLimits:
    """The maximum sizes of a history."""

    requests: int = MAX_REQUESTS
    rows: int = 500_000  # events and chunks of all requests; this many take 150 MB
    serials: int = 16_384  # maximum number of entries in each node's `NodeHistory.serials`


class RecordObserver(Protocol):
    """Receives every record as it arrives, with times on the router's clock."""

    def step(self, info: NodeInfo, record: StepRecord) -> None: ...
    def event(self, info: NodeInfo, event: RequestEvent) -> None: ...
    def lost(self, node: str) -> None: ...
    def finished(self, id: str) -> None: ...


@dataclass(slots=True)
class NodeHistory:
    """The records of one incarnation of a node: its steps, the requests in them, and the offset of its clock."""

    incarnation_id: str
    steps: StepRing = field(default_factory=StepRing)
    serials: dict[int, str] = field(default_factory=dict)  # attempt ids by serial (a request's number in step records)
    delays_ns: deque[int] = field(default_factory=lambda: deque(maxlen=HEARTBEATS))
    offset_ns: int = 0
    updated_ns: int = 0

    def on_update(self, load: NodeStats, received_ns: int) -> None:
        self.updated_ns = received_ns
        if load.cost:
            self.steps.model = CostModel.unpacked(load.cost)
        if 0 < load.sent_ns < MAX_NS:
            self.delays_ns.append(received_ns - load.sent_ns)
            offset = min(self.delays_ns)
            self.offset_ns = offset if abs(offset) > OFFSET_NS else 0

    def name(self, serial: int, attempt: str, limit: int) -> None:
        self.serials[serial] = attempt
        if len(self.serials) > limit:
            del self.serials[next(iter(self.serials))]


class RequestHistory(RouterObserver):
    """The traces of the latest requests, and the steps of all nodes.

    The router reports requests and nodes to this `RouterObserver`. `/v1/requests`, `/v1/steps`, `/events`, `/trace` and
    the metrics read it. Everything runs on the router's event loop, but other threads may read the copies that
    `rings` and `traces` return. Malformed records of a node are dropped and counted. Memory is bounded by
    `limits`, and the oldest requests are dropped first.
    """

    def __init__(self, now: Callable[[], int] = now_ns, limits: HistoryLimits = HistoryLimits()) -> None:
        self._observers: list[RecordObserver] = []
        self.num_malformed = 0
        self._now = now
        self._limits = limits
        self._nodes: dict[str, NodeHistory] = {}
        self._traces: dict[str, RequestTrace] = {}  # oldest first
        self._num_rows = 0  # number of rows of all traces
        self.version = 0  # counts the changes of all requests

    def subscribe(self, observer: RecordObserver) -> None:
        """Pass all further records to `observer` as well."""
        self._observers.append(observer)

    # ---- from the nodes -----------------------------------------------------------------------------------------

    def node_updated(self, info: NodeInfo, update: NodeUpdate) -> None:
        if info.id not in self._nodes and len(self._nodes) >= MAX_NODES and not (update.steps or update.events):
            return  # the history is full: do not replace another node by a node without records
        node = self._node_history(info)
        if update.stats is not None:
            node.on_update(update.stats, self._now())
        for event in update.events:  # events come first, because they assign the serials that steps refer to
            if len(event.id) > MAX_TEXT or not 0 <= event.at_ns < MAX_NS:
                self.num_malformed += 1
                continue
            event.at_ns += node.offset_ns
            self._event(info.id, node, event)
            for observer in self._observers:
                observer.event(info, event)
        for record in update.steps:
            record.start_ns += node.offset_ns
            try:
                self._step(info.id, node, record)
            except ValueError:
                self.num_malformed += 1
                continue
            for observer in self._observers:
                observer.step(info, record)

    def node_lost(self, node: str) -> None:
        for observer in self._observers:
            observer.lost(node)

    def _node_history(self, info: NodeInfo) -> NodeHistory:
        node = self._nodes.get(info.id)
        if node is None or node.incarnation_id != info.incarnation_id:  # a new incarnation counts its steps from 0
            self._nodes.pop(info.id, None)
            since_ns = self._now() - GONE_NS
            for name in [name for name, other in self._nodes.items() if other.updated_ns < since_ns]:
                del self._nodes[name]
            if len(self._nodes) >= MAX_NODES:
                del self._nodes[min(self._nodes, key=lambda name: self._nodes[name].updated_ns)]
            node = self._nodes[info.id] = NodeHistory(info.incarnation_id, updated_ns=self._now())
        return node

    def _step(self, name: str, node: NodeHistory, record: StepRecord) -> None:
        row = node.steps.add(record)
        if row.num_prefills <= 0:
            return
        for member in members_of(record.members[: 12 * row.num_prefills], row.num_prefills):
            span = self._attempt(node.serials.get(member.serial, ""))
            if span is not None:
                duration_ns, reason = row.end_ns - row.start_ns, f"step {row.number}"
                chunk = TraceEvent(name, CHUNK, row.end_ns, duration_ns, member.num_tokens, reason=reason)
                self._num_rows += span.add(chunk)
        self._make_room()

    def _event(self, name: str, node: NodeHistory, event: RequestEvent) -> None:
        if event.kind == "queued" and event.serial >= 0:
            node.name(event.serial, event.id, self._limits.serials)
        trace, span = self._trace(event.id), self._attempt(event.id)
        if trace is None or span is None:
            return
        texts = (text[:MAX_TEXT] for text in (event.peer, event.channel, event.reason))
        duration_ns = event.duration_us * 1000
        traced = TraceEvent(name, event.kind, event.at_ns, duration_ns, event.count, event.bytes, *texts)
        self._num_rows += span.add(traced)
        self._change(trace)
        self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest requests until the number of requests and the number of rows are within the limits."""
        while len(self._traces) > self._limits.requests or (
            self._num_rows > self._limits.rows and len(self._traces) > 1
        ):
            identity = next(iter(self._traces))
            self._num_rows -= sum(span.num_rows for span in self._traces.pop(identity).attempts.values())

    def _change(self, trace: RequestTrace) -> None:
        self.version = trace.version = self.version + 1

    # ---- from HTTP requests and the dispatcher ------------------------------------------------------------------

    def accepted(
        self, id: str, num_prompt: int, num_samples: int, traceparent: str = "", waited_s: float = 0.0
    ) -> None:
        trace = self._traces.get(id)
        if trace is None:
            trace = self._traces[id] = RequestTrace(id, self._now() - round(waited_s * 1e9), traceparent=traceparent)
            self._make_room()
        trace.num_prompt += num_prompt
        trace.num_samples += num_samples
        trace.samples_per_prompt = num_samples
        trace.ended_ns = None  # all samples of the request's earlier prompts may have ended already
        self._change(trace)

    def output(self, id: str, sample: int, num_tokens: int) -> None:
        trace = self._traces.get(id)
        if trace is not None and num_tokens:
            trace.output(sample, num_tokens, self._now())
            self.version = trace.version = self.version + 1  # `_change`, inlined to save a call for each token

    def ended(self, id: str, sample: int, how: str, error: Exception | None = None) -> None:
        trace = self._traces.get(id)
        if trace is not None:
            trace.ended(how, self._now(), error)
            self._change(trace)
            if trace.num_ended == trace.num_samples:
                for observer in self._observers:
                    observer.finished(id)

    def placed(
        self, attempt: str, prefill: str | None, decode: str, reason: str, local_s: float = 0.0, remote_s: float = 0.0
    ) -> None:
        trace = self._trace(attempt)
        if trace is not None:
            before_ns = trace.output_ns if trace.num_samples == 1 else 0
            now_ns, num_before = self._now(), trace.num_tokens(attempt)
            placed = AttemptSpan(attempt, prefill, decode, reason, now_ns, local_s, remote_s, num_before, before_ns)
            trace.attempts[attempt] = placed
            self._change(trace)

    def inexact(self, attempt: str, why: str) -> None:
        if (trace := self._trace(attempt)) is not None:
            trace.is_exact = False
            self._change(trace)

    # ---- reading ------------------------------------------------------------------------------------------------

    def rings(self) -> dict[str, StepRing]:
        return {name: node.steps for name, node in list(self._nodes.items())}

    def ring(self, node: str) -> StepRing | None:
        memory = self._nodes.get(node)
        return None if memory is None else memory.steps

    def activity(self, node: str) -> dict[str, Any]:
        """Return a node's activity in the last seconds, for `/v1/status`. Before the first step, the activity is 0.

        `clock_offset_ms` is the number of milliseconds that are added to the times that the node reports.
        """
        history, now = self._nodes.get(node), self._now()
        ring = StepRing(1) if history is None else history.steps
        last = ring.latest()
        steps, busy_ns, tokens, _ = ring.sums(now - WINDOW_NS, now)
        prefills, prompts, decodes = (last.num_prefills, last.prefill_tokens, last.num_decodes) if last else (0, 0, 0)
        return {
            "clock_offset_ms": 0.0 if history is None else round(history.offset_ns / 1e6, 3),
            "steps_per_s": round(steps * 1e9 / WINDOW_NS, 1),
            "tokens_per_s": round(tokens * 1e9 / WINDOW_NS, 1),
            "busy": min(1.0, round(busy_ns / WINDOW_NS, 6)),
            "batch": {"tokens": prompts + decodes, "prefills": prefills, "decodes": decodes},
            "budget": last.budget if last else 0,
            "budget_reason": ring.reason(last) if last else "",
        }

    def request(self, id: str) -> dict[str, object] | None:
        """Return a request's summary and spans, or None if the request is not recorded any more."""
        trace = self._traces.get(id) or self._traces.get(f"{id}-0")
        return None if trace is None else trace.summary(self.ring) | {"spans": trace.spans(self.ring)}

    def summary(self, id: str) -> dict[str, Any] | None:
        trace = self._traces.get(id)
        return None if trace is None else trace.summary(self.ring)

    def latest_requests(self, limit: int) -> Iterator[dict[str, object]]:
        """Yield summaries, newest first. A summary is created when the iterator reaches it."""
        return (trace.summary(self.ring) for trace in self.traces()[:limit])

    def traces(self) -> list[RequestTrace]:
        """Return the traces, newest first."""
        return list(reversed(self._traces.values()))

    def handoff_queues(self) -> Counter[tuple[str, str]]:
        """Return the number of this router's handoffs in each queue, by node and queue."""
        running = [trace for trace in self._traces.values() if trace.ended_ns is None]
        return Counter(queue for trace in running for span in trace.current_attempts for queue in span.queues())

    def changed(self, since: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """Find up to `limit` requests that changed after version `since`. Return their latest version and summaries."""
        found = [trace for trace in self._traces.values() if trace.version > since]
        found = sorted(found, key=lambda trace: trace.version)[:limit]
        return max([since, *(trace.version for trace in found)]), [trace.summary(self.ring) for trace in found]

    def client_id(self, node: str, serial: int) -> str | None:
        """Return the client's id of the request with this serial in a node's step records, or None if it is unknown."""
        memory = self._nodes.get(node)
        attempt = memory.serials.get(serial) if memory is not None else None
        if attempt is None:
            return None
        trace = self._trace(attempt)
        return generation_of(attempt) if trace is None else trace.id

    def _trace(self, attempt: str) -> RequestTrace | None:
        """Return the trace of attempt `{generation}.{sample}.{number}`, where generation is `{request}-{prompt}`."""
        generation = generation_of(attempt)
        return self._traces.get(generation) or self._traces.get(generation.rpartition("-")[0])

    def _attempt(self, attempt: str) -> AttemptSpan | None:
        trace = self._trace(attempt)
        return None if trace is None else trace.attempts.get(attempt)


def generation_of(attempt: str) -> str:
    return attempt.rsplit(".", 2)[0]
