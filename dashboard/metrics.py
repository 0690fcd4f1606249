"""Prometheus metrics that are derived from the nodes' records and from the phases of requests.

The series of a lost node are dropped. Every label value is a node id, a role, or a value from a fixed set.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric

from dashboard.history import RequestHistory
from dashboard.trace import BOOTSTRAP, INFLIGHT, PREALLOC, TRANSFER
from router.metrics.node_metrics import MetricSource, NodeMetrics
from router.metrics.request_metrics import E2E_S, ITL_S
from shared.metrics import LABELS, metric_family
from shared.rpc.messages import NodeInfo, RequestEvent, StepRecord

SETTLE_DELAY_S = 1.0  # how long the nodes' last records may take to arrive after a request has ended
STEP_TOKENS = tuple(2**power for power in range(15))
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
TRANSFER_S = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BYTES = tuple(2**power for power in range(11, 35, 2))  # the same buckets as vLLM's: 2 KiB to 8 GiB

# Histograms of values in the nodes' records of steps and requests.
NODE_HISTOGRAMS = {
    "step": ("vllm:iteration_tokens_total", "Tokens per step.", STEP_TOKENS),
    "push_s": ("vllm:nixl_xfer_time_seconds", "Time of one push of KV blocks, over any channel.", TRANSFER_S),
    "push_bytes": ("vllm:nixl_bytes_transferred", "Bytes per push of KV blocks.", TRANSFER_BYTES),
    "admission": ("baton_decode_admission_wait_seconds", "Time until a decode node granted a reservation.", TRANSFER_S),
    "error": ("baton_step_prediction_error_ratio", "Relative error of the predicted step time.", ERRORS),
}
# Histograms of values derived from the phases of finished requests.
PHASES = {
    "queue": ("vllm:request_queue_time_seconds", "Time until the first chunk of the prompt ran.", E2E_S),
    "prefill": ("vllm:request_prefill_time_seconds", "Time from the first chunk to the first token.", E2E_S),
    "decode": ("vllm:request_decode_time_seconds", "Time from the first token to the last.", E2E_S),
    "inference": ("vllm:request_inference_time_seconds", "Time from the first chunk to the last token.", E2E_S),
    "busy": ("baton_kv_transfer_busy_seconds", "Time during which blocks of a handoff were being transferred.", ITL_S),
    "hidden": ("baton_kv_transfer_hidden_seconds", "Transfer time that overlapped the prefill.", ITL_S),
    "exposed": ("baton_kv_transfer_exposed_seconds", "Time from the end of the prefill to the last block.", ITL_S),
}
ACTIVITY = {
    "busy": ("baton_node_busy_ratio", "Share of the last 10 s in which a step ran."),
    "budget": ("baton_step_budget_tokens", "Token budget of the last step."),
}
AFTER_FIRST = ("transfer_exposed", "decode_queue", "decode", "interference")  # a request's phases after its first token
# Maps each queue to the role of the nodes that have it, and to the help text of its metric.
QUEUES = {
    BOOTSTRAP: ("prefill", "Requests in the prefill that have no reservation on their decode node yet."),
    INFLIGHT: ("prefill", "Computed prompts whose KV is still being transferred."),
    PREALLOC: ("decode", "Handoffs that wait for a reservation."),
    TRANSFER: ("decode", "Handoffs whose KV is being received."),
}


class RecordMetrics(NodeMetrics):
    """A Prometheus collector that also aggregates the nodes' records.

    The router's entry point subscribes the collector to the history, and registers it with Prometheus. All methods run
    on the event loop.
    """

    def __init__(self, sources: Sequence[MetricSource], history: RequestHistory) -> None:
        super().__init__(sources)
        self._history = history
        self._registry = CollectorRegistry()
        self._phases = {
            what: Histogram(name, text, ["model_name"], buckets=bounds, registry=self._registry)
            for what, (name, text, bounds) in PHASES.items()
        }
        for histogram in self._phases.values():
            for source in sources:
                histogram.labels(source.model_name)  # create the series, which starts at 0
        self._seen: dict[str, Any] = {
            what: Histogram(name, text, LABELS, buckets=bounds, registry=self._registry)
            for what, (name, text, bounds) in NODE_HISTOGRAMS.items()
        }
        text = "Delay of decodes by prompt chunks: time added to each step, multiplied by its decodes."
        self._seen["interference"] = prometheus_client.Counter(
            "baton_interference_seconds", text, LABELS, registry=self._registry
        )

    # ---- observing records --------------------------------------------------------------------------------------

    def step(self, info: NodeInfo, record: StepRecord) -> None:
        self._observe(info, "step", record.prefill_tokens + record.num_decodes)
        measured_us = record.duration_us + record.host_us
        if record.predicted_us and measured_us:
            self._observe(info, "error", abs(record.predicted_us - measured_us) / measured_us)
        if (ring := self._history.ring(info.id)) is not None and (row := ring.latest()) is not None:
            added_s = row.interference_ns * row.num_decodes / 1e9
            self._seen["interference"].labels(*self._labels(info)).inc(added_s)

    def event(self, info: NodeInfo, event: RequestEvent) -> None:
        if event.kind == "transfer":
            self._observe(info, "push_s", event.duration_us / 1e6)
            self._observe(info, "push_bytes", event.bytes)
        elif event.kind == "reserving":
            self._observe(info, "admission", event.duration_us / 1e6)

    def lost(self, node: str) -> None:
        for metric in self._seen.values():
            metric.remove_by_labels({"engine": node})

    def finished(self, id: str) -> None:
        asyncio.get_running_loop().call_later(SETTLE_DELAY_S, self._settled, id)

    def _settled(self, id: str) -> None:
        if (summary := self._history.summary(id)) is not None:
            self.observe_phases(self._model_of(summary["decode"]), summary["phases_ms"], summary["transfer"])

    def observe_phases(
        self, model: str, phases: Mapping[str, float] | None, transfer: Mapping[str, Any] | None
    ) -> None:
        """Record the phases of a finished request, if they are known, and its transfer, if it had one."""
        times = {}
        if phases:
            prefill_s = phases["prefill"] / 1000
            decode_s = sum(phases[name] for name in AFTER_FIRST) / 1000
            times = {"queue": phases["prefill_queue"] / 1000, "prefill": prefill_s, "decode": decode_s}
            times["inference"] = prefill_s + decode_s
        if transfer:
            times |= {what: transfer[f"{what}_ms"] / 1000 for what in ("busy", "hidden", "exposed")}
        for what, time_s in times.items():
            self._phases[what].labels(model).observe(time_s)

    def _observe(self, info: NodeInfo, what: str, value: float) -> None:
        self._seen[what].labels(*self._labels(info)).observe(value)

    # ---- reading ------------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        yield from super().collect()
        rows = self._rows()
        alive = [info for info, _, is_alive in rows if is_alive]
        for info in alive:
            for metric in self._seen.values():
                metric.labels(*self._labels(info))  # create the series, which starts at 0
        yield from self._registry.collect()
        yield from self._busy(alive)
        counts = self._history.handoff_queues()
        for queue, (role, text) in QUEUES.items():
            lengths = [(info, counts[info.id, queue]) for info, _, _ in rows if info.role == role]
            yield self._of_nodes(f"baton_{queue}", text, lengths)
        malformed = [((self._sources[0].model_name,), self._history.num_malformed)]
        yield metric_family(
            "baton_node_records_dropped_total", "Malformed records that the router dropped.", ["model_name"], malformed
        )

    def _busy(self, infos: list[NodeInfo]) -> Iterable[Metric]:
        found = [(info, self._history.activity(info.id)) for info in infos]
        for key, (name, text) in ACTIVITY.items():
            yield self._of_nodes(name, text, [(info, activity[key]) for info, activity in found])
        shares: dict[tuple[str, str], list[float]] = {}
        for info, activity in found:
            shares.setdefault((info.role, self._model_of(info.id)), []).append(activity["busy"])
        means = [(labels, sum(each) / len(each)) for labels, each in shares.items()]
        text = "Mean busy ratio of the nodes of a role."
        yield metric_family("baton_pool_busy_ratio", text, ["role", "model_name"], means)
