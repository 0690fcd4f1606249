"""Tests of the load generator, as a separate process, against a fake server."""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from compare.load.client import ROOT, LoadSpec, drive, problems_of, write_arrivals
from compare.load.outcome import (
    CompletionReader,
    LatencySlo,
    LoadRecording,
    Outcome,
    body_of,
    load_recording,
    outcome_line,
)
from compare.load.traffic import Arrival
from tests.compare.fake_server import serving


def spec_for(directory: Path, url: str, model: str = "plain", **settings: object) -> LoadSpec:
    arrivals, outcomes = directory / "arrivals.jsonl", directory / "outcomes.jsonl"
    return LoadSpec(url, model, str(arrivals), str(outcomes), **settings)


def num_lines(path: str) -> int:
    return len(Path(path).read_text().splitlines()) if Path(path).exists() else 0


async def run(directory: Path, model: str, arrivals: list[Arrival], **settings: object) -> LoadRecording:
    async with serving() as (url, _):
        return await drive(spec_for(directory, url, model, **settings), arrivals)


async def test_every_token_has_a_time_and_requests_are_sent_as_specified(tmp_path: Path) -> None:
    arrivals = [Arrival(0.02 * index, (5, 6, 7 + index), 4, slo=LatencySlo(9.0)) for index in range(5)]
    progress: list[tuple[int, int, int]] = []
    async with serving() as (url, bodies):
        spec = spec_for(tmp_path, url, salt="run 1")
        recording = await drive(spec, arrivals, lambda *counts: progress.append(counts))
    assert [outcome.index for outcome in recording.outcomes] == [0, 1, 2, 3, 4]
    for outcome, arrival in zip(recording.outcomes, arrivals, strict=True):
        assert outcome.finished
        assert outcome.tokens == [0, 1, 2, 3]
        assert outcome.id == "cmpl-1"
        assert outcome.prompt_tokens == 3
        assert outcome.slo == LatencySlo(9.0)
        times = [outcome.scheduled_s, outcome.sent_s, outcome.first_byte_s, *outcome.token_s, outcome.ended_s]
        assert times == sorted(times)
        assert outcome.scheduled_s == arrival.at_s
        assert len(outcome.token_s) == 4
    assert progress[-1] == (5, 5, 0)
    assert recording.counted == "ids"
    assert {body["cache_salt"] for body in bodies} == {"run 1"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 4 for body in bodies)
    assert sorted(body["prompt"] for body in bodies) == [list(arrival.prompt) for arrival in arrivals]


async def test_two_tokens_in_one_event_are_two_tokens_at_one_time(tmp_path: Path) -> None:
    (outcome,) = (await run(tmp_path, "bundled", [Arrival(0.0, (1,), 4)])).outcomes
    assert outcome.finished
    assert len(outcome.token_s) == 4
    assert outcome.token_s[0] == outcome.token_s[1] <= outcome.token_s[2] == outcome.token_s[3]


@pytest.mark.parametrize(("model", "send", "counted"), [("no-ids", "text", "events"), ("logprobs", "ids", "logprobs")])
async def test_without_ids_tokens_are_counted_otherwise_and_the_recording_is_marked(
    tmp_path: Path, model: str, send: str, counted: str
) -> None:
    recording = await run(tmp_path, model, [Arrival(0.0, (1, 2), 3)], send=send)
    assert recording.counted == counted
    assert recording.outcomes[0].finished
    assert len(recording.outcomes[0].token_s) == 3
    assert not [problem for problem in recording.problems if "several tokens" in problem]


async def test_bundled_tokens_without_a_count_invalidate_the_run(tmp_path: Path) -> None:
    recording = await run(tmp_path, "no-ids-bundled", [Arrival(0.0, (1, 2), 4)])
    assert recording.outcomes[0].error == "bundled: 4 tokens in 2 events"
    assert any("the time between tokens cannot be measured" in problem for problem in recording.problems)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("full", "HTTP 429: too many requests"),
        ("short", "2 tokens came of 3 asked for"),
        ("hangs", "timeout"),
        ("garbled", "the answer is not a stream of completions: 'list' object has no attribute 'get'"),
    ],
)
async def test_a_failure_is_an_outcome_with_a_reason(tmp_path: Path, model: str, error: str) -> None:
    arrivals = [Arrival(0.0, (1,), 3), Arrival(0.01, (1,), 3)]
    recording = await run(tmp_path, model, arrivals, timeout_s=0.4)
    assert [outcome.error for outcome in recording.outcomes] == [error, error]
    assert not any(outcome.finished for outcome in recording.outcomes)


async def test_a_stream_that_breaks_off_keeps_the_tokens_that_came(tmp_path: Path) -> None:
    recording = await run(tmp_path, "breaks", [Arrival(0.0, (1,), 3)])
    (outcome,) = recording.outcomes
    assert not outcome.finished
    assert outcome.error
    assert len(outcome.token_s) == 1


async def test_open_requests_never_delay_the_next_one(tmp_path: Path) -> None:
    """All 150 requests are sent, although none is answered. A limit on concurrency would hide an overload."""
    arrivals = [Arrival(0.002 * index, (1,), 3) for index in range(150)]
    recording = await run(tmp_path, "hangs", arrivals, timeout_s=2.0)
    sent = [outcome.sent_s for outcome in recording.outcomes]
    assert None not in sent
    ended = [outcome.ended_s for outcome in recording.outcomes]
    assert max(sent) < min(ended)


async def test_a_server_that_is_gone_fails_every_request_and_the_run(tmp_path: Path) -> None:
    async with serving() as (url, _):
        pass
    recording = await drive(spec_for(tmp_path, url), [Arrival(0.0, (1,), 2), Arrival(0.05, (1,), 2)])
    assert len(recording.outcomes) == 2
    assert all("Connect" in outcome.error for outcome in recording.outcomes)
    assert "went away, in 2 of 2 requests" in " ".join(recording.problems)


def test_a_connection_that_breaks_occasionally_is_a_miss_and_does_not_invalidate_the_run() -> None:
    outcomes = [Outcome(index, "", float(index), sent_s=float(index), finish="length") for index in range(9)]
    outcomes[4] = Outcome(4, "", 4.0, sent_s=4.0, error="ServerDisconnectedError: Server disconnected")
    assert problems_of(outcomes, LatencySlo()) == []
    outcomes[8].error = outcomes[4].error
    assert "went away, in 2 of 9 requests" in problems_of(outcomes, LatencySlo())[0]


async def test_a_load_generator_that_is_ended_leaves_an_outcome_for_every_arrival(tmp_path: Path) -> None:
    async with serving() as (url, _):
        spec = spec_for(tmp_path, url)
        arrivals = [Arrival(0.0, (1,), 2), Arrival(60.0, (1,), 2)]
        driving = asyncio.create_task(drive(spec, arrivals))
        async with asyncio.timeout(20):
            while num_lines(spec.outcomes) < 2:  # noqa: ASYNC110 - another process writes the file
                await asyncio.sleep(0.02)
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving
    assert [outcome.finished for outcome in load_recording(Path(spec.outcomes)).outcomes] == [True]


async def test_a_failed_load_generator_loses_all_requests_with_a_reason(tmp_path: Path) -> None:
    recording = await drive(spec_for(tmp_path, "http://127.0.0.1:1"), [Arrival("soon", (1,), 2)])
    assert recording.outcomes[0].error == "lost with the load generator"
    assert recording.problems[0] == "load generator: could not convert string to float: 'soon'"


async def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    async with serving() as (url, _):
        spec = LoadSpec(url, "plain", str(tmp_path / "arrivals.jsonl"), "/dev/full")
        write_arrivals(Path(spec.arrivals), [Arrival(0.0, (1,), 2)])
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(asdict(spec)))
        command = [sys.executable, "-m", "compare.load.client", str(path)]
        ended = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("load generator: ")
    assert "No space left on device" in ended.stderr.splitlines()[-1]


def test_outcomes_that_break_off_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    whole = json.dumps(asdict(Outcome(0, "cmpl-1", 0.0, finish="length")))
    path.write_text('{"schema":"baton.outcomes/1","started_unix_ns":5}\n' + whole + "\n" + whole[:10])
    recording = load_recording(path)
    assert recording.started_unix_ns == 5
    assert len(recording.outcomes) == 1
    assert recording.problems == ["outcomes.jsonl breaks off in line 3"]
    path.write_text('{"schema":"something"}\n')
    with pytest.raises(ValueError, match=r"not a file of baton\.outcomes/1"):
        load_recording(path)


@pytest.mark.parametrize(
    ("lag_s", "slo_ms", "honest"), [(0.0015, 0.0, True), (0.003, 0.0, False), (0.003, 1000.0, True)]
)
def test_a_client_that_sends_late_invalidates_its_run(lag_s: float, slo_ms: float, honest: bool) -> None:
    """The larger of 2 ms and 2 % of the TTFT SLO is allowed."""
    outcomes = [Outcome(index, "", float(index), sent_s=index + lag_s, finish="length") for index in range(200)]
    assert (not problems_of(outcomes, LatencySlo(slo_ms))) == honest


def read_events(
    *events: dict[str, object], exact: bool = True, max_tokens: int = 3
) -> tuple[Outcome, CompletionReader]:
    """Feed events to a reader, one per second. Return the outcome and the reader."""
    outcome = Outcome(0, "", 0.0, max_tokens=max_tokens)
    reader = CompletionReader(outcome, exact=exact)
    for at_s, event in enumerate(events, 1):
        reader.feed(b"data: " + json.dumps(event).encode() + b"\n\n", float(at_s))
    reader.close()
    return outcome, reader


def event(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish}], **more}


def test_the_running_usage_counts_where_nothing_else_does() -> None:
    rows = [event(" w", usage={"completion_tokens": count, "prompt_tokens": 7}) for count in (2, 3)]
    outcome, reader = read_events(*rows, event("", "length"))
    assert outcome.token_s == [1.0, 1.0, 2.0]
    assert reader.counted == "usage"
    assert outcome.finished


def test_usage_that_only_comes_at_the_end_does_not_make_up_for_bundles() -> None:
    """Two tokens arrived at second 1. Counting one then, and two at second 2, would give a false time between tokens."""
    outcome, _ = read_events(event("a b"), event("c", "length", usage={"completion_tokens": 3}))
    assert outcome.error == "bundled: 3 tokens in 2 events"
    outcome, _ = read_events(event("a b"), event("c", "length"))  # no usage, and max_tokens is 3
    assert outcome.error == "bundled: 3 tokens in 2 events"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"error": {"message": "the node was lost"}}, "the node was lost"),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, "an answer without a token"),
        ({"choices": [{"text": "a", "finish_reason": "stop"}], "error": None}, ""),
    ],
)
def test_an_error_in_the_stream_is_the_outcome(answer: dict[str, object], error: str) -> None:
    outcome, _ = read_events(answer, exact=False)
    assert outcome.error == error
    assert outcome.finished == (not error)


@pytest.mark.parametrize("usage", [{}, {"usage": {"completion_tokens": 10**12}}])
def test_a_stream_that_never_ends_is_given_up_after_the_tokens_asked_for(usage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="more than the 3 tokens asked for"):
        read_events(*[event(" w", **usage)] * 9)


def test_a_line_without_end_is_given_up() -> None:
    reader = CompletionReader(Outcome(0, "", 0.0), exact=True)
    for _ in range(16):
        reader.feed(b"x" * (1 << 20), 1.0)
    with pytest.raises(ValueError, match="a line of over"):
        reader.feed(b"x", 1.0)


@pytest.mark.parametrize("model", ["stays", "leaves"])
async def test_the_connection_does_not_matter_after_the_end_of_the_stream(tmp_path: Path, model: str) -> None:
    recording = await run(tmp_path, model, [Arrival(0.0, (1,), 3)], timeout_s=0.6)
    (outcome,) = recording.outcomes
    assert outcome.finished, outcome.error
    assert outcome.ended_s < 0.5


def test_texts_share_prefixes_like_their_ids_only_with_the_same_salt() -> None:
    def text(ids: list[int], salt: str) -> list[str]:
        return str(json.loads(body_of("m", ids, 1, "text", salt))["prompt"]).split()

    ids = list(range(40))
    first, again, other = text(ids, "run 1"), text([*ids[:20], 7, 7], "run 1"), text(ids, "run 2")
    assert first[:20] == again[:20]
    assert first != again
    assert len(first) == len(other) == 40
    assert first[:3] != other[:3]
    assert "cache_salt" not in json.loads(body_of("m", ids, 1, "text", "run 1"))


def test_a_client_that_reads_late_invalidates_its_run() -> None:
    """The client's delay would be counted as time between tokens of the server."""
    assert problems_of([], LatencySlo(), 0.0015) == []
    assert "read 1 % of the answers over 3.0 ms late" in problems_of([], LatencySlo(), 0.003)[0]
    assert problems_of([], LatencySlo(1000.0), 0.003) == []


def test_an_outcome_is_written_completely() -> None:
    outcome = Outcome(3, "x", 0.5, 0.6, 0.7, [0.7, 0.8], [5, 6], "length", "", 4, 2, 0.9, LatencySlo(9.0, 4.0, "max"))
    assert json.loads(outcome_line(outcome)) == asdict(outcome)
