"""Writes a session's report.json and its page, the self-contained report.html.

The page contains only the data that it can show, and states how much is left out. report.json contains all data.
"""

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

_SCRIPTS = ("parts", "charts", "steps", "tables", "figures", "report")  # concatenated in this order
_UPLOT = "page/vendor/uplot-1.6.32/"
STEPS, REQUESTS, SPANS, DIFFERENT = 9000, 36, 120, 50
BINS = 64  # about this many intervals are considered for a strip, a chart of consecutive steps

Document = dict[str, Any]


def write_report(report: Document, directory: Path) -> Path:
    """Write report.json and report.html into `directory`, which is created if needed. Return the page's path.

    Raises ValueError if a number is infinite or NaN; raises OSError if writing fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
    page = directory / "report.html"
    page.write_text(page_of(report), encoding="utf-8")
    return page


def page_of(report: Document) -> str:
    """Return the HTML of the page. The page contains the data as JSON, which browsers never interpret as markup."""
    ours, dashboard = files("compare.report"), files("dashboard")
    parts = {
        "title": escape(f"Baton comparison: {report['traffic']['name']}"),
        "style": ours.joinpath("report.css").read_text("utf-8"),
        "script": "\n".join(ours.joinpath(f"{name}.js").read_text("utf-8") for name in _SCRIPTS),
        "strip_js": dashboard.joinpath("page/strip.js").read_text("utf-8"),
        "uplot_js": dashboard.joinpath(_UPLOT + "uPlot.iife.min.js").read_text("utf-8"),
        "uplot_css": dashboard.joinpath(_UPLOT + "uPlot.min.css").read_text("utf-8"),
        # Without `<`, no text in the data can end the script element that contains it.
        "data": json.dumps(thinned(report), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = ours.joinpath("template.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


# ---- thinning ------------------------------------------------------------------------------------------------------


def thinned(report: Document) -> Document:
    """Return a copy of the report with bounded size. All strips show the same time range, in ms since the run began."""
    different = report["tokens"]["different"]
    strips, period = _strips(report["strip"])
    return report | {
        "worst": [_timeline(each, _start(each)) for each in report["worst"]],
        "tokens": report["tokens"] | {"different": different[:DIFFERENT], "num_different": len(different)},
        "strip": strips,
        "strip_period": period,
    }


def _strips(strips: dict[str, Document]) -> tuple[dict[str, Document], dict[str, float]]:
    """Limit all strips to the time range in which decodes waited longest for steps that exceeded the SLO."""
    rebased = {arm: _rebased(strip) for arm, strip in strips.items()}
    rows = [(strip["slo_ms"], row) for strip in rebased.values() for lane in strip["nodes"].values() for row in lane]
    whole = max((row[0] + row[1] for _, row in rows), default=0.0)
    since, until = _range(rows, whole)
    for strip in rebased.values():
        inside = {
            node: [row for row in lane if row[0] + row[1] >= since and row[0] <= until][: 2 * STEPS]
            for node, lane in strip["nodes"].items()
        }
        touching = [
            each
            for each in strip["requests"]
            if any(span["end_ms"] >= since and span["start_ms"] <= until for span in each["spans"])
        ]
        slowest = sorted(touching, key=lambda each: each["spans"][0]["start_ms"] - each["spans"][-1]["end_ms"])
        shown = sorted(slowest[:REQUESTS], key=lambda each: each["spans"][0]["start_ms"])
        strip |= {"nodes": inside, "num_requests": len(strip["requests"]), "requests": shown}
    return rebased, {"since_ms": since, "until_ms": until, "whole_ms": whole}


def _rebased(strip: Document) -> Document:
    """Convert times to ms since the run's traffic began, which aligns arms that ran one after the other."""
    origin = strip["origin_ms"]
    nodes = {
        node: [[round(row[0] - origin, 2), *(part and round(part, 3) for part in row[1:5])] for row in lane]
        for node, lane in strip["nodes"].items()
    }
    requests = [
        {"id": each["id"]} | _timeline(each, origin, keeps=("spans", "spans_left_out")) for each in strip["requests"]
    ]
    return strip | {"nodes": nodes, "requests": requests}


def _start(timeline: Document) -> float:
    """Return the earliest time in a request's timeline."""
    times = [timeline.get("accepted_ms"), *(span["start_ms"] for span in timeline["spans"])]
    return min((at_ms for at_ms in times if at_ms is not None), default=0.0)


def _range(rows: list[tuple[float, list[Any]]], whole: float) -> tuple[float, float]:
    """Return the time range (since, until) of the STEPS consecutive steps in which decodes waited longest. If the run
    has at most STEPS steps, return its whole range, which ends at `whole`."""
    ordered = sorted(rows, key=lambda each: float(each[1][0]))
    late = [0.0]  # for each step, the total duration of the earlier steps that made decodes miss the SLO
    for slo_ms, row in ordered:
        late.append(late[-1] + (row[1] if row[3] and row[1] > slo_ms else 0.0))
    if len(ordered) <= STEPS:
        return 0.0, whole
    firsts = range(0, len(ordered) - STEPS + 1, max(1, len(ordered) // BINS))
    first = max(firsts, key=lambda at: late[at + STEPS] - late[at])
    return ordered[first][1][0], ordered[first + STEPS - 1][1][0]


def _timeline(timeline: Document, origin: float, keeps: tuple[str, ...] = ()) -> Document:
    """Return a timeline with only its longest spans, in order of time. Times are in ms since `origin`. A span without
    an end is extended to the request's last known time. If `keeps` is given, keep only these keys of the timeline."""
    spans = timeline["spans"]
    known = [timeline.get("ended_ms"), *(span[edge] for span in spans for edge in ("start_ms", "end_ms"))]
    last = max((moment for moment in known if moment is not None), default=0.0)
    closed = [
        span | {"end_ms": max(last, span["start_ms"]) if span["end_ms"] is None else span["end_ms"]} for span in spans
    ]
    longest = sorted(closed, key=lambda span: span["start_ms"] - span["end_ms"])[:SPANS]
    for span in longest:
        span |= {edge: round(span[edge] - origin, 2) for edge in ("start_ms", "end_ms")}
    longest.sort(key=lambda span: (span["start_ms"], span["end_ms"]))
    shown = timeline | {"spans": longest, "spans_left_out": len(spans) - len(longest)}
    return {key: shown[key] for key in keeps or shown}
