"""Write every results file into its page of docs/, between the marks that name it. The text around is by hand.

python -m benchmarks document
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.result import RESULTS, Result, shown

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "results" / "performance.md", DOCS / "results" / "fault-tolerance.md")
BLOCK = re.compile(r"(<!-- result: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(texts: Sequence[str], results: Path = RESULTS) -> list[str]:
    """Return the pages' texts with every block rewritten. Raises ValueError if a results file has no block."""
    named = {match[2] for text in texts for match in BLOCK.finditer(text)}
    tabled = {file.stem for file in results.glob("*.json") if "tables" in json.loads(file.read_text())}
    if left := tabled - named:
        raise ValueError(f"no place for {', '.join(sorted(left))}: add <!-- result: NAME --> and <!-- end --> lines")
    return [BLOCK.sub(lambda match: match[1] + section(match[2], results) + match[3], text) for text in texts]


def section(name: str, results: Path) -> str:
    """Return what was measured, its tables, and the command that repeats it."""
    file = results / f"{name}.json"
    if not file.exists():
        return "*Not measured yet.*\n"
    result = Result(**json.loads(file.read_text()))
    machine = result.machine
    where = ", ".join(
        [
            f"{machine['processor']}, {machine['cores']} cores, {machine['instructions']}",
            f"load {shown(machine['load_before'])} before",
            *(f"{package} {version}" for package, version in result.versions.items()),
            result.date,
        ]
    )
    tables = "\n".join(table.markdown() for table in result.tables)
    return f"{result.what}\n\n{tables}\n`{result.command}`: {where}.\n"


def main() -> None:
    for path, text in zip(PAGES, written([path.read_text() for path in PAGES]), strict=True):
        path.write_text(text)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
