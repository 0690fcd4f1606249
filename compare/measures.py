"""The metrics of one run, exactly as defined in the documents: from outcomes, and from the router's summaries.

Whoever arrived in the window counts, whatever became of it: a request that failed is a miss, its tokens never come.
Percentiles interpolate linearly (numpy's default).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compare.outcome import Outcome, Slo

Summary = Mapping[str, Any]  # of /v1/requests
Summaries = Mapping[str, Summary]  # by request id

LATENCIES = ("ttft", "tbt", "tpot", "ttst", "e2e")


# ---- of one request, in seconds ------------------------------------------------------------------------------------


def ttft_s(outcome: Outcome) -> float:
    """From when the request was due to its first token; infinite if that never came."""
    return outcome.token_s[0] - outcome.scheduled_s if outcome.token_s else math.inf


def gaps_s(outcome: Outcome) -> list[float]:
    """TBT: the time between each token and the one before. vLLM calls them ITL."""
    return [after - before for before, after in zip(outcome.token_s, outcome.token_s[1:], strict=False)]


def tpot_s(outcome: Outcome) -> float | None:
    """The mean gap; None for one token, which has none; infinite if a request for more failed."""
    if not outcome.finished:
        return None if outcome.max_tokens == 1 else math.inf
    count = len(outcome.token_s)
    return (outcome.token_s[-1] - outcome.token_s[0]) / (count - 1) if count > 1 else None


def ttst_s(outcome: Outcome) -> float | None:
    """From the first token to the second, where disaggregation hides its transfer; None where one was asked for."""
    if len(outcome.token_s) > 1:
        return outcome.token_s[1] - outcome.token_s[0]
    return None if outcome.finished or outcome.max_tokens == 1 else math.inf


def e2e_s(outcome: Outcome) -> float:
    """From when the request was due to its last token; infinite if it failed."""
    return outcome.token_s[-1] - outcome.scheduled_s if outcome.finished and outcome.token_s else math.inf


def fluidity(outcome: Outcome, slo: Slo) -> tuple[int, int]:
    """Tokens in time, and tokens due (Etalon's token deadlines): the i-th is due at TTFT SLO + i TBT SLOs."""
    slo = outcome.slo or slo
    first_s, step_s = (limit / 1000 if limit else math.inf for limit in (slo.ttft_ms, slo.tbt_ms))
    due = len(outcome.token_s) if outcome.finished else max(outcome.max_tokens, len(outcome.token_s))
    deadlines = (outcome.scheduled_s + first_s + (index * step_s if index else 0.0) for index in range(due))
    return sum(at <= until for at, until in zip(outcome.token_s, deadlines, strict=False)), due


def misses(outcome: Outcome, slo: Slo) -> list[str]:
    """What of the SLO (its own, or else `slo`) the request did not keep: of "failed", "ttft", "tbt"; empty: good."""
    slo = outcome.slo or slo
    if not outcome.finished:
        return ["failed"]
    missed = []
    if slo.ttft_ms and ttft_s(outcome) * 1000 > slo.ttft_ms:
        missed.append("ttft")
    gaps = gaps_s(outcome)
    if slo.tbt_ms and gaps and held_against_tbt(gaps, slo.tbt_of) * 1000 > slo.tbt_ms:
        missed.append("tbt")
    return missed


def held_against_tbt(gaps: Sequence[float], tbt_of: str) -> float:
    """One request's gaps as one figure. Raises ValueError for a `tbt_of` that is none."""
    if tbt_of == "p99":
        return float(np.percentile(gaps, 99))
    if tbt_of in {"max", "mean"}:
        return max(gaps) if tbt_of == "max" else sum(gaps) / len(gaps)
    raise ValueError(f"tbt_of is {tbt_of!r}; it must be p99, max or mean")


# ---- of one run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A run's figures. An overloaded run has no latency: those would tell how long it was, and nothing else.

    A percentile that falls among tokens that never came is None: it is over every bound.
    """

    window_s: tuple[float, float]
    overloaded: bool
    arrived: int
    finished: int
    failed: int
    good: int
    metrics: dict[str, float | None]


def inside(outcomes: Iterable[Outcome], window_s: tuple[float, float]) -> list[Outcome]:
    """The measured population: requests that were due in the window, followed to their end."""
    return [outcome for outcome in outcomes if window_s[0] <= outcome.scheduled_s <= window_s[1]]


def measure(
    outcomes: Sequence[Outcome], slo: Slo, summaries: Summaries, window_s: tuple[float, float], *, overloaded: bool
) -> Measured:
    """All figures of one run that a client and a router can give. `window_s` and `overloaded`: see compare.steady."""
    population = inside(outcomes, window_s)
    good = sum(not misses(outcome, slo) for outcome in population)
    length_s = window_s[1] - window_s[0]
    in_time, due = np.sum([fluidity(outcome, slo) for outcome in population] or [(0, 0)], axis=0)
    delivered = sum(window_s[0] <= at <= window_s[1] for outcome in outcomes for at in outcome.token_s)
    metrics: dict[str, float | None] = {
        "attainment": good / len(population) if population else None,
        "goodput_rps": good / length_s if length_s > 0 else None,
        "fluidity": float(in_time / due) if due else None,
        "throughput_tps": delivered / length_s if length_s > 0 else None,
        "client_lag_p99_ms": percentile([_lag_s(outcome) for outcome in population if outcome.sent_s is not None], 99),
    }
    if not overloaded:
        metrics |= latencies(population, slo) | from_summaries(population, summaries)
    finished = sum(outcome.finished for outcome in population)
    return Measured(window_s, overloaded, len(population), finished, len(population) - finished, good, metrics)


def latencies(population: Sequence[Outcome], slo: Slo) -> dict[str, float | None]:
    """Milliseconds at the client. TBT is over all tokens of all requests, also of those that failed later."""
    values = values_ms(population)
    stalls = sum(gap * 1000 > slo.tbt_ms for outcome in population for gap in gaps_s(outcome)) if slo.tbt_ms else None
    return {
        f"{name}_p{share}_ms": percentile(values[name], share, scale=1) for name in LATENCIES for share in (50, 99)
    } | {
        "tbt_max_ms": percentile(values["tbt"], 100, scale=1),
        "stalls": stalls,
    }


def values_ms(population: Sequence[Outcome]) -> dict[str, list[float]]:
    """By latency, every value in milliseconds; infinite for what never came. A gap that never ended is one too."""
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
    """In milliseconds of seconds; None if there is none, or it lies among values that are infinite."""
    if not values:
        return None
    ordered = np.sort(np.asarray(values))
    place = (len(ordered) - 1) * share / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    if not math.isfinite(high):
        return None
    return float(low + (high - low) * (place - math.floor(place))) * scale


def ecdf(values: Sequence[float], points: int = 200) -> dict[str, list[float]]:
    """The share `y` of all values that is at most `x`, at some of them: evenly, and closer and closer to the longest.
    It ends below 1 where some are infinite."""
    finite = np.sort([value for value in values if math.isfinite(value)])
    if not len(finite):
        return {"x": [], "y": []}
    last = len(finite) - 1
    even = np.linspace(0, last, min(points, len(finite)))
    tail = last - np.geomspace(1, len(finite), min(points, len(finite))) + 1
    xs = np.unique(finite[np.concatenate([even, tail]).astype(int)])
    return {"x": xs.tolist(), "y": (np.searchsorted(finite, xs, side="right") / len(values)).tolist()}


# ---- with the router's summaries -----------------------------------------------------------------------------------


def from_summaries(population: Sequence[Outcome], summaries: Summaries) -> dict[str, float | None]:
    """TTFT from the router's accept; the KV transfer, busy, hidden and exposed; and what prompts cost decodes."""
    known = [summaries[outcome.id] for outcome in population if outcome.id in summaries]
    if not known:
        return {}
    firsts = [_first_ms(row) for row in known]
    firsts += [math.inf for outcome in population if outcome.id not in summaries and not outcome.token_s]
    figures = {f"ttft_server_p{share}_ms": percentile(firsts, share, scale=1) for share in (50, 99)}
    transfers = [row["transfer"] for row in known if row["transfer"]]
    for part in ("hidden", "exposed"):
        for share in (50, 99):
            row = [transfer[f"{part}_ms"] for transfer in transfers]
            figures[f"{part}_transfer_p{share}_ms"] = percentile(row, share, scale=1)
    busy_ms = sum(transfer["busy_ms"] for transfer in transfers)
    moved = sum(transfer["bytes"] for transfer in transfers)
    figures["transfer_gb_s"] = moved / busy_ms / 1e6 if busy_ms else None
    phases = [row["phases_ms"] for row in known if row.get("phases_ms")]
    figures["interference_s"] = sum(phase["interference"] for phase in phases) / 1000 if phases else None
    return figures


def _first_ms(summary: Summary) -> float:
    first_ms = summary["first_token_ms"]
    return math.inf if first_ms is None else float(first_ms - summary["accepted_ms"])


def _lag_s(outcome: Outcome) -> float:
    return (outcome.sent_s or 0.0) - outcome.scheduled_s
