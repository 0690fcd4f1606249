"""What the nodes do, for Prometheus: the loads that they last told, and histograms of their steps and transfers.

A node that left is dropped with its series; labels come from the nodes' ids, their roles and fixed sets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from router.history.history import MAX_NODES, RequestHistory
from router.history.step_ring import interference_ns
from router.metrics.handoff_queues import QUEUES, HandoffQueues
from router.metrics.histogram import Histogram
from shared.rpc.messages import NodeInfo, NodeStats, RequestEvent, StepRecord

NodeRow = tuple[NodeInfo, NodeStats, bool]
LABELS = ("engine", "role", "model_name")
MAX_REASONS = 64  # of placements, as labels

STEP_TOKENS = tuple(float(2**power) for power in range(15))
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
TRANSFER_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BYTES = tuple(float(2**power) for power in range(11, 35, 2))  # vLLM's, 2 KiB to 8 GiB


def _usage(load: NodeStats) -> float:
    used = load.blocks_owned + load.blocks_reserved + load.blocks_quarantined
    return used / load.blocks_total if load.blocks_total else 0.0


# vLLM's names where it has one, so that its boards work; ours where it has none.
GAUGES: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests that wait for room.", lambda load: load.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", _usage),
    ("vllm:gpu_cache_usage_perc", "The same, as vLLM's published board asks for it.", _usage),
    ("baton_waiting_tokens", "Prompt tokens that wait for room.", lambda load: load.waiting_tokens),
    ("baton_kv_blocks_free", "Empty KV blocks.", lambda load: load.blocks_free),
    ("baton_kv_blocks_cached", "KV blocks kept as prefix cache only.", lambda load: load.blocks_cached),
    ("baton_kv_blocks_owned", "KV blocks of requests.", lambda load: load.blocks_owned),
    ("baton_kv_blocks_reserved", "KV blocks that a peer is writing.", lambda load: load.blocks_reserved),
    ("baton_kv_blocks_quarantined", "KV blocks that a peer may still write.", lambda load: load.blocks_quarantined),
    (
        "baton_kv_ledger_broken",
        "1 where KV blocks do not add up: start the node anew.",
        lambda load: bool(load.ledger_error),
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[NodeStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda load: load.cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda load: load.cache_hits),
    ("vllm:num_preemptions", "Requests preempted.", lambda load: load.preemptions),
    ("vllm:nixl_num_failed_transfers", "Handoffs that ended without a commit.", lambda load: load.handoffs_failed),
    ("baton_steps", "Forward passes.", lambda load: load.steps),
    ("baton_prompt_tokens_computed", "Prompt tokens computed.", lambda load: load.prompt_tokens),
    ("baton_tokens_generated", "Tokens generated.", lambda load: load.generated_tokens),
    ("baton_handoffs", "Requests handed to a decode node.", lambda load: load.handoffs),
    ("baton_kv_blocks_moved", "KV blocks pushed to decode nodes.", lambda load: load.blocks_moved),
    ("baton_kv_transfer_bytes", "Bytes pushed to decode nodes.", lambda load: load.bytes_moved),
    ("baton_channel_fallbacks", "Peers reached over a slower KV channel.", lambda load: load.channel_fallbacks),
    ("baton_kv_rows_corrupt", "Rows of KV that came otherwise than they were sent.", lambda load: load.rows_corrupt),
    ("baton_records_dropped", "Step records and events that did not get here.", lambda load: load.records_dropped),
)
HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKENS),
    ("vllm:nixl_xfer_time_seconds", "Time of one push of KV blocks, over any channel.", TRANSFER_S),
    ("vllm:nixl_bytes_transferred", "Bytes of one push of KV blocks.", TRANSFER_BYTES),
    ("baton_decode_admission_wait_seconds", "From asking a decode node for room until it was granted.", TRANSFER_S),
    ("baton_step_prediction_error_ratio", "|predicted - measured| / measured time of a step.", ERRORS),
)
STEP, PUSH_S, PUSH_BYTES, ADMISSION, ERROR = range(len(HISTOGRAMS))


@dataclass(slots=True)
class NodeSample:
    """What one life of a node's records add up to."""

    boot: str
    seen: list[Histogram] = field(default_factory=lambda: [Histogram(bounds) for _, _, bounds in HISTOGRAMS])
    interference_s: float = 0.0


class NodeMetrics:
    """A prometheus collector, and an observer of the records."""

    def __init__(
        self,
        nodes: Callable[[], list[NodeRow]],
        model_name: str,
        records: RequestHistory,
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`status`: of dispatch."""
        self._nodes = nodes
        self._model_name = model_name
        self._records = records
        self._status = status
        self._queues = HandoffQueues()
        self._told: dict[str, NodeSample] = {}
        records.observers.append(self)

    # ---- what records tell --------------------------------------------------------------------------------------

    def step(self, info: NodeInfo, record: StepRecord) -> None:
        told = self._of(info)
        told.seen[STEP].observe(record.prefill_tokens + record.num_decodes)
        measured_us = record.duration_us + record.host_us
        if record.predicted_us and measured_us:
            told.seen[ERROR].observe(abs(record.predicted_us - measured_us) / measured_us)
        if record.prefill_tokens and record.num_decodes and (ring := self._records.ring(info.id)) is not None:
            row = ring.latest()
            if row is not None:
                told.interference_s += interference_ns(row, ring.model) * record.num_decodes / 1e9

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
        told = self._told.get(info.id)
        if told is None or told.boot != info.incarnation_id:
            self._told.pop(info.id, None)
            if len(self._told) >= MAX_NODES:  # a scrape forgets those that left, but nobody may scrape
                del self._told[next(iter(self._told))]
            told = self._told[info.id] = NodeSample(info.incarnation_id)
        return told

    # ---- what is shown ------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        rows = self._nodes()
        alive_rows = [row for row in rows if row[2]]  # what a lost node said of itself holds no longer
        for name, text, read in GAUGES:
            yield self._filled(GaugeMetricFamily(name, text, labels=LABELS), alive_rows, read)
        for name, text, read in COUNTERS:
            yield self._filled(CounterMetricFamily(name, text, labels=LABELS), rows, read)
        alive = GaugeMetricFamily("baton_node_alive", "Whether the node's stream lives.", labels=LABELS)
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
        self._told = {name: told for name, told in self._told.items() if name in here}
        for place, (name, text, _) in enumerate(HISTOGRAMS):
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for info in infos:
                self._of(info).seen[place].add_to(family, self._labels(info))
            yield family
        text = "What prompts added to steps, times the decodes that waited for it."
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
        budget = GaugeMetricFamily("baton_step_budget_tokens", "Tokens that the last step was allowed.", labels=LABELS)
        for info in infos:
            activity = self._records.activity(info.id)
            share = activity.busy if activity is not None else 0.0
            shares.setdefault(info.role, []).append(share)
            busy.add_metric(self._labels(info), share)
            budget.add_metric(self._labels(info), activity.last.budget if activity is not None else 0)
        yield busy
        yield budget
        pool = GaugeMetricFamily("baton_pool_busy_ratio", "Mean of a pool's nodes.", labels=["role", "model_name"])
        for role, each in shares.items():
            pool.add_metric([role, self._model_name], sum(each) / len(each))
        yield pool

    def _from_status(self) -> Iterable[Metric]:
        status = self._status()
        placements = CounterMetricFamily(
            "baton_placements", "Attempts by why they were placed as they were.", labels=["model_name", "reason"]
        )
        for reason, count in list(status["placements"].items())[:MAX_REASONS]:
            placements.add_metric([self._model_name, reason], count)
        yield placements
        malformed = CounterMetricFamily(
            "baton_records_malformed", "Records of nodes that were none, and are left out.", labels=["model_name"]
        )
        malformed.add_metric([self._model_name], self._records.num_malformed)
        yield malformed
        requests: Mapping[str, int] = status["requests"]
        for name, text in (
            ("moved", "Attempts that went on elsewhere."),
            ("refused", "Requests turned away since they would have waited too long."),
            ("retried", "Attempts that went on elsewhere though no node was lost."),
            ("paused", "Attempts that ended as their client did not read."),
        ):
            counter = CounterMetricFamily(f"baton_requests_{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], requests.get(name, 0))
            yield counter
        queue: Mapping[str, int] = status.get("queue", {})
        for what, text in (("requests", "Samples"), ("tokens", "Tokens, of prompts and answers,")):
            gauge = GaugeMetricFamily(f"baton_queue_{what}", f"{text} that wait in the router.", labels=["model_name"])
            gauge.add_metric([self._model_name], queue.get(what, 0))
            yield gauge
