"""Drive one simulated node with randomly drawn commands, and record the contents and times of all its steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from scheduler.budget import Budget, SloBudget
from scheduler.cost import CostModel
from scheduler.policy import POLICIES
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import NodeStats
from simulator.events import EventQueue
from simulator.node import TOKEN, SimulatedNode, StepTimes, Stretch

# Times are multiples of 2**-20, so that floating-point sums are exact and equal times compare equal.
UNIT = 2.0**-20
COST = CostModel(64 * UNIT, 4 * UNIT, 16.0, UNIT, UNIT, 2 * UNIT)
END_S = 8000 * UNIT
Members = list[tuple[str, int, int]]


@dataclass(frozen=True)
class Work:
    """The commands of one run: requests with their times, aborts, delays of handoffs, and times of reports."""

    policy: str
    limits: StepLimits
    num_rows: int
    block_tokens: int
    slo: bool
    arrivals: list[tuple[float, dict[str, object]]]
    aborts: list[tuple[float, int]]
    delay_s: float
    report_s: float


@st.composite
def work(draw: st.DrawFn) -> Work:
    random = Random(draw(st.integers(0, 2**32)))
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    stems = [[random.randrange(50) for _ in range(24)] for _ in range(2)]
    arrivals = []
    for number in range(draw(st.integers(1, 14))):
        prompt = random.choice(stems)[: random.randrange(25)] + [random.randrange(50) for _ in range(1 + number)]
        if random.random() < 0.4:  # such requests get equal blocks, because every step samples TOKEN
            prompt = stems[0] + [TOKEN] * random.randrange(9)
        way = random.random()
        at_s = random.randrange(1 + random.choice((0, 100, 4000))) * UNIT
        fields = {"id": f"r{number}", "tokens": prompt, "num_prompt": len(prompt)}
        fields |= {"max_tokens": random.choice((1, 2, 30, random.randrange(1, 90)))}
        fields |= {"priority": random.choice((0, 0, 0, 1)), "receive_kv": way < 0.25, "send_kv": way > 0.85}
        arrivals.append((at_s, fields))
    longest = max(len(fields["tokens"]) + fields["max_tokens"] for _, fields in arrivals)
    limits = StepLimits(
        draw(st.integers(1, 40)), draw(st.integers(1, 8)), draw(st.sampled_from([0, 0, 5])), draw(st.integers(1, 3))
    )
    num_rows = 2 + -(-longest // block_tokens) * draw(st.integers(1, 5))
    aborts = [(random.randrange(6000) * UNIT, random.randrange(len(arrivals))) for _ in range(random.randrange(3))]
    return Work(
        draw(st.sampled_from(sorted(POLICIES))),
        limits,
        num_rows,
        block_tokens,
        draw(st.booleans()),
        arrivals,
        aborts,
        random.randrange(300) * UNIT,
        random.randrange(50, 900) * UNIT,
    )


@dataclass
class Run:
    """One run of a node. As the node's listener, it records the members of each step, and the times at which each
    request samples its first token and ends."""

    work: Work
    skips: bool
    quantiles: Sequence[float] = (1.0,)
    members: list[Members] = field(default_factory=list)
    ended: list[tuple[float, str]] = field(default_factory=list)
    firsts: list[tuple[float, str]] = field(default_factory=list)
    reports: list[NodeStats] = field(default_factory=list)
    num_skipped: int = 0
    num_gathered: int = 0

    def __post_init__(self) -> None:
        work = self.work
        budget: Budget | None = SloBudget(120 * UNIT, 40, floor=2, first=8) if work.slo else None
        policy = POLICIES[work.policy]
        scheduler = self.scheduler = Scheduler(work.limits, work.num_rows, work.block_tokens, policy, budget)
        scheduler.cost = COST
        self.events = EventQueue()
        self.node = SimulatedNode(
            "node",
            self.events,
            scheduler,
            StepTimes(COST, 8 * UNIT, UNIT, quantiles=self.quantiles),
            self,
            skips=self.skips,
        )

    def run(self) -> "Run":
        requests = self.requests = [Request(**fields) for _, fields in self.work.arrivals]  # type: ignore[arg-type]
        for (at_s, _), request in zip(self.work.arrivals, requests, strict=True):
            request.tokens = list(request.tokens)
            self.events.at(at_s, self.node.post, lambda scheduler, request=request: scheduler.add(request))
        for at_s, number in self.work.aborts:
            self.events.at(at_s, self.node.post, lambda scheduler, request=requests[number]: scheduler.abort(request))
        self.events.at(self.work.report_s, self._report)
        self.events.run()
        assert self.scheduler.audit() == ""
        return self

    def _report(self) -> None:
        self.reports.append(self.node.stats())
        if self.scheduler.requests or self.events.now < END_S:
            self.events.at(self.events.now + self.work.report_s, self._report)
        assert self.events.now < 100 * END_S, "the requests do not end"

    # ---- NodeListener -------------------------------------------------------------------------------------------

    def on_receiving(self, node: SimulatedNode, requests: list[Request]) -> None:
        for request in requests:
            command = lambda scheduler, request=request: scheduler.kv_received(request, TOKEN)  # noqa: E731
            self.events.at(self.events.now + self.work.delay_s, node.post, command)

    def on_scheduled(self, node: SimulatedNode, step: Step) -> None:
        gathered = [(each.id, each.num_scheduled - 1, 1) for each in step.decodes]
        self.num_gathered += len(gathered)
        self.members.append(gathered + [(piece.request.id, piece.start, piece.count) for piece in step.slices])

    def on_outputs(self, node: SimulatedNode, step: Step, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            if output.request.state is RequestState.SENDING_KV:
                command = lambda scheduler, request=output.request: scheduler.abort(request)  # noqa: E731
                self.events.at(self.events.now + self.work.delay_s, node.post, command)
        new = [output.request for output in outputs if output.tokens]
        self.firsts += [(self.events.now, request.id) for request in new if request.num_generated == 1]
        self.on_ended(node, [output for output in outputs if output.finish])

    def on_stretch(self, node: SimulatedNode, steps: Stretch) -> None:
        running = node.scheduler.running
        rows = [[(each.id, each.num_scheduled + step, 1) for each in running] for step in range(steps.length)]
        self.members += rows
        self.num_skipped += steps.length

    def on_ended(self, node: SimulatedNode, outputs: list[StepOutput]) -> None:
        self.ended += [(self.events.now, output.request.id) for output in outputs]
