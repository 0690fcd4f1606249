"""Metrics of request latencies and counts as clients see them, with vLLM's names so that vLLM's dashboards work.

Label values are members of fixed sets, or tenants from the API keys file.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.nodes.load import attribute
from shared.metrics import metric_family
from shared.rpc.messages import NodeInfo

WINDOW_S, SLICE_S = 60.0, 5.0  # percentiles and counts in `/v1/status` cover WINDOW_S, in slices of SLICE_S
RATE_S = 10  # the period that rates in `/v1/status` cover
LEAST_S, BUCKET_RATIO = 1e-7, 1.05  # the value recorded for a time of 0; the ratio of adjacent bucket bounds
SCALE = 1 / math.log(BUCKET_RATIO)
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    *(160, 640, 2560),
)
# vLLM's bounds, with additional bounds below 10 ms for small models.
ITL_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
FINISHED = ("stop", "length")
FINISHES = (*FINISHED, "abort", "error")

HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", TTFT_S),
    "tbt": ("vllm:inter_token_latency_seconds", "Time between two tokens of a sample.", ITL_S),
    "tpot": ("vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a sample.", ITL_S),
    "e2e": ("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", E2E_S),
    "ttst": ("baton_second_token_latency_seconds", "Time from the first token to the second.", ITL_S),
    "prompt": ("vllm:request_prompt_tokens", "Tokens per prompt.", TOKENS),
    "generation": ("vllm:request_generation_tokens", "Tokens per sample.", TOKENS),
    "max_tokens": ("vllm:request_max_num_generation_tokens", "Maximum number of tokens requested.", TOKENS),
}
COUNTERS = {
    "prompt": ("vllm:prompt_tokens_total", "Prompt tokens accepted.", ["model_name"]),
    "generation": ("vllm:generation_tokens_total", "Tokens sent to clients.", ["model_name"]),
    "ended": ("vllm:request_success_total", "Samples that ended, by reason.", ["model_name", "finished_reason"]),
    "refused": ("baton_requests_rejected_total", "Samples refused before any node received them.", ["model_name"]),
    "slo": ("baton_slo_requests_total", "Samples, by whether they met their SLO.", ["model_name", "met"]),
    "tenant_requests": ("baton_tenant_requests_total", "Requests, by tenant.", ["model_name", "tenant"]),
    "tenant_prompt": ("baton_tenant_prompt_tokens_total", "Prompt tokens, by tenant.", ["model_name", "tenant"]),
    "tenant_cached": ("baton_tenant_cached_tokens_total", "Cached tokens, by tenant.", ["model_name", "tenant"]),
    "tenant_generation": ("baton_tenant_generation_tokens_total", "Tokens sent, by tenant.", ["model_name", "tenant"]),
    "without_key": ("baton_requests_without_key_total", "Requests rejected because they had no valid API key.", []),
}
UNLABELED = (("prompt",), ("generation",), ("refused",), ("without_key",))
SHOWN_AS_0 = (*UNLABELED, *(("ended", reason) for reason in FINISHES), ("slo", "no"), ("slo", "yes"))
# Alternative names of metrics. vLLM's published dashboard uses the first alias; all other aliases are deprecated.
ALIASES = {
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds": "gen_ai_server_time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds": "gen_ai_server_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "gen_ai_server_request_duration_seconds",
    "baton_request_migrations": "baton_requests_moved",
    "baton_requests_rejected": "baton_requests_refused",
    "baton_client_backpressure": "baton_requests_paused",
    "baton_node_records_dropped": "baton_records_malformed",
}


class Snapshot(Collector):
    """A copy of all metrics, with their aliases. The copy is made on the event loop and formatted on another thread."""

    def __init__(self, registry: Collector) -> None:
        merged: dict[str, Metric] = {}  # all models export families with the same names
        for family in registry.collect():
            samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            family.samples = merged[family.name].samples + samples if family.name in merged else samples
            merged[family.name] = family
        self._families: list[Metric] = []
        for family in merged.values():
            self._families.append(family)
            if alias := ALIASES.get(family.name):
                self._families.append(_renamed(family, alias))

    def collect(self) -> list[Metric]:
        return self._families


def _renamed(family: Metric, name: str) -> Metric:
    alias = Metric(name, f"Alias of {family.name}.", family.type)
    model = "gen_ai_request_model" if name.startswith("gen_ai") else "model_name"
    for sample in family.samples:
        labels = {model if label == "model_name" else label: value for label, value in sample.labels.items()}
        alias.add_sample(sample.name.replace(family.name, name), labels, sample.value)
    return alias


class Buckets:
    """A histogram without a lock. Recording a value takes 0.2 us; the client library's histogram takes 2 us."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, model_name: str) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric([model_name], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        return family


class SlidingCounts:
    """For each key, the sum of what was added in the last minute. Counts expire in slices of `slice_s` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, slice_s: float = SLICE_S) -> None:
        self._clock = clock
        self._slice_s = slice_s
        self._num_slices = round(WINDOW_S / slice_s)
        self._number, self._current = -1, Counter[Any]()  # the current slice
        self._slices: deque[tuple[int, Counter[Any]]] = deque(maxlen=self._num_slices + 1)

    def add(self, key: Hashable, times: int = 1) -> None:
        number = int(self._clock() / self._slice_s)
        if number != self._number:
            self._number, self._current = number, Counter()
            self._slices.append((number, self._current))
        self._current[key] += times

    def totals(self, num_complete: int = 0) -> Counter[Any]:
        """Return the counts of all slices or, if `num_complete` is not 0, of the last `num_complete` slices that have
        ended."""
        current = int(self._clock() / self._slice_s)
        end = current if num_complete else current + 1
        first = end - (num_complete or self._num_slices)
        return sum((counts for number, counts in self._slices if first <= number < end), Counter())


class SlidingPercentiles:
    """Percentiles of the times recorded in the last minute, accurate to 2.5 % because each bucket is 5 % wide."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = SlidingCounts(clock)

    def observe(self, value_s: float) -> None:
        self._buckets.add(round(math.log(value_s or LEAST_S) * SCALE))

    def read_ms(self) -> dict[str, float | None]:
        """Return the 50th and 99th percentiles in milliseconds (None without values), and `n`, the number of values."""
        counts = self._buckets.totals()
        read: dict[str, float | None] = {"p50": None, "p99": None, "n": counts.total()}
        below = 0
        for bucket in sorted(counts):
            below += counts[bucket]
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                if read[name] is None and below >= share * counts.total():
                    read[name] = round(1000 * BUCKET_RATIO**bucket, 3)
        return read


@dataclass(slots=True, frozen=True)
class SloTargets:
    """Service level objectives in seconds; 0 means no objective."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0


def slo_targets(ttft_slo_ms: float, nodes: Iterable[NodeInfo]) -> SloTargets:
    """Return the router's SLO for the first token and, for the other tokens, the strictest SLO of any decode node."""
    tbt_ms = [slo for info in nodes if info.role == "decode" and (slo := attribute(info, "tbt_slo_ms", 0.0)) > 0]
    return SloTargets(ttft_slo_ms / 1000, min(tbt_ms, default=0.0) / 1000)


@dataclass(slots=True)
class SampleTimings:
    """When a sample's request arrived and when the sample's tokens were sent, on the monotonic clock."""

    slo: SloTargets
    arrived: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_slow: int = 0  # number of gaps between tokens that were longer than the SLO

    @property
    def ttft_s(self) -> float | None:
        return self.first - self.arrived if self.num_tokens else None

    def breaks(self, now: float) -> bool:
        """Return whether the sample has missed its SLO at time `now`. Up to 1 % of the gaps between its tokens may be
        too long."""
        ttft_s = now - self.arrived if self.ttft_s is None else self.ttft_s
        return bool(self.slo.ttft_s and ttft_s > self.slo.ttft_s) or self.num_slow > max(0, self.num_tokens - 1) // 100


class RequestMetrics(Collector):
    """A Prometheus collector of the counts and latencies of requests, and of the tokens that each tenant used.

    Each HTTP request's handler records tokens when it sends them; `/metrics` and `/v1/status` read the metrics.
    All methods run on the event loop. A prompt with `n` samples counts as one prompt and `n` samples.
    """

    def __init__(
        self,
        model_name: str,
        slo: Callable[[], SloTargets] = SloTargets,
        clock: Callable[[], float] = time.monotonic,
        *,
        first: "RequestMetrics | None" = None,
    ) -> None:
        """`slo` returns the targets for requests that arrive now. `first` is the object of the first model, and it is
        None in that object. Its latencies and totals in `/v1/status` include those of the other models."""
        self._model_name = model_name
        self._slo = slo
        self._seen = {what: Buckets(bounds) for what, (_, _, bounds) in HISTOGRAMS.items()}
        # Each key of `_counts` is a key of COUNTERS, followed by the values of the metric's labels except `model_name`.
        self._counts = Counter[tuple[str, ...]](dict.fromkeys(SHOWN_AS_0, 0))
        self._kept = SlidingCounts(clock)  # number of samples that met their SLO (key True) or missed it (key False)
        window = {what: SlidingPercentiles(clock) for what in ("ttft", "tbt", "ttst")}
        self._window: dict[str, SlidingPercentiles] = first._window if first else window
        self._recent: SlidingCounts = first._recent if first else SlidingCounts(clock, 1.0)  # for `totals`

    # ---- recording ----------------------------------------------------------------------------------------------

    def accepted(self, num_prompt: int, max_tokens: int) -> None:
        """Record an admitted prompt of `num_prompt` tokens, whose samples may have up to `max_tokens` tokens."""
        self._counts["prompt",] += num_prompt
        self._recent.add("prompt_tokens", num_prompt)
        self._seen["prompt"].observe(num_prompt)
        self._seen["max_tokens"].observe(max_tokens)

    def pace(self, arrived: float) -> SampleTimings:
        """Count a sample that arrives, and return its timings."""
        self._recent.add("requests")
        return SampleTimings(self._slo(), arrived)

    def tokens(self, pace: SampleTimings, count: int, now: float) -> None:
        """Record `count` tokens that were sent at the same time."""
        self._counts["generation",] += count
        self._recent.add("generated_tokens", count)
        if pace.num_tokens:
            gap_s = now - pace.last
            self._observe("tbt", gap_s)
            if 0 < pace.slo.tbt_s < gap_s:
                pace.num_slow += 1
        else:
            pace.first = now
            self._observe("ttft", now - pace.arrived)
        for _ in range(count - 1):
            self._observe("tbt", 0.0)
        if pace.num_tokens < 2 <= pace.num_tokens + count:
            self._observe("ttst", now - pace.first)
        pace.last = now
        pace.num_tokens += count

    def used(self, tenant: str, num_prompt: int, num_cached: int, num_generated: int, num_requests: int = 1) -> None:
        """Record the tokens and requests of a tenant. `tenant` is "" for a client without a key."""
        if tenant:
            amounts = {"prompt": num_prompt, "cached": num_cached, "generation": num_generated}
            for what, amount in [("requests", num_requests), *amounts.items()]:
                self._counts[f"tenant_{what}", tenant] += amount

    def refused(self) -> None:
        """Record that a request was refused before it was parsed."""
        self._recent.add("requests")
        self._recent.add("refused")
        self._counts["refused",] += 1
        self._counts["ended", "error"] += 1  # as in `ended`

    def rejected_without_key(self) -> None:
        self._counts["without_key",] += 1

    def ended(self, pace: SampleTimings, reason: str, now: float) -> None:
        """Record the end of a sample. `reason` is "refused" or a value of FINISHES: "abort" if the client disconnected,
        "error" if the sample failed. The metrics with vLLM's names count a refused sample as an "error"."""
        self._recent.add("finished" if reason in FINISHED else "failed" if reason == "error" else reason)
        if reason == "refused":
            self._counts["refused",] += 1
            reason = "error"
        self._counts["ended", reason] += 1
        if reason in FINISHED:  # fast rejections would distort the latencies
            self._seen["generation"].observe(pace.num_tokens)
            self._seen["e2e"].observe(now - pace.arrived)
        if pace.num_tokens > 1:
            self._seen["tpot"].observe((pace.last - pace.first) / (pace.num_tokens - 1))
        is_missed = reason == "error" or pace.breaks(now)
        # If the client disconnected before the SLO was missed, the sample counts neither as met nor as missed.
        if (pace.slo.ttft_s or pace.slo.tbt_s) and (reason != "abort" or is_missed):
            self._counts["slo", "no" if is_missed else "yes"] += 1
            self._kept.add(not is_missed)

    def _observe(self, what: str, value_s: float) -> None:
        self._seen[what].observe(value_s)
        self._window[what].observe(value_s)

    # ---- reading ------------------------------------------------------------------------------------------------

    def latency(self) -> dict[str, Any]:
        """Return the percentiles of the last minute's latencies in milliseconds, and the SLO, for `/v1/status`."""
        slo = self._slo()
        targets = {"ttft_ms": 1000 * slo.ttft_s, "tbt_ms": 1000 * slo.tbt_s, "attainment": self.attainment()}
        percentiles = {f"{what}_ms": window.read_ms() for what, window in self._window.items()}
        return {"window_s": WINDOW_S, **percentiles, "slo": targets}

    def totals(self) -> dict[str, float]:
        """Return the rates of the last 10 s and the counts of the last minute, for `/v1/status`."""
        rates, counts = self._recent.totals(RATE_S), self._recent.totals()
        names = ("requests", "prompt_tokens", "generated_tokens", "refused", "failed")
        per_s = {f"{name}_per_s": round(rates[name] / RATE_S, 1) for name in names}
        return per_s | {name: counts[name] for name in ("refused", "failed", "finished")}

    def attainment(self) -> float | None:
        """Return the share of the last minute's samples that met their SLO, from 0 to 1, or None without samples."""
        kept = self._kept.totals()
        return kept[True] / kept.total() if kept else None

    def collect(self) -> Iterable[Metric]:
        model = self._model_name
        for what, (name, text, _) in HISTOGRAMS.items():
            yield self._seen[what].family(name, text, model)
        for what, (name, text, labels) in COUNTERS.items():
            counts = [((model, *key[1:])[: len(labels)], num) for key, num in self._counts.items() if key[0] == what]
            yield metric_family(name, text, labels, counts)
        attainment = [((model,), share) for share in (self.attainment(),) if share is not None]
        text = "Share of the last minute's samples that met their SLO."
        yield metric_family("baton_slo_attainment_ratio", text, ["model_name"], attainment)
