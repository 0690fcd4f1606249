"""Tests of the pages that are generated from results files."""

import json
from pathlib import Path

import pytest

from benchmarks.result import PAGES, Result, Table, document, in_turn, ratio, shown

MARKS = "# Speed\n\n<!-- result: one -->\nold\n<!-- end -->\n\nby hand\n"


def test_the_pages_are_written_from_the_results_files() -> None:
    texts = [path.read_text() for path in PAGES]
    assert document(texts) == texts, "run python -m benchmarks document"


def test_a_block_is_replaced_and_the_prose_around_it_stays(tmp_path: Path) -> None:
    assert "*Not measured yet.*" in document([MARKS], tmp_path)[0]
    table = Table("a title", ["what", "ms", "goal"], [["a", 1234.5, True], ["b", None, False]], "a note")
    command = "python -m benchmarks one"
    result = Result("one", "What it is.", [table], {"a": [1.0]}, {"thing": "1.0"}, command, "2026-01-02")
    written = result.write(tmp_path / "one.json")
    assert Result(**json.loads(written.read_text())) == result
    assert list(tmp_path.iterdir()) == [written]
    (text,) = document([MARKS], tmp_path)
    assert "old" not in text
    assert text.startswith("# Speed")
    assert text.endswith("by hand\n")
    for part in ("| a | 1,234 | met |", "| b | – | **not met** |", f"`{command}`", "thing 1.0, 2026-01-02"):
        assert part in text
    assert document([text, "# Faults\n"], tmp_path) == [text, "# Faults\n"]
    with pytest.raises(ValueError, match="no place for one"):
        document(["# Speed\n"], tmp_path)


def test_a_row_with_the_wrong_number_of_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="not have one cell for each"):
        Table("t", ["a", "b"], [["only one"]])


def test_the_order_of_arms_alternates_and_ratios_are_within_a_repeat() -> None:
    order: list[str] = []
    in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert ratio([1.0, 10.0, 100.0], [2.0, 10.0, 10.0]) == 1.0


@pytest.mark.parametrize(
    ("cell", "text"), [(12345, "12,345"), (0.012345, "0.0123"), (999.9, "1,000"), (True, "met"), ("x", "x")]
)
def test_numbers_in_cells_are_rounded(cell: str | float, text: str) -> None:
    assert shown(cell) == text
