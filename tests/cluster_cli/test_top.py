"""`baton top` against a router's event stream, in a terminal and without one."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from cluster.cli import main
from cluster.top import COLUMNS, TopView, latency_line, row_of, screen_of, strip
from tests.dashboard.page_feed import TBT_SLO_MS, Feed, serving

ROOT = Path(__file__).resolve().parents[2]


def step(start: float, prefill_tokens: int, num_decodes: int, duration: float = 5.0) -> list[object]:
    return [0, start, duration, 0.1, 0.0, 512, "fixed", int(prefill_tokens > 0), prefill_tokens, num_decodes, 0, 0]


def test_a_row_shows_the_batch_the_blocks_in_use_and_the_rate() -> None:
    node = {
        "id": "decode-0",
        "role": "decode",
        "state": "ready",
        "running": 9,
        "waiting": 2,
        "blocks": {"free": 50, "cached": 20, "owned": 25, "reserved": 5, "quarantined": 0, "total": 100},
        "batch": {"tokens": 520, "prefills": 1, "decodes": 8},
        "steps_per_s": 41.6,
        "busy": 0.934,
    }
    assert row_of(node) == ("decode-0", "decode", "ready", "512p+8d", "30%", "2", "42", "93%")
    assert row_of(node | {"running": 0, "busy": None})[3] == "-"
    assert row_of({"id": "a"}) == ("a", "?", "?", "-", "-", "0", "0", "-")


def test_a_pass_is_as_high_as_its_tokens_and_red_only_when_decodes_waited_too_long() -> None:
    shown = strip([step(0, 0, 1), step(1, 2048, 0, 99), step(2, 0, 8, 99), step(3, 9000, 8)], TBT_SLO_MS)
    assert shown.plain == "▁█▃█"
    assert [str(span.style) for span in shown.spans] == ["blue", "yellow", "bold red", "yellow"]
    assert "red" not in str(strip([step(0, 0, 8, 99)], 0.0).spans)


def test_passes_that_come_again_are_counted_once_and_those_of_nodes_that_are_gone_are_dropped() -> None:
    view = TopView()
    view.hear("steps", {"node": "a", "steps": [step(1, 0, 1), step(2, 0, 1)]})
    view.hear("steps", {"node": "a", "steps": [step(2, 0, 1), step(3, 0, 1)]})
    assert [row[1] for row in view.passes["a"]] == [1, 2, 3]
    for index in range(1000):
        view.hear("steps", {"node": "a", "steps": [step(4 + index, 0, 1)]})
    assert len(view.passes["a"]) == 400
    view.hear("status", {"nodes": [{"id": "b"}]})
    assert view.passes == {}


def test_latency_is_told_where_there_is_any() -> None:
    assert latency_line({}).endswith("no requests")
    latency = {
        "ttft_ms": {"p50": 180.44, "p99": 420.0},
        "tbt_ms": {"p50": None, "p99": None},
        "slo": {"ttft_ms": 450.0},
    }
    assert latency_line({"latency": latency}).endswith(": TTFT 180.4/420 ms (SLO 450)")


def test_the_screen_fits_its_width_and_shows_markup_in_names_as_it_is() -> None:
    feed, view = Feed(), TopView()
    status = feed.status()
    status["nodes"][0]["id"] = "[red]x[/red]"
    view.hear("status", status)
    view.hear("steps", {"node": "decode-0", "steps": [step(index, 0, 8) for index in range(300)]})
    view.problem = "no router at http://x; trying again"
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - the console's for its life
    console.print(screen_of(view, 80))
    console.file.close()
    shown = console.export_text()
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    assert any(line.split() == list(COLUMNS) for line in lines)
    assert "[red]x[/red]" in shown
    assert "no router at http://x" in shown
    lane = next(line for line in lines if line.startswith("decode-0") and "▃" in line)
    assert lane == "decode-0".ljust(14) + "▃" * 66  # the latest that have room


def test_without_a_terminal_it_prints_once_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Feed()) as url:
        assert main(["top", "--url", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The prefill pool is the bottleneck")
    assert lines[1].startswith("p50/p99 of the last minute: TTFT ")
    assert lines[2] == "\t".join(COLUMNS)
    assert [line.split("\t")[0] for line in lines[3:]] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]


def test_no_router_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("baton top: no router at http://127.0.0.1:9: ")
    assert len(said.err.splitlines()) == 1


def test_something_that_is_no_event_stream_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    feed = Feed()
    feed.is_gone = True
    with serving(feed) as url:
        assert main(["top", "--url", url]) == 1
    assert capsys.readouterr().err.strip().endswith("answered with status 503; is it a router?")


@pytest.mark.parametrize("status", [{}, {"nodes": None}, {"nodes": [{"role": "decode"}]}])
def test_a_status_of_another_version_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: dict[str, object]
) -> None:
    feed = Feed()
    monkeypatch.setattr(feed, "status", lambda: status)
    with serving(feed) as url:
        assert main(["top", "--url", url]) == 1
    assert capsys.readouterr().err == f"baton top: {url} sent an event that is not as this version of Baton has it\n"


def test_in_a_terminal_it_draws_until_q_says_when_the_router_is_gone_and_leaves_the_terminal_as_it_was() -> None:
    feed = Feed()
    with serving(feed) as url:
        ours, theirs = pty.openpty()
        environment = dict(os.environ) | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster", "top", "--url", url],
            cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
        )  # fmt: skip
        os.close(theirs)
        try:
            shown = read_until(ours, "IT/S", "▃")
            assert "\x1b[?1049h" in shown
            feed.is_gone = True
            read_until(ours, "trying again")
            os.write(ours, b"q")
            read_until(ours, "\x1b[?1049l")
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def read_until(terminal: int, *wanted: str, timeout_s: float = 30.0) -> str:
    seen, deadline = "", time.monotonic() + timeout_s
    while not all(text in seen for text in wanted):
        assert time.monotonic() < deadline, f"{wanted} not in {seen[-2000:]!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return seen
