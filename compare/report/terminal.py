"""Output of `baton compare`: progress, one row per arm, and the verdict. Without a terminal, it is plain lines."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from compare.run.experiment import Trial

Document = Mapping[str, Any]
Column = tuple[str, str, float, int]  # heading, metric in report.json, factor, digits
COLUMNS: tuple[Column, ...] = (
    ("capacity req/s", "capacity_rps", 1.0, 2),
    ("SLO met %", "attainment", 100.0, 1),
    ("goodput req/s", "goodput_rps", 1.0, 2),
    ("TTFT p50", "ttft_p50_ms", 1.0, 1),
    ("p99", "ttft_p99_ms", 1.0, 1),
    ("TBT p50", "tbt_p50_ms", 1.0, 1),
    ("p99", "tbt_p99_ms", 1.0, 1),
    ("max", "tbt_max_ms", 1.0, 1),
    ("exposed transfer", "exposed_transfer_p50_ms", 1.0, 1),
)
BOUNDS = {"above": ">= ", "below": "< "}  # signs before a capacity beyond the measured rates


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


class TerminalReporter:
    """Reports a session's progress: a progress bar, or one line per period if the output is not a terminal."""

    def __init__(self) -> None:
        self._console = _console()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not sys.stdout.isatty())
        self._task = self._bar.add_task("starting", total=None)
        self._trial, self._num_requests = 0, 1
        self._bar.start()

    def say(self, line: str) -> None:
        self._console.print(line)

    def begin(self, trial: Trial, num_trials: int, num_requests: int) -> None:
        place = f"{trial.position + 1}/{num_trials}" if trial.position < num_trials else "spare"
        about = f"{place} {trial.arm}, seed {trial.seed}: {num_requests} requests"
        if self._bar.disable:
            self.say(about)
        self._trial, self._num_requests = trial.position, max(1, num_requests)
        self._bar.update(self._task, description=about, completed=trial.position, total=num_trials)

    def progress(self, sent: int, finished: int, failed: int) -> None:
        del sent
        share = min(0.99, (finished + failed) / self._num_requests)
        self._bar.update(self._task, completed=self._trial + share)

    def close(self) -> None:
        self._bar.stop()


def show(report: Document) -> None:
    """Print one row per arm, then the problems, notes, control and verdict."""
    console, verdict = _console(), report["verdict"]
    known = {name for metrics in report["summary"].values() for name, one in metrics.items() if one["mean"] is not None}
    columns = [column for column in COLUMNS if column[1] in known]
    rows = [row_of(report, arm["name"], columns) for arm in report["arms"]]
    headings = ["arm", *(heading for heading, *_ in columns), "busy P/D %", "top miss cause"]
    if sys.stdout.isatty():
        table = Table(*headings, box=None)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    else:
        print("\n".join("\t".join(line) for line in [headings, *rows]))
    for problem in report["problems"]:
        console.print(problem, style="red")
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow")
    if report["control"] is not None:
        console.print(f"control: {report['control']['says']}")
    console.print(verdict["sentence"], style="bold")
    for label, lines in (("why", [verdict["cause"]] if verdict["cause"] else []), ("flips", verdict["flips"] or [])):
        for line in lines:
            console.print(f"{label}: {line}")


def row_of(report: Document, arm: str, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """Return the row of an arm: name, `columns`, busy shares, top miss cause. Times are in ms; "-" means unknown."""
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
