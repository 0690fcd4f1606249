"""Thins a report's long series to what a page can show, and says what was left out. report.json keeps everything."""

from collections.abc import Iterable
from typing import Any

PASSES, REQUESTS, SPANS, DIFFERENT = 9000, 36, 120, 50
GRID = 360  # cells of a curve each way: finer than the chart's pixels

Passes = list[list[Any]]  # rows of start, duration, prompt tokens, decodes, and what was predicted or None


def thinned(report: dict[str, Any]) -> dict[str, Any]:
    """A copy of `report` of bounded size. Strips are cut to one period and told in ms since each run's beginning."""
    page = dict(report)
    page["curves"] = {
        **report["curves"],
        "ecdf": {
            metric: {arm: _thin_curve(curve) for arm, curve in arms.items()}
            for metric, arms in report["curves"]["ecdf"].items()
        },
    }
    page["worst"] = [_timeline(each, _origin([], [each]), None) for each in report["worst"]]
    different = report["tokens"]["different"]
    page["tokens"] = {**report["tokens"], "different": different[:DIFFERENT], "num_different": len(different)}
    page["strip"], page["strip_period"] = _strips(report["strip"])
    return page


def _thin_curve(curve: dict[str, list[float]]) -> dict[str, list[float]]:
    """One point per cell of a grid over log x and y, the first and last kept: a rising curve enters few cells."""
    if not curve["x"]:
        return {"x": [], "y": []}
    points = [(max(x, 1e-3), y) for x, y in zip(curve["x"], curve["y"], strict=True)]
    kept, ratio, cell = [points[0]], 1000 ** (1 / GRID), None
    last_x = points[0][0]
    for x, y in points:
        if x > last_x * ratio or int(y * GRID) != cell:
            kept.append((x, y))
            last_x, cell = x, int(y * GRID)
    kept.append(points[-1])
    return {"x": [_short(x) for x, _ in kept], "y": [_short(y) for _, y in kept]}


def _strips(strips: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """All arms cut to the same period, the one in which decodes waited longest behind passes over the SLO."""
    rebased = {arm: _rebased(strip) for arm, strip in strips.items()}
    lanes = [(strip["slo_ms"], row) for strip in rebased.values() for rows in strip["nodes"].values() for row in rows]
    whole = max((row[0] + row[1] for _, row in lanes), default=0.0)
    since, until = _period(lanes, whole)
    for strip in rebased.values():
        strip["nodes"] = {node: _between(rows, since, until) for node, rows in strip["nodes"].items()}
        strip["num_requests"] = len(strip["requests"])
        strip["requests"] = _slowest(each for each in strip["requests"] if _touches(each, since, until))
    return rebased, {"since_ms": since, "until_ms": until, "whole_ms": _short(whole)}


def _rebased(strip: dict[str, Any]) -> dict[str, Any]:
    """In ms since the run's traffic began, so that arms that ran one after the other stand under each other."""
    rows = [row for lane in strip["nodes"].values() for row in lane]
    origin = strip.get("origin_ms") or _origin(rows, strip["requests"])
    nodes = {
        node: [
            [round(row[0] - origin, 2), round(row[1], 3), *row[2:4], *(each and _short(each) for each in row[4:5])]
            for row in lane
        ]
        for node, lane in strip["nodes"].items()
    }
    return {**strip, "nodes": nodes, "requests": [_timeline(each, origin, each["id"]) for each in strip["requests"]]}


def _origin(rows: Passes, requests: list[dict[str, Any]]) -> float:
    """The first moment that anything tells of."""
    starts = [row[0] for row in rows]
    starts += [span["start_ms"] for each in requests for span in each["spans"]]
    starts += [each["accepted_ms"] for each in requests if each.get("accepted_ms") is not None]
    return min(starts, default=0.0)


def _period(lanes: list[tuple[float, list[float]]], whole: float) -> tuple[float, float]:
    """[since, until] of at most PASSES passes, or the whole run when it has no more."""
    if len(lanes) <= PASSES:
        return 0.0, whole
    bins = 64
    width = whole / bins
    counts, late = [0] * bins, [0.0] * bins
    for slo, row in lanes:
        index = min(bins - 1, int(row[0] / width))
        counts[index] += 1
        if row[3] and row[1] > slo:
            late[index] += row[1]
    best = max(_stretches(counts), key=lambda stretch: sum(late[stretch[0] : stretch[1]]), default=(0, 1))
    return round(best[0] * width, 3), round(best[1] * width, 3)


def _stretches(counts: list[int]) -> Iterable[tuple[int, int]]:
    """For each bin the longest run of bins from it that holds at most PASSES passes, one bin at the least."""
    for first in range(len(counts)):
        total, last = counts[first], first + 1
        while last < len(counts) and total + counts[last] <= PASSES:
            total += counts[last]
            last += 1
        yield first, last


def _between(rows: Passes, since: float, until: float) -> Passes:
    inside = [row for row in rows if row[0] + row[1] >= since and row[0] <= until]
    return inside[: 2 * PASSES]


def _touches(timeline: dict[str, Any], since: float, until: float) -> bool:
    return any(span["end_ms"] >= since and span["start_ms"] <= until for span in timeline["spans"])


def _slowest(timelines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest few, in the order in which they came."""
    longest = sorted(timelines, key=lambda each: each["spans"][0]["start_ms"] - each["spans"][-1]["end_ms"])[:REQUESTS]
    return sorted(longest, key=lambda each: each["spans"][0]["start_ms"])


def _timeline(timeline: dict[str, Any], origin: float, identity: str | None) -> dict[str, Any]:
    """A request with its longest spans, in order, in ms since `origin`; of the summary what a row of the page says."""
    longest = sorted(_closed(timeline), key=lambda span: span["start_ms"] - span["end_ms"])[:SPANS]
    spans = [
        {**span, "start_ms": round(span["start_ms"] - origin, 2), "end_ms": round(span["end_ms"] - origin, 2)}
        for span in sorted(longest, key=lambda span: (span["start_ms"], span["end_ms"]))
    ]
    told = {"spans": spans, "spans_left_out": len(timeline["spans"]) - len(spans)}
    return {"id": identity, **told} if identity else {**timeline, **told}


def _closed(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """Its spans; one that never ended goes on until the last that is known of the request."""
    spans = timeline["spans"]
    moments = [timeline.get("ended_ms"), *(span[edge] for span in spans for edge in ("start_ms", "end_ms"))]
    last = max((moment for moment in moments if moment is not None), default=0.0)
    return [span if span["end_ms"] is not None else {**span, "end_ms": max(last, span["start_ms"])} for span in spans]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
