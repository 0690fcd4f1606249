"""What clients experience, under vLLM's metric names so that its dashboards work. Labels come from fixed sets only."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics.histogram import Histogram, SlidingPercentiles, SlidingWindow

WINDOW_S = 60.0
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
# vLLM's, and finer below 10 ms, where a small model's tokens are.
ITL_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E_S = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
FINISHED = ("stop", "length")
FINISHES = (*FINISHED, "abort", "error")
AFTER_FIRST = ("transfer_exposed", "decode_queue", "decode", "interference")  # a request's phases after its first token

# What is measured: its help, its buckets, and every name it is shown under. The second name of a gap between tokens,
# and the KV usage of fleet_status under "gpu_…", are those that vLLM's published board asks for; OpenTelemetry's
# names for generative AI come last.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], tuple[str, ...]]] = {
    "ttft": (
        "Arrival to first token.",
        TTFT_S,
        ("vllm:time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds"),
    ),
    "tbt": (
        "Between two tokens' arrivals.",
        ITL_S,
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    "tpot": (
        "Mean time between a sample's tokens.",
        ITL_S,
        ("vllm:request_time_per_output_token_seconds", "gen_ai_server_time_per_output_token_seconds"),
    ),
    "e2e": (
        "Arrival to last token.",
        E2E_S,
        ("vllm:e2e_request_latency_seconds", "gen_ai_server_request_duration_seconds"),
    ),
    "ttst": ("First token to second: what a handoff shows of itself.", ITL_S, ("baton_second_token_latency_seconds",)),
    "prompt": ("Tokens of a prompt.", TOKENS, ("vllm:request_prompt_tokens",)),
    "generation": ("Tokens of a sample.", TOKENS, ("vllm:request_generation_tokens",)),
    "max_tokens": ("Tokens that were asked for.", TOKENS, ("vllm:request_max_num_generation_tokens",)),
    "queue": ("Until the first chunk of the prompt ran.", E2E_S, ("vllm:request_queue_time_seconds",)),
    "prefill": ("First chunk to first token.", E2E_S, ("vllm:request_prefill_time_seconds",)),
    "decode": ("First token to last.", E2E_S, ("vllm:request_decode_time_seconds",)),
    "inference": ("First chunk to last token.", E2E_S, ("vllm:request_inference_time_seconds",)),
    "busy": ("Of a request's handoff: while blocks moved.", ITL_S, ("baton_kv_transfer_busy_seconds",)),
    "hidden": ("Of it: while the prompt was computed.", ITL_S, ("baton_kv_transfer_hidden_seconds",)),
    "exposed": ("Of a handoff: after the prompt was computed.", ITL_S, ("baton_kv_transfer_exposed_seconds",)),
}


class Collected(Collector):
    """All metrics of a moment, to be written out elsewhere than on the event loop."""

    def __init__(self, registry: Collector) -> None:
        self._families = list(registry.collect())

    def collect(self) -> list[Metric]:
        return self._families


@dataclass(slots=True, frozen=True)
class SloTargets:
    """What a client was promised, in seconds; 0: nothing."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0


@dataclass(slots=True)
class SampleTimings:
    """When one sample's tokens came, on the monotonic clock."""

    slo: SloTargets
    arrived: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_slow: int = 0  # gaps that were longer than the SLO

    @property
    def ttft_s(self) -> float | None:
        return self.first - self.arrived if self.num_tokens else None

    def breaks(self, now: float) -> bool:
        """Whether it missed its SLO by now; for the gaps, at the 99th percentile of its own."""
        ttft_s = now - self.arrived if self.ttft_s is None else self.ttft_s
        return bool(self.slo.ttft_s and ttft_s > self.slo.ttft_s) or self.num_slow > max(0, self.num_tokens - 1) // 100


class RequestMetrics:
    """A prometheus collector. Of samples as their clients see them; with `n` samples a prompt counts once."""

    def __init__(
        self, model_name: str, slo: Callable[[], SloTargets] = SloTargets, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`slo`: what is promised to requests that come now."""
        self._model_name = model_name
        self._slo = slo
        self._seen = {what: Histogram(bounds) for what, (_, bounds, _) in HISTOGRAMS.items()}
        self._window = {what: SlidingPercentiles(WINDOW_S, clock) for what in ("ttft", "tbt", "ttst")}
        self._kept = SlidingWindow(2, WINDOW_S, clock=clock)  # samples that missed their SLO, that met it
        self._num_slo = [0, 0]
        self._num_prompt = self._num_generated = 0
        self._ended = dict.fromkeys(FINISHES, 0)

    # ---- what exchanges tell ------------------------------------------------------------------------------------

    def accepted(self, num_prompt: int, max_tokens: int) -> None:
        self._num_prompt += num_prompt
        self._seen["prompt"].observe(num_prompt)
        self._seen["max_tokens"].observe(max_tokens)

    def pace(self, arrived: float) -> SampleTimings:
        return SampleTimings(self._slo(), arrived)

    def tokens(self, pace: SampleTimings, count: int, now: float) -> None:
        """`count` tokens went out together: between two of them no time passed."""
        self._num_generated += count
        if pace.num_tokens:
            gap_s = now - pace.last
            self._observe("tbt", gap_s)
            if 0 < pace.slo.tbt_s < gap_s:
                pace.num_slow += 1
        else:
            pace.first = now
            self._observe("ttft", now - pace.arrived)
        if count > 1:
            self._observe("tbt", 0.0, count - 1)
        if pace.num_tokens < 2 <= pace.num_tokens + count:
            self._observe("ttst", now - pace.first)
        pace.last = now
        pace.num_tokens += count

    def _observe(self, what: str, value: float, times: int = 1) -> None:
        self._seen[what].observe(value, times)
        self._window[what].observe(value, times)

    def ended(self, pace: SampleTimings, reason: str, now: float) -> None:
        """`reason` is one of FINISHES: "abort" when the client left, "error" when we failed."""
        self._ended[reason] += 1
        if reason in FINISHED:  # what was refused in a millisecond would make latencies look good
            self._seen["generation"].observe(pace.num_tokens)
            self._seen["e2e"].observe(now - pace.arrived)
        if pace.num_tokens > 1:
            self._seen["tpot"].observe((pace.last - pace.first) / (pace.num_tokens - 1))
        is_missed = reason == "error" or pace.breaks(now)
        # A client that left before anything was late says nothing of the SLO.
        if (pace.slo.ttft_s or pace.slo.tbt_s) and (reason != "abort" or is_missed):
            self._num_slo[not is_missed] += 1
            self._kept.add(not is_missed)

    def settled(self, summary: Mapping[str, Any]) -> None:
        """The whole story of a request that ended, when its nodes have told theirs; milliseconds in `summary`."""
        phases, transfer = summary["phases_ms"], summary["transfer"]
        if phases:
            prefill_s = phases["prefill"] / 1000
            decode_s = sum(phases[name] for name in AFTER_FIRST) / 1000
            self._seen["queue"].observe(phases["prefill_queue"] / 1000)
            self._seen["prefill"].observe(prefill_s)
            self._seen["decode"].observe(decode_s)
            self._seen["inference"].observe(prefill_s + decode_s)
        if transfer:
            for what in ("busy", "hidden", "exposed"):
                self._seen[what].observe(transfer[f"{what}_ms"] / 1000)

    # ---- what is shown ------------------------------------------------------------------------------------------

    def latency(self) -> dict[str, Any]:
        """For `/v1/status`: the last minute's percentiles in milliseconds, beside what is promised now."""
        slo = self._slo()
        shown: dict[str, Any] = {"window_s": WINDOW_S}
        for what, window in self._window.items():
            count, found = window.read(0.5, 0.99)
            p50, p99 = (None if value is None else round(1000 * value, 3) for value in found)
            shown[f"{what}_ms"] = {"p50": p50, "p99": p99, "n": count}
        attainment = self.attainment()
        shown["slo"] = {"ttft_ms": 1000 * slo.ttft_s, "tbt_ms": 1000 * slo.tbt_s, "attainment": attainment}
        return shown

    def attainment(self) -> float | None:
        missed, met = self._kept.sums()
        return met / (missed + met) if missed + met else None

    def collect(self) -> Iterable[Metric]:
        for what, (text, _, names) in HISTOGRAMS.items():
            for name in names:
                label = "gen_ai_request_model" if name.startswith("gen_ai") else "model_name"
                family = HistogramMetricFamily(name, text, labels=[label])
                self._seen[what].add_to(family, [self._model_name])
                yield family
        yield self._counter("vllm:prompt_tokens", "Tokens of accepted prompts.", {"": self._num_prompt})
        yield self._counter("vllm:generation_tokens", "Tokens given to clients.", {"": self._num_generated})
        yield self._counter("vllm:request_success", "Samples ended, by reason.", self._ended, "finished_reason")
        kept = {"no": self._num_slo[0], "yes": self._num_slo[1]}
        yield self._counter("baton_slo_requests", "Samples by whether they met their SLO.", kept, "met")
        gauge = GaugeMetricFamily("baton_slo_attainment_ratio", "Of the last minute's samples.", labels=["model_name"])
        if (attainment := self.attainment()) is not None:
            gauge.add_metric([self._model_name], attainment)
        yield gauge

    def _counter(self, name: str, text: str, values: Mapping[str, int], label: str = "") -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([self._model_name, *([key] if label else [])], value)
        return family
