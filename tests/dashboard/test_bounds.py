"""The history withstands malformed records, stays bounded after many requests, and drops the queues of lost nodes."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from dashboard.chrome_trace import trace_events
from dashboard.history import HistoryLimits, RequestHistory
from dashboard.metrics import HandoffQueues, RecordMetrics
from dashboard.routes import Dashboard
from dashboard.step_ring import MEMBERS_BYTES
from router.metrics.node_metrics import NodeMetrics
from router.nodes.status import node_status
from scheduler.cost import CostModel
from shared.clock import now_ns
from shared.rpc.codec import decode, encode
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord, pack_ids

MS = 1_000_000


def info(name: str, boot: str = "b", role: str = "") -> NodeInfo:
    return NodeInfo(name, boot, role or name.partition("-")[0], "h:1", "m", "f", 16, 64, 9, 512, 8)


# ---- hostile nodes ---------------------------------------------------------------------------------------------------

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
    rows: list[Any] = [(node, NodeStats(), True)]
    status: dict[str, Any] = {"nodes": [node_status(node, NodeStats(), True)], "placements": {}, "requests": {}}
    metrics = CollectorRegistry()
    record_metrics = RecordMetrics(lambda: rows, "m", records)
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
    assert [row.number for row in records.steps("d")] == [3]
    assert records.num_malformed == 2


def test_a_model_of_numbers_that_no_device_has_is_none() -> None:
    fine = CostModel(0.1, 1e-5).packed()
    assert CostModel.unpacked(fine) == CostModel(0.1, 1e-5)
    for place in range(len(fine)):
        for number in (float("nan"), float("inf"), -1.0, 1e300):
            assert CostModel.unpacked([*fine[:place], number, *fine[place + 1 :]]) is None


# ---- many requests ---------------------------------------------------------------------------------------------------


def sizes(records: RequestHistory) -> dict[str, int]:
    return {name: len(value) for name, value in vars(records).items() if hasattr(value, "__len__")}


def serve(records: RequestHistory, number: int, num_chunks: int = 2) -> None:
    """One handed-off request from its acceptance to its end."""
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


class QueueObserver(HandoffQueues):
    def step(self, info: NodeInfo, record: StepRecord) -> None:
        pass

    def finished(self, id: str) -> None:
        pass


def test_records_are_as_large_after_many_requests_as_after_some() -> None:
    records = RequestHistory(limits=HistoryLimits(requests=50, transfers=40, rows=10_000, serials=60))
    queues = QueueObserver()
    records.subscribe(queues)
    for number in range(300):
        serve(records, number)
    some = sizes(records)
    for number in range(300, 900):
        serve(records, number)
    assert sizes(records) == some
    assert queues.num_open == 0


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
    assert records.nodes() == ["decode-4"]


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


# ---- queues ----------------------------------------------------------------------------------------------------------

P, D = info("p0", role="prefill"), info("d0", role="decode")


def event(kind: str) -> RequestEvent:
    return RequestEvent("cmpl-1-0.0.0", kind, 0)


def test_the_queues_of_a_lost_node_are_empty() -> None:
    queues = HandoffQueues()
    for node in (P, D):
        queues.event(node, event("queued"))
    queues.event(P, event("admitted"))
    assert len(queues.counts()) == 2
    queues.lost("p0")  # and comes back under its name
    queues.event(D, event("ended"))
    assert queues.counts() == {}
    assert queues.num_open == 0


def test_a_node_that_has_changed_its_role_still_ends_what_it_had() -> None:
    queues = HandoffQueues()
    queues.event(P, event("queued"))
    queues.event(P, event("admitted"))
    queues.event(info("p0", role="decode"), event("ended"))
    assert queues.counts() == {}
    assert queues.num_open == 0


def test_gauges_of_a_lost_node_are_not_shown_and_its_counters_are() -> None:
    rows = [(P, NodeStats(running=5, steps=7), False)]
    metrics = CollectorRegistry()
    status: dict[str, Any] = {"placements": {}, "requests": {}}
    metrics.register(NodeMetrics(lambda: rows, "m", lambda: status))
    text = generate_latest(metrics).decode()
    assert 'vllm:num_requests_running{engine="p0"' not in text
    assert 'baton_steps_total{engine="p0",model_name="m",role="prefill"} 7.0' in text
    assert 'baton_node_alive{engine="p0",model_name="m",role="prefill"} 0.0' in text


def test_steps_of_one_number_take_no_more_room_than_the_last_of_them() -> None:
    records, node = RequestHistory(), info("d")
    slices = pack_ids(list(range(3 * 4096)))
    for _ in range(MEMBERS_BYTES // len(slices) + 2):
        records.node_updated(node, NodeUpdate(steps=[StepRecord(1, 10, 5, num_decodes=4096, members=slices)]))
    records.node_updated(node, NodeUpdate(steps=[StepRecord(2, 20, 5, num_decodes=1, members=slices[:12])]))
    ring = records.ring("d")
    assert ring is not None
    assert [len(ring.members(number) or ()) for number in (1, 2)] == [4096, 1]
