"""The metrics of one run, the window that these metrics cover, where requests spend time, and why they miss the SLO.

Every request that was scheduled in the window counts. A failed request misses the SLO, and the latencies of its missing
tokens count as infinite. Percentiles are interpolated linearly.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from compare.load.outcome import TIMEOUT, LatencySlo, Outcome
from scheduler.cost import CostModel, StepWork

Summary = Mapping[str, Any]  # one entry of /v1/requests
Summaries = Mapping[str, Summary]  # by request id
StepRow = Mapping[str, Any]  # one row of /v1/steps, by column
Series = NDArray[np.float64]

LATENCIES = ("ttft", "tbt", "tpot", "ttst", "e2e")
POINTS, BATCH = 500, 5  # samples of the number of outstanding requests, and samples per batch of MSER-5
TREND_BATCHES = 10
P99 = partial(np.percentile, q=99)
TBT_FIGURES: dict[str, Callable[[Sequence[float]], Any]] = {"p99": P99, "max": max, "mean": fmean}
TREND_LEVEL = 0.01  # probability that a steady run counts as overloaded if its batches are independent
MIN_GROWTH, GROWTH_DEVIATIONS = 0.25, 2.0  # minimum growth if overloaded: share of the mean; standard deviations

PHASES = (
    *("client", "router", "prefill_queue", "prefill", "transfer_exposed", "decode_queue", "decode", "interference"),
    "retry",  # failed attempts; most requests have none
)
BEFORE_FIRST = {
    "client": "client lag",
    "router": "router",
    "prefill_queue": "prefill queue",
    "prefill": "prefill compute",
    "retry": "failed attempts",
    "residual": "outside the router",
}
BETWEEN = {
    "transfer_exposed": "transfer",
    "decode_queue": "decode queue",
    "interference": "behind prompt chunks",
    "retry": "failed attempts",
}
MIN_CAUSE_SHARE = 0.5  # a cause must account for at least this share of the time over the SLO


# ---- one request, in seconds ---------------------------------------------------------------------------------------


def ttft_s(outcome: Outcome) -> float:
    """Return the time from the request's scheduled start to its first token, or infinity if there was none."""
    return outcome.token_s[0] - outcome.scheduled_s if outcome.token_s else math.inf


def gaps_s(outcome: Outcome) -> list[float]:
    """Return the times between consecutive tokens (TBT; vLLM calls them ITL)."""
    return [after - before for before, after in pairwise(outcome.token_s)]


def tpot_s(outcome: Outcome) -> float | None:
    """Return the mean time between tokens. Return None for a request of one token, and infinity for a longer request
    that failed."""
    if not outcome.finished:
        return None if outcome.max_tokens == 1 else math.inf
    count = len(outcome.token_s)
    return (outcome.token_s[-1] - outcome.token_s[0]) / (count - 1) if count > 1 else None


def ttst_s(outcome: Outcome) -> float | None:
    """Return the time between the first two tokens. If the request is disaggregated, it includes the KV transfer."""
    if len(outcome.token_s) > 1:
        return outcome.token_s[1] - outcome.token_s[0]
    return None if outcome.finished or outcome.max_tokens == 1 else math.inf


def e2e_s(outcome: Outcome) -> float:
    """Return the time from the request's scheduled start to its last token, or infinity if it failed."""
    return outcome.token_s[-1] - outcome.scheduled_s if outcome.finished and outcome.token_s else math.inf


def fluidity(outcome: Outcome, slo: LatencySlo) -> tuple[int, int]:
    """Return how many tokens met their deadlines, and how many were due. The deadline of token i is TTFT SLO + i * TBT
    SLO, as in Etalon."""
    slo = outcome.slo or slo
    first_s, step_s = (limit / 1000 if limit else math.inf for limit in (slo.ttft_ms, slo.tbt_ms))
    due = len(outcome.token_s) if outcome.finished else max(outcome.max_tokens, len(outcome.token_s))
    deadlines = (outcome.scheduled_s + first_s + (index * step_s if index else 0.0) for index in range(due))
    return sum(at <= until for at, until in zip(outcome.token_s, deadlines, strict=False)), due


def misses(outcome: Outcome, slo: LatencySlo) -> list[str]:
    """Return ["failed"] for a failed request, else its missed limits: "ttft", "tbt". `outcome.slo` overrides `slo`."""
    slo = outcome.slo or slo
    if not outcome.finished:
        return ["failed"]
    missed = []
    if slo.ttft_ms and ttft_s(outcome) * 1000 > slo.ttft_ms:
        missed.append("ttft")
    gaps = gaps_s(outcome)
    if slo.tbt_ms and gaps and tbt_figure(gaps, slo.tbt_of) * 1000 > slo.tbt_ms:
        missed.append("tbt")
    return missed


def tbt_figure(gaps: Sequence[float], tbt_of: str) -> float:
    """Return the statistic of one request's gaps to which the TBT limit applies. `tbt_of` names the statistic."""
    return float(TBT_FIGURES[tbt_of](gaps))


def slo_excess(outcome: Outcome, slo: LatencySlo) -> float:
    """Return the larger of two ratios: the TTFT to its limit, and the longest gap between tokens to the TBT limit.
    Return infinity for a failed request."""
    slo = outcome.slo or slo
    if not outcome.finished:
        return math.inf
    late = ttft_s(outcome) * 1000 / slo.ttft_ms if slo.ttft_ms else 0.0
    return max(late, max(gaps_s(outcome), default=0.0) * 1000 / slo.tbt_ms if slo.tbt_ms else 0.0)


# ---- which part of a run counts ------------------------------------------------------------------------------------


def measured_window(outcomes: Sequence[Outcome]) -> tuple[tuple[float, float], bool]:
    """Return the window in seconds, from the end of the warm-up to the last arrival, and whether the run is overloaded.

    The window contains at least half of the requests.
    """
    last_s = max(outcome.scheduled_s for outcome in outcomes)
    first_s = min(outcome.scheduled_s for outcome in outcomes)
    if last_s <= first_s:
        return (first_s, last_s), False
    at_s = np.linspace(first_s, last_s, POINTS)
    waiting = outstanding(outcomes, at_s)
    cut = mser(waiting)
    median_s = float(np.median([outcome.scheduled_s for outcome in outcomes]))
    return (min(float(at_s[cut]), median_s), last_s), is_growing(waiting[cut:])


def steady_attainment(outcomes: Sequence[Outcome], slo: LatencySlo) -> float:
    """Return the share of the requests in the measured window that met the SLO, or 0 if the run is overloaded."""
    window_s, overloaded = measured_window(outcomes)
    population = inside(outcomes, window_s)
    good = sum(not misses(outcome, slo) for outcome in population)
    return 0.0 if overloaded else good / len(population)


def outstanding(outcomes: Sequence[Outcome], at_s: Series) -> Series:
    """Return the number of requests that were scheduled but had not ended, at each time in `at_s`.

    A request that timed out counts as never ended. Otherwise, a server that never answers would look steady after the
    first timeouts.
    """
    due = np.sort([outcome.scheduled_s for outcome in outcomes])
    ends = [math.inf if one.ended_s is None or one.error == TIMEOUT else one.ended_s for one in outcomes]
    counts = np.searchsorted(due, at_s, side="right") - np.searchsorted(np.sort(ends), at_s, side="right")
    return counts.astype(np.float64)


def mser(series: Series) -> int:
    """Return how many of the first values are warm-up, by MSER-5 (White, Cobb and Spratt, 2000).

    The values are averaged in batches of five. The rule drops the first batches, and chooses their number so that the
    sum of squared deviations of the remaining batches, divided by the square of their number, is minimal. At most half
    of the values count as warm-up, because the rule is known to fail beyond that.
    """
    num_batches = len(series) // BATCH
    if num_batches < 2:
        return 0
    means = series[: num_batches * BATCH].reshape(num_batches, BATCH).mean(axis=1)
    errors = [
        np.square(means[cut:] - means[cut:].mean()).sum() / (num_batches - cut) ** 2
        for cut in range(num_batches // 2 + 1)
    ]
    return int(np.argmin(errors)) * BATCH


def is_growing(series: Series) -> bool:
    """Return whether the number of outstanding requests grows. The slope over batch means must be significant by a
    one-sided t-test. The growth must exceed both a quarter of the mean and twice the square root of the mean."""
    size = len(series) // TREND_BATCHES
    if size == 0:
        return False
    means = series[: size * TREND_BATCHES].reshape(TREND_BATCHES, size).mean(axis=1)
    if float(np.ptp(means)) == 0:
        return False
    line = stats.linregress(np.arange(TREND_BATCHES), means, alternative="greater")
    growth, mean = line.slope * TREND_BATCHES, float(means.mean())
    matters = growth > max(MIN_GROWTH * mean, GROWTH_DEVIATIONS * math.sqrt(mean))
    return bool(line.pvalue < TREND_LEVEL and matters)


# ---- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The figures of a run. An overloaded run has no latencies, because they would depend on its duration. The
    latency of a missing token counts as infinite, and an infinite percentile is None."""

    window_s: tuple[float, float]
    overloaded: bool
    arrived: int
    finished: int
    failed: int
    metrics: dict[str, float | None]


def inside(outcomes: Iterable[Outcome], window_s: tuple[float, float]) -> list[Outcome]:
    """Return the requests that were scheduled in the window. All figures cover exactly these requests."""
    return [outcome for outcome in outcomes if window_s[0] <= outcome.scheduled_s <= window_s[1]]


def measure(
    outcomes: Sequence[Outcome],
    slo: LatencySlo,
    summaries: Summaries,
    window_s: tuple[float, float],
    *,
    overloaded: bool,
) -> RunMetrics:
    """Return all figures of one run. `measured_window` provides `window_s` and `overloaded`."""
    population = inside(outcomes, window_s)
    good = sum(not misses(outcome, slo) for outcome in population)
    length_s = window_s[1] - window_s[0]
    in_time, due = np.sum([fluidity(outcome, slo) for outcome in population] or [(0, 0)], axis=0)
    delivered = sum(window_s[0] <= at <= window_s[1] for outcome in outcomes for at in outcome.token_s)
    lags = [outcome.sent_s - outcome.scheduled_s for outcome in population if outcome.sent_s is not None]
    metrics: dict[str, float | None] = {
        "attainment": good / len(population) if population else None,
        "goodput_rps": good / length_s if length_s > 0 else None,
        "fluidity": float(in_time / due) if due else None,
        "throughput_tps": delivered / length_s if length_s > 0 else None,
        "client_lag_p99_ms": percentile(lags, 99),
    }
    if not overloaded:
        metrics |= latencies(population) | from_summaries(population, summaries)
    finished = sum(outcome.finished for outcome in population)
    return RunMetrics(window_s, overloaded, len(population), finished, len(population) - finished, metrics)


def latencies(population: Sequence[Outcome]) -> dict[str, float | None]:
    """Return percentiles of the latencies at the client, in ms. TBT includes the tokens of failed requests."""
    values = values_ms(population)
    return {
        f"{name}_p{share}_ms": percentile(values[name], share, scale=1) for name in LATENCIES for share in (50, 99)
    } | {"tbt_max_ms": percentile(values["tbt"], 100, scale=1)}


def values_ms(population: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return every value of each latency in milliseconds. The latency of a missing token counts as infinite."""
    tbt = [gap for outcome in population for gap in gaps_s(outcome)]
    tbt += [math.inf for outcome in population if outcome.token_s and not outcome.finished]
    values = {
        "ttft": [ttft_s(outcome) for outcome in population],
        "tbt": tbt,
        "tpot": [value for outcome in population if (value := tpot_s(outcome)) is not None],
        "ttst": [value for outcome in population if (value := ttst_s(outcome)) is not None],
        "e2e": [e2e_s(outcome) for outcome in population],
    }
    return {name: [value * 1000 for value in row] for name, row in values.items()}


def percentile(values: Sequence[float], share: float, scale: float = 1000) -> float | None:
    """Return a percentile in milliseconds, or None if it is infinite or there are no values."""
    if not values:
        return None
    with np.errstate(invalid="ignore"):  # inf - inf
        found = float(np.percentile(values, share))
    return found * scale if math.isfinite(found) else None


def ecdf(values: Sequence[float], points: int = 200) -> dict[str, list[float]]:
    """Return points of the empirical distribution. Each `y` is the share of the values that are at most `x`.

    Points are spaced evenly, with additional points among the largest values. `y` ends below 1 if a value is infinite.
    """
    finite = np.sort([value for value in values if math.isfinite(value)])
    if not len(finite):
        return {"x": [], "y": []}
    last = len(finite) - 1
    even = np.linspace(0, last, min(points, len(finite)))
    tail = last - np.geomspace(1, len(finite), min(points, len(finite))) + 1
    xs = np.unique(finite[np.concatenate([even, tail]).astype(int)])
    return {"x": xs.tolist(), "y": (np.searchsorted(finite, xs, side="right") / len(values)).tolist()}


def from_summaries(population: Sequence[Outcome], summaries: Summaries) -> dict[str, float | None]:
    """Aggregate the router's summaries: hidden and exposed KV transfer, and how long prompts delayed decodes."""
    known = [summaries[outcome.id] for outcome in population if outcome.id in summaries]
    if not known:
        return {}
    transfers = [row["transfer"] for row in known if row["transfer"]]
    phases = [row["phases_ms"] for row in known if row.get("phases_ms")]
    return {
        f"{part}_transfer_p50_ms": percentile([transfer[f"{part}_ms"] for transfer in transfers], 50, scale=1)
        for part in ("hidden", "exposed")
    } | {"interference_s": sum(phase["interference"] for phase in phases) / 1000 if phases else None}


# ---- the router's records -----------------------------------------------------------------------------------------


def phases_ms(outcome: Outcome, summary: Summary) -> dict[str, float] | None:
    """Return the milliseconds that the request spent in each of PHASES, and its "residual".

    The residual is time that neither client nor router recorded, such as network time. The values sum to the time from
    the scheduled start to the last token. Only durations are used, so the clocks of client and router are never
    compared. Return None if the request failed or has no phases.
    """
    if not outcome.finished or outcome.sent_s is None or not outcome.token_s or not summary.get("phases_ms"):
        return None
    phases = {"client": (outcome.sent_s - outcome.scheduled_s) * 1000}
    phases |= {phase: float(summary["phases_ms"].get(phase, 0.0)) for phase in PHASES[1:]}
    return phases | {"residual": e2e_s(outcome) * 1000 - sum(phases.values())}


def phases_of(population: Sequence[Outcome], summaries: Summaries, slo: LatencySlo) -> dict[str, Any] | None:
    """Return the mean of every phase over all requests and over those that missed the SLO, and the residual's size.

    Only requests that finished and have phases count; `requests` is their number. Return None if no request counts.
    `missed` is empty if no request missed the SLO.
    """
    found = [(outcome, phases_ms(outcome, summaries.get(outcome.id, {}))) for outcome in population]
    rows = [phases for _, phases in found if phases]
    missed = [phases for outcome, phases in found if phases and misses(outcome, slo)]
    if not rows:
        return None
    residuals = np.abs([row["residual"] for row in rows])
    return {
        "mean": _phase_means(rows),
        "missed": _phase_means(missed),
        "requests": {"mean": len(rows), "missed": len(missed)},
        "residual_ms": {"median": float(np.median(residuals)), "p99": float(np.percentile(residuals, 99))},
    }


def _phase_means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: float(np.mean([row[phase] for row in rows])) for phase in PHASES} if rows else {}


def miss_causes(population: Sequence[Outcome], summaries: Summaries, slo: LatencySlo) -> dict[str, int]:
    """Return the number of requests that missed the SLO, keyed by main cause, most frequent cause first."""
    causes = (miss_cause(outcome, summaries.get(outcome.id, {}), slo) for outcome in population)
    return dict(Counter(filter(None, causes)).most_common())


def miss_cause(outcome: Outcome, summary: Summary, slo: LatencySlo) -> str | None:
    """Return the main cause of a miss, such as "TTFT: prefill queue", or None if the request met the SLO.

    If both limits are missed, return a cause for TTFT, because an early delay often causes later ones. If the request
    has no phases, the cause is "unknown".
    """
    missed = misses(outcome, slo)
    if not missed:
        return None
    if missed == ["failed"]:
        return "failed: timeout" if outcome.error == TIMEOUT else "failed"
    phases = phases_ms(outcome, summary)
    if phases is None:
        return f"{missed[0].upper()}: unknown"
    if "ttft" in missed:
        return f"TTFT: {BEFORE_FIRST[max(BEFORE_FIRST, key=phases.__getitem__)]}"
    limit_s = (outcome.slo or slo).tbt_ms / 1000
    over_ms = sum(max(0.0, gap - limit_s) for gap in gaps_s(outcome)) * 1000
    cause = max(BETWEEN, key=phases.__getitem__)
    return f"TBT: {BETWEEN[cause]}" if phases[cause] >= MIN_CAUSE_SHARE * over_ms else "TBT: decode compute"


def busy_shares(steps: Sequence[StepRow], window_ms: tuple[float, float], model: CostModel | None) -> dict[str, float]:
    """Return shares of the window. "prefill", "decode", "idle_empty" (no requests) and "idle_blocked" (requests waited)
    sum to 1. "busy" is "prefill" plus "decode".

    The time of a mixed step is split by the costs of its prompts and decodes or, without a model, by their tokens.
    """
    length = window_ms[1] - window_ms[0]
    shares = {"prefill": 0.0, "decode": 0.0, "idle_empty": 0.0, "idle_blocked": 0.0}
    reached, blocked = window_ms[0], False
    for step in sorted(steps, key=lambda step: float(step["start_ms"])):
        start = min(max(step["start_ms"], reached), window_ms[1])
        end = min(max(step["start_ms"] + step["duration_ms"], reached), window_ms[1])
        shares["idle_blocked" if blocked else "idle_empty"] += start - reached
        prompts = _prompt_share(step, model)
        shares["prefill"] += (end - start) * prompts
        shares["decode"] += (end - start) * (1 - prompts)
        reached, blocked = end, step["waiting"] > 0
    shares["idle_blocked" if blocked else "idle_empty"] += window_ms[1] - reached
    shares = {name: value / length for name, value in shares.items()}
    return {"busy": shares["prefill"] + shares["decode"]} | shares


def _prompt_share(step: StepRow, model: CostModel | None) -> float:
    if not step["prefill_tokens"] or not step["num_decodes"]:
        return 1.0 if step["prefill_tokens"] else 0.0
    if model is None:
        return float(step["prefill_tokens"] / (step["prefill_tokens"] + step["num_decodes"]))
    idle_s = model.overhead + model.per_token * model.knee_tokens
    decodes = StepWork(num_decodes=step["num_decodes"], decode_context=step["decode_context"])
    pairs = step.get("prefill_pairs", 0)  # missing in the records of older routers
    total = StepWork(step["num_prefills"], step["prefill_tokens"], pairs, step["num_decodes"], step["decode_context"])
    prompts_s = model.seconds(total) - model.seconds(decodes)
    decodes_s = max(0.0, model.seconds(decodes) - idle_s)
    return prompts_s / (prompts_s + decodes_s) if prompts_s + decodes_s else 0.5
