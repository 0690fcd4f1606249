"""Why: where the time of requests goes, phase by phase, and what each missed request missed its SLO by."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compare.measures import Summaries, Summary, e2e_s, gaps_s, misses
from compare.outcome import TIMEOUT, Outcome, Slo

PHASES = (
    "client_lag",
    "router",
    "prefill_queue",
    "prefill",
    "transfer_exposed",
    "decode_queue",
    "decode",
    "interference",
    "retry",  # attempts that failed; most requests have none
)
BEFORE_FIRST = {
    "client_lag": "client lag",
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
EXPLAINS = 0.5  # of the time over the SLO that a cause must account for


def phases_ms(outcome: Outcome, summary: Summary) -> dict[str, float] | None:
    """The request's time from when it was due to its last token at the client, in PHASES and "residual".

    They sum to it exactly. The residual is what neither end saw: the network, and the server before its router
    accepted. It needs no common clock. None for a request that failed, or has no phases.
    """
    if not outcome.finished or outcome.sent_s is None or not outcome.token_s or not summary.get("phases_ms"):
        return None
    phases = {"client_lag": (outcome.sent_s - outcome.scheduled_s) * 1000}
    phases |= {phase: float(summary["phases_ms"].get(phase, 0.0)) for phase in PHASES[1:]}
    return phases | {"residual": e2e_s(outcome) * 1000 - sum(phases.values())}


def phases_of(population: Sequence[Outcome], summaries: Summaries, slo: Slo) -> dict[str, Any] | None:
    """The mean of every phase over all requests and over those that missed, and how large the residual is.

    Only of requests that finished and have phases, `requests` says how many; None if there is none. `missed` is empty
    if none of those missed.
    """
    rows, missed = [], []
    for outcome in population:
        if phases := phases_ms(outcome, summaries.get(outcome.id, {})):
            rows.append(phases)
            if misses(outcome, slo):
                missed.append(phases)
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


def miss_causes(population: Sequence[Outcome], summaries: Summaries, slo: Slo) -> dict[str, int]:
    """How many requests missed for which main cause, most frequent first."""
    causes = (miss_cause(outcome, summaries.get(outcome.id, {}), slo) for outcome in population)
    return dict(Counter(cause for cause in causes if cause).most_common())


def miss_cause(outcome: Outcome, summary: Summary, slo: Slo) -> str | None:
    """The one main cause of a miss, as "TTFT: prefill queue"; None for a good request.

    TTFT, where both are missed: what is late at once tends to stay late. Without phases only what was missed is told.
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
