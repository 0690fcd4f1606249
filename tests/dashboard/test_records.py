"""Test the history of nodes' records: phases, transfers, interference, and bounds on malformed or many records."""

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
from dashboard.step_ring import MEMBERS_BYTES, StepRing, interference_ns, members_of
from dashboard.trace import union
from router.metrics.node_metrics import MetricSource
from router.nodes.load import node_status
from scheduler.cost import CostModel, StepWork
from shared.clock import now_ns
from shared.errors import UnavailableError
from shared.rpc.codec import decode, encode
from shared.rpc.messages import NodeStats, NodeUpdate, RequestEvent, StepRecord, pack_ids
from tests.dashboard.world import BASE, MODEL, MS, World, finish, handed_off, info


def summary(world: World) -> dict[str, Any]:
    found = world.records.summary("cmpl-a")
    assert found is not None
    return found


def test_the_phases_of_a_handed_off_request() -> None:
    world = handed_off()
    finish(world)
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


def test_transfer_time_within_the_prefill_is_hidden_and_the_rest_is_exposed() -> None:
    world = handed_off()
    # The pushes from 12 to 20 and from 18 to 30 ms cover 18 ms. Prefill ended at 25 ms and hides 13 ms of them.
    assert summary(world)["transfer"] == {
        "bytes": 160,
        "busy_ms": 18.0,
        "hidden_ms": 13.0,
        "exposed_ms": 6.0,
        "channel": "shm",
    }


@pytest.mark.parametrize(("has_model", "expected_ms"), [(True, 8 + 5), (False, 5)])
def test_interference_is_the_time_that_prompts_add_to_steps(has_model: bool, expected_ms: float) -> None:
    world = handed_off()
    if has_model:
        world.model("decode-0")
    world.step("decode-0", 0, 30, 4, prompt=16, decodes=2)  # before the request decodes here
    world.step("decode-0", 1, 34.5, 10, prompt=16, decodes=2)  # 10 ms; decodes alone take 1 + 2 * 0.5 = 2 ms
    world.step("decode-0", 2, 45, 9, decodes=2)  # slow, but without a prompt
    world.step("decode-0", 3, 55, 5, prompt=16)  # no decodes: the whole step is interference
    world.step("decode-0", 4, 65, 9, prompt=16, decodes=1)  # after the request's last token
    finish(world)
    phases = summary(world)["phases_ms"]
    assert phases["interference"] == pytest.approx(expected_ms)
    assert phases["decode"] == pytest.approx(30 - expected_ms)
    assert sum(phases.values()) == pytest.approx(66)


def test_guesses_are_no_interference() -> None:
    cost = CostModel(overhead=0.005, per_token=0.001)
    work = StepWork(num_prefills=1, prefill_tokens=4, num_decodes=8, decode_context=800, draft_tokens=40)
    step = StepRecord(
        1, 1, round(cost.seconds(work) * 1e6), 0, 0, 0, "", 1, 4, 0, 8, 800, 8, 0, 0, 0, b"", draft_tokens=40
    )
    assert interference_ns(step, cost) == 4_000_000


def test_a_colocated_request_has_no_transfer_and_no_decode_queue() -> None:
    world = World()
    world.at(0).accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", None, "decode-0", "no prefill node")
    for kind, ms in (("queued", 1), ("admitted", 4), ("first", 10), ("ended", 30)):
        world.event("decode-0", kind, ms)
    world.at(31).ended("cmpl-a", 0, "stop")
    found = summary(world)
    assert found["transfer"] is None
    assert list(found["phases_ms"].values()) == pytest.approx([2, 3, 6, 0, 0, 20, 0])


def test_the_spans_of_a_lost_node_end_with_its_last_tokens() -> None:
    world = handed_off()
    world.at(40).placed("cmpl-a-0.0.1", None, "decode-1", "prefill pool gone")
    for kind, ms in (("queued", 42), ("admitted", 44), ("first", 50), ("ended", 64)):
        world.event("decode-1", kind, ms, "cmpl-a-0.0.1", **({"reason": "length"} if kind == "ended" else {}))
    world.step("decode-0", 9, 90, 20, 64, 3)  # a step of other requests, after the node restarted
    world.at(65).output("cmpl-a", 0, 10)
    world.at(66).ended("cmpl-a", 0, "length")
    found = world.records.request("cmpl-a")
    assert found is not None
    spans = [span for span in found["spans"] if span["node"] == "decode-0"]
    assert max(span["end_ms"] for span in spans) == (BASE + 38 * MS) / 1e6
    decodes = [(span["node"], span["tokens"]) for span in found["spans"] if span["kind"] == "decode"]
    assert decodes == [("decode-0", 1), ("decode-1", 9)]
    assert found["longest_gap_ms"] == 65 - 38


def test_a_migrated_request_has_a_phase_of_earlier_attempts() -> None:
    world = handed_off()
    world.at(41).placed("cmpl-a-0.0.1", None, "decode-1", "prefill pool gone")
    for kind, ms in (("queued", 42), ("admitted", 43), ("first", 50), ("ended", 70)):
        world.event("decode-1", kind, ms, "cmpl-a-0.0.1")
    world.at(71).ended("cmpl-a", 0, "length")
    found = summary(world)
    phases = found["phases_ms"]
    assert phases["earlier_attempts"] == pytest.approx(40)
    assert sum(phases.values()) == pytest.approx(71)
    assert (found["attempts"], found["decode"]) == (2, "decode-1")
    assert found["earlier_nodes"] == [["prefill-0", "decode-0"]]


@given(st.lists(st.integers(0, 100), min_size=7, max_size=7), st.integers(0, 100))
def test_phases_are_not_negative_and_sum_to_the_duration_for_any_clocks(times: list[int], end_ms: int) -> None:
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
    world = handed_off(missing)
    finish(world)
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


@pytest.mark.parametrize(("prefill", "first"), [("prefill-0", "transfer"), (None, "decode")])
def test_tokens_that_arrive_before_the_records_of_the_nodes_change_the_state(prefill: str | None, first: str) -> None:
    world = World()
    world.at(0).accepted("cmpl-a", 40, 1)
    world.records.placed("cmpl-a-0.0.0", prefill, "decode-0", "r")
    seen = []
    for ms in (3, 4):
        world.at(ms).output("cmpl-a", 0, 1)
        seen.append(summary(world)["state"])
    assert seen == [first, "decode"]
    world.records.placed("cmpl-a-0.0.1", prefill, "decode-1", "r")
    assert summary(world)["state"] == "queued"


@pytest.mark.parametrize(
    ("how", "error", "state", "status", "message"),
    [
        ("refused", UnavailableError("Try later.", status=429), "refused", 429, "Try later."),
        ("error", UnavailableError("A node omitted it.", status=500), "failed", 500, "A node omitted it."),
        ("error", KeyError("secret"), "failed", 500, "The server failed to handle this request."),
    ],
)
def test_a_refused_or_failed_request_has_the_status_and_the_message_of_its_error(
    how: str, error: Exception, state: str, status: int, message: str
) -> None:
    world = World()
    world.at(0).accepted("cmpl-a", 40, 1)
    world.at(1).ended("cmpl-a", 0, how, error)
    found = world.records.request("cmpl-a")
    assert found is not None
    assert [found[name] for name in ("state", "status", "message")] == [state, status, message]


def test_a_timeline_has_chunks_pushes_decode_and_the_cause_of_each_gap() -> None:
    world = handed_off()
    world.model("decode-0")
    world.event("prefill-0", "reserving", 27, duration_us=20_000)
    world.step("decode-0", 1, 40, 10, prompt=16, decodes=2)
    finish(world)
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
        ("wait", 25, 27, 0, "block reservation"),
        ("wait", 27, 31, 0, "transfer"),
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


def test_a_new_incarnation_of_a_node_begins_a_new_ring() -> None:
    records = RequestHistory()
    for boot in ("one", "two"):
        records.node_updated(info("decode-0", boot), NodeUpdate(steps=[StepRecord(0, 5, 1)]))
    assert len(records.rings()["decode-0"]) == 1


def test_a_request_of_another_router_is_named_in_steps_only() -> None:
    world = World()
    world.event("decode-0", "queued", 1, "cmpl-other-0.0.0", serial=3)
    assert world.records.client_id("decode-0", 3) == "cmpl-other-0"
    assert not list(world.records.latest_requests(9))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40), st.integers(0, 2000), st.integers(0, 2000)
)
def test_the_sums_over_an_interval_are_those_of_its_steps(steps: list[tuple[int, int]], one: int, other: int) -> None:
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
    # Each step lasts 8 us, less than its decodes alone would take, so only steps without decodes cause interference.
    assert interference == 8000 * sum(1 for record in inside if record.prefill_tokens and not record.num_decodes)
    for record in kept:
        row = ring.numbered(record.number)
        assert row is not None
        assert (row.start_ns, row.prefill_tokens) == (record.start_ns, record.prefill_tokens)
    assert ring.numbered(len(steps) - 17) is None


def test_members_and_reasons_are_bounded() -> None:
    ring = StepRing(members_bytes=30)
    for number in range(300):
        ring.add(StepRecord(number, number, 1, reason=f"r{number}", members=pack_ids([1, 2, 3])))
    assert ring.members(299) == members_of(pack_ids([1, 2, 3]), 0)
    assert ring.members(298) is not None
    assert ring.members(297) is None
    rows = list(ring.rows())
    assert (ring.reason(rows[0]), ring.reason(rows[-1])) == ("r0", "other")


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
    record_metrics = RecordMetrics([MetricSource("m", lambda: [(node, NodeStats(), True)], lambda: status)], records)
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


def test_malformed_records_are_dropped_and_counted() -> None:
    records = RequestHistory()
    records.node_updated(
        info("d"), NodeUpdate(steps=[StepRecord(1, 2**70, 10), StepRecord(2, 10, 2**62), StepRecord(3, 20, 5)])
    )
    assert [row.number for row in records.rings()["d"].rows()] == [3]
    assert records.num_malformed == 2


# ---- many requests ---------------------------------------------------------------------------------------------------


def test_the_number_of_rows_of_all_requests_is_limited() -> None:
    records = RequestHistory(limits=HistoryLimits(rows=1000))
    for number in range(40):
        attempt = f"cmpl-{number}-0.0.0"
        records.accepted(f"cmpl-{number}", 32, 1)
        records.placed(attempt, "prefill-0", "decode-0", "r")
        events = [RequestEvent(attempt, kind, 1, serial=number) for kind in ("queued", *["transfer"] * 49)]
        records.node_updated(info("prefill-0"), NodeUpdate(events=events))
    assert [trace.id for trace in records.traces()] == [f"cmpl-{39 - index}" for index in range(20)]


def test_silent_nodes_are_dropped_when_others_join() -> None:
    now = [10**15]
    records = RequestHistory(lambda: now[0])
    for number in range(5):
        records.node_updated(info(f"decode-{number}"), NodeUpdate(stats=NodeStats()))
        now[0] += 3600 * 10**9
    assert list(records.rings()) == ["decode-4"]


def test_the_summary_shows_the_nodes_of_the_first_sample() -> None:
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


def test_the_timeline_counts_the_tokens_of_each_sample_and_prompt() -> None:
    records = RequestHistory()
    attempts = ["cmpl-a-0.0.0", "cmpl-a-0.1.0", "cmpl-a-1.0.0", "cmpl-a-1.1.0"]
    for _ in range(2):
        records.accepted("cmpl-a", 4, 2)
    for sample, (attempt, count) in enumerate(zip(attempts, (10, 30, 7, 4), strict=True)):
        records.placed(attempt, None, "d", "r")
        events = [RequestEvent(attempt, kind, 1, serial=sample) for kind in ("queued", "admitted", "first")]
        records.node_updated(info("d"), NodeUpdate(events=events))
        records.output("cmpl-a", sample, count)
    records.placed("cmpl-a-0.1.1", None, "d", "r")  # continues after 30 tokens
    records.node_updated(info("d"), NodeUpdate(events=[RequestEvent("cmpl-a-0.1.1", kind, 2, serial=9)
                                                       for kind in ("queued", "admitted", "first")]))  # fmt: skip
    records.output("cmpl-a", 1, 6)
    (trace,) = records.traces()
    decoded = sorted(span["tokens"] for span in trace.spans(records.rings().get) if span["kind"] == "decode")
    assert decoded == sorted([10 - 1, 30 - 1, 7 - 1, 4 - 1, 6 - 1])


def test_repeated_step_numbers_do_not_accumulate_members() -> None:
    records, node = RequestHistory(), info("d")
    slices = pack_ids(list(range(3 * 4096)))
    for _ in range(MEMBERS_BYTES // len(slices) + 2):
        records.node_updated(node, NodeUpdate(steps=[StepRecord(1, 10, 5, num_decodes=4096, members=slices)]))
    records.node_updated(node, NodeUpdate(steps=[StepRecord(2, 20, 5, num_decodes=1, members=slices[:12])]))
    ring = records.ring("d")
    assert ring is not None
    assert [len(ring.members(number) or ()) for number in (1, 2)] == [4096, 1]
