"""Prints the result of `baton compare`: one row per arm, and the verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

Document = Mapping[str, Any]
Column = tuple[str, str, float, int]  # heading, metric in report.json, factor, decimal places
COLUMNS: tuple[Column, ...] = (
    ("capacity req/s", "capacity_rps", 1.0, 2),
    ("SLO met %", "attainment", 100.0, 1),
    ("goodput req/s", "goodput_rps", 1.0, 2),
    ("TTFT ms p50", "ttft_p50_ms", 1.0, 1),
    ("p99", "ttft_p99_ms", 1.0, 1),
    ("TBT ms p50", "tbt_p50_ms", 1.0, 1),
    ("p99", "tbt_p99_ms", 1.0, 1),
    ("max", "tbt_max_ms", 1.0, 1),
    ("exposed transfer ms", "exposed_transfer_p50_ms", 1.0, 1),
)
BOUNDS = {"above": ">= ", "below": "< "}  # signs for a capacity that lies beyond the measured rates


def show(report: Document) -> None:
    """Print one row per arm, then the notes, the control, and the verdict with its reasons."""
    verdict = report["verdict"]
    known = {name for metrics in report["summary"].values() for name, one in metrics.items() if one["mean"] is not None}
    columns = [column for column in COLUMNS if column[1] in known]
    lines = [["arm", *(heading for heading, *_ in columns), "busy with prompts/decodes %", "top miss cause"]]
    lines += [row_of(report, arm["name"], columns) for arm in report["arms"]]
    show_table(lines)
    for problem in report["problems"][1:]:  # the verdict already contains the first problem
        typer.secho(problem, fg="red")
    for note in report["notes"]:
        typer.secho(f"note: {note}", fg="yellow")
    if report["control"] is not None:
        typer.echo(f"control: {report['control']['says']}")
    typer.secho(verdict["sentence"], bold=True)
    rows = ("figures", verdict["figures"]), ("why", verdict["cause"]), ("flips", "; ".join(verdict["flips"] or ()))
    for label, text in (*rows, ("conditions", verdict["conditions"])):
        if text:
            typer.echo(f"  {label + ':':<12}{text}")


def show_table(lines: Sequence[Sequence[str]]) -> None:
    """Print a table between two empty lines. All columns but the first and the last contain numbers."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    typer.echo()
    for first, *numbers, last in lines:
        typer.echo("  ".join([first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:]), last]))
    typer.echo()


def row_of(report: Document, arm: str, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """Return an arm's row: name, `columns`, busy shares, main cause of misses. Times are in ms; "-" means unknown."""
    summary = report["summary"].get(arm, {})
    cells = [arm]
    for _, metric, factor, digits in columns:
        own = summary.get(metric, {})
        mean, bound = own.get("mean"), BOUNDS.get(own.get("bounded", "yes"), "")
        cells.append("-" if mean is None else f"{bound}{mean * factor:.{digits}f}")
    nodes = report["busy"].get(arm, {}).values()
    shares = [sum(node[kind] for node in nodes) / len(nodes) for kind in ("prefill", "decode")] if nodes else []
    cells.append("/".join(f"{share * 100:.0f}" for share in shares) or "-/-")
    causes = report["miss_causes"].get(arm, {})
    top = max(causes, key=lambda name: causes[name]) if causes else None
    return [*cells, "-" if top is None else f"{top} ({causes[top] / sum(causes.values()):.0%})"]
