"""Where requests spend time, why they miss the SLO, and what the devices do, according to the router's records."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compare.load.outcome import TIMEOUT, LatencySlo, Outcome
from compare.stats.measures import Summaries, Summary, e2e_s, gaps_s, misses
from scheduler.cost import CostModel, StepWork

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
EXPLAINS = 0.5  # a cause must account for this share of the time over the SLO

StepRow = Mapping[str, Any]  # one row of /v1/steps, by column


def phases_ms(outcome: Outcome, summary: Summary) -> dict[str, float] | None:
    """Return the time from the request's scheduled start to its last token at the client, by PHASES and "residual".

    The residual is time that neither the client nor the router recorded, such as network time. It makes the sum exact
    without a common clock. Return None if the request failed or has no phases.
    """
    if not outcome.finished or outcome.sent_s is None or not outcome.token_s or not summary.get("phases_ms"):
        return None
    phases = {"client": (outcome.sent_s - outcome.scheduled_s) * 1000}
    phases |= {phase: float(summary["phases_ms"].get(phase, 0.0)) for phase in PHASES[1:]}
    return phases | {"residual": e2e_s(outcome) * 1000 - sum(phases.values())}


def phases_of(population: Sequence[Outcome], summaries: Summaries, slo: LatencySlo) -> dict[str, Any] | None:
    """Return the mean of every phase over all requests and over those that missed the SLO, and the residual's size.

    Only requests that finished and have phases count; `requests` is their number. Return None if there are none.
    `missed` is empty if none of them missed the SLO.
    """
    found = [(outcome, phases_ms(outcome, summaries.get(outcome.id, {}))) for outcome in population]
    rows = [phases for _, phases in found if phases]
    missed = [phases for outcome, phases in found if phases and misses(outcome, slo)]
    if not rows:
        return None
    residuals = np.abs([row["residual"] for row in rows])
    return {
        "mean": _mean(rows),
        "missed": _mean(missed),
        "requests": {"mean": len(rows), "missed": len(missed)},
        "residual_ms": {"median": float(np.median(residuals)), "p99": float(np.percentile(residuals, 99))},
    }


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {phase: float(np.mean([row[phase] for row in rows])) for phase in PHASES} if rows else {}


def miss_causes(population: Sequence[Outcome], summaries: Summaries, slo: LatencySlo) -> dict[str, int]:
    """Return how many requests missed the SLO for each main cause, most frequent cause first."""
    causes = (miss_cause(outcome, summaries.get(outcome.id, {}), slo) for outcome in population)
    return dict(Counter(filter(None, causes)).most_common())


def miss_cause(outcome: Outcome, summary: Summary, slo: LatencySlo) -> str | None:
    """Return the main cause of a miss, such as "TTFT: prefill queue", or None if the request met the SLO.

    If both limits are missed, return a cause for TTFT, because an early delay often causes later ones. Without phases,
    return only the missed limit.
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
    return f"TBT: {BETWEEN[cause]}" if phases[cause] >= EXPLAINS * over_ms else "TBT: decode compute"


def busy_shares(steps: Sequence[StepRow], window_ms: tuple[float, float], model: CostModel | None) -> dict[str, float]:
    """Return shares of the window: "prefill", "decode", "idle_empty" (no requests) and "idle_blocked" (requests
    waited), which sum to 1, and "busy", which is the sum of "prefill" and "decode".

    A mixed step is split by the model's costs of its prompts and its decodes, or by tokens if there is no model.
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
    total = StepWork(step["num_prefills"], step["prefill_tokens"], 0, step["num_decodes"], step["decode_context"])
    prompts_s = model.seconds(total) - model.seconds(decodes)
    decodes_s = max(0.0, model.seconds(decodes) - idle_s)
    return prompts_s / (prompts_s + decodes_s) if prompts_s + decodes_s else 0.5
