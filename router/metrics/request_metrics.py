"""Latencies and counts of requests as clients see them, under vLLM's metric names so that its dashboards work.

Label values are members of fixed sets, and the tenants in the API keys file.
"""

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
# vLLM's bounds, with finer ones below 10 ms for the tokens of small models.
ITL_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E_S = (*(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
FINISHED = ("stop", "length")
FINISHES = (*FINISHED, "abort", "error")

HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", TTFT_S),
    "tbt": ("vllm:inter_token_latency_seconds", "Time between two tokens of a sample.", ITL_S),
    "tpot": ("vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a sample.", ITL_S),
    "e2e": ("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", E2E_S),
    "ttst": ("baton_second_token_latency_seconds", "Time from the first token to the second.", ITL_S),
    "prompt": ("vllm:request_prompt_tokens", "Tokens per prompt.", TOKENS),
    "generation": ("vllm:request_generation_tokens", "Tokens per sample.", TOKENS),
    "max_tokens": ("vllm:request_max_num_generation_tokens", "Maximum number of tokens requested.", TOKENS),
}
# Second names of histograms. vLLM's published dashboard uses the one of "tbt"; the others are deprecated.
ALIASES = {
    "ttft": "gen_ai_server_time_to_first_token_seconds",
    "tbt": "vllm:time_per_output_token_seconds",
    "tpot": "gen_ai_server_time_per_output_token_seconds",
    "e2e": "gen_ai_server_request_duration_seconds",
}


class Collected(Collector):
    """A snapshot of all metrics, taken on the event loop and formatted on another thread."""

    def __init__(self, registry: Collector) -> None:
        self._families = list(registry.collect())

    def collect(self) -> list[Metric]:
        return self._families


@dataclass(slots=True, frozen=True)
class SloTargets:
    """Service level objectives, in seconds; 0 for none."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0


@dataclass(slots=True)
class SampleTimings:
    """When the tokens of one sample arrived, on the monotonic clock."""

    slo: SloTargets
    arrived: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_slow: int = 0  # gaps longer than the SLO

    @property
    def ttft_s(self) -> float | None:
        return self.first - self.arrived if self.num_tokens else None

    def breaks(self, now: float) -> bool:
        """Return whether the sample has missed its SLO by now. Up to 1 % of its gaps may be too long."""
        ttft_s = now - self.arrived if self.ttft_s is None else self.ttft_s
        return bool(self.slo.ttft_s and ttft_s > self.slo.ttft_s) or self.num_slow > max(0, self.num_tokens - 1) // 100


@dataclass(slots=True)
class TenantUsage:
    """The usage of a tenant so far. Each field is exported as a counter."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0


class RequestMetrics(Collector):
    """Counts and latencies of requests, and their usage by tenant. A Prometheus collector.

    Each HTTP request records its tokens as they are sent; `/metrics` and `/v1/status` read the metrics. Everything runs
    on the event loop. A prompt with `n` samples counts once as a prompt, and each of its samples counts once.

    The library's Histogram and Counter are not used, because they take 2 to 6 us for a token instead of 0.3 to 0.8 us,
    add a `_created` series to each metric, and cannot export a metric under two names.
    """

    def __init__(
        self, model_name: str, slo: Callable[[], SloTargets] = SloTargets, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`slo` returns the targets of requests that arrive now."""
        self._model_name = model_name
        self._slo = slo
        self._seen = {what: Histogram(bounds) for what, (_, _, bounds) in HISTOGRAMS.items()}
        self._window = {what: SlidingPercentiles(WINDOW_S, clock) for what in ("ttft", "tbt", "ttst")}
        self._kept = SlidingWindow(2, WINDOW_S, clock=clock)  # samples that missed and met their SLO
        self._num_slo = [0, 0]
        self._num_prompt = self._num_generated = 0
        self._ended = dict.fromkeys(FINISHES, 0)
        self._num_without_key = 0
        self._usage: dict[str, TenantUsage] = {}

    # ---- recording ----------------------------------------------------------------------------------------------

    def accepted(self, num_prompt: int, max_tokens: int) -> None:
        self._num_prompt += num_prompt
        self._seen["prompt"].observe(num_prompt)
        self._seen["max_tokens"].observe(max_tokens)

    def pace(self, arrived: float) -> SampleTimings:
        return SampleTimings(self._slo(), arrived)

    def tokens(self, pace: SampleTimings, count: int, now: float) -> None:
        """Record `count` tokens that were sent together, so that there is no time between them."""
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

    def used(self, tenant: str, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Record the tokens that a request of a tenant used. `tenant` is "" for a client without a key."""
        if tenant:
            total = self._usage.setdefault(tenant, TenantUsage())
            total.requests += 1
            total.prompt_tokens += num_prompt
            total.cached_tokens += num_cached
            total.generation_tokens += num_generated

    def rejected_without_key(self) -> None:
        self._num_without_key += 1

    def _observe(self, what: str, value: float, times: int = 1) -> None:
        self._seen[what].observe(value, times)
        self._window[what].observe(value, times)

    def ended(self, pace: SampleTimings, reason: str, now: float) -> None:
        """Record the end of a sample. `reason` is in FINISHES: "abort" for a disconnect, "error" for a failure."""
        self._ended[reason] += 1
        if reason in FINISHED:  # fast rejections would distort the latencies
            self._seen["generation"].observe(pace.num_tokens)
            self._seen["e2e"].observe(now - pace.arrived)
        if pace.num_tokens > 1:
            self._seen["tpot"].observe((pace.last - pace.first) / (pace.num_tokens - 1))
        is_missed = reason == "error" or pace.breaks(now)
        # If the client disconnected before a token was late, the sample neither met nor missed the SLO.
        if (pace.slo.ttft_s or pace.slo.tbt_s) and (reason != "abort" or is_missed):
            self._num_slo[not is_missed] += 1
            self._kept.add(not is_missed)

    # ---- reading ------------------------------------------------------------------------------------------------

    def latency(self) -> dict[str, Any]:
        """Return the last minute's percentiles in milliseconds, and the SLO, for `/v1/status`."""
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
        for what, (name, text, _) in HISTOGRAMS.items():
            for each in (name, *filter(None, [ALIASES.get(what)])):
                label = "gen_ai_request_model" if each.startswith("gen_ai") else "model_name"
                family = HistogramMetricFamily(each, text if each == name else f"Alias of {name}.", labels=[label])
                self._seen[what].add_to(family, [self._model_name])
                yield family
        yield self._counter("vllm:prompt_tokens", "Prompt tokens accepted.", {"": self._num_prompt})
        yield self._counter("vllm:generation_tokens", "Tokens sent to clients.", {"": self._num_generated})
        yield self._counter("vllm:request_success", "Samples that ended, by reason.", self._ended, "finished_reason")
        kept = {"no": self._num_slo[0], "yes": self._num_slo[1]}
        yield self._counter("baton_slo_requests", "Samples, by whether they met their SLO.", kept, "met")
        gauge = GaugeMetricFamily(
            "baton_slo_attainment_ratio",
            "Share of the last minute's samples that met their SLO.",
            labels=["model_name"],
        )
        if (attainment := self.attainment()) is not None:
            gauge.add_metric([self._model_name], attainment)
        yield gauge
        for field in TenantUsage.__slots__:
            used = {tenant: getattr(usage, field) for tenant, usage in self._usage.items()}
            yield self._counter(
                f"baton_tenant_{field}", f"{field.replace('_', ' ').capitalize()}, by tenant.", used, "tenant"
            )
        text = "Requests rejected because they had no valid API key."
        yield CounterMetricFamily("baton_requests_without_key", text, self._num_without_key)

    def _counter(self, name: str, text: str, values: Mapping[str, int], label: str = "") -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([self._model_name, *([key] if label else [])], value)
        return family
