"""Metrics for Prometheus that are derived from nodes' records of steps and events, and from requests' phases.

The series of a node that left are dropped. Label values are node ids, roles and members of fixed sets.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dashboard.history import MAX_NODES, RequestHistory
from dashboard.step_ring import interference_ns
from router.metrics.histogram import Histogram
from router.metrics.node_metrics import LABELS, NodeRow
from router.metrics.request_metrics import E2E_S, ITL_S
from shared.rpc.messages import NodeInfo, RequestEvent, StepRecord

SETTLE_DELAY_S = 1.0  # how long the nodes' last records may take to arrive after a request has ended
STEP_TOKENS = tuple(float(2**power) for power in range(15))
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
TRANSFER_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BYTES = tuple(float(2**power) for power in range(11, 35, 2))  # vLLM's, 2 KiB to 8 GiB
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
PHASES: dict[str, tuple[str, str, Sequence[float]]] = {
    "queue": ("vllm:request_queue_time_seconds", "Time until the first chunk of the prompt ran.", E2E_S),
    "prefill": ("vllm:request_prefill_time_seconds", "Time from the first chunk to the first token.", E2E_S),
    "decode": ("vllm:request_decode_time_seconds", "Time from the first token to the last.", E2E_S),
    "inference": ("vllm:request_inference_time_seconds", "Time from the first chunk to the last token.", E2E_S),
    "busy": ("baton_kv_transfer_busy_seconds", "Time in which blocks of a handoff moved.", ITL_S),
    "hidden": ("baton_kv_transfer_hidden_seconds", "Transfer time that overlapped the prefill.", ITL_S),
    "exposed": ("baton_kv_transfer_exposed_seconds", "Time from the end of the prefill to the last block.", ITL_S),
}
AFTER_FIRST = ("transfer_exposed", "decode_queue", "decode", "interference")  # a request's phases after its first token
MALFORMED = ("baton_node_records_dropped", "baton_records_malformed")  # and the alias that is kept for one release
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


class RecordMetrics(Collector):
    """A Prometheus collector, and a `RecordObserver` of the history that sums up nodes' records.

    The composition root subscribes it to the history and registers it. Everything runs on the event loop.
    """

    def __init__(self, nodes: Callable[[], list[NodeRow]], model_name: str, history: RequestHistory) -> None:
        """`nodes` lists the known nodes."""
        self._nodes = nodes
        self._model_name = model_name
        self._history = history
        self._queues = HandoffQueues()
        self._samples: dict[str, NodeSample] = {}
        self._phases = {what: Histogram(bounds) for what, (_, _, bounds) in PHASES.items()}

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

    def finished(self, id: str) -> None:
        asyncio.get_running_loop().call_later(SETTLE_DELAY_S, self._settled, id)

    def _settled(self, id: str) -> None:
        if (summary := self._history.summary(id)) is not None:
            self.observe_phases(summary)

    def observe_phases(self, summary: Mapping[str, Any]) -> None:
        """Record the phase timings of a finished request, once all of its nodes have reported."""
        phases, transfer = summary["phases_ms"], summary["transfer"]
        if phases:
            prefill_s = phases["prefill"] / 1000
            decode_s = sum(phases[name] for name in AFTER_FIRST) / 1000
            self._phases["queue"].observe(phases["prefill_queue"] / 1000)
            self._phases["prefill"].observe(prefill_s)
            self._phases["decode"].observe(decode_s)
            self._phases["inference"].observe(prefill_s + decode_s)
        if transfer:
            for what in ("busy", "hidden", "exposed"):
                self._phases[what].observe(transfer[f"{what}_ms"] / 1000)

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
        for what, (name, text, _) in PHASES.items():
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            self._phases[what].add_to(family, [self._model_name])
            yield family
        rows = self._nodes()
        yield from self._from_records([info for info, _, _ in rows])
        yield from self._busy([info for info, _, is_alive in rows if is_alive])
        for name in MALFORMED:
            counter = CounterMetricFamily(name, "Malformed records of nodes.", labels=["model_name"])
            counter.add_metric([self._model_name], self._history.num_malformed)
            yield counter

    def _labels(self, info: NodeInfo) -> tuple[str, str, str]:
        return info.id, info.role, self._model_name

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
