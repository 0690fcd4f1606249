"""The common parts of all benchmarks: flags, alternating arms, medians, tables, results files, and pages of results.

A results file has `tables` (title, columns, rows, note) and `runs`, which has every single measurement. `python -m
benchmarks document` copies the tables into docs/results, between the comment lines that name the file.
"""

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = RESULTS.parents[1] / "docs"
PAGES = (DOCS / "results" / "performance.md", DOCS / "results" / "fault-tolerance.md", DOCS / "planning.md")
BLOCK = re.compile(r"(<!-- result: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
T = TypeVar("T")
Cell = str | int | float | bool | None


@dataclass(slots=True)
class Table:
    """A table of text and numbers. `shown` formats its cells."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: row {row} does not have one cell for each of {self.columns}")

    def markdown(self) -> str:
        """Return the table in Markdown, with its title above and its note below. Numbers are right-aligned."""
        numeric = [any(type(row[i]) in {int, float} for row in self.rows) for i in range(len(self.columns))]
        lines: list[Sequence[Cell]] = [self.columns, ["--:" if right else "---" for right in numeric], *self.rows]
        body = "\n".join("| " + " | ".join(map(shown, line)) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")


@dataclass(slots=True)
class Result:
    """The results file of one benchmark. `runs` is any JSON value. `versions` has the versions of the compared
    software."""

    name: str
    what: str  # one or two sentences for the page
    tables: list[Table]
    runs: Any = None
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    machine: dict[str, Cell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = [table if isinstance(table, Table) else Table(**table) for table in self.tables]
        self.command = self.command or command(self.name)
        self.date = self.date or date.today().isoformat()
        self.machine = self.machine or dict(MACHINE)
        self.versions = {"python": platform.python_version()} | (self.versions or versions("torch", "numpy", "numba"))

    def finish(self, out: Path | None = None) -> None:
        """Print the tables, and write them to `out` or results/NAME.json."""
        print("\n" + "\n".join(table.markdown() for table in self.tables), flush=True)
        print(f"written: {self.write(out)}")

    def write(self, out: Path | None = None) -> Path:
        path = out or RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".partial")
        whole.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return whole.replace(path)

    def section(self) -> str:
        """Return the text for the page: a description, the tables, and the command that repeats the benchmark."""
        where = [f"{self.machine['processor']}, {self.machine['cores']} cores, {self.machine['instructions']}"]
        where += [f"load average {shown(self.machine[f'load_{when}'])} {when}" for when in ("before", "after")
                  if f"load_{when}" in self.machine]  # fmt: skip
        where += [*map(" ".join, self.versions.items()), self.date]
        tables = "\n".join(table.markdown() for table in self.tables)
        return f"{self.what}\n\n{tables}\n`{self.command}`: {', '.join(where)}.\n"


def shown(cell: Cell) -> str:
    """Format a cell: 1234.5 as "1,234", 0.01234 as "0.0123", True as "met", False as "not met", and None as "–"."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "met" if cell else "**not met**"
    if isinstance(cell, int) or (isinstance(cell, float) and abs(cell) >= 100):
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if isinstance(cell, float) else cell


def parser(doc: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the flags that all benchmarks take: --repeats, --out."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument("--out", type=Path, help="results file, instead of benchmarks/results/NAME.json")
    return made


def command(name: str) -> str:
    """Return a command that repeats the running benchmark."""
    return " ".join(["python -m benchmarks", name, *sys.argv[1:]])


def machine() -> dict[str, Cell]:
    """Return facts about the machine, and its load average, which is near 0 if no other process runs."""
    lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    info = {key.strip(): value.strip() for key, value in lines}
    flags = info.get("flags", "").split()
    return {
        "processor": info.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": " ".join(name for name in CPU_FEATURES if name in flags),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
    }


MACHINE = machine()  # before a benchmark changes its affinity or causes load


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed in this interpreter."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def in_turn(arms: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Call every arm once per repeat. The order alternates, so that drift of the machine affects all arms equally."""
    runs: dict[str, list[T]] = {name: [] for name in arms}
    for repeat in range(repeats):
        for name in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
            runs[name].append(arms[name]())
    return runs


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the runs."""
    return {key: median([run[key] for run in runs]) for key in runs[0]}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over repeats of ours / theirs. The machine load is similar for the two runs of a repeat."""
    return median([a / b for a, b in zip(ours, theirs, strict=True)])


def document(texts: Sequence[str], results: Path = RESULTS) -> list[str]:
    """Return the texts of the pages, with the text between the comment lines replaced by the tables of the results.

    Raises ValueError if no page has the comment lines of one of the results files.
    """
    named = {match[2] for text in texts for match in BLOCK.finditer(text)}
    tabled = {file.stem: json.loads(file.read_text()) for file in results.glob("*.json")}
    tabled = {name: found for name, found in tabled.items() if "tables" in found}
    if left := tabled.keys() - named:
        raise ValueError(f"no place for {', '.join(sorted(left))}: add <!-- result: NAME --> and <!-- end --> lines")
    sections = {name: Result(**found).section() for name, found in tabled.items()}
    return [
        BLOCK.sub(lambda match: match[1] + sections.get(match[2], "*Not measured yet.*\n") + match[3], text)
        for text in texts
    ]


def main() -> None:
    """Write the tables of every results file into its page. The text outside the blocks does not change."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    for path, text in zip(PAGES, document([path.read_text() for path in PAGES]), strict=True):
        path.write_text(text)
        print(f"written: {path}")
