"""What the router keeps of one life of one node: its steps, whose they were, and how far its clock is off.

Nodes stamp their records with their own host's clock. The offset of a node's clock is the smallest difference between
the arrival and the sending of its latest heartbeats, which is too large by what the fastest of them took (a fraction
of a millisecond on a local network); a node whose offset is over 1 ms has its times corrected by it.
"""

from collections import deque
from dataclasses import dataclass, field

from router.history.step_ring import StepRing
from scheduler.cost import CostModel
from shared.rpc.messages import NodeStats

MAX_SERIALS = 16_384  # requests whose number in step records is known
HEARTBEATS = 128  # over which a clock's offset is taken
OFFSET_NS = 1_000_000  # below it, a clock counts as ours
MAX_NS = 2**62


@dataclass(slots=True)
class NodeHistory:
    incarnation_id: str
    steps: StepRing = field(default_factory=StepRing)
    serials: dict[int, str] = field(default_factory=dict)  # number in step records -> attempt
    delays_ns: deque[int] = field(default_factory=lambda: deque(maxlen=HEARTBEATS))
    offset_ns: int = 0
    updated_ns: int = 0

    def on_update(self, load: NodeStats, received_ns: int) -> None:
        self.updated_ns = received_ns
        if load.cost:
            self.steps.model = CostModel.unpacked(load.cost)
        if 0 < load.sent_ns < MAX_NS:
            self.delays_ns.append(received_ns - load.sent_ns)
            offset = min(self.delays_ns)
            self.offset_ns = offset if abs(offset) > OFFSET_NS else 0

    def name(self, serial: int, attempt: str) -> None:
        self.serials[serial] = attempt
        if len(self.serials) > MAX_SERIALS:
            del self.serials[next(iter(self.serials))]
