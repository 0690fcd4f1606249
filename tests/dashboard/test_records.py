"""What the router makes of records: phases, transfer and interference of hand-made traces, and its bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.history import HistoryLimits, RequestHistory
from dashboard.step_ring import StepRing, members_of
from dashboard.trace import union
from scheduler.cost import CostModel
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord, pack_ids

MS = 1_000_000
BASE = 1_000_000 * MS  # small, so that milliseconds are exact as floats
# 1 ms a step and 0.5 ms a decode; prompts cost what the records say.
MODEL = CostModel(overhead=0.001, per_decode=0.0005)


def info(name: str, boot: str = "b") -> NodeInfo:
    return NodeInfo(name, boot, name.partition("-")[0], "h:1", "m", "f", 16, 64, 9, 512, 8)


class World:
    """Records under a clock that the test sets, in milliseconds since BASE."""

    def __init__(self, lost: str = "") -> None:
        """`lost`: events of this kind do not arrive."""
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
    """Accepted at 0; queued 2, chunks 5 to 25, landed 31, decodes 34 to 64, ended 66."""
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


def summary(world: World) -> dict[str, object]:
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
    assert isinstance(transfer, dict)
    assert (transfer["busy_ms"], transfer["hidden_ms"], transfer["exposed_ms"]) == (4.0, 4.0, 0.5)


def test_interference_is_what_mixed_steps_lasted_longer_than_their_decodes_alone() -> None:
    world = disaggregated()
    world.model("decode-0")
    world.step("decode-0", 0, 30, 4, prompt=16, decodes=2)  # before it decoded here
    world.step("decode-0", 1, 34.5, 10, prompt=16, decodes=2)  # 10 ms; alone 1 + 2 * 0.5 = 2 ms
    world.step("decode-0", 2, 45, 9, decodes=2)  # slow, but no prompt made it so
    world.step("decode-0", 3, 55, 5, prompt=16)  # decodes had to wait: all of it
    world.step("decode-0", 4, 65, 9, prompt=16, decodes=1)  # after its last token
    end(world)
    phases = summary(world)["phases_ms"]
    assert isinstance(phases, dict)
    assert phases["interference"] == pytest.approx(8 + 5)
    assert phases["decode"] == pytest.approx(30 - 13)
    assert sum(phases.values()) == pytest.approx(66)


def test_without_a_model_no_mixed_step_counts_as_interference() -> None:
    world = disaggregated()
    world.step("decode-0", 1, 34.5, 10, prompt=16, decodes=2)
    end(world)
    phases = summary(world)["phases_ms"]
    assert isinstance(phases, dict)
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
    assert isinstance(phases, dict)
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
    assert isinstance(phases, dict)
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
    assert isinstance(spans, list)
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
    # A step lasts 8 us: less than decodes alone, so only prompts without decodes delay anybody.
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
