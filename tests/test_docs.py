"""Test that the files, definitions and links in the documentation exist, and that its tables are current."""

import ast
import re
from enum import Enum
from pathlib import Path
from typing import TypeVar

import pytest

from decode_node import reservations
from scheduler import request

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md"])
NAME = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
States = TypeVar("States", bound=Enum)


def defined(file: Path) -> set[str]:
    """Return the names of the functions, classes and constants of a file, and its methods as Class.method."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(f"{node.name}.{inner.name}")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for path, name in NAME.findall(text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
        assert not name or name in defined(ROOT / path), f"{page.name} names {path}:{name}"
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), f"{page.name} links {target}"


def test_extras_are_installed_from_the_repository() -> None:
    """Baton is not on a package index, and another package could take its name there."""
    sources = [*PAGES, ROOT / "CHANGELOG.md", *(file for file in ROOT.glob("*/**/*.py") if ".venv" not in file.parts)]
    wrong = [str(file) for file in sources if re.search(r"pip install ['\"]?baton[-_]", file.read_text())]
    assert not wrong


def drawn(title: str, legal: dict[States, frozenset[States]]) -> str:
    lines = [
        f"{title:13}{state.value:14}→ {', '.join(sorted(s.value for s in after))}"
        for state, after in legal.items()
        if after
    ]
    return "\n".join(lines)


def test_the_architecture_page_shows_the_states_of_the_code() -> None:
    tables = [("request", request.LEGAL), ("reservation", reservations.LEGAL)]
    wanted = "\n\n".join(drawn(title, legal) for title, legal in tables)
    found = ARCHITECTURE.read_text().split("<!-- states: written by tests/test_docs.py -->")[1].split("<!-- end -->")[0]
    assert found.strip() == f"```\n{wanted}\n```", f"put this into {ARCHITECTURE.name}:\n```\n{wanted}\n```"


def test_a_request_takes_fifteen_stops_and_returns_to_no_file() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    files = [NAME.findall(stop)[0][0] for _, stop in rows]
    step_loop = files[7:11]
    assert step_loop == ["engine/engine.py", "scheduler/scheduler.py", "engine/runner.py", "scheduler/scheduler.py"]
    others = files[:7] + files[11:]
    assert len(set(others)) == len(others), "a stop returns to a file"
    assert not set(others) & set(step_loop), "a stop returns to the step loop"


def test_the_glossary_is_short() -> None:
    glossary = ARCHITECTURE.read_text().split("## Glossary")[1]
    assert 10 <= len(re.findall(r"^\| (?!term|---)", glossary, re.MULTILINE)) <= 25
