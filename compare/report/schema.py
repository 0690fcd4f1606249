"""The schema of report.json, version baton.compare/1: every key, its type, and which may be missing.

Other keys are kept and ignored, so that additions do not break older readers. A missing figure is null, never NaN or
infinity, which are not JSON.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA = "baton.compare/1"
MAX_PROBLEMS = 20

Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]
Length = Annotated[float, Field(ge=0)]
Phase = Literal[
    "client",
    "router",
    "prefill_queue",
    "prefill",
    "transfer_exposed",
    "decode_queue",
    "decode",
    "interference",
    "retry",
]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class LengthSummary(_Part):
    """TokenEquality per request."""

    mean: float | None
    p50: float | None
    p99: float | None


class TrafficEntry(_Part):
    name: str
    num_requests: int
    rate: float | None
    duration_s: float
    scale_tokens: float | None
    prompt_tokens: LengthSummary
    output_tokens: LengthSummary
    cut: int
    refused: int


class SloEntry(_Part):
    """In milliseconds, 0 for no limit; `tbt_of` is the figure of a request's gaps that `tbt_ms` limits."""

    ttft_ms: Length
    tbt_ms: Length
    tbt_of: str = "p99"
    attainment: Share


class ArmEntry(_Part):
    name: str
    devices: float | None
    prefill: int | None
    decode: int | None
    policy: str | None
    settings: dict[str, Any]


class FactEntry(_Part):
    fact: str
    values: dict[str, Any]
    equal: bool
    declared: bool


class ParityEntry(_Part):
    equal: bool
    facts: list[FactEntry]


class KvCounts(_Part):
    handoffs: int
    blocks: int
    bytes: int


class RunEntry(_Part):
    """One period: one arm under one seed's traffic. `window_s` is the measured window, in seconds of that run."""

    arm: str
    seed: int
    position: int
    valid: bool
    overloaded: bool
    problems: list[str]
    window_s: Annotated[list[float], Field(min_length=2, max_length=2)] | None
    arrived: int
    finished: int
    failed: int
    metrics: dict[str, float | None]
    kv: KvCounts | None


class EstimateEntry(_Part):
    """A figure over seeds, with its confidence interval if there are enough seeds."""

    mean: float | None
    low: float | None
    high: float | None
    per_seed: list[float | None]
    bounded: Literal["yes", "above", "below"] = "yes"  # beyond what was measured: `mean` is then a bound


class ComparisonEntry(_Part):
    """A paired difference over seeds: `arm` minus `against`; low and high bound it in the metric's unit."""

    arm: str
    against: str
    metric: str
    difference: float | None
    percent: float | None
    low: float | None
    high: float | None
    p: float | None
    says: Literal["better", "worse", "too close to call"]


class TokenEquality(_Part):
    compared: int
    different: list[Any]
    equal: bool


class ControlEntry(_Part):
    comparisons: list[ComparisonEntry] = []
    says: str


class ResidualPhase(_Part):
    median: float | None
    p99: float | None


class PhaseCounts(_Part):
    """Numbers of requests: those in the means, which finished and have phases, and those that arrived."""

    mean: int
    missed: int
    arrived: int


class PhaseMeans(_Part):
    requests: PhaseCounts | None = None
    mean: dict[Phase, float | None]
    missed: dict[Phase, float | None]
    residual_ms: ResidualPhase


class EcdfCurve(_Part):
    x: list[float]
    y: list[float]


class AttainmentCurve(_Part):
    rate: list[float]
    share: list[Share]
    low: list[Share | None]
    high: list[Share | None]


class ReportCurves(_Part):
    ecdf: dict[Literal["ttft_ms", "tbt_ms", "ttst_ms"], dict[str, EcdfCurve]]
    attainment: dict[str, AttainmentCurve] | None


class BusyShares(_Part):
    """Shares of the window, 0 to 1; `busy` is prefill plus decode."""

    busy: Share | None
    prefill: Share | None
    decode: Share | None
    idle_empty: Share | None
    idle_blocked: Share | None


class TimelineSpan(_Part):
    """A span of a request. It has no end if the request got no further, or its records were lost."""

    kind: Literal["queued", "chunk", "transfer", "wait", "decode"]
    node: str | None
    start_ms: float
    end_ms: float | None
    tokens: int | None = None
    cause: str | None = None


class RequestTimeline(_Part):
    """A request's summary and spans, as the router's `/v1/requests/{id}/timeline` gives it."""

    id: str
    spans: list[TimelineSpan]


class StepStrip(_Part):
    """Every step of one run of an arm: start and duration in ms, prompt tokens, decodes, predicted ms (or null).

    `origin_ms` is when the run's traffic began, on the same clock; if missing, the earliest time is used.
    """

    seed: int
    origin_ms: float | None = None
    slo_ms: float
    nodes: dict[str, list[Annotated[list[float | None], Field(min_length=4)]]]
    requests: list[RequestTimeline]


class WorstRequest(RequestTimeline):
    arm: str


class VerdictEntry(_Part):
    sentence: str
    cause: str | None
    flips: str | list[str] | None
    interval: str | list[float | None] | None


class ReportDocument(_Part):
    """The whole report.json."""

    version: Literal["baton.compare/1"] = Field(alias="schema")
    created: str
    command: str
    environment: dict[str, Any]
    valid: bool
    problems: list[str]
    notes: list[str] = []
    traffic: TrafficEntry
    slo: SloEntry
    on: str
    arms: Annotated[list[ArmEntry], Field(min_length=1)]
    parity: ParityEntry
    runs: list[RunEntry]
    summary: dict[str, dict[str, EstimateEntry]]
    comparisons: list[ComparisonEntry]
    tokens: TokenEquality
    control: ControlEntry | None
    phases: dict[str, PhaseMeans]
    miss_causes: dict[str, dict[str, int]]
    curves: ReportCurves
    busy: dict[str, dict[str, BusyShares]]
    strip: dict[str, StepStrip]
    worst: list[WorstRequest]
    verdict: VerdictEntry
    repro: str


def problems_of(report: dict[str, Any]) -> list[str]:
    """Return why `report` does not fit the schema, one line per field, at most 20; empty if it fits."""
    try:
        ReportDocument.model_validate(report)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        return list(islice(lines, MAX_PROBLEMS))
    return list(islice([*_not_finite(report, ""), *_unknown_arms(report)], MAX_PROBLEMS))


def _not_finite(value: object, path: str) -> Iterator[str]:
    """Yield numbers that JSON cannot represent, also in the parts that the schema leaves open."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: {value} is not a JSON number; write null for a missing figure"
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _not_finite(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _not_finite(part, f"{path}.{index}")


def _unknown_arms(report: dict[str, Any]) -> Iterator[str]:
    """Yield names of arms that `arms` does not list, and names listed twice."""
    names = [arm["name"] for arm in report["arms"]]
    if len(set(names)) < len(names):
        yield "arms: two arms have the same name; give each its own"
    for key in ("summary", "phases", "miss_causes", "busy", "strip"):
        for name in report[key]:
            if name not in names:
                yield f"{key}.{name}: no arm of that name in `arms`"
    for key in ("runs", "worst"):
        for index, part in enumerate(report[key]):
            if part["arm"] not in names:
                yield f"{key}.{index}.arm: no arm named {part['arm']} in `arms`"
