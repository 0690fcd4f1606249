"""Test the load generator, which runs as a separate process, against a fake server."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest

from compare.load.client import RECORDING, SPEC, LoadSpec, drive, problems_of
from compare.load.outcome import CompletionReader, LatencySlo, LoadRecording, Outcome, body_of
from compare.load.traffic import Arrival
from tests.compare.fake_server import serving


def spec_of(url: str, model: str, *times: float, max_tokens: int = 3, **fields: Any) -> LoadSpec:
    return LoadSpec(url, model, tuple(Arrival(at_s, (1, 2), max_tokens) for at_s in times), **fields)


async def run(model: str, *times: float, max_tokens: int = 3, **fields: Any) -> LoadRecording:
    recording = LoadRecording()
    async with serving() as (url, _):
        await drive(spec_of(url, model, *times, max_tokens=max_tokens, **fields), recording)
    return recording


async def test_every_token_has_a_time_and_requests_are_sent_as_specified() -> None:
    arrivals = tuple(Arrival(0.02 * index, (5, 6, 7 + index), 4, slo=LatencySlo(9.0)) for index in range(5))
    recording = LoadRecording()
    async with serving() as (url, bodies):
        await drive(replace(spec_of(url, "plain", salt="run 1", api_key="k"), arrivals=arrivals), recording)
    assert [outcome.index for outcome in recording.outcomes] == [0, 1, 2, 3, 4]
    for outcome, arrival in zip(recording.outcomes, arrivals, strict=True):
        assert outcome.finished
        assert (outcome.tokens, outcome.id, outcome.prompt_tokens) == ([0, 1, 2, 3], "cmpl-1", 3)
        assert (outcome.slo, outcome.scheduled_s) == (LatencySlo(9.0), arrival.at_s)
        times = [outcome.scheduled_s, outcome.sent_s, outcome.first_byte_s, *outcome.token_s, outcome.ended_s]
        assert len(times) == 8
        assert times == sorted(times)
    assert recording.counted == "ids"
    assert {body.pop("authorization") for body in bodies} == {"Bearer k"}
    assert {body["cache_salt"] for body in bodies} == {"run 1"}
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 4 for body in bodies)
    assert sorted(body["prompt"] for body in bodies) == [list(arrival.prompt) for arrival in arrivals]


async def test_two_tokens_in_one_event_are_two_tokens_at_one_time() -> None:
    (outcome,) = (await run("bundled", 0.0, max_tokens=4)).outcomes
    assert outcome.finished
    assert outcome.token_s[0] == outcome.token_s[1] <= outcome.token_s[2] == outcome.token_s[3]


@pytest.mark.parametrize(("model", "send", "counted"), [("no-ids", "text", "events"), ("logprobs", "ids", "logprobs")])
async def test_without_ids_the_recording_names_how_tokens_are_counted(model: str, send: str, counted: str) -> None:
    recording = await run(model, 0.0, send=send)
    assert recording.counted == counted
    assert recording.outcomes[0].finished
    assert len(recording.outcomes[0].token_s) == 3
    assert not [problem for problem in recording.problems if "several tokens" in problem]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("full", "HTTP 429: too many requests"),
        ("short", "2 of 3 requested tokens arrived"),
        ("hangs", "timeout"),
        ("garbled", "the answer is not a stream of completions: 'list' object has no attribute 'get'"),
        ("no-ids-bundled", "bundled: 3 tokens in 2 events"),
    ],
)
async def test_a_failure_is_an_outcome_with_a_reason(model: str, error: str) -> None:
    recording = await run(model, 0.0, 0.01, timeout_s=0.4 if model == "hangs" else 60.0)
    assert [outcome.error for outcome in recording.outcomes] == [error, error]
    assert not any(outcome.finished for outcome in recording.outcomes)
    problem = "the time between tokens cannot be measured" in " ".join(recording.problems)
    assert problem == (model == "no-ids-bundled")


async def test_a_stream_that_breaks_off_keeps_the_tokens_that_arrived() -> None:
    (outcome,) = (await run("breaks", 0.0)).outcomes
    assert outcome.error
    assert len(outcome.token_s) == 1


@pytest.mark.parametrize("model", ["stays", "leaves"])
async def test_the_connection_does_not_matter_after_the_end_of_the_stream(model: str) -> None:
    (outcome,) = (await run(model, 0.0, timeout_s=5.0)).outcomes
    assert outcome.finished, outcome.error
    assert outcome.ended_s < 4.5


async def test_open_requests_never_delay_the_next_one() -> None:
    """All 150 requests are sent before any is answered. A limit on concurrency would hide an overload."""
    recording = await run("hangs", *(0.002 * index for index in range(150)), timeout_s=5.0)
    sent = [outcome.sent_s for outcome in recording.outcomes]
    assert None not in sent
    assert max(sent) < min(outcome.ended_s for outcome in recording.outcomes)


@pytest.mark.parametrize(("flag", "is_valid"), [("-Sn", True), ("-n", False)])
async def test_a_limit_of_open_files_is_raised_or_invalidates_the_run(flag: str, is_valid: bool) -> None:
    """If a request waited for a connection because of the client's limit, it would count against the server."""
    command = f'ulimit {flag} 100; exec "$0" -m compare.load.client'
    async with serving() as (url, _):
        process = await asyncio.create_subprocess_exec("bash", "-c", command, sys.executable, stdin=PIPE, stdout=PIPE)
        output, _ = await process.communicate(SPEC.dump_json(spec_of(url, "hangs", *[0.0] * 200, timeout_s=3.0)))
    recording = RECORDING.validate_json(output)
    assert len(recording.outcomes) == 200
    assert ({outcome.error for outcome in recording.outcomes} == {"timeout"}) == is_valid
    assert ("too many open files" in " ".join(recording.problems)) == (not is_valid)


async def test_a_server_that_does_not_answer_fails_every_request_and_the_run() -> None:
    async with serving() as (url, _):
        pass
    recording = LoadRecording()
    await drive(spec_of(url, "plain", 0.0, 0.05), recording)
    assert len(recording.outcomes) == 2
    assert all("Connect" in outcome.error for outcome in recording.outcomes)
    assert "disconnected in 2 of 2 requests" in " ".join(recording.problems)


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_recording_stays_usable_if_the_load_generator_crashes_or_is_cancelled(crashes: bool) -> None:
    recording, before = LoadRecording(), set(psutil.Process().children())
    async with serving() as (url, bodies):
        driving = asyncio.create_task(drive(spec_of(url, "plain", 0.0, 0.0, 0.5, 60.0), recording))
        async with asyncio.timeout(20):
            while len(bodies) < 3:  # noqa: ASYNC110 - no event reports that a list has grown
                await asyncio.sleep(0.02)
        if crashes:
            (load_generator,) = set(psutil.Process().children()) - before
            load_generator.send_signal(signal.SIGKILL)
            await driving
        else:
            driving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await driving
    if crashes:
        assert [outcome.error for outcome in recording.outcomes] == ["lost with the load generator"] * 4
        assert recording.problems == ["the load generator ended with status -9"]
    else:
        assert len(recording.outcomes) < 4
        assert [outcome.finished for outcome in recording.outcomes][:2] == [True, True]


def test_a_connection_that_breaks_occasionally_is_a_miss_and_does_not_invalidate_the_run() -> None:
    outcomes = [Outcome(index, "", float(index), sent_s=float(index), finish="length") for index in range(9)]
    outcomes[4] = Outcome(4, "", 4.0, sent_s=4.0, error="ServerDisconnectedError: Server disconnected")
    assert problems_of(outcomes, LatencySlo()) == []
    outcomes[8].error = outcomes[4].error
    assert "disconnected in 2 of 9 requests" in problems_of(outcomes, LatencySlo())[0]


@pytest.mark.parametrize(("lag_s", "slo_ms", "is_valid"), [(0.0015, 0, True), (0.003, 0, False), (0.003, 1000, True)])
def test_a_client_that_sends_or_reads_late_invalidates_its_run(lag_s: float, slo_ms: float, is_valid: bool) -> None:
    """The client may be late by 2 ms or 2 % of the TTFT SLO, whichever is more. The latencies include this delay."""
    outcomes = [Outcome(index, "", float(index), sent_s=index + lag_s, finish="length") for index in range(200)]
    sent, read = problems_of(outcomes, LatencySlo(slo_ms)), problems_of([], LatencySlo(slo_ms), lag_s)
    assert [not sent, not read] == [is_valid, is_valid]
    assert is_valid or "read 1 % of the answers over 3.0 ms late" in read[0]


def read_events(*events: dict[str, Any], exact: bool = True, max_tokens: int = 3) -> tuple[Outcome, CompletionReader]:
    """Feed events to a reader, with arrival times one second apart. Return the outcome and the reader."""
    outcome = Outcome(0, "", 0.0, max_tokens=max_tokens)
    reader = CompletionReader(outcome, exact=exact)
    for at_s, event in enumerate(events, 1):
        reader.feed(b"data: " + json.dumps(event).encode() + b"\n\n", float(at_s))
    reader.close()
    return outcome, reader


def event(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish}], **more}


def test_the_running_usage_counts_if_there_is_nothing_else() -> None:
    rows = [event(" w", usage={"completion_tokens": count, "prompt_tokens": 7}) for count in (2, 3)]
    outcome, reader = read_events(*rows, event("", "length"))
    assert outcome.token_s == [1.0, 1.0, 2.0]
    assert reader.counted == "usage"
    assert outcome.finished


def test_usage_at_the_end_does_not_excuse_bundled_tokens() -> None:
    """The first event has two tokens. If it counted as one token, the times between tokens would be wrong."""
    outcome, _ = read_events(event("a b"), event("c", "length", usage={"completion_tokens": 3}))
    assert outcome.error == "bundled: 3 tokens in 2 events"
    outcome, _ = read_events(event("a b"), event("c", "length"))  # no usage, and max_tokens is 3
    assert outcome.error == "bundled: 3 tokens in 2 events"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"error": {"message": "the node was lost"}}, "the node was lost"),
        ({"choices": [{"text": "", "finish_reason": "stop"}]}, "the answer has no tokens"),
        ({"choices": [{"text": "a", "finish_reason": "stop"}], "error": None}, ""),
    ],
)
def test_an_error_in_the_stream_is_the_outcome(answer: dict[str, object], error: str) -> None:
    outcome, _ = read_events(answer, exact=False)
    assert outcome.error == error
    assert outcome.finished == (not error)


@pytest.mark.parametrize("usage", [{}, {"usage": {"completion_tokens": 10**12}}])
def test_an_endless_stream_fails_after_the_requested_tokens(usage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="more than the 3 requested tokens"):
        read_events(*[event(" w", **usage)] * 9)


def test_an_endless_line_fails() -> None:
    reader = CompletionReader(Outcome(0, "", 0.0), exact=True)
    for _ in range(16):
        reader.feed(b"x" * (1 << 20), 1.0)
    with pytest.raises(ValueError, match="a line of over"):
        reader.feed(b"x", 1.0)


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


async def test_a_load_generator_that_is_stopped_and_continued_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    recording, times = LoadRecording(), [0.0] * 3000  # their outcomes do not fit into a pipe
    running = asyncio.create_task(drive(spec_of("http://127.0.0.1:1", "plain", *times), recording))
    while not running.done():
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.suspend()
                child.resume()
        await asyncio.sleep(0.001)
    await running
    assert len(recording.outcomes) == len(times)
    assert all("Connect" in outcome.error for outcome in recording.outcomes)
