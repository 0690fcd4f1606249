"""The routes of the history: the trace is complete and valid, the feed is bounded and ends, errors name bad input."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from dashboard.chrome_trace import trace_events
from dashboard.history import RequestHistory
from dashboard.routes import MAX_WAITING_BYTES, ROWS_AT_ONCE, EventStream, HistoryHandlers, Subscriber
from dashboard.step_ring import FIELDS
from router.http.asgi import described
from shared.clock import now_ns
from shared.errors import RequestError
from shared.lifecycle import wait_until
from shared.rpc.messages import NodeInfo, NodeUpdate, RequestEvent, StepRecord, pack_ids

MS = 1_000_000
Message = dict[str, Any]


def info(name: str) -> NodeInfo:
    return NodeInfo(name, "b", name.partition("-")[0], "h:1", "m", "f", 16, 64, 9, 512, 8)


def served(records: RequestHistory) -> int:
    """Record a handed-off request that began a second ago. Return the time of its start."""
    began = now_ns() - 1000 * MS
    attempt = "cmpl-a-0.0.0"

    def event(node: str, kind: str, ms: int, **fields: object) -> RequestEvent:
        made = RequestEvent(attempt, kind, began + ms * MS, **fields)
        records.node_updated(info(node), NodeUpdate(events=[made]))
        return made

    def step(node: str, number: int, ms: int, prompt: int, decodes: int, members: list[int]) -> None:
        record = StepRecord(number, began + ms * MS, 8000, 100, 0, 64, "fixed", int(prompt > 0), prompt, 0, decodes)
        record.members = pack_ids(members)
        records.node_updated(info(node), NodeUpdate(steps=[record]))

    records.accepted("cmpl-a", 32, 1, waited_s=1.0)
    records.placed(attempt, "prefill-0", "decode-0", "r")
    event("prefill-0", "queued", 1, serial=4)
    event("prefill-0", "admitted", 2)
    step("prefill-0", 7, 3, 16, 0, [4, 0, 16])
    step("prefill-0", 8, 12, 16, 0, [4, 16, 16])
    event("prefill-0", "transfer", 18, duration_us=5000, count=1, bytes=64, channel="shm")
    event("prefill-0", "first", 20)
    event("prefill-0", "transfer", 24, duration_us=7000, count=1, bytes=64, channel="shm")
    event("decode-0", "queued", 3, serial=2)
    event("decode-0", "received", 26)
    event("decode-0", "admitted", 27)
    step("decode-0", 5, 28, 0, 2, [2, 32, 1, 3, 50, 1])
    event("decode-0", "ended", 36, reason="length")
    records.output("cmpl-a", 0, 2)
    records.ended("cmpl-a", 0, "length")
    return began


# ---- the trace ---------------------------------------------------------------------------------------------------


def test_a_trace_is_valid_and_shows_passes_pushes_and_requests() -> None:
    records = RequestHistory()
    began = served(records)
    events = json.loads(json.dumps(list(trace_events(records, began - 10 * MS)), allow_nan=False))
    for event in events:
        assert event["ph"] in set("XMCbne"), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "prefill-0", "requests"]
    passes = [event for event in events if event["ph"] == "X" and event["cat"] == "pass"]
    assert [(names[e["pid"]], e["name"], e["dur"], e["args"]["number"]) for e in passes] == [
        ("prefill-0", "prompt 16", 8000, 7),
        ("prefill-0", "prompt 16", 8000, 8),
        ("decode-0", "decode 2", 8000, 5),
    ]
    pushes = [event for event in events if event.get("cat") == "transfer"]
    assert [(e["ph"], e["id"], e["args"]["bytes"]) for e in pushes] == [
        *(("b", "push-0", 64), ("e", "push-0", 64), ("b", "push-1", 64), ("e", "push-1", 64))
    ]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"blocks", "requests"}
    spans = [event["name"] for event in events if event["ph"] == "b" and event["cat"] == "request"]
    assert spans == ["cmpl-a", "queued", "chunk", "wait", "chunk", "wait", "wait", "decode"]
    assert Counter(spans) == Counter(e["name"] for e in events if e["ph"] == "e" and e["cat"] == "request")


def test_a_trace_begins_where_it_was_asked_to() -> None:
    records = RequestHistory()
    began = served(records)
    events = list(trace_events(records, began + 20 * MS))
    assert [event["args"]["number"] for event in events if event.get("cat") == "pass"] == [5]
    assert min(event["ts"] for event in events) >= 0


# ---- routes ------------------------------------------------------------------------------------------------------


def error_response(_request: Request, error: Exception) -> Response:
    status, value, headers = described(error, "label")
    return JSONResponse(value, status, headers)


def client(records: RequestHistory, rows_at_once: int = ROWS_AT_ONCE) -> TestClient:
    routes = HistoryHandlers(records, rows_at_once).routes(EventStream(records, dict))
    return TestClient(Starlette(routes=routes, exception_handlers={RequestError: error_response}))


def test_requests_steps_and_their_members_are_shown() -> None:
    records = RequestHistory()
    began = served(records)
    http = client(records)
    (found,) = http.get("/v1/requests?limit=1").json()["requests"]
    assert (found["id"], found["state"], found["transfer"]["bytes"]) == ("cmpl-a", "finished", 128)
    timeline = http.get("/v1/requests/cmpl-a/timeline").json()
    assert [span["kind"] for span in timeline["spans"]][:2] == ["queued", "chunk"]
    steps = http.get("/v1/steps?node=prefill-0").json()
    assert (steps["node"], steps["fields"], len(steps["steps"])) == ("prefill-0", list(FIELDS), 2)
    assert len(steps["steps"][0]) == len(FIELDS)
    later = http.get(f"/v1/steps?node=prefill-0&since_ms={(began + 10 * MS) / MS}").json()["steps"]
    assert [row[0] for row in later] == [8]
    assert [row[0] for row in http.get("/v1/steps?node=prefill-0&since_ms=0&limit=1").json()["steps"]] == [7]
    assert [row[0] for row in http.get("/v1/steps?node=prefill-0&limit=1").json()["steps"]] == [8]
    step = http.get("/v1/steps/decode-0/5").json()
    assert (step["duration_ms"], step["num_decodes"]) == (8.0, 2)
    assert step["members"] == [
        {"id": "cmpl-a", "start": 32, "count": 1, "kind": "decode"},
        {"id": None, "start": 50, "count": 1, "kind": "decode"},
    ]
    assert len(http.get("/trace?last=2m").json()["traceEvents"]) > 20


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/requests?limit=-1", 400, "limit"),
        ("/v1/requests?limit=many", 400, "limit"),
        ("/v1/requests?limit=99999", 400, "limit"),
        ("/v1/requests/cmpl-b/timeline", 404, "id"),
        ("/v1/steps", 400, "node"),
        ("/v1/steps?node=unknown", 404, "node"),
        ("/v1/steps?node=prefill-0&since_ms=nan", 400, "since_ms"),
        ("/v1/steps?node=prefill-0&limit=0", 400, "limit"),
        ("/v1/steps/prefill-0/99", 404, "number"),
        ("/v1/steps/prefill-0/-1", 404, "number"),
        ("/v1/steps/unknown/0", 404, "node"),
        ("/trace?last=abc", 400, "last"),
        ("/trace?last=0s", 400, "last"),
        ("/trace?last=2000m", 400, "last"),
        ("/events?node=unknown", 404, "node"),
    ],
)
def test_bad_input_is_answered_in_openais_form_with_its_parameter(path: str, status: int, param: str) -> None:
    records = RequestHistory()
    served(records)
    answer = client(records).get(path)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


# ---- the feed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/requests?limit=4000", "/v1/steps?node=decode-0&limit=4000", "/trace?last=1h"])
def test_a_long_answer_is_one_json_object_however_many_pieces_it_is_written_in(path: str) -> None:
    records = RequestHistory()
    served(records)
    for number in range(6, 12):
        step = StepRecord(number, now_ns(), 100, num_decodes=1)
        records.node_updated(info("decode-0"), NodeUpdate(steps=[step]))
        records.accepted(f"cmpl-{number}", 3, 1)
    path = path.replace("1h", "60m")
    whole = client(records).get(path).json()
    pieces = client(records, rows_at_once=2).get(path).json()
    rows = next(name for name in ("requests", "steps", "traceEvents") if name in whole)
    assert len(whole[rows]) == len(pieces[rows]) >= 7
    assert {**whole, rows: 0, "otherData": 0} == {**pieces, rows: 0, "otherData": 0}
    assert rows == "traceEvents" or whole == pieces


class Watcher:
    """A client of the feed at the ASGI level. It may disconnect or stop reading."""

    def __init__(self, feed: EventStream, query: str = "", headers: dict[str, str] | None = None) -> None:
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": "GET", "path": "/events", "query_string": query.encode(), "headers": raw}
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()
        self.task = asyncio.ensure_future(feed(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    def events(self) -> list[tuple[str, Any]]:
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.split("\n\n") if block]
        return [(block["event"], json.loads(block["data"])) for block in blocks if "event" in block]

    async def receives(self, kind: str, when: Callable[[Any], bool] = lambda _: True) -> Any:
        def found() -> list[Any]:
            return [data for name, data in self.events() if name == kind and when(data)]

        assert await wait_until(lambda: bool(found()), 5.0), self.events()
        return found()[-1]


def quick_stream(records: RequestHistory, status: Callable[[], dict[str, Any]] = dict, **limits: Any) -> EventStream:
    return EventStream(records, status, tick_s=0.005, **limits)


async def test_the_stream_sends_what_is_new_of_every_kind() -> None:
    records = RequestHistory()
    feed = quick_stream(records, lambda: {"mode": "auto"})
    watcher = Watcher(feed)
    assert (await watcher.receives("status"))["mode"] == "auto"
    served(records)
    steps = await watcher.receives("steps", lambda data: data["node"] == "prefill-0")
    assert len(steps["steps"][0]) == len(FIELDS)
    (transfer, _) = (await watcher.receives("transfers"))["transfers"]
    assert (transfer["request"], transfer["from"], transfer["to"]) == ("cmpl-a", "prefill-0", "decode-0")
    assert transfer["end_ms"] - transfer["start_ms"] == pytest.approx(5, abs=0.01)
    (changed,) = (await watcher.receives("requests"))["requests"]
    assert changed["state"] == "finished"
    watcher.left.set()
    await watcher.task
    again = Watcher(feed)
    await again.receives("status")
    await asyncio.sleep(0.05)
    assert {kind for kind, _ in again.events()} == {"status"}, "earlier events are not sent"
    feed.close()
    await again.task


async def test_a_watcher_of_one_node_receives_only_its_steps() -> None:
    records = RequestHistory()
    served(records)
    feed = quick_stream(records)
    watcher = Watcher(feed, "node=decode-0")
    await watcher.receives("status")
    for name in ("prefill-0", "decode-0"):
        records.node_updated(info(name), NodeUpdate(steps=[StepRecord(20, now_ns(), 5)]))
    await watcher.receives("steps")
    assert {data["node"] for kind, data in watcher.events() if kind == "steps"} == {"decode-0"}
    feed.close()
    await watcher.task


async def test_a_watcher_that_reconnects_receives_what_it_missed() -> None:
    records = RequestHistory()
    feed = quick_stream(records)
    began = served(records)
    watcher = Watcher(feed, headers={"last-event-id": str(began // MS)})
    assert {data["node"] for kind, data in watcher.events() if kind == "steps"} <= {"prefill-0", "decode-0"}
    assert [row[0] for row in (await watcher.receives("steps", lambda data: data["node"] == "prefill-0"))["steps"]] == [
        7,
        8,
    ]
    assert len((await watcher.receives("transfers"))["transfers"]) == 2
    feed.close()
    await watcher.task


async def test_streams_end_when_the_router_drains_or_the_client_leaves() -> None:
    feed = quick_stream(RequestHistory())
    leaving, staying = Watcher(feed), Watcher(feed)
    await leaving.receives("status")
    leaving.left.set()
    await asyncio.wait_for(leaving.task, 2.0)
    assert not staying.task.done()
    feed.close()
    await asyncio.wait_for(staying.task, 2.0)
    assert staying.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    late = Watcher(feed)
    await late.task
    assert late.status == 503


async def test_watchers_are_bounded_in_number() -> None:
    feed = quick_stream(RequestHistory(), max_subscribers=2)
    watchers = [Watcher(feed) for _ in range(3)]
    await watchers[0].receives("status")
    await watchers[2].task
    assert [watcher.status for watcher in watchers] == [200, 200, 503]
    feed.close()
    await asyncio.gather(*(watcher.task for watcher in watchers))


async def test_a_watcher_that_does_not_read_is_disconnected_and_others_are_not() -> None:
    records = RequestHistory()
    feed = quick_stream(records, silent_s=0.1)
    stuck, well = Watcher(feed), Watcher(feed)
    stuck.reads.clear()
    await asyncio.wait_for(stuck.task, 5.0)
    served(records)
    await well.receives("steps")
    feed.close()
    await well.task


def test_what_waits_for_a_slow_watcher_is_bounded_and_the_oldest_goes() -> None:
    subscriber = Subscriber(None)
    for number in range(10):
        subscriber.put(str(number).encode() * (MAX_WAITING_BYTES // 4))
    data = subscriber.take()
    assert len(data) <= MAX_WAITING_BYTES
    assert {chr(byte) for byte in data} == {"6", "7", "8", "9"}
    assert subscriber.take() == b""
