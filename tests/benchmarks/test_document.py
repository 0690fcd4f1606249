"""The pages match the results files."""

import json
from pathlib import Path

import pytest

from benchmarks.document import PAGES, written
from benchmarks.result import Result, Table, in_turn, ratio, shown

MARKS = "# Speed\n\n<!-- result: one -->\nold\n<!-- end -->\n\nby hand\n"


def one(results: Path) -> Result:
    table = Table("a title", ["what", "ms", "goal"], [["a", 1234.5, True], ["b", None, False]], "a note")
    result = Result(
        "one", "What it is.", [table], {"a": [1.0]}, {"thing": "1.0"}, "python -m benchmarks one", "2026-01-02"
    )
    result.write(results / "one.json")
    return result


def test_the_pages_are_written_from_the_results_files() -> None:
    texts = [path.read_text() for path in PAGES]
    assert written(texts) == texts, "run python -m benchmarks document"


def test_a_block_is_replaced_and_the_prose_around_it_stays(tmp_path: Path) -> None:
    one(tmp_path)
    (text,) = written([MARKS], tmp_path)
    assert "old" not in text
    assert text.startswith("# Speed")
    assert text.endswith("by hand\n")
    assert "| a | 1,234 | met |" in text
    assert "| b | – | **not met** |" in text
    assert "`python -m benchmarks one`" in text
    assert "thing 1.0, 2026-01-02" in text
    assert written([text], tmp_path) == [text]


def test_a_missing_result_is_marked_as_not_measured(tmp_path: Path) -> None:
    assert "*Not measured yet.*" in written([MARKS], tmp_path)[0]


def test_a_result_without_a_place_on_any_page_is_refused(tmp_path: Path) -> None:
    one(tmp_path)
    assert written(["# Faults\n", MARKS], tmp_path)[0] == "# Faults\n"
    with pytest.raises(ValueError, match="no place for one"):
        written(["# Speed\n"], tmp_path)


def test_a_file_written_is_the_result_read(tmp_path: Path) -> None:
    result = one(tmp_path)
    assert Result(**json.loads((tmp_path / "one.json").read_text())) == result
    assert not list(tmp_path.glob("*.partial"))


def test_a_row_of_another_width_than_its_table_is_refused() -> None:
    with pytest.raises(ValueError, match="not have one cell for each"):
        Table("t", ["a", "b"], [["only one"]])


def test_arms_take_turns_backwards_every_other_time() -> None:
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) for name in "abc"}
    in_turn(arms, 3)
    assert "".join(order) == "abccbaabc"


def test_a_ratio_is_the_median_within_repeats() -> None:
    assert ratio([1.0, 10.0, 100.0], [2.0, 10.0, 10.0]) == 1.0


@pytest.mark.parametrize(
    ("cell", "text"), [(12345, "12,345"), (0.012345, "0.0123"), (999.9, "1,000"), (True, "met"), ("x", "x")]
)
def test_cells_are_shown_briefly(cell: str | float, text: str) -> None:
    assert shown(cell) == text
