"""Test the routes of the history: a complete and valid trace, a bounded feed that ends, and errors for bad input."""

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dashboard.chrome_trace import trace_events
from dashboard.history import RequestHistory
from dashboard.routes import ROWS_AT_ONCE, Dashboard, EventStream
from dashboard.step_ring import FIELDS
from router.http.asgi import to_response
from shared.clock import now_ns
from shared.errors import RequestError
from shared.lifecycle import wait_until
from tests.dashboard.world import MS, World, finish, handed_off

Message = dict[str, Any]


def served(rows_at_once: int = ROWS_AT_ONCE, base_ns: int = 0) -> World:
    """Return a `World` that has recorded a request, which began a second ago and was handed to a decode node."""
    world = handed_off(base_ns=base_ns or now_ns() - 1000 * MS, rows_at_once=rows_at_once)
    world.step("decode-0", 5, 40, 8, 0, 2, 7, 32, 1, 3, 50, 1)
    finish(world)
    return world


# ---- the trace ---------------------------------------------------------------------------------------------------


def test_a_trace_is_valid_and_shows_passes_pushes_and_requests() -> None:
    world = served()
    trace = list(trace_events(world.records, world.base_ns - 10 * MS))
    events = json.loads(json.dumps(trace, allow_nan=False))
    for event in events:
        assert event["ph"] in set("XMCbne"), event
        assert isinstance(event["pid"], int)
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "prefill-0", "requests"]
    passes = [event for event in events if event["ph"] == "X" and event["cat"] == "step"]
    assert [(names[e["pid"]], e["name"], e["dur"], e["args"]["number"]) for e in passes] == [
        ("prefill-0", "prompt 16", 10_000, 0),
        ("prefill-0", "prompt 16", 10_000, 1),
        ("decode-0", "decode 2", 8000, 5),
    ]
    pushes = [event for event in events if event.get("cat") == "transfer"]
    assert [(e["ph"], e["id"][-6:], e["args"]["bytes"]) for e in pushes] == [
        *(("b", "push-0", 100), ("e", "push-0", 100), ("b", "push-1", 60), ("e", "push-1", 60))
    ]
    assert {e["name"] for e in events if e["ph"] == "C"} == {"blocks", "requests"}
    spans = [event["name"] for event in events if event["ph"] == "b" and event["cat"] == "request"]
    assert spans == ["cmpl-a", "queued", "chunk", "chunk", "wait", "wait", "decode"]
    assert Counter(spans) == Counter(e["name"] for e in events if e["ph"] == "e" and e["cat"] == "request")


def test_a_trace_begins_at_the_requested_time() -> None:
    world = served()
    events = list(trace_events(world.records, world.base_ns + 20 * MS))
    assert [event["args"]["number"] for event in events if event.get("cat") == "step"] == [5]
    assert min(event["ts"] for event in events) >= 0


# ---- routes ------------------------------------------------------------------------------------------------------


def client(world: World) -> TestClient:
    return TestClient(Starlette(routes=world.records.routes(dict), exception_handlers={RequestError: to_response}))


def test_requests_steps_and_their_members_are_shown() -> None:
    world = served()
    http = client(world)
    (found,) = http.get("/v1/requests?limit=1").json()["requests"]
    assert (found["id"], found["state"], found["transfer"]["bytes"]) == ("cmpl-a", "finished", 160)
    timeline = http.get("/v1/requests/cmpl-a/timeline").json()
    assert [span["kind"] for span in timeline["spans"]][:2] == ["queued", "chunk"]
    steps = http.get("/v1/steps?node=prefill-0").json()
    assert (steps["node"], steps["fields"], len(steps["steps"])) == ("prefill-0", list(FIELDS), 2)
    assert len(steps["steps"][0]) == len(FIELDS)
    later = http.get(f"/v1/steps?node=prefill-0&since_ms={world.base_ns / MS + 10}").json()["steps"]
    assert [row[0] for row in later] == [1]
    assert [row[0] for row in http.get("/v1/steps?node=prefill-0&since_ms=0&limit=1").json()["steps"]] == [0]
    assert [row[0] for row in http.get("/v1/steps?node=prefill-0&limit=1").json()["steps"]] == [1]
    step = http.get("/v1/steps/decode-0/5").json()
    assert (step["duration_ms"], step["num_decodes"]) == (8.0, 2)
    assert step["members"] == [
        {"id": "cmpl-a", "start": 32, "count": 1, "kind": "decode"},
        {"id": None, "start": 50, "count": 1, "kind": "decode"},
    ]
    assert len(http.get("/trace?last=2m").json()["traceEvents"]) > 20
    pattern = Dashboard.queries["/trace"]["last"]["pattern"]
    for last in ("30s", "500ms", "2m", "1.5s", "45", "3600s", "60m"):
        assert re.search(pattern, last)
        assert http.get(f"/trace?last={last}").status_code == 200
    assert not any(re.search(pattern, last) for last in ("abc", "1h", "-1s", ""))


def test_of_many_nodes_those_whose_steps_are_read_send_records_for_a_while() -> None:
    world = handed_off()
    http = client(world)
    assert world.records.wants_records("decode-0", 64)
    assert not world.records.wants_records("decode-0", 65)
    assert http.get("/v1/steps?node=decode-0").status_code == 200
    assert world.records.wants_records("decode-0", 1000)
    assert not world.records.wants_records("decode-1", 1000)
    world.at(120_000)
    assert not world.records.wants_records("decode-0", 1000)
    for number in range(65):
        http.get(f"/v1/steps?node=n{number}")
    wanted = [number for number in range(65) if world.records.wants_records(f"n{number}", 1000)]
    assert wanted == list(range(1, 65)), "the number of such nodes is bounded"


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
    ],
)
def test_an_error_names_the_bad_parameter(path: str, status: int, param: str) -> None:
    answer = client(served()).get(path)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


# ---- the feed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/requests?limit=4000", "/v1/steps?node=decode-0&limit=4000", "/trace?last=1h"])
def test_an_answer_in_several_pieces_is_one_json_object(path: str) -> None:
    base_ns = now_ns() - 1000 * MS
    worlds = served(base_ns=base_ns), served(2, base_ns)
    for world, number in itertools.product(worlds, range(6, 12)):
        world.step("decode-0", number, 10 * number, 0.1, 0, 1)
        world.records.accepted(f"cmpl-{number}", 3, 1)
    path = path.replace("1h", "60m")
    whole, pieces = (client(world).get(path).json() for world in worlds)
    rows = next(name for name in ("requests", "steps", "traceEvents") if name in whole)
    assert len(whole[rows]) == len(pieces[rows]) >= 7
    assert {**whole, rows: 0, "otherData": 0} == {**pieces, rows: 0, "otherData": 0}
    assert rows == "traceEvents" or whole == pieces


class Watcher:
    """A client that calls the feed's ASGI app. It may disconnect or stop reading."""

    def __init__(self, feed: EventStream) -> None:
        scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "headers": []}
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.started = asyncio.Event()  # set when the feed begins to send its first message
        self.left = asyncio.Event()
        self.task = asyncio.ensure_future(feed(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.started.set()
        await self.reads.wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    def events(self) -> list[tuple[str, Any]]:
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.split("\n\n") if block]
        return [(block["event"], json.loads(block["data"])) for block in blocks if "event" in block]

    async def receives(self, kind: str) -> Any:
        def found() -> list[Any]:
            return [data for name, data in self.events() if name == kind]

        assert await wait_until(lambda: bool(found()), 5.0), self.events()
        return found()[-1]


def quick_stream(records: RequestHistory, status: Callable[[], dict[str, Any]] = dict, **limits: Any) -> EventStream:
    return EventStream(records, status, tick_s=0.005, **limits)


async def test_the_stream_sends_new_events_of_every_kind() -> None:
    world = World()
    feed = quick_stream(world.records, lambda: {"mode": "auto"})
    watcher = Watcher(feed)
    assert (await watcher.receives("status"))["mode"] == "auto"
    world.records.accepted("cmpl-a", 4, 1)
    world.step("decode-0", 5, 40, 8, 0, 2)
    steps = await watcher.receives("steps")
    assert (steps["node"], len(steps["steps"][0])) == ("decode-0", len(FIELDS))
    (changed,) = (await watcher.receives("requests"))["requests"]
    assert (changed["id"], changed["state"]) == ("cmpl-a", "queued")
    watcher.left.set()
    await watcher.task
    again = Watcher(feed)
    again.reads.clear()
    await asyncio.wait_for(again.started.wait(), 5.0)
    world.records.accepted("cmpl-b", 4, 1)
    world.step("decode-0", 6, 50, 8, 0, 2)
    again.reads.set()  # events that occur while the first status is being sent must not be lost
    assert [row[0] for row in (await again.receives("steps"))["steps"]] == [6], "earlier events are not sent"
    assert [row["id"] for row in (await again.receives("requests"))["requests"]] == ["cmpl-b"]
    feed.close()
    await again.task


async def test_streams_end_when_the_router_drains_or_the_client_leaves() -> None:
    feed = quick_stream(RequestHistory(), max_subscribers=2)
    leaving, staying, rejected = Watcher(feed), Watcher(feed), Watcher(feed)
    await leaving.receives("status")
    await rejected.task
    assert (leaving.status, staying.status, rejected.status) == (200, 200, 503)
    leaving.left.set()
    await asyncio.wait_for(leaving.task, 2.0)
    assert not staying.task.done()
    feed.close()
    await asyncio.wait_for(staying.task, 2.0)
    assert staying.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    late = Watcher(feed)
    await late.task
    assert late.status == 503


async def test_a_watcher_that_does_not_read_is_disconnected_and_others_are_not() -> None:
    world = World()
    feed = quick_stream(world.records, silent_s=0.1)
    stuck, well = Watcher(feed), Watcher(feed)
    stuck.reads.clear()
    await asyncio.wait_for(stuck.task, 5.0)
    world.step("decode-0", 5, 40, 8, 0, 2)
    await well.receives("steps")
    feed.close()
    await well.task
