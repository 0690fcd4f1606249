"""A request history whose records and clock are set by a test, and a function that records one handed-off request."""

from dashboard.history import RequestHistory
from dashboard.routes import Dashboard
from scheduler.cost import CostModel
from shared.rpc.messages import NodeInfo, NodeStats, NodeUpdate, RequestEvent, StepRecord, pack_ids

MS = 1_000_000
BASE = 1_000_000 * MS  # small, so that milliseconds are exact as floats
MODEL = CostModel(overhead=0.001, per_decode=0.0005)  # 1 ms per step plus 0.5 ms per decode


def info(name: str, boot: str = "b", role: str = "", **facts: str) -> NodeInfo:
    role = role or name.partition("-")[0]
    return NodeInfo(name, boot, role, "h:1", "m", "f", 16, 64, 9, 512, 8, attributes=facts)


class World:
    """A history whose clock the test sets, in milliseconds after `base_ns`. Events of the kind `lost` do not arrive."""

    def __init__(self, lost: str = "", base_ns: int = BASE, rows_at_once: int = 200) -> None:
        self.now_ms, self.lost, self.base_ns = 0.0, lost, base_ns
        self.records = Dashboard(lambda: base_ns + round(self.now_ms * MS), rows_at_once)

    def at(self, ms: float) -> RequestHistory:
        self.now_ms = ms
        return self.records

    def event(self, node: str, kind: str, ms: float, attempt: str = "cmpl-a-0.0.0", **fields: object) -> None:
        if kind != self.lost:
            event = RequestEvent(attempt, kind, self.base_ns + round(ms * MS), **fields)
            self.records.node_updated(info(node), NodeUpdate(events=[event]))

    def push(self, start_ms: float, end_ms: float, num_bytes: int = 100) -> None:
        duration_us = round((end_ms - start_ms) * 1000)
        self.event("prefill-0", "transfer", end_ms, duration_us=duration_us, bytes=num_bytes, count=1, channel="shm")

    def step(
        self, node: str, number: int, ms: float, long_ms: float, prompt: int = 0, decodes: int = 0, *members: int
    ) -> None:
        record = StepRecord(number, self.base_ns + round(ms * MS), round(long_ms * 1000), reason="fixed")
        record.num_prefills, record.prefill_tokens, record.num_decodes = int(prompt > 0), prompt, decodes
        record.members = pack_ids(members or ([0, 0, prompt] if prompt else []))
        self.records.node_updated(info(node), NodeUpdate(steps=[record]))

    def model(self, node: str) -> None:
        self.records.node_updated(info(node), NodeUpdate(stats=NodeStats(cost=MODEL.packed())))


def handed_off(lost: str = "", base_ns: int = BASE, rows_at_once: int = 200) -> World:
    """Record a request: accepted at 0 ms, queued at 2, chunks from 5 to 25, KV received at 31, and decodes from 34."""
    world = World(lost, base_ns, rows_at_once)
    world.at(0).accepted("cmpl-a", 40, 1, "00-ab-cd-01")
    world.at(1).placed("cmpl-a-0.0.0", "prefill-0", "decode-0", "long prompt", 0.05, 0.02)
    world.event("prefill-0", "queued", 2, serial=0, count=40)
    world.event("decode-0", "queued", 6, serial=7, count=40)
    world.event("prefill-0", "admitted", 5, count=8)
    world.step("prefill-0", 0, 5, 10, 16)
    world.push(12, 20)
    world.step("prefill-0", 1, 15, 10, 16)
    world.event("prefill-0", "first", 25)
    world.at(26).output("cmpl-a", 0, 1)
    world.push(18, 30, 60)
    world.event("decode-0", "received", 31)
    world.event("prefill-0", "ended", 32, reason="handed_off")
    world.event("decode-0", "admitted", 34)
    world.event("decode-0", "first", 37)
    world.at(38).output("cmpl-a", 0, 1)
    return world


def finish(world: World) -> None:
    world.event("decode-0", "ended", 64, reason="length")
    world.at(65).output("cmpl-a", 0, 10)
    world.at(66).ended("cmpl-a", 0, "length")
