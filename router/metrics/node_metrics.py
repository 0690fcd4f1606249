"""Metrics of nodes for Prometheus: their last reported stats, histograms of their steps and transfers, and queues.

The series of a node that left are dropped. Label values are node ids, roles and members of fixed sets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dashboard.history import MAX_NODES, RequestHistory
from dashboard.step_ring import interference_ns
from router.metrics.histogram import Histogram
from shared.rpc.messages import NodeInfo, NodeStats, RequestEvent, StepRecord

NodeRow = tuple[NodeInfo, NodeStats, bool]
LABELS = ("engine", "role", "model_name")
MAX_REASONS = 64  # of placements, exported as labels

STEP_TOKENS = tuple(float(2**power) for power in range(15))
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
TRANSFER_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BYTES = tuple(float(2**power) for power in range(11, 35, 2))  # vLLM's, 2 KiB to 8 GiB


def _usage(load: NodeStats) -> float:
    used = load.blocks_owned + load.blocks_reserved + load.blocks_quarantined
    return used / load.blocks_total if load.blocks_total else 0.0


# Gauges have vLLM's names if vLLM has them, so that its dashboards work.
GAUGES: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests waiting for blocks or a slot.", lambda load: load.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", _usage),
    ("vllm:gpu_cache_usage_perc", "Alias of vllm:kv_cache_usage_perc, which vLLM's published dashboard uses.", _usage),
    ("baton_waiting_tokens", "Prompt tokens of waiting requests.", lambda load: load.waiting_tokens),
    ("baton_kv_blocks_free", "Free KV blocks.", lambda load: load.blocks_free),
    ("baton_kv_blocks_cached", "KV blocks that only the prefix cache holds.", lambda load: load.blocks_cached),
    ("baton_kv_blocks_owned", "KV blocks owned by requests.", lambda load: load.blocks_owned),
    ("baton_kv_blocks_reserved", "KV blocks reserved for an incoming handoff.", lambda load: load.blocks_reserved),
    (
        "baton_kv_blocks_quarantined",
        "KV blocks withheld because a peer may still write to them.",
        lambda load: load.blocks_quarantined,
    ),
    ("baton_kv_ledger_broken", "1 if the block ledger is inconsistent.", lambda load: bool(load.ledger_error)),
)
COUNTERS: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda load: load.cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.cache_hits),
    ("vllm:num_preemptions", "Requests preempted.", lambda load: load.preemptions),
    ("vllm:nixl_num_failed_transfers", "Handoffs that ended without a commit.", lambda load: load.handoffs_failed),
    ("baton_steps", "Steps run.", lambda load: load.steps),
    ("baton_prompt_tokens_computed", "Prompt tokens computed.", lambda load: load.prompt_tokens),
    ("baton_tokens_generated", "Tokens generated.", lambda load: load.generated_tokens),
    ("baton_handoffs", "Requests handed to a decode node.", lambda load: load.handoffs),
    ("baton_kv_blocks_moved", "KV blocks pushed to decode nodes.", lambda load: load.blocks_moved),
    ("baton_kv_transfer_bytes", "Bytes pushed to decode nodes.", lambda load: load.bytes_moved),
    (
        "baton_channel_fallbacks",
        "Peers connected over a slower KV channel than configured.",
        lambda load: load.channel_fallbacks,
    ),
    ("baton_kv_rows_corrupt", "KV rows that failed their checksum.", lambda load: load.rows_corrupt),
    (
        "baton_records_dropped",
        "Step records and events that a node dropped before sending them.",
        lambda load: load.records_dropped,
    ),
)
HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("vllm:iteration_tokens_total", "Tokens per step.", STEP_TOKENS),
    ("vllm:nixl_xfer_time_seconds", "Time of one push of KV blocks, over any channel.", TRANSFER_S),
    ("vllm:nixl_bytes_transferred", "Bytes per push of KV blocks.", TRANSFER_BYTES),
    (
        "baton_decode_admission_wait_seconds",
        "Time from requesting a reservation on a decode node until it was granted.",
        TRANSFER_S,
    ),
    (
        "baton_step_prediction_error_ratio",
        "Relative error of the predicted step time, |predicted - measured| / measured.",
        ERRORS,
    ),
)
# Counters from the dispatcher's status: the key, the name, the alias that is kept for one release, and the help text.
STATUS_COUNTERS = (
    ("moved", "baton_request_migrations", "baton_requests_moved", "Attempts migrated to another node."),
    (
        "refused",
        "baton_requests_rejected",
        "baton_requests_refused",
        "Requests rejected for a too long predicted wait.",
    ),
    ("retried", "baton_requests_retried", "", "Attempts retried without the loss of a node."),
    ("paused", "baton_client_backpressure", "baton_requests_paused", "Attempts ended because a client did not read."),
    ("malformed", "baton_node_records_dropped", "baton_records_malformed", "Malformed records of nodes."),
)
STEP, PUSH_S, PUSH_BYTES, ADMISSION, ERROR = range(len(HISTOGRAMS))


MAX_OPEN = 65_536  # attempts; the oldest are dropped first

# Names and meanings are SGLang's. The role is the one of the nodes that have the queue.
QUEUES = {
    "num_prefill_bootstrap_queue_reqs": (
        "prefill",
        "Requests in prefill that wait for a reservation on their decode node.",
    ),
    "num_prefill_inflight_queue_reqs": ("prefill", "Computed prompts whose KV is still being transferred."),
    "num_decode_prealloc_queue_reqs": ("decode", "Handoffs that wait for a reservation."),
    "num_decode_transfer_queue_reqs": ("decode", "Handoffs whose KV is being received."),
}
BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER = QUEUES


@dataclass(slots=True)
class OpenHandoff:
    """An attempt that at least one node works on. Events of its two nodes arrive in any order."""

    prefill: str = ""  # the node, or "" before its first event and after its last one
    decode: str = ""
    is_handoff: bool = False
    admitted: bool = False
    granted: bool = False
    sampled: bool = False
    landed: bool = False


class HandoffQueues:
    """The progress of open handoffs, counted from nodes' events as the queues that SGLang shows for its two pools."""

    def __init__(self) -> None:
        self._open: dict[str, OpenHandoff] = {}

    def event(self, info: NodeInfo, event: RequestEvent) -> None:
        is_prefill = info.role == "prefill"
        attempt = self._open.get(event.id)
        if event.kind == "queued":
            self._queued(info, attempt or self._new(event.id), is_prefill)
        elif attempt is None:
            return
        elif event.kind == "ended":
            self._left(event.id, attempt, info.id)
        elif event.kind == "landed":
            attempt.landed = True
        elif info.id == attempt.prefill:  # compare ids, because the node's role may have changed
            attempt.admitted |= event.kind == "admitted"
            attempt.granted |= event.kind == "reserving"
            attempt.sampled |= event.kind == "first"

    def lost(self, node: str) -> None:
        """Drop what was on a node whose stream ended."""
        for identity, attempt in list(self._open.items()):
            self._left(identity, attempt, node)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the length of each queue, by node and queue."""
        counts: dict[tuple[str, str], int] = {}
        for attempt in self._open.values():
            for place in _places(attempt):
                counts[place] = counts.get(place, 0) + 1
        return counts

    @property
    def num_open(self) -> int:
        return len(self._open)

    def _new(self, identity: str) -> OpenHandoff:
        if len(self._open) >= MAX_OPEN:
            del self._open[next(iter(self._open))]
        self._open[identity] = OpenHandoff()
        return self._open[identity]

    @staticmethod
    def _queued(info: NodeInfo, attempt: OpenHandoff, is_prefill: bool) -> None:
        if is_prefill:
            attempt.prefill, attempt.is_handoff = info.id, True
        else:
            attempt.decode = info.id

    def _left(self, identity: str, attempt: OpenHandoff, node: str) -> None:
        if attempt.prefill == node:
            attempt.prefill = ""
        if attempt.decode == node:
            attempt.decode = ""
        if not attempt.prefill and not attempt.decode:
            del self._open[identity]


def _places(attempt: OpenHandoff) -> list[tuple[str, str]]:
    """Return the queues that an attempt is in, by node."""
    found = []
    if attempt.prefill and attempt.admitted and not attempt.granted:
        found.append((attempt.prefill, BOOTSTRAP))
    if attempt.prefill and attempt.granted and attempt.sampled:
        found.append((attempt.prefill, INFLIGHT))
    if attempt.decode and attempt.is_handoff and not attempt.landed:
        found.append((attempt.decode, TRANSFER if attempt.granted else PREALLOC))
    return found


@dataclass(slots=True)
class NodeSample:
    """Sums over the records of one incarnation of a node."""

    incarnation_id: str
    seen: list[Histogram] = field(default_factory=lambda: [Histogram(bounds) for _, _, bounds in HISTOGRAMS])
    interference_s: float = 0.0


class NodeMetrics(Collector):
    """A Prometheus collector, and a `RecordObserver` of the history that sums up nodes' records.

    The composition root subscribes it to the history and registers it. Everything runs on the event loop.
    """

    def __init__(
        self,
        nodes: Callable[[], list[NodeRow]],
        model_name: str,
        history: RequestHistory,
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`nodes` lists the known nodes; `status` returns the dispatcher's status."""
        self._nodes = nodes
        self._model_name = model_name
        self._history = history
        self._status = status
        self._queues = HandoffQueues()
        self._samples: dict[str, NodeSample] = {}

    # ---- observing records --------------------------------------------------------------------------------------

    def step(self, info: NodeInfo, record: StepRecord) -> None:
        sample = self._of(info)
        sample.seen[STEP].observe(record.prefill_tokens + record.num_decodes)
        measured_us = record.duration_us + record.host_us
        if record.predicted_us and measured_us:
            sample.seen[ERROR].observe(abs(record.predicted_us - measured_us) / measured_us)
        if record.prefill_tokens and record.num_decodes and (ring := self._history.ring(info.id)) is not None:
            row = ring.latest()
            if row is not None:
                sample.interference_s += interference_ns(row, ring.model) * record.num_decodes / 1e9

    def event(self, info: NodeInfo, event: RequestEvent) -> None:
        self._queues.event(info, event)
        if event.kind == "transfer":
            seen = self._of(info).seen
            seen[PUSH_S].observe(event.duration_us / 1e6)
            seen[PUSH_BYTES].observe(event.bytes)
        elif event.kind == "reserving":
            self._of(info).seen[ADMISSION].observe(event.duration_us / 1e6)

    def lost(self, node: str) -> None:
        self._queues.lost(node)

    def _of(self, info: NodeInfo) -> NodeSample:
        sample = self._samples.get(info.id)
        if sample is None or sample.incarnation_id != info.incarnation_id:
            self._samples.pop(info.id, None)
            if len(self._samples) >= MAX_NODES:  # a scrape drops nodes that left, but there may be no scrapes
                del self._samples[next(iter(self._samples))]
            sample = self._samples[info.id] = NodeSample(info.incarnation_id)
        return sample

    # ---- reading ------------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        rows = self._nodes()
        alive_rows = [row for row in rows if row[2]]  # the gauges of a lost node are stale
        for name, text, read in GAUGES:
            yield self._filled(GaugeMetricFamily(name, text, labels=LABELS), alive_rows, read)
        for name, text, read in COUNTERS:
            yield self._filled(CounterMetricFamily(name, text, labels=LABELS), rows, read)
        alive = GaugeMetricFamily("baton_node_alive", "Whether the node's stream is connected.", labels=LABELS)
        for info, _, is_alive in rows:
            alive.add_metric(self._labels(info), float(is_alive))
        yield alive
        yield from self._from_records([info for info, _, _ in rows])
        yield from self._busy([info for info, _, is_alive in rows if is_alive])
        yield from self._from_status()

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return info.id, info.role, self._model_name

    def _filled(self, family: Any, rows: list[NodeRow], read: Callable[[NodeStats], float]) -> Metric:
        for info, load, _ in rows:
            family.add_metric(self._labels(info), read(load))
        filled: Metric = family
        return filled

    def _from_records(self, infos: list[NodeInfo]) -> Iterable[Metric]:
        here = {info.id for info in infos}
        self._samples = {name: sample for name, sample in self._samples.items() if name in here}
        for place, (name, text, _) in enumerate(HISTOGRAMS):
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for info in infos:
                self._of(info).seen[place].add_to(family, self._labels(info))
            yield family
        text = "Time that prompt chunks added to steps, times the decodes in those steps."
        interference = CounterMetricFamily("baton_interference_seconds", text, labels=LABELS)
        for info in infos:
            interference.add_metric(self._labels(info), self._of(info).interference_s)
        yield interference
        counts = self._queues.counts()
        for queue, (role, text) in QUEUES.items():
            gauge = GaugeMetricFamily(f"baton_{queue}", text, labels=LABELS)
            for info in infos:
                if info.role == role:
                    gauge.add_metric(self._labels(info), counts.get((info.id, queue), 0))
            yield gauge

    def _busy(self, infos: list[NodeInfo]) -> Iterable[Metric]:
        shares: dict[str, list[float]] = {}
        text = "Share of the last 10 s in which a pass ran."
        busy = GaugeMetricFamily("baton_node_busy_ratio", text, labels=LABELS)
        budget = GaugeMetricFamily("baton_step_budget_tokens", "Token budget of the last step.", labels=LABELS)
        for info in infos:
            activity = self._history.activity(info.id)
            share = activity.busy if activity is not None else 0.0
            shares.setdefault(info.role, []).append(share)
            busy.add_metric(self._labels(info), share)
            budget.add_metric(self._labels(info), activity.last.budget if activity is not None else 0)
        yield busy
        yield budget
        pool = GaugeMetricFamily(
            "baton_pool_busy_ratio", "Mean busy ratio of the nodes of a role.", labels=["role", "model_name"]
        )
        for role, each in shares.items():
            pool.add_metric([role, self._model_name], sum(each) / len(each))
        yield pool

    def _from_status(self) -> Iterable[Metric]:
        status = self._status()
        placements = CounterMetricFamily(
            "baton_placements", "Attempts, by placement reason.", labels=["model_name", "reason"]
        )
        for reason, count in list(status["placements"].items())[:MAX_REASONS]:
            placements.add_metric([self._model_name, reason], count)
        yield placements
        counts: dict[str, int] = dict(status["requests"]) | {"malformed": self._history.num_malformed}
        for key, name, alias, text in STATUS_COUNTERS:
            for each, shown in ((name, text), (alias, f"Deprecated alias of {name}_total.")):
                if each:
                    counter = CounterMetricFamily(each, shown, labels=["model_name"])
                    counter.add_metric([self._model_name], counts.get(key, 0))
                    yield counter
        queue: Mapping[str, int] = status.get("queue", {})
        for what, text in (("requests", "Samples"), ("tokens", "Prompt and answer tokens")):
            gauge = GaugeMetricFamily(f"baton_queue_{what}", f"{text} queued in the router.", labels=["model_name"])
            gauge.add_metric([self._model_name], queue.get(what, 0))
            yield gauge
