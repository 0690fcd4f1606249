"""Writes a session's report.json and report.html, a self-contained page.

The page's data is thinned to what it can show, and says what was left out; report.json keeps everything.
"""

import json
import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from compare.report.schema import problems_of

_SCRIPTS = (
    "parts.js",
    "charts.js",
    "steps.js",
    "tables.js",
    "figures.js",
    "report.js",
)  # one module: each file may use those before it
_UPLOT = "page/vendor/uplot-1.6.32/"
STEPS, REQUESTS, SPANS, DIFFERENT = 9000, 36, 120, 50
GRID = 360  # cells of a curve in each direction: finer than the chart's pixels

Steps = list[list[Any]]  # rows of start, duration, prompt tokens, decodes, and the predicted duration or None


def write_report(report: dict[str, Any], directory: Path) -> Path:
    """Write both files into `directory`, created if needed, and return the page's path.

    Raises ValueError that names every field that does not fit the schema. On an OSError (a full disk) earlier files
    stay unchanged.
    """
    problems = problems_of(report)
    if problems:
        raise ValueError("the report does not fit its schema: " + "; ".join(problems))
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / "report.json", json.dumps(report, allow_nan=False) + "\n")
    return _replace(directory / "report.html", page_of(report))


def page_of(report: dict[str, Any]) -> str:
    """Return the page of a valid report. Data is inlined as JSON and never interpreted as markup."""
    ours, dashboard = files("compare.report"), files("dashboard")
    parts = {
        "title": escape(f"Baton comparison: {report['traffic']['name']}"),
        "style": ours.joinpath("report.css").read_text("utf-8"),
        "script": "\n".join(ours.joinpath(name).read_text("utf-8") for name in _SCRIPTS),
        "strip_js": dashboard.joinpath("page/strip.js").read_text("utf-8"),
        "uplot_js": dashboard.joinpath(_UPLOT + "uPlot.iife.min.js").read_text("utf-8"),
        "uplot_css": dashboard.joinpath(_UPLOT + "uPlot.min.css").read_text("utf-8"),
        "data": _inlined(thinned(report)),
    }
    template = ours.joinpath("template.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _inlined(value: object) -> str:
    """Return JSON without `<`, so that no name or prompt can end the script element that contains it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _replace(path: Path, text: str) -> Path:
    """Write a file atomically."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


# ---- thinning ------------------------------------------------------------------------------------------------------


def thinned(report: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of bounded size. Strips are cut to one time range, in ms since each run's start."""
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
    """Keep one point per cell of a grid over log x and y, and the first and last: a rising curve enters few cells."""
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
    """Cut all arms to the same time range, the one in which decodes waited longest for steps over the SLO."""
    rebased = {arm: _rebased(strip) for arm, strip in strips.items()}
    lanes = [(strip["slo_ms"], row) for strip in rebased.values() for rows in strip["nodes"].values() for row in rows]
    whole = max((row[0] + row[1] for _, row in lanes), default=0.0)
    since, until = _range(lanes, whole)
    for strip in rebased.values():
        strip["nodes"] = {node: _between(rows, since, until) for node, rows in strip["nodes"].items()}
        strip["num_requests"] = len(strip["requests"])
        strip["requests"] = _slowest(each for each in strip["requests"] if _touches(each, since, until))
    return rebased, {"since_ms": since, "until_ms": until, "whole_ms": _short(whole)}


def _rebased(strip: dict[str, Any]) -> dict[str, Any]:
    """Convert to ms since the run's traffic began, so that arms that ran one after the other are aligned."""
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


def _origin(rows: Steps, requests: list[dict[str, Any]]) -> float:
    """Return the earliest time in the data."""
    starts = [row[0] for row in rows]
    starts += [span["start_ms"] for each in requests for span in each["spans"]]
    starts += [each["accepted_ms"] for each in requests if each.get("accepted_ms") is not None]
    return min(starts, default=0.0)


def _range(lanes: list[tuple[float, list[float]]], whole: float) -> tuple[float, float]:
    """Return (since, until) with at most STEPS steps, or the whole run if it has no more."""
    if len(lanes) <= STEPS:
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
    """Yield for each bin the longest range of bins from it with at most STEPS steps, and at least one bin."""
    for first in range(len(counts)):
        total, last = counts[first], first + 1
        while last < len(counts) and total + counts[last] <= STEPS:
            total += counts[last]
            last += 1
        yield first, last


def _between(rows: Steps, since: float, until: float) -> Steps:
    inside = [row for row in rows if row[0] + row[1] >= since and row[0] <= until]
    return inside[: 2 * STEPS]


def _touches(timeline: dict[str, Any], since: float, until: float) -> bool:
    return any(span["end_ms"] >= since and span["start_ms"] <= until for span in timeline["spans"])


def _slowest(timelines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the longest few, in the order of their starts."""
    longest = sorted(timelines, key=lambda each: each["spans"][0]["start_ms"] - each["spans"][-1]["end_ms"])[:REQUESTS]
    return sorted(longest, key=lambda each: each["spans"][0]["start_ms"])


def _timeline(timeline: dict[str, Any], origin: float, identity: str | None) -> dict[str, Any]:
    """Return a request with its longest spans, in order, in ms since `origin`. With `identity`, drop the summary."""
    longest = sorted(_closed(timeline), key=lambda span: span["start_ms"] - span["end_ms"])[:SPANS]
    spans = [
        {**span, "start_ms": round(span["start_ms"] - origin, 2), "end_ms": round(span["end_ms"] - origin, 2)}
        for span in sorted(longest, key=lambda span: (span["start_ms"], span["end_ms"]))
    ]
    kept = {"spans": spans, "spans_left_out": len(timeline["spans"]) - len(spans)}
    return {"id": identity, **kept} if identity else {**timeline, **kept}


def _closed(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """Return its spans; one without an end extends to the last known time of the request."""
    spans = timeline["spans"]
    moments = [timeline.get("ended_ms"), *(span[edge] for span in spans for edge in ("start_ms", "end_ms"))]
    last = max((moment for moment in moments if moment is not None), default=0.0)
    return [span if span["end_ms"] is not None else {**span, "end_ms": max(last, span["start_ms"])} for span in spans]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
