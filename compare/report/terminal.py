"""Terminal output: progress, one row per arm, and the verdict. Plain lines if the output is not a terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
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

BOUNDS = {"above": ">= ", "below": "< "}  # of a capacity beyond the measured rates


class TerminalReporter:
    """Reports a session's progress: a progress bar, or one line per period if the output is not a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._num_requests = 0
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()

    def say(self, line: str) -> None:
        self._console.print(line)

    def begin(self, trial: Trial, num_trials: int, num_requests: int) -> None:
        place = f"{trial.position + 1}/{num_trials}" if trial.position < num_trials else "spare"
        about = f"{place} {trial.arm}, seed {trial.seed}: {num_requests} requests"
        if self._bar is None:
            self.say(about)
            return
        if self._task is None:
            self._task = self._bar.add_task(about, total=num_trials)
        self._num_requests = num_requests
        self._bar.update(self._task, description=about, completed=trial.position)

    def progress(self, sent: int, finished: int, failed: int) -> None:
        del sent
        if self._bar is not None and self._task is not None and self._num_requests:
            done = int(self._bar.tasks[0].completed) + (finished + failed) / self._num_requests
            self._bar.update(self._task, completed=min(done, int(done) + 0.99))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show(report: Document) -> None:
    """Print one row per arm, then problems, notes, the control, and the verdict."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
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
        for line in [headings, *rows]:
            print("\t".join(line))
    for problem in report["problems"]:
        console.print(problem, style="red")
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow")
    if report["control"] is not None:
        console.print(f"control: {report['control']['says']}")
    verdict = report["verdict"]
    console.print(verdict["sentence"], style="bold")
    if verdict["cause"]:
        console.print(f"why: {verdict['cause']}")
    for flip in verdict["flips"] or ():
        console.print(f"flips: {flip}")


def row_of(report: Document, arm: str, columns: Sequence[Column] = COLUMNS) -> list[str]:
    """Return an arm's name, `columns`, busy shares and top miss cause. Times in milliseconds, "-" if unknown."""
    summary = report["summary"].get(arm, {})
    cells = [arm]
    for _, metric, factor, digits in columns:
        own = summary.get(metric, {})
        mean, bound = own.get("mean"), BOUNDS.get(own.get("bounded", "yes"), "")
        cells.append("-" if mean is None else f"{bound}{mean * factor:.{digits}f}")
    nodes = report["busy"].get(arm, {}).values()
    shares = [_mean([node[kind] for node in nodes if node[kind] is not None]) for kind in ("prefill", "decode")]
    cells.append("/".join("-" if share is None else f"{share * 100:.0f}" for share in shares))
    causes = report["miss_causes"].get(arm, {})
    top = max(causes, key=lambda name: causes[name]) if causes else None
    cells.append("-" if top is None else f"{top} ({causes[top] / sum(causes.values()):.0%})")
    return cells


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
