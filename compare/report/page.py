"""Writes a comparison's report.json and report.html: one file that opens offline, with all it needs inside."""

import json
import re
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from compare.report.schema import problems_of
from compare.report.thinning import thinned

_SCRIPTS = (
    "parts.js",
    "charts.js",
    "passes.js",
    "told.js",
    "drawn.js",
    "report.js",
)  # one module: each may use those before it
_UPLOT = "history/page/vendor/uplot-1.6.32/"


def write_report(report: dict[str, Any], directory: Path) -> Path:
    """Writes both files into `directory`, made if need be, and returns the page's path.

    A `report` that the schema does not allow raises ValueError naming every field; an OSError (a full disk) leaves
    what was there before untouched.
    """
    problems = problems_of(report)
    if problems:
        raise ValueError("The report does not fit its schema: " + "; ".join(problems))
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / "report.json", json.dumps(report, allow_nan=False) + "\n")
    return _replace(directory / "report.html", page_of(report))


def page_of(report: dict[str, Any]) -> str:
    """The page of a valid report. Its text comes only from the inlined data and is never read as markup."""
    ours, routers = files("compare.report"), files("router")
    parts = {
        "title": escape(f"Baton comparison: {report['traffic']['name']}"),
        "style": ours.joinpath("report.css").read_text("utf-8"),
        "script": "\n".join(ours.joinpath(name).read_text("utf-8") for name in _SCRIPTS),
        "strip_js": routers.joinpath("history/page/strip.js").read_text("utf-8"),
        "uplot_js": routers.joinpath(_UPLOT + "uPlot.iife.min.js").read_text("utf-8"),
        "uplot_css": routers.joinpath(_UPLOT + "uPlot.min.css").read_text("utf-8"),
        "data": _inlined(thinned(report)),
    }
    template = ours.joinpath("template.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _inlined(value: object) -> str:
    """JSON in which no `<` is left, so that no name or prompt can end the script element that holds it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _replace(path: Path, text: str) -> Path:
    """Whole or not at all: what reads `path` meanwhile, or after a full disk, finds the old text."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
