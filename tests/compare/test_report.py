"""Test the text of a report's page, and how its data are thinned. test_report_page.py tests the page in a browser."""

import copy
import json
import re
from pathlib import Path

import pytest

from compare.report.page import STEPS, page_of, thinned, write_report
from tests.compare.reports import HOSTILE, bare, hostile, page_report


def test_both_files_are_written_and_the_json_is_the_report(tmp_path: Path) -> None:
    report = page_report()
    before = copy.deepcopy(report)
    page = write_report(report, tmp_path / "new" / "folder")
    assert report == before
    assert page.name == "report.html"
    assert json.loads((page.parent / "report.json").read_text()) == report
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]


def test_a_page_is_self_contained_and_under_a_megabyte() -> None:
    page = page_of(page_report(seconds=60.0, capacity=True))
    assert len(page.encode()) < 1_000_000
    markup = re.sub(r'id="data">.*?</script>', "", page, flags=re.S)
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(""", markup)
    assert "{{" not in page, "a placeholder was left"
    assert "report.json" in page_of(bare()), "nothing was measured"


def test_the_page_of_a_long_session_stays_small() -> None:
    report = page_report(seconds=400.0)
    report["tokens"] = {"compared": 9000, "different": [{"seed": 1, "index": n} for n in range(9000)], "equal": False}
    for strip in report["strip"].values():
        strip["requests"] *= 20
    page = page_of(report)
    assert len(page.encode()) < 1_000_000
    assert '"num_different":9000' in page


def test_text_from_users_and_servers_never_becomes_markup() -> None:
    report = hostile()
    page = page_of(report)
    assert "<img" not in page
    assert page.count("</script>") == 4
    data = re.search(r'id="data">(.*?)</script>', page, re.S)
    assert data
    assert json.loads(data[1])["arms"][0]["name"] == HOSTILE


def test_a_long_strip_is_cut_to_the_period_with_the_longest_wait() -> None:
    report = page_report()
    strip = report["strip"]["colocated:2"]
    report["strip"] = {"colocated:2": strip}
    del strip["nodes"]["decode-1"]
    origin = strip["nodes"]["decode-0"][0][0]
    strip["nodes"]["decode-0"] = [[origin + 5.0 * n, 4.0, 0, 8, None] for n in range(STEPS * 3)]
    strip["nodes"]["decode-0"][STEPS * 2][1] = 900.0
    page = thinned(report)
    period, rows = page["strip_period"], page["strip"]["colocated:2"]["nodes"]["decode-0"]
    assert period["since_ms"] <= 5.0 * STEPS * 2 <= period["until_ms"] < period["whole_ms"]
    assert [900.0, 8] in [row[1:4:2] for row in rows]
    assert len(rows) <= STEPS * 1.1
    assert all(period["since_ms"] - 900 <= row[0] <= period["until_ms"] for row in rows)
    assert page["strip"]["colocated:2"]["requests"] == [], "the requests were all over before this period"


def test_a_short_strip_is_complete_and_begins_at_zero_in_every_arm() -> None:
    report = page_report()
    page = thinned(report)
    for arm, strip in report["strip"].items():
        nodes = page["strip"][arm]["nodes"]
        assert {node: len(rows) for node, rows in nodes.items()} == {n: len(r) for n, r in strip["nodes"].items()}
        assert min(rows[0][0] for rows in nodes.values()) == pytest.approx(0, abs=0.01)


def test_a_request_of_many_spans_keeps_the_longest_and_counts_the_others() -> None:
    report = page_report()
    spans = [
        {"kind": "decode", "node": "decode-0", "start_ms": 10.0 * n, "end_ms": 10.0 * n + 1 + n % 7} for n in range(900)
    ]
    report["worst"][0]["spans"] = spans
    worst = thinned(report)["worst"][0]
    assert len(worst["spans"]) + worst["spans_left_out"] == 900
    assert all(span["end_ms"] - span["start_ms"] == 7 for span in worst["spans"])
    assert worst["spans"] == sorted(worst["spans"], key=lambda span: span["start_ms"])


def test_a_request_that_never_ended_is_drawn_until_its_last_known_time(tmp_path: Path) -> None:
    """Some of the worst requests hang or are lost. The report must be written even if one of their spans has no end."""
    report = page_report()
    spans = [
        {"kind": "queued", "node": "decode-0", "start_ms": 10.0, "end_ms": 30.0, "tokens": 0, "cause": "prefill queue"},
        {"kind": "decode", "node": "decode-0", "start_ms": 40.0, "end_ms": None, "tokens": 3, "cause": ""},
    ]
    for request in (report["worst"][0], report["strip"]["colocated:2"]["requests"][0]):
        request |= {"spans": copy.deepcopy(spans), "ended_ms": 90.0, "accepted_ms": 10.0}
    write_report(report, tmp_path)
    worst = thinned(report)["worst"][0]
    assert [(span["start_ms"], span["end_ms"]) for span in worst["spans"]] == [(0, 20), (30, 80)]
    report["worst"][0]["ended_ms"] = None
    assert thinned(report)["worst"][0]["spans"][-1]["end_ms"] == 30
