"""The history of nodes' records: phases, transfers and interference, and its bounds for malformed or many records."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from dashboard.chrome_trace import trace_events
from dashboard.history import HistoryLimits, RequestHistory
from dashboard.metrics import RecordMetrics
from dashboard.routes import Dashboard
from dashboard.step_ring import MEMBERS_BYTES, StepRing, members_of
from dashboard.trace import union
from router.nodes.status import node_status
from scheduler.cost import CostModel
from shared.clock import now_ns
from shared.rpc.codec import decode, encode
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord, pack_ids

MS = 1_000_000
BASE = 1_000_000 * MS  # small, so that milliseconds are exact as floats
# Predicts 1 ms per step plus 0.5 ms per decode.
MODEL = CostModel(overhead=0.001, per_decode=0.0005)


def info(name: str, boot: str = "b") -> NodeInfo:
    return NodeInfo(name, boot, name.partition("-")[0], "h:1", "m", "f", 16, 64, 9, 512, 8)


class World:
    """A history whose clock the test sets, in milliseconds since BASE."""

    def __init__(self, lost: str = "") -> None:
        """Events of the kind `lost` do not arrive."""
        self.now_ms, self.lost = 0.0, lost
        self.records = RequestHistory(lambda: BASE + round(self.now_ms * MS))

    def at(self, ms: float) -> RequestHistory:
        self.now_ms = ms
        return self.records

    def event(self, node: str, kind: str, ms: float, attempt: str = "cmpl-a-0.0.0", **fields: object) -> None:
        if kind == self.lost:
            return
        event = RequestEvent(attempt, kind, BASE + round(ms * MS), **fields)
        self.records.node_updated(info(node), NodeUpdate(events=[event]))

    def push(self, start_ms: float, end_ms: float, num_bytes: int = 100) -> None:
        duration_us = round((end_ms - start_ms) * 1000)
        self.event("prefill-0", "transfer", end_ms, duration_us=duration_us, bytes=num_bytes, count=1, channel="shm")

    def step(self, node: str, number: int, ms: float, long_ms: float, prompt: int = 0, decodes: int = 0) -> None:
        record = StepRecord(
            number,
            BASE + round(ms * MS),
            round(long_ms * 1000),
            num_prefills=int(prompt > 0),
            prefill_tokens=prompt,
            num_decodes=decodes,
            members=pack_ids([0, 0, prompt] if prompt else []),
        )
        self.records.node_updated(info(node), NodeUpdate(steps=[record]))

    def model(self, node: str) -> None:
        self.records.node_updated(info(node), NodeUpdate(stats=NodeStats(cost=MODEL.packed())))


def disaggregated(lost: str = "") -> World:
    """Record a request: accepted at 0, queued at 2, chunks from 5 to 25, KV received at 31, decodes from 34 (in ms)."""
    world = World(lost)
    world.at(0).accepted("cmpl-a", 40, 1, "00-ab-cd-01")
    world.at(1).placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "long prompt", 0.05, 0.02)
    world.event("prefill-0", "queued", 2, serial=0, count=40)
    world.event("decode-0", "queued", 6, serial=7, count=40)
    world.event("prefill-0", "admitted", 5, count=8)
    world.step("prefill-0", 0, 5, 10, prompt=16)
    world.push(12, 20)
    world.step("prefill-0", 1, 15, 10, prompt=16)
    world.event("prefill-0", "first", 25)
    world.at(26).output("cmpl-a", 0, 1)
    world.push(18, 30, 60)
    world.event("decode-0", "received", 31)
    world.event("prefill-0", "ended", 32, reason="handed_off")
    world.event("decode-0", "admitted", 34)
    world.event("decode-0", "first", 37)
    world.at(38).output("cmpl-a", 0, 1)
    return world


def end(world: World) -> None:
    world.event("decode-0", "ended", 64, reason="length")
    world.at(65).output("cmpl-a", 0, 10)
    world.at(66).ended("cmpl-a", 0, "length")


def summary(world: World) -> dict[str, Any]:
    found = world.records.summary("cmpl-a")
    assert found is not None
    return found


def test_the_phases_of_a_handed_off_request_are_the_cuts_between_its_events() -> None:
    world = disaggregated()
    end(world)
    found = summary(world)
    assert found["phases_ms"] == pytest.approx(
        {
            "router": 2 + 2,
            "prefill_queue": 3,
            "prefill": 20,
            "transfer_exposed": 6,
            "decode_queue": 3,
            "decode": 30,
            "interference": 0,
        }
    )
    assert (found["state"], found["finish"], found["attempts"]) == ("finished", "length", 1)
    assert (found["prompt_tokens"], found["generated_tokens"], found["cached_tokens"]) == (40, 12, 8)
    assert found["predicted_ms"] == {"local": 50.0, "remote": 20.0}
    times = ["accepted_ms", "first_token_ms", "second_token_ms", "last_token_ms", "ended_ms"]
    assert [found[name] - BASE / MS for name in times] == [0, 26, 38, 65, 66]


def test_hidden_is_the_union_of_pushes_within_the_prefill_and_exposed_what_came_after_it() -> None:
    world = disaggregated()
    # Pushes 12 to 20 and 18 to 30 are busy for 18 ms; the prefill ended at 25, so 13 ms of them are hidden.
    assert summary(world)["transfer"] == {
        "bytes": 160,
        "busy_ms": 18.0,
        "hidden_ms": 13.0,
        "exposed_ms": 6.0,
        "channel": "shm",
    }
    first, second = world.records.transfers()
    assert (first.shown()["exposed_ms"], second.shown()["exposed_ms"]) == (0.0, 5.0)


def test_pushes_that_end_before_the_prefill_are_hidden_whole_and_nothing_is_exposed_but_the_commit() -> None:
    world = World()
    world.records.accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "r")
    world.event("prefill-0", "admitted", 0)
    world.push(5, 9)
    world.event("prefill-0", "first", 10)
    world.event("decode-0", "received", 10.5)
    transfer = summary(world)["transfer"]
    assert (transfer["busy_ms"], transfer["hidden_ms"], transfer["exposed_ms"]) == (4.0, 4.0, 0.5)


def test_interference_is_what_mixed_steps_lasted_longer_than_their_decodes_alone() -> None:
    world = disaggregated()
    world.model("decode-0")
    world.step("decode-0", 0, 30, 4, prompt=16, decodes=2)  # before the request decodes here
    world.step("decode-0", 1, 34.5, 10, prompt=16, decodes=2)  # 10 ms; decodes alone take 1 + 2 * 0.5 = 2 ms
    world.step("decode-0", 2, 45, 9, decodes=2)  # slow, but without a prompt
    world.step("decode-0", 3, 55, 5, prompt=16)  # no decodes: the whole step is interference
    world.step("decode-0", 4, 65, 9, prompt=16, decodes=1)  # after the request's last token
    end(world)
    phases = summary(world)["phases_ms"]
    assert phases["interference"] == pytest.approx(8 + 5)
    assert phases["decode"] == pytest.approx(30 - 13)
    assert sum(phases.values()) == pytest.approx(66)


def test_without_a_model_no_mixed_step_counts_as_interference() -> None:
    world = disaggregated()
    world.step("decode-0", 1, 34.5, 10, prompt=16, decodes=2)
    end(world)
    phases = summary(world)["phases_ms"]
    assert phases["interference"] == 0


def test_a_co_located_request_has_neither_transfer_nor_decode_queue() -> None:
    world = World()
    world.at(0).accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", None, "decode-0", "no prefill node")
    for kind, ms in (("queued", 1), ("admitted", 4), ("first", 10), ("ended", 30)):
        world.event("decode-0", kind, ms)
    world.at(31).ended("cmpl-a", 0, "stop")
    found = summary(world)
    assert found["transfer"] is None
    assert list(found["phases_ms"].values()) == pytest.approx([2, 3, 6, 0, 0, 20, 0])


def test_a_request_that_moved_has_a_retry_phase_and_still_sums_up() -> None:
    world = disaggregated()
    world.at(41).placed("cmpl-a-0.0.1", None, "decode-1", "prefill pool gone")
    for kind, ms in (("queued", 42), ("admitted", 43), ("first", 50), ("ended", 70)):
        world.event("decode-1", kind, ms, "cmpl-a-0.0.1")
    world.at(71).ended("cmpl-a", 0, "length")
    found = summary(world)
    phases = found["phases_ms"]
    assert phases["retry"] == pytest.approx(40)
    assert sum(phases.values()) == pytest.approx(71)
    assert (found["attempts"], found["decode"]) == (2, "decode-1")


@given(st.lists(st.integers(0, 100), min_size=7, max_size=7), st.integers(0, 100))
def test_phases_sum_to_the_duration_and_are_not_negative_whatever_the_clocks_said(
    times: list[int], end_ms: int
) -> None:
    world = World()
    world.at(0).accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "r")
    world.model("decode-0")
    prefill, decode = ("queued", "admitted", "first"), ("received", "admitted", "ended")
    places = [*(("prefill-0", kind) for kind in prefill), *(("decode-0", kind) for kind in decode)]
    for (node, kind), ms in zip(places, times, strict=False):
        world.event(node, kind, ms)
    world.step("decode-0", 0, times[6], 30, prompt=5, decodes=1)
    world.at(end_ms).ended("cmpl-a", 0, "length")
    phases = summary(world)["phases_ms"]
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(end_ms, abs=1e-6)


@pytest.mark.parametrize("missing", ["queued", "admitted", "first", "received", "ended"])
def test_a_request_whose_records_were_lost_has_no_phases(missing: str) -> None:
    world = disaggregated(missing)
    end(world)
    assert summary(world)["phases_ms"] is None


def test_the_state_follows_the_events() -> None:
    world = World()
    seen: list[object] = []

    def look() -> None:
        seen.append(summary(world)["state"])

    world.at(0).accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "r")
    look()
    for node, kind in (("prefill-0", "admitted"), ("prefill-0", "first"), ("decode-0", "admitted")):
        world.event(node, kind, 5)
        look()
    world.at(9).ended("cmpl-a", 0, "abort")
    look()
    assert seen == ["queued", "prefill", "transfer", "decode", "cancelled"]


def test_a_timeline_has_chunks_pushes_decode_and_the_cause_of_each_gap() -> None:
    world = disaggregated()
    world.model("decode-0")
    world.event("prefill-0", "reserving", 27, duration_us=20_000)
    world.step("decode-0", 1, 40, 10, prompt=16, decodes=2)
    end(world)
    found = world.records.request("cmpl-a")
    assert found is not None
    spans = found["spans"]
    found = [(s["kind"], s["start_ms"] - BASE / MS, s["end_ms"] - BASE / MS, s["tokens"], s["cause"]) for s in spans]
    assert found == [
        ("queued", 2, 5, 0, "prefill queue"),
        ("chunk", 5, 15, 16, "step 0"),
        ("transfer", 12, 20, 0, "shm"),
        ("chunk", 15, 25, 16, "step 1"),
        ("transfer", 18, 30, 0, "shm"),
        ("wait", 25, 27, 0, "no room"),
        ("wait", 30, 31, 0, "transfer"),
        ("wait", 31, 34, 0, "decode queue"),
        ("decode", 34, 64, 11, ""),
        ("wait", 40, 50, 16, "behind a prompt chunk"),
    ]


# ---- clocks and bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead_ms", "expected_ms"), [(500.0, 100.2), (-3.0, 100.2), (0.4, 100.4)])
def test_a_clock_that_is_off_by_more_than_a_millisecond_is_corrected(ahead_ms: float, expected_ms: float) -> None:
    world = World()
    world.at(0).accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", None, "decode-0", "r")
    for sent_ms, on_the_way_ms in ((10, 4.0), (20, 0.2), (30, 9.0)):
        sent_ns = BASE + round((sent_ms + ahead_ms) * MS)
        world.at(sent_ms + on_the_way_ms).node_updated(info("decode-0"), NodeUpdate(stats=NodeStats(sent_ns=sent_ns)))
    world.event("decode-0", "queued", 100 + ahead_ms)
    world.step("decode-0", 0, 100 + ahead_ms, 1, prompt=3)
    (trace,) = world.records.traces()
    (event,) = next(iter(trace.attempts.values())).events
    assert (event.at_ns - BASE) / MS == pytest.approx(expected_ms)
    assert (world.records.rings()["decode-0"].row(0).start_ns - BASE) / MS == pytest.approx(expected_ms)


def test_the_oldest_requests_are_forgotten() -> None:
    records = RequestHistory(limits=HistoryLimits(requests=3))
    for number in range(5):
        records.accepted(f"cmpl-{number}", 1, 1)
    assert [found["id"] for found in records.latest_requests(10)] == ["cmpl-4", "cmpl-3", "cmpl-2"]
    assert records.request("cmpl-1") is None


def test_a_new_life_of_a_node_begins_a_new_ring() -> None:
    records = RequestHistory()
    for boot in ("one", "two"):
        records.node_updated(info("decode-0", boot), NodeUpdate(steps=[StepRecord(0, 5, 1)]))
    assert len(records.rings()["decode-0"]) == 1


def test_a_foreign_request_is_named_in_members_and_nothing_else() -> None:
    world = World()
    world.event("decode-0", "queued", 1, "cmpl-other-0.0.0", serial=3)
    assert world.records.client_id("decode-0", 3) == "cmpl-other-0"
    assert not list(world.records.latest_requests(9))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40), st.integers(0, 2000), st.integers(0, 2000)
)
def test_sums_over_an_interval_are_those_of_a_walk_over_the_steps_that_are_left(
    steps: list[tuple[int, int]], one: int, other: int
) -> None:
    ring, start, records = StepRing(capacity=16), 0, []
    ring.model = MODEL
    for number, (gap, tokens) in enumerate(steps):
        start += gap + 1
        records.append(StepRecord(number, start, 7, 1, prefill_tokens=tokens, num_decodes=number % 3))
        ring.add(records[-1])
    kept, (first, last) = records[-16:], sorted((one, other))
    inside = [record for record in kept if first <= record.start_ns < last]
    num_steps, busy_ns, tokens, interference = ring.sums(first, last)
    assert num_steps == len(inside) == ring.place(last) - ring.place(first)
    assert busy_ns == 7000 * len(inside)
    assert tokens == sum(record.prefill_tokens + record.num_decodes for record in inside)
    # A step lasts 8 us, less than its decodes alone would take, so only steps without decodes cause interference.
    assert interference == 8000 * sum(1 for record in inside if record.prefill_tokens and not record.num_decodes)
    for record in kept:
        row = ring.numbered(record.number)
        assert row is not None
        assert (row.start_ns, row.prefill_tokens) == (record.start_ns, record.prefill_tokens)
    assert ring.numbered(len(steps) - 17) is None


def test_members_are_forgotten_by_their_bytes_and_reasons_by_their_number() -> None:
    ring = StepRing(members_bytes=30)
    for number in range(300):
        ring.add(StepRecord(number, number, 1, reason=f"r{number}", members=pack_ids([1, 2, 3])))
    assert ring.members(299) == members_of(pack_ids([1, 2, 3]), 0)
    assert ring.members(298) is not None
    assert ring.members(297) is None
    rows = list(ring.rows())
    assert (ring.reason(rows[0]), ring.reason(rows[-1])) == ("r0", "other")


def test_a_number_that_no_step_has_is_refused() -> None:
    with pytest.raises(ValueError, match="step 3"):
        StepRing().add(StepRecord(3, 2**80, 1))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))))
def test_a_union_is_disjoint_and_covers_the_same_time(intervals: list[tuple[int, int]]) -> None:
    joined = union(intervals)
    assert all(a < b for (_, a), (b, _) in pairwise(joined))
    covered = {at for start, stop in intervals for at in range(start, stop)}
    assert {at for start, stop in joined for at in range(start, stop)} == covered


# ---- malformed records -----------------------------------------------------------------------------------------------

whole = st.sampled_from([0, 1, -1, 7, 2**31, 2**40, 2**53, 2**63 - 1, -(2**63), 2**64 - 1]) | st.integers(0, 10**6)
real = st.sampled_from([0.0, -0.0, 1e-9, 1.0, 1e300, -1.0, float("nan"), float("inf"), float("-inf")])
attempts = st.sampled_from(["cmpl-a-0.0.0", "cmpl-a-0.0.1", "", "..", "x" * 5000, "cmpl-a", "\n\x00"])
words = st.sampled_from(["", "fixed", "x" * 5000, "\u2028\n"])
kinds = st.sampled_from(
    ["queued", "reserving", "transfer", "committed", "received", "admitted", "first", "ended", "new"]
)
members = st.lists(st.integers(-2, 2**31 - 1), max_size=7).map(pack_ids) | st.binary(max_size=25)
steps = st.builds(StepRecord, whole, whole, whole, whole, whole, whole, words, *([whole] * 12), members=members)
events = st.builds(RequestEvent, attempts, kinds, whole, whole, whole, whole, whole, words, words, words)
loads = st.builds(
    NodeStats,
    cost=st.lists(real, max_size=8),
    transfer=st.lists(real, max_size=3),
    sent_ns=whole,
    running=whole,
    blocks_total=whole,
    blocks_owned=whole,
    steps=whole,
)
reports = st.builds(
    NodeUpdate, stats=st.none() | loads, steps=st.lists(steps, max_size=4), events=st.lists(events, max_size=4)
)


@settings(max_examples=100)
@given(st.lists(reports, max_size=5))
async def test_malformed_records_break_neither_the_history_nor_its_views(said: list[NodeUpdate]) -> None:
    records = Dashboard()
    node = info("decode-0")
    status: dict[str, Any] = {"nodes": [node_status(node, NodeStats(), True)], "placements": {}, "requests": {}}
    metrics = CollectorRegistry()
    record_metrics = RecordMetrics(lambda: [(node, NodeStats(), True)], "m", records)
    records.subscribe(record_metrics)
    metrics.register(record_metrics)
    records.accepted("cmpl-a", 4, 1)
    records.placed("cmpl-a-0.0.0", None, "decode-0", "r")
    for report in said:
        records.node_updated(node, decode(encode(report), NodeUpdate))
    start = now_ns()
    records.node_updated(
        node, NodeUpdate(steps=[StepRecord(5, start, 100, num_decodes=1, members=pack_ids([3, 0, 1]))])
    )
    ring = records.ring("decode-0")
    assert ring is not None
    row = ring.latest()
    assert row is not None
    assert (row.number, row.duration_us) == (5, 100), "later records of the node are kept"
    records.ended("cmpl-a", 0, "stop")
    for made in (
        records.request("cmpl-a"),
        list(records.latest_requests(10)),
        [ring.shown(each) for each in ring.rows()],
        [ring.members(each.number) for each in ring.rows()],
        list(trace_events(records, start - 10**9)),
        records.extend_status(status),
    ):
        json.dumps(made, allow_nan=False)
    generate_latest(metrics)


def test_what_is_no_record_is_left_out_and_counted() -> None:
    records = RequestHistory()
    records.node_updated(
        info("d"), NodeUpdate(steps=[StepRecord(1, 2**70, 10), StepRecord(2, 10, 2**62), StepRecord(3, 20, 5)])
    )
    assert [row.number for row in records.rings()["d"].rows()] == [3]
    assert records.num_malformed == 2


# ---- many requests ---------------------------------------------------------------------------------------------------


def serve(records: RequestHistory, number: int, num_chunks: int = 2) -> None:
    """Record one handed-off request from its acceptance to its end."""
    name, at = f"cmpl-{number}", number * 10 * MS + 10**15
    attempt = f"{name}-0.0.0"
    records.accepted(name, 32, 1)
    records.placed(attempt, "prefill-0", "decode-0", "r")
    marks = [("queued", 0), ("admitted", 1), *(("transfer", 2) for _ in range(num_chunks)), ("first", 3), ("ended", 5)]
    events = [RequestEvent(attempt, kind, at + after * MS, serial=number) for kind, after in marks]
    chunks = [
        StepRecord(num_chunks * number + chunk, at + MS, 900, num_prefills=1, prefill_tokens=16,
                   members=pack_ids([number, 16 * chunk, 16]))
        for chunk in range(num_chunks)
    ]  # fmt: skip
    records.node_updated(info("prefill-0"), NodeUpdate(events=events, steps=chunks))
    landed = [
        RequestEvent(attempt, kind, at + 4 * MS, serial=number) for kind in ("queued", "received", "admitted", "ended")
    ]
    records.node_updated(info("decode-0"), NodeUpdate(events=landed))
    records.output(name, 0, 3)
    records.ended(name, 0, "stop")


def test_requests_of_many_chunks_are_remembered_in_smaller_number() -> None:
    records = RequestHistory(limits=HistoryLimits(rows=1000))
    for number in range(200):
        serve(records, number, num_chunks=20)
    kept = [trace.id for trace in records.traces()]
    assert 15 <= len(kept) <= 25, "about 45 rows each"
    assert kept == [f"cmpl-{199 - index}" for index in range(len(kept))], "the latest"


def test_changes_are_recorded_only_while_they_are_watched() -> None:
    records = RequestHistory()
    serve(records, 0)
    assert records.changed(10) == []
    records.watch(True)
    serve(records, 1)
    assert [each["id"] for each in records.changed(10)] == ["cmpl-1"]
    records.watch(False)
    serve(records, 2)
    assert records.changed(10) == []


def test_silent_nodes_are_dropped_when_others_join() -> None:
    now = [10**15]
    records = RequestHistory(lambda: now[0])
    for number in range(5):
        records.node_updated(info(f"decode-{number}"), NodeUpdate(stats=NodeStats()))
        now[0] += 3600 * 10**9
    assert list(records.rings()) == ["decode-4"]


def test_the_summary_of_several_samples_is_of_the_first_ones_way() -> None:
    records = RequestHistory()
    records.accepted("cmpl-a", 4, 2)
    records.placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "disaggregated")
    records.placed("cmpl-a-0.1.0", None, "decode-0", "sibling")
    summary = records.summary("cmpl-a")
    assert summary is not None
    assert (summary["prefill"], summary["decode"]) == ("prefill-0", "decode-0")
    records.placed("cmpl-a-0.0.1", None, "decode-1", "no_prefill_node")
    summary = records.summary("cmpl-a")
    assert summary is not None
    assert (summary["prefill"], summary["decode"]) == (None, "decode-1")


def test_steps_of_one_number_take_no_more_room_than_the_last_of_them() -> None:
    records, node = RequestHistory(), info("d")
    slices = pack_ids(list(range(3 * 4096)))
    for _ in range(MEMBERS_BYTES // len(slices) + 2):
        records.node_updated(node, NodeUpdate(steps=[StepRecord(1, 10, 5, num_decodes=4096, members=slices)]))
    records.node_updated(node, NodeUpdate(steps=[StepRecord(2, 20, 5, num_decodes=1, members=slices[:12])]))
    ring = records.ring("d")
    assert ring is not None
    assert [len(ring.members(number) or ()) for number in (1, 2)] == [4096, 1]
