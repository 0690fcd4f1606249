"""What the router remembers, in bounded memory: the steps of every node, the latest requests, the latest transfers.

Fed by the nodes' reports (`take`), by the rim (`accepted`, `told`, `ended`) and by dispatch (`placed`, `moved`); read
by `/v1/requests`, `/v1/steps`, `/events`, `/trace` and the metrics. Everything here runs on the router's event loop.

What a node says may be nonsense, as another version of it or a stranger may speak: a record that is none is left out
and counted, and nothing here raises for it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from router.history.node_history import MAX_NS, NodeHistory
from router.history.step_ring import StepRing, StepRow, members_of
from router.history.timeline import summary, timeline
from router.history.trace import AttemptSpan, PrefillChunk, RequestTrace, TraceEvent
from shared.clock import now_ns
from shared.rpc.messages import NodeInfo, NodeUpdate, RequestEvent, StepRecord

MAX_REQUESTS = 4000
MAX_TRANSFERS = 5000
MAX_ROWS = 500_000  # marks and chunks of all requests: 150 MB
MAX_NODES = 256
GONE_NS = 900 * 10**9  # a node that said nothing for so long is forgotten when another comes
MAX_TEXT = 200  # characters of what a node calls something


class RecordObserver(Protocol):
    """Hears every record as it arrives, with times on the router's clock, and of nodes whose stream ended: of what
    was on them, some never hears the end."""

    def step(self, info: NodeInfo, record: StepRecord) -> None: ...
    def event(self, info: NodeInfo, event: RequestEvent) -> None: ...
    def lost(self, node: str) -> None: ...


class Transfer(NamedTuple):
    """One push of KV blocks."""

    request: str  # as the client knows it
    attempt: AttemptSpan
    event: TraceEvent

    @property
    def exposed_ns(self) -> int:
        """How much of it came after the prompt was computed, and so delays the second token."""
        end = self.attempt.prefilled_ns
        return 0 if end is None else max(0, self.event.at_ns - max(end, self.event.start_ns))


class NodeActivity(NamedTuple):
    """What a node did lately."""

    steps_per_s: float
    tokens_per_s: float
    busy: float  # share of the time in which a pass ran
    last: StepRow
    reason: str  # of the last step's budget


class RequestHistory:
    def __init__(self, now: Callable[[], int] = now_ns) -> None:
        self.observers: list[RecordObserver] = []
        self.num_malformed = 0
        self._now = now
        self._nodes: dict[str, NodeHistory] = {}
        self._journeys: dict[str, RequestTrace] = {}  # oldest first
        self._transfers: deque[Transfer] = deque(maxlen=MAX_TRANSFERS)
        self._num_transfers = 0
        self._num_rows = 0  # of all journeys
        self._changed: dict[str, None] = {}
        self._watched = False

    # ---- from the nodes -----------------------------------------------------------------------------------------

    def take(self, info: NodeInfo, report: NodeUpdate) -> None:
        """Everything in a node's report but its deltas."""
        if report.stats is None and not report.steps and not report.events:
            return
        node = self._node_history(info)
        if report.stats is not None:
            node.on_update(report.stats, self._now())
        for event in report.events:  # before the steps: they name the requests in them
            if len(event.id) > MAX_TEXT or not 0 <= event.at_ns < MAX_NS:
                self.num_malformed += 1
                continue
            event.at_ns += node.offset_ns
            self._event(info.id, node, event)
            for observer in self.observers:
                observer.event(info, event)
        for record in report.steps:
            record.start_ns += node.offset_ns
            try:
                self._step(info.id, node, record)
            except ValueError:
                self.num_malformed += 1
                continue
            for observer in self.observers:
                observer.step(info, record)

    def lost(self, node: str) -> None:
        """The node's stream ended."""
        for observer in self.observers:
            observer.lost(node)

    def _node_history(self, info: NodeInfo) -> NodeHistory:
        node = self._nodes.get(info.id)
        if node is None or node.incarnation_id != info.incarnation_id:  # a new life counts its steps from 0
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
            leg = self._attempt(node.serials.get(member.serial, ""))
            if leg is not None and leg.chunk(
                PrefillChunk(name, row.number, row.start_ns, row.end_ns, member.num_tokens)
            ):
                self._num_rows += 1
        self._make_room()

    def _event(self, name: str, node: NodeHistory, event: RequestEvent) -> None:
        if event.kind == "queued" and event.serial >= 0:
            node.name(event.serial, event.id)
        journey, leg = self._trace(event.id), self._attempt(event.id)
        if journey is None or leg is None:
            return
        mark = TraceEvent(
            name,
            event.kind,
            event.at_ns,
            event.duration_us * 1000,
            event.count,
            event.bytes,
            event.peer[:MAX_TEXT],
            event.channel[:MAX_TEXT],
            event.reason[:MAX_TEXT],
        )
        if leg.add_event(mark):
            self._num_rows += 1
            if mark.kind == "transfer":
                self._transfers.append(Transfer(journey.id, leg, mark))
                self._num_transfers += 1
        self._change(journey.id)
        self._make_room()

    def _make_room(self) -> None:
        """The oldest requests go when there are too many, or too much is known of them all."""
        while len(self._journeys) > MAX_REQUESTS or (self._num_rows > MAX_ROWS and len(self._journeys) > 1):
            identity = next(iter(self._journeys))
            self._num_rows -= sum(leg.num_rows for leg in self._journeys.pop(identity).attempts.values())
            self._changed.pop(identity, None)

    def _change(self, identity: str) -> None:
        if self._watched:
            self._changed[identity] = None

    # ---- from the rim and from dispatch -------------------------------------------------------------------------

    def accepted(
        self, id: str, num_prompt: int, num_samples: int, traceparent: str = "", waited_s: float = 0.0
    ) -> None:
        """A request with one prompt, or one more prompt of it, is accepted. It arrived `waited_s` ago: reading and
        checking its body is the router's time, not its client's."""
        journey = self._journeys.get(id)
        if journey is None:
            journey = self._journeys[id] = RequestTrace(
                id, self._now() - round(waited_s * 1e9), traceparent=traceparent
            )
            self._make_room()
        journey.num_prompt += num_prompt
        journey.num_samples += num_samples
        journey.ended_ns = None  # of another prompt of it, all samples may be over already
        self._change(id)

    def output(self, id: str, sample: int, num_tokens: int) -> None:
        """So many more tokens went out to the client."""
        journey = self._journeys.get(id)
        if journey is not None and num_tokens:
            journey.output(sample, num_tokens, self._now())
            if self._watched:  # not by `_change`: this is done for every token
                self._changed[id] = None

    def ended(self, id: str, sample: int, how: str) -> None:
        """A sample is over for its client: "stop", "length", "abort" (the client left) or "error"."""
        journey = self._journeys.get(id)
        if journey is not None:
            journey.ended(how, self._now())
            self._change(id)

    def placed(
        self, attempt: str, prefill: str | None, decode: str, reason: str, local_s: float = 0.0, remote_s: float = 0.0
    ) -> None:
        """An attempt goes to these nodes; the seconds are what placement predicted of either way, 0 if nothing."""
        journey = self._trace(attempt)
        if journey is not None:
            journey.attempts[attempt] = AttemptSpan(attempt, prefill, decode, reason, self._now(), local_s, remote_s)
            self._change(journey.id)

    def migrated(self, attempt: str, why: str) -> None:
        """The attempt did not end where it was; another follows, or the request fails."""
        leg = self._attempt(attempt)
        if leg is not None:
            leg.migrated = why

    # ---- to read ------------------------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        return list(self._nodes)

    def ring(self, node: str) -> StepRing | None:
        memory = self._nodes.get(node)
        return None if memory is None else memory.steps

    def steps(self, node: str, since_ns: int = 0) -> list[StepRow]:
        """Steps that began at `since_ns` or later, oldest first; none of a node that is not known."""
        ring = self.ring(node)
        return [] if ring is None else list(ring.rows(ring.place(since_ns)))

    def activity(self, node: str, window_s: float = 10.0) -> NodeActivity | None:
        """Of the last seconds; None before its first step."""
        ring = self.ring(node)
        last = ring.latest() if ring is not None else None
        if ring is None or last is None:
            return None
        now = self._now()
        steps, busy_ns, tokens, _ = ring.sums(now - round(window_s * 1e9), now)
        return NodeActivity(
            steps / window_s, tokens / window_s, min(1.0, busy_ns / window_s / 1e9), last, ring.reason(last)
        )

    def offset_ms(self, node: str) -> float:
        """What is added to the node's clock to make it the router's; 0 below a millisecond."""
        memory = self._nodes.get(node)
        return 0.0 if memory is None else round(memory.offset_ns / 1e6, 3)

    def request(self, id: str) -> dict[str, object] | None:
        """A request's summary and its spans; None: it is not among the latest."""
        journey = self._journeys.get(id) or self._journeys.get(f"{id}-0")
        return None if journey is None else timeline(journey, self.ring)

    def summary(self, id: str) -> dict[str, object] | None:
        journey = self._journeys.get(id)
        return None if journey is None else summary(journey, self.ring)

    def placed_on(self, id: str) -> tuple[str | None, str | None]:
        """The prefill and the decode node of its latest attempt."""
        journey = self._journeys.get(id)
        leg = journey.last_attempt if journey is not None else None
        return (None, None) if leg is None else (leg.prefill, leg.decode)

    def latest_requests(self, limit: int) -> Iterator[dict[str, object]]:
        """Summaries, newest first, each as of when it is read."""
        return (summary(journey, self.ring) for journey in self.traces()[:limit])

    def traces(self) -> list[RequestTrace]:
        """Newest first. A copy, as are `nodes` and `transfers`: a trace is made of them on another thread."""
        return list(reversed(self._journeys.values()))

    def transfers(self, since_ns: int = 0) -> list[Transfer]:
        """Pushes that ended at `since_ns` or later, oldest first."""
        return [transfer for transfer in list(self._transfers) if transfer.event.at_ns >= since_ns]

    def transfers_after(self, num_seen: int) -> tuple[int, list[Transfer]]:
        """The pushes that came after the first `num_seen`, and how many there were ever."""
        new = min(self._num_transfers - num_seen, len(self._transfers))
        return self._num_transfers, list(self._transfers)[len(self._transfers) - new :]

    def changed(self, limit: int) -> list[dict[str, object]]:
        """Summaries of up to `limit` requests that changed since they were last asked for."""
        ids = [id for _, id in zip(range(limit), self._changed, strict=False)]
        for each in ids:
            del self._changed[each]
        return [found for each in ids if (found := self.summary(each)) is not None]

    def watch(self, watched: bool) -> None:
        """Whether somebody asks for changes from now on; until then none are noted."""
        self._watched = watched
        self._changed.clear()

    def client_id(self, node: str, serial: int) -> str | None:
        """Of a request in a step record, as the client knows it; None: it is not known."""
        memory = self._nodes.get(node)
        attempt = memory.serials.get(serial) if memory is not None else None
        if attempt is None:
            return None
        journey = self._trace(attempt)
        return generation_of(attempt) if journey is None else journey.id

    def _trace(self, attempt: str) -> RequestTrace | None:
        """`attempt` is `{generation}.{sample}.{number}`, a generation is `{request}-{prompt}`."""
        generation = generation_of(attempt)
        return self._journeys.get(generation) or self._journeys.get(generation.rpartition("-")[0])

    def _attempt(self, attempt: str) -> AttemptSpan | None:
        journey = self._trace(attempt)
        return None if journey is None else journey.attempts.get(attempt)


def generation_of(attempt: str) -> str:
    return attempt.rsplit(".", 2)[0]
