import asyncio
import json
import logging
import re

import pytest

from shared.logs import about, configure, fields
from shared.trace_context import traceparent_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"
log = logging.getLogger("baton.test")


class Lines:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def configure(self, log_format: str) -> None:
        configure("info", log_format, "decode-0")

    def read(self) -> list[str]:
        """Return the lines that were logged since the last call."""
        return self._capsys.readouterr().err.splitlines()

    def objects(self) -> list[dict]:
        return [json.loads(line) for line in self.read()]


@pytest.fixture
def lines(capsys):
    """Return the lines that this process logs."""
    return Lines(capsys)


def test_line_ends_are_escaped_in_a_text_line_and_an_exception_follows_it(lines):
    lines.configure("text")
    log.warning("node %s is gone", "d0\n2026-01-01 00:00:00,000 INFO baton.access made up\r\x1b[2K\u2028")
    (line,) = lines.read()
    assert line.endswith("node d0\\n2026-01-01 00:00:00,000 INFO baton.access made up\\r\\x1b[2K\\u2028 is gone")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it broke")
    first, *rest = lines.read()
    assert first.endswith("ERROR baton.test it broke")
    assert rest[-1] == "ValueError: why"


def test_a_json_line_is_one_object(lines):
    lines.configure("json")
    log.warning("two\nlines of %s", "\ud800 and \u2028", extra=fields(tokens=3, request="cmpl-1"))
    log.debug("below the level")
    (line,) = lines.objects()
    assert line["message"] == "two\nlines of \ud800 and \u2028"
    assert (line["level"], line["logger"], line["node"]) == ("warning", "baton.test", "decode-0")
    assert (line["tokens"], line["request"]) == (3, "cmpl-1")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_an_exception_stays_in_its_line(lines):
    lines.configure("json")
    try:
        raise RuntimeError("broken\nhere")
    except RuntimeError:
        log.exception("it broke")
    (line,) = lines.objects()
    assert "RuntimeError: broken\nhere" in line["exception"]
    assert "Traceback" in line["exception"]


async def test_log_lines_name_the_request_of_their_task_or_of_its_parent_task(lines):
    lines.configure("json")

    async def inner() -> None:
        log.info("inner")

    async def serve(number: int) -> None:
        about(f"cmpl-{number}", GIVEN if number else "")
        await asyncio.sleep(0)
        await asyncio.create_task(inner())

    await asyncio.gather(serve(0), serve(1))
    log.info("outside")
    first, second, outside = lines.objects()
    assert {first["request"], second["request"]} == {"cmpl-0", "cmpl-1"}
    assert ("traceparent" in first, second["traceparent"]) == (False, GIVEN)
    assert "request" not in outside


@pytest.mark.parametrize(
    ("header", "forwarded"),
    [
        (GIVEN, GIVEN),
        (f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-00"),
        (f"cc-{TRACE}-{PARENT}-ff", f"00-{TRACE}-{PARENT}-01"),
        (f"cc-{TRACE}-{PARENT}-02-what-the-future-will-be-like", f"00-{TRACE}-{PARENT}-00"),
    ],
)
def test_a_valid_traceparent_is_forwarded(header, forwarded):
    assert traceparent_of([header]) == forwarded


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [GIVEN, GIVEN],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01-more"],
        [f"00-{TRACE[:-1]}-{PARENT}-01"],
        [f" {GIVEN}"],
    ],
)
def test_without_a_valid_traceparent_a_new_trace_begins(headers):
    first, second = traceparent_of(headers), traceparent_of(headers)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", first)
    assert first != second
    assert TRACE not in first
